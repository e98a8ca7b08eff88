"""Argument checks shared by the operations: one clear error per mistake, naming the argument."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, peek_interpreter_stack
from torch.autograd import forward_ad

from ..problem import DocumentOffsets, Options, Problem, Tensors, problem_of

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_QUERIES = {3: "[Nq, Lq, d]"}
_DOCUMENTS = {3: "[Nd, Ld, d]", 4: "[Nq, K, Ld, d]"}
_PACKED_QUERIES = {2: "[Tq, d]", 3: "[Nq, Lq, d]"}
_PACKED_DOCUMENTS = {2: "[Td, d]"}
# The dtypes that torch compares and multiplies with others.
_MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *FLOATING)
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max
# The largest integer that an operator accepts.
LARGEST = 2**63 - 1
_INTEGERS = (int, np.integer, torch.SymInt)
_NUMBERS = (*_INTEGERS, float, np.floating, np.bool_, torch.SymFloat)


def check_tensor(name: str, value: object, layouts: dict[int, str] | None = None, otherwise: str = "") -> None:
    """Raise unless `value` is a dense tensor, of a rank in `layouts` (rank -> shape in words) if given.

    `otherwise` names the alternatives in the message; the caller has excluded them already.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor{otherwise}, got {type(value).__name__}")
    if value.layout is not torch.strided or value.is_nested:
        kind = "a nested one" if value.is_nested else f"one of layout {value.layout}"
        raise TypeError(f"{name} must be a dense torch.Tensor{otherwise}, got {kind}")
    if layouts is not None and value.dim() not in layouts:
        raise ValueError(f"{name} must have shape {' or '.join(layouts.values())}, got {list(value.shape)}")


def check_embeddings(name: str, value: object, layouts: dict[int, str]) -> Tensor:
    """Return `value` if `check_tensor` passes, its dtype is floating, and its embedding size is at least 1."""
    check_tensor(name, value, layouts)
    assert isinstance(value, Tensor)
    if value.dtype not in FLOATING:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {value.dtype}")
    if value.shape[-1] == 0:
        raise ValueError(f"{name} must have an embedding size of at least 1, got shape {list(value.shape)}")
    return value


def check_beside(
    name: str,
    value: object,
    other_name: str,
    other: Tensor,
    dtypes: tuple[torch.dtype, ...] | None = None,
    shape: Sequence[int] | None = None,
    otherwise: str = "",
) -> None:
    """Raise unless `value` is a dense tensor on the device of `other`, and of its dtype, or of one of `dtypes`."""
    check_tensor(name, value, otherwise=otherwise)
    assert isinstance(value, Tensor)
    if shape is not None and list(value.shape) != list(shape):
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(value.shape)}")
    if value.device != other.device:
        raise ValueError(f"{name} must be on the device of {other_name}, {other.device}, got {value.device}")
    if dtypes is None and value.dtype != other.dtype:
        raise TypeError(f"{name} must have the dtype of {other_name}, {other.dtype}, got {value.dtype}")
    if dtypes is not None and value.dtype not in dtypes:
        *rest, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must be {', '.join(rest)}{' or ' * bool(rest)}{last}, got {value.dtype}")


def check_detached(name: str, tensor: Tensor) -> None:
    """Raise if a non-differentiable argument requires a gradient."""
    if tensor.requires_grad:
        raise ValueError(f"{name} must not require a gradient, as none flows to it: detach it")


def check_same(
    queries: Tensor, documents: Tensor, same_dtype: bool = True, names: tuple[str, str] = ("queries", "documents")
) -> None:
    """Raise unless both agree in device, embedding size and, if `same_dtype`, dtype; `names` are for the messages."""
    first, second = names
    if documents.device != queries.device or (same_dtype and documents.dtype != queries.dtype):
        check_beside(second, documents, first, queries, None if same_dtype else (documents.dtype,))
    if queries.shape[-1] != documents.shape[-1]:
        raise ValueError(
            f"{second} must have the embedding size of {first}, {queries.shape[-1]}, got {documents.shape[-1]}"
        )


