"""The operator of the losses, `pylate_flash::maxsim_loss`: scores, loss and gradients, a chunk of queries at a time.

The forward computes the gradients along with the loss, and the backward multiplies them by the gradient of the loss, so
that the argmax and scores of a chunk are freed with it. Gradients of float16 embeddings stay in float32 until then,
because loss scaling keeps small gradients from underflowing, and the scale is not known before.

Per-query losses, and losses over no tokens, are torch operations after `maxsim`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from ..kernels.choice import choose
from ..problem import CROSS_ENTROPY, DIVERGENCE, MARGIN_MSE, Comparison, Options, Targets, Tensors, accumulation_dtype
from .checks import check, check_differentiation, check_layout, check_tensor, is_readable, no_second_derivative
from .compute import kernels
from .loss_call import LossResult, checked_comparison, checked_targets
from .loss_scores import compared, loss_in_blocks, reduced, statistics_of
from .maxsim_operator import checked, scores_of, with_lengths
from .operator import LIBRARY, NOT_PLAIN, apply, cast_like, is_plain, needs_gradient, repeat, signature


def loss_of(inputs: tuple, settings: tuple) -> tuple[Tensor, Any]:
    """The loss of a call and, if requested, its statistics [3]; else None, or a tensor [0] from an operator.

    `inputs` are the operator's tensors and `settings` its other arguments, unchecked; max_document_length may be None.
    """
    queries, documents, _, _, _, bounds, _, _ = inputs
    if bounds is not None:
        # Whether the length must be computed depends on whether a gradient is needed.
        max_document_length, (tensors, _, options, _) = settings[0], _call_of(inputs, settings)
        check_layout(tensors, None, max_document_length)
        check_tensor("queries", queries, {3: "[Nq, Lq, d]"})
        check_tensor("documents", documents, {2: "[Td, d]"})
        settings = (with_lengths(tensors, options, None, max_document_length).max_document_length, *settings[1:])
    key = signature("maxsim_loss", inputs, settings)
    # The checks reject anything but a string.
    per_query = isinstance(settings[_LOSS_REDUCTION], str) and settings[_LOSS_REDUCTION] == "none"
    # queries and documents are required; every other tensor may be None.
    plain = key is not NOT_PLAIN and queries is not None and documents is not None
    if plain and not per_query and queries.numel() and documents.numel():
        if needs_gradient(*inputs[:_N_DIFFERENTIABLE]):
            return apply(_MaxsimLoss, key, (key, settings), *inputs)

        def compute(inputs: Sequence) -> tuple[Sequence[Tensor | None], None]:
            return _computed(_checked(_call_of(inputs, settings)), (False, False, False))[:2], None

        loss, statistics = repeat(key, compute, inputs)[0]
        return loss, statistics
    if key is NOT_PLAIN:
        check_differentiation(_NAMES[settings[_KIND]], *[tensor for tensor in inputs if isinstance(tensor, Tensor)])
    call = _checked(_call_of(inputs, settings))
    tensors, targets, options, comparison = call
    if comparison.loss_reduction != "none" and not (0 in queries.shape or 0 in documents.shape):
        inputs, settings = _arguments(call)
        return _maxsim_loss(*inputs, *settings)
    scores = scores_of(_NAMES[comparison.kind], tensors, options)
    result = compared(scores, targets, comparison, tensors.documents.dim() == 4)
    statistics = statistics_of(result) if comparison.with_statistics else None
    return reduced(result.losses, comparison.loss_reduction), statistics


class _Call(NamedTuple):
    """The operator's arguments, grouped; padded documents have a `max_document_length` of 0."""

    tensors: Tensors
    targets: Targets
    options: Options
    comparison: Comparison


def _call_of(inputs: Sequence, settings: Sequence) -> _Call:
    queries, documents, temperature, queries_mask, documents_mask, bounds, target, exclude = inputs
    tensors = Tensors(queries, documents, queries_mask, documents_mask, None, bounds)
    options = Options(0, settings[0], 0, *settings[1:-_N_COMPARISON])
    return _Call(tensors, Targets(target, exclude, temperature), options, Comparison(*settings[-_N_COMPARISON:]))


def _arguments(call: _Call) -> tuple[tuple, tuple]:
    """The operator's arguments: tensors, then settings."""
    (queries, documents, *masks, _, bounds, _), (target, exclude, temperature), options, comparison = call
    inputs = queries, documents, temperature, *masks, bounds, target, exclude
    return inputs, (options[1], *options[3:], *comparison)


def _checked(call: _Call) -> _Call:
    """The call after every check and autocast."""
    comparison = checked_comparison(call.comparison)
    tensors, options = checked(call.tensors, call.options)
    if tensors.documents_cu_seqlens is None:
        if options.max_document_length is not None:
            check_layout(tensors, None, options.max_document_length)
        options = options._replace(max_document_length=0)
        # The operators check everything; `checked_targets` relies on these ranks.
        if tensors.queries.dim() != 3 or tensors.documents.dim() not in (3, 4):
            check(tensors)
    target, exclude, temperature = checked_targets(call.targets, comparison, tensors)
    if comparison.loss_reduction != "none":
        if target is not None:
            dtype = accumulation_dtype(tensors.queries.dtype)
            target = (target.to(dtype) if target.is_floating_point() else target).contiguous()
        exclude = None if exclude is None else exclude.contiguous()
    return _Call(tensors, Targets(target, exclude, temperature), options, comparison)


