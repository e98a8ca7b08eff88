"""`train_residual_codec`, `compress` and `read_fast_plaid`, on indexes built by fast-plaid itself."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pylate_flash import ResidualCodec, maxsim_residual, read_fast_plaid, train_residual_codec
from pylate_flash._extras import MissingExtraError
from pylate_flash.ops import residual_codec
from tests.ops.cases import mistakes, wrong

BOUNDS = torch.tensor([0, 100, 100, 400])


def clustered(n_tokens: int = 400, size: int = 16) -> torch.Tensor:
    """Unit vectors clustered around 20 centres, like those of models."""
    generator = torch.Generator().manual_seed(0)
    centres = F.normalize(torch.randn(20, size, generator=generator), dim=-1)
    noise = torch.randn(n_tokens, size, generator=generator) / size**0.5
    return F.normalize(centres[torch.arange(n_tokens) % 20] + 0.3 * noise, dim=-1)


@pytest.fixture(scope="module")
def codecs() -> dict[int, ResidualCodec]:
    pytest.importorskip("fastkmeans")
    return {nbits: train_residual_codec(clustered(), 32, nbits) for nbits in (2, 4)}


@pytest.mark.parametrize("nbits", [2, 4])
def test_more_bits_come_closer(nbits: int, codecs: dict[int, ResidualCodec]) -> None:
    embeddings = clustered()
    documents = codecs[nbits].compress(embeddings, BOUNDS)
    assert documents.nbits == nbits
    assert torch.equal(documents.cu_seqlens, BOUNDS)
    similarity = (documents.decompress() * embeddings).sum(dim=1)
    centroid_similarity = (codecs[nbits].centroids.float()[documents.codes] * embeddings).sum(dim=1)
    assert (1 - similarity).mean() < (1 - centroid_similarity).mean() / {2: 3, 4: 10}[nbits]


@pytest.mark.parametrize("nbits", [2, 4])
def test_compressed_by_the_nearest_centroid_and_the_buckets(
    nbits: int, codecs: dict[int, ResidualCodec], monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, embeddings = codecs[nbits], clustered().double()
    monkeypatch.setattr(residual_codec, "_PRODUCTS_AT_ONCE", 32 * 7)
    documents = codec.compress(embeddings, BOUNDS)
    products = embeddings @ codec.centroids.double().T
    assert torch.equal(documents.codes.long(), products.argmax(dim=1))
    residuals = embeddings.float() - codec.centroids.float()[documents.codes]
    indices = (residuals.unsqueeze(-1) > codec.bucket_cutoffs.float()).sum(dim=-1)
    expected = codec.centroids[documents.codes] + codec.bucket_weights[indices]
    torch.testing.assert_close(documents.decompress(), F.normalize(expected.float(), dim=-1))


@pytest.mark.parametrize("nbits", [2, 4])
def test_buckets_hold_as_many_elements_each(nbits: int, codecs: dict[int, ResidualCodec]) -> None:
    codec, embeddings = codecs[nbits], clustered()
    documents = codec.compress(embeddings, BOUNDS)
    residuals = embeddings - codec.centroids.float()[documents.codes]
    counts = torch.bincount(torch.bucketize(residuals, codec.bucket_cutoffs.float()).flatten(), minlength=1 << nbits)
    share = residuals.numel() / (1 << nbits)
    # Cutoffs are rounded to float16.
    assert ((counts - share).abs() <= 0.02 * share).all()
    edges = torch.cat([residuals.min().view(1), codec.bucket_cutoffs.float(), residuals.max().view(1)])
    assert ((codec.bucket_weights > edges[:-1]) & (codec.bucket_weights < edges[1:])).all()


def test_the_same_codec_again_and_a_generator_left_alone() -> None:
    pytest.importorskip("fastkmeans")
    torch.manual_seed(5)
    np.random.seed(5)
    first = train_residual_codec(clustered(), nbits=2, dtype=torch.float32)
    drawn = torch.rand(3), np.random.rand(3)
    torch.manual_seed(5)
    np.random.seed(5)
    assert torch.equal(drawn[0], torch.rand(3))
    assert (drawn[1] == np.random.rand(3)).all()
    torch.manual_seed(6)
    second = train_residual_codec(clustered(), nbits=2, dtype=torch.float32)
    # 16 * sqrt(400) = 320.
    assert first.centroids.shape == (256, 16)
    for name in ("centroids", "bucket_cutoffs", "bucket_weights"):
        assert torch.equal(getattr(first, name), getattr(second, name))
        assert getattr(first, name).dtype == torch.float32


def test_one_token() -> None:
    pytest.importorskip("fastkmeans")
    token = F.normalize(torch.ones(1, 8), dim=-1)
    documents = train_residual_codec(token).compress(token, torch.tensor([0, 1]))
    torch.testing.assert_close(documents.decompress(), token, rtol=1e-3, atol=0.0)


def test_without_fastkmeans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'needs fastkmeans.*"pylate-flash\[residual\]"'):
        train_residual_codec(torch.eye(8))


def made_by_fast_plaid(folder: Path, nbits: int):
    """Build an index of 40 documents of 1 to 15 tokens in two chunks; return fast-plaid's index object."""
    search = pytest.importorskip("fast_plaid.search")
    documents = list(clustered(295, 32).split([1 + i % 15 for i in range(40)]))
    index = search.FastPlaid(index=str(folder), device="cpu")
    return index.create(documents_embeddings=documents, nbits=nbits, batch_size=25)


