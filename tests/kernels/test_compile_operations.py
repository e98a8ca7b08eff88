"""Kernels of other operations compile for the compute capabilities they serve, with arguments of real launches."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.tools.disasm import get_sass

from pylate_flash.kernels import best, config, forward, hidden, plan_operations, tables, xtr, xtr_scores
from pylate_flash.kernels.backward.residual import residual_backward
from pylate_flash.kernels.forward import Codes
from pylate_flash.kernels.plan_backward import residual_gradient_plan
from pylate_flash.kernels.soft import soft_backward
from pylate_flash.kernels.versions import triton_version
from pylate_flash.ops import kernel_calls
from pylate_flash.ops.chamfer import ChamferOptions, Sets, problem_of_sets
from pylate_flash.ops.quantized import problem_of_quantized
from pylate_flash.problem import Options, Problem, Results, Rule, Tensors, problem_of, replaced
from tests.kernels.recorder import SHARED_MEMORY, compiled, recorded
from tests.kernels.test_compile import BF16, F16, F32, inputs

MASKS = (F32, torch.bool)
BOTH = {"normalize": True, "masking": "zero"}
_COPIES = r"cp\.async\.\w+\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)"


_MASKED = " active_tokens rows"
# Compute capabilities; dtype, queries, documents, masks, options, forward kernels, additional backward kernels.
SOFT = [
    ((80, 90, 100, 120), BF16, (8, 64, 128), (3, 300, 128), (None, None), {}, "tall", ""),
    ((80,), F32, (8, 64, 48), (3, 300, 48), (None, None), {}, "stacked", " finish"),
    ((90,), BF16, (8, 64, 320), (3, 300, 320), MASKS, BOTH, "hopper" + _MASKED, " finish" + _MASKED),
    ((90,), F16, (2, 64, 96), (300, 96), (None, None), {"normalize": True}, "stacked rows", " rows"),
]


@pytest.mark.parametrize(
    ("capability", "row"), [(each, row) for every, *row in SOFT for each in every], indirect=["capability"]
)
def test_soft(row: list, capability: int) -> None:
    dtype, queries, documents, masks, options, names, backward_names = row
    tensors = inputs(queries, documents, dtype, masks)
    options = Options(**options)
    if len(documents) == 2:
        bounds = torch.tensor([0, 40, 300]), torch.tensor([0, 1, 2])
        tensors = tensors._replace(documents_cu_seqlens=bounds[0], candidates_cu_seqlens=bounds[1])
        options = options._replace(max_document_length=260, max_candidates=1)
    problem, beta = problem_of(tensors, options), torch.ones(())
    lse, grad = torch.zeros(problem.argmax_shape), torch.zeros(problem.scores_shape)
    names = names.replace("tall", "hopper" if capability == 90 else "stacked")
    compiled(lambda: forward.soft_forward(problem, tensors, beta, True), names, capability)
    arguments = problem, tensors, beta, grad, lse, (True, True, True)
    compiled(partial(soft_backward, *arguments), "documents queries" + backward_names, capability)


def soft_on_hopper(tensors: Tensors, names: str, lse: bool = True, **options) -> tuple[str, bytes]:
    """PTX and cubin of the Hopper kernel, as this call launches it."""
    problem = problem_of(tensors, Options(**options))
    call = partial(forward.soft_forward, problem, tensors, torch.ones(()), lse)
    asm = compiled(call, names, 90)["hopper"].asm
    return asm["ptx"], asm["cubin"]


@pytest.mark.parametrize("capability", [90], indirect=True)
def test_hopper_takes_one_exponential_of_a_similarity_and_spills_nothing(capability: int) -> None:
    ptx, cubin = soft_on_hopper(inputs((8, 64, 128), (3, 1024, 128)), "hopper")
    products = re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, (\S)", ptx)
    assert set(products) == {"{"}, "the first operand must be a list of registers"
    sass = get_sass(cubin)
    # Triton 3.9 spills values that the end of a document needs, in the argmax kernel too.
    assert "LDL" not in sass or triton_version() > (3, 6)
    # In each of four parts, a thread has 32 similarities per tile, and rescales two sums per tile and two per document.
    assert sass.count("MUFU.EX2") == 4 * (32 + 2 + 2)


@pytest.mark.parametrize("capability", [90], indirect=True)
@pytest.mark.parametrize(
    ("size", "length", "masked", "tail"),
    [(128, 128, False, None), (128, 77, False, 16), (64, 90, False, 32), (96, 300, False, 64), (256, 64, True, 64)],
)
def test_hopper_multiplies_what_is_left_after_whole_tiles_by_itself(
    size: int, length: int, masked: bool, tail: int | None, capability: int
) -> None:
    """A token that is repeated to fill a tile would count twice."""
    names = "hopper rows" + " active_tokens" * masked
    tensors = inputs((12, 33, size), (3, length, size), F16, (F32, torch.bool if masked else None))
    ptx, _ = soft_on_hopper(tensors, names, **BOTH)
    products = size // 16 * (2 if size > 128 else 4)
    expected = {64: products}
    if tail is not None:
        expected[tail] = expected.get(tail, 0) + products
    actual = [ptx.count(f"m64n{columns}k16.f32.f16.f16") for columns in (16, 32, 64)]
    assert actual == [expected.get(columns, 0) for columns in (16, 32, 64)]


@pytest.mark.parametrize("capability", [90], indirect=True)
def test_hopper_packed_few_rows_without_lse(capability: int) -> None:
    tensors = inputs((2, 40, 128), (300, 128))._replace(documents_cu_seqlens=torch.tensor([0, 40, 40, 300]))
    options = {"max_document_length": 260, "normalize": True, "empty_score": -1.0}
    soft_on_hopper(tensors, "hopper rows", False, **options)


# dtype, embedding size, chosen tokens, masks and options, argmax, and compute capability.
SPARSE = [
    (BF16, 128, 16, False, False, 80),
    (BF16, 128, 128, False, True, 90),
    (F16, 96, 40, True, True, 100),
    (F32, 128, 32, True, True, 90),
    (BF16, 768, 32, True, True, 120),
]


@pytest.mark.parametrize(
    ("dtype", "size", "n_chosen", "masked", "with_argmax", "capability"), SPARSE, indirect=["capability"]
)
def test_chosen_tokens(
    dtype: torch.dtype, size: int, n_chosen: int, masked: bool, with_argmax: bool, capability: int
) -> None:
    tensors = inputs((1, 64, size), (3, 300, size), dtype, MASKS if masked else (None, None))
    problem = problem_of(tensors, Options(**BOTH if masked else {}), with_argmax)
    chosen = torch.zeros(1, 3, n_chosen, dtype=torch.int64)
    argmax = torch.zeros(problem.argmax_shape, dtype=problem.argmax_dtype) if with_argmax else None
    names = "single active_tokens rows" if masked else "single"
    compiled(lambda: forward.sparse_forward(problem, tensors, chosen, argmax), names, capability)


@pytest.mark.parametrize("capability", [80, 90], indirect=True)
def test_chosen_tokens_and_packed_documents(capability: int) -> None:
    tensors = inputs((2, 64, 128), (300, 128))._replace(documents_cu_seqlens=torch.tensor([0, 40, 300]))
    problem = problem_of(tensors, Options(0, 260), False)
    chosen = torch.zeros(2, 2, 16, dtype=torch.int32)
    compiled(lambda: forward.sparse_forward(problem, tensors, chosen, None), "single", capability)


def quantized(tensors: Tensors, quantize_queries: bool, **options) -> partial[Tensor]:
    """A call that scores these tensors."""
    scales = torch.ones(tensors.documents.shape[:-1])
    offsets = scales if tensors.documents.dtype == torch.uint8 else None
    problem = problem_of_quantized(tensors, Options(**options), quantize_queries)
    return partial(forward.quantized_forward, problem, tensors, scales, offsets)


INT8, UINT8, FP8 = torch.int8, torch.uint8, torch.float8_e4m3fn
# Tensor core instructions for 8-bit queries, by compute capability and document dtype.
PRODUCTS = {
    (80, INT8): r"mma\.sync\S*\.s8\.s8", (80, UINT8): r"mma\.sync\S*\.s8\.s8", (90, INT8): r"wgmma\S*\.s8\.s8",
    (90, UINT8): r"wgmma\S*\.s8\.s8", (90, FP8): r"wgmma\S*\.e4m3\.e4m3",
}  # fmt: skip


def skip_fp8(dtype: torch.dtype, capability: int) -> None:
    if dtype == FP8 and capability == 80:
        pytest.skip("fp8 needs compute capability 8.9, and is refused before")


@pytest.mark.parametrize("capability", [80, 90], indirect=True)
@pytest.mark.parametrize(
    ("dtype", "n_queries", "size"),
    [(INT8, 1, 72), (INT8, 32, 128), (INT8, 3, 300), (UINT8, 32, 128), (FP8, 2, 128), (FP8, 32, 72)],
)
def test_products_of_8_bits(dtype: torch.dtype, n_queries: int, size: int, capability: int) -> None:
    skip_fp8(dtype, capability)
    tensors = inputs((n_queries, 32, size), (40, 180, size))
    tensors = tensors._replace(documents=tensors.documents.to(dtype))
    by_hopper = capability == 90 and n_queries == 32 and size == 128
    name = "hopper" if by_hopper else "stacked"
    # A program quantizes its rows itself if it has few of them, or has them in registers.
    own = dtype != UINT8 if by_hopper else n_queries * 32 <= 64 and size <= 256
    names = name + " quantize_rows" * (not own)
    ptx = compiled(quantized(tensors, True), names, capability)[name].asm["ptx"]
    assert re.search(PRODUCTS[capability, dtype], ptx)
    # Asynchronous copies of documents take 16 bytes at a time; rows of 72 elements begin at multiples of 8 bytes.
    assert set(re.findall(_COPIES, ptx)) >= {"0x10" if size == 128 else "0x8" if size == 72 else "0x4"}


@pytest.mark.parametrize("capability", [80, 90], indirect=True)
@pytest.mark.parametrize("dtype", [INT8, UINT8, FP8])
def test_8_bits_and_queries_as_they_are(dtype: torch.dtype, capability: int) -> None:
    """Masks, weights, normalize and sums of long queries, with documents widened on the chip."""
    skip_fp8(dtype, capability)
    tensors = inputs((3, 160, 128), (40, 180, 128), BF16, MASKS)
    call = quantized(tensors._replace(documents=tensors.documents.to(dtype)), False, **BOTH, empty_score=-1.0)
    compiled(call, "stacked divide_by_norms rows active_tokens", capability)


@pytest.mark.parametrize("capability", [80, 90], indirect=True)
@pytest.mark.parametrize(("dtype", "candidates"), [(INT8, None), (UINT8, [0, 3, 4])])
def test_packed_8_bits(dtype: torch.dtype, candidates: list[int] | None, capability: int) -> None:
    tensors = inputs((2, 32, 96), (9030, 96), F16, candidates=candidates)
    tensors = tensors._replace(documents=tensors.documents.to(dtype))
    call = quantized(tensors, True, max_document_length=9000, max_candidates=3, normalize=True)
    compiled(call, "stacked divide_by_norms", capability)


@pytest.mark.parametrize("capability", [90], indirect=True)
@pytest.mark.parametrize(
    ("dtype", "shape", "length", "masked", "own"),
    [
        (INT8, (8, 128, 128), 1024, False, False),
        (INT8, (8, 128, 128), 1024, False, True),
        (INT8, (4, 32, 256), 340, True, True),
        (FP8, (12, 32, 96), 340, True, False),
        (FP8, (12, 32, 128), 340, True, True),
        (UINT8, (8, 128, 128), 1024, False, False),
        (UINT8, (8, 32, 128), 340, True, False),
        (UINT8, (4, 32, 256), 340, True, False),
        (UINT8, (4, 32, 128), 340, True, True),
    ],
    ids=str,
)
def test_hopper_has_queries_of_8_bits_in_registers_and_scales_beside_the_tokens(
    dtype: torch.dtype, shape: tuple[int, int, int], length: int, masked: bool, own: bool, capability: int, monkeypatch
) -> None:
    """Nothing spills, only sums of affine tokens are converted, and while a product is in flight, nothing is loaded but
    the sums of rows. Programs that quantize their `own` rows do so before.
    """
    monkeypatch.setattr(tables, "QUANTIZED_HOPPER_OWN", 1 << 60 if own else 0)
    tensors = inputs(shape, (40, length, shape[-1]), BF16, (None, torch.bool if masked else None))
    call = quantized(
        tensors._replace(documents=tensors.documents.to(dtype)), True, masking="zero" if masked else "exclude"
    )
    names = "hopper" + " quantize_rows" * (not own) + " active_tokens" * masked
    asm = compiled(call, names, capability)["hopper"].asm
    ptx, kind = asm["ptx"], "f32.e4m3.e4m3" if dtype == FP8 else "s32.s8.s8"
    products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+k32)\.(\S+) \{[^}]*\}, (\S)", ptx)
    narrow = {"m64n64k32"} if masked else set()
    assert set(products) == {(columns, kind, "{") for columns in {"m64n128k32"} | narrow}
    copies = re.findall(r"cp\.async\.(\w+)\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)
    assert set(copies) == {("cg", "0x10"), ("ca", "0x4")}
    in_flight = re.findall(r"wgmma\.commit_group.*?wgmma\.wait_group", ptx, re.DOTALL)
    tile_products = [part for part in in_flight if "st.global" not in part]
    assert tile_products
    assert not any("ld." in part for part in tile_products)
    assert not any("ld.global" in part for part in in_flight)
    assert re.search(r"wgmma\.wait_group[^;]*;(?:(?!wgmma).)*ld\.shared", ptx, re.DOTALL)
    sass = get_sass(asm["cubin"])
    assert "LDL" not in sass or triton_version() > (3, 6)
    assert dtype == UINT8 or "I2FP" not in sass


def loop_of_products(sass: str) -> str:
    """The smallest loop with all products on tensor cores."""
    lines = sass.splitlines()
    labels = {label[1]: index for index, line in enumerate(lines) if (label := re.match(r"(LBB\d+):", line))}
    products = [index for index, line in enumerate(lines) if "GMMA" in line]
    loops = [
        (index - labels[branch[1]], index)
        for index, line in enumerate(lines)
        if (branch := re.search(r"BRA\b.*(LBB\d+)", line)) and branch[1] in labels
        if labels[branch[1]] <= products[0] <= products[-1] <= index
    ]
    length, end = min(loops)
    return "\n".join(lines[end - length : end + 1])


def allocated_in_ptx(ptx: str) -> int:
    """Bytes of shared memory that a stream allocates in PTX; tiles follow at a multiple of 1024 bytes."""
    (nbytes,) = re.findall(r"\.shared \.align 1024 \.b8 allocated\[(\d+)\]", ptx)
    assert int(nbytes) % 1024 == 0
    return int(nbytes)


# dtype of packed documents, embedding size, queries of 32 tokens, and whether programs quantize their own rows. float32
# that may use TF32 products has upper halves alone.
TF32 = "tf32"
STREAMS = [
    *[(BF16, size, 8, False) for size in (16, 32, 48, 96, 128, 192, 256, 320, 384)],
    (F16, 128, 3, False), *[(F32, size, n_queries, False) for size in (36, 64, 100, 128) for n_queries in (1, 3, 8)],
    *[(TF32, size, n_queries, False) for size in (68, 128) for n_queries in (3, 8)],
    (INT8, 64, 3, False), (INT8, 128, 8, True), (INT8, 256, 5, False), (FP8, 32, 8, True), (FP8, 96, 8, False),
    (FP8, 128, 3, True), (UINT8, 16, 8, False), (UINT8, 64, 8, False), (UINT8, 128, 8, False), (UINT8, 256, 5, False),
]  # fmt: skip
PADDED_STREAMS = [
    (BF16, 48, 8, False), (BF16, 128, 8, False), (F16, 384, 9, False), (F32, 128, 8, False), (TF32, 128, 8, False),
    (INT8, 128, 8, True), (FP8, 256, 5, False), (UINT8, 128, 8, False),
]  # fmt: skip
LAYOUTS_OF_STREAMS = [
    *[(*stream, "packed") for stream in STREAMS],
    *[(*stream, "padded") for stream in PADDED_STREAMS[:5]],
    *[(*stream, masking) for stream in PADDED_STREAMS for masking in ("exclude", "zero")],
]


@pytest.mark.parametrize("capability", [90], indirect=True)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("dtype", "size", "n_queries", "own", "layout"), LAYOUTS_OF_STREAMS, ids=str)
def test_streams_of_documents_fit_and_spill_nothing_in_loops(
    dtype: Any, size: int, n_queries: int, own: bool, layout: str, normalize: bool, capability: int, monkeypatch
) -> None:
    """Copies take 16 bytes, except of scales, and every product has its first operand in registers.

    float32 is not copied: every warp loads tokens, and waits for no other. `layout`: packed or padded documents, or the
    masking of padded ones.
    """
    monkeypatch.setattr(tables, "QUANTIZED_HOPPER_OWN", 1 << 60 if own else 0)
    monkeypatch.setattr(tables, "STREAM_LEAST", 0)
    monkeypatch.setattr(tables, "STREAM_LEAST_ALIKE", 0)
    rounded = dtype == TF32
    if rounded:
        monkeypatch.setattr("pylate_flash.problem.float32_precision", lambda: TF32)
        dtype = F32
    query_dtype = dtype if dtype in (BF16, F16, F32) else BF16
    options = {"max_document_length": 100, "normalize": normalize}
    # With one query, another kernel computes document norms; two queries fill the same tile.
    n_queries = max(n_queries, 1 + normalize)
    if layout == "packed":
        tensors = inputs((n_queries, 32, size), (400, size), query_dtype)._replace(
            documents_cu_seqlens=torch.arange(5) * 100
        )
    else:
        mask = None if layout == "padded" else torch.bool
        tensors = inputs((n_queries, 32, size), (4, 100, size), query_dtype, (None, mask))
        options["masking"] = "zero" if layout == "zero" else "exclude"
    if dtype == query_dtype:
        call, names = partial(forward.maxsim_forward, problem_of(tensors, Options(**options)), tensors), "rows"
    else:
        call = quantized(tensors._replace(documents=tensors.documents.to(dtype)), True, **options)
        names = "divide_by_norms"
    names = "hopper" + f" {names}" * normalize + " quantize_rows" * (dtype != query_dtype and not own)
    names += " active_tokens" * (layout in ("exclude", "zero"))
    code = compiled(call, names, capability)["hopper"]
    assert code.metadata.shared + allocated_in_ptx(code.asm["ptx"]) <= SHARED_MEMORY[90]
    assert code.metadata.shared > 48 << 10, "or Triton does not ask for what a launch needs beyond that"
    assert set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\w+?)k\S+ \{[^}]*\}, (\S)", code.asm["ptx"])) == {
        ("m64n64", "{")
    }
    scaled = normalize or dtype != query_dtype
    if dtype == F32:
        assert not re.search(_COPIES, code.asm["ptx"])
        (loads,) = [part for part in re.split(r"setmaxnreg\.", code.asm["ptx"]) if "redux.sync.max.u32" in part]
        loads = loads[loads.index("redux.sync.max.u32") : loads.rindex("redux.sync.max.u32")]
        assert not re.search(r"bar\.sync|barrier\.sync|shfl", loads)
        widths = set(re.findall(r"ld\.global\.(v\d|b32)", loads)) - {"b32"}
        assert widths == {"v4" if size > 64 else "v2"}
    else:
        assert set(re.findall(_COPIES, code.asm["ptx"])) == ({"0x10", "0x4"} if scaled else {"0x10"})
    # The partition that splits float32 has a tile in registers, and ptxas keeps a word or two of the rest in local
    # memory; four words for 256 rows of 128 elements. Later versions of Triton spill the initial values of a partition,
    # which costs time only where the loop of products reads them; 3.9 spills more of them, and some in that loop.
    most = 2 * rounded + (4 if dtype == F32 else 0)
    sass = get_sass(code.asm["cubin"])
    everywhere = most if triton_version() <= (3, 6) else 8 + 2 * rounded
    assert sass.count("LDL") <= everywhere or triton_version() > (3, 8)
    assert loop_of_products(sass).count("LDL") <= most + 4 * (triton_version() > (3, 8))
    if dtype == INT8:
        # The 1 by which integers are multiplied is not moved to a register for every similarity.
        after_product = "\n".join(sass.split("IGMMA")[-1].splitlines()[:200])
        moved = Counter(re.findall(r"IMAD\.U32 R\d+, RZ, RZ, (UR\d+)", after_product))
        assert max(moved.values(), default=0) < 16


@pytest.mark.parametrize("capability", [90], indirect=True)
def test_hopper_sums_products_of_fp8_as_the_plain_kernel(capability: int) -> None:
    """Neither adds up partial sums of a few products outside the tensor cores."""
    results = []
    for n_queries, names in ((2, "stacked"), (12, "hopper")):
        tensors = inputs((n_queries, 32, 128), (40, 180, 128), F16)
        call = quantized(tensors._replace(documents=tensors.documents.to(FP8)), True)
        ttgir = compiled(call, names, capability)[names.split()[0]].asm["ttgir"]
        results.append(set(re.findall(r"maxNumImpreciseAcc = (\d+)", ttgir)))
    assert results[0] == results[1]
    assert len(results[0]) == 1


def residual(
    queries: Tensor,
    nbits: int,
    candidates: Tensor | None = None,
    mask: Tensor | None = None,
    with_argmax: bool = False,
) -> tuple[Problem, Tensors, Codes]:
    """Problem, tensors and codes of a call with 200 documents of 180 tokens."""
    n_tokens, size = 200 * 180, queries.shape[-1]
    codes = Codes(
        torch.zeros(n_tokens, dtype=torch.int32), torch.zeros(n_tokens, size * nbits // 8, dtype=torch.uint8),
        torch.zeros(64, size).half(), torch.zeros(1 << nbits).half(), torch.arange(201, dtype=torch.int32) * 180,
        torch.ones(n_tokens), candidates,
    )  # fmt: skip
    shaped = torch.zeros(1).expand(n_tokens, size)
    tensors = Tensors(queries, shaped, mask, documents_cu_seqlens=codes.cu_seqlens)
    problem = problem_of(tensors, Options(0, 180), with_argmax)
    if candidates is not None:
        problem = problem._replace(groups=len(queries), n_documents=candidates.shape[1])
    return problem, tensors, codes


def check_copies(ptx: str) -> None:
    """Centroids are copied to shared memory asynchronously, 16 bytes at a time, and weights are looked up there."""
    assert "0x10" in re.findall(_COPIES, ptx)
    assert "ld.shared.b16" in ptx


# Bits of a residual code, or the dtype of 8-bit documents, and embedding size.
SHORT = [
    (4, 128), (2, 128), (4, 64), (2, 96), (4, 48), (2, 48), (4, 24), (INT8, 128), (UINT8, 128), (INT8, 64), (INT8, 48),
    (UINT8, 96),
]  # fmt: skip


@pytest.mark.parametrize("capability", [80, 90, 120], indirect=True)
@pytest.mark.parametrize(("bits", "size"), SHORT, ids=str)
def test_short_queries_meet_what_is_loaded_in_registers(bits: int | torch.dtype, size: int, capability: int) -> None:
    """Documents and queries are operands in the registers they were loaded to, and look-ups need no memory."""
    if isinstance(bits, int):
        problem, *arguments = residual(torch.empty(1, 32, size).bfloat16(), bits)
        problem = problem._replace(kind=replaced(problem.kind, "quantize_queries", True))
        code = compiled(partial(forward.residual_forward, problem, *arguments), "short table", capability)
    else:
        tensors = inputs((1, 32, size), (2000, 180, size), BF16)
        code = compiled(quantized(tensors._replace(documents=tensors.documents.to(bits)), True), "short", capability)
    ptx = code["short"].asm["ptx"]
    products = ptx[ptx.index("mma.sync") : ptx.rindex("mma.sync")]
    assert "s32.s8.s8.s32" in products
    # Later versions of Triton exchange values between threads, which costs time and changes no score.
    decoded = isinstance(bits, int)
    exchanged = re.search(r"(ld|st)\.shared|ldmatrix|shfl|cvt\.\S*s32" + ("" if decoded else "|prmt"), products)
    assert not exchanged or triton_version() > (3, 6)
    assert "prmt" in ptx or not decoded
    # Documents are prefetched to shared memory, 16 bytes at a time; codes only if a thread has 16 bytes of a row.
    assert "0x10" in re.findall(_COPIES, ptx) or decoded and (size < 128 or bits == 2)
    assert "cp.async" in ptx
    if decoded and triton_version() <= (3, 6) and capability == 90:
        sass = get_sass(code["short"].asm["cubin"])
        assert not re.search(r"LDL|STL", sass[sass.index("IMMA") : sass.rindex("IMMA")])


@pytest.mark.parametrize("capability", [80, 90], indirect=True)
@pytest.mark.parametrize(("nbits", "size"), [(4, 8), (2, 8), (2, 24)])
def test_rows_that_are_no_words_or_too_short_for_products(nbits: int, size: int, capability: int) -> None:
    problem, *arguments = residual(torch.empty(1, 32, size).bfloat16(), nbits)
    problem = problem._replace(kind=replaced(problem.kind, "quantize_queries", True))
    compiled(partial(forward.residual_forward, problem, *arguments), "stacked", capability)


@pytest.mark.parametrize("capability", [80, 90, 120], indirect=True)
@pytest.mark.parametrize(("dtype", "size"), [(BF16, 128), (F16, 96)])
def test_one_query_meets_many_short_documents(dtype: torch.dtype, size: int, capability: int) -> None:
    """Documents are prefetched, 16 bytes at a time, to where products read them."""
    tensors = inputs((1, 32, size), (120_000, size), dtype)
    tensors = tensors._replace(documents_cu_seqlens=torch.arange(6001, dtype=torch.int32) * 20)
    problem = problem_of(tensors, Options(0, 20))
    asm = compiled(lambda: forward.maxsim_forward(problem, tensors), "short", capability)["short"].asm
    assert "0x10" in re.findall(_COPIES, asm["ptx"])
    products = asm["ptx"][asm["ptx"].index("mma.sync") : asm["ptx"].rindex("mma.sync")]
    assert not re.search(r"st\.shared|shfl|prmt", products)
    assert capability != 90 or not re.search(r"LDL|STL", get_sass(asm["cubin"]))


@pytest.mark.parametrize("capability", [90, 120], indirect=True)
def test_short_queries_meet_packed_documents_in_fp8(capability: int) -> None:
    tensors = inputs((1, 32, 128), (360_000, 128), BF16)
    bounds = torch.arange(2001, dtype=torch.int32) * 180
    tensors = tensors._replace(documents=tensors.documents.to(FP8), documents_cu_seqlens=bounds)
    asm = compiled(quantized(tensors, True, max_document_length=180), "short", capability)["short"].asm
    ptx = asm["ptx"]
    # Eight threads copy a row, which takes a single request to L2.
    source = re.search(r"async_copy_global_to_local .*x!tt.ptr<i32>, #(\w+)>", asm["ttgir"])[1]
    assert re.search(rf"#{source} = .*sizePerThread = \[1, 4\], threadsPerWarp = \[4, 8\]", asm["ttgir"])
    products = ptx[ptx.index("mma.sync") : ptx.rindex("mma.sync")]
    assert not re.search(r"(ld|st)\.shared|ldmatrix|shfl|prmt", products) or triton_version() > (3, 6)
    assert "0x10" in re.findall(_COPIES, ptx)


@pytest.mark.parametrize("capability", [80, 100, 120], indirect=True)
def test_centroids_are_copied_ahead(capability: int) -> None:
    call = partial(forward.residual_forward, *residual(torch.empty(32, 32, 128).half(), 4))
    check_copies(compiled(call, "stacked", capability)["stacked"].asm["ptx"])


@pytest.mark.parametrize("capability", [90], indirect=True)
@pytest.mark.parametrize(
    ("nbits", "n_queries", "with_argmax"), [(4, 1, False), (4, 2, False), (4, 7, True), (2, 1, False)]
)
def test_hopper_keeps_residual_codes_in_registers(
    nbits: int, n_queries: int, with_argmax: bool, capability: int
) -> None:
    arguments = residual(torch.empty(n_queries, 32, 128).bfloat16(), nbits, with_argmax=with_argmax)
    asm = compiled(partial(forward.residual_forward, *arguments), "stacked", capability)["stacked"].asm
    assert re.search(r"wgmma\S*\.bf16\.bf16", asm["ptx"])
    check_copies(asm["ptx"])
    # Spilled registers are reloaded from local memory.
    assert "LDL" not in get_sass(asm["cubin"])


@pytest.mark.parametrize("capability", [90], indirect=True)
@pytest.mark.parametrize(
    ("nbits", "shape", "dtype"),
    [(4, (5, 32, 128), BF16), (4, (32, 32, 64), BF16), (2, (16, 32, 64), F16), (2, (32, 32, 128), BF16)],
)
@pytest.mark.parametrize("in_float16", [False, True])
def test_codes_of_a_few_queries_are_decompressed_where_they_are_copied(
    nbits: int, shape: tuple[int, ...], dtype: torch.dtype, in_float16: bool, capability: int
) -> None:
    """Codes and centroids are copied to shared memory 16 bytes at a time, next to one table of pairs of weights.

    Where scores may differ slightly from those of embeddings, decompressed embeddings are float16 products.
    """
    problem, *arguments = residual(torch.empty(shape, dtype=dtype), nbits)
    problem = problem._replace(kind=replaced(problem.kind, "quantize_queries", in_float16))
    code = compiled(partial(forward.residual_forward, problem, *arguments), "hopper", capability)["hopper"]
    asm = code.asm
    products = set(re.findall(r"wgmma\.mma_async\S+32\.(\w+16)\.", asm["ptx"]))
    assert products == {"f16" if in_float16 or dtype == F16 else "bf16"}
    assert ("mul.rn.f16x2" in asm["ptx"]) == in_float16
    assert set(re.findall(_COPIES, asm["ptx"])) == {"16", "4"}
    # Warps are independent: from the first copy on, decompressing warps never wait for each other.
    (decompresses,) = [part for part in re.split(r"setmaxnreg\.", asm["ptx"]) if "ld.shared.b32 weights0" in part]
    decompresses = decompresses[decompresses.index("cp.async") : decompresses.rindex("st.shared.v4.b32 [")]
    assert "ld.shared.b32 weights0" in decompresses
    assert not re.search(r"bar\.sync|barrier\.sync|shfl|ld\.local", decompresses)
    assert "ld.shared.b16" not in asm["ptx"]
    # The first warp to arrive stores the initial values of partitions over data that others must have read by then.
    before = asm["ptx"].split("bar.sync 8, 256;")[-1].split("barrier.sync")[0]
    assert "st.shared" in before
    assert "ld.shared" not in before
    (words,) = re.findall(r"\.shared \.align \d+ \.b32 pairs\[(\d+)\]", asm["ptx"])
    assert int(words) == 32 * 4**nbits
    # The limit of a program, of which the driver takes 1 KB.
    assert code.metadata.shared + 4 * int(words) + allocated_in_ptx(code.asm["ptx"]) <= SHARED_MEMORY[90]
    assert 4 * int(words) + allocated_in_ptx(code.asm["ptx"]) <= 48 << 10, "what is not asked for at a launch"

    # Later versions of Triton spill the initial values of a partition, and 3.9 some in the loop of products.
    sass = get_sass(asm["cubin"])
    assert sass.count("LDL") <= (0 if triton_version() <= (3, 6) else 8) or triton_version() > (3, 8)
    assert loop_of_products(sass).count("LDL") <= 8 * (triton_version() > (3, 8))


@pytest.mark.parametrize("capability", [90], indirect=True)
@pytest.mark.parametrize("with_argmax", [False, True])
def test_codes_of_many_queries_are_decompressed_once(with_argmax: bool, capability: int) -> None:
    arguments = residual(torch.empty(65, 32, 128).bfloat16(), 4, with_argmax=with_argmax)
    call = partial(forward.residual_forward, *arguments)
    code = compiled(call, "decompress hopper", capability)["decompress"]
    assert re.search(r"st\.global\S*v4\.b32", code.asm["ptx"])
    assert "LDL" not in get_sass(code.asm["cubin"])


@pytest.mark.parametrize("capability", [80, 90], indirect=True)
@pytest.mark.parametrize(("shape", "dtype"), [((1, 160, 96), F16), ((3, 20, 768), BF16), ((1, 32, 32), F32)])
def test_residual_codes_and_their_gradient(shape: tuple[int, ...], dtype: torch.dtype, capability: int) -> None:
    """Argmax and weights, with padded and split embeddings; and the gradient, with documents split among programs."""
    queries, mask = torch.empty(shape, dtype=dtype), torch.ones(shape[:-1])
    for candidates in (None, torch.zeros(shape[0], 50, dtype=torch.int64)):
        problem, *arguments = residual(queries, 4, candidates, mask, with_argmax=True)
        names = "stacked"
        compiled(partial(forward.residual_forward, problem, *arguments), names, capability)
        argmax = torch.zeros(problem.groups * problem.n_documents, problem.rows, dtype=torch.int32)
        backward = partial(residual_backward, problem, *arguments, torch.ones(problem.scores_shape), argmax)
        compiled(backward, "gradient", capability)
    assert residual_gradient_plan(problem).n_splits > 1


def test_scores_farther_apart_than_32_bits_count_are_brought_together(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, *arguments = residual(torch.empty(3, 20, 64), 4, with_argmax=True)
    argmax, grad = torch.zeros(200, 60, dtype=torch.int32), torch.zeros(200, 3).T
    for largest, strides in ((600, (1, 3)), (599, (200, 1))):
        monkeypatch.setattr(config, "INT32_MAX", largest)
        with recorded() as launches:
            residual_backward(problem, *arguments, grad, argmax)
        (launch,) = launches["gradient"]
        numbers = dict(zip(launch.kernel.function.arg_names, launch.arguments, strict=True))
        assert (numbers["next_query"], numbers["next_document"]) == strides


# Compute capability, dtype, shapes of x and y, whether there are masks, and whether distances are squared.
CHAMFER = [
    *(
        (capability, *row)
        for capability in (80, 90)
        for row in (
            (F32, (16, 4096, 3), (16, 4096, 3), False, True),
            (BF16, (16, 4096, 64), (16, 4096, 64), False, True),
            (F32, (16, 4096, 64), (16, 4096, 64), False, True),
        )
    ),
    (120, BF16, (16, 4096, 64), (16, 4096, 64), False, True),
    (80, F16, (3, 100, 200), (3, 40, 200), True, True),
    (80, F32, (3, 100, 72), (3, 40, 72), True, False),
    (90, BF16, (700, 512), (700, 512), False, True),
]


@pytest.mark.parametrize(("capability", "dtype", "x", "y", "masked", "squared"), CHAMFER, indirect=["capability"])
def test_chamfer(capability: int, dtype: torch.dtype, x: tuple, y: tuple, masked: bool, squared: bool) -> None:
    """The forward, and the backward kernels that MaxSim does not have."""
    points = torch.zeros(x, dtype=dtype), torch.zeros(y, dtype=dtype)
    masks = [torch.ones(tensor.shape[:-1], dtype=torch.bool) if masked else None for tensor in points]
    bounds = None if len(x) == 3 else torch.tensor([0, 100, 700], dtype=torch.int32)
    lengths = [600 if len(x) == 2 else tensor.shape[-2] for tensor in points]
    sets = Sets(*points, *masks, bounds, bounds)
    problem = problem_of_sets(sets, ChamferOptions(*lengths, "sqeuclidean", "mean", 0.0, "auto"))
    halves = squared and not plan_operations.meeting_plan(problem).direct
    names = "meet settle" + " rows" * halves + " active_tokens" * masked
    compiled(lambda: kernel_calls.chamfer_nearest(problem, sets, squared), names, capability)
    argmax = tuple(torch.zeros(problem.n_queries, length, dtype=torch.int32) for length in lengths)
    weights = torch.zeros(problem.n_queries), torch.zeros(problem.n_queries)
    with recorded() as launches:
        kernel_calls.chamfer_gradients(problem, sets, argmax, weights, (True, True), squared)
    for launch in launches["gradient"]:
        launch.compile(capability)


@pytest.mark.parametrize(
    ("dtype", "size", "masked", "capability"),
    [
        (BF16, 128, False, 80),
        (BF16, 128, False, 90),
        (F32, 96, True, 90),
        (BF16, 136, False, 120),
        (BF16, 320, False, 90),
    ],
    indirect=["capability"],
)
def test_each_step_of_a_search(dtype: torch.dtype, size: int, masked: bool, capability: int) -> None:
    queries, documents = torch.zeros(64, 32, size, dtype=dtype), torch.zeros(100, 180, size, dtype=dtype)
    active, bounds = (torch.zeros(100, n, dtype=torch.int32) if masked else None for n in (180, 2))
    problem, rule = problem_of(Tensors(queries, documents), Options(), True), Rule(256, True, 1e-3)
    assert plan_operations.search_plan(problem, rule.k).groups > 1
    with recorded() as launches:
        xtr.retrieve(problem, xtr.SearchTensors(queries, documents, active, bounds), rule)
    counts = {name: len(kernel_launches) for name, kernel_launches in launches.items()}
    assert counts == {"begin": 1, "select": 1, "narrow": 3, "walk": 6}
    # Maxima, similarities above a bound, counts of bins (the last launch is like the first), counts of documents.
    every = not masked and capability == 90
    walks = [launches["walk"][step] for step in ((0, 1, 2, 5) if every else (1,))]
    for launch in (*walks, *launches["begin"], *(launches["select"] + launches["narrow"][:1] if every else ())):
        launch.compile(capability)


@pytest.mark.parametrize(
    ("weights", "with_whole", "masked"), [(None, True, False), (F32, False, True), (torch.bool, True, True)]
)
@pytest.mark.parametrize("capability", [80, 90], indirect=True)
def test_scores_of_what_is_retrieved(
    weights: torch.dtype | None, with_whole: bool, masked: bool, capability: int
) -> None:
    similarities, bounds = torch.zeros(300, 4 * 48), torch.zeros(300, 2, dtype=torch.int32) if masked else None
    problem = problem_of(Tensors(torch.zeros(4, 48, 16), torch.zeros(300, 180, 16)), Options(), True)
    state = torch.zeros(4, 4 * 48, dtype=torch.int32)
    result = xtr_scores.Retrieved(similarities, similarities.short(), state, similarities.short())
    mask = None if weights is None else torch.ones(4, 48, dtype=weights)
    to = Results(torch.zeros(4, 300), similarities.short(), torch.zeros(4, 300))
    rule = Rule(256, with_whole, 1.0)
    compiled(lambda: xtr_scores.score_retrieved(problem, result, bounds, mask, rule, to), "score", capability)


def fused_call(
    size: int,
    d_model: int,
    n_queries: int,
    packed: bool,
    dtype: torch.dtype,
    masks: tuple[torch.dtype | None, torch.dtype | None],
    **options,
) -> partial[Tensor]:
    """Score 40 documents of 180 states; with masks there is a bias, and masked document tokens count as zeros."""
    tensors = inputs((n_queries, 32, size), (40, 180, d_model), dtype, (masks[0], None if packed else masks[1]))
    if packed:
        bounds = torch.arange(41, dtype=torch.int32) * 180
        tensors = tensors._replace(documents=tensors.documents.flatten(0, 1), documents_cu_seqlens=bounds)
    weight = torch.empty(size, d_model, dtype=dtype)
    bias = None if masks[0] is None else weight[:, 0].contiguous()
    plan = plan_operations.fused_plan(n_queries * 32, 40 * 180, weight.shape, dtype, weight.device)
    assert plan is not None
    return partial(hidden.score, plan, tensors, Options(**BOTH, **options), weight, bias)


@pytest.mark.parametrize("capability", [90], indirect=True)
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize(
    ("size", "d_model", "n_queries", "packed", "everything"),
    [
        (128, 768, 1, False, False), (128, 768, 4, True, False), (96, 1000, 3, False, True), (16, 8, 1, True, True),
        (128, 4096, 4, False, True),
    ],
)  # fmt: skip
def test_fused(
    size: int, d_model: int, n_queries: int, packed: bool, everything: bool, dtype: torch.dtype, capability: int
) -> None:
    """The second product takes its first operand from registers, and TMA does the copies."""
    call = fused_call(size, d_model, n_queries, packed, dtype, (torch.bool, torch.bool) if everything else (None, None))
    ptx = compiled(call, "fused finish", capability)["fused"].asm["ptx"]
    products = re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, (\S)", ptx)
    assert {"%", "{"} == set(products), "states come from shared memory, embeddings from registers"
    assert ptx.count("cp.async.bulk.tensor.2d") == 3, "two parts and the weight"
    # The finish kernel may start early (PDL), and waits before it reads its inputs.
    assert "griddepcontrol.launch_dependents" in ptx
    assert hidden._finish_kernel.follows


@pytest.mark.parametrize("capability", [90], indirect=True)
@pytest.mark.parametrize("documents_mask", [torch.int64, F32])
@pytest.mark.parametrize("queries_mask", [torch.int64, F16])
def test_fused_with_masks_of_any_type(queries_mask: torch.dtype, documents_mask: torch.dtype, capability: int) -> None:
    masks, options = (queries_mask, documents_mask), {"reduction": "mean", "empty_score": -1}
    compiled(fused_call(64, 72, 2, False, BF16, masks, **options), "fused finish", capability)


@pytest.mark.parametrize("capability", [90], indirect=True)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("size", "d_model"), [(128, 768), (96, 1000), (16, 8)])
def test_projection(size: int, d_model: int, normalize: bool, capability: int) -> None:
    states, weight = torch.empty(300, d_model).bfloat16(), torch.empty(size, d_model).bfloat16()
    plan = plan_operations.fused_plan(1, 300, weight.shape, weight.dtype, weight.device)
    assert plan is not None
    arguments = weight[:, 0].contiguous(), states.new_empty(300, size), torch.empty(300) if normalize else None
    result = compiled(lambda: hidden.project(plan, states, weight, *arguments), "fused", capability)
    ptx = result["fused"].asm["ptx"]
    assert "wgmma" in ptx
    assert set(re.findall(r"st\.global\.(\S+)", ptx)) <= {"v4.b32", "b32"}, "embeddings leave by 16 bytes, norms by 4"


@pytest.mark.parametrize(("n_columns", "launches"), [(100, 1), (5000, 2), (1_000_000, 4)])
def test_best_scores(n_columns: int, launches: int, capability: int) -> None:
    """Few scores are spilled, in the first launch and in those that follow."""
    with recorded() as result:
        best.k_best(torch.empty(3, n_columns), 100)
    assert len(result["best"]) == launches
    for launch in result["best"]:
        assert get_sass(launch.compile(capability).asm["cubin"]).count("LDL") <= 16
