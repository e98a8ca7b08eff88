"""rank.rerank compared with PyLate's, and features that PyLate's lacks."""

from __future__ import annotations

import doctest
import math
from types import SimpleNamespace

import numpy as np
import pylate.rank
import pylate.scores
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pylate.rank.rank import rerank as pylate_rerank

import pylate_flash.rank
from pylate_flash import registered
from pylate_flash.rank import rerank
from pylate_flash.register import use_scorer
from tests.recorded import recorded


def flags(scorer: str = "auto", masking: str = "exclude") -> SimpleNamespace:
    """An object with the flags of a model."""
    return SimpleNamespace(scorer=scorer, masking=masking)


def positive(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Embeddings with only positive similarities, so that PyLate's zero padding never wins.

    They are multiples of 1/256, whose products and sums are exact in float32.
    """
    return torch.randint(1, 256, shape, generator=generator) / 256


@pytest.fixture
def collection() -> tuple[list[list[str]], list[torch.Tensor], list[list[torch.Tensor]]]:
    """Queries and candidates of various lengths."""
    generator = torch.Generator().manual_seed(0)
    queries = [positive(generator, n, 12) for n in (3, 1, 7, 4)]
    lengths = [[4, 9, 1], [2], [5, 5, 3, 8, 2, 6], [1, 7]]
    documents = [[positive(generator, n, 12) for n in row] for row in lengths]
    ids = [[f"{i}-{j}" for j in range(len(row))] for i, row in enumerate(lengths)]
    return ids, queries, documents


@pytest.fixture(params=["queries together", "query by query"])
def runs(request, monkeypatch: pytest.MonkeyPatch) -> None:
    """Score queries together or one by one on the CPU."""
    if request.param == "query by query":
        monkeypatch.setattr(pylate_flash.rank, "_BLOCK_BYTES", 1)


def assert_same(ours: list, theirs: list) -> None:
    assert [[result["id"] for result in row] for row in ours] == [[result["id"] for result in row] for row in theirs]
    for our_row, their_row in zip(ours, theirs, strict=True):
        for our, their in zip(our_row, their_row, strict=True):
            assert type(our) is dict
            assert type(our["score"]) is float
            assert our["score"] == pytest.approx(their["score"], rel=1e-6, abs=1e-6, nan_ok=True)


def test_docstring_example() -> None:
    result = doctest.testmod(pylate_flash.rank)
    assert (result.attempted, result.failed) == (2, 0)


def test_names_of_pylate() -> None:
    assert pylate_flash.rank.RerankResult is pylate.rank.RerankResult
    assert pylate_flash.rank.score_xtr is pylate.rank.score_xtr


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("kind", ["tensors", "arrays", "lists"])
def test_results_of_pylate(collection, kind: str) -> None:
    ids, queries, documents = collection
    convert = {"tensors": lambda x: x, "arrays": torch.Tensor.numpy, "lists": torch.Tensor.tolist}[kind]
    queries = [convert(query) for query in queries]
    documents = [[convert(document) for document in row] for row in documents]
    assert_same(rerank(ids, queries, documents), pylate_rerank(ids, queries, documents))
    assert_same(rerank(ids, queries, documents, "cpu"), pylate_rerank(ids, queries, documents, "cpu"))


def test_padded_batches(collection) -> None:
    generator = torch.Generator().manual_seed(1)
    queries, documents = positive(generator, 2, 4, 8), positive(generator, 2, 3, 5, 8)
    ids = [[1, 2, 3], [4, 5, 6]]
    expected = pylate_rerank(ids, queries, documents)
    assert_same(rerank(ids, queries, documents), expected)
    assert_same(rerank(ids, queries.numpy(), documents.numpy()), expected)
    assert_same(rerank(ids, list(queries), [document.numpy() for document in documents]), expected)


@pytest.mark.parametrize("convert", [lambda x: x, torch.Tensor.numpy])
def test_a_single_query(collection, convert) -> None:
    ids, queries, documents = collection
    expected = pylate_rerank(ids[:1], convert(queries[0]), documents[:1])
    assert_same(rerank(ids[:1], convert(queries[0]), documents[:1]), expected)
    assert len(expected) == 1


def test_all_is_scored_in_one_call_without_padding(collection, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, queries, documents = collection
    calls = recorded(monkeypatch, pylate_flash.rank, "maxsim_varlen")
    rerank(ids, queries, documents)
    [((packed_queries, packed_documents, *_), _)] = calls
    assert torch.equal(packed_queries, torch.cat(queries))
    assert torch.equal(packed_documents, torch.cat([document for row in documents for document in row]))


def test_the_cpu_packs_few_queries_at_a_time(collection, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many queries as fit; one whose candidates exceed the limit runs alone; every token is packed once."""
    ids, queries, documents = collection
    calls = recorded(monkeypatch, pylate_flash.rank, "maxsim_varlen")

    def packed() -> list[tuple[int, int]]:
        return [(len(args[0]), len(args[1])) for args, _ in calls]

    # The queries have 3, 1, 7 and 4 tokens, their candidates 14, 2, 29 and 8, each token of 12 float32.
    monkeypatch.setattr(pylate_flash.rank, "_BLOCK_BYTES", 16 * 12 * 4)
    assert_same(rerank(ids, queries, documents), pylate_rerank(ids, queries, documents))
    assert packed() == [(3 + 1, 14 + 2), (7, 29), (4, 8)]
    calls.clear()
    monkeypatch.setattr(pylate_flash.rank, "_BLOCK_BYTES", 36 * 12 * 4)
    rerank([[], *ids], [queries[0], *queries], [[], *documents])
    assert packed() == [(3 + 3 + 1, 14 + 2), (7, 29), (4, 8)]


@pytest.mark.usefixtures("runs")
def test_padding_is_not_scored_and_zero_masking_scores_it_as_pylate_does() -> None:
    query = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    short, long = torch.tensor([[-1.0, 2.0]]), torch.tensor([[-1.0, -2.0], [-2.0, -1.0], [-3.0, -3.0]])
    arguments = [["short", "long", "empty"]], [query], [[short, long, torch.empty(0, 2)]]
    exact, theirs = (
        [[{"id": "short", "score": short}, {"id": "empty", "score": 0.0}, {"id": "long", "score": -2.0}]]
        for short in (1.0, 2.0)
    )
    assert pylate_rerank(*arguments) == theirs
    assert rerank(*arguments) == exact
    assert rerank(*arguments, model=flags(masking="zero")) == theirs
    with registered(masking="zero"):
        assert pylate.rank.rerank(*arguments) == theirs
        assert rerank(*arguments, model=flags(masking="exclude")) == exact
    with use_scorer(masking="zero"):
        assert rerank(*arguments) == theirs


@settings(max_examples=30)
@given(data=st.data())
def test_zero_masking_equals_pylate_on_any_lengths(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10_000)))

    def tokens(longest: int) -> torch.Tensor:
        """Multiples of 1/64, whose scores are exact in float32."""
        return torch.randint(-64, 65, (data.draw(st.integers(1, longest)), 6), generator=generator) / 64

    queries = [tokens(5) for _ in counts]
    documents = [[tokens(6) for _ in range(count)] for count in counts]
    ids = [list(range(count)) for count in counts]
    ours = rerank(ids, queries, documents, model=flags(masking="zero"))
    theirs = pylate_rerank(ids, queries, documents)
    for our_row, their_row in zip(ours, theirs, strict=True):
        their_scores = {result["id"]: result["score"] for result in their_row}
        assert {result["id"]: result["score"] for result in our_row} == their_scores
        assert [result["score"] for result in our_row] == sorted((r["score"] for r in our_row), reverse=True)


