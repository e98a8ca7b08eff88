"""Choice of kernel, tile and grid: tiles fit into shared memory, and choices are those that were measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pylate_flash.kernels import tables
from pylate_flash.kernels.config import (
    copied_by_16_bytes,
    embedding_blocks,
    hopper_tail,
    hopper_tile,
    quantized_hopper_tile,
    single_columns,
    single_tile,
    stacked_tile,
)
from pylate_flash.kernels.forward import maxsim_forward
from pylate_flash.kernels.launch import check_grid
from pylate_flash.kernels.plan import ForwardPlan, forward_plan, run_length
from pylate_flash.kernels.plan_backward import Chunks, chunks_of, halved, lists_plan, soft_gradient_plan
from pylate_flash.kernels.plan_operations import fused_plan, fused_tile, meeting_plan, quantized_plan, soft_forward_plan
from pylate_flash.ops.chamfer import ChamferOptions, Sets, problem_of_sets
from pylate_flash.ops.maxsim_operator import with_lengths
from pylate_flash.ops.quantized import problem_of_quantized
from pylate_flash.problem import Options, Problem, Tensors, problem_of, replaced, rounded_total
from tests.kernels.recorder import SHARED_MEMORY, recorded

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Elements of a half-precision embedding that a tile holds, by embedding size.
HELD = {
    16: (16, 0), 40: (64, 0), 64: (64, 0), 72: (64, 16), 80: (64, 16), 96: (64, 32), 104: (128, 0), 128: (128, 0),
    144: (128, 16), 192: (128, 64), 200: (64, 0), 256: (64, 0), 300: (256, 64), 320: (256, 64), 384: (256, 128),
    400: (64, 0), 512: (64, 0), 768: (64, 0),
}  # fmt: skip


@pytest.mark.parametrize("size", HELD)
def test_embeddings_are_held_with_little_padding(size: int) -> None:
    blocks = embedding_blocks(9, size, 2)
    assert blocks[:2] == HELD[size]
    assert blocks.split == (blocks.held < size)
    float_blocks = embedding_blocks(9, size, 4)
    assert float_blocks.second == 0
    assert float_blocks.split == (size > 64)


@pytest.mark.parametrize("with_argmax", [False, True])
@pytest.mark.parametrize("major", [8, 9, 10])
@pytest.mark.parametrize("size", HELD)
def test_tiles_fit_into_shared_memory(size: int, major: int, with_argmax: bool) -> None:
    blocks = embedding_blocks(major, size, 2)
    budget = 99 << 10 if major == 8 else SHARED_MEMORY[10 * major]
    for rows in (33, 64, 128, 1000):
        tile = stacked_tile(major, size, 2, rows, with_argmax)
        loaded = tile.rows * (tile.num_stages if blocks.split else 1)
        assert 2 * blocks.held * (loaded + tile.num_stages * tile.columns) <= budget
        assert tile.num_stages >= 2
    for query_length in (1, 32, 64):
        tile = single_tile(major, size, 2, single_columns(query_length), False, False)
        loaded = tile.columns * (tile.num_stages if blocks.split else 1)
        assert 2 * blocks.held * (loaded + tile.num_stages * tile.rows) <= budget


def test_where_the_last_tile_is_narrower() -> None:
    tile = hopper_tile(9, 128, 2, False, False)
    tails = {7: 16, 30: 32, 64: 0, 77: 16, 96: 32, 97: 0, 180: 0, 256: 0, 333: 16, 350: 0, 400: 0}
    assert {length: hopper_tail(tile, length) for length in tails} == tails
    assert hopper_tail(hopper_tile(9, 256, 2, False, False), 77) == 0
    # Documents with different lengths.
    assert hopper_tail(tile, None) == 32


@pytest.mark.parametrize(
    ("size", "length", "columns"),
    [
        (128, 20, 32), (96, 48, 32), (128, 49, 64), (128, 128, 64), (128, 129, 128), (256, 20, 32), (128, None, 128),
        (384, 20, 32), (384, 49, 64), (384, None, 128),
    ],
)  # fmt: skip
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_tiles_of_8_bits_are_as_short_as_documents(
    size: int, length: int | None, columns: int, narrow: bool, affine: bool
) -> None:
    tile = quantized_hopper_tile(size, narrow, affine, length, False)
    # Affine tokens are made signed while others are copied.
    assert tile.columns == (min(columns, 64) if affine and size > 256 else columns)
    assert tile.num_stages > 3 or not affine
    assert tile.rows == (256 if size <= 128 and not narrow else 128)
    assert tile.num_stages * tile.columns * size <= SHARED_MEMORY[90] - (16 << 10)


@pytest.mark.parametrize(
    ("size", "strides", "item", "copied"),
    [
        (40, (480, 48, 48), 2, True),
        (40, (400, 40, 40), 2, True),
        (40, (8 << 30, 40, 40), 2, False),  # a stride of more than 32 bits is not multiplied
        (48, (16 << 30, 48, 48), 2, True),
        (44, (480, 48, 48), 2, False),
        (40, (440, 44, 44), 2, False),
        (48, (960, 48, 48), 1, True),
        (40, (480, 48, 48), 1, False),
        (48, (1120, 56, 56), 1, False),
        (40, (400, 40, 40), 4, True),
        (44, (440, 44, 44), 4, True),
        (42, (420, 42, 42), 4, False),
    ],
)
def test_what_is_copied_16_bytes_at_a_time(size: int, strides: tuple[int, ...], item: int, copied: bool) -> None:
    assert copied_by_16_bytes(size, strides, item) == copied


def problem(
    queries: tuple[int, ...], documents: tuple[int, ...], dtype: torch.dtype = BF16, argmax: bool = False
) -> Problem:
    return problem_of(
        Tensors(torch.empty(queries, dtype=dtype), torch.empty(documents, dtype=dtype)), Options(), argmax
    )


def far_apart(document_length: int) -> Problem:
    """Documents of `document_length` tokens of 1024 elements, which take no memory."""
    documents = torch.empty(1, 1, 1024).bfloat16().expand(2, 1, 1024)
    result = problem_of(Tensors(torch.empty(16, 32, 1024).bfloat16(), documents), Options())
    return result._replace(document_length=document_length)


def packed(n_queries: int, longest: int, normalize: bool = False, candidates: bool = False, size: int = 96) -> Problem:
    queries, documents = torch.empty(n_queries, 64, size).bfloat16(), torch.empty(longest + 30, size).bfloat16()
    bounds, own_bounds = torch.tensor([0, 10, 20, 30, longest + 30]), torch.tensor([0, 3, 4]) if candidates else None
    options = Options(max_document_length=longest, max_candidates=3, normalize=normalize)
    kwargs = {"documents_cu_seqlens": bounds, "candidates_cu_seqlens": own_bounds}
    return problem_of(Tensors(queries, documents, **kwargs), options)


def with_argmax(served: Problem) -> Problem:
    return served._replace(kind=replaced(served.kind, "with_argmax", True))


def normalised(served: Problem) -> Problem:
    return served._replace(kind=replaced(served.kind, "normalize", True))


def masked(served: Problem, masking: str = "exclude") -> Problem:
    return served._replace(kind=replaced(replaced(served.kind, "masking", masking), "documents_mask", torch.bool))


def quantized(
    queries: tuple[int, ...], documents: tuple[int, ...], dtype: torch.dtype = torch.int8, quantize_queries: bool = True
) -> Problem:
    tensors = Tensors(torch.empty(queries).bfloat16(), torch.empty(documents, dtype=dtype))
    return problem_of_quantized(tensors, Options(), quantize_queries)


def packed_quantized(candidates: list[int] | None = None) -> Problem:
    bounds, own_bounds = torch.tensor([0, 10, 20, 30, 9030]), None if candidates is None else torch.tensor(candidates)
    queries, documents = torch.empty(3, 80, 96).half(), torch.empty(9030, 96, dtype=torch.int8)
    tensors = Tensors(queries, documents, None, None, None, bounds, own_bounds)
    return problem_of_quantized(tensors, Options(0, 9000, 2), True)


def unaligned_quantized() -> Problem:
    shifted = torch.empty(40 * 180 * 128 + 1, dtype=torch.int8)[1:].view(40, 180, 128)
    return problem_of_quantized(Tensors(torch.empty(32, 32, 128).bfloat16(), shifted), Options(), True)


# Problems that the Hopper kernel serves.
HOPPER: list[tuple[Callable[[Problem], ForwardPlan], Problem]] = [
    (forward_plan, problem((16, 32, 128), (40, 180, 128))),
    (forward_plan, problem((16, 32, 128), (40, 180, 128), F16, True)),
    (forward_plan, problem((2, 8, 128), (40, 180, 128), BF16, True)),
    (forward_plan, problem((5, 32, 48), (40, 7, 48))),
    (forward_plan, problem((16, 32, 40), (40, 7, 40))),
    (forward_plan, problem((1, 300, 256), (40, 180, 256))),
    (forward_plan, problem((5, 32, 320), (40, 64, 320), BF16, True)),
    (forward_plan, problem((4, 150, 128), (4, 5, 180, 128))),
    (forward_plan, problem((16, 32, 128), (40, 180, 128), F32)),
    (forward_plan, problem((16, 32, 128), (40, 180, 128), F32, True)),
    (forward_plan, problem((16, 32, 256), (40, 180, 256), F32)),
    (forward_plan, problem((3, 32, 1360), (40, 180, 1360), F32, True)),
    (forward_plan, problem((16, 32, 42), (40, 180, 42), F32)),
    (forward_plan, problem((4, 150, 256), (4, 20, 180, 256), F32)),
    (forward_plan, problem((2, 1, 128), (1, 1, 128), F32)),
    (forward_plan, problem((2, 32, 44), (200, 180, 44), F32)),
    (forward_plan, problem((4, 150, 64), (4, 20, 180, 64), F32)),
    (forward_plan, problem((2, 1, 392), (40, 7, 392))),
    (forward_plan, problem((1, 1024, 4096), (4, 300, 4096), F16, True)),
    (forward_plan, problem((1, 9000, 2048), (2, 64, 2048))),
    (forward_plan, far_apart((1 << 21) - 1)),
    (forward_plan, packed(16, 40)),
    (forward_plan, packed(16, 2048, True)),
    (soft_forward_plan, problem((16, 32, 128), (40, 180, 128))),
    (soft_forward_plan, problem((1, 1000, 96), (40, 180, 96), F16)),
    (soft_forward_plan, problem((2, 32, 40), (40, 7, 40))),
    (soft_forward_plan, problem((4, 150, 320), (4, 5, 180, 320))),
    (quantized_plan, quantized((32, 32, 128), (40, 180, 128))),
    (quantized_plan, quantized((32, 32, 128), (40, 250, 128))),
    (quantized_plan, quantized((1, 1024, 128), (40, 1024, 128), torch.float8_e4m3fn)),
    (quantized_plan, quantized((3, 32, 96), (40, 7, 96))),
    (quantized_plan, quantized((32, 32, 256), (40, 180, 256))),
    (quantized_plan, quantized((32, 32, 272), (40, 180, 272))),
    (quantized_plan, quantized((32, 32, 128), (40, 180, 128), torch.uint8)),
    (quantized_plan, quantized((4, 150, 16), (4, 5, 180, 16))),
    (quantized_plan, packed_quantized()),
]
FEW_FLOATS = "float32 of at most 128 elements without argmax"
# Problems that other kernels serve on Hopper, and a part of the reason.
OTHERS: list[tuple[Callable[[Problem], ForwardPlan], Problem, str, str]] = [
    (forward_plan, problem((2, 32, 256), (40, 180, 256), F32), "stacked", FEW_FLOATS),
    (forward_plan, problem((2, 32, 128), (40, 180, 128), F32, True), "stacked", FEW_FLOATS),
    (forward_plan, problem((2, 32, 42), (40, 180, 42), F32), "stacked", FEW_FLOATS),
    (forward_plan, problem((16, 32, 1368), (40, 180, 1368), F32), "stacked", "of many query tokens"),
    (forward_plan, problem((1, 32, 128), (150, 180, 128), F32, True), "single", "one query"),
    (forward_plan, problem((16, 32, 420), (40, 180, 420)), "stacked", "queries cannot be copied 16 bytes at a time"),
    (forward_plan, far_apart(1 << 21), "stacked", "too far apart"),
    (forward_plan, problem((16, 32, 44), (40, 7, 44)), "stacked", "copied 16 bytes at a time"),
    (forward_plan, packed(16, 9000), "stacked", "in segments"),
    (forward_plan, problem((1, 32, 128), (40, 180, 128)), "single", "one query"),
    (forward_plan, problem((16, 32, 128), (16, 5, 180, 128)), "single", "documents of its own"),
    (soft_forward_plan, problem((16, 32, 128), (40, 180, 128), F32), "stacked", "half precision"),
    (soft_forward_plan, problem((1, 32, 128), (40, 180, 128)), "stacked", "fewer than 64 query tokens"),
    (soft_forward_plan, problem((16, 32, 128), (16, 5, 180, 128)), "stacked", "fewer than 64 query tokens"),
    (soft_forward_plan, problem((16, 32, 44), (40, 7, 44)), "stacked", "copied 16 bytes at a time"),
    (soft_forward_plan, problem((16, 32, 512), (40, 180, 512)), "stacked", "at most 384 dimensions"),
    (soft_forward_plan, packed(2, 260, candidates=True), "stacked", "candidates"),
    (quantized_plan, quantized((32, 32, 128), (40, 180, 128), torch.int8, False), "stacked", "8 bits by 8 bits"),
    (quantized_plan, quantized((32, 32, 400), (40, 180, 400)), "stacked", "at most 384 dimensions"),
    (quantized_plan, quantized((32, 32, 72), (40, 180, 72)), "stacked", "copied 16 bytes at a time"),
    (quantized_plan, unaligned_quantized(), "stacked", "copied 16 bytes at a time"),
    (quantized_plan, quantized((2, 32, 128), (40, 180, 128)), "stacked", "fewer than 65 query tokens"),
    (quantized_plan, quantized((32, 32, 128), (32, 50, 180, 128)), "short", "at most 64 tokens"),
    (quantized_plan, quantized((32, 32, 128), (32, 5, 180, 128)), "stacked", "fewer than 65 query tokens"),
    (quantized_plan, quantized((32, 32, 128), (32, 50, 180, 128), torch.float8_e4m3fn), "short", "at most 64"),
    (quantized_plan, quantized((32, 60, 128), (32, 50, 180, 128)), "stacked", "fewer than 65"),
    (quantized_plan, quantized((32, 60, 128), (32, 90, 180, 128)), "short", "at most 64"),
    (quantized_plan, quantized((32, 60, 128), (32, 90, 180, 128), torch.float8_e4m3fn), "stacked", "fewer than 65"),
    (quantized_plan, quantized((1, 60, 48), (3000, 180, 48), torch.uint8), "short", "at most 64"),
    (quantized_plan, packed_quantized([0, 2, 3, 4]), "stacked", "candidates"),
]


@pytest.mark.parametrize("capability", [80, 90, 100], indirect=True)
@pytest.mark.parametrize(("plan_of", "served"), HOPPER)
def test_what_the_hopper_kernel_serves(plan_of: Callable, served: Problem, capability: int) -> None:
    plan = plan_of(served)
    assert plan.kernel == ("hopper" if capability == 90 else "stacked"), plan.reason
    assert not plan.in_segments
    if capability == 90:
        group = plan.padded // plan.n_sums
        assert plan.config.group == group
        parts = 2 if plan.config.stream else plan.tile.parts
        assert group <= plan.tile.rows // parts, "a sum lies within one part, and those of a stream are the same"


@pytest.mark.parametrize("capability", [90], indirect=True)
@pytest.mark.parametrize(
    ("n_queries", "size", "served"),
    [
        (1, 128, "single"),
        (2, 128, "stacked"),
        (3, 128, "hopper"),
        (3, 68, "hopper"),
        (4, 64, "stacked"),
        (32, 64, "hopper"),
    ],
)
def test_float32_by_products_of_tf32(n_queries: int, size: int, served: str, capability: int, monkeypatch) -> None:
    """Upper halves are faster for many rows (fewer for long embeddings), however few documents there are."""
    monkeypatch.setattr("pylate_flash.problem.float32_precision", lambda: "tf32")
    for n_documents in (1, 3000):
        plan = forward_plan(problem((n_queries, 32, size), (n_documents, 180, size), F32))
        assert plan.kernel == served
        assert plan.decomposed is not None or plan.config.precision == "tf32"


@pytest.mark.parametrize("capability", [90], indirect=True)
@pytest.mark.parametrize(
    ("queries", "documents", "kernel"),
    [
        ((2, 32, 128), (3000, 180, 128), "hopper"), ((1, 32, 128), (3000, 180, 128), "hopper"),
        ((1, 32, 128), (111, 180, 128), "hopper"), ((1, 32, 48), (1000, 300, 48), "hopper"),
        # Norms are computed from the tokens of the products; for a stream, small and long documents are read once more.
        ((1, 32, 48), (233, 300, 48), "single"), ((1, 32, 64), (111, 180, 64), "single"),
        ((1, 32, 48), (600, 100, 48), "hopper"), ((2, 32, 128), (2, 100, 180, 128), "single"),
    ],
)  # fmt: skip
def test_float32_that_is_normalised(queries: tuple, documents: tuple, kernel: str, capability: int) -> None:
    served = problem(queries, documents, F32)
    assert forward_plan(normalised(served)).kernel == kernel


@pytest.mark.parametrize("capability", [90], indirect=True)
@pytest.mark.parametrize(
    ("query_length", "documents", "kernel", "kernel_of_masked"),
    [
        (32, (20_000, 30), "hopper", "hopper"), (32, (20_000, 33), "single", "single"),
        # Documents that are not masked are read once more only if they are many.
        (32, (3000, 30), "single", "hopper"), (32, (2000, 30), "single", "single"),
        (8, (20_000, 16), "hopper", "hopper"), (8, (20_000, 20), "single", "single"),
        (64, (20_000, 60), "hopper", "hopper"),
    ],
)  # fmt: skip
def test_one_query_with_norms_and_short_documents(
    query_length: int, documents: tuple[int, int], kernel: str, kernel_of_masked: str, capability: int
) -> None:
    """Whose tiles of the single kernel would stay half empty."""
    served = normalised(problem((1, query_length, 64), (*documents, 64)))
    assert forward_plan(served).kernel == kernel
    assert forward_plan(masked(served)).kernel == kernel_of_masked


@pytest.mark.parametrize("capability", [90], indirect=True)
@pytest.mark.parametrize(("plan_of", "served", "kernel", "reason"), OTHERS)
def test_what_other_kernels_serve(
    plan_of: Callable, served: Problem, kernel: str, reason: str, capability: int
) -> None:
    plan = plan_of(served)
    assert plan.kernel == kernel
    assert reason in plan.reason


@pytest.mark.parametrize("capability", [90], indirect=True)
@pytest.mark.parametrize(
    ("served", "rows", "columns", "tail"),
    [
        (quantized((32, 32, 128), (40, 180, 128)), 256, 128, 64),
        (quantized((32, 32, 128), (40, 250, 128)), 256, 128, 0),
        (quantized((32, 32, 128), (40, 77, 128)), 256, 64, 32),
        (quantized((1, 1024, 128), (40, 1024, 128), torch.float8_e4m3fn), 256, 128, 0),
        (quantized((3, 32, 96), (40, 30, 96)), 128, 32, 0),
        (quantized((32, 32, 256), (40, 180, 256)), 128, 128, 64),
        (quantized((32, 32, 384), (40, 60, 384)), 128, 64, 0),
        (packed_quantized(), 256, 128, 64),
    ],
)
def test_tiles_of_8_bits(served: Problem, rows: int, columns: int, tail: int, capability: int) -> None:
    plan = quantized_plan(served)
    assert (plan.tile.rows, plan.tile.columns, plan.config.tail) == (rows, columns, tail)
    assert plan.config.starts_early


def short_quantized(length: int, dtype: torch.dtype = torch.int8) -> Problem:
    bounds, values = torch.arange(5) * length, torch.empty(4 * length, 128, dtype=dtype)
    tensors = Tensors(torch.empty(8, 32, 128).half(), values, documents_cu_seqlens=bounds)
    return problem_of_quantized(tensors, Options(max_document_length=length), True)


@pytest.mark.parametrize("capability", [90], indirect=True)
@pytest.mark.parametrize(
    ("served", "streamed"),
    [
        (packed(16, 180), True),
        (packed(2, 30, normalize=True), True),
        (packed(16, 2048), True),
        (packed(16, 180)._replace(kind=replaced(packed(16, 180).kind, "offset_unit", 8)), True),
        (with_argmax(packed(16, 180)), False),
        # Token offsets are 32-bit integers, relative to the start of a program.
        (packed(16, 180)._replace(document_strides=(0, 0, 1 << 16)), False),
        (packed(16, 180)._replace(document_strides=(0, 0, 1 << 15)), True),
        (problem((16, 32, 128), (900, 180, 128)), True),
        (problem((4, 150, 128), (4, 900, 180, 128)), True),
        (masked(problem((4, 32, 128), (900, 180, 128))), True),
        (masked(problem((4, 150, 128), (4, 90, 180, 128)), "zero"), True),
        (problem((16, 32, 128), (900, 180, 128), argmax=True), False),
        # Too little work to pay for the start of a stream.
        (problem((16, 32, 128), (600, 180, 128)), False),
        (masked(problem((16, 32, 128), (80, 180, 128))), False),
        # Few query rows, and documents of equal length that are not short.
        (problem((4, 32, 128), (9000, 180, 128)), False),
        (problem((4, 32, 128), (9000, 64, 128)), True),
        (problem((5, 32, 320), (9000, 64, 320)), False),
        (problem((5, 32, 320), (9000, 32, 320)), True),
        (problem((9, 32, 320), (9000, 64, 320)), True),
        # Strided documents: every other document, or group of documents.
        (problem((16, 32, 128), (900, 180, 128))._replace(document_strides=(0, 360 * 128, 128)), False),
        (problem((4, 150, 128), (4, 900, 180, 128))._replace(document_strides=(1800 * 1280, 180 * 128, 128)), False),
        (problem((16, 32, 128), (900, 180, 128))._replace(document_strides=(0, 180 << 17, 1 << 17)), False),
        (short_quantized(180), True),
        (short_quantized(300), False),
        (quantized((32, 32, 128), (900, 180, 128)), False),
        (masked(quantized((32, 32, 128), (900, 180, 128))), True),
        (masked(quantized((32, 32, 128), (900, 300, 128))), False),
        (masked(quantized((32, 32, 128), (40, 180, 128))), False),
        # Documents that are short, or leave many columns of full tiles of 32, 64 or 128 columns, or half tiles, empty.
        *((quantized((32, 32, 128), (4000, n, 128)), True) for n in (9, 32, 40, 72, 131)),
        *((quantized((32, 32, 128), (4000, n, 128)), False) for n in (60, 64, 128, 180)),
        (quantized((32, 32, 128), (40, 9, 128)), False),
        # Long embeddings: the same with tiles of 256 columns, however few documents there are.
        *((problem((8, 32, 768), (4, n, 768)), True) for n in (1, 128, 200, 300, 400)),
        *((problem((8, 32, 768), (4, n, 768)), False) for n in (240, 256, 1000)),
        (masked(problem((8, 32, 768), (4, 256, 768))), True),
        (packed(16, 256, size=768), True),
        (problem((8, 32, 768), (4, 200, 768), argmax=True), False),
    ],
)
def test_documents_are_one_stream(served: Problem, streamed: bool, capability: int) -> None:
    plan = forward_plan(served) if served.kind.quantized is None else quantized_plan(served)
    assert (plan.kernel, plan.config.stream) == ("hopper", streamed)
    assert plan.reason.endswith("documents as one stream") == streamed
    assert not (streamed and (plan.config.tail or plan.config.starts_early))
    if streamed and served.kind.quantized is None:
        assert plan.tile.rows == 64 * plan.tile.parts


@given(
    st.integers(1, 20_000), st.integers(1, 600), st.integers(1, 300), st.integers(1, 4), st.integers(1, 100),
    st.integers(1, 2000),
)  # fmt: skip
def test_programs_leave_few_sms_without_work(
    documents: int, programs: int, sms: int, per_sm: int, longest: int, length: int
) -> None:
    def tokens(run: int) -> int:
        return -(-programs * -(-documents // run) // (per_sm * sms)) * (run * length + tables.PROGRAM_COST)

    before = run_length(documents, programs, sms, per_sm, longest)
    after = run_length(documents, programs, sms, per_sm, longest, length)
    assert 1 <= after <= before
    assert after == before or tokens(after) < 0.95 * tokens(before)


def test_many_row_blocks_meet_few_documents_in_more_waves() -> None:
    assert run_length(163, 142, 132, 1, 64) == 82
    assert run_length(163, 142, 132, 1, 64, 124) == 33
    # With short documents, starting more programs would cost more than it saves.
    assert run_length(163, 142, 132, 1, 64, 30) == 82
    # Nearly as many programs as SMs.
    assert run_length(1024, 128, 132, 1, 64, 180) == run_length(1024, 128, 132, 1, 64) == 64


def one_packed(n: int, length: int, size: int, **options: Any) -> Problem:
    documents, bounds = torch.empty(1, size).half().expand(n * length, size), torch.arange(n + 1) * length
    tensors = Tensors(torch.empty(1, 32, size).half(), documents, documents_cu_seqlens=bounds)
    arguments = problem_of(tensors, Options(max_document_length=length, **options))
    return arguments._replace(document_strides=(0, 0, size), aligned=True)


NORMS = {"normalize": True}


@pytest.mark.parametrize("capability", [80, 90], indirect=True)
@pytest.mark.parametrize(
    ("served", "on_hopper", "rows"),
    [
        (problem((1, 32, 192), (900, 180, 192)), True, 128),
        (masked(problem((1, 32, 384), (900, 180, 384))), True, 128),
        (problem((1, 32, 768), (900, 180, 768)), True, 64),
        (problem((1, 64, 768), (900, 256, 768)), True, 64),
        (problem((1, 32, 128), (900, 180, 128)), False, 64),
        (problem((1, 32, 192), (900, 180, 192), argmax=True), False, 32),
        (problem((1, 32, 192), (900, 180, 192), F32), False, 64),
        (problem((2, 32, 192), (2, 900, 180, 192)), True, 128),
        (problem((2, 32, 768), (2, 900, 180, 768)), False, 64),
        (one_packed(900, 180, 192), True, 128),
        (one_packed(100, 180, 192), False, 32),
        # Norms are computed from tiles that are in shared memory anyway, if these are full.
        (one_packed(900, 180, 192, **NORMS), False, 64),
        (one_packed(4000, 20, 192, **NORMS), True, 128),
        (one_packed(900, 180, 768, **NORMS), False, 64),
        (one_packed(4000, 20, 768, **NORMS), True, 64),
        # Documents may be longer than one program should score.
        (one_packed(2, 60_000, 192), False, 32),
        (one_packed(1000, 20, 192), True, 128),
        # Up to 128 elements: short documents, or a mask that excludes much of many documents.
        (problem((1, 32, 128), (3000, 40, 128)), True, 128),
        (problem((1, 32, 128), (3000, 41, 128)), False, 64),
        (problem((1, 16, 128), (3000, 40, 128)), False, 64),
        (problem((2, 32, 128), (2, 3000, 40, 128)), False, 64),
        (normalised(problem((1, 32, 128), (3000, 40, 128))), False, 64),
        (masked(problem((1, 32, 64), (400, 180, 64))), True, 128),
        (masked(problem((1, 32, 64), (300, 180, 64))), False, 64),
        (masked(problem((1, 32, 64), (3000, 16, 64))), True, 128),
        (masked(problem((2, 32, 64), (2, 3000, 16, 64))), False, 64),
    ],
)
def test_short_queries_on_hopper(served: Problem, on_hopper: bool, rows: int, capability: int) -> None:
    plan = forward_plan(served)
    assert plan.kernel == ("hopper" if on_hopper and capability == 90 else "single"), plan.reason
    if capability == 90:
        assert plan.tile.rows == rows


@pytest.mark.parametrize("capability", [80, 90], indirect=True)
@pytest.mark.parametrize(
    ("served", "on_hopper", "elsewhere"),
    [
        (quantized((1, 32, 128), (180, 180, 128)), "stacked", "stacked"),
        (quantized((1, 32, 320), (190, 180, 320)), "hopper", "stacked"),
        (masked(quantized((1, 32, 128), (190, 180, 128))), "hopper", "stacked"),
        (masked(quantized((1, 32, 128), (190, 180, 128), torch.uint8)), "hopper", "stacked"),
        # Cases that `forward.short` serves too, on all or on other devices.
        (quantized((1, 32, 128), (3000, 180, 128)), "short", "short"),
        (quantized((1, 33, 128), (3000, 180, 128)), "hopper", "short"),
        # Many tokens: masked documents too long for a stream, and wide queries without a mask.
        (masked(quantized((1, 32, 128), (6000, 180, 128))), "hopper", "stacked"),
        (masked(quantized((1, 32, 128), (6000, 193, 128))), "stacked", "stacked"),
        (masked(quantized((1, 32, 128), (5000, 193, 128))), "hopper", "stacked"),
        (masked(quantized((1, 32, 192), (6000, 193, 192))), "hopper", "stacked"),
        (quantized((1, 33, 128), (6000, 180, 128)), "short", "short"),
        (quantized((1, 33, 128), (12_000, 48, 128)), "short", "short"),
        (quantized((1, 33, 128), (3000, 180, 128), torch.uint8), "short", "short"),
        (quantized((1, 32, 192), (20_000, 16, 192)), "short", "short"),
        (quantized((1, 32, 192), (10_000, 16, 192)), "hopper", "short"),
        (quantized((1, 32, 192), (20_000, 17, 192)), "hopper", "short"),
    ],
)
def test_one_query_in_8_bits(served: Problem, on_hopper: str, elsewhere: str, capability: int) -> None:
    result = quantized_plan(served)
    assert result.kernel == (on_hopper if capability == 90 else elsewhere), result.reason


@pytest.mark.parametrize("capability", [90], indirect=True)
@pytest.mark.parametrize(
    ("dtype", "length", "parts"),
    [(torch.int8, 48, 4), (torch.int8, 47, 2), (torch.float8_e4m3fn, 180, 4), (torch.uint8, 180, 2)],
)
def test_four_groups_of_warps_share_a_stream_in_8_bits_that_is_signed_and_not_short(
    dtype: torch.dtype, length: int, parts: int, capability: int
) -> None:
    plan = quantized_plan(short_quantized(length, dtype))
    assert (plan.config.stream, plan.tile.rows, plan.tile.parts) == (True, 256, parts)


@pytest.mark.parametrize("capability", [90], indirect=True)
@pytest.mark.parametrize("candidates", [False, True])
@pytest.mark.parametrize(
    ("n", "length", "small"), [(60, 60, True), (60, 64, False), (4096, 64, False), (4097, 64, True)]
)
@pytest.mark.parametrize("normalize", [False, True])
def test_many_or_short_packed_documents_have_smaller_programs(
    n: int, length: int, small: bool, candidates: bool, normalize: bool, capability: int
) -> None:
    """If every document is scored against one query, and tiles are read in one layout alone."""
    tensors = Tensors(torch.empty(1 + candidates, 32, 8).half(), torch.empty(n * length, 8).half())
    own_bounds = torch.tensor([0, 3, n]) if candidates else None
    tensors = tensors._replace(documents_cu_seqlens=torch.arange(n + 1) * length, candidates_cu_seqlens=own_bounds)
    options = Options(max_document_length=length, max_candidates=n, normalize=normalize)
    plan = forward_plan(problem_of(tensors, options))
    assert plan.kernel == "single"
    assert plan.tile.rows == (tables.SINGLE_PACKED if small and not normalize else tables.SINGLE).rows


# Documents, document length, query length, embedding size, and whether `forward.short` serves them.
SHORT_DOCUMENTS = [
    (5000, 20, 32, 128, True), (4500, 20, 32, 128, False), (2500, 42, 32, 128, False), (14_000, 78, 32, 128, True),
    (12_000, 78, 32, 128, False), (14_000, 82, 32, 128, False), (5000, 20, 33, 128, False), (5000, 20, 64, 64, True),
    (5000, 20, 32, 136, False), (5000, 20, 16, 256, True),
]  # fmt: skip


@pytest.mark.parametrize("capability", [80, 90], indirect=True)
@pytest.mark.parametrize(("n", "length", "query_length", "size", "short"), SHORT_DOCUMENTS)
def test_one_query_walks_many_short_packed_documents_as_one_row(
    n: int, length: int, query_length: int, size: int, short: bool, capability: int
) -> None:
    documents = torch.empty(1, size).bfloat16().expand(n * length, size)
    bounds = torch.arange(n + 1, dtype=torch.int32) * length
    tensors = Tensors(torch.empty(1, query_length, size).bfloat16(), documents, documents_cu_seqlens=bounds)

    def served(tensors: Tensors, longest: int = length, with_argmax: bool = False, normalize: bool = False) -> str:
        # As if the rows were contiguous.
        arguments = problem_of(tensors, Options(0, longest, normalize=normalize), with_argmax)
        return forward_plan(arguments._replace(document_strides=(0, 0, size), aligned=True)).kernel

    otherwise = "hopper" if capability == 90 and size * query_length > 4096 else "single"
    assert served(tensors) == ("short" if short else otherwise)
    assert served(tensors, longest=5000) == "single"
    assert served(tensors, with_argmax=True) == "single"
    columns = 32 if query_length <= 32 else 64
    assert served(tensors, normalize=True) == (
        "hopper" if capability == 90 and (size > 128 or length <= columns) else "single"
    )
    wide = tensors._replace(queries=tensors.queries.float(), documents=documents.float())
    for normalize in (False, True):
        assert served(wide, normalize=normalize) == ("hopper" if capability == 90 and size <= 128 else "single")
    assert served(wide, longest=60_000) == "single", "a document may be one that takes segments"


@pytest.mark.parametrize(
    ("n_queries", "lengths", "kernel", "in_segments"),
    [
        (1, [20] * 5000, "short", False),
        (1, [200] * 200, "single", True),  # a document of 8192 tokens would take longer than all others
        (1, [200] * 50_000, "single", False),
        (8, [200] * 200, "hopper", False),
        (8, [8000, *[30] * 500], "hopper", False),
        (8, [9000] * 6, "stacked", True),
    ],
)
@pytest.mark.parametrize("capability", [90], indirect=True)
def test_documents_of_lengths_that_nobody_tells(
    n_queries: int, lengths: list[int], kernel: str, in_segments: bool, capability: int
) -> None:
    """Only their total bounds the longest document."""
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    documents = torch.empty(1, 128).bfloat16().expand(sum(lengths), 128)
    tensors = Tensors(torch.empty(n_queries, 32, 128).bfloat16(), documents, documents_cu_seqlens=bounds)

    def plan(longest: int) -> ForwardPlan:
        arguments = problem_of(tensors, Options(max_document_length=longest))
        return forward_plan(arguments._replace(document_strides=(0, 0, 128), aligned=True))

    unknown = plan(rounded_total(sum(lengths)))
    assert (unknown.kernel, unknown.in_segments) == (kernel, in_segments)
    # A maximum that is passed is taken as it is.
    assert plan(max(lengths)).in_segments == (max(lengths) > 2048)


@pytest.mark.parametrize("capability", [90], indirect=True)
@pytest.mark.parametrize("n_queries", [3, 4])
def test_argmax_are_found_in_whole_tiles(n_queries: int, capability: int) -> None:
    shapes = (n_queries, 32, 128), (40, 77, 128)
    tails = [forward_plan(problem(*shapes, BF16, argmax)).config.tail for argmax in (False, True)]
    assert tails == [16, 0]


@pytest.mark.parametrize("capability", [90], indirect=True)
def test_a_tensor_that_is_not_aligned_is_served(capability: int) -> None:
    """Copies of 16 bytes need addresses that are multiples of 16: other tensors go to the plain kernel."""
    queries, storage = torch.empty(8, 32, 128, dtype=F16), torch.empty(4 * 50 * 128 + 1, dtype=F16)
    for start, name in ((0, "hopper"), (1, "stacked")):
        tensors = Tensors(queries, storage[start : start + 4 * 50 * 128].view(4, 50, 128))
        with recorded() as launches:
            maxsim_forward(problem_of(tensors, Options()), tensors)
        assert set(launches) == {name}


@pytest.mark.parametrize(
    ("query_length", "padded", "group"),
    [(1, 1, 1), (2, 2, 1), (7, 8, 8), (12, 12, 1), (24, 24, 8), (32, 32, 32), (33, 33, 1), (36, 40, 8), (77, 80, 16)],
)
def test_few_rows_are_padding(query_length: int, padded: int, group: int) -> None:
    plan = forward_plan(problem((96, query_length, 128), (40, 180, 128)))
    assert (plan.padded, plan.n_sums) == (padded, padded // group)


def test_where_storing_every_row_would_cost_more_than_padding() -> None:
    """Short documents (by mean length if packed), and sums that take much memory."""
    bounds = torch.tensor([0, 10, 20, 30, 10000])
    queries, tokens = torch.empty(96, 33, 16), torch.empty(10000, 16)
    for n_documents, padded in ((3, 40), (4, 33)):
        tensors = Tensors(queries, tokens[: 30 * n_documents], documents_cu_seqlens=bounds[: n_documents + 1])
        if n_documents == 4:
            tensors = tensors._replace(documents=tokens)
        assert forward_plan(problem_of(tensors, Options(max_document_length=9970))).padded == padded
    assert forward_plan(problem((96, 33, 16), (40, 63, 16), F32)).padded == 40
    assert forward_plan(problem((96, 33, 16), (40, 64, 16), F32)).padded == 33
    many = torch.empty(1, 64, 16).expand(21300, 64, 16)
    for n_documents, padded in ((21000, 33), (21300, 40)):
        assert forward_plan(problem_of(Tensors(queries, many[:n_documents]), Options())).padded == padded


CPU = torch.device("cpu")


@pytest.mark.parametrize("capability", [80, 90, 100], indirect=True)
@pytest.mark.parametrize(
    ("rows", "tokens", "size", "d_model", "dtype", "served"),
    [
        (1, 1, 8, 8, F16, True),
        (32, 300, 128, 768, BF16, True),
        (128, 1, 128, 768, BF16, True),
        (129, 1, 128, 768, BF16, False),
        (32, 0, 128, 768, BF16, False),
        (32, 1 << 31, 128, 768, BF16, False),
        (32, 300, 136, 768, BF16, False),
        (32, 300, 100, 768, BF16, False),
        (32, 300, 128, 770, BF16, False),
        (32, 300, 128, 768, F32, False),
    ],
)
def test_what_the_fused_projection_serves(
    rows: int, tokens: int, size: int, d_model: int, dtype: torch.dtype, served: bool, capability: int
) -> None:
    plan = fused_plan(rows, tokens, (size, d_model), dtype, CPU)
    assert (plan is not None) == (served and capability == 90)


@pytest.mark.parametrize("rows", [1, 32, 100, 128])
@pytest.mark.parametrize("size", [8, 48, 128])
def test_the_fused_projection_has_loads_in_flight(rows: int, size: int) -> None:
    tile = fused_tile(9, rows, size, 768, 2)
    assert tile is not None
    assert tile.num_stages >= 3
    assert tile.blocks * tile.columns >= rows


@pytest.mark.parametrize("capability", [90], indirect=True)
def test_few_tiles_have_as_many_programs(capability: int) -> None:
    plans = [fused_plan(1, n, (128, 768), F16, CPU) for n in (1, 256, 257, 1 << 20)]
    assert [(plan.n_tiles, plan.programs) for plan in plans] == [(1, 1), (1, 1), (2, 2), (4096, 132)]


@pytest.mark.parametrize(
    ("queries", "documents", "n_splits"),
    [((9, 40, 320), (9, 866, 320), 9), ((9, 40, 320), (20, 60, 320), 2), ((64, 1024, 128), (64, 1024, 128), 1)],
)
def test_few_long_documents_are_shared_out_too(
    queries: tuple[int, ...], documents: tuple[int, ...], n_splits: int, capability: int
) -> None:
    """In the query gradient of soft MaxSim: documents are split by their tiles, not by their number."""
    assert soft_gradient_plan(problem(queries, documents)).n_splits == n_splits


def test_sets_are_shared_out_where_there_are_few(capability: int) -> None:
    """Enough programs to fill the GPU, and every point of y in one share."""
    for n, length in ((1, 4096), (1, 100_000), (16, 4096), (300, 50)):
        x, y = torch.zeros(n, length, 3, device="meta"), torch.zeros(n, length + 7, 3, device="meta")
        sets = problem_of_sets(Sets(x, y), ChamferOptions(0, 0, "sqeuclidean", "mean", 0.0, "auto"))
        plan = meeting_plan(sets)
        assert (plan.n_shares - 1) * plan.share < length + 7 <= plan.n_shares * plan.share
        assert plan.share % plan.tile.columns == 0
        programs = n * plan.row_blocks * plan.n_shares
        assert programs >= 132 or plan.share == plan.tile.columns


def test_shares_of_the_largest_sets_fit_a_launch(capability: int) -> None:
    x, y = (torch.zeros(1, length, 3, device="meta") for length in (40_000_000, 60_000_000))
    plan = meeting_plan(problem_of_sets(Sets(x, y), ChamferOptions(0, 0, "sqeuclidean", "mean", 0.0, "auto")))
    assert plan.share > tables.CHAMFER_LONGEST_SHARE * plan.tile.columns
    assert plan.n_shares * plan.share >= 60_000_000
    check_grid((plan.row_blocks * plan.n_shares, 1, 1))


@pytest.mark.parametrize("length", [1, 300])
def test_programs_for_the_candidates_of_one_query_among_many_fit_a_launch(length: int) -> None:
    n_queries, own_bounds = 100_000, torch.full((100_001,), 2_000_000, dtype=torch.int32)
    own_bounds[0] = 0
    bounds = torch.arange(2_000_001, dtype=torch.int32)
    queries, documents = torch.empty(n_queries, length, 1).half(), torch.empty(2_000_000, 1).half()
    tensors = Tensors(queries, documents, documents_cu_seqlens=bounds, candidates_cu_seqlens=own_bounds)
    options = with_lengths(tensors, Options(), None, 1)
    plan = forward_plan(problem_of(tensors, options))
    assert options.max_candidates > tables.SINGLE_LONGEST[1]
    check_grid((plan.n_runs * n_queries, plan.row_blocks, 1))


def batch(n: int, count: int, length: int = 180, dtype: torch.dtype = BF16, argmax=True, own=False) -> Problem:
    """Queries of 32 tokens, and documents; on the meta device, where they take no memory."""
    shape = (n, count) if own else (count,)
    tensors = (torch.empty(*sizes, 128, dtype=dtype, device="meta") for sizes in ((n, 32), (*shape, length)))
    return problem_of(Tensors(*tensors), Options(), argmax)


def bytes_of_query(batch: Problem) -> int:
    """Bytes of a query's scores and their gradient, and of its argmax with half as much again for the lists."""
    argmax = batch.argmax_dtype.itemsize * 32 * 3 // 2 if batch.with_argmax else 0
    return batch.n_documents * (8 + argmax)


