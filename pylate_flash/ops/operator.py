"""Operators of the library `pylate_flash` that have a gradient, all defined in one way (`define`).

An operator is the one way into its operation, eager and compiled. Called with plain tensors, it computes at once: to go
through the dispatcher a second time takes the host as long as launching a kernel. Everything else (compilers, tensor
subclasses, transforms) meets operators whose shapes are known without computing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .checks import no_second_derivative

PLAIN_TYPES = (Tensor, torch.nn.Parameter)
LIBRARY = torch.library.Library("pylate_flash", "DEF")


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether the result of an operation on these tensors is to be differentiated."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether these can be computed with at once: no compiler, subclass, mode, transform, tangent or meta tensor."""
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in PLAIN_TYPES or tensor.is_meta):
            return False
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and not torch.compiler.is_compiling()
    )


def define(
    name: str,
    schema: str,
    differentiated: tuple[str, ...],
    kept: tuple[str, ...],
    compute: Callable[[tuple, bool], Sequence[Tensor | None]],
    compute_gradients: Callable[[Tensor, Sequence[Tensor], tuple, tuple], Sequence[Tensor | None]],
    shapes: Callable[..., Sequence[Tensor]],
    no_second: Callable[..., None] | None = None,
    function: type[torch.autograd.Function] | None = None,
) -> tuple[Callable[..., Tensor], Callable[..., Any]]:
    """Define NAME, NAME_forward and NAME_backward, and return the first and the last.

    Parameters
    ----------
    name, schema
        Of the operator, and its arguments; those that are tensors come first. (Written out, because inference from
        annotations costs more host time per call than the launch of a kernel. Lengths are SymInt, so that another one
        is no other graph.)
    differentiated
        The first of its arguments, of which NAME_backward gives the gradients. One that is not needed has no elements.
    kept
        What the backward takes beside them. NAME_forward, which stands for NAME in a graph that has a backward, returns
        it after the result.
    compute
        From the operator's arguments, and whether to keep: the result, and what is kept (None if it is not to be).
    compute_gradients
        From the gradient of the result, what was kept, the arguments, and which gradients are needed: those.
    shapes
        From the arguments one by one: the result and what is kept, uninitialised, after every check.
    no_second
        Says why there is no second derivative.
    function
        What autograd records for plain and other tensors, in place of what computes and keeps as told above.
    """
    n, n_tensors = len(differentiated), schema.count("Tensor")
    results, gradients = (", ".join(["Tensor"] * number) for number in (1 + len(kept), n))
    taken = "".join(f"Tensor {tensor}, " for tensor in kept)
    needed = "".join(f", bool need_{argument}" for argument in differentiated)
    LIBRARY.define(f"{name}({schema}) -> Tensor")
    LIBRARY.define(f"{name}_forward({schema}) -> ({results})")
    LIBRARY.define(f"{name}_backward(Tensor grad_scores, {taken}{schema}{needed}) -> ({gradients})")
    operators = torch.ops.pylate_flash
    call, call_forward, call_backward = (
        getattr(operators, name + which).default for which in ("", "_forward", "_backward")
    )

    class Function(torch.autograd.Function):
        """The operator where a gradient is needed."""

        @staticmethod
        def forward(ctx, *arguments):
            # Of other than plain tensors, the operator goes into a graph, or to what else there is between.
            result, *saved = compute(arguments, True) if is_plain(*arguments[:n]) else call_forward(*arguments)
            ctx.save_for_backward(*arguments[:n_tensors], *saved)
            ctx.options = arguments[n_tensors:]
            ctx.set_materialize_grads(False)
            return result

        @staticmethod
        def backward(ctx, grad_scores):
            if grad_scores is None:
                return (None,) * len(ctx.needs_input_grad)
            saved = ctx.saved_tensors
            arguments, saved = saved[:n_tensors] + ctx.options, saved[n_tensors:]
            needs = ctx.needs_input_grad[:n]
            if torch.is_grad_enabled() or not is_plain(grad_scores, *arguments[:n]):
                # A graph of the backward is asked for: the operator has one, which says that there is no second
                # derivative.
                whole = call_backward(grad_scores, *saved, *arguments, *needs)
                whole = whole if n > 1 else (whole,)
                found: Sequence[Tensor | None] = [one if need else None for one, need in zip(whole, needs, strict=True)]
            else:
                found = compute_gradients(grad_scores, saved, arguments, needs)
            return *found, *(None,) * (len(arguments) - n)

    recorded = function or Function

    def scores(*arguments):
        return compute(arguments, False)[0]

    def differentiable(*arguments):
        """The operator for tensors that may require a gradient."""
        if needs_gradient(*arguments[:n]):
            return recorded.apply(*arguments)
        if is_plain(*arguments[:n]):
            return scores(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return call(*arguments)

    def returned(found: Sequence[Tensor | None], like: Tensor) -> Tensor | tuple[Tensor, ...]:
        whole = tuple([like.new_empty(0) if gradient is None else gradient for gradient in found])
        return whole if n > 1 else whole[0]

    def backward(grad_scores: Tensor, *others):
        saved, arguments, needs = others[: len(kept)], others[len(kept) : -n], others[-n:]
        return returned(compute_gradients(grad_scores, saved, arguments, needs), arguments[0])

    def gradient_shapes(grad_scores: Tensor, *others):
        arguments, needs = others[len(kept) : -n], others[-n:]
        found = [
            torch.empty_like(tensor, memory_format=torch.contiguous_format) if need and tensor is not None else None
            for tensor, need in zip(arguments, needs, strict=False)
        ]
        return returned(found, arguments[0])

    LIBRARY.impl(name, scores, "CompositeExplicitAutograd")
    LIBRARY.impl(name, differentiable, "Autograd")
    LIBRARY.impl(f"{name}_forward", lambda *arguments: tuple(compute(arguments, True)), "CompositeExplicitAutograd")
    LIBRARY.impl(f"{name}_backward", backward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pylate_flash::{name}", lambda *arguments: shapes(*arguments)[0])
    torch.library.register_fake(f"pylate_flash::{name}_forward", lambda *arguments: tuple(shapes(*arguments)))
    torch.library.register_fake(f"pylate_flash::{name}_backward", gradient_shapes)
    torch.library.register_autograd(f"pylate_flash::{name}_backward", no_second or no_second_derivative(name))
    return call, call_backward