# Tensors: the fields of `Tensors` that a loss has, and those of `Targets`; then fields of `Options` and `Comparison`.
_CALL = (
    "Tensor queries, Tensor documents, Tensor? temperature, Tensor? queries_mask, Tensor? documents_mask, "
    "Tensor? documents_cu_seqlens, Tensor? target, Tensor? exclude, SymInt max_document_length, bool normalize, "
    "str reduction, str masking, float empty_score, str implementation, str kind, float temperature_number, "
    "float? margin, bool symmetric, float teacher_temperature, bool normalize_scores, str loss_reduction, "
    "bool with_statistics, int? max_scratch_bytes"
)
_N_TENSORS = 8
_N_COMPARISON = len(Comparison._fields)
_KIND = Comparison._fields.index("kind") - _N_COMPARISON
_LOSS_REDUCTION = Comparison._fields.index("loss_reduction") - _N_COMPARISON
# The public functions.
_NAMES = {CROSS_ENTROPY: "maxsim_cross_entropy", DIVERGENCE: "maxsim_kl_divergence", MARGIN_MSE: "maxsim_margin_mse"}
# Only the leading tensors are differentiable.
_N_DIFFERENTIABLE = 3
LIBRARY.define(f"maxsim_loss({_CALL}) -> (Tensor, Tensor)")
# Replaces `maxsim_loss` in a graph that has a backward: returns the loss, its statistics, and its gradients.
LIBRARY.define(
    f"maxsim_loss_gradients({_CALL}, bool need_queries, bool need_documents, bool need_temperature) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "maxsim_loss_backward(Tensor grad_loss, Tensor queries, Tensor documents, Tensor? temperature, "
    "Tensor grad_queries, Tensor grad_documents, Tensor slope) -> (Tensor, Tensor, Tensor)"
)
_maxsim_loss = torch.ops.pylate_flash.maxsim_loss.default
_maxsim_loss_gradients = torch.ops.pylate_flash.maxsim_loss_gradients.default
_maxsim_loss_backward = torch.ops.pylate_flash.maxsim_loss_backward.default


def _by_kernels(call: _Call) -> bool:
    queries = call.tensors.queries
    return choose(call.options.implementation, queries.device, queries.dtype, queries.shape[-1]) == "triton"


def _computed(call: _Call, needs: tuple[bool, bool, bool]) -> LossResult:
    """The loss, its statistics, and the gradients that are needed."""
    return (kernels().loss if _by_kernels(call) else loss_in_blocks)(*call, needs)


def _loss_and_gradients(*arguments) -> tuple[Tensor, ...]:
    loss, *outputs = _computed(_call_of(arguments[:_N_TENSORS], arguments[_N_TENSORS:-3]), arguments[-3:])
    return loss, *[loss.new_empty(0) if tensor is None else tensor for tensor in outputs]


def _times(gradient: Tensor, grad_loss: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply a gradient, computed for a loss gradient of 1, by `grad_loss`."""
    if gradient.dtype == dtype:
        return (gradient * grad_loss).to(dtype)
    # A single rounding, without an intermediate tensor.
    return torch.mul(gradient, grad_loss, out=torch.empty_like(gradient, dtype=dtype))


class _MaxsimLoss(torch.autograd.Function):
    """The operator where a gradient is needed: the forward computes the gradients with the loss, and saves them.

    The backward scales them by the gradient of the loss and releases them, so that a second backward
    (retain_graph=True) recomputes them. They are not computed in the backward, which runs in another thread with cold
    caches, where the same launches take twice as much host time.
    """

    @staticmethod
    def forward(ctx, call, *tensors):
        key, options = call
        ctx.plain = key is not NOT_PLAIN
        ctx.specs = [None if tensor is None else (tensor.dtype, tensor.shape) for tensor in tensors[:_N_DIFFERENTIABLE]]
        needs = ctx.needs_input_grad[1 : 1 + _N_DIFFERENTIABLE]
        if ctx.plain:

            def compute(tensors: Sequence) -> tuple[tuple, tuple]:
                call = _checked(_call_of(tensors, options))
                used, settings = _arguments(call)
                return (*_computed(call, needs), *used), (settings, _by_kernels(call))

            (loss, statistics, *outputs), (options, ctx.by_kernels) = repeat(key, compute, tensors)
            ctx.gradients, tensors = outputs[:_N_DIFFERENTIABLE], tuple(outputs[_N_DIFFERENTIABLE:])
        else:
            loss, statistics, *ctx.gradients = _maxsim_loss_gradients(*tensors, *options, *needs)
        ctx.save_for_backward(*tensors)
        ctx.options, ctx.needs = options, needs
        if statistics is not None:
            ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        return loss, statistics

    @staticmethod
    def backward(ctx, grad_loss, _):
        if grad_loss is None:
            return (None,) * len(ctx.needs_input_grad)
        gradients = ctx.gradients
        eager = ctx.plain and is_plain(grad_loss) and not is_legacy_batchedtensor(grad_loss)
        if eager:
            ctx.gradients = None
        if gradients is None:
            gradients = _computed(_call_of(ctx.saved_tensors, ctx.options), ctx.needs)[2:]
        if eager and not torch.is_grad_enabled():
            # `ctx.saved_tensors` is not unpacked: that would take as long as the rest of this function.
            grads = _scaled(grad_loss, gradients, ctx.specs, ctx.by_kernels)
        else:
            stand_ins = [grad_loss.new_empty(0) if gradient is None else gradient for gradient in gradients]
            all_grads = _maxsim_loss_backward(grad_loss, *ctx.saved_tensors[:_N_DIFFERENTIABLE], *stand_ins)
            needed = [gradient if need else None for gradient, need in zip(all_grads, ctx.needs, strict=True)]
            grads = cast_like(needed, ctx.specs)
        return None, *grads, *_NO_GRADIENTS


# For the inputs after the temperature.
_NO_GRADIENTS = (None,) * (_N_TENSORS - _N_DIFFERENTIABLE)


def _scaled(
    grad_loss: Tensor, gradients: Sequence[Tensor | None], specs: Sequence[Any], by_kernels: bool
) -> list[Tensor | None]:
    """The gradients times `grad_loss`, in place where they already have the dtype of their input."""
    *input_grads, slope = gradients
    dtypes = specs[0][0], specs[1][0]
    if by_kernels:

        def compute(inputs: Sequence) -> tuple[Sequence[Tensor | None], None]:
            return kernels().rescale(*inputs, dtypes), None

        inputs = (grad_loss, *input_grads)
        grads, _ = repeat(signature(_scaled, inputs, (dtypes,)), compute, inputs)
    else:
        is_one = is_readable(grad_loss) and grad_loss == 1
        grads = [
            grad if grad is None or (is_one and grad.dtype == dtype) else _times(grad, grad_loss, dtype)
            for grad, dtype in zip(input_grads, dtypes, strict=True)
        ]
    return [*grads, None if slope is None else _times(slope, grad_loss, specs[2][0]).view(specs[2][1])]


def _differentiable(*arguments) -> tuple[Tensor, Tensor]:
    """The operator for tensors that may require a gradient."""
    if needs_gradient(*arguments[:_N_DIFFERENTIABLE]):
        return _MaxsimLoss.apply((NOT_PLAIN, arguments[_N_TENSORS:]), *arguments[:_N_TENSORS])
    with torch._C._AutoDispatchBelowAutograd():
        return _maxsim_loss(*arguments)


def _loss_shapes(*arguments) -> tuple[Tensor, Tensor]:
    queries, documents, _, queries_mask, documents_mask, bounds = arguments[:6]
    check(Tensors(queries, documents, queries_mask, documents_mask, None, bounds))
    with_statistics = Comparison(*arguments[-_N_COMPARISON:]).with_statistics
    dtype = accumulation_dtype(queries.dtype)
    return queries.new_empty((), dtype=dtype), queries.new_empty(3 * with_statistics, dtype=dtype)


def _gradient_shapes(*arguments) -> tuple[Tensor, ...]:
    *call, need_queries, need_documents, need_temperature = arguments
    (queries, documents), (loss, statistics) = call[:2], _loss_shapes(*call)
    grad_dtype = torch.float32 if queries.dtype == torch.float16 else queries.dtype
    return (
        loss,
        statistics,
        queries.new_empty(queries.shape if need_queries else 0, dtype=grad_dtype),
        documents.new_empty(documents.shape if need_documents else 0, dtype=grad_dtype),
        loss.new_empty(() if need_temperature else 0),
    )


def _backward(grad_loss: Tensor, queries: Tensor, documents: Tensor, temperature: Tensor | None, *gradients: Tensor):
    inputs = queries, documents, grad_loss if temperature is None else temperature
    return tuple(
        [_times(gradient, grad_loss, tensor.dtype) for gradient, tensor in zip(gradients, inputs, strict=True)]
    )


LIBRARY.impl("maxsim_loss", lambda *call: _loss_and_gradients(*call, *[False] * 3)[:2], "CompositeExplicitAutograd")
LIBRARY.impl("maxsim_loss", _differentiable, "Autograd")
LIBRARY.impl("maxsim_loss_gradients", _loss_and_gradients, "CompositeExplicitAutograd")
LIBRARY.impl("maxsim_loss_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("pylate_flash::maxsim_loss", _loss_shapes)
torch.library.register_fake("pylate_flash::maxsim_loss_gradients", _gradient_shapes)
torch.library.register_fake("pylate_flash::maxsim_loss_backward", _backward)
torch.library.register_autograd(
    "pylate_flash::maxsim_loss_backward", no_second_derivative("a MaxSim loss", "its gradients are computed with it")
)
