"""Which tokens of a padded batch are padding, where only zeros tell."""

from __future__ import annotations

from torch import Tensor

from ..kernels.choice import choose
from .compute import kernels
from .operator import is_plain


def nonzero_rows(embeddings: Tensor) -> Tensor:
    """Whether each token of `embeddings` [.., d] has an element other than zero, as NaN is: `embeddings.any(dim=-1)`.

    Returns
    -------
    Tensor
        bool, [..], on the same device.
    """
    if _kernel_takes(embeddings):
        return kernels().nonzero_rows(embeddings)[0]
    return embeddings.any(dim=-1)


def nonzero_rows_of_both(queries: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    """`nonzero_rows` of each, by one launch where a kernel takes both."""
    of_queries, of_documents = ((each.dtype, each.device, each.shape[-1]) for each in (queries, documents))
    if of_queries == of_documents and _kernel_takes(queries) and _kernel_takes(documents):
        return kernels().nonzero_rows(queries, documents)
    return nonzero_rows(queries), nonzero_rows(documents)


def _kernel_takes(embeddings: Tensor) -> bool:
    return (
        embeddings.is_cuda
        and 2 <= embeddings.dim() <= 4
        and embeddings.stride(-1) == 1
        and embeddings.numel() > 0
        and is_plain(embeddings)
        and choose("auto", embeddings.device, embeddings.dtype, embeddings.shape[-1]) == "triton"
    )
