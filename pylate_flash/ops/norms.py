"""The norms of token embeddings, by which normalised similarities are scaled, and the gradient through them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem import accumulation_dtype

# torch.nn.functional.normalize divides by no less than this.
SMALLEST_NORM = 1e-12
# Between this and its inverse, the squares of norms, and products of two norms, are float32 numbers, far from its ends.
_SMALLEST_SCALE = 2.0**-62


def normalized(embeddings: Tensor) -> Tensor:
    """The definition: embeddings divided by their norms, which float64 holds, squared, of all finite float32 ones."""
    return F.normalize(embeddings.double(), dim=-1).to(embeddings.dtype)


def inverse_norms(embeddings: Tensor) -> Tensor:
    """Inverse norms [..., L] of all tokens, float32 (float64 for float64), NaN of an infinite norm.

    A positive factor commutes with the maximum, so similarities are scaled and the embeddings themselves never are:
    half ones are not rounded again.
    """
    norms = torch.linalg.vector_norm(embeddings, dim=-1, dtype=accumulation_dtype(embeddings.dtype))
    return norms.masked_fill_(norms == torch.inf, torch.nan).clamp_(min=SMALLEST_NORM).reciprocal_()


def in_range(embeddings: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Embeddings and their inverse norms: in float64 where squared norms leave float32's range, seen on a CPU only."""
    scales = tuple([inverse_norms(each) for each in embeddings])
    dtype, device = embeddings[0].dtype, embeddings[0].device
    if device.type != "cpu" or dtype in (torch.float16, torch.float64):
        return embeddings, scales
    if all(bool((scale >= _SMALLEST_SCALE).all()) for scale in scales):
        return embeddings, scales
    return in_range(tuple([each.double() for each in embeddings]))


def through_norms(grad: Tensor, embeddings: Tensor, scale: Tensor | None) -> Tensor:
    """The gradient of the embeddings from that of the scaled ones, which it may overwrite, in the embeddings' type.

    With y = x / |x|, the Jacobian maps g to (g - y <y, g>) / |x|. Where the norm was clamped, y = x * scale is linear.
    """
    if scale is not None:
        scale = scale.unsqueeze(-1)
        embeddings_wide = embeddings.to(grad.dtype)
        products = embeddings_wide * grad
        along = torch.where(scale < 1.0 / SMALLEST_NORM, products.sum(dim=-1, keepdim=True) * scale, 0.0)
        # Of one size all three, and no more of them than it takes: on a CPU, new memory costs more than what fills it.
        grad.sub_(torch.mul(embeddings_wide, along * scale, out=products)).mul_(scale)
    return grad.to(embeddings.dtype)


def unscaled(grad: Tensor, embeddings: Tensor, scale: Tensor | None) -> Tensor:
    """`through_norms`, and 0 where there is no gradient: a token that won nothing may be NaN, and so is its norm."""
    if scale is None or (grad.device.type == "cpu" and (scale > 0).all()):
        return through_norms(grad, embeddings, scale)
    without = ~grad.any(dim=-1, keepdim=True)
    return through_norms(grad, embeddings, scale).masked_fill_(without, 0.0)
