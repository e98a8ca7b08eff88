"""Norms of token embeddings, which scale normalised similarities, and the gradient through them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem import accumulation_dtype

# Lower bound of the divisor of torch.nn.functional.normalize.
SMALLEST_NORM = 1e-12
# For norms between this and its inverse, squares and products of two norms are well inside the float32 range.
_SMALLEST_SCALE = 2.0**-62


def normalized(embeddings: Tensor) -> Tensor:
    """The definition: embeddings divided by their norms. float64 holds the squared norm of finite float32 values."""
    return F.normalize(embeddings.double(), dim=-1).to(embeddings.dtype)


def inverse_norms(embeddings: Tensor) -> Tensor:
    """Inverse norms [..., L] of all tokens, float32 (float64 for float64), NaN for an infinite norm.

    A positive factor commutes with the maximum, so similarities are scaled instead of embeddings, and half embeddings
    are not rounded again.
    """
    norms = torch.linalg.vector_norm(embeddings, dim=-1, dtype=accumulation_dtype(embeddings.dtype))
    return norms.masked_fill_(norms == torch.inf, torch.nan).clamp_(min=SMALLEST_NORM).reciprocal_()


def in_range(embeddings: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Embeddings and their inverse norms, in float64 if squared norms exceed float32's range (detected on CPU only)."""
    scales = tuple([inverse_norms(x) for x in embeddings])
    dtype, device = embeddings[0].dtype, embeddings[0].device
    if device.type != "cpu" or dtype in (torch.float16, torch.float64):
        return embeddings, scales
    if all(bool((scale >= _SMALLEST_SCALE).all()) for scale in scales):
        return embeddings, scales
    return in_range(tuple([x.double() for x in embeddings]))


def through_norms(grad: Tensor, embeddings: Tensor, scale: Tensor | None) -> Tensor:
    """The gradient of the embeddings, in their dtype, from that of the scaled ones, `grad`, which may be overwritten.

    With y = x / |x|, the Jacobian maps g to (g - y <y, g>) / |x|. Where the norm was clamped, y = x * scale is linear.
    """
    if scale is not None:
        scale = scale.unsqueeze(-1)
        embeddings_wide = embeddings.to(grad.dtype)
        products = embeddings_wide * grad
        along = torch.where(scale < 1.0 / SMALLEST_NORM, products.sum(dim=-1, keepdim=True) * scale, 0.0)
        # Reuse the three equal-sized buffers: on a CPU, allocating memory costs more than filling it.
        grad.sub_(torch.mul(embeddings_wide, along * scale, out=products)).mul_(scale)
    return grad.to(embeddings.dtype)


def unscaled(grad: Tensor, embeddings: Tensor, scale: Tensor | None) -> Tensor:
    """`through_norms`, but 0 for tokens without a gradient: a token that wins nothing may be NaN, with a NaN norm."""
    if scale is None or (grad.device.type == "cpu" and (scale > 0).all()):
        return through_norms(grad, embeddings, scale)
    no_gradient = ~grad.any(dim=-1, keepdim=True)
    return through_norms(grad, embeddings, scale).masked_fill_(no_gradient, 0.0)
