"""`Flat`: exactness, subsets, ties, scorers, and its place behind PyLate's retriever."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
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
from pylate_flash.index import checksums, scorers, search
from pylate_flash.index.catalog import Catalog
from pylate_flash.indexes import EMPTY_SCORE, Flat
from tests.stores import blocks_of_bytes


def embeddings_of(lengths: list[int], size: int = 4, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, size, generator=generator) for length in lengths]


def integers_of(lengths: list[int], size: int = 2, seed: int = 0) -> list[torch.Tensor]:
    """Small integers: scores are exact whatever the order of summation, and many are equal."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-1, 2, (length, size), generator=generator).float() for length in lengths]


def flat(path: Path, ids: list[str], documents: list, **options) -> Flat:
    options = {"device": "cpu", "show_progress": False, **options}
    return Flat(path, "index", **options).add_documents(ids, documents)


def score(query: torch.Tensor, document: torch.Tensor) -> float:
    """The definition, in float64, one token at a time."""
    if not len(document):
        return EMPTY_SCORE
    return sum(max(float(q.double() @ d.double()) for d in document) for q in query)


def expected(queries, documents, ids, k, allowed=None) -> list[list[tuple[str, float]]]:
    """Best first, equal scores in the order of insertion, by Python's stable sort."""
    results = []
    for i, query in enumerate(queries):
        scored = [
            (id_, score(query, document))
            for id_, document in zip(ids, documents, strict=True)
            if allowed is None or id_ in allowed[i]
        ]
        results.append(sorted(scored, key=lambda item: -item[1])[:k])
    return results


def assert_same(results, wanted, exact_order: bool = True) -> None:
    assert [len(result) for result in results] == [len(result) for result in wanted]
    for result, want in zip(results, wanted, strict=True):
        np.testing.assert_allclose([r["score"] for r in result], [s for _, s in want], rtol=2e-6, atol=1e-5)
        if exact_order:
            assert [r["id"] for r in result] == [id_ for id_, _ in want]


@settings(max_examples=50)
@given(
    query_lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    document_lengths=st.lists(st.integers(0, 7), min_size=1, max_size=20),
    k=st.integers(1, 25),
    block_tokens=st.integers(1, 30),
    query_tokens=st.integers(1, 10),
    scorer=st.sampled_from(["pylate_flash", "torch"]),
    data=st.data(),
)
def test_search_is_exact_for_ragged_shapes_blocks_and_subsets(
    tmp_path_factory: pytest.TempPathFactory,
    query_lengths: list[int],
    document_lengths: list[int],
    k: int,
    block_tokens: int,
    query_tokens: int,
    scorer: str,
    data: st.DataObject,
) -> None:
    queries, documents = integers_of(query_lengths, seed=1), integers_of(document_lengths, seed=2)
    ids = [f"d{i}" for i in range(len(documents))]
    index = flat(tmp_path_factory.mktemp("flat"), ids, documents, scorer=scorer)
    some = st.lists(st.sampled_from(ids), max_size=8)
    shared = data.draw(some)
    own = data.draw(st.lists(some, min_size=len(queries), max_size=len(queries)))
    with (
        blocks_of_bytes(block_tokens * 2 * 4),
        mock.patch.object(search, "_QUERY_TOKENS", query_tokens),
    ):
        assert_same(index(queries, k=k), expected(queries, documents, ids, k))
        assert_same(index(queries, k=k, subset=shared), expected(queries, documents, ids, k, [shared] * len(queries)))
        assert_same(index(queries, k=k, subset=own), expected(queries, documents, ids, k, own))


def test_scores_agree_with_float64_on_unit_vectors(tmp_path: Path) -> None:
    normalize = torch.nn.functional.normalize
    queries = [normalize(query, dim=1) for query in embeddings_of([32, 8], size=128, seed=1)]
    documents = [normalize(document, dim=1) for document in embeddings_of([40, 1, 17, 300], size=128, seed=2)]
    ids = list("abcd")
    index = flat(tmp_path, ids, documents)
    assert_same(index(queries), expected(queries, documents, ids, 10))


