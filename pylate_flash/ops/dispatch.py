"""Which implementation serves which input, decided in one place, with a reason that can be printed."""

from __future__ import annotations

import functools
import logging
import warnings
from typing import NamedTuple

import torch

logger = logging.getLogger(__name__)

IMPLEMENTATIONS = ("auto", "triton", "blocked")
# How the kernels sum the gradient of the documents.
BACKWARDS = ("auto", "csr", "onehot", "atomic")
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# What the tests reach; the kernels sum longer embeddings block by block.
KERNEL_MAX_EMBEDDING_SIZE = 4096


class Choice(NamedTuple):
    """An implementation ("triton" or "blocked") and the reason for it."""

    implementation: str
    reason: str


@functools.cache
def _kernels_run_on(device: torch.device) -> str | None:
    """None if the Triton kernels run on `device`, else the reason why they do not."""
    try:
        from triton import knobs
    except ImportError:
        return "triton is not installed"
    if knobs.runtime.interpret:
        return None
    if device.type != "cuda":
        return f"the Triton kernels need a CUDA device, and the tensors are on {device.type}"
    if torch.version.hip is not None:
        return "the Triton kernels are written for NVIDIA GPUs, and this PyTorch is built for ROCm"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"the Triton kernels need compute capability 8.0, and {device} has {capability[0]}.{capability[1]}"
    return None


def _kernels_take(device: torch.device, dtype: torch.dtype, embedding_size: int) -> str | None:
    """None if the Triton kernels take such an input, else the reason why they do not."""
    if (reason := _kernels_run_on(device)) is not None:
        return reason
    if dtype not in KERNEL_DTYPES:
        return f"the Triton kernels take float16, bfloat16 and float32, and the tensors are {dtype}"
    if embedding_size > KERNEL_MAX_EMBEDDING_SIZE:
        return f"the Triton kernels take an embedding size of at most {KERNEL_MAX_EMBEDDING_SIZE}, got {embedding_size}"
    return None


@functools.cache
def _log_fallback(reason: str) -> None:
    """Say once per reason and process why a CUDA input is not served by a kernel."""
    logger.warning("maxsim: blocked torch instead of the Triton kernels: %s", reason)


def explain(device: torch.device | str, dtype: torch.dtype, embedding_size: int = 128) -> Choice:
    """The implementation that "auto" picks for such an input, and why.

    Parameters
    ----------
    device
        Where the tensors are.
    dtype
        Their type.
    embedding_size
        d, the size of one token's embedding.

    Returns
    -------
    Choice
        `implementation` ("triton" or "blocked") and `reason`.
    """
    device = torch.device(device)
    reason = _kernels_take(device, dtype, embedding_size)
    if reason is not None:
        return Choice("blocked", reason)
    return Choice("triton", f"{device.type} tensors of {dtype} with an embedding size of {embedding_size}")


@functools.cache
def choose(implementation: str, device: torch.device, dtype: torch.dtype, embedding_size: int) -> str:
    """Resolve `implementation` to "triton" or "blocked".

    Raises
    ------
    ValueError
        If "triton" was asked for by name and the kernels cannot take the input.
    """
    if implementation == "blocked":
        return "blocked"
    reason = _kernels_take(device, dtype, embedding_size)
    if implementation == "triton":
        if reason is not None:
            raise ValueError(f'implementation="triton" cannot serve this input: {reason}')
        return "triton"
    if device.type == "cuda" and reason is not None:
        _log_fallback(reason)
    # Triton's interpreter exists to test the kernels, so it is never picked by "auto".
    return "triton" if reason is None and device.type == "cuda" else "blocked"


def check_backward(backward: str, implementation: str) -> None:
    """Check that the implementation, "triton" or "blocked", has this backward, and that torch's settings allow it.

    Raises
    ------
    ValueError
        If only the kernels have it, and another implementation serves the input.
    RuntimeError
        If it is not reproducible, and `torch.use_deterministic_algorithms(True)` is set.
    """
    if backward in ("onehot", "atomic") and implementation != "triton":
        raise ValueError(
            f'backward="{backward}" is a way of the Triton kernels, and implementation "{implementation}" serves this '
            'input: use "auto" or "csr"'
        )
    if backward == "atomic" and torch.are_deterministic_algorithms_enabled():
        message = (
            'backward="atomic" adds in any order and is not reproducible, but torch.use_deterministic_algorithms(True) '
            'is set: use "auto", "csr" or "onehot"'
        )
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(message)
        warnings.warn(message, stacklevel=2)
