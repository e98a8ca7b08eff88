"""Backward kernels, run by Triton's interpreter on the CPU, with limits so low that small problems exceed them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pylate_flash.kernels import plan_backward, tables, tables_backward
from pylate_flash.kernels.backward import lists, sums
from pylate_flash.kernels.rows import normalized_rows
from pylate_flash.ops.norms import inverse_norms
from tests.kernels.backward_cases import KINDS, WAYS, Case, dense, packed, weighted
from tests.ops.cases import relative_error


@pytest.fixture(autouse=True)
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 rows, list segments of 8, one document at a time, and no lists built by a single program."""
    limits = {
        "LIST_CHUNK_BITS": 4, "LIST_SEGMENT": 8, "LISTS_MEMORY": 1, "LIST_BLOCK_TOKENS": 16, "ALONE_ROWS": 0,
        "ALONE_ROWS_OF_FEW": 0, "COMPARED": 8, "COMPARE_ROWS": 4,
    }  # fmt: skip
    for name, value in limits.items():
        monkeypatch.setattr(tables_backward, name, value)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("queries", "documents", "normalize"),
    [
        ((3, 7), (1, 2, 13), True),
        ((3, 9), (3, 2, 5), False),
        ((2, 1), (2, 1, 1), True),
        ((1, 1), (1, 1, 1), False),
        ((1, 50), (1, 2, 7), False),
    ],
)
def test_layouts(
    queries: tuple[int, int], documents: tuple[int, int, int], normalize: bool, kind: str, way: str
) -> None:
    dense(queries, documents, 12, kind, normalize).check(way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("candidates", [None, [0, 2, 2, 5]])
@pytest.mark.parametrize("normalize", [False, True])
def test_packed(normalize: bool, candidates: list[int] | None, kind: str, way: str) -> None:
    packed((3, 9), [4, 0, 11, 1, 6], 12, kind, candidates, normalize=normalize).check(way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("normalize", [False, True])
def test_weights(normalize: bool, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        dense((3, 7), (1, 2, 13), 12, "skewed", normalize),
        dense((3, 9), (3, 2, 5), 12, "one token", normalize),
        packed((3, 9), [4, 0, 11, 1, 6], 12, "uniform", normalize=normalize),
        packed((3, 9), [4, 0, 11, 1, 6], 12, "skewed", [0, 2, 2, 5], normalize=normalize),
    ]
    for case in cases:
        weighted(case).check(way)
    # Documents shared by several programs.
    monkeypatch.setattr(tables_backward, "SPLIT_DOCUMENTS", 2)
    monkeypatch.setattr(tables, "architecture", lambda device: (9, 132))
    weighted(dense((1, 9), (1, 7, 5), 12, "uniform", normalize)).check(way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_other_types_and_strides(dtype: torch.dtype, way: str) -> None:
    case = weighted(dense((3, 7), (1, 2, 13), 12, "skewed", True))
    expected = replace(case, weights=case.weights.to(dtype).float()).run(way)
    actual = replace(case, weights=case.weights.t().contiguous().t().to(dtype)).run(way)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_weights_of_one_change_nothing(way: str) -> None:
    for case in (dense((3, 7), (1, 2, 13), 12, "skewed", True), dense((3, 7), (1, 2, 13), 12, "skewed")):
        result = replace(case, weights=torch.ones(3, 7)).run(way)
        assert all(torch.equal(a, b) for a, b in zip(result, case.run(way), strict=True))


@pytest.mark.parametrize(
    ("queries", "documents", "kind"),
    [
        *(((5, 7), (1, 2, 13), kind) for kind in KINDS),
        *(((3, 70), (3, 1, 5), kind) for kind in KINDS),
        ((2, 1), (2, 1, 1), "uniform"),
        # The start of each token's list and the end of the last: 256 of them, and one more.
        ((1, 20), (1, 1, 255), "uniform"),
        ((1, 20), (1, 1, 256), "one token"),
    ],
)
@pytest.mark.parametrize("few", [False, True])
def test_lists_by_one_program(
    queries: tuple[int, int], documents: tuple[int, int, int], kind: str, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables_backward, "ALONE_ROWS", 0 if few else 300)
    monkeypatch.setattr(tables_backward, "ALONE_ROWS_OF_FEW", 300)
    monkeypatch.setattr(tables, "architecture", lambda device: (9, 132 if few else 1))
    # Only other lists use this kernel.
    monkeypatch.setattr(lists, "_sort_kernel", None)
    dense(queries, documents, 12, kind).check("lists")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(("queries", "documents"), [((5, 7), (1, 3, 13)), ((3, 70), (3, 1, 5))])
def test_lists_beside_the_gather(queries: tuple, documents: tuple, weights: bool, kind: str, monkeypatch) -> None:
    """One launch instead of two, with bitwise equal results."""
    for name, value in {"ALONE_ROWS": 300, "ALONE_ROWS_OF_FEW": 300, "LISTS_MEMORY": 1 << 20}.items():
        monkeypatch.setattr(tables_backward, name, value)
    case = dense(queries, documents, 12, kind, normalize=True)
    case = weighted(case) if weights else case
    with monkeypatch.context() as patch:
        patch.setattr(tables_backward, "GATHERED_BESIDE", 0)
        separate = case.run("lists")
    monkeypatch.setattr(lists, "_list_kernel", None)
    case.check("lists")
    assert all(torch.equal(actual, expected) for actual, expected in zip(case.run("lists"), separate, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normalize", [False, True])
def test_lists_that_are_never_long_are_summed_by_one_program(
    normalize: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only long lists use this kernel.
    monkeypatch.setattr(sums, "_combine_kernel", None)
    dense((2, 8), (1, 3, 5), 12, kind, normalize).check("lists")
    packed((4, 4), [3, 0, 5], 12, kind).check("lists")


@pytest.mark.parametrize("kind", KINDS)
def test_more_tokens_than_a_program_scans(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables_backward, "ALONE_TOKENS", 8)
    dense((3, 9), (1, 2, 50), 8, kind).check("lists")
    packed((3, 9), [4, 0, 50], 8, kind).check("lists")
    monkeypatch.setattr(tables_backward, "LIST_BLOCK_TOKENS", 16)
    dense((3, 9), (1, 2, 190), 8, kind).check("lists")
    packed((3, 9), [40, 0, 190], 8, kind).check("lists")


def test_more_tokens_than_a_program_scans_of_whole_blocks() -> None:
    dense((3, 9), (1, 2, 2100), 8, "uniform").check("lists")


def test_more_tokens_than_keys_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_backward, "MOST_LISTED_TOKENS", 64)
    with pytest.raises(ValueError, match="at most 64 tokens, got 65"):
        dense((3, 9), (1, 2, 65), 8, "uniform").run("lists")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("normalize", [False, True])
def test_long_embeddings(way: str, normalize: bool) -> None:
    """More dimensions than one warp handles, and not a power of two."""
    dense((2, 5), (1, 2, 4), 300, "uniform", normalize).check(way)


@pytest.mark.parametrize("normalize", [False, True])
def test_documents_shared_by_several_programs(normalize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables_backward, "SPLIT_DOCUMENTS", 3)
    monkeypatch.setattr(tables, "architecture", lambda device: (9, 132))
    dense((1, 3), (1, 11, 4), 12, "uniform", normalize).check("lists")
    packed((2, 3), [2] * 12, 12, "uniform", [0, 11, 12]).check("lists")


@pytest.mark.parametrize("way", WAYS)
def test_strides(way: str) -> None:
    problem = dense((4, 6), (1, 3, 5), 8, "uniform")
    expected = problem.run(way)
    queries = problem.queries.transpose(0, 1).contiguous().transpose(0, 1)
    documents = problem.documents.transpose(1, 2).contiguous().transpose(1, 2)
    grad_scores = problem.grad_scores.t().contiguous().t()
    strided = Case(grad_scores, queries, documents, problem.argmax)
    assert all(torch.equal(a, b) for a, b in zip(strided.run(way), expected, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_not_a_number_stays_where_it_belongs(way: str) -> None:
    """NaN in a query row, a document token or a score reaches only the gradients that depend on it."""
    problem = dense((3, 4), (1, 2, 6), 8, "uniform")
    problem.argmax[:] = torch.arange(12) % 5
    problem.queries[0, 1, 2] = torch.nan
    problem.queries[2, 3, 0] = torch.inf
    problem.documents[0, 1, 3, 4] = torch.nan
    problem.grad_scores[1, 0] = torch.nan
    for actual, expected in zip(problem.run(way), problem.expected(), strict=True):
        torch.testing.assert_close(actual.double(), expected, equal_nan=True)
        assert expected.isnan().any()
        assert expected.isfinite().any()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n_queries", [3, 1])
def test_a_masked_token_that_is_not_a_number_gets_no_gradient(n_queries: int, way: str, monkeypatch) -> None:
    """Nor does it change another token's, whatever the scores' gradients: it is in no argmax, or has none."""
    monkeypatch.setattr(tables_backward, "SPLIT_DOCUMENTS", 2)
    # One query's documents are shared by several programs.
    monkeypatch.setattr(tables, "architecture", lambda device: (9, 132 if n_queries == 1 else 1))
    for case in (
        dense((n_queries, 4), (1, 5, 6), 8, "uniform", True),
        packed((n_queries, 4), [6, 6, 6, 6], 8, "uniform", normalize=True),
        weighted(dense((n_queries, 4), (1, 5, 6), 8, "uniform", True)),
    ):
        case.argmax[case.argmax == 2] = 3
        case.argmax.view(-1, n_queries, 4)[:, :, 1] = -1
        expected = case.run(way)
        case.queries[:, 1] = torch.nan
        tokens = case.documents.view(-1, 6, 8)
        tokens[:, 2] = torch.nan
        grad_queries, grad_documents = case.run(way)
        assert torch.equal(grad_queries, expected[0])
        assert torch.equal(grad_documents, expected[1])
        assert not grad_queries[:, 1].any()
        assert not grad_documents.view(tokens.shape)[:, 2].any()
        assert grad_queries.any()
        assert grad_documents.any()


@pytest.mark.parametrize("way", WAYS)
def test_not_a_number_in_scores_reaches_all_that_chose(way: str) -> None:
    case = dense((2, 3), (1, 2, 4), 8, "uniform", True)
    case.argmax[:] = 1
    case.grad_scores[:] = torch.nan
    grad_queries, grad_documents = case.run(way)
    assert grad_queries.isnan().all()
    assert grad_documents[:, :, 1].isnan().all()
    assert not grad_documents[:, :, [0, 2, 3]].any()


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_only_what_is_needed(needs: tuple[bool, bool]) -> None:
    problem = dense((3, 4), (1, 2, 6), 8, "uniform")
    both, actual = problem.run("lists"), problem.run("lists", *needs)
    for gradient, needed, expected in zip(actual, needs, both, strict=True):
        assert torch.equal(gradient, expected) if needed else gradient is None


@pytest.mark.parametrize(
    ("length", "size", "needs_queries", "lists_alone", "kind"),
    [
        # The sort's scratch is in the memory of the document gradient, the rest in that of the query gradient.
        (60, 64, True, True, "one token"),
        # All scratch is in the memory of the query gradient: documents are too short.
        (3, 64, True, True, "skewed"),
        # The query gradient is not needed, or too small.
        (60, 64, False, False, "skewed"),
        (60, 4, True, False, "skewed"),
    ],
)
def test_gradients_lend_their_memory(
    length: int, size: int, needs_queries: bool, lists_alone: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated, empty = set(), torch.empty

    def allocate(*shape, **options) -> torch.Tensor:
        tensor = empty(*shape, **options)
        allocated.add(tensor.numel() * tensor.element_size())
        return tensor

    case = dense((5, 7), (1, 5, length), size, kind)
    expected = case.expected()[1]
    both = case.queries.numel() * 4, case.documents.numel() * 4
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", allocate)
        actual = case.run("lists", needs_queries)[1]
    assert relative_error(actual, expected) <= 1e-5
    if needs_queries:
        case.check("lists")
    # Lists of 35 rows in 16 bits, for two documents at a time, and then for one.
    assert (allocated - set(both) == {2 * 35 * 2, 35 * 2}) == lists_alone


def test_every_sum_has_the_error_of_its_own_rows() -> None:
    """A token of few and small rows keeps its precision beside one of many large ones."""
    problem = dense((6, 8), (1, 1, 4), 8, "one token")
    problem.argmax[..., 0] = 0
    problem.queries[0, 0] *= 1e-4
    for way in WAYS:
        (_, actual), (_, expected) = problem.run(way), problem.expected()
        assert relative_error(actual[0, 0, 0], expected[0, 0, 0]) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_place", [False, True])
def test_normalized_rows(in_place: bool, dtype: torch.dtype) -> None:
    embeddings = torch.randn(5, 7, 12).to(dtype)
    embeddings[2, 3], embeddings[4, 4] = 0, torch.nan
    before, tolerance = embeddings.clone(), 1e-6 if dtype == torch.float32 else 1e-2
    out, scales = embeddings if in_place else torch.empty_like(embeddings), torch.empty(5, 7)
    normalized_rows(embeddings, out, scales)
    torch.testing.assert_close(scales, inverse_norms(before), equal_nan=True)
    expected = (before.float() * inverse_norms(before)[..., None]).to(dtype)
    torch.testing.assert_close(out, expected, equal_nan=True, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["uniform", "one token"])
def test_of_rows_that_are_normalized_already(kind: str, way: str) -> None:
    """Sums of all kernels, those in parts too, with weights, and in splits of the documents."""
    case = dense((6, 8), (1, 3, 70), 12, kind, normalize=True)
    case = replace(case, queries=3 * case.queries, documents=case.documents / 2)
    for each in (case, weighted(case), packed((1, 5), [40, 0, 9, 1], 12, kind, normalize=True)):
        each.check(way, normalized=True)


def test_zeros_and_nan_that_are_normalized_already() -> None:
    """A clamped norm scales by 1e12, and a zero gradient stays zero whatever the embedding holds."""
    case = dense((2, 4), (1, 2, 6), 12, "uniform", normalize=True)
    case.documents[0, 0, 1], case.documents[0, 1, 2] = 0, torch.nan
    case.argmax[case.argmax == 2] = 3
    (_, actual), (_, expected) = case.run(normalized=True), case.run()
    assert not actual[0, 1, 2].any()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
