"""8-bit embeddings with one scale per token, and their container, `QuantizedEmbeddings`.

    int8    x = value * scale             values -127 .. 127, scale = max |x| / 127
    uint8   x = value * scale + offset    values 0 .. 255, scale = (max x - min x) / 255, offset = min x
    fp8     x = value * scale             values of float8_e4m3fn up to 448, scale = max |x| / 448

Values are x (minus its offset) times the reciprocal of the scale, rounded to nearest, ties to even; or all 0, if the
scale is less than `SMALLEST_SCALE`, NaN or infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..problem import LARGEST_VALUES, SMALLEST_SCALE
from .checks import check_boundaries, check_choice, check_embeddings
from .tensor_files import TensorContainer, wide_dtype

# Dtype of the values, by precision name.
PRECISIONS = {"int8": torch.int8, "uint8": torch.uint8, "fp8": torch.float8_e4m3fn}
_LAYOUTS = {2: "[T, d]", 3: "[N, L, d]", 4: "[N, K, L, d]"}
# Tokens converted to float32 at a time.
_TOKENS_AT_ONCE = 1 << 16


@dataclass(frozen=True, eq=False)
class QuantizedEmbeddings(TensorContainer):
    """Token embeddings in 8 bits, created by `quantize` and accepted as documents by `maxsim`.

    It holds the tensors themselves, not copies: in-place writes to them change the embeddings, and are not checked.

    Parameters
    ----------
    values
        [..., d], int8, uint8 or float8_e4m3fn: [N, L, d] padded, [N, K, L, d] candidates, or [T, d] packed.
    scales
        [...], float32, on the same device: the non-negative factor of each token's values.
    offsets
        [...], float32, for uint8 only: added after scaling.
    cu_seqlens
        [N + 1], int32 or int64, on the same device: the boundaries of packed sequences, stored with them; or None.

    Raises
    ------
    TypeError, ValueError
        If one is not a tensor as described above, requires a gradient, or does not match the others. On the CPU, if
        boundaries do not rise from 0 to T; on a GPU, where checking would synchronize, they are not checked.
    """

    values: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    cu_seqlens: Tensor | None = None

    _what, _first = "quantized embeddings", "values"

    def __post_init__(self) -> None:
        values = self.values
        self._check_field("values", tuple(PRECISIONS.values()), _LAYOUTS)
        if values.shape[-1] == 0:
            raise ValueError(f"values must have an embedding size of at least 1, got shape {list(values.shape)}")
        if (self.offsets is None) == (values.dtype == torch.uint8):
            raise ValueError(
                f"offsets must be {'given' if self.offsets is None else 'None'} for values of {values.dtype}, "
                f"got {'None' if self.offsets is None else 'a tensor'}"
            )
        for name in ("scales",) if self.offsets is None else ("scales", "offsets"):
            self._check_field(name, (torch.float32,), shape=values.shape[:-1])
        if self.cu_seqlens is not None:
            if values.dim() != 2:
                raise ValueError(f"cu_seqlens are of packed values [T, d], got values of shape {list(values.shape)}")
            self._check_bounds(self.cu_seqlens)

    @property
    def precision(self) -> str:
        """A key of `PRECISIONS`: "int8", "uint8" or "fp8"."""
        return next(name for name, dtype in PRECISIONS.items() if dtype == self.values.dtype)

    @property
    def shape(self) -> torch.Size:
        """The shape of the embeddings, [..., d]."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The embeddings [..., d], computed in float32 (float64 for float64) and rounded to `dtype`.

        Raises
        ------
        TypeError
            If `dtype` is not a floating dtype.
        """
        wide = wide_dtype(dtype)
        embeddings = self.values.to(wide)
        embeddings *= self.scales.to(wide).unsqueeze(-1)
        if self.offsets is not None:
            embeddings += self.offsets.to(wide).unsqueeze(-1)
        return embeddings.to(dtype)


def quantize(embeddings: Tensor, precision: str = "int8", *, cu_seqlens: Tensor | None = None) -> QuantizedEmbeddings:
    """Quantize embeddings to 8 bits with one scale per token: a quarter of float32's memory, half of bfloat16's.

    Parameters
    ----------
    embeddings
        [N, L, d] padded, [N, K, L, d] candidates, or [T, d] packed; float16, bfloat16, float32 or float64, which is
        rounded to float32 first.
    precision
        "int8": symmetric, steps of 1/127 of the token's largest magnitude. "uint8": affine, 255 steps from its smallest
        to its largest element. "fp8": float8_e4m3fn, 3 mantissa bits per element, scaled so that the largest is 448;
        its scoring kernels need a GPU of compute capability 8.9 or higher.
    cu_seqlens
        [N + 1], boundaries of packed sequences, on any device; a copy is stored with the values. Or None.

    Returns
    -------
    QuantizedEmbeddings
        On the same device, without a gradient, in new memory. A token with NaN or an infinity is NaN in all its
        elements, and so is in uint8 one whose largest and smallest elements differ by more than float32 holds.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described above, or `cu_seqlens` are for padded embeddings or do not span the tokens.

    Examples
    --------
    >>> quantized = quantize(torch.tensor([[1.0, -0.5], [0.0, 0.25]]), "int8")
    >>> quantized.values.tolist(), quantized.dequantize().shape
    ([[127, -64], [0, 127]], torch.Size([2, 2]))
    """
    check_choice("precision", precision, tuple(PRECISIONS))
    check_embeddings("embeddings", embeddings, _LAYOUTS)
    embeddings = embeddings.detach()
    values = torch.empty(embeddings.shape, dtype=PRECISIONS[precision], device=embeddings.device)
    scales = torch.empty(embeddings.shape[:-1], dtype=torch.float32, device=embeddings.device)
    offsets = torch.empty_like(scales) if precision == "uint8" else None
    size = embeddings.shape[-1]
    tokens, flat_values, flat_scales = embeddings.reshape(-1, size), values.view(-1, size), scales.view(-1)
    for start in range(0, len(tokens), _TOKENS_AT_ONCE):
        block = slice(start, start + _TOKENS_AT_ONCE)
        flat_values[block], flat_scales[block], offset = _quantized(tokens[block].float(), precision)
        if offsets is not None:
            assert offset is not None
            offsets.view(-1)[block] = offset
    if cu_seqlens is not None:
        check_boundaries("cu_seqlens", cu_seqlens, embeddings)
        cu_seqlens = cu_seqlens.to(values.device, copy=True)
    return QuantizedEmbeddings(values, scales, offsets, cu_seqlens)


def _quantized(tokens: Tensor, precision: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values, scales and offsets of tokens [T, d] in float32."""
    largest, offset = LARGEST_VALUES[precision], None
    # A tensor, because on a GPU torch turns division by a number into multiplication by its rounded reciprocal.
    divisor = torch.full((), largest, device=tokens.device)
    if precision == "uint8":
        offset = tokens.amin(dim=-1)
        scale = (tokens.amax(dim=-1) - offset) / divisor
        tokens = tokens - offset.unsqueeze(-1)
    else:
        scale = tokens.abs().amax(dim=-1) / divisor
    # A NaN scale is not usable.
    usable = (scale >= SMALLEST_SCALE) & (scale < math.inf)
    inverse = torch.where(usable, scale, 1.0).reciprocal()
    values = torch.where(usable.unsqueeze(-1), tokens * inverse.unsqueeze(-1), 0.0)
    if precision != "fp8":
        values = values.round()
    return values.to(PRECISIONS[precision]), scale, offset
