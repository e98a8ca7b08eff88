"""Operations that have a gradient, all defined in one way: `Operation`.

A call of plain tensors computes at once, without the dispatcher, which takes the host as long as a launch. What comes
of its signature alone (checks, choice, plans) is worked out in its first calls and then repeated
(`kernels.recording`). Everything else (compilers, export, tensor subclasses, modes, transforms) meets operators of the
library `pylate_flash`, which run the same computation, and whose shapes are known without computing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from subprocess import CalledProcessError
from typing import Any

import torch
from torch import Tensor, get_autocast_dtype, is_autocast_enabled, is_grad_enabled
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from ..kernels.recording import local
from ..problem import float32_precision, rounded_total
from .checks import check_differentiation, no_second_derivative

logger = logging.getLogger(__name__)

PLAIN_TYPES = (Tensor, Parameter)
_STRIDED = torch.strided
LIBRARY = torch.library.Library("pylate_flash", "DEF")


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether the result of an operation on these tensors is to be differentiated."""
    if is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether these can be computed with at once: no compiler, subclass, mode, transform, tangent or meta tensor.

    The mode that records a call computes as ever.
    """
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in PLAIN_TYPES or tensor.is_meta):
            return False
    return (
        _len_torch_dispatch_stack() == (local.recorder is not None)
        and peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and not is_dynamo_compiling()
    )


class _NotPlain:
    """Stands for the signature of a call that goes by the dispatcher."""


NOT_PLAIN = _NotPlain()
# Of a call that is computed anew each time, as there is no launch to repeat.
UNREPEATED = None
# Devices whose calls are repeated: GPUs, by their number; the tests of repeating add -1, Triton's interpreter.
repeated_devices = 0
_VALUES = frozenset((bool, int, float, str, type(None), tuple))
Signature = tuple | _NotPlain | None


@functools.cache
def describer() -> Callable[[tuple, int, int, bool], bytes | None] | None:
    """What describes the tensors of a call in C (`kernels.described`), or None where there is no such thing."""
    try:
        from ..kernels import described

        return described.describer()
    except (ImportError, AttributeError, OSError, RuntimeError, CalledProcessError) as error:
        logger.info("tensors are looked at one by one, as what describes them in C is not there: %s", error)
        return None


def signature(operation: object, tensors: tuple, options: tuple, packed: int = -1) -> Signature:
    """All that checks, choice and plans of a call look at; `NOT_PLAIN` or `UNREPEATED` where there is no such thing.

    Of the tensor of index `packed`, [T, ...], T is told as it is planned for without gradients, rounded.

    Types, shapes, strides, device and alignment of its tensors, which of them require a gradient, its options, and what
    is in force: autocast, the precision of float32 products, whether gradients are recorded.
    """
    if (
        is_dynamo_compiling()
        or _len_torch_dispatch_stack()
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    ):
        return NOT_PLAIN
    recorded = is_grad_enabled()
    how = (
        operation, options, *map(type, options), recorded, float32_precision(),
        is_autocast_enabled("cuda") and get_autocast_dtype("cuda"),
    )  # fmt: skip
    # Where calls are repeated, tensors are described in C, in a third of the time: all but what it cannot tell apart.
    first = None
    for first in tensors:
        if first is not None:
            break
    if (type(first) is Tensor or type(first) is Parameter) and first.get_device() >= repeated_devices:
        describe = describer()
        words = None if describe is None else describe(tensors, repeated_devices, packed, recorded)
        if words is not None:
            return *how, -1 if packed < 0 else rounded_total(tensors[packed].shape[0]), words
    device: int | None = None
    described: list[Any] = []
    for tensor in tensors:
        if tensor is None:
            described.append(None)
            continue
        if type(tensor) is not Tensor and type(tensor) is not Parameter:
            return NOT_PLAIN
        number = tensor.get_device()
        if device is None:
            device = number
        if number < repeated_devices or number != device or tensor.layout is not _STRIDED or tensor.is_nested:
            # What cannot be repeated may not even be a tensor to compute with at once.
            return UNREPEATED if is_plain(*tensors) else NOT_PLAIN
        address = tensor.data_ptr()
        described.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, address & 15))
    if packed >= 0 and described[packed] is not None and not needs_gradient(*tensors):
        shape, *others = described[packed]
        described[packed] = (rounded_total(shape[0]), *shape[1:]), *others
    return *how, device, *described


class _Repeated:
    """What is repeated of calls, by their signatures: at most `most`; those used least lately are forgotten.

    In two halves, of which the older one is dropped when the newer one is full, so that a call that is repeated looks
    into one dictionary and writes nothing.
    """

    def __init__(self, most: int) -> None:
        self._half = most // 2
        self._newer: dict[tuple, Any] = {}
        self._older: dict[tuple, Any] = {}

    def get(self, key: tuple) -> Any:
        """What is known of a signature, or None."""
        try:
            known = self._newer.get(key)
        except TypeError:
            # An option cannot be a key, which the checks have a word for.
            return None
        if known is None:
            known = self._older.get(key)
            if known is not None:
                self.set(key, known)
        return known

    def set(self, key: tuple, entry: Any) -> None:
        if len(self._newer) >= self._half:
            self._older, self._newer = self._newer, {}
        if self._half:
            self._newer[key] = entry

    def forget(self) -> None:
        """Work out every call anew, as is needed where a table of `kernels` was changed."""
        self._newer, self._older = {}, {}


repeated = _Repeated(4096)
# Bytes lent to a backward up to which it is repeated, and they are there until it is over.
LENT_REPEATED = 8 << 20
# What computes a call: from its tensors to the results, tensors or None, and what else there is to know of it.
Computation = Callable[[Sequence[Tensor | None]], tuple[Sequence[Tensor | None], Any]]
_SEEN, _REFUSED = "seen once", "cannot be repeated"


def apply(function: type[torch.autograd.Function], key: Signature, *arguments: Any) -> Any:
    """`function.apply(*arguments)` for a call of that signature.

    Where it tells that no transform is there, torch need not look for its wrappers, which takes a third of the time.
    """
    if isinstance(key, tuple):
        return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]
    return function.apply(*arguments)


def repeat(key: Signature, compute: Computation, tensors: Sequence[Tensor | None]) -> tuple[Sequence[Any], Any]:
    """`compute(tensors)`, from the third call of a signature on by what the second one has recorded."""
    if not isinstance(key, tuple):
        return compute(tensors)
    known = repeated.get(key)
    if type(known) is tuple:
        recording, other = known
        try:
            return recording(tensors), other
        except torch.OutOfMemoryError:
            # Computed as ever, it may make do with less.
            return compute(tensors)
    if known is None:
        # Many a signature comes once, and recording takes time.
        found = compute(tensors)
        if _VALUES.issuperset(map(type, key[1])):
            repeated.set(key, _SEEN)
        return found
    return compute(tensors) if known is _REFUSED else _recorded(key, compute, tensors)


def _recorded(key: tuple, compute: Computation, tensors: Sequence[Tensor | None]) -> tuple[Sequence[Any], Any]:
    # Without kernels there is nothing to record, and no Triton perhaps.
    from ..kernels.recording import Recorder, Recording

    with Recorder(tensors) as recorder:
        results, other = compute(tensors)
    if recorder.refused is None:
        recording = Recording(recorder, results, next(t for t in tensors if t is not None).get_device())
    repeated.set(key, _REFUSED if recorder.refused is not None else (recording, other))
    return results, other


class Operation:
    """NAME, with the operators NAME, NAME_forward and NAME_backward.

    Parameters
    ----------
    name, schema
        Of the operator, and its arguments; those that are tensors come first. (Written out, because inference from
        annotations costs more host time per call than the launch of a kernel. Lengths are SymInt, so that another one
        is no other graph.)
    differentiated
        The first of its arguments, of which NAME_backward gives the gradients. One that is not needed has no elements.
        None: there is NAME alone, which `check` is to keep from what needs a gradient.
    kept
        What the backward takes beside them. NAME_forward, which stands for NAME in a graph that has a backward, returns
        it after the result.
    check
        From the arguments of a call, and the name of what was called: the operator's, after the checks that it relies
        on and autocast.
    compute
        From the operator's arguments, and whether to keep: the result, and what is kept (None if it is not to be). What
        follows that is lent to the backward of plain tensors, where it may be gone: of a graph, or for the second time.
    compute_gradients
        From the gradient of the result, a list of what was kept and is lent, which it may empty to let go of that, the
        arguments, and which gradients are needed: those.
    shapes
        From the arguments one by one: the result and what is kept, uninitialised, after every check.
    no_second
        Says why there is no second derivative.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        differentiated: tuple[str, ...],
        kept: tuple[str, ...],
        check: Callable[[tuple, str], tuple],
        compute: Callable[[tuple, bool], Sequence[Tensor | None]],
        compute_gradients: Callable[[Tensor, list[Tensor], tuple, tuple], Sequence[Tensor | None]],
        shapes: Callable[..., Sequence[Tensor]],
        no_second: Callable[..., None] | None = None,
    ) -> None:
        self.name, self.check, self.compute, self.compute_gradients = name, check, compute, compute_gradients
        self.n, self.n_tensors, self.n_kept = len(differentiated), schema.count("Tensor"), len(kept)
        self.function = _function_of(self)
        LIBRARY.define(f"{name}({schema}) -> Tensor")
        LIBRARY.impl(name, lambda *arguments: self.compute(arguments, False)[0], "CompositeExplicitAutograd")
        torch.library.register_fake(f"pylate_flash::{name}", lambda *arguments: shapes(*arguments)[0])
        self.operator = getattr(torch.ops.pylate_flash, name).default
        if differentiated:
            self._define_gradient(schema, differentiated, kept, shapes)
            torch.library.register_autograd(f"pylate_flash::{name}_backward", no_second or no_second_derivative(name))

    def __call__(
        self, arguments: tuple, called: str, packed: int = -1, prepare: Callable[[tuple], tuple] | None = None
    ) -> Tensor:
        """The result for the arguments of a call, as `check` takes them.

        Without gradients, what is computed depends on the number of tokens of the tensor of index `packed` only as far
        as `rounded_total` tells. `prepare` makes the arguments of what else describes the call, as many tensors first;
        it is a function of the module, by which the call is known.
        """
        tensors, options = arguments[: self.n_tensors], arguments[self.n_tensors :]
        key = signature(prepare or self.name, tensors, options, packed)
        with_gradient = key is not NOT_PLAIN and needs_gradient(*tensors[: self.n])
        if prepare is not None and (with_gradient or not isinstance(key, tuple)):
            return self(prepare(arguments), called, packed)
        if key is NOT_PLAIN:
            check_differentiation(called, *[tensor for tensor in tensors if isinstance(tensor, Tensor)])
            return self.operator(*self.check(arguments, called))
        if with_gradient:
            return apply(self.function, key, (key, options, called), *tensors)

        def compute(tensors: Sequence) -> tuple[tuple, None]:
            arguments = (*tensors, *options) if prepare is None else prepare((*tensors, *options))
            return (self.compute(self.check(arguments, called), False)[0],), None

        return repeat(key, compute, tensors)[0][0]

    def _define_gradient(
        self,
        schema: str,
        differentiated: tuple[str, ...],
        kept: tuple[str, ...],
        shapes: Callable[..., Sequence[Tensor]],
    ) -> None:
        """Define what graphs call where a gradient is needed; it computes without repeating, as NAME does."""
        name, n, n_kept = self.name, self.n, self.n_kept
        results, gradients = (", ".join(["Tensor"] * number) for number in (1 + n_kept, n))
        taken = "".join(f"Tensor {tensor}, " for tensor in kept)
        needed = "".join(f", bool need_{argument}" for argument in differentiated)
        LIBRARY.define(f"{name}_forward({schema}) -> ({results})")
        LIBRARY.define(f"{name}_backward(Tensor grad_scores, {taken}{schema}{needed}) -> ({gradients})")
        self.operator_forward, self.operator_backward = (
            getattr(torch.ops.pylate_flash, name + which).default for which in ("_forward", "_backward")
        )

        def differentiable(*arguments):
            """The operator for tensors that may require a gradient."""
            if needs_gradient(*arguments[:n]):
                return self.function.apply((NOT_PLAIN, arguments[self.n_tensors :], name), *arguments[: self.n_tensors])
            with torch._C._AutoDispatchBelowAutograd():
                return self.operator(*arguments)

        def returned(found: Sequence[Tensor | None], like: Tensor) -> Tensor | tuple[Tensor, ...]:
            whole = tuple([like.new_empty(0) if gradient is None else gradient for gradient in found])
            return whole if n > 1 else whole[0]

        def backward(grad_scores: Tensor, *others):
            kept, arguments, needs = list(others[:n_kept]), others[n_kept:-n], others[-n:]
            return returned(self.compute_gradients(grad_scores, kept, arguments, needs), arguments[0])

        def gradient_shapes(grad_scores: Tensor, *others):
            arguments, needs = others[n_kept:-n], others[-n:]
            found = [
                torch.empty_like(tensor, memory_format=torch.contiguous_format) if need and tensor is not None else None
                for tensor, need in zip(arguments, needs, strict=False)
            ]
            return returned(found, arguments[0])

        def forward(*arguments):
            return tuple(self.compute(arguments, True)[: 1 + n_kept])

        LIBRARY.impl(name, differentiable, "Autograd")
        LIBRARY.impl(f"{name}_forward", forward, "CompositeExplicitAutograd")
        LIBRARY.impl(f"{name}_backward", backward, "CompositeExplicitAutograd")
        torch.library.register_fake(f"pylate_flash::{name}_forward", lambda *arguments: tuple(shapes(*arguments)))
        torch.library.register_fake(f"pylate_flash::{name}_backward", gradient_shapes)


