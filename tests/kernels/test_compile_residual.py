"""The kernels of residual codes compile for compute capability 8.0, 9.0, 10.0 and 12.0, without a GPU."""

from __future__ import annotations

import os
import re

import pytest
import torch
from torch import Tensor
from triton.tools.disasm import get_sass

from pylate_flash.kernels.backward import residual
from pylate_flash.kernels.backward.residual import residual_backward
from pylate_flash.kernels.forward import Codes, common, residual_forward, stacked
from pylate_flash.kernels.plan_backward import residual_gradient_plan
from pylate_flash.problem import Options, Problem, Tensors, problem_of
from tests.kernels.recorder import check_launches

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

KERNELS = {stacked: ("_stacked",), residual: ("_gradient",), common: ("_add_sums",)}


def call(
    queries: Tensor,
    nbits: int,
    candidates: Tensor | None = None,
    mask: Tensor | None = None,
    with_winners: bool = False,
) -> tuple[Problem, Tensors, Codes]:
    """A call with 200 documents of 180 tokens."""
    n_tokens, size = 200 * 180, queries.shape[-1]
    codes = Codes(
        torch.zeros(n_tokens, dtype=torch.int32), torch.zeros(n_tokens, size * nbits // 8, dtype=torch.uint8),
        torch.zeros(64, size).half(), torch.zeros(1 << nbits).half(), torch.arange(201, dtype=torch.int32) * 180,
        torch.ones(n_tokens), candidates,
    )  # fmt: skip
    shaped = torch.zeros(1).expand(n_tokens, size)
    tensors = Tensors(queries, shaped, mask, documents_cu_seqlens=codes.cu_seqlens)
    problem = problem_of(tensors, Options(0, 180), with_winners)
    if candidates is not None:
        problem = problem._replace(groups=len(queries), n_documents=candidates.shape[1])
    return problem, tensors, codes


def compiled_forward(arguments: tuple[Problem, Tensors, Codes], names: set[str], capability: int, monkeypatch):
    launch = lambda: residual_forward(*arguments)  # noqa: E731
    return check_launches(KERNELS, launch, names, capability, monkeypatch)["_stacked"]


@pytest.mark.parametrize("capability", [80, 100, 120], indirect=True)
def test_centroids_are_copied_ahead(capability: int, monkeypatch) -> None:
    """They go to shared memory 16 bytes at a time, in the background, and weights are looked up there."""
    compiled = compiled_forward(call(torch.empty(32, 32, 128).half(), 4), {"_stacked"}, capability, monkeypatch)
    check_copies(compiled.asm["ptx"])


@pytest.mark.parametrize("capability", [90], indirect=True)
@pytest.mark.parametrize(
    ("nbits", "n_queries", "with_winners"), [(4, 1, False), (4, 32, False), (4, 32, True), (2, 1, False)]
)
def test_hopper_keeps_everything_in_registers(
    nbits: int, n_queries: int, with_winners: bool, capability: int, monkeypatch
) -> None:
    arguments = call(torch.empty(n_queries, 32, 128).bfloat16(), nbits, with_winners=with_winners)
    compiled = compiled_forward(arguments, {"_stacked"}, capability, monkeypatch)
    assert re.search(r"wgmma\S*\.bf16\.bf16", compiled.asm["ptx"])
    check_copies(compiled.asm["ptx"])
    # What spills is loaded again from local memory.
    assert "LDL" not in get_sass(compiled.asm["cubin"])


def check_copies(ptx: str) -> None:
    copied = re.findall(r"cp\.async\.\w+\.shared\.global \[[^]]*\], \[[^]]*\], (0x\w+)", ptx)
    assert "0x10" in copied
    assert "ld.shared.b16" in ptx


@pytest.mark.parametrize("capability", [80, 90], indirect=True)
@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 160, 96), torch.float16), ((3, 20, 768), torch.bfloat16), ((1, 32, 32), torch.float32)]
)
def test_everything(shape: tuple[int, ...], dtype: torch.dtype, capability: int, monkeypatch) -> None:
    """Winners and weights, of padded and split embeddings; and the gradient, with its documents shared out."""
    queries, mask = torch.empty(shape, dtype=dtype), torch.ones(shape[:-1])
    for candidates in (None, torch.zeros(shape[0], 50, dtype=torch.int64)):
        arguments = call(queries, 4, candidates, mask, with_winners=True)
        names = {"_stacked"} | ({"_add_sums"} if shape[1] != 32 else set())
        compiled_forward(arguments, names, capability, monkeypatch)
        problem, *given = arguments
        winners = torch.zeros(problem.groups * problem.n_documents, problem.rows, dtype=torch.int32)
        launch = lambda: residual_backward(problem, *given, torch.ones(problem.scores_shape), winners)  # noqa: E731, B023
        check_launches(KERNELS, launch, {"_gradient"}, capability, monkeypatch)
    assert residual_gradient_plan(problem).n_splits > 1
