"""XTR's kernels compile for compute capability 8.0 and 9.0, as they are launched."""

from __future__ import annotations

import os

import pytest
import torch

from pylate_flash.kernels import masks
from pylate_flash.kernels.xtr import plan_of, retrieve, score_retrieved, scores, search, walk
from pylate_flash.ops.problem import Options, Problem, Tensors, problem_of
from pylate_flash.ops.xtr_retrieval import Pool, Retrieval, pool_of
from tests.kernels.recorder import record

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


def problem(dtype: torch.dtype, size: int, masked: bool) -> tuple[Problem, Tensors, Pool]:
    queries, documents = torch.zeros(64, 32, size, dtype=dtype), torch.zeros(100, 180, size, dtype=dtype)
    active = torch.ones(100, 180, dtype=torch.bool)
    tensors = Tensors(queries, documents, None, active if masked else None)
    return problem_of(tensors, Options(), True), tensors, pool_of(active, 256, True)


@pytest.mark.parametrize(
    ("dtype", "size", "masked", "capability"),
    [(torch.bfloat16, 128, False, 80), (torch.bfloat16, 128, False, 90), (torch.float32, 96, True, 90)],
    indirect=["capability"],
)
def test_each_step_of_a_search(dtype: torch.dtype, size: int, masked: bool, capability: int, monkeypatch) -> None:
    given, tensors, pool = problem(dtype, size, masked)
    plan = plan_of(given, pool.k)
    assert plan.groups == 4
    names = {search: ("_begin", "_select", "_narrow"), masks: ("_active_tokens",), walk: ("_walk",)}
    recorders = {name: record(module, name, monkeypatch) for module, found in names.items() for name in found}
    retrieve(given, tensors, pool)
    launches = {name: recorder.launches for name, recorder in recorders.items()}
    assert launches == {"_begin": 1, "_select": 1, "_narrow": 4, "_active_tokens": int(masked), "_walk": 7}

    walked, places = recorders["_walk"], torch.zeros(2, 2, dtype=torch.int32)
    inputs = walk.Inputs(tensors.queries, tensors.documents, *([places, places] if masked else [None, None]))
    walk.collect(given, plan, inputs, places, places, places)
    walked.compile(capability)
    if not masked and capability == 90:
        for name in ("_begin", "_select", "_narrow"):
            recorders[name].compile(capability)
        walk.find_maxima(given, plan, inputs, torch.zeros(2), places.short(), torch.zeros(2))
        walked.compile(capability)
        walk.count_bins(given, plan, inputs, places, places)
        walked.compile(capability)
        state = torch.zeros(4, 2, dtype=torch.int32)
        walk.tally(given, plan, inputs, state, True, (torch.zeros(2), places[0] != 0, places.short()))
        walked.compile(capability)


@pytest.mark.parametrize(("weights", "with_whole"), [(None, True), (torch.float32, False), (torch.bool, True)])
@pytest.mark.parametrize("capability", [80, 90], indirect=True)
def test_scores_of_what_is_retrieved(
    weights: torch.dtype | None, with_whole: bool, capability: int, monkeypatch
) -> None:
    recorder, rows = record(scores, "_score", monkeypatch), 4 * 48
    of_rows, of_both = torch.zeros(rows), torch.zeros(300, rows)
    found = Retrieval(of_both, of_both.short(), of_rows, of_rows.int(), of_rows != 0, of_both.short(), of_both.short())
    active = torch.ones(300, 180, dtype=torch.bool)
    mask = None if weights is None else torch.ones(4, 48, dtype=weights)
    to = torch.zeros(4, 300), torch.zeros(4, 300), of_both.short()
    score_retrieved(found, pool_of(active, 256, with_whole), mask, 1.0, 0.0, to)
    recorder.compile(capability)
