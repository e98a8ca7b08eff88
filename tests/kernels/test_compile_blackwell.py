"""The Blackwell kernel compiles for compute capability 10.0, as it is launched, and is taken only by its name.

It has never run: that it computes what it should is claimed by `tests/gpu/test_blackwell.py`, on such a GPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest
import torch

import make_layouts
from pylate_flash import explain, maxsim, maxsim_cross_entropy
from pylate_flash.kernels import rows, select, tiles
from pylate_flash.kernels.blackwell import forward as blackwell
from pylate_flash.kernels.blackwell.plan import blackwell_plan
from pylate_flash.kernels.forward import common, hopper, maxsim_forward, stacked
from pylate_flash.problem import Options, Tensors, problem_of
from tests.kernels.recorder import check_launches
from tests.kernels.test_compile import inputs, with_masks

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
    pytest.mark.parametrize("capability", [100], indirect=True),
]

KERNELS = {
    blackwell: ("_blackwell",),
    hopper: ("_hopper",),
    stacked: ("_stacked",),
    common: ("_add_sums",),
    rows: ("_active_tokens", "_norms"),
}
OPTIONS = Options(implementation="blackwell")


def forward(tensors: Tensors, options: Options = OPTIONS, with_winners: bool = False) -> Callable[[], object]:
    return lambda: maxsim_forward(problem_of(tensors, options, with_winners), tensors)


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
        make_layouts.blackwell_descriptor(0, make_layouts.width_of(max(16, tiles.power_of_two(size)))) >> 32
    }


def test_everything(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, weights, normalize, winners, a score of empty documents."""
    tensors = with_masks(inputs(torch.bfloat16, 128, 3, 32), torch.float32, torch.bool)
    launch = forward(tensors, OPTIONS._replace(normalize=True, masking="zero", empty_score=-1.0), True)
    names = {"_blackwell", "_active_tokens", "_norms"}
    check_ptx(check_launches(KERNELS, launch, names, capability, monkeypatch)["_blackwell"])


@pytest.mark.parametrize("query_length", [1, 200])
def test_packed_documents(query_length: int, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of queries of one token, which are no sums, and of long ones, whose sums are added up."""
    documents, bounds = torch.empty(70, 256, dtype=torch.bfloat16), torch.tensor([0, 10, 10, 70], dtype=torch.int32)
    tensors = Tensors(torch.empty(40, query_length, 256, dtype=torch.bfloat16), documents, documents_cu_seqlens=bounds)
    launch = forward(tensors, OPTIONS._replace(max_document_length=60), True)
    names = {"_blackwell"} | ({"_add_sums"} if query_length > 1 else set())
    check_ptx(check_launches(KERNELS, launch, names, capability, monkeypatch)["_blackwell"])


def test_only_where_it_is_asked_for(capability: int) -> None:
    tensors = inputs(torch.bfloat16, 128, 32, 32)
    assert select.forward_plan(problem_of(tensors, Options())).kernel == "stacked"
    plan = blackwell_plan(problem_of(tensors, OPTIONS))
    assert plan.kernel == "blackwell"
    assert "never run" in plan.reason


@pytest.mark.parametrize(
    ("tensors", "options", "reason"),
    [
        (inputs(torch.bfloat16, 44, 3, 32), OPTIONS, "copied 16 bytes at a time"),
        (
            Tensors(
                torch.empty(2, 32, 64, dtype=torch.bfloat16),
                torch.empty(9030, 64, dtype=torch.bfloat16),
                documents_cu_seqlens=torch.tensor([0, 30, 9030]),
            ),
            OPTIONS._replace(max_document_length=9000),
            "a document may be longer than 2048 tokens",
        ),
        (
            Tensors(
                torch.empty(2, 32, 64, dtype=torch.bfloat16),
                torch.empty(70, 64, dtype=torch.bfloat16),
                documents_cu_seqlens=torch.tensor([0, 30, 70]),
                candidates_cu_seqlens=torch.tensor([0, 1, 2]),
            ),
            OPTIONS._replace(max_document_length=40, max_candidates=1),
            "candidates of their own",
        ),
    ],
    ids=["strides", "long", "candidates"],
)
def test_what_it_does_not_serve_is_an_error(tensors: Tensors, options: Options, reason: str, capability: int) -> None:
    with pytest.raises(ValueError, match=f'implementation="blackwell" cannot serve this input: .*{reason}'):
        blackwell_plan(problem_of(tensors, options))


def test_devices_and_embeddings_that_it_does_not_take(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(select, "kernels_run_on", lambda device, dtype: None)
    takes = tiles.blackwell_takes.__wrapped__
    monkeypatch.setattr(select, "blackwell_takes", takes)
    choose = select.choose.__wrapped__
    for major, dtype, size, reason in (
        (9, torch.bfloat16, 128, "needs compute capability 10, and cuda has 9"),
        (12, torch.bfloat16, 128, "needs compute capability 10, and cuda has 12"),
        (10, torch.float32, 128, "half precision and at most 256 dimensions"),
        (10, torch.bfloat16, 264, "half precision and at most 256 dimensions"),
    ):
        monkeypatch.setattr(tiles, "architecture", lambda device, major=major: (major, 132))
        with pytest.raises(ValueError, match=f'implementation="blackwell" cannot serve this input: .*{reason}'):
            choose("blackwell", device, dtype, size)
    monkeypatch.setattr(tiles, "architecture", lambda device: (10, 132))
    assert choose("blackwell", device, torch.bfloat16, 256) == "triton"


def test_the_operations_that_take_its_name(capability: int) -> None:
    """Without such a GPU it is an error that says so; elsewhere the name is none of the choices."""
    queries, documents = inputs(torch.bfloat16, 16, 2, 3)[:2]
    for call in (maxsim, explain):
        with pytest.raises(ValueError, match='implementation="blackwell" cannot serve this input: .*CUDA'):
            call(queries, documents, implementation="blackwell")
    with pytest.raises(ValueError, match="implementation must be"):
        maxsim_cross_entropy(queries, documents, implementation="blackwell")
