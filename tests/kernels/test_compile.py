"""Every forward kernel compiles for compute capability 8.0, 9.0, 10.0 and 12.0, without a GPU.

The kernels of the backward, the losses and other operations have test files of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from pylate_flash.kernels import rows
from pylate_flash.kernels.forward import maxsim_forward
from pylate_flash.kernels.forward.quantized_rows import divided_by_norms
from pylate_flash.problem import Options, Tensors, problem_of, replaced
from tests.kernels.recorder import compiled, recorded

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DOCUMENTS = (40, 180, 128)
PACKED = torch.tensor([0, 10, 20, 30, 9030], dtype=torch.int32)


def inputs(
    queries: tuple[int, ...],
    documents: tuple[int, ...],
    dtype: torch.dtype = BF16,
    masks: tuple[torch.dtype | None, torch.dtype | None] = (None, None),
    candidates: list[int] | None = None,
) -> Tensors:
    """Tensors of these shapes, with masks of these types; documents [T, d] are packed."""
    query_mask, document_mask = (
        None if mask is None else torch.ones(shape[:-1], dtype=mask)
        for shape, mask in zip((queries, documents), masks, strict=True)
    )
    bounds = PACKED if len(documents) == 2 else None
    own_bounds = None if candidates is None else torch.tensor(candidates)
    arguments = (torch.empty(shape, dtype=dtype) for shape in (queries, documents))
    return Tensors(*arguments, query_mask, None if bounds is not None else document_mask, None, bounds, own_bounds)


def forward(tensors: Tensors, with_argmax: bool = False, **options: Any) -> Callable[[], object]:
    """A call that scores these tensors."""
    return partial(maxsim_forward, problem_of(tensors, Options(**options), with_argmax), tensors)


def tall(capability: int, dtype: torch.dtype = BF16, size: int = 128) -> str:
    """The kernel that serves the rows of several queries."""
    name = "hopper" if capability == 90 and (dtype == F32 or size % 8 == 0) else "stacked"
    in_pairs = name == "hopper" and size <= 128 and size % 4 == 0
    return f"decompose {name}" if dtype == F32 and not in_pairs else name


def serving(n_queries: int, capability: int, dtype: torch.dtype, size: int) -> str:
    """The kernel that serves `n_queries`; the Hopper kernel also takes one query of float32 or of long embeddings."""
    name = tall(capability, dtype, size)
    return "single" if n_queries == 1 and (name != "hopper" or (dtype != F32 and size <= 128)) else name


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (BF16, 48), (BF16, 256), (BF16, 512), (F16, 16), (F16, 128), (F32, 128), (F32, 512), (BF16, 96), (F16, 192),
        (BF16, 320), (BF16, 384), (F32, 320),
    ],
)  # fmt: skip
@pytest.mark.parametrize("n_queries", [1, 32])
def test_forward(n_queries: int, size: int, dtype: torch.dtype, capability: int) -> None:
    name = serving(n_queries, capability, dtype, size)
    result = compiled(forward(inputs((n_queries, 32, size), (40, 180, size), dtype)), name, capability)
    if dtype != F32 and size == 128 and capability in (90, 100):
        assert {90: "wgmma", 100: "tcgen05"}[capability] in result[name].asm["ptx"]


# Widths of asynchronous copies, and of global loads.
_LOADS = re.compile(
    r"cp\.async\.\w+\.shared\.global \[[^]]*\], \[[^]]*\], (0x\w+)|ld\.global(?:\.L1::\w+|\.L2::\w+)*(\.\S+)"
)


@pytest.mark.parametrize(
    ("dtype", "size", "widths"),
    [
        # Narrow tiles, such as the remaining 8 of 72 elements, have fewer elements per thread.
        (BF16, 72, {"0x10", "0x8", ".v4.b32", ".v2.b32"}),
        (F16, 8, {"0x10", "0x8", ".v4.b32", ".v2.b32"}),
        (BF16, 200, {"0x10", ".v4.b32"}),
        (BF16, 300, {"0x8", ".v2.b32"}),
        (F32, 44, {"0x10", ".v4.b32"}),
    ],
)
@pytest.mark.parametrize("n_queries", [1, 3, 32])
def test_strides_that_are_no_multiples_of_16(
    n_queries: int, dtype: torch.dtype, size: int, widths: set[str], capability: int
) -> None:
    """Embeddings are still loaded as wide as their alignment allows, up to 16 bytes."""
    name = serving(n_queries, capability, dtype, size)
    launch = forward(inputs((n_queries, 32, size), (100, 180, size), dtype))
    ptx = compiled(launch, name, capability)[name.split()[-1]].asm["ptx"]
    results = {copied or loaded for copied, loaded in _LOADS.findall(ptx)}
    assert results
    if name.startswith("decompose"):
        # Norms, and the remaining 16 elements of 3 * 48.
        widths = widths | {".b32", "0x8"}
    # A warp loads a float32 row together; up to 64 elements, two per lane.
    assert results <= (widths | {".v2.b32"} if dtype == F32 and name == "hopper" else widths)


ARGMAX = {"with_argmax": True}
NORMALIZED = {"normalize": True, "empty_score": -1.0} | ARGMAX
EVERYTHING = {"masking": "zero"} | NORMALIZED
WEIGHTS = {"masks": (F32, torch.bool)}
WEIGHED = {"masks": (F32, None)}
MASKED = {"masks": (torch.int64, None)}
HALF = {"dtype": F16}
SHORT, LONG = {"max_document_length": 40, "max_candidates": 3}, {"max_document_length": 9000, "max_candidates": 3}
OWN = {"candidates": [0, 3, 4]}
# Kernels ("tall": the one of several queries); shapes of queries and documents; kwargs of `inputs`; options.
CALLS = [
    # On Hopper, few rows use the kernel of many rows too, with a tile of their own.
    ("tall", (3, 32, 128), DOCUMENTS, {}, ARGMAX),
    ("tall", (32, 32, 128), DOCUMENTS, {}, ARGMAX),
    ("tall", (300, 1, 128), DOCUMENTS, {}, ARGMAX),
    # Both masking modes, with and without weights.
    *(
        (names, (n_queries, 32, 128), DOCUMENTS, {"masks": masks}, NORMALIZED | {"masking": masking})
        for masks, masking in (
            ((torch.bool, torch.bool), "exclude"),
            ((torch.int64, torch.int64), "zero"),
            ((F32, torch.uint8), "exclude"),
            ((BF16, F32), "zero"),
        )
        for names, n_queries in (("active_tokens rows tall", 32), ("active_tokens single", 1))
    ),
    # Embeddings in two blocks, and in many.
    ("active_tokens single", (1, 32, 96), (40, 180, 96), HALF | WEIGHTS, EVERYTHING),
    ("active_tokens rows tall", (3, 32, 96), (40, 180, 96), HALF | WEIGHTS, EVERYTHING),
    ("active_tokens rows tall", (32, 32, 96), (40, 180, 96), HALF | WEIGHTS, EVERYTHING),
    ("active_tokens single", (1, 32, 300), (40, 180, 300), HALF | WEIGHTS, EVERYTHING),
    ("active_tokens rows tall", (3, 32, 300), (40, 180, 300), HALF | WEIGHTS, EVERYTHING),
    ("active_tokens rows tall", (32, 32, 300), (40, 180, 300), HALF | WEIGHTS, EVERYTHING),
    ("merge single", (1, 32, 320), (9030, 320), {}, LONG | ARGMAX),
    ("merge stacked", (3, 32, 320), (9030, 320), {}, LONG | ARGMAX),
    ("active_tokens single", (1, 32, 1100), (40, 180, 1100), WEIGHTS, EVERYTHING),
    ("active_tokens rows stacked", (32, 32, 1100), (40, 180, 1100), WEIGHTS, EVERYTHING),
    ("active_tokens single", (1, 32, 1100), (40, 180, 1100), WEIGHTS | {"dtype": F32}, EVERYTHING),
    ("active_tokens rows tall", (32, 32, 1100), (40, 180, 1100), WEIGHTS | {"dtype": F32}, EVERYTHING),
    # Sums of long queries, and of those that padding would lengthen: over 8 rows, or for every row.
    ("tall", (3, 300, 128), DOCUMENTS, {}, ARGMAX),
    ("tall", (3, 300, 128), DOCUMENTS, WEIGHED, ARGMAX),
    *(
        row
        for length in (2, 33, 40)
        for row in (
            ("tall", (96, length, 128), DOCUMENTS, {}, {}),
            ("active_tokens rows tall", (96, length, 128), DOCUMENTS, WEIGHTS, EVERYTHING),
        )
    ),
    # Long queries of few candidates are stacked, each over its own documents.
    ("single", (4, 32, 128), (4, 5, 180, 128), {}, {}),
    ("active_tokens single", (4, 32, 128), (4, 5, 180, 128), WEIGHTS, EVERYTHING),
    ("tall", (4, 160, 128), (4, 5, 180, 128), {}, {}),
    ("active_tokens rows tall", (4, 160, 128), (4, 5, 180, 128), WEIGHTS, EVERYTHING),
    # Packed documents are split into segments only where one may be long.
    ("tall", (32, 32, 128), (9030, 128), {}, SHORT),
    ("rows tall", (32, 32, 128), (9030, 128), WEIGHED, SHORT | NORMALIZED),
    ("merge stacked", (32, 32, 128), (9030, 128), {}, LONG),
    ("merge rows stacked", (32, 32, 128), (9030, 128), WEIGHED, LONG | NORMALIZED),
    *(
        row
        for n_queries, arguments in ((1, {}), (2, OWN))
        for row in (
            ("single", (n_queries, 32, 128), (9030, 128), arguments, SHORT),
            ("single", (n_queries, 32, 128), (9030, 128), WEIGHED | arguments, SHORT | NORMALIZED),
            ("merge single", (n_queries, 32, 128), (9030, 128), arguments, LONG),
            ("merge rows single", (n_queries, 32, 128), (9030, 128), WEIGHED | arguments, LONG | NORMALIZED),
        )
    ),
    # With candidates, every query is scored by itself, whatever its length; long documents in segments.
    *(
        (names, (2, 300, 128), (9030, 128), OWN | {"dtype": F32, "masks": (mask, None)}, lengths | ARGMAX)
        for mask in (torch.bool, torch.int64)
        for names, lengths in (("single", SHORT), ("merge single", LONG))
    ),
]


@pytest.mark.parametrize("row", CALLS, ids=lambda row: "-".join(map(str, row[:3])))
def test_calls(row: tuple[str, tuple, tuple, dict, dict], capability: int) -> None:
    names, queries, documents, kwargs, options = row
    names = names.replace("tall", tall(capability, kwargs.get("dtype", BF16), queries[2]))
    result = compiled(forward(inputs(queries, documents, **kwargs), **options), names, capability)
    if capability == 90 and kwargs.get("dtype") != F32 and "single" not in result:
        assert "wgmma" in result["hopper" if "hopper" in result else "stacked"].asm["ptx"]


@pytest.mark.parametrize("query_length", [1, 32, 33])
@pytest.mark.parametrize(("size", "document_length"), [(128, 77), (128, 90), (72, 77), (96, 330), (48, 71), (64, 94)])
@pytest.mark.parametrize("capability", [90], indirect=True)
def test_the_last_product_of_a_document_is_narrower(
    size: int, document_length: int, query_length: int, capability: int
) -> None:
    """On Hopper, for few query rows or non-contiguous documents; to other kernels, a length is just an argument."""
    few, many = (128 // query_length, query_length, size), (300, query_length, size)
    documents = (40, document_length, size)
    strided = inputs(many, documents, **WEIGHTS)
    strided = strided._replace(documents=torch.empty(80, document_length, size, dtype=BF16)[::2])
    for names, tensors, options in (
        ("hopper", inputs(few, documents), {}),
        ("active_tokens hopper rows", strided, {"normalize": True, "masking": "zero", "empty_score": -1.0}),
    ):
        ptx = compiled(forward(tensors, **options), names, capability)["hopper"].asm["ptx"]
        assert len([columns for columns in (16, 32) if f"m64n{columns}k16" in ptx]) == 1


@pytest.mark.parametrize(("dtype", "size"), [(BF16, 128), (F16, 96), (F32, 128)])
@pytest.mark.parametrize("lie", ["together", "apart", "anywhere"])
@pytest.mark.parametrize(
    ("n_queries", "n_short", "longest"),
    # One query has a smaller tile for short documents, and segments for a long one.
    [(1, 3, 40), (1, 300, 9000), (1, 3, 300), (1, 3, 9000), (32, 3, 40), (32, 3, 9000)],
)
@pytest.mark.parametrize("capability", [80, 90], indirect=True)
def test_packed_documents_are_loaded_by_16_bytes(
    n_queries: int, n_short: int, longest: int, lie: str, size: int, dtype: torch.dtype, capability: int
) -> None:
    """Contiguous or not, as long as every document begins at a multiple of 16 bytes."""
    aligned, n_tokens, offsets = lie != "anywhere", 10 * n_short + longest, None
    tensors = inputs((n_queries, 32, size), (n_tokens if lie == "together" else 1, size), dtype)
    tensors = tensors._replace(documents_cu_seqlens=torch.tensor([*range(0, 10 * n_short + 1, 10), n_tokens]))
    problem = problem_of(tensors, Options(max_document_length=longest))
    if lie != "together":
        unit, offsets = 16 // dtype.itemsize if aligned else 1, torch.zeros(n_short + 1, dtype=torch.int64)
        kind = replaced(problem.kind, "offset_unit", unit)
        problem = problem._replace(kind=kind, n_tokens=n_tokens, aligned=aligned)
    streamed = aligned and longest != 9000
    name = serving(n_queries, capability if streamed else 80, dtype, size)
    if lie != "together" or capability == 90:
        # float32 is not split into parts for scattered documents, nor for segments where Hopper has TF32 products.
        name = name.removeprefix("decompose ")
    names = f"{name} merge" if longest == 9000 else name
    served = compiled(partial(maxsim_forward, problem, tensors, offsets), names, capability)
    ptx = served[name.split()[-1]].asm["ptx"]
    copies, loads = (set(widths) - {""} for widths in zip(*_LOADS.findall(ptx), strict=True))
    # A warp loads a whole float32 row.
    by_16_bytes = ".v4.b32" in loads if dtype == F32 and name == "hopper" else copies == {"0x10"}
    assert by_16_bytes == aligned


@pytest.mark.parametrize("length", [180, 3000])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, F32])
def test_active_tokens(dtype: torch.dtype, length: int, capability: int) -> None:
    compiled(lambda: rows.active_tokens(torch.ones(4, length, dtype=dtype)), "active_tokens", capability)


@pytest.mark.parametrize("size", [48, 512])
def test_norms(size: int, capability: int) -> None:
    embeddings, scales = torch.empty(4, 32, size, dtype=BF16), torch.empty(4, 32)
    compiled(lambda: rows.inverse_norms(embeddings), "rows", capability)
    compiled(lambda: rows.normalized_rows(embeddings, embeddings, scales), "normalized", capability)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("size", [96, 128, 320])
def test_eight_lanes_share_a_row(size: int, dtype: torch.dtype, capability: int) -> None:
    """Of 32 rows, each of four warps has eight, and a lane two: their sums take three shuffles each."""
    embeddings = torch.empty(4, 32, size, dtype=dtype)
    ptx = compiled(lambda: rows.inverse_norms(embeddings), "rows", capability)["rows"].asm["ptx"]
    assert ptx.count("shfl.sync.bfly") == 6


@pytest.mark.parametrize("dtype", [F16, F32])
def test_casts(dtype: torch.dtype, capability: int) -> None:
    arguments = torch.empty(4, 32, 72, dtype=dtype), torch.empty(4, 9, 72, dtype=dtype)
    compiled(lambda: rows.cast_both(*arguments, BF16), "cast", capability)


@pytest.mark.parametrize(("size", "dtype"), [(128, BF16), (48, F32), (4096, F16)])
def test_nonzero_rows(size: int, dtype: torch.dtype, capability: int) -> None:
    embeddings, queries = torch.empty(4, 180, size, dtype=dtype), torch.empty(3, 32, size, dtype=dtype)
    for arguments in ((embeddings,), (embeddings, queries)):
        result = compiled(partial(rows.nonzero_rows, *arguments), "rows", capability)
        assert "ld.global.v4.b32" in result["rows"].asm["ptx"]


@pytest.mark.parametrize("bounds_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("size", "dtype"), [(128, BF16), (48, F32), (4096, F16)])
def test_padding(size: int, dtype: torch.dtype, bounds_dtype: torch.dtype, capability: int) -> None:
    packed, padded = torch.empty(70, size, dtype=dtype), torch.empty(3, 32, size, dtype=dtype)
    bounds = torch.tensor([0, 32, 38, 70], dtype=bounds_dtype)
    compiled(lambda: rows.pad(packed, bounds, 32), "pad", capability)
    compiled(lambda: rows.packed_again(padded, bounds, 70), "pad", capability)


@pytest.mark.parametrize("unit", [1, 8])
def test_padding_from_where_sequences_lie(unit: int, capability: int) -> None:
    """16 bytes at a time, if sequences begin at multiples of 16 bytes."""
    origin, numbers = torch.empty(1, 128, dtype=BF16), torch.tensor([0, 32, 38, 70])
    result = compiled(lambda: rows.pad(origin, numbers, 32, numbers[:3], unit), "pad", capability)
    assert ("ld.global.v4.b32" in result["pad"].asm["ptx"]) == (unit == 8)


@pytest.mark.parametrize("size", [112, 128])
def test_other_lengths_have_norms_of_the_same_code(size: int) -> None:
    with recorded() as launches:
        for lengths in ((32, 180), (31, 185), (32, 256), (5, 16)):
            rows.norms_of(*(torch.empty(40, length, size, dtype=BF16) for length in lengths))
            rows.pad(torch.empty(90, 2 * size, dtype=BF16)[:, :size], torch.tensor([0, 30, 90]), lengths[1])
    for kernel_launches in launches.values():
        assert all(launch.specialization() == kernel_launches[0].specialization() for launch in kernel_launches)


@pytest.mark.parametrize(("size", "width"), [(128, ".v4.b32"), (300, ".v2.b32")])
@pytest.mark.parametrize("name", ["rows", "pad", "divide_by_norms"])
def test_rows_are_found_in_32_bits_and_loaded_as_wide_as_they_lie(name: str, size: int, width: str) -> None:
    """Two 64-bit divisions per row would take the GPU longer than loading it."""
    embeddings, bounds = torch.empty(40, 180, size, dtype=BF16), torch.arange(0, 5, dtype=torch.int32)
    values, scales = torch.empty(40, 180, size, dtype=torch.int8), torch.empty(40, 180)
    calls = {
        "rows": lambda: rows.norms_of(embeddings[:, :30], embeddings),
        "pad": lambda: rows.pad(embeddings[0], bounds, 32),
        "divide_by_norms": lambda: divided_by_norms(values, (0, 180 * size, size), scales, None),
    }
    ptx = compiled(calls[name], name, 90)[name].asm["ptx"]
    assert not re.search(r"(div|rem)\.[su]64", ptx)
    loaded = {loaded for _, loaded in _LOADS.findall(ptx)}
    assert (width if name != "divide_by_norms" or size == 128 else ".b32") in loaded
    assert not loaded & {".b8", ".b16", ".u8", ".u16"}
