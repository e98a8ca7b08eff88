"""Detection of padding tokens in padded batches, where padding is all zeros."""

from __future__ import annotations

from torch import Tensor

from ..kernels.choice import choose
from .compute import kernels
from .operator import is_plain


def nonzero_rows(embeddings: Tensor) -> Tensor:
    """Whether each token of `embeddings` [.., d] has a nonzero element (NaN included): `embeddings.any(dim=-1)`.

    Returns
    -------
    Tensor
        bool, [..], on the same device.
    """
    if _kernel_takes(embeddings):
        return kernels().nonzero_rows(embeddings)[0]
    return embeddings.any(dim=-1)


def nonzero_rows_of_both(queries: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    """`nonzero_rows` of both, in one launch if a kernel supports both."""
    query_layout, document_layout = ((x.dtype, x.device, x.shape[-1]) for x in (queries, documents))
    if query_layout == document_layout and _kernel_takes(queries) and _kernel_takes(documents):
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
