"""Which tokens of a document that was found its query's tokens have chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import QuantizedEmbeddings, quantize
from ..ops.compute import compute
from ..ops.quantized import query_precision
from ..problem import Options, Tensors
from .resident import Packed
from .scorers import Scorer

__all__ = ["matched_tokens"]


def matched_tokens(scorer: Scorer, queries: Packed, documents: Packed, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """What the tokens of each query have chosen in the documents candidates[i] to candidates[i + 1] (on the host).

    Of every document, which are rows of the store, and every token of its query, the first of its tokens that is most
    similar, and the similarity [Nd, longest]; what is beyond a query's end, or of a document without tokens, means
    nothing.
    """
    kept, values = scorer.layout.embeddings(documents.values), queries.values
    embeddings = scorer.embeddings(documents.values)
    if isinstance(kept, QuantizedEmbeddings):
        # As they are scored.
        values = quantize(values, query_precision(kept.values.dtype)).dequantize(values.dtype)
    counts = candidates.diff()
    if not len(embeddings) or not queries.longest:
        nothing = torch.zeros(len(documents.cu_seqlens) - 1, queries.longest)
        return nothing.long(), nothing
    options = Options(queries.longest, documents.longest, int(counts.max()))
    tensors = Tensors(values, embeddings, None, None, queries.cu_seqlens, documents.cu_seqlens, candidates)
    argmax = compute(tensors, options, True)[1]
    assert argmax is not None
    tokens = argmax.clamp_(min=0).long()
    chosen = (documents.cu_seqlens[:-1].unsqueeze(1) + tokens).clamp_(max=len(embeddings) - 1)
    owners = torch.arange(len(counts)).repeat_interleave(counts)
    asking = queries.cu_seqlens.cpu()[owners].unsqueeze(1) + torch.arange(queries.longest)
    asking = asking.clamp_(max=len(values) - 1).to(values.device, non_blocking=True)
    return tokens, torch.einsum("ntd,ntd->nt", values[asking].float(), embeddings[chosen].float())
