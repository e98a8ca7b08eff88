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
        ("metadata.json", {"nbits": 4}, "metadata.json must have a num_chunks of at least 1, got None"),
        ("metadata.json", [4, 1], "metadata.json must have nbits of 2 or 4, got None"),
        ("metadata.json", {"nbits": 4.7, "num_chunks": 1}, "metadata.json must have nbits of 2 or 4, got 4.7"),
        ("metadata.json", {"nbits": 4, "num_chunks": 1.9}, "a num_chunks of at least 1, got 1.9"),
        ("metadata.json", {"nbits": 4, "num_chunks": 1, "num_documents": 3}, "a num_documents of 2, .* got 3"),
        ("metadata.json", {"nbits": 4, "num_chunks": 1, "num_embeddings": 12}, "a num_embeddings of 3, .* got 12"),
        ("metadata.json", {"nbits": 8, "num_chunks": 1}, "metadata.json must have nbits of 2 or 4, got 8"),
        ("metadata.json", {"nbits": 4, "num_chunks": 0}, "a num_chunks of at least 1, got 0"),
        ("metadata.json", b"[" * 100_000, "metadata.json holds no JSON"),
        ("metadata.json", b"{", "metadata.json holds no JSON"),
        ("doclens.0.json", [2, 2], r"0.codes.npy must have 1 dimensions, the first of 4 tokens .*, got shape \[3\]"),
        *(
            ("doclens.0.json", lengths, "doclens.0.json must be a list of numbers of tokens")
            for lengths in (["2", "1"], [2.9, 0.9], [True, 2], [4, -1], {"2": 1}, [2, 2**70])
        ),
        ("0.codes.npy", np.array([0, 7, 3]), "codes must be from 0 to 6"),
        # Truncated to 32 bits, it would be 0.
        ("0.codes.npy", np.array([0, 1 << 32, 3]), "codes must be from 0 to 6"),
        ("0.codes.npy", np.array([0.0, 1.0, 2.0]), "0.codes.npy must hold numbers of kind i or u, got float64"),
        ("0.residuals.npy", np.zeros((3, 2), dtype=np.uint8), r"residuals must have shape \[3, 4\], got \[3, 2\]"),
        ("centroids.npy", b"", "centroids.npy holds no array"),
        ("centroids.npy", np.full((7, 8), 1e6, dtype=np.float32), "centroids.npy must hold numbers that are finite"),
        ("bucket_weights.npy", np.zeros(4, dtype=np.float32), "bucket_weights.npy must hold 16 weights, got 4"),
        ("bucket_weights.npy", np.full(16, np.nan, dtype=np.float32), "bucket_weights.npy must hold numbers that are"),
        # A header that is no Python.
        ("0.codes.npy", b"\x93NUMPY\x01\x00\x10\x00{'shape': *7,)   ", "0.codes.npy holds no array"),
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
    wrong(ValueError, "device must be a device that torch can use here, got 'gpu'", read_fast_plaid, ".", "gpu"),
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


def test_chunks_that_disagree_are_no_index(tmp_path: Path) -> None:
    """Their tokens would move to documents of the next chunk."""
    for file in ("centroids.npy", "bucket_weights.npy"):
        np.save(tmp_path / file, FILES[file])
    (tmp_path / "metadata.json").write_text(json.dumps({"nbits": 4, "num_chunks": 2}))
    for chunk, (lengths, n_tokens) in enumerate((([2, 1], 4), ([3], 2))):
        (tmp_path / f"doclens.{chunk}.json").write_text(json.dumps(lengths))
        np.save(tmp_path / f"{chunk}.codes.npy", np.zeros(n_tokens, dtype=np.int64))
        np.save(tmp_path / f"{chunk}.residuals.npy", np.zeros((n_tokens, 4), dtype=np.uint8))
    with pytest.raises(ValueError, match=r"0.codes.npy must have 1 dimensions, the first of 3 tokens .* \[4\]"):
        read_fast_plaid(tmp_path)


@pytest.mark.parametrize("name", ["centroids", "bucket_cutoffs", "bucket_weights"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_codec_of_what_is_not_finite_is_refused(name: str, value: float) -> None:
    tensors = {"centroids": torch.ones(2, 8), "bucket_cutoffs": torch.arange(3.0), "bucket_weights": torch.arange(4.0)}
    ResidualCodec(**tensors)
    tensors[name].view(-1)[-1] = value
    with pytest.raises(ValueError, match=f"{name} must be finite, got NaN or infinity"):
        ResidualCodec(**tensors)


def test_cutoffs_ascend() -> None:
    with pytest.raises(ValueError, match=r"bucket_cutoffs must ascend, got \[1.0, 0.0, 2.0\]"):
        ResidualCodec(torch.ones(2, 8), torch.tensor([1.0, 0.0, 2.0]), torch.arange(4.0))


def test_embeddings_too_large_for_a_codec_are_refused() -> None:
    pytest.importorskip("fastkmeans")
    drawn = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="embeddings must be finite in float32"):
        train_residual_codec(drawn.double() * 1e300, 2)
    with pytest.raises(ValueError, match="embeddings must be of norm 1, got larger ones"):
        train_residual_codec(drawn * 1e6, 2)
