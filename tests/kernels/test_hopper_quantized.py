"""The Hopper kernel's products of 8 bits, compiled for compute capability 9.0 without a GPU, and where it is chosen."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.tools.disasm import get_sass

from pylate_flash import kernels
from pylate_flash.kernels.forward import products
from pylate_flash.kernels.plan import quantized_plan
from pylate_flash.kernels.versions import triton_version
from pylate_flash.ops.quantized import problem_of_quantized
from pylate_flash.problem import Options, Problem, Tensors
from tests.kernels.recorder import check_launches
from tests.kernels.test_compile_quantized import KERNELS, forward

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


@pytest.mark.parametrize("capability", [90], indirect=True)
@pytest.mark.parametrize(
    ("dtype", "shape", "length", "masked"),
    [
        (torch.int8, (8, 128, 128), 1024, False),
        (torch.int8, (4, 32, 256), 180, True),
        (torch.float8_e4m3fn, (12, 32, 96), 180, True),
    ],
    ids=str,
)
def test_hopper_has_queries_in_registers_and_scales_beside_the_tokens(
    dtype: torch.dtype, shape: tuple[int, int, int], length: int, masked: bool, capability: int, monkeypatch
) -> None:
    """And spills nothing, converts no sum, and loads nothing while a product is under way."""
    queries, documents = torch.empty(shape).bfloat16(), torch.empty(40, length, shape[-1], dtype=dtype)
    mask = torch.ones(40, length, dtype=torch.bool) if masked else None
    launch = forward(Tensors(queries, documents, None, mask), Options(masking="zero" if masked else "exclude"), True)
    monkeypatch.setattr(kernels.forward, "active_tokens", lambda mask: (mask.int(), torch.zeros(80, dtype=torch.int32)))
    compiled = check_launches(KERNELS, launch, {"_hopper", "_quantize_rows"}, capability, monkeypatch)["_hopper"]
    ptx, kind = compiled.asm["ptx"], "s32.s8.s8" if dtype == torch.int8 else "f32.e4m3.e4m3"
    products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+k32)\.(\S+) \{[^}]*\}, (\S)", ptx)
    narrow = {"m64n64k32"} if masked else set()
    assert {(columns, of, first) for columns, of, first in products} == {
        (columns, kind, "{") for columns in {"m64n128k32"} | narrow
    }
    copies = re.findall(r"cp\.async\.(\w+)\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)
    assert set(copies) == {("cg", "0x10"), ("ca", "0x4")}
    under_way = re.findall(r"wgmma\.commit_group.*?wgmma\.wait_group", ptx, re.DOTALL)
    assert under_way
    assert not any("ld." in part for part in under_way)
    assert re.search(r"wgmma\.wait_group[^;]*;(?:(?!wgmma).)*ld\.shared", ptx, re.DOTALL)
    sass = get_sass(compiled.asm["cubin"])
    assert "LDL" not in sass or triton_version() > (3, 6)
    assert "I2FP" not in sass


def test_a_multiply_add_makes_of_an_integers_bits_what_a_conversion_and_a_product_make() -> None:
    """The arithmetic of `products.scaled` and `unscaled`, with the kernel's constants, rounded to the same bits."""
    generator = np.random.default_rng(0)
    largest = 128 * 127 * 512
    integers = np.concatenate([np.arange(-1000, 1001), generator.integers(-largest, largest + 1, 200_000), [-largest]])
    scales = np.exp2(generator.uniform(-60, 60, len(integers))).astype(np.float32)
    floats = (integers + products._BITS_OF_ONE.value).astype(np.int32).view(np.float32)
    # The product has 48 bits, and float64 room for 53: rounded once, when it becomes float32.
    scaled = (floats.astype(np.float64) * scales - scales).astype(np.float32)
    unit = np.float32(products._INTEGER_UNIT.value)
    assert np.array_equal(scaled * np.where(scaled < 0, 2 * unit, unit), integers.astype(np.float32) * scales)
    # Halved, what is negative stays below what is not.
    assert np.array_equal(scaled < 0, integers < 0)


