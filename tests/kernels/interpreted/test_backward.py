"""The backward's kernels, run by Triton's interpreter on the CPU, with limits so low that small problems cross them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pylate_flash.kernels import backward, gradients, launch, scatter, winner_lists
from tests.kernels.backward_cases import KINDS, dense, packed
from tests.ops.cases import relative_error

WAYS = ("csr", "onehot", "atomic")
BOUND = (backward.bound_backward, backward._bound_varlen_backward)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")


@pytest.fixture(autouse=True)
def low_limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Chunks of 16 rows, lists that are summed in parts of 8, and a document at a time; no list by one program."""
    limits = {"_CHUNK_BITS": 4, "_SEGMENT": 8, "_SCRATCH": 1, "_BLOCK_BINS": 16, "_ALONE_ROWS": 0}
    for name, value in limits.items():
        monkeypatch.setattr(winner_lists, name, value)
    monkeypatch.setattr(scatter, "_CHUNK", 8)
    monkeypatch.setattr(scatter, "_BLOCK_ROWS", 4)
    for function in BOUND:
        function.cache_clear()
    yield
    for function in BOUND:
        function.cache_clear()


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
def test_packed(candidates: list[int] | None, kind: str, way: str) -> None:
    packed((3, 9), [4, 0, 11, 1, 6], 12, kind, candidates).check(way)


@pytest.mark.parametrize(
    ("queries", "documents", "kind"),
    [
        *(((5, 7), (1, 2, 13), kind) for kind in KINDS),
        *(((3, 70), (3, 1, 5), kind) for kind in KINDS),
        ((2, 1), (2, 1, 1), "uniform"),
        # A list's start per token and the end of the last: 256 of them, and one more.
        ((1, 20), (1, 1, 255), "uniform"),
        ((1, 20), (1, 1, 256), "one token"),
    ],
)
def test_lists_by_one_program(
    queries: tuple[int, int], documents: tuple[int, int, int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winner_lists, "_ALONE_ROWS", 300)
    # What only other lists need.
    monkeypatch.setattr(winner_lists, "_sorting_regions", None)
    dense(queries, documents, 12, kind).check("csr")


@pytest.mark.parametrize("kind", KINDS)
def test_more_tokens_than_one_pass_tells_apart(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winner_lists, "_BIN_BITS", 3)
    dense((3, 9), (1, 2, 50), 8, kind).check("csr")
    packed((3, 9), [4, 0, 50], 8, kind).check("csr")
    with pytest.raises(ValueError, match="at most 64 tokens, got 65"):
        dense((3, 9), (1, 2, 65), 8, kind).run("csr")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("normalize", [False, True])
def test_long_embeddings(way: str, normalize: bool) -> None:
    """Of more dimensions than one warp takes, and no power of two."""
    dense((2, 5), (1, 2, 4), 300, "uniform", normalize).check(way)


@pytest.mark.parametrize("normalize", [False, True])
def test_documents_shared_by_several_programs(normalize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "_SPLIT_DOCUMENTS", 3)
    monkeypatch.setattr(backward, "architecture", lambda device: (9, 132))
    dense((1, 3), (1, 11, 4), 12, "uniform", normalize).check("csr")
    packed((2, 3), [2] * 12, 12, "uniform", [0, 11, 12]).check("csr")


@pytest.mark.parametrize("way", WAYS)
def test_offsets_that_need_64_bits_and_strides(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients.Problem, "narrow_queries", False)
    monkeypatch.setattr(gradients.Problem, "narrow_documents", False)
    problem = dense((4, 6), (1, 3, 5), 8, "uniform")
    expected = problem.run(way)
    queries = problem.queries.transpose(0, 1).contiguous().transpose(0, 1)
    documents = problem.documents.transpose(1, 2).contiguous().transpose(1, 2)
    grad_scores = problem.grad_scores.t().contiguous().t()
    strided = type(problem)(grad_scores, queries, documents, problem.winners)
    assert all(torch.equal(a, b) for a, b in zip(strided.run(way), expected, strict=True))


def test_scores_that_are_transposed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = dense((4, 6), (1, 3, 5), 8, "uniform")
    expected = problem.run("csr")
    monkeypatch.setattr(winner_lists, "_TRANSPOSED_WINNERS", 1)
    assert all(torch.equal(a, b) for a, b in zip(problem.run("csr"), expected, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_not_a_number_stays_where_it_belongs(way: str) -> None:
    """In a query row, a document token and a score: only what they meet becomes NaN."""
    problem = dense((3, 4), (1, 2, 6), 8, "uniform")
    problem.winners[:] = torch.arange(12) % 5
    problem.queries[0, 1, 2] = torch.nan
    problem.queries[2, 3, 0] = torch.inf
    problem.documents[0, 1, 3, 4] = torch.nan
    problem.grad_scores[1, 0] = torch.nan
    for found, expected in zip(problem.run(way), problem.expected(), strict=True):
        torch.testing.assert_close(found.double(), expected, equal_nan=True)
        assert expected.isnan().any()
        assert expected.isfinite().any()


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_only_what_is_needed(needs: tuple[bool, bool]) -> None:
    problem = dense((3, 4), (1, 2, 6), 8, "uniform")
    both, found = problem.run("csr"), problem.run("csr", *needs)
    for gradient, needed, expected in zip(found, needs, both, strict=True):
        assert torch.equal(gradient, expected) if needed else gradient is None


@pytest.mark.parametrize(
    ("length", "size", "needs_queries", "lists_alone", "kind"),
    [
        # What sorts is in the memory of the documents' gradient, and the rest in that of the queries'.
        (60, 64, True, True, "one token"),
        # All of it in the latter: documents are too short.
        (3, 64, True, True, "skewed"),
        # The queries' is not wanted, or too small.
        (60, 64, False, False, "skewed"),
        (60, 16, True, False, "skewed"),
    ],
)
def test_gradients_lend_their_memory(
    length: int, size: int, needs_queries: bool, lists_alone: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, call = set(), launch.Sequence.__call__
    monkeypatch.setattr(launch.Sequence, "__call__", lambda self, *given: taken.add(self._bytes) or call(self, *given))
    problem = dense((5, 7), (1, 5, length), size, kind)
    found, expected = problem.run("csr", needs_queries)[1], problem.expected()[1]
    assert relative_error(found, expected) <= 1e-5
    if needs_queries:
        problem.check("csr")
    # Lists of 35 rows, in 16 bits, of two documents at a time.
    assert (taken == {2 * 35 * 2}) == lists_alone


def test_every_sum_has_the_error_of_its_own_rows() -> None:
    """A token of few and small rows keeps its precision beside one of many large ones."""
    problem = dense((6, 8), (1, 1, 4), 8, "one token")
    problem.winners[..., 0] = 0
    problem.queries[0, 0] *= 1e-4
    for way in WAYS:
        (_, found), (_, expected) = problem.run(way), problem.expected()
        assert relative_error(found[0, 0, 0], expected[0, 0, 0]) <= 1e-6
