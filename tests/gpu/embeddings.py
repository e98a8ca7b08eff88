"""Random embeddings on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pylate_flash.ops import pack


def unit(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return F.normalize(torch.randn(*shape, device="cuda", generator=generator), dim=-1).to(dtype)


def packed_of(queries: list[Tensor], documents: list[Tensor]) -> tuple[Tensor, ...]:
    """The tokens of both, and the boundaries of both."""
    (queries_values, queries_bounds), (documents_values, documents_bounds) = pack(queries), pack(documents)
    return queries_values, documents_values, queries_bounds, documents_bounds
