"""Residual codes in an index: the codec that makes them, and the rows of tokens.

A row is the scale of the token's embedding (float32), the number of its centroid (int32), and the bits of its elements,
in a multiple of 4 bytes.
On the device that scores them the three lie apart, each in memory of its own, as the operation takes them. The scale
holds the norm of the embedding as well, which so need not be 1.

The codec is trained once, on a sample of the first documents, and lies in the catalog.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from tqdm import tqdm

from ..ops import ResidualCodec, ResidualCodes, train_residual_codec

__all__ = ["Codec", "Columns", "Held", "copy_rows", "row_bytes", "trained"]

# Bytes before the bits of a row, which has a multiple of so many.
HEAD, _ALIGNED = 8, 4
# Tokens of the sample, at most, and for each centroid, at least: what few tokens leave of many centroids is too little
# for what is added later.
_SAMPLE, _TOKENS_OF_CENTROID = 1 << 21, 16
_SEED = 0
_NAMES = ("centroids", "bucket_cutoffs", "bucket_weights")


def row_bytes(size: int, nbits: int) -> int:
    """Bytes of a row of embeddings of so many elements."""
    return HEAD + -(-size * nbits // (8 * _ALIGNED)) * _ALIGNED


class Codec:
    """A codec, and the same on the devices where it has been asked for.

    Attributes
    ----------
    content
        What `parse` takes.
    """

    def __init__(self, codec: ResidualCodec, device: torch.device) -> None:
        self._on = {codec.centroids.device: codec}
        self.device, self.size, self.nbits = device, codec.centroids.shape[1], codec.nbits
        tensors = save({name: getattr(codec, name).cpu().contiguous() for name in _NAMES})
        self.content = zlib.crc32(tensors).to_bytes(4, "little") + tensors

    @classmethod
    def parse(cls, content: bytes, device: torch.device) -> Codec:
        """Read `content`; embeddings are encoded on `device`. ValueError if it is damaged."""
        try:
            if zlib.crc32(content[4:]).to_bytes(4, "little") != content[:4]:
                raise ValueError("it has another CRC-32 than when it was written")
            return cls(ResidualCodec(**load(content[4:])), device)
        except (SafetensorError, TypeError, ValueError) as error:
            raise ValueError(f"its codec of residual codes: {error}") from None

    def on(self, device: torch.device) -> ResidualCodec:
        """On a device, where it then stays."""
        if device not in self._on:
            codec = next(iter(self._on.values()))
            self._on[device] = ResidualCodec(*(getattr(codec, name).to(device) for name in _NAMES))
        return self._on[device]

    def rows(self, embeddings: Tensor) -> Tensor:
        """Rows [T, width] of embeddings [T, d], finite, on their device."""
        there, values = embeddings.device, embeddings.to(self.device)
        norms = torch.linalg.vector_norm(values, dim=1)
        bounds = torch.tensor([0, len(values)], device=self.device)
        units = values / norms.clamp(min=torch.finfo(norms.dtype).tiny).unsqueeze(1)
        codes = self.on(values.device).compress(units, bounds)
        assert codes.scales is not None
        more = -codes.residuals.shape[1] % _ALIGNED
        apart = Columns(codes.codes, F.pad(codes.residuals, (0, more)), codes.scales * norms)
        rows = torch.empty(apart.shape, dtype=torch.uint8, device=values.device)
        Columns.of(rows).copy_(apart)
        return rows.to(there)


class Columns:
    """Rows of codes whose numbers [T], bits [T, bytes] and scales [T] lie apart, or, of rows as they are kept, views.

    To those who bring rows from one place to another it is a tensor [T, width] of bytes.
    """

    dtype = torch.uint8

    def __init__(self, codes: Tensor, residuals: Tensor, scales: Tensor) -> None:
        self.codes, self.residuals, self.scales = self._all = codes, residuals, scales
        self.shape, self.device = (len(codes), HEAD + residuals.shape[1]), codes.device
        self.nbytes = sum(tensor.nbytes for tensor in self._all)

    @classmethod
    def of(cls, rows: Held) -> Columns:
        if isinstance(rows, Columns):
            return rows
        return cls(rows[:, 4:HEAD].view(torch.int32)[:, 0], rows[:, HEAD:], rows[:, :4].view(torch.float32)[:, 0])

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device) -> Columns:
        codes = torch.empty(rows, dtype=torch.int32, device=device)
        return cls(codes, codes.new_empty(rows, width - HEAD, dtype=torch.uint8), codes.new_empty(rows).float())

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, some: slice | Tensor) -> Columns:
        return Columns(*(tensor[some] for tensor in self._all))

    def element_size(self) -> int:
        return 1

    def copy_(self, rows: Held, non_blocking: bool = False) -> None:
        if isinstance(rows, Tensor):
            # In one copy.
            rows = Columns.of(rows.to(self.device, non_blocking=non_blocking))
        for to, of in zip(self._all, rows._all, strict=True):
            to.copy_(of, non_blocking=non_blocking)

    def documents(self, codec: ResidualCodec, cu_seqlens: Tensor) -> ResidualCodes:
        """These tokens as documents with these boundaries."""
        residuals = self.residuals[:, : codec.centroids.shape[1] * codec.nbits // 8]
        return ResidualCodes(self.codes, residuals, codec.centroids, codec.bucket_weights, cu_seqlens, self.scales)


# Rows where they are scored, or as they are kept.
Held = Tensor | Columns


def copy_rows(to: Held, rows: Held) -> None:
    """Copy rows, whichever of the two forms either has."""
    if isinstance(rows, Columns):
        to = Columns.of(to)
    to.copy_(rows)  # type: ignore[arg-type]


def trained(documents: Sequence[Tensor], nbits: int, device: torch.device, show_progress: bool) -> Codec:
    """A codec for documents [L_i, d] like these, of which a sample is taken; on one machine, the same of the same.

    `indexes.Flat.train_codec` says how many centroids it has, and what is raised.
    """
    total, sample = 0, []
    order = np.random.default_rng(_SEED).permutation(len(documents))
    with tqdm(total=2, desc="Training the codec", unit="step", disable=not show_progress) as bar:
        for i in order.tolist():
            if total >= _SAMPLE:
                break
            sample.append(documents[i].detach().to(device, torch.float32))
            total += len(sample[-1])
        tokens = torch.cat(sample) if sample else torch.empty(0, 8)
        norms = torch.linalg.vector_norm(tokens, dim=1, keepdim=True)
        # What is not finite is refused where it is kept, by the name of its document.
        tokens = (tokens / norms)[(norms[:, 0] != 0) & norms[:, 0].isfinite()]
        if not len(tokens):
            raise ValueError("residual codes are trained on the first documents, which have no token that is not zero")
        bar.update()
        most = max(1, min(int(16 * len(tokens) ** 0.5), len(tokens) // _TOKENS_OF_CENTROID))
        codec = train_residual_codec(tokens, 1 << (most.bit_length() - 1), nbits)
        bar.update()
    return Codec(codec, device)
