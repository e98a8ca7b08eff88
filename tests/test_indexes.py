"""`Flat`: exactness, subsets, ties, scorers, and its use by PyLate's retriever."""

from __future__ import annotations

import math
from pathlib import Path
from unittest import mock

import numpy as np
import pylate.indexes
import pylate.rank
import pylate.retrieve
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_flash import retrieve, scores
from pylate_flash.index import scorers, search
from pylate_flash.indexes import EMPTY_SCORE, Flat
from tests.stores import blocks_of_bytes, documents_of, integers_of, small


def flat(path: Path, ids: list[str], documents: list, **options) -> Flat:
    return small(path, **options).add_documents(ids, documents)


def score(query: torch.Tensor, document: torch.Tensor) -> float:
    """Definition of MaxSim in float64, one token at a time."""
    if not len(document):
        return EMPTY_SCORE
    return sum(max(float(q.double() @ d.double()) for d in document) for q in query)


def expected(queries, documents, ids, k, allowed=None) -> list[list[tuple[str, float]]]:
    """Top k by Python's stable sort: best first, ties in insertion order."""
    results = []
    for i, query in enumerate(queries):
        named = zip(ids, documents, strict=True)
        scored = [(id_, score(query, document)) for id_, document in named if allowed is None or id_ in allowed[i]]
        results.append(sorted(scored, key=lambda item: -item[1])[:k])
    return results


def ids_of(results: list) -> list[list[str]]:
    return [[result["id"] for result in hits] for hits in results]


def assert_same(results, reference) -> None:
    assert ids_of(results) == [[id_ for id_, _ in ranking] for ranking in reference]
    for result, ranking in zip(results, reference, strict=True):
        np.testing.assert_allclose([r["score"] for r in result], [s for _, s in ranking], rtol=2e-6, atol=1e-5)


@settings(max_examples=50)
@given(
    query_lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    document_lengths=st.lists(st.integers(0, 7), min_size=1, max_size=20),
    k=st.integers(1, 25),
    at_once=st.tuples(st.integers(1, 30), st.integers(1, 10)),
    scorer=st.sampled_from(["pylate_flash", "torch"]),
    data=st.data(),
)
def test_search_is_exact_for_ragged_shapes_blocks_and_subsets(
    tmp_path_factory: pytest.TempPathFactory, query_lengths, document_lengths, k, at_once, scorer, data
) -> None:
    queries, documents = integers_of(query_lengths, 2, 1, most=1), integers_of(document_lengths, 2, 2, most=1)
    ids = [f"d{i}" for i in range(len(documents))]
    index = flat(tmp_path_factory.mktemp("flat"), ids, documents, scorer=scorer)
    id_lists = st.lists(st.sampled_from(ids), max_size=8)
    shared = data.draw(id_lists)
    per_query = data.draw(st.lists(id_lists, min_size=len(queries), max_size=len(queries)))
    with blocks_of_bytes(at_once[0] * 2 * 4), mock.patch.object(search, "_QUERY_TOKENS", at_once[1]):
        for subset, allowed in ((None, None), (shared, [shared] * len(queries)), (per_query, per_query)):
            assert_same(index(queries, k=k, subset=subset), expected(queries, documents, ids, k, allowed))


def test_scores_agree_with_float64_on_unit_vectors(tmp_path: Path) -> None:
    normalize = torch.nn.functional.normalize
    queries = [normalize(query, dim=1) for query in documents_of([32, 8], size=128, seed=1)]
    documents = [normalize(document, dim=1) for document in documents_of([40, 1, 17, 300], size=128, seed=2)]
    ids = list("abcd")
    index = flat(tmp_path, ids, documents)
    assert_same(index(queries), expected(queries, documents, ids, 10))