batches = st.builds(
    batch,
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.sampled_from([1, 180, 40000]),
    st.sampled_from([BF16, F32]),
    st.booleans(),
    st.booleans(),
)


@given(batch=batches, budget=st.integers(1, 1 << 32))
def test_chunks_keep_to_the_scratch_and_take_all_queries(batch: Problem, budget: int) -> None:
    chunks = chunks_of(batch, budget)
    assert chunks.queries == 1 or chunks.queries * bytes_of_query(batch) <= budget
    assert (chunks.number - 1) * chunks.queries < batch.n_queries <= chunks.number * chunks.queries
    # Split points are aligned, unless there are too few queries.
    assert chunks.number == 1 or chunks.queries < 16 or chunks.queries % 16 == 0


def test_what_fits_is_one_chunk() -> None:
    batch_1024 = batch(1024, 1024)
    needed = 1024 * bytes_of_query(batch_1024)
    assert needed <= tables.CHUNK_SCRATCH
    assert chunks_of(batch_1024, None) == chunks_of(batch_1024, needed) == Chunks(1024, 1)
    assert chunks_of(batch_1024, needed - 1).number == 2


def test_chunks_do_not_shrink_with_the_batch() -> None:
    """By default, the scratch grows with the documents, and so do the bytes per query."""
    chunks_16384, chunks_65536 = (chunks_of(batch(size, size), None) for size in (16384, 65536))
    assert chunks_65536.queries >= 0.9 * chunks_16384.queries
    # Less than the extra memory of the documents in float32 over their own dtype, plus a third for full waves.
    assert chunks_16384.queries * bytes_of_query(batch(16384, 16384)) <= 4 / 3 * 16384 * 180 * 128 * 2