def check_mask_layout(name: str, mask: object, embeddings: Tensor) -> None:
    """Raise unless `mask` is None or fits the tokens of `embeddings`, detached; its values are not checked."""
    if mask is None:
        return
    check_tensor(name, mask, otherwise=" or None")
    assert isinstance(mask, Tensor)
    if mask.dtype not in _MASKS:
        raise TypeError(
            f"{name} must be bool, or 0/1 of uint8, a signed integer or a floating dtype of at least 16 bits, "
            f"got {mask.dtype}"
        )
    if mask.shape != embeddings.shape[:-1]:
        raise ValueError(f"{name} must have shape {list(embeddings.shape[:-1])}, got {list(mask.shape)}")
    if mask.device != embeddings.device:
        raise ValueError(f"{name} must be on {embeddings.device}, got {mask.device}")
    check_detached(name, mask)


def checked_mask(name: str, mask: Tensor | None, weights: bool = False) -> Tensor | None:
    """Check the values of `mask`; return it as bool, or, with `weights`, as is if some values are neither 0 nor 1."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    active = mask != 0
    weights_allowed = weights and mask.is_floating_point()
    other_weights = name in ("queries_mask", "documents_mask")
    if not is_readable(mask):
        return mask if weights_allowed else active
    non_binary = mask[mask != active]
    if non_binary.numel() == 0:
        return active
    invalid = non_binary[~((non_binary > 0) & (non_binary < torch.inf))] if weights_allowed else non_binary
    if invalid.numel() == 0:
        return mask
    raise ValueError(
        f"{name} must hold only 0 (masked) and 1 (active){' or positive weights' if weights_allowed else ''}, got "
        f"{invalid[0].item():g}: a mask is not added to similarities"
        + (", and only query tokens have weights, of a floating type" if not weights_allowed and other_weights else "")
    )


def check_boundaries(name: str, cu_seqlens: object, values: Tensor | None = None) -> int:
    """Return N + 1 if `cu_seqlens` may be the boundaries [N + 1] of packed sequences `values`.

    Boundaries on device meta hold no data, and are valid only for embeddings on meta.
    """
    check_tensor(name, cu_seqlens)
    assert isinstance(cu_seqlens, Tensor)
    if values is not None and cu_seqlens.is_meta and not values.is_meta:
        raise ValueError(f"{name} must not be on device meta where what it is of is on {values.device}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"{name} must have shape [N + 1], got {list(cu_seqlens.shape)}")
    return cu_seqlens.shape[0]


def check_indices(name: str, indices: Tensor, kind: str, count: int, other_name: str, other: Tensor) -> None:
    """Raise unless `indices` are -1 (none) or in [0, `count`), on the device of `other`.

    On a GPU, where reading them would synchronize, their values are not checked.
    """
    check_beside(name, indices, other_name, other, (torch.int32, torch.int64))
    if is_readable(indices) and indices.numel():
        lowest, highest = (int(value) for value in indices.aminmax())
        if lowest < -1 or highest >= count:
            allowed = (
                f"hold {kind} from 0 to {count - 1}, or -1 for none" if count else f"be -1, as there are no {kind}"
            )
            raise ValueError(f"{name} must {allowed}, got {lowest} to {highest}")


def check(tensors: Tensors, quantized: bool = False) -> None:
    """Raise unless the tensors of a call fit together; `quantized` documents have their own dtype."""
    queries, documents, queries_mask, documents_mask, queries_cu_seqlens, documents_cu_seqlens, candidates = tensors
    packed = documents_cu_seqlens is not None
    check_embeddings("queries", queries, _PACKED_QUERIES if packed else _QUERIES)
    (check_tensor if quantized else check_embeddings)(
        "documents", documents, _PACKED_DOCUMENTS if packed else _DOCUMENTS
    )
    check_same(queries, documents, same_dtype=not quantized)
    if documents.dim() == 4 and documents.shape[0] != queries.shape[0]:
        raise ValueError(
            f"documents of shape [Nq, K, Ld, d] must have one row of candidates per query, Nq = {queries.shape[0]}, "
            f"got {list(documents.shape)}"
        )
    if queries_mask is not None:
        check_mask_layout("queries_mask", queries_mask, queries)
    if documents_mask is not None:
        check_mask_layout("documents_mask", documents_mask, documents)
    if packed:
        check_packing(tensors)


def check_none(where: str, **arguments: object) -> None:
    """Raise unless all of these arguments are None, as they have no meaning there."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} must be None where {where}, got {type(value).__name__}")