def test_scorers_agree_where_a_padding_token_would_win(tmp_path: Path) -> None:
    # Every similarity is negative, so a zero row, or a masked similarity set to 0, would beat every token.
    queries = [query.abs() for query in embeddings_of([3, 5], seed=1)]
    documents = [-document.abs() for document in embeddings_of([1, 4, 2, 4], seed=2)]
    ids = list("abcd")
    index = flat(tmp_path, ids, documents)
    for subset in (None, ids, [ids[:2], ids[2:]]):
        index.scorer = "pylate_flash"
        ours = index(queries, subset=subset)
        index.scorer = "torch"
        theirs = index(queries, subset=subset)
        assert [[r["id"] for r in result] for result in ours] == [[r["id"] for r in result] for result in theirs]
        for mine, other in zip(ours, theirs, strict=True):
            assert all(r["score"] < 0 for r in mine)
            np.testing.assert_allclose([r["score"] for r in mine], [r["score"] for r in other], rtol=1e-5)


def test_torch_scorer_calls_pylate_and_ours_does_not(tmp_path: Path) -> None:
    index = flat(tmp_path, ["a", "b"], embeddings_of([3, 2]))
    with (
        mock.patch.object(scores, "colbert_scores", wraps=scores.colbert_scores) as theirs,
        mock.patch.object(scorers, "maxsim_varlen", wraps=scorers.maxsim_varlen) as ours,
    ):
        index(embeddings_of([2]))
        assert (theirs.call_count, ours.call_count) == (0, 1)
        index.scorer = "torch"
        index(embeddings_of([2]))
        assert ours.call_count == 1
        assert {call.kwargs["backend"] for call in theirs.call_args_list} == {"torch"}


