"""Products of document and query tokens in plain torch, and the number of similarities held in memory at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem import accumulation_dtype

# Similarities held at once. 2**20 of them (4 MiB) stay in a CPU's L2/L3 cache between the product and the max; a GPU
# needs larger products to be fully utilized.
_BLOCK_CPU = 1 << 20
_BLOCK_OTHER = 1 << 26
# Below this many multiplications, a product does not amortize the oneDNN kernel compiled per new shape (0.2 ms).
_SMALL_PRODUCT = 1 << 24


def block_budget(device: torch.device) -> int:
    """Number of similarities held at once on `device`."""
    return _BLOCK_CPU if device.type == "cpu" else _BLOCK_OTHER


def inner_products(documents: Tensor, queries: Tensor) -> Tensor:
    """Products of all document tokens [T, d] with all query tokens [R, d], as [T, R] in the accumulation dtype.

    Half inputs are converted first, which is exact. On the CPU, torch has no half product that returns its float32
    accumulator; rounding to half would change every similarity by up to 1e-3.

    A large float32 product on an x86 CPU is computed as a 1x1 convolution, with the document tokens as the pixels of an
    image: torch dispatches matrix products to MKL and convolutions to oneDNN, which takes half the time for the few
    columns of a query (AVX-512, 2 cores, d = 128: 9 against 20 ms for 300,000 x 32, and 31 against 65 ms for
    46,080 x 1024).
    """
    source, dtype = documents.dtype, accumulation_dtype(documents.dtype)
    documents, queries = documents.to(dtype), queries.to(dtype)
    (tokens, size), rows = documents.shape, queries.shape[0]
    if (
        tokens * size * rows < _SMALL_PRODUCT
        or dtype != torch.float32
        or documents.device.type != "cpu"
        or not _convolution_serves(source)
    ):
        return documents @ queries.T
    image = documents.view(1, 1, tokens, size).permute(0, 3, 1, 2)
    # Dilating a 1x1 kernel is a no-op, but makes torch use oneDNN with a single thread as well.
    products = F.conv2d(image, queries.reshape(rows, size, 1, 1), dilation=(2, 1))
    return products.permute(0, 2, 3, 1).reshape(tokens, rows)


def _convolution_serves(dtype: torch.dtype) -> bool:
    """Whether a float32 convolution on this CPU is fast, and as precise as the torch settings require.

    If they allow bfloat16 products, `torch.mm` uses them on processors with AMX, which is exact for bfloat16 inputs.
    float16 inputs would lose precision, so they always take the convolution.
    """
    settings: Any = torch.backends.mkldnn
    return (
        torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        # Missing in older versions of torch.
        and hasattr(settings, "conv")
        and settings.conv.fp32_precision in ("none", "ieee")
        and (dtype == torch.float16 or settings.matmul.fp32_precision != "bf16")
    )