def check_layout(tensors: Tensors, max_query_length: int | None = None, max_document_length: int | None = None) -> None:
    """Raise if an argument does not apply to the layout of queries or documents."""
    queries, _, queries_mask, documents_mask, queries_bounds, bounds, candidates = tensors
    if bounds is not None:
        check_none("documents are packed (documents_cu_seqlens)", documents_mask=documents_mask)
    else:
        where = "documents are padded (documents_cu_seqlens is None)"
        check_none(where, candidates_cu_seqlens=candidates, max_document_length=max_document_length)
    if bounds is not None and isinstance(queries, Tensor) and queries.dim() == 2:
        check_none("queries are packed", queries_mask=queries_mask)
    else:
        check_none("queries are padded", queries_cu_seqlens=queries_bounds, max_query_length=max_query_length)


def check_packing(tensors: Tensors) -> None:
    """Raise unless the boundaries of a packed call pass `check_boundaries` and fit together."""
    queries, documents, _, _, queries_cu_seqlens, documents_cu_seqlens, candidates = tensors
    n_queries = queries.shape[0]
    if queries_cu_seqlens is not None or queries.dim() == 2:
        n_queries = check_boundaries("queries_cu_seqlens", queries_cu_seqlens, queries) - 1
    check_boundaries("documents_cu_seqlens", documents_cu_seqlens, documents)
    if candidates is not None:
        entries = check_boundaries("candidates_cu_seqlens", candidates, documents)
        if entries != n_queries + 1:
            raise ValueError(f"candidates_cu_seqlens must have Nq + 1 = {n_queries + 1} entries, got {entries}")


def checked_problem(
    tensors: Tensors,
    options: Options,
    with_argmax: bool = False,
    offsets: DocumentOffsets | None = None,
    quantized: bool = False,
) -> Problem:
    """Check the tensors of a call (`check`) and return its problem (`problem_of`)."""
    check(tensors, quantized)
    return problem_of(tensors, options, with_argmax, offsets)


def is_readable(tensor: Tensor) -> bool:
    """Whether the values of a tensor can be read without synchronization."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and peek_interpreter_stack() is None
    )


def check_differentiation(operation: str, *tensors: Tensor) -> None:
    """Raise RuntimeError if the result would be differentiated by other means than the backward of autograd.

    In forward mode, operators without a formula would silently return a tangent of 0.
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


def checked_flag(name: str, value: object) -> bool:
    """Return a bool of Python or NumPy as a Python bool; TypeError for values that are merely truthy or falsy."""
    if value is True or value is False:
        return value
    if not isinstance(value, np.bool_):
        raise TypeError(f"{name} must be True or False, got {type(value).__name__}")
    return bool(value)


def checked_device(name: str, device: object) -> torch.device:
    """Return a device, given as one or by its name, as `torch.device`; raise unless it can hold values here."""
    if isinstance(device, bool) or not isinstance(device, str | int | torch.device):
        raise TypeError(f"{name} must be a torch.device or the name of one, got {type(device).__name__}")
    try:
        checked = torch.device(device)
        torch.empty(0, device=checked)
    # torch raises an AssertionError where it was compiled without CUDA.
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{name} must be a device that torch can use here, got {str(device)!r}: {reason}") from None
    if checked.type == "meta":
        raise ValueError(f"{name} must be a device whose tensors hold values, got {str(device)!r}")
    return checked


def checked_number(name: str, value: Any) -> float:
    """Return a number that float32, the dtype of scores, can hold, as a float; return a compiler's symbol as is."""
    if not isinstance(value, _NUMBERS):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if _LARGEST_FLOAT32 < abs(value) < torch.inf:  # type: ignore[arg-type]
        got = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"{value}"
        raise ValueError(f"{name} must be infinite, or a number that float32 can hold, got {got}")
    return value if isinstance(value, torch.SymInt | torch.SymFloat) else float(value)  # type: ignore[return-value]


