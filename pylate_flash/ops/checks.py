"""Checks shared by the operations: one clear error per mistake, naming the argument."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, peek_interpreter_stack
from torch.autograd import forward_ad

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_embeddings(name: str, value: object, layouts: dict[int, str]) -> Tensor:
    """Return `value` if it is a floating tensor whose rank is a key of `layouts` (rank -> shape in words).

    Raises
    ------
    TypeError
        If it is no tensor, or not of a floating dtype.
    ValueError
        If it has another rank, or an embedding size of 0.
    """
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor of shape {' or '.join(layouts.values())}, got {type(value).__name__}"
        )
    if value.dtype not in FLOATING:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {value.dtype}")
    if value.dim() not in layouts:
        raise ValueError(f"{name} must have shape {' or '.join(layouts.values())}, got {list(value.shape)}")
    if value.shape[-1] == 0:
        raise ValueError(f"{name} must have an embedding size of at least 1, got shape {list(value.shape)}")
    return value


def check_same(queries: Tensor, documents: Tensor) -> None:
    """Raise unless `queries` and `documents` agree in device, dtype and embedding size.

    Raises
    ------
    TypeError
        If their dtypes differ.
    ValueError
        If their devices or their embedding sizes differ.
    """
    if queries.device != documents.device:
        raise ValueError(f"documents must be on the device of queries, {queries.device}, got {documents.device}")
    if queries.dtype != documents.dtype:
        raise TypeError(f"documents must have the dtype of queries, {queries.dtype}, got {documents.dtype}")
    if queries.shape[-1] != documents.shape[-1]:
        raise ValueError(
            f"documents must have the embedding size of queries, {queries.shape[-1]}, got {documents.shape[-1]}"
        )


def check_mask(name: str, mask: object, embeddings: Tensor) -> Tensor | None:
    """Return `mask` as bool (True: active), or None, after checking it against the tokens of `embeddings`.

    Its values are checked where that waits for nothing; elsewhere all but 0 count as 1.

    Raises
    ------
    TypeError
        If it is neither None nor a tensor, or complex.
    ValueError
        If its shape is not that of the tokens, it lies on another device, or holds other values than 0 and 1.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None, got {type(mask).__name__}")
    if mask.is_complex():
        raise TypeError(f"{name} must be bool, or 0/1 of an integer or floating dtype, got {mask.dtype}")
    if mask.shape != embeddings.shape[:-1]:
        raise ValueError(f"{name} must have shape {list(embeddings.shape[:-1])}, got {list(mask.shape)}")
    if mask.device != embeddings.device:
        raise ValueError(f"{name} must be on {embeddings.device}, got {mask.device}")
    if mask.dtype == torch.bool:
        return mask
    active = mask != 0
    if is_readable(mask) and (other := mask[mask != active]).numel():
        raise ValueError(
            f"{name} must hold only 0 (masked) and 1 (active), got {other[0].item():g}: tokens have no weights, and a "
            "mask is not added to similarities"
        )
    return active


def is_readable(tensor: Tensor) -> bool:
    """Whether the values of a tensor can be looked at, and that waits for nothing."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and peek_interpreter_stack() is None
    )


def check_differentiation(operation: str, *tensors: Tensor) -> None:
    """Raise RuntimeError if the result is to be differentiated by another way than the backward of autograd.

    Operators without a rule for it have a tangent of 0 in forward mode, and no word for it.
    """
    if torch.compiler.is_compiling():
        return
    transforms = (TransformType.Grad, TransformType.Jvp)
    if (peek_interpreter_stack() is not None and any(t.key() in transforms for t in get_interpreter_stack())) or (
        forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)
    ):
        raise RuntimeError(
            f"{operation} is differentiated by torch.autograd.grad and Tensor.backward only: it takes no part in "
            "torch.func.grad, vjp, jvp, jacrev, jacfwd, hessian and linearize, nor in torch.autograd.forward_ad"
        )


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def no_second_derivative(operation: str) -> Callable[..., None]:
    """Return what stands in for the gradient of an operation's gradient: a RuntimeError that says why there is none."""

    def refuse(*_: object) -> None:
        raise RuntimeError(
            f"{operation} has no second derivative: its gradient is constant between changes of a winner. "
            "Do not differentiate through the gradient (create_graph=True) of a MaxSim score."
        )

    return refuse