@given(queries=st.integers(2, 5000), n_queries=st.integers(1, 5000))
def test_halves_end_at_one_query(queries: int, n_queries: int) -> None:
    chunks = Chunks(queries, -(-n_queries // queries))
    while chunks.queries > 1:
        smaller = halved(chunks, n_queries)
        assert smaller.queries < chunks.queries
        assert (smaller.number - 1) * smaller.queries < n_queries <= smaller.number * smaller.queries
        chunks = smaller


@pytest.mark.parametrize(
    ("queries", "documents", "segment", "number"),
    [
        ((13, 65, 192), (367, 11, 192), 128, 6),
        # No more than 64 rows per token.
        ((22, 32, 128), (367, 11, 128), 512, 0),
        ((32, 32, 128), (1000, 16, 128), 512, 0),
        # More list entries in total.
        ((32, 65, 128), (505, 11, 128), 512, 4),
        ((64, 32, 128), (64, 180, 128), 512, 3),
        # Segments of 128 would give none either.
        ((8, 32, 128), (3, 1, 128), 512, 0),
    ],
)
def test_long_lists_of_few_documents_have_short_segments(
    queries: tuple[int, ...], documents: tuple[int, ...], segment: int, number: int, capability: int
) -> None:
    plan = lists_plan(problem(queries, documents, argmax=True), lent=False)
    assert (plan.segment, plan.n_segments) == (segment, number)


@pytest.mark.parametrize("capability", [90], indirect=True)
def test_more_waves_leave_long_documents_to_the_hopper_kernel(capability: int) -> None:
    """Runs of a fifth of the length do not move documents of 9000 tokens to segments of the plain kernel."""
    bounds = torch.tensor([0, 9000, *range(9100, 12_100, 100)])
    queries, documents = torch.empty(331, 103, 96).bfloat16(), torch.empty(int(bounds[-1]), 96).bfloat16()
    tensors = Tensors(queries, documents, documents_cu_seqlens=bounds)
    plan = forward_plan(problem_of(tensors, Options(max_document_length=9000)))
    assert plan.kernel == "hopper", plan.reason
    assert plan.run < 9000 <= plan.splits.whole
