"""The Blackwell kernel of docs/layouts compiles for compute capability 10.0, with arguments of real launches.

It has never run: `tests/gpu/test_blackwell.py` checks its results, on such a GPU.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch

import blackwell
import make_layouts
from pylate_flash.kernels import tables
from pylate_flash.problem import Options, Tensors, problem_of
from tests.kernels.recorder import compiled
from tests.kernels.test_compile import ARGMAX, BF16, EVERYTHING, F16, WEIGHTS, inputs

pytestmark = pytest.mark.parametrize("capability", [100], indirect=True)


def ptx_of(tensors: Tensors, names: str, capability: int, with_argmax: bool = False, **options: Any) -> str:
    """PTX, with tcgen05 products and token copies of 16 bytes, by threads that do not wait for products."""
    problem = problem_of(tensors, Options(**options), with_argmax)
    result = compiled(partial(blackwell.blackwell_forward, problem, tensors), names, capability)["blackwell"]
    ptx = result.asm["ptx"]
    assert "tcgen05.mma.cta_group::1.kind::f16" in ptx
    assert set(re.findall(r"cp\.async\.\w+\.shared\.global \[[^]]*\], \[[^]]*\], (0x\w+)", ptx)) == {"0x10"}
    assert result.metadata.tmem_size <= 512
    return ptx


@pytest.mark.parametrize(("dtype", "size"), [(BF16, 8), (F16, 96)])
def test_forward(dtype: torch.dtype, size: int, capability: int) -> None:
    """Operands have the swizzle atoms of Hopper, with another form of descriptors, as docs/layouts.md says."""
    ptx = ptx_of(inputs((32, 32, size), (40, 180, size), dtype), "blackwell", capability)
    # A descriptor is one 64-bit constant, or is put together from two halves.
    constants = [int(value) % (1 << 64) >> 32 for value in re.findall(r"or\.b64\s+%rd\d+, %rd\d+, (-?\d+);", ptx)]
    moves = dict(re.findall(r"mov\.b32\s+(%r\d+), (-?\d+);", ptx))
    combined = [moves[high] for high in re.findall(r"mov\.b64\s+%rd\d+, \{%r\d+, (%r\d+)\};", ptx) if high in moves]
    results = {high for high in (*constants, *(int(value) % (1 << 32) for value in combined)) if high}
    assert results == {
        make_layouts.blackwell_descriptor(0, make_layouts.width_of(max(16, tables.power_of_two(size)))) >> 32
    }


def test_everything(capability: int) -> None:
    """Masks, weights, normalize, argmax, a score of empty documents."""
    tensors = inputs((3, 32, 128), (40, 180, 128), **WEIGHTS)
    ptx_of(tensors, "blackwell active_tokens rows", capability, **EVERYTHING)


@pytest.mark.parametrize("query_length", [1, 200])
def test_packed_documents(query_length: int, capability: int) -> None:
    """Queries of one token, which need no sums, and long ones, whose partial sums are added up."""
    tensors = inputs((40, query_length, 256), (70, 256))
    tensors = tensors._replace(documents_cu_seqlens=torch.tensor([0, 10, 10, 70], dtype=torch.int32))
    ptx_of(tensors, "blackwell", capability, **ARGMAX, max_document_length=60)
