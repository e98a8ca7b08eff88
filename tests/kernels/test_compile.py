"""Every kernel of the forward compiles for compute capability 8.0, 9.0, 10.0 and 12.0, without a GPU.

Those of the backward and of the losses are in files of their own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from pylate_flash.kernels import rows
from pylate_flash.kernels.forward import common, cuts, hopper, maxsim_forward, single, stacked
from pylate_flash.problem import Options, Tensors, problem_of, replaced
from tests.kernels.recorder import check, check_launches, record

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

KERNELS = {
    stacked: ("_stacked",),
    single: ("_single",),
    hopper: ("_hopper",),
    common: ("_add_sums",),
    cuts: ("_merge",),
    rows: ("_active_tokens", "_norms", "_nonzero_rows"),
}


def forward(tensors: Tensors, options: Options | None = None, with_winners: bool = False) -> Callable[[], object]:
    """What scores these tensors."""
    return lambda: maxsim_forward(problem_of(tensors, options or Options(), with_winners), tensors)


def inputs(dtype: torch.dtype, size: int, n_queries: int, query_length: int) -> Tensors:
    documents = torch.empty(40, 180, size, dtype=dtype)
    return Tensors(torch.empty(n_queries, query_length, size, dtype=dtype), documents)


def with_masks(tensors: Tensors, of_queries: torch.dtype, of_documents: torch.dtype) -> Tensors:
    return tensors._replace(
        queries_mask=torch.ones(tensors.queries.shape[:-1], dtype=of_queries),
        documents_mask=torch.ones(tensors.documents.shape[:-1], dtype=of_documents),
    )


def tall(capability: int, dtype: torch.dtype = torch.bfloat16, size: int = 128) -> str:
    """The kernel that serves the rows of several queries."""
    served = capability == 90 and dtype != torch.float32 and size <= 384 and size % 8 == 0
    return "_hopper" if served else "_stacked"


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.bfloat16, 48), (torch.bfloat16, 256), (torch.bfloat16, 512), (torch.float16, 16), (torch.float16, 128),
        (torch.float32, 128), (torch.float32, 512), (torch.bfloat16, 96), (torch.float16, 192), (torch.bfloat16, 320),
        (torch.bfloat16, 384), (torch.float32, 320),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("name", "n_queries"), [("_stacked", 32), ("_single", 1)])
def test_forward(name: str, n_queries: int, size: int, dtype: torch.dtype, capability: int, monkeypatch) -> None:
    name = tall(capability, dtype, size) if name == "_stacked" else name
    launch = forward(inputs(dtype, size, n_queries, 32))
    compiled = check_launches(KERNELS, launch, {name}, capability, monkeypatch)[name]
    if dtype != torch.float32 and size == 128 and capability in (90, 100):
        assert {90: "wgmma", 100: "tcgen05"}[capability] in compiled.asm["ptx"]


# What is copied, and what is loaded, by the width of a load.
_LOADS = re.compile(
    r"cp\.async\.\w+\.shared\.global \[[^]]*\], \[[^]]*\], (0x\w+)|ld\.global(?:\.L1::\w+|\.L2::\w+)*(\.\S+)"
)


@pytest.mark.parametrize(
    ("dtype", "size", "widths"),
    [
        # Tiles of few elements, as of the 8 that are left of 72, have fewer for a thread.
        (torch.bfloat16, 72, {"0x10", "0x8", ".v4.b32", ".v2.b32"}),
        (torch.float16, 8, {"0x10", "0x8", ".v4.b32", ".v2.b32"}),
        (torch.bfloat16, 200, {"0x10", ".v4.b32"}),
        (torch.bfloat16, 300, {"0x8", ".v2.b32"}),
        (torch.float32, 44, {"0x10", ".v4.b32"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("n_queries", [1, 3, 32])
def test_strides_that_are_no_multiples_of_16(
    n_queries: int, dtype: torch.dtype, size: int, widths: set[str], capability: int, monkeypatch
) -> None:
    """Embeddings are still loaded by as many bytes as they begin at multiples of, up to 16."""
    name = "_single" if n_queries == 1 else tall(capability, dtype, size)
    launch = forward(inputs(dtype, size, n_queries, 32))
    compiled = check_launches(KERNELS, launch, {name}, capability, monkeypatch)[name]
    found = {copied or loaded for copied, loaded in _LOADS.findall(compiled.asm["ptx"])}
    assert found
    assert found <= widths


@pytest.mark.parametrize(("n_queries", "query_length"), [(3, 32), (32, 32), (300, 1)])
def test_few_rows(n_queries: int, query_length: int, capability: int, monkeypatch) -> None:
    """On a Hopper GPU too, these go to the kernel of many, in a tile of their own."""
    launch = forward(inputs(torch.bfloat16, 128, n_queries, query_length), with_winners=True)
    check_launches(KERNELS, launch, {tall(capability)}, capability, monkeypatch)


@pytest.mark.parametrize(("name", "n_queries"), [("_stacked", 32), ("_single", 1)])
# Both ways to mask, with and without weights.
@pytest.mark.parametrize(
    ("types", "masking"),
    [
        ((torch.bool, torch.bool), "exclude"), ((torch.int64, torch.int64), "zero"),
        ((torch.float32, torch.uint8), "exclude"), ((torch.bfloat16, torch.float32), "zero"),
    ],
)  # fmt: skip
def test_everything(name: str, n_queries: int, types: tuple, masking: str, capability: int, monkeypatch) -> None:
    """Masks, floating ones of queries being weights; normalize, winners, a score of empty documents."""
    names = {"_active_tokens", name}
    if name == "_stacked":
        names = {"_active_tokens", "_norms", tall(capability)}
    tensors = with_masks(inputs(torch.bfloat16, 128, n_queries, 32), *types)
    options = Options(normalize=True, masking=masking, empty_score=-1.0)
    check_launches(KERNELS, forward(tensors, options, True), names, capability, monkeypatch)


@pytest.mark.parametrize("size", [96, 300])
def test_everything_of_embeddings_in_two(size: int, capability: int, monkeypatch) -> None:
    options = Options(normalize=True, masking="zero", empty_score=-1.0)
    many = tall(capability, torch.float16, size)
    for n_queries, names in ((1, {"_single"}), (3, {many, "_norms"}), (32, {many, "_norms"})):
        tensors = with_masks(inputs(torch.float16, size, n_queries, 32), torch.float32, torch.bool)
        check_launches(KERNELS, forward(tensors, options, True), names | {"_active_tokens"}, capability, monkeypatch)


@pytest.mark.parametrize("n_queries", [1, 3])
def test_packed_embeddings_in_two(n_queries: int, capability: int, monkeypatch) -> None:
    tensors = Tensors(
        torch.empty(n_queries, 32, 320, dtype=torch.bfloat16),
        torch.empty(9030, 320, dtype=torch.bfloat16),
        documents_cu_seqlens=torch.tensor([0, 10, 20, 30, 9030], dtype=torch.int32),
    )
    names = {"_single" if n_queries == 1 else "_stacked", "_merge"}
    launch = forward(tensors, Options(max_document_length=9000), True)
    check_launches(KERNELS, launch, names, capability, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_everything_of_embeddings_in_blocks(dtype: torch.dtype, capability: int, monkeypatch) -> None:
    options = Options(normalize=True, masking="zero")
    for n_queries, names in ((1, {"_single"}), (32, {"_stacked", "_norms"})):
        tensors = with_masks(inputs(dtype, 1100, n_queries, 32), torch.float32, torch.bool)
        launch = forward(tensors, options, True)
        check_launches(KERNELS, launch, names | {"_active_tokens"}, capability, monkeypatch)


@pytest.mark.parametrize("weighted", [False, True])
def test_sums_of_long_queries(weighted: bool, capability: int, monkeypatch) -> None:
    tensors = inputs(torch.bfloat16, 128, 3, 300)
    if weighted:
        tensors = tensors._replace(queries_mask=torch.ones(3, 300))
    launch = forward(tensors, Options(empty_score=-1.0), True)
    check_launches(KERNELS, launch, {tall(capability), "_add_sums"}, capability, monkeypatch)


@pytest.mark.parametrize("masking", ["exclude", "zero"])
@pytest.mark.parametrize("query_length", [1, 32, 33])
@pytest.mark.parametrize(("size", "document_length"), [(128, 77), (128, 90), (72, 77), (96, 330), (48, 7), (64, 30)])
@pytest.mark.parametrize("capability", [90], indirect=True)
def test_the_last_product_of_a_document_is_narrower(
    size: int, document_length: int, query_length: int, masking: str, capability: int, monkeypatch
) -> None:
    """On a Hopper GPU; to the other kernels, another length is another number."""
    documents = torch.empty(40, document_length, size, dtype=torch.bfloat16)
    tensors = Tensors(torch.empty(300, query_length, size, dtype=torch.bfloat16), documents)
    for everything in (False, True):
        options = Options(normalize=True, masking=masking, empty_score=-1.0) if everything else Options()
        case = with_masks(tensors, torch.float32, torch.bool) if everything else tensors
        with monkeypatch.context() as patch:
            recorder = record(hopper, "_hopper", patch)
            for module, name in ((common, "_add_sums"), (rows, "_active_tokens"), (rows, "_norms")):
                record(module, name, patch)
            forward(case, options)()
        ptx = recorder.compile(capability).asm["ptx"]
        assert len([columns for columns in (16, 32) if f"m64n{columns}k16" in ptx]) == 1


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("query_length", [2, 33, 40])
def test_queries_that_padding_would_lengthen(query_length: int, everything: bool, capability: int, monkeypatch) -> None:
    """Sums of 8 rows, or of each row by itself."""
    tensors, options = inputs(torch.bfloat16, 128, 96, query_length), Options(empty_score=-1.0)
    names = {tall(capability), "_add_sums"}
    if everything:
        tensors = with_masks(tensors, torch.float32, torch.bool)
        options = options._replace(normalize=True, masking="zero")
        names |= {"_active_tokens", "_norms"}
    check_launches(KERNELS, forward(tensors, options, everything), names, capability, monkeypatch)


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("query_length", [32, 160])
def test_candidates(query_length: int, everything: bool, capability: int, monkeypatch) -> None:
    """Long queries of few candidates are stacked, each over its own documents."""
    names = {"_single"} if query_length == 32 else {tall(capability)}
    tensors = Tensors(
        torch.empty(4, query_length, 128, dtype=torch.bfloat16), torch.empty(4, 5, 180, 128, dtype=torch.bfloat16)
    )
    options = Options()
    if everything:
        tensors, options = with_masks(tensors, torch.float32, torch.int64), Options(normalize=True, masking="zero")
        names |= {"_active_tokens"} if query_length == 32 else {"_active_tokens", "_norms"}
    if query_length == 160:
        names |= {"_add_sums"}
    check_launches(KERNELS, forward(tensors, options, everything), names, capability, monkeypatch)


@pytest.mark.parametrize(
    ("name", "n_queries", "candidates"),
    [("_stacked", 32, None), ("_single", 1, None), ("_single", 2, torch.tensor([0, 3, 4]))],
)
@pytest.mark.parametrize(
    ("longest", "everything"), [(40, False), (40, True), (9000, False), (9000, True)]
)  # fmt: skip
def test_packed(
    name: str, n_queries: int, candidates: Tensor | None, longest: int, everything: bool, capability: int, monkeypatch
) -> None:
    tensors = Tensors(
        torch.empty(n_queries, 32, 128, dtype=torch.bfloat16),
        torch.empty(9030, 128, dtype=torch.bfloat16),
        torch.ones(n_queries, 32) if everything else None,
        documents_cu_seqlens=torch.tensor([0, 10, 20, 30, 9030], dtype=torch.int32),
        candidates_cu_seqlens=candidates,
    )
    if name == "_stacked" and longest == 40:
        name = tall(capability)
    in_pieces = longest == 9000
    names = {name}
    if in_pieces:
        # Documents are cut where one may be long, and only there.
        names |= {"_merge"}
    if everything and (name != "_single" or in_pieces):
        names |= {"_norms"}
    options = Options(0, longest, 3, everything, empty_score=-1.0)
    compiled = check_launches(KERNELS, forward(tensors, options, everything), names, capability, monkeypatch)
    if capability == 90 and name != "_single":
        assert "wgmma" in compiled[name].asm["ptx"]


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 128), (torch.float16, 96), (torch.float32, 128)])
@pytest.mark.parametrize("lie", ["together", "apart", "anywhere"])
@pytest.mark.parametrize(("n_queries", "longest"), [(1, 40), (1, 9000), (32, 40), (32, 9000)])
@pytest.mark.parametrize("capability", [80, 90], indirect=True)
def test_packed_documents_are_loaded_by_16_bytes(
    n_queries: int, longest: int, lie: str, size: int, dtype: torch.dtype, capability: int, monkeypatch
) -> None:
    """Whether they follow each other or not, where every one of them begins at a multiple of that."""
    aligned, n_tokens, offsets = lie != "anywhere", 30 + longest, None
    bounds = torch.tensor([0, 10, 20, 30, n_tokens])
    documents = torch.empty(n_tokens if lie == "together" else 1, size, dtype=dtype)
    tensors = Tensors(torch.empty(n_queries, 32, size, dtype=dtype), documents, documents_cu_seqlens=bounds)
    problem = problem_of(tensors, Options(max_document_length=longest))
    if lie != "together":
        unit, offsets = 16 // dtype.itemsize if aligned else 1, torch.zeros(4, dtype=torch.int64)
        kind = replaced(problem.kind, "offset_unit", unit)
        problem = problem._replace(kind=kind, n_tokens=n_tokens, aligned=aligned)
    name = "_single" if n_queries == 1 else tall(capability, dtype, size) if aligned and longest == 40 else "_stacked"
    names = {name, "_merge"} if longest == 9000 else {name}
    launch = partial(maxsim_forward, problem, tensors, offsets)
    compiled = check_launches(KERNELS, launch, names, capability, monkeypatch)
    copies = {copied for copied, _ in _LOADS.findall(compiled[name].asm["ptx"])} - {""}
    assert (copies == {"0x10"}) == aligned


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64])
def test_packed_queries_of_many_tokens(mask_dtype: torch.dtype, capability: int, monkeypatch) -> None:
    """With candidates, a query of any length is scored by itself; of long documents, in pieces."""
    tensors = Tensors(
        torch.empty(2, 300, 128, dtype=torch.float32),
        torch.empty(9030, 128, dtype=torch.float32),
        torch.ones(2, 300, dtype=mask_dtype),
        documents_cu_seqlens=torch.tensor([0, 10, 20, 30, 9030]),
        candidates_cu_seqlens=torch.tensor([0, 3, 4], dtype=torch.int32),
    )
    for longest, names in ((40, {"_single", "_add_sums"}), (9000, {"_single", "_add_sums", "_merge"})):
        launch = forward(tensors, Options(0, longest, 3), True)
        check_launches(KERNELS, launch, names, capability, monkeypatch)


@pytest.mark.parametrize("length", [180, 3000])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_active_tokens(dtype: torch.dtype, length: int, capability: int, monkeypatch) -> None:
    mask = torch.ones(4, length, dtype=dtype)
    check(rows, "_active_tokens", lambda: rows.active_tokens(mask), capability, monkeypatch)


@pytest.mark.parametrize(("size", "dtype"), [(128, torch.bfloat16), (48, torch.float32), (4096, torch.float16)])
def test_nonzero_rows(size: int, dtype: torch.dtype, capability: int, monkeypatch) -> None:
    embeddings, more = torch.empty(4, 180, size, dtype=dtype), torch.empty(3, 32, size, dtype=dtype)
    for given in ((embeddings,), (embeddings, more)):
        compiled = check(rows, "_nonzero_rows", lambda g=given: rows.nonzero_rows(*g), capability, monkeypatch)
        assert "ld.global.v4.b32" in compiled.asm["ptx"]


@pytest.mark.parametrize("bounds_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("size", "dtype"), [(128, torch.bfloat16), (48, torch.float32), (4096, torch.float16)])
def test_padding(size: int, dtype: torch.dtype, bounds_dtype: torch.dtype, capability: int, monkeypatch) -> None:
    packed, padded = torch.empty(70, size, dtype=dtype), torch.empty(3, 32, size, dtype=dtype)
    bounds = torch.tensor([0, 32, 38, 70], dtype=bounds_dtype)
    check(rows, "_pad", lambda: rows.pad(packed, bounds, 32), capability, monkeypatch)
    check(rows, "_pad", lambda: rows.packed_again(padded, bounds, 70), capability, monkeypatch)


@pytest.mark.parametrize("unit", [1, 8])
def test_padding_from_where_sequences_lie(unit: int, capability: int, monkeypatch) -> None:
    """By 16 bytes at a time, where they begin at multiples of that."""
    origin, numbers = torch.empty(1, 128, dtype=torch.bfloat16), torch.tensor([0, 32, 38, 70])
    compiled = check(rows, "_pad", lambda: rows.pad(origin, numbers, 32, numbers[:3], unit), capability, monkeypatch)
    assert ("ld.global.v4.b32" in compiled.asm["ptx"]) == (unit == 8)
