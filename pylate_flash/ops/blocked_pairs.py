"""MaxSim of pairs of sequences by plain torch, every product of two tensors where they lie.

To pack the sequences, and to pad them for a product of many pairs, takes longer than a call for each, even of pairs of
some tokens: 2000 of 8 to 32 and 20 to 180 (d = 128, one core) take 0.06 s so, of which the products are 0.05, and took
0.14 s together; of 4 to 8 and 10 to 20 tokens 0.02 and 0.045 s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import Options, accumulation_dtype
from .lists import Sequences
from .products import inner_products


def scores_of_pairs(queries: Sequences, documents: Sequences, options: Options) -> Tensor:
    """Scores [N] of N queries and as many documents, of one type and size; no gradient."""
    first = queries.tensors[0]
    empty_score = first.new_tensor(options.empty_score, dtype=accumulation_dtype(first.dtype))
    scores = [
        inner_products(query, document).amax(dim=1).sum() if length else empty_score
        for query, document, length in zip(queries.tensors, documents.tensors, documents.lengths.tolist(), strict=True)
    ]
    found = torch.stack(scores)
    if options.reduction == "mean":
        active = torch.from_numpy(queries.lengths.clip(min=1))
        found = torch.where(torch.from_numpy(documents.lengths > 0), found / active, found)
    return found
