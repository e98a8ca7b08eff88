"""Indexes that store residual codes: their codec, search results, and recovery from damage and kills."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pylate_flash import ResidualCodes, maxsim
from pylate_flash.beir import load_beir_folder
from pylate_flash.index.scorers import Scorer
from pylate_flash.index.store import PackedStore
from pylate_flash.indexes import EMPTY_SCORE, Flat
from pylate_flash.ops.residual import maxsim_residual_reference
from tests.stores import blocks_of_bytes, documents_of, small

pytest.importorskip("fastkmeans")

EACH = pytest.mark.parametrize("dtype", ["residual4", "residual2"])
LENGTHS = [(7 * i) % 13 for i in range(90)]
IDS = [f"d{i}" for i in range(90)]


def unit_documents(lengths: list[int], size: int = 32, seed: int = 0) -> list[torch.Tensor]:
    return [F.normalize(document, dim=1) for document in documents_of(lengths, size, seed)]


def kept(store: PackedStore, positions: np.ndarray) -> ResidualCodes:
    """Documents of a store as residual codes."""
    codec, rows = store.layout.codec, store.read(positions)
    assert codec is not None
    bounds = torch.from_numpy(np.concatenate([[0], store.documents.lengths[positions].cumsum()]))
    size = codec.size * codec.nbits // 8
    numbers, scales = rows[:, 4:8].contiguous().view(torch.int32)[:, 0], rows[:, :4].contiguous().view(torch.float32)
    result = codec.on(torch.device("cpu"))
    return ResidualCodes(
        numbers,
        rows[:, 8 : 8 + size].contiguous(),
        result.centroids,
        result.bucket_weights,
        bounds,
        scales[:, 0].clone(),
    )


def assert_finds(index: Flat, queries: list[torch.Tensor], candidates: list[list[int]], **call) -> None:
    """Check results against a ranking of these documents by the scores of their decompressed codes."""
    for query, positions, result in zip(queries, candidates, index(queries, k=200, **call), strict=True):
        documents = kept(index._store, index._store.documents.live[np.array(positions, dtype=np.int64)])
        scores = maxsim_residual_reference(query.half().unsqueeze(0), documents, empty_score=EMPTY_SCORE)[0]
        ids = index.documents_ids
        expected = {ids[position]: score for position, score in zip(positions, scores.tolist(), strict=True)}
        assert [hit["id"] for hit in result] == sorted(expected, key=lambda id_: -expected[id_])
        for hit in result:
            assert hit["score"] == pytest.approx(expected[hit["id"]], rel=1e-5, abs=1e-6)


@EACH
def test_every_road_finds_what_decompressed_codes_score(tmp_path: Path, dtype: str) -> None:
    documents, queries = unit_documents(LENGTHS), unit_documents([4, 9, 9, 1], seed=1)
    metadata = [{"place": i} for i in range(90)]
    memory, writer = small(None, dtype=dtype), small(tmp_path, dtype=dtype)
    for index in (memory, writer):
        for start in range(0, 90, 40):
            selected = slice(start, start + 40)
            index.add_documents(IDS[selected], documents[selected], metadata=metadata[selected])
    half = writer._store.tokens * writer._store.layout.nbytes // 2
    subset_ids = [IDS[:30], [], ["d5", "unknown", "d89", "d5"], IDS[40:]]
    for state in ("whole", "removed", "compact", "erased"):
        if state in ("removed", "erased"):
            for index in (memory, writer):
                index.remove_documents([IDS[3], IDS[41]] if state == "removed" else IDS[7:9], erase=state == "erased")
        if state == "compact":
            writer.compact()
        with blocks_of_bytes(500):
            opened = [memory, writer, *(small(tmp_path, nbytes) for nbytes in (0, half + 1500, 1 << 30))]
            ids = writer.documents_ids
            everything = range(len(ids))
            for index in opened:
                assert_finds(index, queries, [list(everything)] * 4)
                selected = [i for i in everything if 20 <= int(ids[i][1:]) < 70]
                assert_finds(index, queries, [selected] * 4, where="place >= 20 and place < 70")
                subsets = [[i for i in everything if ids[i] in subset] for subset in subset_ids]
                assert_finds(index, queries, subsets, subset=subset_ids)
                with pytest.MonkeyPatch.context() as patch:
                    # As on a GPU that holds all rows.
                    patch.setattr(Scorer, "in_place", lambda self, device, owned: owned)
                    assert_finds(index, queries, subsets, subset=subset_ids)
                    assert_finds(index, queries[:1], [selected], where="place >= 20 and place < 70")
                    assert_finds(index, queries[:1], subsets[-1:], subset=subset_ids[-1])
                (hit,) = index(queries[:1], k=1, matches=True)[0]
                assert sum(similarity for _, similarity in hit["matches"]) == pytest.approx(hit["score"], rel=1e-3)
            partial_rows = opened[3]._search.rows
            assert 0 < partial_rows.n_resident < partial_rows.documents
        small(tmp_path).verify()


@EACH
def test_embeddings_come_back_with_their_norms(tmp_path: Path, dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    units = torch.cat(unit_documents([3000], 24))
    norms = torch.rand(3000, 1, generator=generator) * 100
    norms[7] = 0
    index = small(tmp_path, dtype=dtype).add_documents(["a"], [units * norms])
    ((result,),) = index.get_documents_embeddings([["a"]])
    torch.testing.assert_close(result.norm(dim=1, keepdim=True), norms, rtol=2e-3, atol=1e-6)
    least = 0.98 if dtype == "residual4" else 0.85
    assert F.cosine_similarity(result, units)[norms[:, 0] > 0].mean() > least
    # 8 bytes, plus the bits of a token rounded up to words.
    assert index._store.layout.nbytes == 8 + {"residual4": 12, "residual2": 8}[dtype]


def test_the_codec_is_trained_once_and_kept(tmp_path: Path) -> None:
    documents = unit_documents([200] * 6)
    torch.manual_seed(5)
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    index = small(tmp_path, dtype="residual4").add_documents(["a", "b"], documents[:2])
    assert torch.equal(torch.get_rng_state(), state[0])
    assert np.array_equal(np.random.get_state()[1], state[1])
    codec = index._store.layout.codec
    assert codec is not None
    # At least 16 tokens per centroid; the number of centroids is a power of two.
    assert len(codec.on(torch.device("cpu")).centroids) == 16
    index.add_documents(["c"], documents[2:3])
    opened = small(tmp_path)
    assert opened._store.layout.codec.content == codec.content  # type: ignore[union-attr]
    opened.add_documents(["d"], documents[3:4]).compact()
    # The same documents give the same codec and the same codes.
    again = small(None, dtype="residual4").add_documents(["a", "b"], documents[:2])
    again.add_documents(["c", "d"], documents[2:4])
    assert again(documents[:2]) == small(tmp_path)(documents[:2])
    # An emptied or overridden index trains a new codec, for documents of another size.
    opened.remove_documents(list("abcd"))
    opened.add_documents(["e"], unit_documents([40], 16))
    assert small(tmp_path)._store.layout.codec.size == 16  # type: ignore[union-attr]
    Flat(tmp_path, "index", override=True, dtype="residual2", device="cpu").add_documents(["a"], documents[:1])
    assert small(tmp_path)._store.layout.codec.nbits == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("tokens", [1, 2, 15, 40])
def test_few_tokens_train_few_centroids(tokens: int) -> None:
    index = small(None, dtype="residual4").add_documents(["a"], unit_documents([tokens]))
    codec = index._store.layout.codec
    assert codec is not None
    assert len(codec.on(torch.device("cpu")).centroids) == (2 if tokens == 40 else 1)
    later = unit_documents([50], seed=3)
    index.add_documents(["b"], later)
    assert index(later, k=1)[0][0]["id"] == "b"


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([torch.zeros(0, 8), torch.zeros(3, 8)], "expected at least one nonzero token"),
        ([torch.ones(3, 12)], "multiple of 8, got 12"),
        ([torch.ones(3, 8), torch.full((2, 8), torch.nan)], "document 'd1' hold NaN or infinite values .as residual4."),
        ([torch.ones(3, 8), torch.full((2, 8), 3e38)], "document 'd1' hold NaN or infinite values .as residual4."),
    ],
)
def test_what_cannot_be_kept_is_refused_and_leaves_nothing(
    tmp_path: Path, documents: list[torch.Tensor], message: str
) -> None:
    index = small(tmp_path, dtype="residual4")
    with pytest.raises(ValueError, match=message):
        index.add_documents(IDS[: len(documents)], documents)
    assert len(small(tmp_path)) == 0
    assert index.add_documents(["a"], unit_documents([5]))(unit_documents([2]))[0][0]["id"] == "a"


def test_a_projection_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden states are stored in .*, but the index in memory stores 'residual4'"):
        small(None, dtype="residual4", projection=(torch.eye(8), None))


def change_codec(path: Path, statement: str, *parameters: object) -> None:
    with closing(sqlite3.connect(path / "index" / "catalog.sqlite")) as connection:
        connection.execute(statement, parameters)
        connection.commit()


def test_a_damaged_codec_is_an_error_that_names_the_catalog(tmp_path: Path) -> None:
    index = small(tmp_path, dtype="residual4").add_documents(["a"], unit_documents([50]))
    content = index._store.layout.codec.content  # type: ignore[union-attr]
    index._store.close()
    damaged = [content[:-1], content[:3], b"", bytes([content[0] ^ 1]) + content[1:]]
    damaged += [content[:byte] + bytes([content[byte] ^ 16]) + content[byte + 1 :] for byte in (4, 13, 100, 400)]
    for damaged_content in damaged:
        change_codec(tmp_path, "UPDATE codec SET content = ?", damaged_content)
        with pytest.raises(ValueError, match="catalog.sqlite is damaged: its codec"):
            small(tmp_path)
    change_codec(tmp_path, "DELETE FROM codec")
    with pytest.raises(ValueError, match="catalog.sqlite is damaged: the codec of its residual codes is missing"):
        small(tmp_path)
    # The index can be overridden.
    Flat(tmp_path, "index", override=True, dtype="residual4", device="cpu").add_documents(["a"], unit_documents([50]))
    small(tmp_path).verify()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_killed_first_addition_leaves_the_codec_and_the_documents_or_neither(tmp_path: Path) -> None:
    documents = unit_documents([20] * 8)
    expected = small(None, dtype="residual4").add_documents(IDS[:8], documents)(documents[:2])
    counts = []
    for step in range(60):
        child = os.fork()
        if not child:
            _die_at(step)
            small(tmp_path / str(step), dtype="residual4").add_documents(IDS[:8], documents)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        index = small(tmp_path / str(step), dtype="residual4")
        index.verify()
        counts.append(len(index))
        assert counts[-1] in (0, 8)
        if not counts[-1]:
            index.add_documents(IDS[:8], documents)
        assert small(tmp_path / str(step))(documents[:2]) == expected
        if not os.WIFSIGNALED(status):
            break
    # Both outcomes occur, and the last child is not killed.
    assert os.WIFEXITED(status)
    assert counts[0] == 0
    assert 8 in counts[:-1]


def _die_at(step: int) -> None:
    """Kill this process after `step` SQLite statements, file writes and fsyncs."""
    import sqlite3

    remaining = [step]

    def count() -> None:
        remaining[0] -= 1
        if remaining[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    class Connection(sqlite3.Connection):
        def execute(self, *arguments):
            count()
            return super().execute(*arguments)

    connect = sqlite3.connect
    sqlite3.connect = lambda *arguments, **options: connect(*arguments, factory=Connection, **options)
    for name in ("pwrite", "fsync"):
        call = getattr(os, name)
        setattr(os, name, lambda *arguments, call=call: (count(), call(*arguments))[1])


@pytest.mark.parametrize(("dtype", "least"), [("residual4", 0.93), ("residual2", 0.75)])
def test_the_best_hundred_of_cranfield(cranfield: Path, dtype: str, least: float) -> None:
    texts, queries, _ = load_beir_folder(cranfield)
    words = [[*document["text"].lower().split(), "."][:60] for document in texts]
    query_words = [text.lower().split() for text in list(queries.values())[::9]]
    number = {word: i for i, word in enumerate(sorted({word for tokens in [*words, *query_words] for word in tokens}))}
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(len(number), 32, generator=generator)

    def embedded(tokens: list[str]) -> torch.Tensor:
        # The same word gets different embeddings, as in context.
        plain = vectors[[number[word] for word in tokens]]
        return F.normalize(plain + 0.5 * torch.randn(plain.shape, generator=generator), dim=1)

    documents, query_embeddings = [embedded(tokens) for tokens in words], [embedded(tokens) for tokens in query_words]
    ids = [document["id"] for document in texts]
    index = small(None, dtype=dtype).add_documents(ids, documents)
    results = [[hit["id"] for hit in tokens] for tokens in index(query_embeddings, k=100)]
    (decompressed,) = index.get_documents_embeddings([ids])
    for scored, share in ((decompressed, 0.99), (documents, least)):
        padded = torch.nn.utils.rnn.pad_sequence(scored, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(tokens)) for tokens in scored], batch_first=True).bool()
        overlap = 0
        for query, tokens in zip(query_embeddings, results, strict=True):
            best = maxsim(query.unsqueeze(0), padded, documents_mask=mask)[0].topk(100).indices
            overlap += len({ids[i] for i in best.tolist()} & set(tokens))
        assert overlap >= share * 100 * len(results)


def test_a_codec_is_trained_on_a_sample_and_kept_before_any_document(tmp_path: Path) -> None:
    sample, documents = unit_documents([100] * 5), unit_documents([5] * 4, seed=1)
    index = small(tmp_path, dtype="residual4").train_codec(sample)
    content = small(tmp_path)._store.layout.codec.content  # type: ignore[union-attr]
    opened = small(tmp_path).add_documents(IDS[:4], documents)
    assert opened._store.layout.codec.content == content  # type: ignore[union-attr]
    assert content == small(None, dtype="residual4").add_documents(IDS[:5], sample)._store.layout.codec.content  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="has been written to"):
        index.train_codec(sample)
    with pytest.raises(ValueError, match="has documents, and so a codec"):
        opened.train_codec(sample)
    with pytest.raises(ValueError, match="expected an empty index of residual codes, .* stores float32"):
        small(None).train_codec(sample)
    with pytest.raises(ValueError, match=r"documents_embeddings\[1\] has size 16, expected 8 as documents_embeddings"):
        small(None, dtype="residual4").train_codec([torch.ones(2, 8), torch.ones(2, 16)])
    with pytest.raises(ValueError, match="expected at least one nonzero token of finite norm, got none"):
        small(None, dtype="residual4").train_codec([torch.full((2, 8), torch.nan)])
