"""The codec from embeddings to residual codes: trained here, or read from an index written by fast-plaid.

As in PLAID, centroids come from k-means and are normalised. Residuals are quantized to buckets between quantiles, with
equal numbers of elements; a bucket's weight is the quantile in its middle.
"""

from __future__ import annotations

import json
import math
import os
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .._extras import check_installed
from .checks import (
    check_beside,
    check_boundaries,
    check_embeddings,
    check_integer,
    check_same,
    check_tensor,
    checked_device,
    is_readable,
)
from .residual_codes import CENTROID_DTYPES, NBITS, ResidualCodes

# Residual elements sampled for the quantiles.
_MOST_ELEMENTS = 1 << 22
# Token-centroid products held at once.
_PRODUCTS_AT_ONCE = 1 << 24
_SEED = 42
_LARGEST_CODE = 2**31 - 1


@dataclass(frozen=True, eq=False)
class ResidualCodec:
    """Centroids and buckets that compress embeddings to residual codes (`train_residual_codec`).

    It holds the tensors themselves, not copies, and so do the codes it creates: in-place writes to its centroids or
    weights change the documents compressed before.

    Parameters
    ----------
    centroids
        [C, d], float16, bfloat16 or float32; d is a multiple of 8.
    bucket_cutoffs
        [3] or [15], of that dtype, ascending: an element's bucket is the number of cutoffs below its residual.
    bucket_weights
        [4] or [16], of that dtype.

    Raises
    ------
    TypeError, ValueError
        If one is not a tensor of these dtypes, shapes or devices do not match, or there is no centroid. Values of CPU
        tensors are checked, too: they must be finite.
    """

    centroids: Tensor
    bucket_cutoffs: Tensor
    bucket_weights: Tensor

    def __post_init__(self) -> None:
        check_tensor("centroids", self.centroids, {2: "[C, d]"})
        check_tensor("bucket_cutoffs", self.bucket_cutoffs, {1: "[3] or [15]"})
        check_tensor("bucket_weights", self.bucket_weights, {1: "[4] or [16]"})
        if len(self.centroids) == 0:
            raise ValueError(f"centroids must be at least one, got shape {list(self.centroids.shape)}")
        if len(self.bucket_cutoffs) != len(self.bucket_weights) - 1:
            raise ValueError(
                f"bucket_cutoffs must have shape [{len(self.bucket_weights) - 1}], one less than bucket_weights, "
                f"got {list(self.bucket_cutoffs.shape)}"
            )
        check_beside("bucket_cutoffs", self.bucket_cutoffs, "centroids", self.centroids)
        # Creating codes without tokens runs the remaining checks.
        self._codes(*self._empty_codes(0), torch.zeros(1, dtype=torch.int32, device=self.centroids.device))
        for name in ("centroids", "bucket_cutoffs", "bucket_weights"):
            values = getattr(self, name)
            if is_readable(values) and not values.isfinite().all():
                raise ValueError(f"{name} must be finite, got NaN or infinity")
        if is_readable(self.bucket_cutoffs) and (self.bucket_cutoffs.diff() < 0).any():
            raise ValueError(f"bucket_cutoffs must ascend, got {self.bucket_cutoffs.tolist()}")

    @property
    def nbits(self) -> int:
        """Bits per element: 2 or 4."""
        return self.bucket_weights.shape[0].bit_length() - 1

    def compress(self, embeddings: Tensor, cu_seqlens: Tensor) -> ResidualCodes:
        """Compress packed embeddings to residual codes, with the centroids of largest inner product.

        Parameters
        ----------
        embeddings
            [T, d], float16, bfloat16, float32 or float64, on the device of the centroids; of norm 1, as decompressed
            embeddings are.
        cu_seqlens
            [N + 1], int32 or int64: the boundaries of the documents, from 0 to T.

        Returns
        -------
        ResidualCodes
            On the same device, without a gradient. Centroids and weights are shared with the codec; the rest is new
            memory.

        Raises
        ------
        TypeError, ValueError
            If an argument is not as described above, embeddings are not finite, or boundaries do not span them.
        """
        _check_embeddings(embeddings)
        check_boundaries("cu_seqlens", cu_seqlens, embeddings)
        check_same(self.centroids, embeddings, same_dtype=False, names=("centroids", "embeddings"))
        codes, residuals = self._empty_codes(len(embeddings))
        centroids, cutoffs = self.centroids.float(), self.bucket_cutoffs.float()
        per_byte = 8 // self.nbits
        powers = (1 << torch.arange(8 - self.nbits, -1, -self.nbits, device=embeddings.device)).int()
        for block, nearest, remainder in _coded(embeddings.detach(), centroids):
            codes[block] = nearest
            indices = torch.bucketize(remainder, cutoffs, out_int32=True)
            residuals[block] = (indices.unflatten(1, (-1, per_byte)) * powers).sum(dim=-1).to(torch.uint8)
        return self._codes(codes, residuals, cu_seqlens.to(embeddings.device, copy=True))

    def _empty_codes(self, n_tokens: int) -> tuple[Tensor, Tensor]:
        codes = torch.empty(n_tokens, dtype=torch.int32, device=self.centroids.device)
        return codes, codes.new_empty(n_tokens, self.centroids.shape[1] * self.nbits // 8, dtype=torch.uint8)

    def _codes(self, codes: Tensor, residuals: Tensor, cu_seqlens: Tensor) -> ResidualCodes:
        return ResidualCodes(codes, residuals, self.centroids, self.bucket_weights, cu_seqlens)


def train_residual_codec(
    embeddings: Tensor, num_centroids: int | None = None, nbits: int = 4, *, dtype: torch.dtype = torch.float16
) -> ResidualCodec:
    """Train a codec: centroids by k-means, and buckets by quantiles of the residuals.

    Needs fastkmeans, installed by the extra `residual` or `pylate`. Its seed is fixed: on one machine, the same
    embeddings give the same codec.

    Parameters
    ----------
    embeddings
        [T, d], float16, bfloat16, float32 or float64, of norm 1: those of the documents, or a sample. d is a multiple
        of 8. Centroids are trained on at most 256 embeddings per centroid.
    num_centroids
        None: 16 * sqrt(T) rounded down to a power of two, as in PLAID, and at most T.
    nbits
        Bits per element: 2 or 4.
    dtype
        Dtype of the codec: float16, bfloat16 or float32.

    Returns
    -------
    ResidualCodec
        On the device of `embeddings`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described above; if embeddings are empty or not finite, or `num_centroids` exceeds T.
    MissingExtraError
        If fastkmeans is not installed. The message names the extra.

    Examples
    --------
    >>> embeddings = torch.nn.functional.normalize(torch.randn(500, 16, generator=torch.Generator().manual_seed(0)))
    >>> codec = train_residual_codec(embeddings, nbits=4)
    >>> codec.centroids.shape, codec.bucket_weights.shape
    (torch.Size([256, 16]), torch.Size([16]))
    >>> decompressed = codec.compress(embeddings, torch.tensor([0, 200, 500])).decompress()
    >>> bool((decompressed * embeddings).sum(dim=1).mean() > 0.95)
    True
    """
    _check_embeddings(embeddings)
    n_tokens, size = embeddings.shape
    check_integer("nbits", nbits)
    if nbits not in NBITS:
        raise ValueError(f"nbits must be 2 or 4, got {nbits!r}")
    if size % 8:
        raise ValueError(f"embeddings must have an embedding size that is a multiple of 8, got {size}")
    if not isinstance(dtype, torch.dtype) or dtype not in CENTROID_DTYPES:
        raise TypeError(f"dtype must be torch.float16, torch.bfloat16 or torch.float32, got {dtype}")
    if n_tokens == 0:
        raise ValueError("embeddings must hold at least one token, got none")
    if num_centroids is None:
        num_centroids = min(n_tokens, 1 << int(math.log2(16 * math.sqrt(n_tokens))))
    check_integer("num_centroids", num_centroids, 1)
    if num_centroids > n_tokens:
        raise ValueError(f"num_centroids must be from 1 to the number of tokens, {n_tokens}, got {num_centroids}")
    tokens = embeddings.detach().float()
    if not tokens.isfinite().all():
        raise ValueError("embeddings must be finite in float32, got larger ones")
    centroids = F.normalize(_kmeans(tokens, num_centroids), dim=-1).to(dtype)
    generator = torch.Generator().manual_seed(_SEED)
    sample = torch.randperm(n_tokens, generator=generator)[: max(1, _MOST_ELEMENTS // size)].to(tokens.device)
    residuals = [remainder for _, _, remainder in _coded(tokens[sample], centroids.float())]
    cutoffs, weights = bucket_quantiles(torch.cat(residuals), nbits)
    if not weights.to(dtype).isfinite().all():
        raise ValueError(f"embeddings must be of norm 1, got larger ones, whose residuals {dtype} does not hold")
    return ResidualCodec(centroids, cutoffs.to(dtype), weights.to(dtype))


def read_fast_plaid(folder: str | os.PathLike, device: torch.device | str = "cpu") -> ResidualCodes:
    """Read the documents of an index written by fast-plaid as residual codes, in the order of its document ids.

    PyLate's `PLAID` index stores such a folder, `fast_plaid_index`. Nothing is unpickled. fast-plaid rounds
    intermediate results to float16, so its embeddings differ from these by up to about 1e-3.

    Parameters
    ----------
    folder
        The index, with 2 or 4 bits.
    device
        Device of the codes.

    Returns
    -------
    ResidualCodes
        With centroids in float16.

    Raises
    ------
    TypeError, ValueError
        If torch cannot use `device`.
    OSError, ValueError
        If a file is missing or unreadable, or the folder holds no index of 2 or 4 bits. The message names the file.
    """
    root, device = Path(folder), checked_device("device", device)
    path = root / "metadata.json"
    metadata = _read_json(path)
    counts = metadata if isinstance(metadata, dict) else {}
    nbits, n_chunks = counts.get("nbits"), counts.get("num_chunks")
    if nbits not in NBITS or not _is_count(nbits):
        raise ValueError(f"{path} must have nbits of 2 or 4, got {nbits!r:.100}")
    if not _is_count(n_chunks) or not n_chunks:
        raise ValueError(f"{path} must have a num_chunks of at least 1, got {n_chunks!r:.100}")
    centroids, weights = (_read_floats(root / f"{name}.npy") for name in ("centroids", "bucket_weights"))
    if len(weights) != 1 << nbits:
        raise ValueError(f"{root / 'bucket_weights.npy'} must hold {1 << nbits} weights, got {len(weights)}")
    chunks = [_read_chunk(root, chunk) for chunk in range(n_chunks)]
    codes, residuals, lengths = (np.concatenate(arrays) for arrays in zip(*chunks, strict=True))
    for name, actual in (("num_documents", len(lengths)), ("num_embeddings", len(codes))):
        if counts.get(name, actual) != actual:
            raise ValueError(f"{path} must have a {name} of {actual}, as its files have, got {counts[name]!r:.100}")
    try:
        codes_ = ResidualCodes(
            # Clipping keeps out-of-range codes invalid, so that they are rejected.
            torch.from_numpy(codes.clip(-1, _LARGEST_CODE).astype(np.int32)),
            torch.from_numpy(residuals),
            centroids,
            # fast-plaid writes the bits of a bucket index from lowest to highest.
            weights[_with_reversed_bits(nbits)],
            torch.from_numpy(np.concatenate([[0], lengths.cumsum()])),
        )
    except (IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{root} holds no index of fast-plaid: {error}") from error
    return codes_.to(device)


def _read_chunk(root: Path, chunk: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [T] and residuals [T, bytes] of a chunk of documents, and their lengths, int64."""
    path = root / f"doclens.{chunk}.json"
    lengths = _read_json(path)
    if not isinstance(lengths, list) or not all(map(_is_count, lengths)):
        raise ValueError(f"{path} must be a list of numbers of tokens")
    arrays = []
    for name, kinds, dimensions in (("codes", "iu", 1), ("residuals", "u", 2)):
        file, n_tokens = root / f"{chunk}.{name}.npy", sum(lengths)
        array = _read_array(file, kinds)
        if array.ndim != dimensions or len(array) != n_tokens:
            raise ValueError(
                f"{file} must have {dimensions} dimensions, the first of {n_tokens} tokens as in {path.name}, got "
                f"shape {list(array.shape)}"
            )
        arrays.append(array)
    return arrays[0], arrays[1], np.array(lengths, dtype=np.int64)


def _read_floats(path: Path) -> Tensor:
    """The numbers in a .npy file, in float16."""
    values = torch.from_numpy(_read_array(path, "f")).half()
    if values.dim() == 0 or not values.isfinite().all():
        raise ValueError(f"{path} must hold numbers that are finite in float16")
    return values


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST_CODE


def _with_reversed_bits(nbits: int) -> Tensor:
    """All `nbits`-bit numbers in order, with their bits reversed."""
    numbers = torch.arange(1 << nbits)
    return sum((numbers >> bit & 1) << (nbits - 1 - bit) for bit in range(nbits))  # type: ignore[return-value]


def _read_array(path: Path, kinds: str) -> np.ndarray:
    """The array in a .npy file; its dtype must be one of these numpy `kinds`."""
    try:
        array = np.load(path, allow_pickle=False)
    # numpy parses the header of the file as Python.
    except (ValueError, EOFError, SyntaxError, OverflowError, TypeError, tokenize.TokenError) as error:
        raise ValueError(f"{path} holds no array: {error}") from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path} holds no array, but an archive of several")
    if array.dtype.kind not in kinds:
        raise ValueError(f"{path} must hold numbers of kind {' or '.join(kinds)}, got {array.dtype}")
    return array


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} holds no JSON: {error}") from error


def _check_embeddings(embeddings: Tensor) -> None:
    check_embeddings("embeddings", embeddings, {2: "[T, d]"})
    if embeddings.is_meta:
        raise ValueError("embeddings must hold values, got a tensor on device meta")
    if not torch.isfinite(embeddings).all():
        raise ValueError("embeddings must be finite, got NaN or infinity")


def _kmeans(tokens: Tensor, number: int) -> Tensor:
    """Centroids [number, d], float32, on the device of `tokens`."""
    check_installed("fastkmeans", "train_residual_codec", "residual")
    from fastkmeans import FastKMeans

    # FastKMeans seeds the global torch and numpy generators: restore the caller's state afterwards.
    state = np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        options = {"niter": 8, "seed": _SEED, "max_points_per_centroid": 256, "use_triton": False}
        kmeans = FastKMeans(tokens.shape[1], number, gpu=tokens.is_cuda, device=str(tokens.device), **options)
        kmeans.train(tokens.cpu().numpy())
    np.random.set_state(state)
    return torch.from_numpy(kmeans.centroids).to(tokens.device)


def _coded(tokens: Tensor, centroids: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Blocks of tokens [T, d]: their slice, the centroids of largest inner product (int64), and the residuals."""
    step = max(1, _PRODUCTS_AT_ONCE // len(centroids))
    for start in range(0, len(tokens), step):
        block = slice(start, start + step)
        block_tokens = tokens[block].float()
        nearest = (block_tokens @ centroids.T).argmax(dim=1)
        yield block, nearest, block_tokens - centroids[nearest]


def bucket_quantiles(residuals: Tensor, nbits: int) -> tuple[Tensor, Tensor]:
    """The quantiles of residuals between buckets of equally many elements, and those in the middle of each."""
    halves = 2 << nbits
    quantiles = torch.quantile(residuals.flatten(), torch.arange(1, halves, device=residuals.device) / halves)
    return quantiles[1::2].contiguous(), quantiles[::2].contiguous()
