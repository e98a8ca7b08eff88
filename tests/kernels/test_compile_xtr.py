"""XTR's kernels compile for compute capability 8.0 and 9.0, as they are launched."""

from __future__ import annotations

import os

import pytest
import torch

from pylate_flash.kernels.plan_operations import search_plan
from pylate_flash.kernels.xtr import SearchTensors, retrieve, score_retrieved, scores, search, walk
from pylate_flash.kernels.xtr.scores import Retrieved
from pylate_flash.problem import Options, Problem, Results, Rule, Tensors, problem_of
from tests.kernels.recorder import record

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


def call(dtype: torch.dtype, size: int, masked: bool) -> tuple[Problem, SearchTensors]:
    queries, documents = torch.zeros(64, 32, size, dtype=dtype), torch.zeros(100, 180, size, dtype=dtype)
    active, bounds = (torch.zeros(100, n, dtype=torch.int32) if masked else None for n in (180, 2))
    return problem_of(Tensors(queries, documents), Options(), True), SearchTensors(queries, documents, active, bounds)


@pytest.mark.parametrize(
    ("dtype", "size", "masked", "capability"),
    [(torch.bfloat16, 128, False, 80), (torch.bfloat16, 128, False, 90), (torch.float32, 96, True, 90)],
    indirect=["capability"],
)
def test_each_step_of_a_search(dtype: torch.dtype, size: int, masked: bool, capability: int, monkeypatch) -> None:
    given, inputs = call(dtype, size, masked)
    rule = Rule(256, True, 1e-3)
    plan = search_plan(given, rule.k)
    assert plan.groups == 4
    names = {search: ("begin", "select", "narrow"), walk: ("_walk",)}
    recorders = {name: record(module, name, monkeypatch) for module, found in names.items() for name in found}
    best, winners, state, counts = retrieve(given, inputs, rule)
    launches = {name: recorder.launches for name, recorder in recorders.items()}
    assert launches == {"begin": 1, "select": 1, "narrow": 3, "_walk": 6}

    walked, scratch = recorders["_walk"], torch.zeros(2, 2, dtype=torch.int32)
    walk.walk_similarities(given, plan, inputs, walk.COLLECT, scratch=scratch, state=state, counts=scratch)
    walked.compile(capability)
    recorders["begin"].compile(capability)
    if not masked and capability == 90:
        recorders["select"].compile(capability)
        recorders["narrow"].compile(capability)
        walk.walk_similarities(given, plan, inputs, walk.MAXIMA, best, winners, scratch)
        walked.compile(capability)
        walk.walk_similarities(given, plan, inputs, walk.BINS, scratch=scratch, state=state)
        walked.compile(capability)
        walk.walk_similarities(given, plan, inputs, walk.TALLY, state=state, counts=counts)
        walked.compile(capability)


@pytest.mark.parametrize(
    ("weights", "with_whole", "masked"), [(None, True, False), (torch.float32, False, True), (torch.bool, True, True)]
)
@pytest.mark.parametrize("capability", [80, 90], indirect=True)
def test_scores_of_what_is_retrieved(
    weights: torch.dtype | None, with_whole: bool, masked: bool, capability: int, monkeypatch
) -> None:
    recorder = record(scores, "_score", monkeypatch)
    of_both = torch.zeros(300, 4 * 48)
    bounds = torch.zeros(300, 2, dtype=torch.int32) if masked else None
    given = problem_of(Tensors(torch.zeros(4, 48, 16), torch.zeros(300, 180, 16)), Options(), True)
    found = Retrieved(of_both, of_both.short(), torch.zeros(4, 4 * 48, dtype=torch.int32), of_both.short())
    mask = None if weights is None else torch.ones(4, 48, dtype=weights)
    to = Results(torch.zeros(4, 300), of_both.short(), torch.zeros(4, 300))
    score_retrieved(given, found, bounds, mask, Rule(256, with_whole, 1.0), to)
    recorder.compile(capability)
