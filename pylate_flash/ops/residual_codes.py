"""Residual codes, as in ColBERTv2 and PLAID: a centroid per token, and a few bits per element of the residual.

An embedding is its centroid plus one of 2**nbits bucket weights per element, divided by its norm:

    embedding = (centroids[code] + bucket_weights[indices]) / |centroids[code] + bucket_weights[indices]|

The sum is rounded to the dtype of the centroids, and multiplied by its scale, its inverse norm, in float32. The indices
of an embedding are packed in order, the first in the highest bits of the first byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import is_readable
from .tensor_files import TensorContainer, wide_dtype

# Bits per element.
NBITS = (2, 4)
CENTROID_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Lower bound of the norm that sums are divided by, as in `torch.nn.functional.normalize`.
_SMALLEST_NORM = 1e-12
# Dtypes by their number of bytes.
_WORDS = {4: torch.int32, 8: torch.int64, 16: torch.complex128}
# Elements decompressed at a time when all are.
_ELEMENTS_AT_ONCE = 1 << 23


@dataclass(frozen=True, eq=False)
class ResidualCodes(TensorContainer):
    """Packed documents as residual codes, created by `ResidualCodec.compress` or `read_fast_plaid`.

    A token of 128 elements takes 72 bytes with 4 bits and 40 with 2; bfloat16 takes 256. The tensors are held, not
    copied: in-place writes to them change the embeddings, and are not checked.

    Parameters
    ----------
    codes
        [T], int32: the centroid of each token.
    residuals
        [T, d * nbits / 8], uint8: the bucket indices of its elements, the first in the highest bits of the first byte.
    centroids
        [C, d], float16, bfloat16 or float32; d is a multiple of 8.
    bucket_weights
        [4] or [16], of the dtype of the centroids: added to an element by its index, of 2 bits or of 4.
    cu_seqlens
        [N + 1], int32 or int64: document i is tokens cu_seqlens[i] to cu_seqlens[i + 1].
    scales
        [T], float32: the inverse norm of centroid plus weights, summed in their dtype. None: computed, with a pass over
        all tokens.

    Raises
    ------
    TypeError, ValueError
        If one is not a tensor as described above, requires a gradient, or does not match the others. On the CPU, if a
        code has no centroid, or boundaries do not rise from 0 to T; on a GPU, where checking would synchronize, they
        are not checked.

    Examples
    --------
    >>> weights = torch.tensor([-1.0, -0.5, 0.5, 1.0])
    >>> residuals = torch.tensor([[0b11_10_01_00, 0b00_00_00_00]], dtype=torch.uint8)
    >>> bounds = torch.tensor([0, 1])
    >>> codes = ResidualCodes(torch.zeros(1, dtype=torch.int32), residuals, torch.ones(1, 8), weights, bounds)
    >>> codes.nbits, codes.n_documents, (codes.decompress() / codes.scales).tolist()
    (2, 1, [[2.0, 1.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]])
    """

    codes: Tensor
    residuals: Tensor
    centroids: Tensor
    bucket_weights: Tensor
    cu_seqlens: Tensor
    scales: Tensor | None = None

    _what, _first = "residual codes", "codes"

    def __post_init__(self) -> None:
        self._check_field("codes", (torch.int32,), {1: "[T]"})
        self._check_field("centroids", CENTROID_DTYPES, {2: "[C, d]"})
        self._check_field("bucket_weights", (self.centroids.dtype,), {1: "[4] or [16]"})
        weights, size, n_tokens = len(self.bucket_weights), self.size, len(self.codes)
        if weights not in [1 << nbits for nbits in NBITS]:
            raise ValueError(f"bucket_weights must have shape [4] or [16], got [{weights}]")
        if size == 0 or size % 8:
            raise ValueError(f"centroids must have an embedding size that is a multiple of 8, got {size}")
        self._check_field("residuals", (torch.uint8,), shape=(n_tokens, size * self.nbits // 8))
        if self.scales is not None:
            self._check_field("scales", (torch.float32,), shape=(n_tokens,))
        self._check_bounds(self.cu_seqlens)
        if is_readable(self.codes) and n_tokens:
            lowest, highest = (int(value) for value in self.codes.aminmax())
            if lowest < 0 or highest >= len(self.centroids):
                last = len(self.centroids) - 1
                raise ValueError(f"codes must be from 0 to {last}, the last of centroids, got {lowest} to {highest}")
        if self.scales is None:
            object.__setattr__(self, "scales", self._computed_scales())

    @property
    def nbits(self) -> int:
        """Bits per element: 2 or 4."""
        return self.bucket_weights.shape[0].bit_length() - 1

    @property
    def size(self) -> int:
        """Embedding size."""
        return self.centroids.shape[1]

    @property
    def n_documents(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def decompress(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The normalised embeddings [T, d], in `dtype`.

        Centroids and weights are added in their own dtype, as for `scales` and in the kernels; the sums are multiplied
        by `scales` in float32 (float64 for float64) and rounded to `dtype`.

        Raises
        ------
        TypeError
            If `dtype` is not a floating dtype.
        """
        wide_dtype(dtype)
        embeddings = torch.empty(len(self.codes), self.size, dtype=dtype, device=self.device)
        for block in self._token_blocks():
            embeddings[block] = self.decompress_tokens(block, dtype)
        return embeddings

    def decompress_tokens(self, tokens: slice | Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """`decompress` for some tokens [n, d]: a slice, or their indices [n], int64."""
        assert self.scales is not None
        wide = wide_dtype(dtype)
        return self._sums(tokens).to(wide).mul_(self.scales[tokens].to(wide).unsqueeze(1)).to(dtype)

    def _token_blocks(self) -> list[slice]:
        step = max(1, _ELEMENTS_AT_ONCE // self.size)
        return [slice(start, start + step) for start in range(0, len(self.codes), step)]

    def _sums(self, tokens: slice | Tensor) -> Tensor:
        """Centroids plus weights [n, d] of these tokens, in their dtype."""
        shifts = torch.arange(8 - self.nbits, -1, -self.nbits, device=self.device)
        bytes_ = torch.arange(256, device=self.device).unsqueeze(1)
        # The weights of each byte, viewed as one word: the CPU gathers words many times faster than rows.
        table = self.bucket_weights[(bytes_ >> shifts) & ((1 << self.nbits) - 1)]
        words = table.view(_WORDS[table.shape[1] * table.itemsize]).squeeze(1)
        weights = words.index_select(0, self.residuals[tokens].int().flatten()).view(self.centroids.dtype)
        return self.centroids.index_select(0, self.codes[tokens]).add_(weights.view(-1, self.size))

    def _computed_scales(self) -> Tensor:
        scales = torch.empty(len(self.codes), dtype=torch.float32, device=self.device)
        for block in self._token_blocks():
            norms = torch.linalg.vector_norm(self._sums(block).float(), dim=-1)
            scales[block] = norms.clamp_(min=_SMALLEST_NORM).reciprocal_()
        return scales