@pytest.mark.parametrize("nbits", [2, 4])
def test_an_index_of_fast_plaid(nbits: int, tmp_path: Path) -> None:
    index = made_by_fast_plaid(tmp_path, nbits)
    assert (tmp_path / "1.codes.npy").exists()
    documents = read_fast_plaid(tmp_path)
    assert documents.nbits == nbits
    decompressed = [embeddings.float() for embeddings in index.get_embeddings(list(range(40)))]
    assert documents.cu_seqlens.diff().tolist() == [len(embeddings) for embeddings in decompressed]
    # fast-plaid computes in float16.
    torch.testing.assert_close(documents.decompress(), torch.cat(decompressed), rtol=0.0, atol=1e-3)
    queries = clustered(12, 32).view(2, 6, 32)
    output = maxsim_residual(queries, documents)
    results = index.search(queries_embeddings=queries, top_k=40, n_full_scores=4096, n_ivf_probe=256)
    for query, result in enumerate(results):
        assert len(result) == 40
        numbers, scores = zip(*result, strict=True)
        torch.testing.assert_close(output[query, list(numbers)], torch.tensor(scores), rtol=0.0, atol=6 * 1e-3)
    index.delete([3, 30])
    stored = torch.cat([decompressed[number] for number in range(40) if number not in (3, 30)])
    torch.testing.assert_close(read_fast_plaid(tmp_path).decompress(), stored, rtol=0.0, atol=1e-3)


FILES = {
    "metadata.json": {"nbits": 4, "num_chunks": 1},
    "doclens.0.json": [2, 1],
    "0.codes.npy": np.array([0, 6, 3]),
    "0.residuals.npy": np.zeros((3, 4), dtype=np.uint8),
    "centroids.npy": np.ones((7, 8), dtype=np.float16),
    "bucket_weights.npy": np.zeros(16, dtype=np.float32),
}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metadata.json", {"nbits": 4}, "metadata.json must have nbits and num_chunks"),
        ("metadata.json", {"nbits": 8, "num_chunks": 1}, "metadata.json must have nbits of 2 or 4, got 8"),
        ("metadata.json", {"nbits": 4, "num_chunks": 0}, "holds no index of fast-plaid"),
        ("metadata.json", b"{", "metadata.json holds no JSON"),
        ("doclens.0.json", [2, 2], "cu_seqlens must rise from 0 to the number of codes, 3"),
        ("doclens.0.json", ["2", "1"], "holds no index of fast-plaid"),
        ("0.codes.npy", np.array([0, 7, 3]), "codes must be from 0 to 6"),
        # Truncated to 32 bits, it would be 0.
        ("0.codes.npy", np.array([0, 1 << 32, 3]), "codes must be from 0 to 6"),
        ("0.codes.npy", np.array([0.0, 1.0, 2.0]), "0.codes.npy must hold numbers of kind i or u, got float64"),
        ("0.residuals.npy", np.zeros((3, 2), dtype=np.uint8), r"residuals must have shape \[3, 4\], got \[3, 2\]"),
        ("centroids.npy", b"", "centroids.npy holds no array"),
        ("bucket_weights.npy", np.zeros(4, dtype=np.float32), "holds no index of fast-plaid"),
        # An object array, which numpy would pickle.
        ("bucket_weights.npy", np.array([{}]), "bucket_weights.npy holds no array: Object arrays cannot be loaded"),
    ],
)
def test_a_folder_without_a_whole_index(name: str, content, message: str, tmp_path: Path) -> None:
    def write(name: str, content) -> None:
        if isinstance(content, np.ndarray):
            np.save(tmp_path / name, content)
        else:
            written = content if isinstance(content, bytes) else json.dumps(content).encode()
            (tmp_path / name).write_bytes(written)

    for file in FILES:
        write(file, FILES[file])
    assert read_fast_plaid(tmp_path).n_documents == 2
    write(name, content)
    with pytest.raises(ValueError, match=message):
        read_fast_plaid(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        read_fast_plaid(tmp_path)


CODEC = ResidualCodec(torch.eye(8), torch.zeros(3), torch.zeros(4))


test_one_error_for_each_mistake = mistakes(
    wrong(ValueError, "nbits must be 2 or 4, got 3", train_residual_codec, torch.eye(8), nbits=3),
    wrong(ValueError, "an embedding size that is a multiple of 8, got 7", train_residual_codec, torch.eye(7)),
    wrong(ValueError, "num_centroids must be from 1 to .* 8, got 9", train_residual_codec, torch.eye(8), 9),
    wrong(ValueError, "at least one token", train_residual_codec, torch.ones(0, 8)),
    wrong(ValueError, "embeddings must be finite", train_residual_codec, torch.full((2, 8), torch.nan)),
    wrong(TypeError, "dtype must be torch.float16", train_residual_codec, torch.eye(8), dtype=torch.float64),
    wrong(ValueError, "the embedding size of centroids, 8, got 4", CODEC.compress, torch.eye(4), BOUNDS),
    wrong(ValueError, "cu_seqlens must rise from 0", CODEC.compress, torch.eye(8), BOUNDS),
    wrong(ValueError, r"bucket_cutoffs must have shape \[3\], one less than bucket_weights, got \[4\]",
          ResidualCodec, torch.eye(8), torch.zeros(4), torch.zeros(4)),
    wrong(TypeError, "bucket_cutoffs must have the dtype of centroids, torch.float32, got torch.float16",
          ResidualCodec, torch.eye(8), torch.zeros(3).half(), torch.zeros(4)),
    wrong(ValueError, r"bucket_weights must have shape \[4\] or \[16\], got \[8\]",
          ResidualCodec, torch.eye(8), torch.zeros(7), torch.zeros(8)),
)  # fmt: skip