@pytest.mark.parametrize("scorer", ["pylate_flash", "torch"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_stores_score_what_they_keep(tmp_path: Path, dtype: str, scorer: str) -> None:
    queries, documents, ids = embeddings_of([5, 3], size=16, seed=1), embeddings_of([4, 9, 2], size=16), list("abc")
    flat(tmp_path, ids, documents, dtype=dtype)
    index = Flat(tmp_path, "index", device="cpu", scorer=scorer)
    kept = getattr(torch, dtype)
    rounded = [document.to(kept) for document in documents]
    assert_same(index(queries), expected([query.to(kept) for query in queries], rounded, ids, 10))
    for found, document in zip(index.get_documents_embeddings([ids])[0], rounded, strict=True):
        torch.testing.assert_close(found, document.float(), rtol=0, atol=0)


def test_no_more_than_a_block_is_scored_at_once(tmp_path: Path) -> None:
    index = flat(tmp_path, [str(i) for i in range(50)], embeddings_of([3] * 50))
    with (
        blocks_of_bytes(10 * 4 * 4),
        mock.patch.object(search, "_QUERY_TOKENS", 4),
        mock.patch.object(scorers, "maxsim_varlen", wraps=scorers.maxsim_varlen) as scored,
    ):
        results = index(embeddings_of([2] * 5), k=4)
    assert [len(result) for result in results] == [4] * 5
    assert max(call.args[1].shape[0] for call in scored.call_args_list) <= 10
    assert max(call.args[0].shape[0] for call in scored.call_args_list) <= 4


# What comes back


def test_equal_scores_come_in_the_order_of_insertion(tmp_path: Path) -> None:
    ids = [f"{i}" for i in range(40)]
    index = flat(tmp_path, ids, [torch.ones(2, 2)] * 40)
    index.remove_documents(["0", "7"])
    index.add_documents(["7"], [torch.ones(3, 2)])
    order = [id_ for id_ in ids if id_ not in ("0", "7")] + ["7"]
    with blocks_of_bytes(6 * 2 * 4):
        (result,) = index(torch.ones(1, 3, 2), k=100)
        (chosen,) = index(torch.ones(1, 3, 2), k=3, subset=[["9", "7", "3", "5"]])
    assert [r["id"] for r in result] == order
    assert {r["score"] for r in result} == {6.0}
    assert [r["id"] for r in chosen] == ["3", "5", "9"]


def test_documents_without_tokens_come_last(tmp_path: Path) -> None:
    index = flat(tmp_path, ["empty", "far"], [torch.empty(0, 2), -torch.ones(1, 2)])
    assert index(torch.ones(1, 1, 2)) == [[{"id": "far", "score": -2.0}, {"id": "empty", "score": EMPTY_SCORE}]]
    assert index(torch.ones(1, 1, 2), subset=["empty"]) == [[{"id": "empty", "score": EMPTY_SCORE}]]


def test_subset_ignores_unknown_ids_and_may_be_empty(tmp_path: Path) -> None:
    index = flat(tmp_path, ["a", "b"], embeddings_of([1, 1]))
    queries = embeddings_of([2, 2])
    assert index(queries, subset=[]) == [[], []]
    assert index(queries, subset=["unknown"]) == [[], []]
    assert index(queries, subset=[[], ["unknown"]]) == [[], []]
    found = index(queries, subset=[["b", "unknown", "b"], []])
    assert [[r["id"] for r in result] for result in found] == [["b"], []]
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
    index = flat(tmp_path, ["a", "b", "c"], embeddings_of([3, 1, 2]))
    queries = embeddings_of([4], seed=3)
    before = index(queries)
    index = Flat(str(tmp_path), "index", device="cpu")
    assert index(queries) == before
    assert len(index) == 3
    assert index.documents_ids == ["a", "b", "c"]
    assert "b" in index
    assert "z" not in index
    assert index.remove_documents("b") is index
    assert len(index) == 2
    assert "b" not in Flat(tmp_path, "index", device="cpu")
    assert len(Flat(tmp_path, "index", override=True, device="cpu")) == 0


def test_pylate_s_retriever_and_rerank_take_the_index(tmp_path: Path) -> None:
    documents, queries = embeddings_of([3, 1, 2, 5], seed=1), embeddings_of([4, 4], seed=2)
    index = flat(tmp_path, list("abcd"), documents)
    assert isinstance(index, pylate.indexes.base.Base)
    assert retrieve.ColBERT is pylate.retrieve.ColBERT
    retriever = pylate.retrieve.ColBERT(index=index)
    found = retriever.retrieve(queries_embeddings=queries, k=3)
    assert found == index(queries, k=3)
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
        (found,) = index.get_documents_embeddings([["a"]])[0]
        assert found.tolist() == [[1.0, 0.0, 0.0]] * 2
        found.zero_()
    unprojected = Flat(tmp_path, "index", device="cpu")
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
    tmp_path_factory: pytest.TempPathFactory,
    query_lengths: list[int],
    document_lengths: list[int],
    block_tokens: int,
    scorer: str,
    bias: bool,
    data: st.DataObject,
) -> None:
    weight, offset = torch.randn(4, 6, generator=torch.Generator().manual_seed(5)), torch.arange(4.0) if bias else None
    states = embeddings_of(document_lengths, size=6, seed=2)
    queries = [torch.nn.functional.normalize(query, dim=-1) for query in embeddings_of(query_lengths, seed=1)]
    projected = [torch.nn.functional.normalize(torch.nn.functional.linear(s, weight, offset), dim=-1) for s in states]
    ids, folder = [f"d{i}" for i in range(len(states))], tmp_path_factory.mktemp("states")
    of_embeddings = flat(folder / "embeddings", ids, projected)
    flat(folder / "states", ids, states, projection=(weight, offset))
    # Opened again, from what is on the disk.
    of_states = Flat(
        folder / "states", "index", projection=(weight, offset), scorer=scorer, device="cpu", show_progress=False
    )
    some = st.lists(st.sampled_from(ids), max_size=8)
    subsets = [None, data.draw(some), data.draw(st.lists(some, min_size=len(queries), max_size=len(queries)))]
    with blocks_of_bytes(block_tokens * 6 * 4):
        for subset in subsets:
            found, wanted = (index(queries, k=25, subset=subset) for index in (of_states, of_embeddings))
            for result, want in zip(found, wanted, strict=True):
                np.testing.assert_allclose([r["score"] for r in result], [r["score"] for r in want], atol=1e-5)
                scores = {r["id"]: r["score"] for r in want}
                assert {r["id"]: r["score"] for r in result} == pytest.approx(scores, abs=1e-5)
    (found,), (wanted,) = (index.get_documents_embeddings([ids]) for index in (of_states, of_embeddings))
    for embeddings, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(embeddings, want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_hidden_states_are_projected_as_they_are_kept(tmp_path: Path, dtype: str) -> None:
    states, queries, weight = embeddings_of([5, 3], size=6), embeddings_of([4], seed=3), torch.eye(4, 6)
    index = flat(tmp_path, ["a", "b"], states, dtype=dtype, projection=(weight, None))
    kept = getattr(torch, dtype)

    def units(embeddings: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(embeddings.double(), dim=-1).to(kept).double()

    projected = [units(s.to(kept) @ weight.to(kept).T) for s in states]
    assert_same(index(queries), expected([units(q.to(kept)) for q in queries], projected, ["a", "b"], 2))


def test_a_projection_and_what_it_is_given_have_one_size(tmp_path: Path) -> None:
    layer = torch.zeros(4, 6), torch.zeros(4)
    with pytest.raises(ValueError, match=r"documents_embeddings\[1\] has size 4, .* takes hidden states of size 6"):
        flat(tmp_path, ["a", "b"], [*embeddings_of([3], size=6), *embeddings_of([3])], projection=layer)
    index = flat(tmp_path, ["a"], embeddings_of([3], size=6), projection=layer)
    with pytest.raises(ValueError, match=r"queries_embeddings\[0\] has embedding size 6"):
        index(embeddings_of([3], size=6))
    for wrong in ((torch.zeros(4), None), (torch.zeros(4, 6), torch.zeros(6)), (torch.zeros(4, 6),), ("weight", None)):
        with pytest.raises(ValueError, match=r"projection must be a model, or a weight \[d, d_model\]"):
            Flat(tmp_path, "index", projection=wrong, override=True)
    with pytest.raises(ValueError, match="fuse_projection: the model must be a ColBERT of PyLate, got Linear"):
        Flat(tmp_path, "index", projection=torch.nn.Linear(6, 4), override=True)
    with pytest.raises(ValueError, match=r"projection takes hidden states of size 5, .* keeps vectors of size 6"):
        Flat(tmp_path, "index", projection=(torch.zeros(4, 5), None))
    assert len(Flat(tmp_path, "index")) == 1


def test_progress_is_shown_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for show_progress in (False, True):
        index = Flat(tmp_path / str(show_progress), "index", device="cpu", show_progress=show_progress)
        index.add_documents(list("abc"), embeddings_of([3, 3, 3]), batch_size=2)
        with blocks_of_bytes(4 * 4 * 4):
            index(embeddings_of([2]))
        shown = capsys.readouterr().err
        assert ("Adding documents" in shown) == ("Searching" in shown) == show_progress


# Errors


@pytest.mark.parametrize(
    ("ids", "documents", "error", "message"),
    [
        (["c"], [], ValueError, "must have the same length, got 1 ids and 0 documents"),
        (["c", "c"], embeddings_of([1, 1]), ValueError, "documents_ids: 'c' is given twice"),
        (["c", "a"], embeddings_of([1, 1]), ValueError, "documents_ids: 'a' is already in the index"),
        ([3], embeddings_of([1]), TypeError, r"documents_ids\[0\] must be a string, got 3 of type int"),
        (3, embeddings_of([1]), TypeError, "documents_ids must be a list of strings, got int"),
        (["c"], embeddings_of([1], size=5), ValueError, "document 'c' have size 5, those of the index in .* 4"),
        (["c"], [torch.full((2, 4), torch.nan)], ValueError, "document 'c' hold NaN"),
        (["c"], [torch.ones(4)], ValueError, r"documents_embeddings\[0\] must have shape \[L, d\] .* got \[4\]"),
        (["c"], torch.ones(4), ValueError, r"documents_embeddings must have shape \[L, d\] or \[N, L, d\], got \[4\]"),
        (["c"], [torch.ones(2, 0)], ValueError, r"d of at least 1, got \[2, 0\]"),
        (["c"], [torch.ones(2, 4, dtype=torch.int64)], TypeError, "floating dtype, got torch.int64"),
        (["c"], [np.array([["x"]])], TypeError, r"documents_embeddings\[0\] must be an array or tensor of numbers"),
        (["c"], "text", TypeError, "documents_embeddings must be a list of"),
    ],
)
def test_a_refused_addition_changes_nothing(tmp_path: Path, ids, documents, error, message: str) -> None:
    index = flat(tmp_path, ["a", "b"], embeddings_of([1, 2]))
    files = sorted(index.index_path.iterdir())
    with pytest.raises(error, match=message):
        index.add_documents(ids, documents)
    assert index.documents_ids == ["a", "b"]
    assert sorted(index.index_path.iterdir()) == files


def test_documents_are_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = flat(tmp_path, ["a", "b", "c"], embeddings_of([3, 2, 4]))
    new = embeddings_of([5, 1])
    commits = []
    writing = Catalog.writing
    monkeypatch.setattr(Catalog, "writing", lambda *arguments: (commits.append(1), writing(*arguments))[1])
    assert index.add_documents(["b", "d"], new, replace=True) is index
    assert commits == [1]
    for seen in (index, Flat(tmp_path, "index", device="cpu")):
        assert seen.documents_ids == ["a", "c", "b", "d"]
        for found, expected in zip(seen.get_documents_embeddings([["b", "d"]])[0], new, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert [result["id"] for result in seen([new[0]], k=1)[0]] == ["b"]
    with pytest.raises(ValueError, match="documents_ids: 'd' is given twice"):
        index.add_documents(["d", "d"], new, replace=True)
    bad = [new[0], torch.full((1, 4), torch.nan)]
    with pytest.raises(ValueError, match="document 'c' hold NaN"):
        index.add_documents(["a", "c"], bad, replace=True)
    assert index.documents_ids == ["a", "c", "b", "d"]
    # All of them, and without any that are there, to the catalog.
    index.add_documents(index.documents_ids, embeddings_of([1, 2, 3, 4]), replace=True)
    index.add_documents(["e"], embeddings_of([2]), replace=True)
    assert index.verify().documents == 5
    assert index.documents_ids == ["a", "c", "b", "d", "e"]


def test_an_index_remembers_its_corpora(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").touch()
    index = flat(tmp_path, ["a"], embeddings_of([3]))
    assert index.corpora == []
    for _ in range(2):
        index.record_corpus(tmp_path / "corpus.jsonl").record_corpus(tmp_path / "gone")
    assert index.corpora == [tmp_path / "corpus.jsonl", tmp_path / "gone"]
    assert Flat(tmp_path, "index", device="cpu").corpora == index.corpora
    assert Flat(tmp_path, "index", device="cpu", override=True).corpora == []


def test_a_refused_removal_changes_nothing(tmp_path: Path) -> None:
    index = flat(tmp_path, ["a", "b"], embeddings_of([1, 2]))
    with pytest.raises(ValueError, match="documents_ids: 'z' is not in the index"):
        index.remove_documents(["a", "z"])
    with pytest.raises(ValueError, match="documents_ids: 'a' is given twice"):
        index.remove_documents(["a", "a"])
    assert Flat(tmp_path, "index", device="cpu").documents_ids == ["a", "b"]


@pytest.mark.parametrize(
    ("queries", "options", "error", "message"),
    [
        (torch.ones(1, 2, 5), {}, ValueError, r"queries_embeddings\[0\] has embedding size 5, the index in .* 4"),
        ([torch.full((1, 4), torch.nan)], {}, ValueError, r"queries_embeddings\[0\] holds NaN"),
        (torch.ones(1, 2, 4), {"k": 0}, ValueError, "k must be an integer of at least 1, got 0"),
        (torch.ones(1, 2, 4), {"k": 2.5}, ValueError, "k must be an integer of at least 1, got 2.5"),
        (torch.ones(1, 2, 4), {"subset": "a"}, TypeError, "subset must be a list of ids .* got str"),
        (torch.ones(1, 2, 4), {"subset": ["a", ["b"]]}, TypeError, "a mixture of the two"),
        (torch.ones(1, 2, 4), {"subset": [["a"], ["b"]]}, ValueError, "got 2 for 1 queries"),
        (torch.ones(1, 2, 4), {"subset": [[1]]}, TypeError, r"subset\[0\]\[0\] must be a string"),
    ],
)
def test_refused_searches(tmp_path: Path, queries, options: dict, error, message: str) -> None:
    index = flat(tmp_path, ["a", "b"], embeddings_of([1, 2]))
    with pytest.raises(error, match=message):
        index(queries, **options)


@pytest.mark.parametrize(
    ("item", "error", "message"),
    [
        ([[1.0, 2.0], [3.0]], ValueError, "must be a list of rows of numbers, all of one length: .*inhomogeneous"),
        ([["one", "two"]], ValueError, "must be a list of rows of numbers, all of one length: could not convert"),
        ([[10**400]], ValueError, "must be a list of rows of numbers"),
        ([torch.ones(2, requires_grad=True)], ValueError, "must be a list of rows of numbers"),
        (np.ones((1, 2), dtype=">f4"), TypeError, "must be of a dtype that torch has, .* in this machine's byte order"),
        (np.ones((1, 2), dtype=np.longdouble), TypeError, r"must be of a dtype that torch has, .* \(longdouble|float"),
    ],
)
def test_arrays_that_torch_does_not_take_are_named(tmp_path: Path, item: object, error, message: str) -> None:
    index = Flat(tmp_path, "index", device="cpu")
    with pytest.raises(error, match=rf"documents_embeddings\[1\] {message}"):
        index.add_documents(["a", "b"], [[[1.0, 2.0]], item])
    index.add_documents(["a"], [[[1.0, 2.0]]])
    with pytest.raises(error, match=rf"queries_embeddings\[0\] {message}"):
        index([item])


def test_other_errors_name_what_is_wrong(tmp_path: Path) -> None:
    index = Flat(tmp_path, "index", device="cpu")
    with pytest.raises(ValueError, match="the index in .* is empty: add documents before searching"):
        index(torch.ones(1, 2, 4))
    with pytest.raises(ValueError, match="scorer must be one of .* got 'fast'"):
        Flat(tmp_path, "index", scorer="fast")
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1, got 0"):
        index.add_documents(["a"], embeddings_of([1]), batch_size=0)
    with pytest.raises(ValueError, match=r"documents_ids\[1\]: 'z' is not in the index"):
        index.add_documents(["a"], embeddings_of([1])).get_documents_embeddings([["a"], ["z"]])


# The care of an index


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../evil", "a/b", "/tmp/evil", "a\\b", "..\\evil", "C:", "C:evil", "a\0b", 3, None]
)
def test_the_name_of_an_index_is_one_plain_component(tmp_path: Path, name: object) -> None:
    with pytest.raises(ValueError, match="index_name must be the plain name of a folder in index_folder"):
        Flat(tmp_path / "indexes", name, override=True)
    assert list(tmp_path.iterdir()) == []


def test_plain_names_of_all_kinds_are_taken(tmp_path: Path) -> None:
    for name in ("index", ".hidden", "a b", "..a", "ü", "v1:0.5"):
        Flat(tmp_path, name, device="cpu").add_documents(["a"], embeddings_of([1]))
        assert (tmp_path / name / "catalog.sqlite").is_file()


def test_info_verify_and_compact_say_what_the_index_is(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    index = flat(tmp_path, ["a", "b"], embeddings_of([3, 2]))
    index.add_documents(["c"], embeddings_of([4]))
    info = index.verify()
    assert info == index.info() == Flat(tmp_path, "index", device="cpu").info()
    assert (info.documents, info.tokens, info.segments, info.embedding_size, info.dtype) == (3, 9, 1, 4, "float32")
    files = [file for file in index.index_path.iterdir() if file.name not in ("committed", "reserve")]
    assert info.bytes == sum(file.stat().st_size for file in files)
    assert info.created_with["torch"] == torch.__version__
    assert info.model is None
    assert capsys.readouterr().err == ""
    assert index.compact() is index
    assert index.verify(show_progress=True).segments == 1
    assert "Verifying" in capsys.readouterr().err
    assert index.documents_ids == ["a", "b", "c"]
    assert Flat(tmp_path, "new", device="cpu").info().documents == 0


def test_verify_reads_the_files_as_they_are_now(tmp_path: Path) -> None:
    index = flat(tmp_path, ["a", "b"], embeddings_of([3, 2])).compact()
    (segment,) = index.index_path.glob("segment-*")
    changed = bytearray(segment.read_bytes())
    changed[-60] ^= 1
    # Another file in the place of the one that is open.
    segment.unlink()
    segment.write_bytes(changed)
    with pytest.raises(ValueError, match="is damaged: its bytes 0 to 80 have another checksum") as caught:
        index.verify()
    assert str(segment) in str(caught.value)


def test_verify_looks_where_the_index_was_opened_and_misses_what_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    index = flat(Path("indexes"), ["a"], embeddings_of([3]))
    monkeypatch.chdir("elsewhere")
    assert index.verify().documents == 1
    shutil.rmtree(tmp_path / "indexes")
    with pytest.raises(ValueError, match=r"indexes/index/catalog\.sqlite is missing"):
        index.verify()


@pytest.mark.parametrize("scorer", ["pylate_flash", "torch"])
def test_products_that_overflow_are_not_called_damage(tmp_path: Path, scorer: str) -> None:
    index = flat(tmp_path, ["a", "b"], [torch.ones(2, 4), torch.full((1, 4), 1e20)], scorer=scorer)
    for subset in (None, [["a", "b"]]):
        with pytest.raises(ValueError, match="the score of document 'b' .* is not finite, .* overflow float32"):
            index(torch.full((1, 2, 4), 1e20), subset=subset)
    index.verify()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("scorer", ["pylate_flash", "torch"])
def test_a_search_that_meets_nan_says_so(
    tmp_path: Path, scorer: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = flat(tmp_path, ["a", "b", "c"], integers_of([3, 2, 4]), scorer=scorer)
    segment = index._store.segments[0].path
    torch.from_file(str(segment), shared=True, size=9 * 2).view(9, 2)[3] = value
    monkeypatch.setattr(checksums.CheckedBlocks, "check", lambda *arguments: None)
    for subset in (None, [["a", "b"]]):
        with pytest.raises(ValueError, match="the score of document 'b' is not finite, .* verify.. names the file"):
            index(torch.ones(1, 2, 2), subset=subset)
    assert [r["id"] for r in index(torch.ones(1, 2, 2), subset=["a", "c"])[0]] != []


def test_batches_of_an_iterator_are_added_one_by_one(tmp_path: Path) -> None:
    documents = embeddings_of([3, 2, 0, 4, 1])
    index = Flat(tmp_path, "index", device="cpu", show_progress=False)
    held: list[int] = []

    def batches() -> Iterator[tuple]:
        yield ["a", "b"], documents[:2]
        held.append(len(Flat(tmp_path, "index", device="cpu")))
        yield "c", documents[2]
        held.append(len(Flat(tmp_path, "index", device="cpu")))
        yield ["d", "e"], documents[3:], [{"x": 1}, None]

    assert index.add_documents(batches()) is index
    assert (held, index.documents_ids) == ([2, 3], list("abcde"))
    assert [r["id"] for r in index(documents[:1], where="x = 1")[0]] == ["d"]
    for one, other in zip(index.get_documents_embeddings([list("abcde")])[0], documents, strict=True):
        assert torch.equal(one, other)
    # What was added stays.
    with pytest.raises(ValueError, match="'a' is already in the index"):
        index.add_documents(iter([(["f"], documents[:1]), (["a"], documents[:1])]))
    assert Flat(tmp_path, "index", device="cpu").documents_ids == list("abcdef")
    index.add_documents([(["a"], documents[1:2])], replace=True)
    assert index.documents_ids == list("bcdefa")
    for batches, got in ((["a"], "str for batch 0"), ("a", "got str"), (3, "got int"), ([("a",)], "tuple for batch 0")):
        with pytest.raises(TypeError, match=got):
            index.add_documents(batches)