def test_scorers_agree_where_a_padding_token_would_win(tmp_path: Path) -> None:
    # Every similarity is negative, so a zero row, or a masked similarity set to 0, would beat every token.
    queries = [query.abs() for query in documents_of([3, 5], seed=1)]
    documents = [-document.abs() for document in documents_of([1, 4, 2, 4], seed=2)]
    ids = list("abcd")
    index = flat(tmp_path, ids, documents)
    for subset in (None, ids, [ids[:2], ids[2:]]):
        index.scorer = "pylate_flash"
        ours = index(queries, subset=subset)
        index.scorer = "torch"
        theirs = index(queries, subset=subset)
        assert ids_of(ours) == ids_of(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert all(r["score"] < 0 for r in mine)
            np.testing.assert_allclose([r["score"] for r in mine], [r["score"] for r in other], rtol=1e-5)


def test_torch_scorer_calls_pylate_and_ours_does_not(tmp_path: Path) -> None:
    index = flat(tmp_path, ["a", "b"], documents_of([3, 2]))
    with (
        mock.patch.object(scores, "colbert_scores", wraps=scores.colbert_scores) as theirs,
        mock.patch.object(scorers, "maxsim_varlen", wraps=scorers.maxsim_varlen) as ours,
    ):
        index(documents_of([2]))
        assert (theirs.call_count, ours.call_count) == (0, 1)
        index.scorer = "torch"
        index(documents_of([2]))
        assert ours.call_count == 1
        assert {call.kwargs["backend"] for call in theirs.call_args_list} == {"torch"}


@pytest.mark.parametrize("scorer", ["pylate_flash", "torch"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_stores_score_what_they_keep(tmp_path: Path, dtype: str, scorer: str) -> None:
    queries, documents, ids = documents_of([5, 3], size=16, seed=1), documents_of([4, 9, 2], size=16), list("abc")
    flat(tmp_path, ids, documents, dtype=dtype)
    index = Flat(tmp_path, "index", device="cpu", scorer=scorer)
    stored_dtype = getattr(torch, dtype)
    rounded = [document.to(stored_dtype) for document in documents]
    assert_same(index(queries), expected([query.to(stored_dtype) for query in queries], rounded, ids, 10))
    for actual, document in zip(index.get_documents_embeddings([ids])[0], rounded, strict=True):
        torch.testing.assert_close(actual, document.float(), rtol=0, atol=0)


def test_no_more_than_a_block_is_scored_at_once(tmp_path: Path) -> None:
    index = flat(tmp_path, [str(i) for i in range(50)], documents_of([3] * 50))
    with (
        blocks_of_bytes(10 * 4 * 4),
        mock.patch.object(search, "_QUERY_TOKENS", 4),
        mock.patch.object(scorers, "maxsim_varlen", wraps=scorers.maxsim_varlen) as scored,
    ):
        results = index(documents_of([2] * 5), k=4)
    assert [len(result) for result in results] == [4] * 5
    assert max(call.args[1].shape[0] for call in scored.call_args_list) <= 10
    assert max(call.args[0].shape[0] for call in scored.call_args_list) <= 4


# Results


def test_equal_scores_come_in_the_order_of_insertion(tmp_path: Path) -> None:
    ids = [f"{i}" for i in range(40)]
    index = flat(tmp_path, ids, [torch.ones(2, 2)] * 40)
    index.remove_documents(["0", "7"])
    index.add_documents(["7"], [torch.ones(3, 2)])
    order = [id_ for id_ in ids if id_ not in ("0", "7")] + ["7"]
    with blocks_of_bytes(6 * 2 * 4):
        (result,) = index(torch.ones(1, 3, 2), k=100)
        (chosen,) = index(torch.ones(1, 3, 2), k=3, subset=[["9", "7", "3", "5"]])
    assert ids_of([result]) == [order]
    assert {r["score"] for r in result} == {6.0}
    assert ids_of([chosen]) == [["3", "5", "9"]]


def test_documents_without_tokens_come_last(tmp_path: Path) -> None:
    """However low the other document's score, and for every search path."""
    index = flat(tmp_path, ["empty", "far"], [torch.empty(0, 2), torch.full((1, 2), -1e6)])
    for subset in (None, ["empty", "far"], ["empty"]):
        far = [] if subset == ["empty"] else [{"id": "far", "score": -8e6}]
        assert index(torch.ones(1, 4, 2), subset=subset) == [[*far, {"id": "empty", "score": EMPTY_SCORE}]]
    assert math.isfinite(EMPTY_SCORE)


def test_subset_ignores_unknown_ids_and_may_be_empty(tmp_path: Path) -> None:
    index, queries = flat(tmp_path, ["a", "b"], documents_of([1, 1])), documents_of([2, 2])
    for subset in ([], ["unknown"], [[], ["unknown"]]):
        assert index(queries, subset=subset) == [[], []]
    assert ids_of(index(queries, subset=[["b", "unknown", "b"], []])) == [["b"], []]
    assert index([], subset=["a"]) == []


def test_embeddings_may_come_in_all_of_pylate_s_forms(tmp_path: Path) -> None:
    documents = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    forms = [documents, torch.from_numpy(documents), list(documents), list(torch.from_numpy(documents))]
    forms += [documents.tolist(), documents.astype(np.float64), documents[:, ::-1][:, ::-1], tuple(documents)]
    read_only = documents.copy()
    read_only.flags.writeable = False
    forms.append(read_only)
    query = np.eye(4, dtype=np.float32)[:2]
    results = []
    for i, form in enumerate(forms):
        index = flat(tmp_path / str(i), ["a", "b"], form)
        results += [index(query), index(query[None]), index([torch.from_numpy(query)]), index([query.tolist()])]
    assert all(result == results[0] for result in results)
    single = flat(tmp_path / "single", "a", documents[0])
    assert single(query) == [[{"id": "a", "score": 17.0}]]


def test_reopened_index_answers_the_same(tmp_path: Path) -> None:
    index = flat(tmp_path, ["a", "b", "c"], documents_of([3, 1, 2]))
    queries = documents_of([4], seed=3)
    before = index(queries)
    index = Flat(str(tmp_path), "index", device="cpu")
    assert index(queries) == before
    assert len(index) == 3
    assert index.documents_ids == ["a", "b", "c"]
    assert "b" in index
    assert "z" not in index
    assert index.remove_documents("b") is index
    assert len(index) == 2
    assert "b" not in small(tmp_path)
    assert len(Flat(tmp_path, "index", override=True, device="cpu")) == 0


def test_pylate_s_retriever_and_rerank_take_the_index(tmp_path: Path) -> None:
    documents, queries = documents_of([3, 1, 2, 5], seed=1), documents_of([4, 4], seed=2)
    index = flat(tmp_path, list("abcd"), documents)
    assert isinstance(index, pylate.indexes.base.Base)
    assert retrieve.ColBERT is pylate.retrieve.ColBERT
    retriever = pylate.retrieve.ColBERT(index=index)
    results = retriever.retrieve(queries_embeddings=queries, k=3)
    assert results == index(queries, k=3)
    subset = [["a", "b"], ["d"]]
    restricted = retriever.retrieve(queries, k=3, subset=subset)
    assert [{r["id"] for r in result} for result in restricted] == [{"a", "b"}, {"d"}]

    # One candidate per query: PyLate pads candidates of different lengths with zeros, which could raise a score.
    ids = [["d"], ["d"]]
    reranked = pylate.rank.rerank(ids, queries, index.get_documents_embeddings(ids))
    alone = index(queries, subset=["d"])
    for theirs, ours in zip(reranked, alone, strict=True):
        assert theirs[0]["id"] == ours[0]["id"] == "d"
        assert theirs[0]["score"] == pytest.approx(ours[0]["score"], rel=1e-5)


def test_returned_embeddings_and_a_given_projection_are_copies(tmp_path: Path) -> None:
    weight = torch.diag(torch.tensor([1.0, 0.0, 0.0]))
    index = flat(tmp_path, ["a"], [torch.ones(2, 3)], projection=(weight, None))
    weight.fill_(1.0)
    for _ in range(2):
        (result,) = index.get_documents_embeddings([["a"]])[0]
        assert result.tolist() == [[1.0, 0.0, 0.0]] * 2
        result.zero_()
    unprojected = small(tmp_path)
    unprojected.get_documents_embeddings([["a"]])[0][0].zero_()
    assert unprojected.get_documents_embeddings([["a"]])[0][0].tolist() == [[1.0] * 3] * 2


@settings(max_examples=30)
@given(
    query_lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    document_lengths=st.lists(st.integers(0, 7), min_size=1, max_size=20),
    block_tokens=st.integers(1, 30),
    scorer=st.sampled_from(["pylate_flash", "torch"]),
    bias=st.booleans(),
    data=st.data(),
)
def test_an_index_of_hidden_states_searches_their_embeddings(
    tmp_path_factory: pytest.TempPathFactory, query_lengths, document_lengths, block_tokens, scorer, bias, data
) -> None:
    normalize, linear = torch.nn.functional.normalize, torch.nn.functional.linear
    weight, offset = torch.randn(4, 6, generator=torch.Generator().manual_seed(5)), torch.arange(4.0) if bias else None
    states = documents_of(document_lengths, size=6, seed=2)
    queries = [normalize(query, dim=-1) for query in documents_of(query_lengths, seed=1)]
    projected = [normalize(linear(state, weight, offset), dim=-1) for state in states]
    ids, folder = [f"d{i}" for i in range(len(states))], tmp_path_factory.mktemp("states")
    embedding_index = flat(folder / "embeddings", ids, projected)
    flat(folder / "states", ids, states, projection=(weight, offset))
    # Reopened from disk.
    state_index = small(folder / "states", projection=(weight, offset), scorer=scorer)
    id_lists = st.lists(st.sampled_from(ids), max_size=8)
    subsets = [None, data.draw(id_lists), data.draw(st.lists(id_lists, min_size=len(queries), max_size=len(queries)))]
    with blocks_of_bytes(block_tokens * 6 * 4):
        for subset in subsets:
            results, references = (index(queries, k=25, subset=subset) for index in (state_index, embedding_index))
            for result, reference in zip(results, references, strict=True):
                np.testing.assert_allclose([r["score"] for r in result], [r["score"] for r in reference], atol=1e-5)
                scores = {r["id"]: r["score"] for r in reference}
                assert {r["id"]: r["score"] for r in result} == pytest.approx(scores, abs=1e-5)
    (results,), (references,) = (index.get_documents_embeddings([ids]) for index in (state_index, embedding_index))
    for embeddings, reference in zip(results, references, strict=True):
        torch.testing.assert_close(embeddings, reference)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_hidden_states_are_projected_as_they_are_kept(tmp_path: Path, dtype: str) -> None:
    states, queries, weight = documents_of([5, 3], size=6), documents_of([4], seed=3), torch.eye(4, 6)
    index = flat(tmp_path, ["a", "b"], states, dtype=dtype, projection=(weight, None))
    stored_dtype = getattr(torch, dtype)

    def units(embeddings: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(embeddings.double(), dim=-1).to(stored_dtype).double()

    projected = [units(s.to(stored_dtype) @ weight.to(stored_dtype).T) for s in states]
    assert_same(index(queries), expected([units(q.to(stored_dtype)) for q in queries], projected, ["a", "b"], 2))


def test_a_projection_and_what_it_is_given_have_one_size(tmp_path: Path) -> None:
    layer = torch.zeros(4, 6), torch.zeros(4)
    with pytest.raises(ValueError, match=r"documents_embeddings\[1\] has size 4, expected hidden states of size 6"):
        flat(tmp_path, ["a", "b"], [*documents_of([3], size=6), *documents_of([3])], projection=layer)
    index = flat(tmp_path, ["a"], documents_of([3], size=6), projection=layer)
    with pytest.raises(ValueError, match=r"queries_embeddings\[0\] has embedding size 6"):
        index(documents_of([3], size=6))
    for wrong in ((torch.zeros(4), None), (torch.zeros(4, 6), torch.zeros(6)), (torch.zeros(4, 6),), ("weight", None)):
        with pytest.raises(ValueError, match=r"projection must be a model, or a weight \[d, d_model\]"):
            Flat(tmp_path, "index", projection=wrong, override=True)
    with pytest.raises(ValueError, match="^projection: the model must be a ColBERT of PyLate, got Linear"):
        Flat(tmp_path, "index", projection=torch.nn.Linear(6, 4), override=True)
    with pytest.raises(ValueError, match=r"projection takes hidden states of size 5, .* stores vectors of size 6"):
        Flat(tmp_path, "index", projection=(torch.zeros(4, 5), None))
    assert len(Flat(tmp_path, "index")) == 1


def test_progress_is_shown_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for show_progress in (False, True):
        index = Flat(tmp_path / str(show_progress), "index", device="cpu", show_progress=show_progress)
        index.add_documents(list("abc"), documents_of([3, 3, 3]), batch_size=2)
        with blocks_of_bytes(4 * 4 * 4):
            index(documents_of([2]))
        shown = capsys.readouterr().err
        assert ("Adding documents" in shown) == ("Searching" in shown) == show_progress
