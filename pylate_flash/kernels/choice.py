"""Choose the implementation of a call, kernels or blocked torch, and give the reason."""

from __future__ import annotations

import functools
import logging

import torch

from . import tables

logger = logging.getLogger(__name__)

IMPLEMENTATIONS = ("auto", "triton", "blocked")
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.float8_e4m3fn)
# The largest size that the tests cover; the kernels accumulate longer embeddings block by block.
KERNEL_MAX_EMBEDDING_SIZE = 4096


def _kernels_take(device: torch.device, dtype: torch.dtype, embedding_size: int) -> str | None:
    """None if the Triton kernels support such an input, else the reason why they do not."""
    if (reason := tables.kernels_run_on(device, dtype)) is not None:
        return reason
    if dtype not in KERNEL_DTYPES:
        return f"the Triton kernels take float16, bfloat16 and float32, and the tensors are {dtype}"
    if embedding_size > KERNEL_MAX_EMBEDDING_SIZE:
        return f"the Triton kernels take an embedding size of at most {KERNEL_MAX_EMBEDDING_SIZE}, got {embedding_size}"
    return None


@functools.cache
def _log_fallback(reason: str) -> None:
    """Warn once per reason and process that a CUDA input is not served by a kernel."""
    logger.warning("maxsim: blocked torch instead of the Triton kernels: %s", reason)


@functools.cache
def choose(implementation: str, device: torch.device, dtype: torch.dtype, embedding_size: int) -> str:
    """Resolve `implementation` to "triton" or "blocked".

    Raises
    ------
    ValueError
        If "triton" is requested explicitly, and the kernels do not support the input.
    """
    if implementation == "blocked":
        return "blocked"
    reason = _kernels_take(device, dtype, embedding_size)
    if implementation != "auto":
        if reason is not None:
            raise ValueError(f'implementation="triton" cannot serve this input: {reason}')
        return "triton"
    if device.type == "cuda" and reason is not None:
        _log_fallback(reason)
    # Triton's interpreter exists to test the kernels, so it is never picked by "auto".
    return "triton" if reason is None and device.type == "cuda" else "blocked"


def why(implementation: str, device: torch.device, dtype: torch.dtype, embedding_size: int) -> str:
    """The reason for the choice that `choose` makes."""
    if implementation != "auto":
        return "asked for by name"
    reason = _kernels_take(device, dtype, embedding_size)
    return reason or f"{device.type} tensors of {dtype} with an embedding size of {embedding_size}"
