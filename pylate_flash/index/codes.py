"""Residual codes in an index: the codec that makes them, and the rows of tokens.

A row is the scale of the token's embedding (float32), the index of its centroid (int32), and the bits of its elements,
padded to a multiple of 4 bytes. The scale includes the norm of the embedding, which therefore need not be 1.

The codec is trained once, on a sample of the first documents, and stored in the catalog.
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
from .columns import Form, Held, packed_rows

# Bytes before the bits of a row, and the multiple to which its bits are padded.
_HEAD, _ALIGNED = 8, 4
# Maximum tokens of the sample, and minimum tokens per centroid: many centroids trained on few tokens are a poor fit for
# documents that are added later.
_SAMPLE, _TOKENS_OF_CENTROID = 1 << 21, 16
_SEED = 0
_NAMES = ("centroids", "bucket_cutoffs", "bucket_weights")


def form_of(size: int, nbits: int) -> Form:
    """Row format of embeddings with `size` elements: scale, centroid index, and bits."""
    width = _HEAD + -(-size * nbits // (8 * _ALIGNED)) * _ALIGNED
    return Form(width, ((0, 4, torch.float32), (4, _HEAD, torch.int32), (_HEAD, width, torch.uint8)))


class Codec:
    """A residual codec, cached on each device that it has been requested for.

    Attributes
    ----------
    content
        The serialized codec, as `parse` takes it.
    """

    def __init__(self, codec: ResidualCodec, device: torch.device) -> None:
        self._on = {codec.centroids.device: codec}
        self.device, self.size, self.nbits = device, codec.centroids.shape[1], codec.nbits
        tensors = save({name: getattr(codec, name).cpu().contiguous() for name in _NAMES})
        self.content = zlib.crc32(tensors).to_bytes(4, "little") + tensors

    @classmethod
    def parse(cls, content: bytes, device: torch.device) -> Codec:
        """Read `content`; embeddings are encoded on `device`. Raises a ValueError if it is damaged."""
        try:
            if zlib.crc32(content[4:]).to_bytes(4, "little") != content[:4]:
                raise ValueError("its CRC-32 differs from the recorded one")
            return cls(ResidualCodec(**load(content[4:])), device)
        except (SafetensorError, TypeError, ValueError) as error:
            raise ValueError(f"its codec of residual codes: {error}") from None

    def on(self, device: torch.device) -> ResidualCodec:
        """The codec on a device, where it then stays."""
        if device not in self._on:
            codec = next(iter(self._on.values()))
            self._on[device] = ResidualCodec(*(getattr(codec, name).to(device) for name in _NAMES))
        return self._on[device]

    def rows(self, embeddings: Tensor) -> Tensor:
        """Encode finite embeddings [T, d] into rows [T, width] on their device."""
        input_device, values = embeddings.device, embeddings.to(self.device)
        norms = torch.linalg.vector_norm(values, dim=1)
        bounds = torch.tensor([0, len(values)], device=self.device)
        units = values / norms.clamp(min=torch.finfo(norms.dtype).tiny).unsqueeze(1)
        codes = self.on(values.device).compress(units, bounds)
        assert codes.scales is not None
        padding = -codes.residuals.shape[1] % _ALIGNED
        columns = (codes.scales * norms).unsqueeze(1), codes.codes.unsqueeze(1), F.pad(codes.residuals, (0, padding))
        return packed_rows(form_of(self.size, self.nbits), columns).to(input_device)


def codes_of(rows: Held, codec: ResidualCodec, cu_seqlens: Tensor) -> ResidualCodes:
    """View rows as the residual codes of documents with these boundaries."""
    size, nbits = codec.centroids.shape[1], codec.nbits
    scales, codes, residuals = form_of(size, nbits).of(rows).tensors
    residuals = residuals[:, : size * nbits // 8]
    return ResidualCodes(codes[:, 0], residuals, codec.centroids, codec.bucket_weights, cu_seqlens, scales[:, 0])


def trained(documents: Sequence[Tensor], nbits: int, device: torch.device, show_progress: bool) -> Codec:
    """Train a codec on a sample of the documents [L_i, d]; deterministic on one machine.

    `indexes.Flat.train_codec` describes the number of centroids and the errors.
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
        # Non-finite values are refused later, when they are stored, with the id of their document.
        tokens = (tokens / norms)[(norms[:, 0] != 0) & norms[:, 0].isfinite()]
        if not len(tokens):
            raise ValueError(
                "residual codes are trained on the first documents: expected at least one nonzero token of finite "
                "norm, got none"
            )
        bar.update()
        most = max(1, min(int(16 * len(tokens) ** 0.5), len(tokens) // _TOKENS_OF_CENTROID))
        codec = train_residual_codec(tokens, 1 << (most.bit_length() - 1), nbits)
        bar.update()
    return Codec(codec, device)
