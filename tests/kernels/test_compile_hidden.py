"""The kernels that project hidden states compile for Hopper, the one architecture that they are written for."""

from __future__ import annotations

import os
import re

import pytest
import torch

from pylate_flash.kernels import plan_operations, tables
from pylate_flash.kernels.hidden import fused, projection
from pylate_flash.problem import Options, Tensors
from tests.kernels.recorder import record

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "architecture", lambda device: (9, 132))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "d_model", "n_queries", "packed", "everything"),
    [
        (128, 768, 1, False, False), (128, 768, 4, True, False), (96, 1000, 3, False, True), (16, 8, 1, True, True),
        (128, 4096, 4, False, True),
    ],
)  # fmt: skip
def test_fused(
    size: int, d_model: int, n_queries: int, packed: bool, everything: bool, dtype: torch.dtype, monkeypatch
) -> None:
    """The second product takes its first operand from registers, and the copy engine copies."""
    kernel, finish = (record(fused, name, monkeypatch) for name in ("_fused", "_finish"))
    queries_mask, documents_mask = (torch.bool, torch.bool) if everything else (None, None)
    launch(size, d_model, n_queries, packed, dtype, queries_mask, documents_mask)
    compiled = kernel.compile(90)
    products = re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, (\S)", compiled.asm["ptx"])
    assert {"%", "{"} == set(products), "states come from shared memory, embeddings from registers"
    assert compiled.asm["ptx"].count("cp.async.bulk.tensor.2d") == 3, "two parts and the weight"
    # It may start early, and waits for what it reads.
    assert "griddepcontrol.launch_dependents" in compiled.asm["ptx"]
    assert finish.follows
    finish.compile(90)


@pytest.mark.parametrize("documents_mask", [torch.int64, torch.float32])
@pytest.mark.parametrize("queries_mask", [torch.int64, torch.float16])
def test_masks_of_any_type(queries_mask: torch.dtype, documents_mask: torch.dtype, monkeypatch) -> None:
    recorders = [record(fused, name, monkeypatch) for name in ("_fused", "_finish")]
    launch(64, 72, 2, False, torch.bfloat16, queries_mask, documents_mask, reduction="mean", empty_score=-1)
    for recorder in recorders:
        recorder.compile(90)


def launch(
    size: int,
    d_model: int,
    n_queries: int,
    packed: bool,
    dtype: torch.dtype,
    queries_mask: torch.dtype | None,
    documents_mask: torch.dtype | None,
    **options,
) -> None:
    """Score 40 documents of 180 states; with masks, with a bias, and those of documents count as zeros."""
    queries, weight = torch.empty(n_queries, 32, size, dtype=dtype), torch.empty(size, d_model, dtype=dtype)
    hidden = torch.empty(40, 180, d_model, dtype=dtype)
    bias = None if queries_mask is None else weight[:, 0].contiguous()
    tensors = Tensors(
        queries,
        hidden.flatten(0, 1) if packed else hidden,
        None if queries_mask is None else torch.ones(n_queries, 32, dtype=queries_mask),
        None if packed or documents_mask is None else torch.ones(40, 180, dtype=documents_mask),
        documents_cu_seqlens=torch.arange(41, dtype=torch.int32) * 180 if packed else None,
    )
    plan = plan_operations.fused_plan(n_queries * 32, 40 * 180, weight.shape, dtype, weight.device)
    assert plan is not None
    fused.score(plan, tensors, Options(normalize=True, masking="zero", **options), weight, bias)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("size", "d_model"), [(128, 768), (96, 1000), (16, 8)])
def test_projection(size: int, d_model: int, normalize: bool, monkeypatch) -> None:
    hidden, weight = torch.empty(300, d_model).bfloat16(), torch.empty(size, d_model).bfloat16()
    kernel = record(projection, "_project", monkeypatch)
    plan = plan_operations.fused_plan(1, 300, weight.shape, weight.dtype, weight.device)
    assert plan is not None
    scales = torch.empty(300) if normalize else None
    projection.project(plan, hidden, weight, weight[:, 0].contiguous(), hidden.new_empty(300, size), scales)
    compiled = kernel.compile(90)
    assert "wgmma" in compiled.asm["ptx"]
    stores = re.findall(r"st\.global\.(\S+)", compiled.asm["ptx"])
    assert set(stores) <= {"v4.b32", "b32"}, "embeddings leave by 16 bytes, norms by 4"


@pytest.mark.parametrize(
    ("rows", "tokens", "size", "d_model", "dtype", "served"),
    [
        (1, 1, 8, 8, torch.float16, True),
        (128, 1, 128, 768, torch.bfloat16, True),
        (129, 1, 128, 768, torch.bfloat16, False),
        (32, 0, 128, 768, torch.bfloat16, False),
        (32, 1 << 31, 128, 768, torch.bfloat16, False),
        (32, 300, 256, 768, torch.bfloat16, False),
        (32, 300, 128, 100, torch.bfloat16, False),
        (32, 300, 128, 768, torch.float32, False),
    ],
)
def test_what_is_served(rows: int, tokens: int, size: int, d_model: int, dtype: torch.dtype, served: bool) -> None:
    plan = plan_operations.fused_plan(rows, tokens, (size, d_model), dtype, torch.device("cpu"))
    assert (plan is not None) == served


def test_few_tiles_have_as_many_programs() -> None:
    plans = [
        plan_operations.fused_plan(1, n, (128, 768), torch.float16, torch.device("cpu")) for n in (1, 256, 257, 1 << 20)
    ]
    assert [(plan.n_tiles, plan.programs) for plan in plans] == [(1, 1), (1, 1), (2, 2), (4096, 132)]