@pytest.mark.usefixtures("runs")
def test_equal_scores_keep_their_order() -> None:
    token = torch.ones(1, 4)
    documents = [[token, token * 2, token, token * 2, token] * 20, [token] * 3]
    ids = [list(range(100)), ["c", "a", "b"]]
    first, second = rerank(ids, [token, token], documents)
    twos = [i for i in range(100) if i % 5 in (1, 3)]
    assert [result["id"] for result in first] == twos + [i for i in range(100) if i not in twos]
    assert [result["id"] for result in second] == ["c", "a", "b"]


@pytest.mark.usefixtures("runs")
def test_empty_documents_candidates_and_queries() -> None:
    query, document = torch.ones(2, 4), torch.ones(3, 4)
    empty = torch.empty(0, 4)
    assert rerank([], [], []) == []
    assert rerank([[], []], [query, query], [[], []]) == [[], []]
    results = rerank(
        [[], ["a", "b", "c", "d"], [], ["e"]],
        [query, query, query, empty],
        [[], [empty, document, [], -document], [], [document]],
    )
    second = [{"id": id_, "score": score} for id_, score in (("b", 8.0), ("a", 0.0), ("c", 0.0), ("d", -8.0))]
    assert results == [[], second, [], [{"id": "e", "score": 0.0}]]
    assert rerank([["a"]], [[]], [[[]]]) == [[{"id": "a", "score": 0.0}]]


