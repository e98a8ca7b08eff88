"""The norms of token embeddings, by which normalised similarities are scaled, and the gradient through them."""

from __future__ import annotations

import torch
from torch import Tensor

# torch.nn.functional.normalize divides by no less than this.
SMALLEST_NORM = 1e-12


def inverse_norms(embeddings: Tensor) -> Tensor:
    """Inverse norms [..., L] of all tokens, float32 (float64 for float64).

    A positive factor commutes with the maximum, so similarities are scaled and the embeddings themselves never are:
    half ones are not rounded again.
    """
    dtype = torch.float64 if embeddings.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(embeddings, dim=-1, dtype=dtype).clamp_(min=SMALLEST_NORM).reciprocal_()


def scales(queries: Tensor, documents: Tensor, normalize: bool) -> tuple[Tensor | None, Tensor | None]:
    """What the similarities of both are scaled by."""
    return (inverse_norms(queries), inverse_norms(documents)) if normalize else (None, None)


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