def _function_of(operation: Operation) -> type[torch.autograd.Function]:
    """What autograd records of an operation."""
    n, n_tensors = operation.n, operation.n_tensors
    end = n_tensors + 1 + operation.n_kept

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, call, *tensors):
            key, options, called = call
            # Not among the saved tensors, which live until the whole backward is over.
            ctx.lent = []
            if key is NOT_PLAIN:
                # It goes into a graph, or to what else there is between.
                result, *kept = operation.operator_forward(*tensors, *options)
                used: Sequence[Tensor | None] = tensors
            else:

                def compute(tensors: Sequence) -> tuple[tuple, tuple]:
                    arguments = operation.check((*tensors, *options), called)
                    found = operation.compute(arguments, True)
                    return (*arguments[:n_tensors], *found), arguments[n_tensors:]

                computed, options = repeat(key, compute, tensors)
                used, result, kept = computed[:n_tensors], computed[n_tensors], computed[n_tensors + 1 : end]
                ctx.lent += computed[end:]
            ctx.save_for_backward(*used, *kept)
            ctx.options, ctx.is_plain = options, key is not NOT_PLAIN
            # Of the arguments, from which autocast may have parted.
            ctx.likes = [None if tensor is None else (tensor.dtype, tensor.shape) for tensor in tensors[:n]]
            ctx.set_materialize_grads(False)
            return result

        @staticmethod
        def backward(ctx, grad_scores):
            if grad_scores is None:
                return (None,) * len(ctx.needs_input_grad)
            saved, options, likes, needs = ctx.saved_tensors, ctx.options, ctx.likes, ctx.needs_input_grad[1 : n + 1]
            lent, ctx.lent = ctx.lent, []
            inputs = (grad_scores, *saved)
            if sum(each.nbytes for each in lent if each is not None) <= LENT_REPEATED:
                inputs, lent = (*inputs, *lent), []
            key = signature(operation.function, inputs, (*options, *needs, *likes))
            if is_grad_enabled() or not ctx.is_plain or key is NOT_PLAIN:
                # A graph of the backward is asked for: the operator has one, which says that there is no second
                # derivative.
                kept = saved[n_tensors : n_tensors + operation.n_kept]
                whole = operation.operator_backward(grad_scores, *kept, *saved[:n_tensors], *options, *needs)
                whole = whole if n > 1 else (whole,)
                found: Sequence[Tensor | None] = cast_like(
                    [one if need else None for one, need in zip(whole, needs, strict=True)], likes
                )
            else:

                def compute(inputs: Sequence) -> tuple[Sequence[Tensor | None], None]:
                    grad_scores, *given = inputs
                    arguments, kept = (*given[:n_tensors], *options), [*given[n_tensors:], *lent]
                    lent.clear()
                    return cast_like(operation.compute_gradients(grad_scores, kept, arguments, needs), likes), None

                found, _ = repeat(UNREPEATED if lent else key, compute, inputs)
            return None, *found, *(None,) * (n_tensors - n)

    return Function


def cast_like(gradients: Sequence[Tensor | None], likes: Sequence[Any]) -> list[Tensor | None]:
    """The gradients in the types and shapes of what they are the gradients of."""
    cast: list[Tensor | None] = []
    for gradient, like in zip(gradients, likes, strict=True):
        if gradient is not None and (gradient.dtype != like[0] or gradient.shape != like[1]):
            gradient = gradient.to(like[0]).view(like[1])
        cast.append(gradient)
    return cast