def check_positive(name: str, value: object, queries: Tensor | None = None, dtype: torch.dtype = torch.float32) -> None:
    """Raise unless `value`, a number or given `queries` a tensor of one element, is above 0 and finite in `dtype`.

    The value of a tensor is not checked if reading it would synchronize.
    """
    if isinstance(value, Tensor) and queries is not None:
        check_beside(name, value, "queries", queries, FLOATING)
        if value.numel() != 1:
            raise ValueError(f"{name} must be a number or a tensor of one element, got shape {list(value.shape)}")
        value = value.item() if is_readable(value) else 1.0
    # isinstance checks against an abstract class are slow, so floats skip it.
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise TypeError(f"{name} must be a number{_OR_TENSOR.get(name, '')}, got {type(value).__name__}")
    if not is_positive(value if isinstance(value, int) else float(value), dtype):
        used = str(dtype).removeprefix("torch.")
        raise ValueError(f"{name} must be above 0 and finite, got {value} (it is computed with in {used})")


_OR_TENSOR = dict.fromkeys(("beta", "temperature"), " or a floating tensor of one element")


def is_positive(value: float, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a number is above 0 and finite, and stays so when it is rounded to float32 or float64."""
    low, high = _ROUNDED_AWAY[dtype]
    return low < value < high


# Bounds of rounding to 0, half of the smallest number, and to infinity, half a step above the largest.
_ROUNDED_AWAY = {torch.float32: (2.0**-150, 2.0**128 - 2.0**103), torch.float64: (0.0, torch.inf)}


def check_integer(name: str, value: object, minimum: int = 0) -> None:
    """Raise TypeError unless `value` is an integer, and ValueError unless it is from `minimum` to 2**63 - 1."""
    if isinstance(value, bool) or not isinstance(value, _INTEGERS):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    if value > LARGEST:
        raise ValueError(f"{name} must be less than 2**63, got {value}")


def check_list(name: str, values: object) -> None:
    """Raise unless `values` is a nonempty list of sequences; its items are not checked."""
    if isinstance(values, str | Tensor) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a list of tensors or arrays [L_i, d], got {type(values).__name__}")
    if len(values) == 0:
        raise ValueError(f"{name} must hold at least one sequence, got none")


def tensors_of(name: str, values: Sequence[Tensor | np.ndarray]) -> list[Tensor]:
    """The items of a list as tensors [L_i, d], checked to share d, dtype and device; errors name the item."""
    tensors = [_tensor(f"{name}[{index}]", value) for index, value in enumerate(values)]
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor.shape[1] != first.shape[1]:
            raise ValueError(
                f"{name} must have one embedding size, got {tensor.shape[1]} at {index} and {first.shape[1]} at 0"
            )
        if tensor.dtype != first.dtype:
            raise TypeError(f"{name} must have one dtype, got {tensor.dtype} at {index} and {first.dtype} at 0")
        if tensor.device != first.device:
            raise ValueError(f"{name} must lie on one device, got {tensor.device} at {index} and {first.device} at 0")
    return tensors


def _tensor(name: str, value: object) -> Tensor:
    """A list item, a tensor or an array [L, d], as a tensor; `name` is the item's."""
    if isinstance(value, np.ndarray):
        try:
            value = torch.from_numpy(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name} must be an array that torch can take as it is: {error}") from error
    check_tensor(name, value, {2: "[L, d]"}, otherwise=" or a numpy.ndarray")
    assert isinstance(value, Tensor)
    return value


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    # Comparing anything but a string may return an array.
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def no_second_derivative(
    operation: str, reason: str = "its gradient is constant between changes of a winner"
) -> Callable[..., None]:
    """Return an autograd formula for an operation's backward that raises RuntimeError with the reason."""

    def refuse(*_: object) -> None:
        raise RuntimeError(
            f"{operation} has no second derivative: {reason}. "
            "Do not differentiate through the gradient (create_graph=True) of a MaxSim score."
        )

    return refuse