@pytest.mark.usefixtures("runs")
def test_nan_and_infinite_scores() -> None:
    query = torch.ones(1, 2)
    documents = [torch.full((1, 2), value) for value in (1.0, math.nan, math.inf, -math.inf, 2.0)]
    [results] = rerank([list("abcde")], [query], [documents])
    assert [result["id"] for result in results] == list("bcead")
    assert math.isnan(results[0]["score"])
    assert [result["score"] for result in results[1:]] == [math.inf, 4.0, 2.0, -math.inf]
    assert_same([results], pylate_rerank([list("abcde")], [query], [documents]))


@pytest.mark.usefixtures("runs")
def test_types(collection) -> None:
    ids, queries, documents = collection
    halves = [[document.half() for document in row] for row in documents]
    expected = pylate_rerank(ids, queries, [[document.float() for document in row] for row in halves])
    assert_same(rerank(ids, queries, halves), expected)
    assert_same(rerank(ids, queries, [[document.numpy() for document in row] for row in halves]), expected)
    mixed = [[halves[0][0], *(document.float() for document in halves[0][1:])]]
    assert_same(rerank(ids[:1], queries[:1], mixed), expected[:1])
    with_grad = [query.clone().requires_grad_() for query in queries]
    assert_same(rerank(ids, with_grad, halves), expected)


def test_integers_are_left_to_pylate_unless_asked_for_by_name(collection) -> None:
    ids, queries, documents = collection
    queries = [(query * 9).int() for query in queries]
    documents = [[(document * 9).int() for document in row] for row in documents]
    expected = pylate_rerank(ids, queries, documents)
    assert rerank(ids, queries, documents) == expected
    with registered():
        assert pylate.rank.rerank(ids, queries, documents) == expected
    assert all(type(result["score"]) is float for row in rerank(ids, queries, documents) for result in row)
    with pytest.raises(TypeError, match="torch.int32"):
        rerank(ids, queries, documents, backend="pylate_flash")
    with pytest.raises(TypeError, match="both be of a floating dtype, .* got torch.float32 and torch.int32"):
        rerank(ids, [query.float() for query in queries], documents)


