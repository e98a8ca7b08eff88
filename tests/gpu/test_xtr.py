"""XTR's scores on a GPU: against their definition, to the last token, reproducible, and in little memory."""

from __future__ import annotations

import pytest
import torch

from pylate_flash.kernels import plan_operations
from pylate_flash.kernels.xtr import TALLY, SearchTensors, retrieve, walk_similarities
from pylate_flash.ops import xtr, xtr_scores, xtr_scores_reference
from pylate_flash.problem import Options, Rule, Tensors, problem_of
from tests.gpu.tools import FLOAT, HALF, equal, exact, memory_of, products_in, random_mask, unit
from tests.ops.cases import Case, gradients, relative_error
from tests.ops.xtr_cases import check_scores_and_gradients

pytestmark = pytest.mark.gpu

# Queries, documents, k and dtype.
SHAPES = [
    ((16, 32, 128), (60, 180, 128), 256, HALF),
    ((16, 32, 128), (60, 180, 128), 256, FLOAT),
    ((3, 300, 64), (1200, 20, 64), 256, torch.float16),
    ((2, 7, 96), (40, 70, 96), 10, HALF),
    ((5, 9, 300), (30, 33, 300), 50, FLOAT),
    ((9, 40, 192), (30, 130, 192), 40, HALF),
    ((9, 40, 320), (30, 130, 320), 40, HALF),
    ((2, 40, 768), (20, 130, 768), 3, HALF),
    ((4, 32, 128), (5000, 3, 128), 1000, HALF),
    ((1, 1, 17), (1, 1, 17), 1, FLOAT),
]


def kernel(*tensors: torch.Tensor, **options) -> torch.Tensor:
    return xtr_scores(*tensors, **options, implementation="triton")


@pytest.mark.parametrize("normalizer", ["positive", "retrieved"])
@pytest.mark.parametrize(("queries", "documents", "k", "dtype"), SHAPES)
def test_shapes_with_many_ties(queries, documents, k: int, dtype: torch.dtype, normalizer: str) -> None:
    """Multiples of 1/4, with exact products and sums: it matters which of thousands of equal tokens are retrieved."""
    embeddings = [exact(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate((queries, documents))]
    for masked in (False, True):
        masks = [random_mask(e.shape[:2], 0.8) if masked else None for e in embeddings]
        case = Case(*embeddings, *masks, {"k": k, "normalizer": normalizer, "empty_score": -3.0})
        check_scores_and_gradients(kernel, case)


@pytest.mark.parametrize("way", ["as planned", "no room", "bins"])
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize(("queries", "documents", "k", "dtype"), SHAPES)
def test_exactly_k_tokens_are_retrieved(
    queries, documents, k: int, dtype: torch.dtype, precision: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps of a search see the same bits: in every row, exactly k tokens reach its threshold."""
    if way != "as planned":
        # Few slots, too few for some rows; or none.
        small = plan_operations.Collection(-(-documents[0] // 2), 2, 2, 1024)
        collection = small if way == "no room" else plan_operations.Collection(0, 0, 0, 0)
        monkeypatch.setattr(plan_operations, "_collection", lambda *sizes: collection)
    with products_in(precision):
        tensors = Tensors(unit(*queries, dtype=dtype), unit(*documents, dtype=dtype, seed=1))
        problem = problem_of(tensors, Options(), True)
        inputs = SearchTensors(*tensors[:2], None, None)
        result = retrieve(problem, inputs, Rule(k, False, 1.0))
        counts = torch.zeros(2, problem.n_documents, problem.rows, dtype=problem.argmax_dtype, device="cuda")
        # As if every row had more tokens equal to its threshold than it retrieves.
        state = result.state.clone()
        state[3] = 1
        plan = plan_operations.search_plan(problem, k)
        walk_similarities(problem, plan, inputs, TALLY, state=state, counts=counts)
    keys, _, n_equal, tallied = result.state
    tallied = tallied.bool()
    above, equal = counts.sum(dim=1, dtype=torch.int64)
    assert torch.equal(torch.where(tallied, above + n_equal, above + equal), torch.full_like(above, k))
    assert (equal[tallied] > n_equal[tallied]).all()
    # A document's maximum reaches the threshold if one of its tokens does.
    thresholds = torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys).view(torch.float32)
    assert torch.equal(result.best >= thresholds, counts.sum(dim=0) > 0)


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_unit_vectors(dtype: torch.dtype) -> None:
    """A token that the last bit moves across a threshold changes one of thousands of scores."""
    case = Case(
        unit(32, 32, 128, dtype=dtype), unit(100, 180, 128, dtype=dtype, seed=1), None, None,
        {"k": 256, "normalizer": "positive"},
    )  # fmt: skip
    with torch.no_grad():
        actual = kernel(*case.tensors, **case.keywords)
        expected = xtr_scores_reference(*case.doubled().tensors, **case.keywords)
    assert relative_error(actual, expected) <= 1e-3
    assert ((actual - expected).abs() <= 2e-6 * expected.abs()).double().mean() >= 0.99
    for gradient, double in zip(gradients(kernel, case), gradients(xtr_scores_reference, case.doubled()), strict=True):
        assert relative_error(gradient, double) <= 1e-2


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_nan_and_infinity_are_as_on_a_cpu(dtype: torch.dtype) -> None:
    queries, documents = unit(3, 5, 32, dtype=dtype), unit(40, 30, 32, dtype=dtype, seed=1)
    documents[3, 7, 1] = torch.nan
    documents[5, :, 2] = torch.inf
    documents[6] = -torch.inf
    queries[1, 2, 3] = torch.nan
    for normalizer in ("positive", "retrieved"):
        for k in (1, 50, 1190, 1200, 5000):
            options = {"k": k, "normalizer": normalizer}
            actual = kernel(queries, documents, **options).cpu()
            expected = xtr_scores(queries.cpu(), documents.cpu(), **options)
            assert expected[:, 3].isnan().all()
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_few_queries_at_a_time_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(unit(9, 32, 64), unit(40, 50, 64, seed=1), None, None, {"k": 30})
    scores, expected = kernel(*case.tensors, k=30), gradients(kernel, case)
    monkeypatch.setattr(xtr, "_MAXIMA_AT_ONCE", 2 * 32 * 1024)
    assert torch.equal(kernel(*case.tensors, k=30), scores)
    assert equal(gradients(kernel, case), expected)


def test_a_step_takes_a_fifth_of_the_similarities() -> None:
    queries, documents = unit(128, 32, 128, dtype=HALF), unit(256, 180, 128, dtype=HALF, seed=1)
    case = Case(queries, documents, None, None, {"k": 256})
    peak, result_bytes = memory_of(lambda: gradients(kernel, case))
    assert peak - result_bytes <= 4 * 128 * 32 * 256 * 180 / 5
