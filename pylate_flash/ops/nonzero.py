"""Which tokens of a padded batch are padding, where only zeros tell."""

from __future__ import annotations

from torch import Tensor

from ..kernels.select import choose
from .compute import kernels
from .maxsim import is_plain


def nonzero_rows(embeddings: Tensor) -> Tensor:
    """Whether each token of `embeddings` [.., d] has an element other than zero, as NaN is: `embeddings.any(dim=-1)`.

    Returns
    -------
    Tensor
        bool, [..], on the same device.
    """
    if (
        embeddings.is_cuda
        and 2 <= embeddings.dim() <= 4
        and embeddings.stride(-1) == 1
        and embeddings.numel() > 0
        and is_plain(embeddings)
        and choose("auto", embeddings.device, embeddings.dtype, embeddings.shape[-1]) == "triton"
    ):
        with kernels().on_device(embeddings):
            return kernels().nonzero_rows(embeddings)
    return embeddings.any(dim=-1)
