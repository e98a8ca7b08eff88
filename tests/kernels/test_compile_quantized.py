"""The kernels of quantized documents compile for compute capability 8.0 and 9.0, without a GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pylate_flash import kernels
from pylate_flash.kernels.forward import common, hopper, quantized_forward, quantized_rows, stacked
from pylate_flash.ops.quantized import problem_of_quantized
from pylate_flash.problem import Options, Tensors
from tests.kernels.recorder import check_launches

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
    pytest.mark.parametrize("capability", [80, 90], indirect=True),
]

KERNELS = {
    stacked: ("_stacked",),
    hopper: ("_hopper",),
    quantized_rows: ("_quantize_rows", "_divide_by_norms"),
    common: ("_add_sums",),
    kernels.rows: ("_active_tokens", "_norms"),
}
TYPES = [torch.int8, torch.uint8, torch.float8_e4m3fn]
# What tensor cores multiply with 8-bit queries, by compute capability.
PRODUCTS = {
    (80, torch.int8): r"mma\.sync\S*\.s8\.s8", (80, torch.uint8): r"mma\.sync\S*\.s8\.s8",
    (90, torch.int8): r"wgmma\S*\.s8\.s8", (90, torch.uint8): r"wgmma\S*\.s8\.s8",
    (90, torch.float8_e4m3fn): r"wgmma\S*\.e4m3\.e4m3",
}  # fmt: skip


def forward(tensors: Tensors, options: Options, quantize_queries: bool) -> Callable[[], Tensor]:
    """What scores these tensors."""
    documents = tensors.documents
    scales = torch.ones(documents.shape[:-1])
    offsets = scales if documents.dtype == torch.uint8 else None
    problem = problem_of_quantized(tensors, options, quantize_queries)
    return lambda: quantized_forward(problem, tensors, scales, offsets)


def skip_fp8(dtype: torch.dtype, capability: int) -> None:
    if dtype == torch.float8_e4m3fn and capability == 80:
        pytest.skip("fp8 needs compute capability 8.9, and is refused before")


@pytest.mark.parametrize(
    ("dtype", "n_queries", "size"),
    [
        (torch.int8, 1, 72), (torch.int8, 32, 128), (torch.int8, 3, 300), (torch.uint8, 32, 128),
        (torch.float8_e4m3fn, 1, 128), (torch.float8_e4m3fn, 32, 72),
    ],
)  # fmt: skip
def test_products_of_8_bits(dtype: torch.dtype, n_queries: int, size: int, capability: int, monkeypatch) -> None:
    skip_fp8(dtype, capability)
    queries, documents = torch.empty(n_queries, 32, size).bfloat16(), torch.empty(40, 180, size, dtype=dtype)
    launch = forward(Tensors(queries, documents), Options(), True)
    by_hopper = capability == 90 and n_queries == 32 and size == 128 and dtype != torch.uint8
    name = "_hopper" if by_hopper else "_stacked"
    # A program of few rows quantizes them itself, if it holds them.
    names = {name, "_quantize_rows"} if n_queries * 32 > 64 or size > 256 else {name}
    compiled = check_launches(KERNELS, launch, names, capability, monkeypatch)[name]
    assert re.search(PRODUCTS[capability, dtype], compiled.asm["ptx"])
    # Documents go to shared memory 16 bytes at a time, in the background; those of 72 elements begin at multiples of 8.
    copied = {"0x10"} if size == 128 else {"0x8"} if size == 72 else {"0x4"}
    assert (
        set(re.findall(r"cp\.async\.\w+\.shared\.global \[[^]]*\], \[[^]]*\], (0x\w+)", compiled.asm["ptx"])) >= copied
    )


@pytest.mark.parametrize("dtype", TYPES)
def test_everything_of_queries_as_they_are(dtype: torch.dtype, capability: int, monkeypatch) -> None:
    """Masks, weights, normalize and sums of long queries, with documents widened on the chip."""
    skip_fp8(dtype, capability)
    queries, documents = torch.empty(3, 160, 128).bfloat16(), torch.empty(40, 180, 128, dtype=dtype)
    tensors = Tensors(queries, documents, torch.ones(3, 160), torch.ones(40, 180, dtype=torch.bool))
    launch = forward(tensors, Options(normalize=True, masking="zero", empty_score=-1.0), False)
    names = {"_stacked", "_divide_by_norms", "_norms", "_active_tokens", "_add_sums"}
    check_launches(KERNELS, launch, names, capability, monkeypatch)


@pytest.mark.parametrize(("dtype", "candidates"), [(torch.int8, None), (torch.uint8, torch.tensor([0, 3, 4]))])
def test_packed(dtype: torch.dtype, candidates: Tensor | None, capability: int, monkeypatch) -> None:
    bounds = torch.tensor([0, 10, 20, 30, 9030])
    tensors = Tensors(
        torch.empty(2, 32, 96).half(), torch.empty(9030, 96, dtype=dtype), documents_cu_seqlens=bounds,
        candidates_cu_seqlens=candidates,
    )  # fmt: skip
    launch = forward(tensors, Options(0, 9000, 3, normalize=True), True)
    check_launches(KERNELS, launch, {"_stacked", "_divide_by_norms"}, capability, monkeypatch)
