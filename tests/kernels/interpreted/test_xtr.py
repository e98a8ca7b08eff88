"""XTR's kernels in the interpreter: thresholds, ties and documents retrieved as a whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from pylate_flash.kernels import plan_operations, tables
from pylate_flash.kernels import xtr as search
from pylate_flash.kernels import xtr_scores as scores_kernel
from pylate_flash.kernels.launch import Kernel
from pylate_flash.kernels.xtr import SearchTensors, retrieve
from pylate_flash.ops import xtr, xtr_scores, xtr_scores_reference
from pylate_flash.ops.xtr import retrieved_of
from pylate_flash.problem import Options, Rule, Tensors, problem_of
from tests.ops.cases import Case
from tests.ops.xtr_cases import check_scores_and_gradients, xtr_cases


def kernel(*tensors: torch.Tensor, **options) -> torch.Tensor:
    return xtr_scores(*tensors, **options, implementation="triton")


@settings(max_examples=4)
@given(case=xtr_cases(dtypes=(torch.float32, torch.float16), max_batch=3, max_length=4))
def test_scores_and_gradients_equal_the_definition(case: Case) -> None:
    check_scores_and_gradients(kernel, case)


# Queries, documents, k, and the number of groups of a tile's tokens whose maxima are taken.
SHAPES = [
    ((5, 13, 20), (2, 70, 20), 30, 4),  # two blocks of rows, and two tiles of a document
    ((2, 2, 300), (4, 3, 300), 2, 2),  # embeddings block by block, with a tail
    ((1, 3, 16), (9, 3, 16), 2, 0),  # enough documents
]


@pytest.mark.parametrize(("queries", "documents", "k", "groups"), SHAPES)
def test_shapes(queries: tuple[int, ...], documents: tuple[int, ...], k: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings = [torch.randn(shape, generator=generator) for shape in (queries, documents)]
    masks = [torch.rand(tensor.shape[:2], generator=generator) > 0.2 for tensor in embeddings]
    # The first tile of a document, and a whole document.
    masks[1][0, :64] = masks[1][-1] = False
    problem = problem_of(Tensors(*embeddings, *masks), Options())
    assert plan_operations.search_plan(problem, k).groups == groups
    case = Case(*embeddings, *masks, {"k": k, "normalizer": "positive" if groups else "retrieved", "empty_score": -9.0})
    with torch.no_grad():
        actual = kernel(*case.tensors, **case.keywords)
    expected = xtr_scores_reference(*case.doubled().tensors, **case.keywords)
    torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=2e-6)


def test_thresholds_are_found_to_the_last_bit() -> None:
    """Values that differ in their last bits, next to the largest and smallest possible; ties, and infinity."""
    ulp = 2.0**-23
    values = torch.tensor([3e38, 1.0, 1 + ulp, 1 + 2 * ulp, -3e38, -1.0, -1 - ulp, 0.0, -0.0, 1e-45, torch.inf, -2e-45])
    documents = torch.cat([values, values.flip(0), values[:6]]).view(10, 3, 1)
    ordered = documents.flatten().sort(descending=True).values
    queries = torch.ones(1, 1, 1)
    problem = problem_of(Tensors(queries, documents), Options(), True)
    k = 12
    rule = Rule(k, True, 1.0)
    # Too few slots, and enough; more collected tokens than are compacted; no collection at all.
    for maxima, collection in ((0, (10, 1, 1, 32)), (4, (5, 2, 8, 32)), (0, (5, 2, 8, 16)), (4, (0, 0, 0, 0))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tables, "XTR_MAXIMA_PER_TOKEN", maxima)
            planned = plan_operations.Collection(*collection)
            patch.setattr(plan_operations, "_collection", lambda *sizes, planned=planned: planned)
            best, _, state, counts = retrieve(problem, SearchTensors(queries, documents, None, None), rule)
        keys, _, n_equal, tallied = state
        thresholds = torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys).view(torch.float32)
        retrieved = best >= thresholds
        if tallied:
            retrieved &= retrieved_of(*counts.mT, n_equal.unsqueeze(1)).T > 0
        expected = torch.zeros(30, dtype=torch.bool)
        expected[documents.flatten().sort(descending=True, stable=True).indices[:k]] = True
        assert torch.equal(retrieved.flatten(), expected.view(10, 3).any(dim=1))
        # Exactly the values not below the k-th largest reach the threshold.
        reach = documents.flatten() >= thresholds
        assert reach.sum() == (ordered >= ordered[k - 1]).sum()


def test_nan_is_retrieved_first() -> None:
    documents = torch.tensor([[1.0, 2.0], [torch.nan, 0.5], [3.0, torch.nan]]).unsqueeze(-1)
    for k, expected in (
        (3, [0.0, torch.nan, torch.nan]),
        (4, [2.0, torch.nan, torch.nan]),
    ):
        scores = kernel(torch.ones(1, 1, 1), documents, k=k)
        torch.testing.assert_close(scores, torch.tensor([expected]), equal_nan=True)


@pytest.mark.parametrize("sms", [1, 64])
@pytest.mark.parametrize("normalizer", ["positive", "retrieved"])
def test_ties_across_programs(normalizer: str, sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs share the documents of a query: of equal tokens, those of earlier documents are retrieved."""
    monkeypatch.setattr(tables, "architecture", lambda device: (9, sms))
    monkeypatch.setattr(scores_kernel, "_DOCUMENTS", 4)
    # Documents are counted and searched in two parts, for two queries at a time.
    monkeypatch.setattr(scores_kernel, "_COUNTED", 16)
    monkeypatch.setattr(search, "_BLOCK", 16)
    monkeypatch.setattr(xtr, "_MAXIMA_AT_ONCE", 2 * 5 * 1024)
    generator = torch.Generator().manual_seed(0)
    queries, documents = (torch.randint(-1, 2, shape, generator=generator).float() for shape in ((3, 5, 2), (23, 4, 2)))
    active = torch.rand(23, 4, generator=generator) > 0.2
    weights = torch.rand(3, 5, generator=generator).round(decimals=1)
    for k in (1, 17, 60, 90):
        options = {"k": k, "normalizer": normalizer, "queries_mask": weights, "documents_mask": active}
        expected = xtr_scores_reference(queries.double(), documents.double(), **options)
        torch.testing.assert_close(kernel(queries, documents, **options).double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_torch_only_allocates(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small batch takes as long as its launches; every other small operation of torch would add to that."""
    monkeypatch.setattr(Kernel, "__call__", lambda *_: None)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    queries, documents = torch.randn(4, 8, 16), torch.randn(6, 40, 16)
    masks = {"documents_mask": torch.ones(6, 40, dtype=torch.bool)} if masked else {}
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.no_grad(), torch.profiler.profile(activities=activities, acc_events=True) as profile:
        kernel(queries, documents, k=5, **masks)
    names = {event.name for event in profile.events() if event.name.startswith("aten::")}
    assert names == {"aten::empty", "aten::empty_like", "aten::empty_strided"}
