"""The Blackwell kernel of docs/layouts compiles for compute capability 10.0, as it is launched.

It has never run: that it computes what it should is claimed by `tests/gpu/test_blackwell.py`, on such a GPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest
import torch

import blackwell
import make_layouts
from pylate_flash.kernels import rows, tables
from pylate_flash.kernels.forward import common
from pylate_flash.problem import Options, Tensors, problem_of
from tests.kernels.recorder import check_launches
from tests.kernels.test_compile import inputs, with_masks

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
    pytest.mark.parametrize("capability", [100], indirect=True),
]

KERNELS = {
    blackwell: ("_blackwell",),
    common: ("_add_sums",),
    rows: ("_active_tokens", "_norms"),
}


def forward(tensors: Tensors, options: Options | None = None, with_winners: bool = False) -> Callable[[], object]:
    return lambda: blackwell.blackwell_forward(problem_of(tensors, options or Options(), with_winners), tensors)


def check_ptx(compiled) -> str:
    """Products are tcgen05's, and tokens are copied 16 bytes at a time, by threads that wait for no product."""
    ptx = compiled.asm["ptx"]
    assert "tcgen05.mma.cta_group::1.kind::f16" in ptx
    assert set(re.findall(r"cp\.async\.\w+\.shared\.global \[[^]]*\], \[[^]]*\], (0x\w+)", ptx)) == {"0x10"}
    assert compiled.metadata.tmem_size <= 512
    return ptx


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 8), (torch.float16, 96)])
def test_forward(dtype: torch.dtype, size: int, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands lie in the atoms of Hopper, with descriptors of another form, as docs/layouts.md says."""
    compiled = check_launches(KERNELS, forward(inputs(dtype, size, 32, 32)), {"_blackwell"}, capability, monkeypatch)
    ptx = check_ptx(compiled["_blackwell"])
    # In one piece, or in two that are put together.
    constants = [int(value) % (1 << 64) >> 32 for value in re.findall(r"or\.b64\s+%rd\d+, %rd\d+, (-?\d+);", ptx)]
    moved = dict(re.findall(r"mov\.b32\s+(%r\d+), (-?\d+);", ptx))
    together = [moved[high] for high in re.findall(r"mov\.b64\s+%rd\d+, \{%r\d+, (%r\d+)\};", ptx) if high in moved]
    found = {high for high in (*constants, *(int(value) % (1 << 32) for value in together)) if high}
    assert found == {
        make_layouts.blackwell_descriptor(0, make_layouts.width_of(max(16, tables.power_of_two(size)))) >> 32
    }


def test_everything(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, weights, normalize, winners, a score of empty documents."""
    tensors = with_masks(inputs(torch.bfloat16, 128, 3, 32), torch.float32, torch.bool)
    launch = forward(tensors, Options(normalize=True, masking="zero", empty_score=-1.0), True)
    names = {"_blackwell", "_active_tokens", "_norms"}
    check_ptx(check_launches(KERNELS, launch, names, capability, monkeypatch)["_blackwell"])


@pytest.mark.parametrize("query_length", [1, 200])
def test_packed_documents(query_length: int, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of queries of one token, which are no sums, and of long ones, whose sums are added up."""
    documents, bounds = torch.empty(70, 256, dtype=torch.bfloat16), torch.tensor([0, 10, 10, 70], dtype=torch.int32)
    tensors = Tensors(torch.empty(40, query_length, 256, dtype=torch.bfloat16), documents, documents_cu_seqlens=bounds)
    launch = forward(tensors, Options(max_document_length=60), True)
    names = {"_blackwell"} | ({"_add_sums"} if query_length > 1 else set())
    check_ptx(check_launches(KERNELS, launch, names, capability, monkeypatch)["_blackwell"])
