"""Indexes that store 8-bit embeddings: on-disk layout, search results, and refused input."""

from __future__ import annotations

import math
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_flash import QuantizedEmbeddings, quantize
from pylate_flash.beir import load_beir_folder
from pylate_flash.index import store
from pylate_flash.index.arguments import joined
from pylate_flash.index.columns import copy_rows, taken
from pylate_flash.index.layout import Layout
from pylate_flash.index.store import PackedStore
from pylate_flash.indexes import EMPTY_SCORE, Flat
from pylate_flash.ops.quantization import PRECISIONS
from pylate_flash.ops.quantized import maxsim_quantized_reference
from tests.stores import blocks_of_bytes, documents_of, small

EACH = pytest.mark.parametrize("precision", PRECISIONS)


def tensors_of(embeddings: QuantizedEmbeddings) -> list[torch.Tensor]:
    values = embeddings.values.contiguous().view(torch.uint8)
    return [values, embeddings.scales, torch.empty(0) if embeddings.offsets is None else embeddings.offsets]


def assert_keeps(store: PackedStore, documents: dict[str, torch.Tensor]) -> None:
    """Stored embeddings equal those of `quantize` bit for bit, with the alignment that kernels need."""
    assert store.ids == list(documents)
    for position, document in enumerate(documents.values()):
        stored = store.layout.embeddings(store.read(np.array([position])))
        assert isinstance(stored, QuantizedEmbeddings)
        assert stored.values.stride(-1) == 1
        assert stored.values.stride(0) % 16 == stored.values.data_ptr() % 16 == 0
        for actual, expected in zip(tensors_of(stored), tensors_of(quantize(document, stored.precision)), strict=True):
            assert torch.equal(actual, expected)


@settings(max_examples=30)
@given(count=st.integers(1, 5), size=st.integers(1, 40), precision=st.sampled_from(sorted(PRECISIONS)))
def test_columns_hold_what_rows_do(count: int, size: int, precision: str) -> None:
    """As on a GPU: rows are copied there, gathered, and copied back."""
    layout, positions = Layout(precision, size), torch.arange(count).flip(0)
    rows = layout.rows(torch.randn(count, size))
    assert layout.form is not None
    columns = layout.form.empty(count + 2, rows.device)[1:-1]
    copy_rows(columns, rows)
    again = torch.zeros_like(rows)
    copy_rows(again, columns)
    assert torch.equal(again.view(torch.uint8), rows.view(torch.uint8))
    for left, right in (
        (columns, rows),
        (taken(columns, positions), rows[positions]),
        (taken(rows, positions), rows[positions]),
    ):
        actual, expected = layout.embeddings(left), layout.embeddings(right)
        assert isinstance(actual, QuantizedEmbeddings)
        assert isinstance(expected, QuantizedEmbeddings)
        for tensor, other in zip(tensors_of(actual), tensors_of(expected), strict=True):
            assert torch.equal(tensor, other)


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 4), min_size=2, max_size=6),
    size=st.integers(1, 40),
    precision=st.sampled_from(sorted(PRECISIONS)),
    small_parts=st.sampled_from([2, 256]),
)
def test_a_store_keeps_what_was_quantized(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], size: int, precision: str, small_parts: int
) -> None:
    path = tmp_path_factory.mktemp("store")
    documents = {str(i): document for i, document in enumerate(documents_of(lengths, size))}
    with mock.patch.object(store, "SMALL_PARTS", small_parts):
        written = PackedStore(path, dtype=precision)
        for id_, document in documents.items():
            written.add([id_], [document.double()])
        assert_keeps(written, documents)
        assert_keeps(PackedStore(path), documents)
        written.remove(np.array([0]))
        written.compact()
    del documents["0"]
    opened = PackedStore(path, dtype=precision)
    assert_keeps(opened, documents)
    opened.verify()
    assert (opened.embedding_size, opened.state.dtype) == (size, precision)


@EACH
def test_a_token_takes_a_byte_for_each_element_and_sixteen(tmp_path: Path, precision: str) -> None:
    documents = documents_of([4000], 128)
    sizes = {}
    for dtype in (precision, "bfloat16"):
        store = PackedStore(tmp_path / dtype, dtype=dtype)
        store.add(["a"], documents)
        store.compact()
        sizes[dtype] = store.nbytes
    # The size includes the catalog.
    assert 4000 * 144 < sizes[precision] < 0.6 * sizes["bfloat16"]