def test_the_scorer_of_the_model_and_the_backend(collection, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, queries, documents = collection
    arguments = ids, [query.half() for query in queries], [[document.half() for document in row] for row in documents]
    theirs, ours = pylate_rerank(*arguments), rerank(*arguments)
    # PyLate's torch scorer rounds to half, so the two can be distinguished.
    assert theirs != ours
    assert rerank(*arguments, model=flags("torch")) == theirs
    assert rerank(*arguments, model=flags("torch"), backend="pylate_flash") == ours
    assert rerank(*arguments, backend="torch") == theirs
    monkeypatch.setenv("PYLATE_SCORES_BACKEND", "torch")
    assert rerank(*arguments) == theirs
    assert rerank(*arguments, model=flags("auto")) == theirs
    assert rerank(*arguments, model=flags("pylate_flash")) == ours
    with use_scorer("pylate_flash"):
        assert rerank(*arguments, model=flags("auto")) == ours
    monkeypatch.delenv("PYLATE_SCORES_BACKEND")
    with registered():
        assert pylate.rank.rerank(*arguments) == ours
        assert rerank(*arguments, model=flags("torch")) == theirs
    with pytest.raises(RuntimeError, match="requires CUDA"):
        rerank(*arguments, backend="flash")
    with pytest.raises(ValueError, match="backend must be one of .* got 'fast'"):
        rerank(*arguments, backend="fast")


TOKENS = torch.ones(2, 4)


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([["a"]], [TOKENS] * 2, [[TOKENS]]), ValueError, "one entry per query, got 1, 2 and 1"),
        (([["a"]] * 2, [TOKENS] * 2, [[TOKENS]]), ValueError, "one entry per query, got 2, 2 and 1"),
        (([["a"], [1]], [TOKENS] * 2, [[TOKENS], [TOKENS] * 2]), ValueError, r"documents_ids\[1\] .* 2 as doc.* got 1"),
        (([["a"]], [TOKENS[0]], [[TOKENS]]), ValueError, r"queries_embeddings\[0\] must be .* got shape \[4\]"),
        (([["a"]], [TOKENS], [[TOKENS[0]]]), ValueError, r"documents_embeddings\[0\]\[0\] must be .* got shape \[4\]"),
        (([["a"]], [TOKENS], [["text"]]), ValueError, "must be texts or embeddings, got some of both"),
        (([["a"]], ["text"], [[TOKENS]]), ValueError, "must be texts or embeddings, got some of both"),
        (([["a"]], "text", [["text"]]), ValueError, "queries_embeddings must be a list .* got the text 'text'"),
        (([["a"]], ["text"], ["text"]), ValueError, r"documents_embeddings\[0\] must be a list .* got the text 'text'"),
        (([["a"]], ["text"], [["text"]]), ValueError, "model: texts need a ColBERT model .* got NoneType"),
        (([["a"]], [[[1.0], [1.0, 2.0]]], [[TOKENS]]), ValueError, r"queries_embeddings\[0\] must .* got list of list"),
        (([["a"]], [TOKENS], [[torch.ones(2, 3)]]), ValueError, "embedding size of queries_embeddings, 4, got 3"),
        (([["a", "b"]], [TOKENS], [[TOKENS, torch.ones(2, 3)]]), ValueError, "one embedding size, got 3 and 4"),
        (([["a", "b"]], [TOKENS], [[TOKENS, TOKENS.to("meta")]]), ValueError, "one device, got cpu and meta"),
        ((None, [TOKENS], [[TOKENS]]), TypeError, "documents_ids must be a list of one entry per query, got NoneType"),
        (([{"a", "b"}], [TOKENS], [[TOKENS] * 2]), TypeError, r"documents_ids\[0\] must be a list of ids, got set"),
        (([["a"]], [TOKENS], [{"a": TOKENS}]), TypeError, r"documents_embeddings\[0\] must be a list .* got dict"),
        (([["a"]], [np.ones((2, 4), ">f4")], [[TOKENS]]), TypeError, "queries_embeddings must hold numbers of a type"),
        (([["a"]], [np.full((2, 4), "x")], [[TOKENS]]), TypeError, "^queries_embeddings must hold numbers, got"),
        ((["ab"], [TOKENS], [[TOKENS] * 2]), TypeError, r"documents_ids\[0\] must be a list of ids, got str"),
        (([["a"]], TOKENS[0, 0], [[TOKENS]]), TypeError, "queries_embeddings must be a list .* got Tensor"),
        (([["a"]], [TOKENS], iter([[TOKENS]])), TypeError, "documents_embeddings must be a list .* got list_iterator"),
        (([["a"]], [TOKENS], [None]), TypeError, r"documents_embeddings\[0\] must be a list of docu.* got NoneType"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rerank(*arguments)


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"batch_size": 1.5}, TypeError, "batch_size must be an integer, got float"),
        ({"device": "gpu"}, ValueError, "device must be a device that torch can use here, got 'gpu'"),
        ({"device": True}, TypeError, "device must be a torch.device or the name of one, got bool"),
        ({"fuse_projection": "no"}, TypeError, "fuse_projection must be True or False, got str"),
    ],
)
def test_options_are_checked_before_texts_are_encoded(option: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rerank([["a"]], ["text"], [["text"]], model=SimpleNamespace(encode=None), **option)


def test_keys_and_values_of_a_dictionary_are_lists() -> None:
    documents = {"a": TOKENS, "b": 2 * TOKENS}
    expected = rerank([[*documents]], [TOKENS], [[*documents.values()]])
    assert rerank([documents.keys()], [TOKENS], [documents.values()]) == expected


def test_a_model_is_not_its_path() -> None:
    with pytest.raises(ValueError, match="model: texts need a ColBERT model that encodes them, got str"):
        rerank([["a"]], ["text"], [["text"]], model="folder/of-a-model")


@pytest.mark.parametrize("backend", [None, "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_pylates_backends_take_queries_without_documents(backend: str | None, dtype: torch.dtype) -> None:
    tokens = torch.eye(4, dtype=dtype)
    results = rerank([[], ["a"], []], [tokens] * 3, [[], [tokens], []], backend=backend)
    assert results == [[], [{"id": "a", "score": 4.0}], []]
    assert rerank([[]], [tokens], [[]], backend=backend) == [[]]


def test_unequal_lengths_are_an_error_for_pylates_backends_too() -> None:
    with pytest.raises(ValueError, match="one entry per query, got 1, 2 and 1"):
        rerank([["a"]], [TOKENS] * 2, [[TOKENS]], backend="torch")


def test_pylates_docstring_example_with_a_model(tiny_colbert_path: str) -> None:
    from pylate_flash.models import ColBERT

    model = ColBERT(tiny_colbert_path, device="cpu", scorer="pylate_flash").double()
    documents = [["document A", "document B"], ["document 1", "document C", "document B"]]
    arguments = (
        [[1, 2], [1, 3, 2]],
        model.encode(["query A", "query B"], is_query=True, batch_size=1),
        model.encode(documents, is_query=False, batch_size=1),
    )
    # All lengths are equal, so PyLate pads nothing.
    assert_same(rerank(*arguments, model=model), rerank(*arguments, backend="torch"))


TEXTS = ["how to sort a list?", "open a file", "nothing"]
CANDIDATES = [
    ["Sort the list in place; the sort is stable.", "Open it, and return a stream!", "A heap."],
    ["Open it, and return a stream!", "A heap.", "Sort the list in place; the sort is stable.", "Close, at last: it."],
    [],
]
TEXT_IDS = [[f"{i}-{j}" for j in range(len(candidates))] for i, candidates in enumerate(CANDIDATES)]


@pytest.fixture(scope="module")
def colbert(tiny_colbert_path: str):
    from pylate_flash.models import ColBERT

    # In float64, as the rounding of an embedding depends on the batch that its text is encoded in.
    model = ColBERT(tiny_colbert_path, device="cpu", query_length=10, document_length=12).double()
    # Encoding texts must also apply the prompt.
    model.prompts, model.default_prompt_name = {"search": "text: "}, "search"
    return model


@pytest.mark.parametrize("expansion", [True, False])
@pytest.mark.parametrize("fuse_projection", [None, True])
@pytest.mark.parametrize("batches", [1, 16])
def test_texts_are_scored_as_their_embeddings(
    colbert, expansion: bool, fuse_projection: bool | None, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(colbert, "do_query_expansion", expansion)
    monkeypatch.setattr(pylate_flash.rank, "_BATCHES_AT_ONCE", batches)
    embeddings = [colbert.encode(documents, is_query=False) if documents else [] for documents in CANDIDATES]
    expected = rerank(TEXT_IDS, colbert.encode(TEXTS, is_query=True), embeddings, model=colbert)
    tokenized = recorded(monkeypatch, colbert, "tokenize")
    actual = rerank(TEXT_IDS, TEXTS, CANDIDATES, model=colbert, fuse_projection=fuse_projection, batch_size=2)
    assert_same(actual, expected)
    assert len({result["score"] for results in actual for result in results}) == 7
    # Each document is tokenized once; PyLate also tokenizes the prompt in every call.
    encoded = [text for args, options in tokenized for text in (*args, options.get("texts"))[0]]
    assert len([text for text in encoded if text != "text: "]) == len(TEXTS) + 4
    assert rerank([[]], ["a"], [[]], model=colbert, fuse_projection=fuse_projection) == [[]]
    assert rerank([], [], [], model=colbert, fuse_projection=None) == []


def test_texts_are_scored_from_hidden_states_where_the_model_says_so(colbert, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded(monkeypatch, pylate_flash.rank, "maxsim_from_hidden")
    arguments = TEXT_IDS, TEXTS, CANDIDATES
    unfused = rerank(*arguments, model=colbert)
    assert not calls
    monkeypatch.setitem(colbert._model_config, "fuse_projection", True)
    assert_same(rerank(*arguments, model=colbert), unfused)
    assert len(calls) == 1
    assert calls[0][0][1].shape[-1] == 32
    calls.clear()
    assert_same(rerank(*arguments, model=colbert, fuse_projection=False), unfused)
    # A backend of this call that does not support hidden states gets embeddings.
    nonempty = TEXT_IDS[:2], TEXTS[:2], CANDIDATES[:2]
    rerank(*nonempty, model=colbert, backend="torch")
    monkeypatch.setitem(colbert._model_config, "masking", "zero")
    rerank(*arguments, model=colbert)
    assert not calls
    with pytest.raises(ValueError, match='fuse_projection: needs the masking "exclude", got "zero"'):
        rerank(*arguments, model=colbert, fuse_projection=True)
    with pytest.raises(ValueError, match='fuse_projection: needs the scorer .* got "torch"'):
        rerank(*arguments, model=colbert, backend="torch", fuse_projection=True)
    with pytest.raises(ValueError, match="fuse_projection: needs texts, got embeddings"):
        rerank([["a"]], [TOKENS], [[TOKENS]], model=colbert, fuse_projection=True)


def test_progress_bars_while_texts_are_encoded(colbert, capsys: pytest.CaptureFixture) -> None:
    for fuse_projection, title in ((False, "Encoding documents"), (True, "Scoring documents: 100%")):
        options = {"model": colbert, "fuse_projection": fuse_projection}
        rerank(TEXT_IDS, TEXTS, CANDIDATES, **options)
        assert capsys.readouterr().err == ""
        rerank(TEXT_IDS, TEXTS, CANDIDATES, **options, show_progress_bar=True)
        assert title in capsys.readouterr().err