@pytest.mark.parametrize("capability", [90], indirect=True)
def test_hopper_sums_products_of_fp8_as_the_plain_kernel(capability: int, monkeypatch) -> None:
    """Neither adds up sums of a few products outside the tensor cores."""
    found = []
    for n_queries, names in ((2, {"_stacked"}), (12, {"_hopper", "_quantize_rows"})):
        documents = torch.empty(40, 180, 128, dtype=torch.float8_e4m3fn)
        launch = forward(Tensors(torch.empty(n_queries, 32, 128).half(), documents), Options(), True)
        compiled = check_launches(KERNELS, launch, names, capability, monkeypatch)[max(names - {"_quantize_rows"})]
        found.append(set(re.findall(r"maxNumImpreciseAcc = (\d+)", compiled.asm["ttgir"])))
    assert found[0] == found[1]
    assert len(found[0]) == 1


def problem(
    queries: tuple[int, ...], documents: tuple[int, ...], dtype: torch.dtype = torch.int8, quantize_queries: bool = True
) -> Problem:
    tensors = Tensors(torch.empty(queries).bfloat16(), torch.empty(documents, dtype=dtype))
    return problem_of_quantized(tensors, Options(), quantize_queries)


def packed_problem(candidates: Tensor | None) -> Problem:
    bounds = torch.tensor([0, 10, 20, 30, 9030])
    queries, documents = torch.empty(3, 80, 96).half(), torch.empty(9030, 96, dtype=torch.int8)
    tensors = Tensors(queries, documents, None, None, None, bounds, candidates)
    return problem_of_quantized(tensors, Options(0, 9000, 2), True)


@pytest.mark.parametrize("capability", [80, 90, 100], indirect=True)
def test_what_the_hopper_kernel_serves(capability: int) -> None:
    for served, block, tail in (
        (problem((32, 32, 128), (40, 180, 128)), 256, 64),
        (problem((32, 32, 128), (40, 250, 128)), 256, 0),
        (problem((1, 1024, 128), (40, 1024, 128), torch.float8_e4m3fn), 256, 0),
        (problem((3, 32, 96), (40, 7, 96)), 128, 64),
        (problem((32, 32, 256), (40, 180, 256)), 128, 64),
        (problem((4, 150, 16), (4, 5, 180, 16)), 256, 64),
        (packed_problem(None), 256, 64),
    ):
        plan = quantized_plan(served)
        assert plan.kernel == ("hopper" if capability == 90 else "stacked"), plan.reason
        assert not plan.in_pieces
        if capability == 90:
            assert (plan.tile.rows, plan.tile.columns) == (block, 128)
            assert plan.config.tail == tail
            assert plan.padded // plan.n_sums <= plan.tile.rows // plan.tile.parts, "a sum lies within one part"
    shifted = torch.empty(40 * 180 * 128 + 1, dtype=torch.int8)[1:].view(40, 180, 128)
    unaligned = Tensors(torch.empty(32, 32, 128).bfloat16(), shifted)
    for not_served, reason in (
        (problem((32, 32, 128), (40, 180, 128), quantize_queries=False), "int8 or fp8 by the same"),
        (problem((32, 32, 128), (40, 180, 128), torch.uint8), "int8 or fp8 by the same"),
        (problem((32, 32, 272), (40, 180, 272)), "at most 256 dimensions"),
        (problem((32, 32, 72), (40, 180, 72)), "copied 16 bytes at a time"),
        (problem_of_quantized(unaligned, Options(), True), "copied 16 bytes at a time"),
        (problem((2, 32, 128), (40, 180, 128)), "fewer than 65 query tokens"),
        (problem((32, 32, 128), (32, 5, 180, 128)), "fewer than 65 query tokens"),
        (packed_problem(torch.tensor([0, 2, 3, 4])), "candidates"),
    ):
        plan = quantized_plan(not_served)
        assert plan.kernel == "stacked"
        assert (reason in plan.reason) == (capability == 90)
