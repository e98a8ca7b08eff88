from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from pylate_flash.bench import l2, protocol, rows  # noqa: E402
from suites import soft  # noqa: E402


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_read_goes_past_the_l1_cache_and_stays(capability):
    """Only the loop's loads read global memory, in words of 16 bytes, and none is hoisted out of the loop."""
    source = ASTSource(
        l2._read,
        signature={"source": "*i32", "sums": "*i32", "tiles": "i32", "reads": "i32", "TILE": "constexpr"},
        constexprs={"TILE": l2.TILE},
        attrs={(0,): [["tt.divisibility", 16]]},
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    loads = [line for line in kernel.asm["ptx"].splitlines() if "ld.global" in line]
    # 4096 integers, by 256 threads, four at a time.
    assert len(loads) == l2.TILE // 256 // 4
    assert all("ld.global.cg.v4" in line for line in loads)


def test_it_is_measured_on_request_and_on_a_gpu_only(monkeypatch):
    sizes = {"matmul_size": 8, "copy_bytes": 1024}
    cpu = torch.device("cpu")
    for extra in ({}, rows.L2):
        assert protocol.measure_ceilings(cpu, torch.float32, others=extra, **sizes).l2_bytes_per_second is None


@pytest.mark.parametrize("capability", [80, 90])
def test_exponentials_are_one_instruction_each_and_stay_in_registers(capability):
    """One instruction of the special function units for every value of a thread, and one store of the sum."""
    source = ASTSource(
        soft._exponentials,
        signature={"sums": "*fp32", "repeats": "i32", "TILE": "constexpr"},
        constexprs={"TILE": soft.TILE},
        attrs={},
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    lines = kernel.asm["ptx"].splitlines()
    assert sum("ex2.approx" in line for line in lines) == soft.TILE // 256
    assert sum("ld.global" in line for line in lines) == 0
    assert sum("st.global" in line for line in lines) == 1