@EACH
def test_rows_begin_with_their_scales(tmp_path: Path, precision: str) -> None:
    (document,) = documents_of([3], 5)
    store = PackedStore(tmp_path, dtype=precision)
    store.add(["a"], [document])
    store.compact()
    (file,) = tmp_path.glob("segment-*")
    rows = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).view(3, 32)
    quantized = quantize(document, precision)
    header = rows[:, :16].contiguous().view(torch.float32)
    offsets = torch.zeros(3) if quantized.offsets is None else quantized.offsets
    assert torch.equal(header, torch.stack([quantized.scales, offsets, *torch.zeros(2, 3)], dim=1))
    assert torch.equal(rows[:, 16:21], quantized.values.view(torch.uint8))
    assert not rows[:, 21:].any()


# Search


def score(query: torch.Tensor, document: torch.Tensor, precision: str, quantize_queries: bool = True) -> float:
    """Definition of the score, in float64."""
    if not len(document):
        return EMPTY_SCORE
    stored = quantize(document.unsqueeze(0), precision)
    return maxsim_quantized_reference(query.unsqueeze(0), stored, quantize_queries=quantize_queries).item()


@settings(max_examples=25)
@given(
    query_lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    size=st.integers(1, 20),
    precision=st.sampled_from(sorted(PRECISIONS)),
    block_tokens=st.integers(1, 20),
    k=st.integers(1, 14),
)
def test_search_equals_the_definition_of_what_is_kept(
    tmp_path_factory: pytest.TempPathFactory, query_lengths, lengths, size, precision, block_tokens, k
) -> None:
    queries, documents = documents_of(query_lengths, size, seed=1), documents_of(lengths, size, seed=2)
    ids = [str(i) for i in range(len(documents))]
    index = small(tmp_path_factory.mktemp("flat"), dtype=precision)
    index.add_documents(ids, documents)
    per_query = [ids[i:] for i in range(len(queries))]
    with blocks_of_bytes(block_tokens * Layout(precision, size).nbytes):
        for subset in (None, per_query):
            for i, actual in enumerate(index(queries, k=k, subset=subset)):
                candidates = ids if subset is None else subset[i]
                expected = {id_: score(queries[i], documents[int(id_)], precision) for id_ in candidates}
                best = sorted(expected.values(), reverse=True)[:k]
                np.testing.assert_allclose([result["score"] for result in actual], best, rtol=1e-5, atol=1e-5)
                for result in actual:
                    assert result["score"] == pytest.approx(expected[result["id"]], rel=1e-5, abs=1e-5)


@EACH
def test_embeddings_come_back_as_they_were_kept(tmp_path: Path, precision: str) -> None:
    documents = documents_of([3, 0, 5], 8)
    index = small(tmp_path, dtype=precision).add_documents(list("abc"), documents, batch_size=2)
    for result, document in zip(index.get_documents_embeddings([list("abc")])[0], documents, strict=True):
        assert torch.equal(result, quantize(document, precision).dequantize())
    assert index.info().dtype == precision
    assert small(tmp_path).verify().tokens == 8


@EACH
def test_the_scorer_of_a_host_scores_what_was_kept(tmp_path: Path, precision: str) -> None:
    queries, documents = documents_of([4, 2], 8, seed=1), documents_of([3, 6], 8)
    index = small(tmp_path, dtype=precision, scorer="torch")
    index.add_documents(["a", "b"], documents)
    for query, results in zip(queries, index(queries), strict=True):
        for result in results:
            document = documents["ab".index(result["id"])]
            # A host's scorer does not quantize queries.
            assert result["score"] == pytest.approx(score(query, document, precision, False), rel=1e-5, abs=1e-5)


WORD = re.compile("[a-z]+")


def embedded(texts: list[str], vectors: torch.Tensor, vocabulary: dict[str, int]) -> list[torch.Tensor]:
    """One vector per word, mixed with those of its neighbours in the text."""
    results = []
    for text in texts:
        words = [vocabulary.setdefault(word, len(vocabulary)) for word in WORD.findall(text.lower())]
        tokens = vectors[words]
        mixed = tokens + 0.3 * (tokens.roll(1, 0) + tokens.roll(-1, 0))
        results.append(torch.nn.functional.normalize(mixed, dim=1))
    return results


