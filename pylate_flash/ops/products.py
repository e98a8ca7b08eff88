"""Products of the tokens of documents and queries by plain torch, and how many similarities are held at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem import accumulation_dtype

# Similarities held at once. 2**20 of them (4 MiB) stay in a CPU's L2/L3 cache between the product and the max; a GPU
# needs larger products to be busy.
_BLOCK_CPU = 1 << 20
_BLOCK_OTHER = 1 << 26
# Multiplications below which a product is not worth the kernel that oneDNN compiles for each new shape (0.2 ms).
_SMALL_PRODUCT = 1 << 24


def block_budget(device: torch.device) -> int:
    """Similarities that are held at once on `device`."""
    return _BLOCK_CPU if device.type == "cpu" else _BLOCK_OTHER


def inner_products(documents: Tensor, queries: Tensor) -> Tensor:
    """Products of all document tokens [T, d] with all query tokens [R, d], as [T, R] in the accumulation dtype.

    Half inputs are widened first, which loses nothing. torch has no half product on the CPU that returns the float32
    it accumulates; rounded to half, every similarity would be off by up to 1e-3.

    A large float32 product on an x86 CPU is computed as a convolution with a kernel of one pixel, the document tokens
    being the pixels of an image: torch gives matrix products to MKL, and convolutions to oneDNN, which takes half the
    time for as few columns as a query has tokens (AVX-512, 2 cores, d = 128: 9 against 20 ms for 300,000 x 32, and 31
    against 65 ms for 46,080 x 1024).
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
    # The dilation of a single pixel changes nothing, except that torch then takes oneDNN with one thread as well.
    products = F.conv2d(image, queries.reshape(rows, size, 1, 1), dilation=(2, 1))
    return products.permute(0, 2, 3, 1).reshape(tokens, rows)


def _convolution_serves(dtype: torch.dtype) -> bool:
    """Whether a float32 convolution on this CPU is a fast one, and as precise as the settings of torch ask for.

    Where they allow bfloat16 in products, `torch.mm` takes it on processors with AMX, and bfloat16 inputs lose nothing
    by that. float16 inputs are kept from it, as they would.
    """
    settings: Any = torch.backends.mkldnn
    return (
        torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        # Older versions of torch lack these.
        and hasattr(settings, "conv")
        and settings.conv.fp32_precision in ("none", "ieee")
        and (dtype == torch.float16 or settings.matmul.fp32_precision != "bf16")
    )
