"""`Operation`: the common definition of every differentiable operation.

A call on plain tensors runs eagerly and bypasses the dispatcher, which costs the host as much time as a launch. What
depends on the call's signature alone (checks, choice, plans) is computed by the first calls, then replayed
(`kernels.recording`). Everything else (compilers, export, tensor subclasses, modes, transforms) goes through operators
of the library `pylate_flash`, which run the same computation and have fake implementations.
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
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack
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
    """Whether the result of an operation on these tensors requires a gradient."""
    if is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether the call can run eagerly: no compiler, subclass, mode, transform, tangent or meta tensor.

    The mode that records a call (`Recorder`) does not count, as it computes as usual.
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
    """Sentinel signature of a call that goes through the dispatcher."""


NOT_PLAIN = _NotPlain()
# Signature of a call that is computed anew each time, because its tensors are where nothing is replayed.
UNREPEATED = None
# Lowest device index whose calls are replayed: 0, all GPUs. Tests of replay set -1 to include Triton's interpreter.
repeated_devices = 0
_VALUES = frozenset((bool, int, float, str, type(None), tuple))
Signature = tuple | _NotPlain | None


@functools.cache
def describer() -> Callable[[tuple, int, int, bool], bytes | None] | None:
    """The C function that describes the tensors of a call (`kernels.metadata`), or None where it is unavailable."""
    try:
        from ..kernels import metadata

        return metadata.describer()
    except (ImportError, AttributeError, OSError, RuntimeError, CalledProcessError) as error:
        logger.info("tensors are looked at one by one, as what describes them in C is not there: %s", error)
        return None


def signature(operation: object, tensors: tuple, options: tuple, packed: int = -1) -> Signature:
    """The cache key of a call: all that its checks, choice and plans depend on; or `NOT_PLAIN` or `UNREPEATED`.

    It holds the types, shapes, strides, device and alignment of the tensors, which of them require a gradient, the
    options, and the global state: autocast, the precision of float32 products, whether grad mode is enabled.

    Without gradients, the size T of the tensor [T, ...] at index `packed` is rounded, as plans round it.
    """
    if (
        is_dynamo_compiling()
        or _len_torch_dispatch_stack()
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    ):
        return NOT_PLAIN
    grad_enabled = is_grad_enabled()
    context = (
        operation, options, *map(type, options), grad_enabled, float32_precision(),
        is_autocast_enabled("cuda") and get_autocast_dtype("cuda"),
    )  # fmt: skip
    # On devices whose calls are replayed, C describes the tensors in a third of the time, except those it rejects.
    first = None
    for first in tensors:
        if first is not None:
            break
    if (type(first) is Tensor or type(first) is Parameter) and first.get_device() >= repeated_devices:
        describe = describer()
        description = None if describe is None else describe(tensors, repeated_devices, packed, grad_enabled)
        if description is not None:
            return *context, -1 if packed < 0 else rounded_total(tensors[packed].shape[0]), description
    device: int | None = None
    described: list[Any] = []
    for tensor in tensors:
        if tensor is None:
            described.append(None)
            continue
        if type(tensor) is not Tensor and type(tensor) is not Parameter:
            return NOT_PLAIN
        index = tensor.get_device()
        if device is None:
            device = index
        if index < repeated_devices or index != device or tensor.layout is not _STRIDED or tensor.is_nested:
            # A tensor that cannot be replayed may not be plain either.
            return UNREPEATED if is_plain(*tensors) else NOT_PLAIN
        address = tensor.data_ptr()
        described.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, address & 15))
    if packed >= 0 and described[packed] is not None and not needs_gradient(*tensors):
        shape, *rest = described[packed]
        described[packed] = (rounded_total(shape[0]), *shape[1:]), *rest
    return *context, device, *described


class _Repeated:
    """Cache of recorded calls by signature, at most `capacity`; evicts the least recently used entries.

    It has two halves, and drops the older one when the newer one is full: a hit usually reads one dictionary and writes
    nothing.
    """

    def __init__(self, capacity: int) -> None:
        self._half = capacity // 2
        self._newer: dict[tuple, Any] = {}
        self._older: dict[tuple, Any] = {}

    def get(self, key: tuple) -> Any:
        """The entry of a signature, or None."""
        try:
            entry = self._newer.get(key)
        except TypeError:
            # An option is unhashable; the checks raise the error for it.
            return None
        if entry is None:
            entry = self._older.get(key)
            if entry is not None:
                self.set(key, entry)
        return entry

    def set(self, key: tuple, entry: Any) -> None:
        if len(self._newer) >= self._half:
            self._older, self._newer = self._newer, {}
        if self._half:
            self._newer[key] = entry

    def forget(self) -> None:
        """Clear the cache, as is needed after a table of `kernels` was changed."""
        self._newer, self._older = {}, {}


repeated = _Repeated(4096)
# Computes a call: maps its tensors to the results (tensors or None) and to extra values that are no tensors. It may
# remove tensors from the end of the list, to free them early, if it can do without them when run again.
Computation = Callable[[Any], tuple[Sequence[Tensor | None], Any]]
_SEEN, _REFUSED = "seen once", "cannot be repeated"


def apply(function: type[torch.autograd.Function], key: Signature, *arguments: Any) -> Any:
    """`function.apply(*arguments)` for a call of that signature.

    A tuple implies that no transform is active, so torch's search for wrappers, a third of the time, is skipped.
    """
    if isinstance(key, tuple):
        return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]
    return function.apply(*arguments)


def repeat(key: Signature, compute: Computation, tensors: Sequence[Tensor | None]) -> tuple[Sequence[Any], Any]:
    """`compute(tensors)`; the second call of a signature is recorded, and later ones replay the recording."""
    if not isinstance(key, tuple):
        return compute(tensors)
    entry = repeated.get(key)
    if type(entry) is tuple:
        recording, extra = entry
        try:
            return recording(tensors), extra
        except torch.OutOfMemoryError:
            # Outside this handler, which keeps what was allocated, the ordinary computation may need less memory.
            pass
        return compute(tensors)
    if entry is None:
        # Most signatures occur once; recording them would cost more than it saves.
        result = compute(tensors)
        if _VALUES.issuperset(map(type, key[1])):
            repeated.set(key, _SEEN)
        return result
    return compute(tensors) if entry is _REFUSED else _recorded(key, compute, tensors)


def _recorded(key: tuple, compute: Computation, tensors: Sequence[Tensor | None]) -> tuple[Sequence[Any], Any]:
    # Imported here, because Triton may be missing where no kernel runs and nothing is recorded.
    from ..kernels.recording import Recorder, Recording

    with Recorder(tensors) as recorder:
        results, extra = compute(tensors)
    if recorder.refused is None:
        device = next(t for t in tensors if t is not None).get_device()
        recording = Recording(recorder, results, device, n_kept=len(tensors))
    repeated.set(key, _REFUSED if recorder.refused is not None else (recording, extra))
    return results, extra


class Operation:
    """NAME, with the operators NAME, NAME_forward and NAME_backward.

    Parameters
    ----------
    name, schema
        Name and arguments of the operator, tensors first. (The schema is written out, because inferring it from
        annotations costs more host time per call than launching a kernel. Lengths are SymInt, so that a new length does
        not trigger a new graph.)
    differentiated
        Names of the leading arguments whose gradients NAME_backward returns. A gradient that is not needed has no
        elements. Empty: only NAME is defined, and `check` must reject tensors that require a gradient.
    intermediates
        Names of the extra tensors that the backward takes. NAME_forward, which replaces NAME in a graph that has a
        backward, returns them after the result.
    check
        (arguments of a call, name of the public function) -> arguments of the operator, checked and autocast.
    compute
        (arguments of the operator, whether to save) -> the result, then the intermediates (None if not saved). Further
        outputs are lent to the backward of plain tensors, which must do without them in a graph or when run again.
    compute_gradients
        (gradient of the result, list of intermediates and lent tensors, arguments, which gradients are needed) -> the
        gradients. It may clear the list to free the tensors early.
    shapes
        (*arguments) -> the result and the intermediates, uninitialised, after every check.
    no_second
        Raises the error that says why there is no second derivative.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        differentiated: tuple[str, ...],
        intermediates: tuple[str, ...],
        check: Callable[[tuple, str], tuple],
        compute: Callable[[tuple, bool], Sequence[Tensor | None]],
        compute_gradients: Callable[[Tensor, list[Tensor], tuple, tuple], Sequence[Tensor | None]],
        shapes: Callable[..., Sequence[Tensor]],
        no_second: Callable[..., None] | None = None,
    ) -> None:
        self.name, self.check, self.compute, self.compute_gradients = name, check, compute, compute_gradients
        self.n, self.n_tensors, self.n_kept = len(differentiated), schema.count("Tensor"), len(intermediates)
        self.function = _function_of(self)
        LIBRARY.define(f"{name}({schema}) -> Tensor")
        LIBRARY.impl(name, lambda *arguments: self.compute(arguments, False)[0], "CompositeExplicitAutograd")
        torch.library.register_fake(f"pylate_flash::{name}", lambda *arguments: shapes(*arguments)[0])
        self.operator = getattr(torch.ops.pylate_flash, name).default
        if differentiated:
            self._define_gradient(schema, differentiated, intermediates, shapes)
            torch.library.register_autograd(f"pylate_flash::{name}_backward", no_second or no_second_derivative(name))

    def __call__(
        self, arguments: tuple, called: str, packed: int = -1, prepare: Callable[[tuple], tuple] | None = None
    ) -> Tensor:
        """The result for the arguments of a call, as `check` takes them.

        Without gradients, the computation depends on the number of tokens of the tensor at index `packed` only through
        `rounded_total`. `prepare`, if given, maps other arguments, with as many leading tensors, to those that `check`
        takes; it must be a module-level function, as it identifies the call in its signature.
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
        intermediates: tuple[str, ...],
        shapes: Callable[..., Sequence[Tensor]],
    ) -> None:
        """Define the operators that graphs call where a gradient is needed; like NAME, they never replay."""
        name, n, n_kept = self.name, self.n, self.n_kept
        results, gradients = (", ".join(["Tensor"] * count) for count in (1 + n_kept, n))
        saved_schema = "".join(f"Tensor {tensor}, " for tensor in intermediates)
        needs_schema = "".join(f", bool need_{argument}" for argument in differentiated)
        LIBRARY.define(f"{name}_forward({schema}) -> ({results})")
        LIBRARY.define(f"{name}_backward(Tensor grad_scores, {saved_schema}{schema}{needs_schema}) -> ({gradients})")
        self.operator_forward, self.operator_backward = (
            getattr(torch.ops.pylate_flash, name + suffix).default for suffix in ("_forward", "_backward")
        )

        def differentiable(*arguments):
            """The operator for tensors that may require a gradient."""
            if needs_gradient(*arguments[:n]):
                return self.function.apply((NOT_PLAIN, arguments[self.n_tensors :], name), *arguments[: self.n_tensors])
            with torch._C._AutoDispatchBelowAutograd():
                return self.operator(*arguments)

        def returned(grads: Sequence[Tensor | None], like: Tensor) -> Tensor | tuple[Tensor, ...]:
            outputs = tuple([like.new_empty(0) if gradient is None else gradient for gradient in grads])
            return outputs if n > 1 else outputs[0]

        def backward(grad_scores: Tensor, *flat_args):
            intermediates, arguments, needs = list(flat_args[:n_kept]), flat_args[n_kept:-n], flat_args[-n:]
            return returned(self.compute_gradients(grad_scores, intermediates, arguments, needs), arguments[0])

        def gradient_shapes(grad_scores: Tensor, *flat_args):
            arguments, needs = flat_args[n_kept:-n], flat_args[-n:]
            grads = [
                torch.empty_like(tensor, memory_format=torch.contiguous_format) if need and tensor is not None else None
                for tensor, need in zip(arguments, needs, strict=False)
            ]
            return returned(grads, arguments[0])

        def forward(*arguments):
            return tuple(self.compute(arguments, True)[: 1 + n_kept])

        LIBRARY.impl(name, differentiable, "Autograd")
        LIBRARY.impl(f"{name}_forward", forward, "CompositeExplicitAutograd")
        LIBRARY.impl(f"{name}_backward", backward, "CompositeExplicitAutograd")
        torch.library.register_fake(f"pylate_flash::{name}_forward", lambda *arguments: tuple(shapes(*arguments)))
        torch.library.register_fake(f"pylate_flash::{name}_backward", gradient_shapes)


def _function_of(operation: Operation) -> type[torch.autograd.Function]:
    """The autograd function of an operation."""
    n, n_tensors = operation.n, operation.n_tensors
    end = n_tensors + 1 + operation.n_kept

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, call, *tensors):
            key, options, called = call
            # Not saved by `save_for_backward`, whose tensors live until the whole backward is over.
            ctx.lent = []
            if key is NOT_PLAIN:
                # The call is traced into a graph, or intercepted by a mode or subclass.
                result, *intermediates = operation.operator_forward(*tensors, *options)
                used: Sequence[Tensor | None] = tensors
            else:

                def compute(tensors: Sequence) -> tuple[tuple, tuple]:
                    arguments = operation.check((*tensors, *options), called)
                    outputs = operation.compute(arguments, True)
                    return (*arguments[:n_tensors], *outputs), arguments[n_tensors:]

                computed, options = repeat(key, compute, tensors)
                used, result, intermediates = computed[:n_tensors], computed[n_tensors], computed[n_tensors + 1 : end]
                ctx.lent += computed[end:]
            ctx.save_for_backward(*used, *intermediates)
            ctx.options, ctx.is_plain = options, key is not NOT_PLAIN
            # Those of the arguments as passed; autocast may have changed the dtype.
            ctx.specs = [None if tensor is None else (tensor.dtype, tensor.shape) for tensor in tensors[:n]]
            ctx.set_materialize_grads(False)
            return result

        @staticmethod
        def backward(ctx, grad_scores):
            if grad_scores is None:
                return (None,) * len(ctx.needs_input_grad)
            saved, options, specs, needs = ctx.saved_tensors, ctx.options, ctx.specs, ctx.needs_input_grad[1 : n + 1]
            # The only reference to what is lent, so that the computation can free it.
            inputs = [grad_scores, *saved, *ctx.lent]
            ctx.lent = []
            # Several gradients at once (is_grads_batched) are for the operator, which torch calls for each.
            batched = is_legacy_batchedtensor(grad_scores)
            key = NOT_PLAIN if batched else signature(operation.function, tuple(inputs), (*options, *needs, *specs))
            if is_grad_enabled() or not ctx.is_plain or key is NOT_PLAIN:
                # The backward itself is traced or differentiated: the autograd formula of its operator raises, as there
                # is no second derivative.
                intermediates = saved[n_tensors : n_tensors + operation.n_kept]
                grads = operation.operator_backward(grad_scores, *intermediates, *saved[:n_tensors], *options, *needs)
                grads = grads if n > 1 else (grads,)
                outputs: Sequence[Tensor | None] = cast_like(
                    [grad if need else None for grad, need in zip(grads, needs, strict=True)], specs
                )
            else:

                def compute(inputs: list) -> tuple[Sequence[Tensor | None], None]:
                    grad_scores, arguments = inputs[0], (*inputs[1 : n_tensors + 1], *options)
                    intermediates = inputs[n_tensors + 1 :]
                    del inputs[end:]
                    grads = operation.compute_gradients(grad_scores, intermediates, arguments, needs)
                    return cast_like(grads, specs), None

                outputs, _ = repeat(key, compute, inputs)
            return None, *outputs, *(None,) * (n_tensors - n)

    return Function


def cast_like(gradients: Sequence[Tensor | None], specs: Sequence[Any]) -> list[Tensor | None]:
    """Cast and reshape each gradient to the (dtype, shape) of its input."""
    cast: list[Tensor | None] = []
    for gradient, spec in zip(gradients, specs, strict=True):
        if gradient is not None and (gradient.dtype != spec[0] or gradient.shape != spec[1]):
            gradient = gradient.to(spec[0]).view(spec[1])
        cast.append(gradient)
    return cast