def test_retrieval_is_about_as_good(cranfield: Path, tmp_path: Path) -> None:
    """nDCG@10 and the top 20 on a collection of abstracts, compared with unquantized embeddings."""
    documents, queries, qrels = load_beir_folder(cranfield)
    vectors, vocabulary = torch.randn(20000, 32, generator=torch.Generator().manual_seed(0)), {}
    judged = [id_ for id_ in queries if max(qrels.get(id_, {"": 0}).values()) > 0]
    selected = {id_: queries[id_] for id_ in judged[::2]}
    ids = [document["id"] for document in documents]
    document_embeddings = embedded([document["text"] for document in documents], vectors, vocabulary)
    query_embeddings = embedded(list(selected.values()), vectors, vocabulary)

    def gain(grades: list[float]) -> float:
        return sum(grade / math.log2(rank + 2) for rank, grade in enumerate(grades[:10]))

    output, ndcg = {}, {}
    for dtype in ("bfloat16", *PRECISIONS):
        index = Flat(tmp_path, dtype, dtype=dtype, device="cpu", show_progress=False)
        results = index.add_documents(ids, document_embeddings)(query_embeddings, k=20)
        output[dtype] = [{result["id"] for result in hits} for hits in results]
        scores = []
        for id_, hits in zip(selected, results, strict=True):
            ideal = gain(sorted(qrels[id_].values(), reverse=True))
            scores.append(gain([qrels[id_].get(result["id"], 0) for result in hits]) / ideal)
        ndcg[dtype] = sum(scores) / len(scores)
    # These word embeddings retrieve better than chance.
    assert ndcg["bfloat16"] > 0.15
    for precision in PRECISIONS:
        assert abs(ndcg[precision] - ndcg["bfloat16"]) <= 0.003
        shared = [len(a & b) / 20 for a, b in zip(output[precision], output["bfloat16"], strict=True)]
        assert sum(shared) / len(shared) >= 0.95


# Refused input


def test_an_index_of_another_kind_is_refused(tmp_path: Path) -> None:
    Flat(tmp_path, "eight", dtype="int8", device="cpu").add_documents(["a"], documents_of([2]))
    Flat(tmp_path, "half", dtype="bfloat16", device="cpu").add_documents(["a"], documents_of([2]))
    for name, dtype, stored in (("eight", "uint8", "int8"), ("eight", "float32", "int8"), ("half", "int8", "bfloat16")):
        with pytest.raises(ValueError, match=f"dtype is '{dtype}', but the index in .* stores '{stored}'"):
            Flat(tmp_path, name, dtype=dtype, device="cpu")
    with pytest.raises(
        ValueError, match="projection: hidden states are stored in .*, but the index in .* stores 'int8'"
    ):
        Flat(tmp_path, "eight", device="cpu", projection=(torch.eye(4), None))


@EACH
def test_what_is_not_finite_is_refused(tmp_path: Path, precision: str) -> None:
    store = PackedStore(tmp_path, dtype=precision)
    documents = documents_of([2, 3])
    documents[1][2, 1] = torch.inf
    message = rf"document 'b' hold NaN or infinite values \(as {precision}\), first in token 2"
    with pytest.raises(ValueError, match=message):
        store.add(["a", "b"], documents)
    # float32 overflows for 1e300, and for the difference of these two, which is the range of the uint8 steps.
    wide = [document.double() for document in documents]
    wide[1][2] = 1e300 if precision != "uint8" else torch.tensor([3e38, -3e38, 0.0, 0.0])
    with pytest.raises(ValueError, match=message):
        store.add(["a", "b"], wide)
    assert not store.ids


def test_a_scale_that_is_not_finite_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(*arguments: object) -> torch.Tensor:
        rows = joined(*arguments)
        rows.view(torch.uint8)[3, :4] = torch.tensor([torch.nan]).view(torch.uint8)
        return rows

    index = small(tmp_path, dtype="int8")
    monkeypatch.setattr(store, "joined", spoiled)
    index.add_documents(["a", "b"], documents_of([2, 3], 5))
    with pytest.raises(ValueError, match="NaN or infinite values, first in its document 1"):
        index.verify()
    with pytest.raises(ValueError, match="is damaged: the score of document 'b' is not finite"):
        index([torch.ones(1, 5)])


def test_embeddings_are_views_of_the_rows() -> None:
    """Only the block that a search reads is copied."""
    stored = Layout("uint8", 20)
    rows = stored.rows(torch.randn(7, 20))
    result = stored.embeddings(rows)
    assert isinstance(result, QuantizedEmbeddings)
    assert result.offsets is not None
    for tensor in (result.values, result.scales, result.offsets):
        assert tensor.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
