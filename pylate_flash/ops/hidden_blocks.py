"""Scores from hidden states, and their gradients, on plain tensors: one block of documents at a time.

Each block's documents are projected once, into a scratch of bounded size, which `compute` scores like any documents.
On Hopper a kernel projects and normalises; for few query rows it also scores, without a scratch (`kernels.hidden`).

The backward gets the gradient of the projected embeddings, before they were normalised, from `compute_gradients`, and
then runs one matrix product per block and requested gradient:

    grad_hidden = G W,  grad_weight = G^T hidden,  grad_bias = sum of the rows of G
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.choice import choose
from ..kernels.plan_operations import fused_plan
from ..problem import Options, Tensors, accumulation_dtype
from .by_block import DocumentBlock, at, compute_by_block, document_blocks, of_block
from .compute import compute_gradients, kernels, without_autocast
from .norms import SMALLEST_NORM, in_range

# Limit on the projected embeddings, and in the backward their gradient, held at once; a single document may exceed it.
SCRATCH_BYTES = 64 << 20
# If a gradient is needed, the limit is at least the bytes of the hidden states divided by this: they are saved anyway,
# and have a gradient as large. A step then projects once, in one block: 2 x 287 (59 x 864) takes 0.513 ms instead of
# 0.711, where a linear layer and `maxsim` take 0.481.
STATES_PER_SCRATCH = 2


class Layer(NamedTuple):
    """The projection of hidden states: weight [d, d_model], bias [d], and whether embeddings are normalised."""

    weight: Tensor
    bias: Tensor | None
    normalize: bool
    by_kernels: bool


class Embeddings(NamedTuple):
    """Embeddings [.., d]; under `normalize`, divided by their norms, with the reciprocal norms [..]."""

    values: Tensor
    scales: Tensor | None

    def rows(self, rows: slice) -> Embeddings:
        return Embeddings(self.values[rows], None if self.scales is None else self.scales[rows])


def compute_hidden(
    weight: Tensor, bias: Tensor | None, tensors: Tensors, options: Options, with_argmax: bool
) -> tuple[Tensor | None, ...]:
    """Scores and, if requested, argmax; `tensors` have hidden states in place of documents.

    With the argmax it also returns the values and scales of the queries' `Embeddings` (None without `normalize`), and
    those of the documents, if they and their gradient fit into the memory limit.
    """
    layer, hidden = _layer(weight, bias, options), tensors.documents
    with without_autocast(weight.device), torch.no_grad():
        if not with_argmax:
            scores = _fused(layer, tensors, options)
            if scores is not None:
                return scores, None
        queries = _normalized_queries(layer, tensors.queries)
        max_bytes = _room(hidden) if with_argmax else SCRATCH_BYTES
        blocks, scratch = _blocks(layer, tensors, max_bytes)
        tensors, options = tensors._replace(queries=queries.values), options._replace(normalize=False)

        def produce(block: DocumentBlock) -> Tensor:
            return _project(layer, _states(hidden, block), scratch).values

        scores, argmax = compute_by_block(tensors, options, with_argmax, blocks, produce)
        if not with_argmax:
            return scores, None
        keep = len(blocks) == 1 and 2 * scratch.values.nbytes <= max_bytes
        normalized = queries if layer.normalize else (None, None)
        return scores, argmax, *normalized, *(scratch if keep else ())


def compute_hidden_gradients(
    weight: Tensor,
    bias: Tensor | None,
    tensors: Tensors,
    options: Options,
    grad_scores: Tensor,
    saved: list[Tensor],
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of weight, bias, queries and hidden, of their dtypes; None for one that is not needed.

    `saved` holds what `compute_hidden` returned after the scores, or the argmax alone. It is cleared, so that the
    embeddings are freed before the gradient of the hidden states, which is larger than all of them, is allocated. Sums
    over several blocks are in float32 (float64 for float64).
    """
    need_weight, need_bias, need_queries, need_hidden = needs
    argmax, projected = saved[0], Embeddings(*saved[3:]) if len(saved) > 3 else None
    normalized = Embeddings(*saved[1:3]) if options.normalize and len(saved) > 1 else None
    saved.clear()
    layer, hidden = _layer(weight, bias, options), tensors.documents
    with without_autocast(weight.device), torch.no_grad():
        queries = normalized or _normalized_queries(layer, tensors.queries)
        # Kernels apply the Jacobian of the normalisation as they write a gradient.
        in_kernels = layer.normalize and layer.by_kernels
        tensors, options = tensors._replace(queries=queries.values), options._replace(normalize=in_kernels)
        blocks, scratch = _blocks(layer, tensors, _room(hidden) // 2, projected)
        dtype = hidden.dtype if len(blocks) == 1 else accumulation_dtype(hidden.dtype)
        grad_weight = grad_bias = grad_queries = grad_hidden = None
        if need_queries and len(blocks) > 1:
            grad_queries = torch.zeros_like(queries.values, dtype=dtype)
        for block in blocks:
            states = _states(hidden, block)
            embeddings = _project(layer, states, scratch) if projected is None else projected.rows(block.rows)
            block_tensors = of_block(tensors, block, embeddings.values)
            norms = None
            if in_kernels:
                assert queries.scales is not None
                assert embeddings.scales is not None
                norms = queries.scales if block.queries is None else queries.scales[block.queries], embeddings.scales
            block_grad_queries, gradient = compute_gradients(
                block_tensors,
                options,
                at(grad_scores, block.scores),
                at(argmax, block.documents),
                need_queries,
                need_weight or need_bias or need_hidden,
                norms,
            )
            if grad_queries is None:
                grad_queries = block_grad_queries
            elif block_grad_queries is not None:
                (grad_queries if block.queries is None else grad_queries[block.queries]).add_(block_grad_queries)
            if gradient is None:
                continue
            gradient = gradient.view(embeddings.values.shape)
            if not in_kernels:
                _through_normalisation(gradient, embeddings)
            if len(blocks) == 1:
                del embeddings, block_tensors, scratch, projected, argmax, norms
            if need_hidden:
                grad_hidden = hidden.new_empty(hidden.shape) if grad_hidden is None else grad_hidden
                torch.mm(gradient, weight, out=grad_hidden.view(-1, hidden.shape[-1])[block.rows])
            if need_weight:
                grad_weight = _sum(grad_weight, _product(gradient.T, states, dtype))
            if need_bias:
                grad_bias = _sum(grad_bias, gradient.sum(dim=0, dtype=dtype))
        if grad_queries is not None and not in_kernels:
            _through_normalisation(grad_queries, queries)
    gradients = grad_weight, grad_bias, grad_queries, grad_hidden
    return tuple([None if gradient is None else gradient.to(hidden.dtype) for gradient in gradients])


def _sum(total: Tensor | None, update: Tensor) -> Tensor:
    return update if total is None else total.add_(update)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right in `dtype`, without intermediate rounding where torch supports it."""
    if dtype == left.dtype or not left.is_cuda:
        return torch.mm(left, right).to(dtype)
    return torch.mm(left, right, out_dtype=dtype)


def _layer(weight: Tensor, bias: Tensor | None, options: Options) -> Layer:
    chosen = choose(options.implementation, weight.device, weight.dtype, weight.shape[0])
    return Layer(weight, bias, options.normalize, chosen == "triton")


def _are_laid_out(states: Tensor, layer: Layer) -> bool:
    """Whether hidden states and layer have the memory layout that `kernels.hidden` requires."""
    return (
        states.is_contiguous()
        and layer.weight.is_contiguous()
        and (layer.bias is None or layer.bias.is_contiguous())
        and (states.data_ptr() | layer.weight.data_ptr()) % 16 == 0
    )


def _fused(layer: Layer, tensors: Tensors, options: Options) -> Tensor | None:
    """Scores by the kernel that fuses projection and scoring, or None if it does not support the call."""
    queries, hidden = tensors[:2]
    if (
        not hidden.is_cuda
        or options.implementation == "blocked"
        or tensors.candidates_cu_seqlens is not None
        or (hidden.dim() == 4 and hidden.shape[0] > 1)
    ):
        return None
    if tensors.queries_cu_seqlens is not None:
        n_queries, length = tensors.queries_cu_seqlens.shape[0] - 1, options.max_query_length
        if queries.shape[0] != n_queries * length:
            # The queries have different lengths.
            return None
        queries = queries.view(n_queries, length, queries.shape[1])
    rows, tokens, size = queries.shape[:2].numel(), hidden.shape[:-1].numel(), layer.weight.shape
    plan = fused_plan(rows, tokens, size, hidden.dtype, hidden.device)
    if plan is None or queries.stride(2) != 1 or not _are_laid_out(hidden, layer):
        return None
    return _hidden_kernels().score(plan, tensors._replace(queries=queries), options, layer.weight, layer.bias)


@functools.cache
def _hidden_kernels() -> ModuleType:
    """The kernels of hidden states, imported only where they run, because not every Triton has Gluon."""
    from ..kernels import hidden

    return hidden


def _blocks(
    layer: Layer, tensors: Tensors, limit: int, projected: Embeddings | None = None
) -> tuple[list[DocumentBlock], Embeddings]:
    """Blocks of at most `limit` bytes of embeddings, or of one document, and a scratch for the largest of them."""
    size = layer.weight.shape[0]
    blocks = document_blocks(tensors, limit // (size * layer.weight.element_size()))
    count = tensors.documents.shape[:-1].numel()
    if len(blocks) > 1:
        count = max(block.rows.stop - block.rows.start for block in blocks)
    return blocks, _empty_embeddings(layer, (count, size)) if projected is None else projected


def _room(hidden: Tensor) -> int:
    """Limit on the bytes of scratch if a gradient is needed."""
    return max(SCRATCH_BYTES, hidden.nbytes // STATES_PER_SCRATCH)


def _states(hidden: Tensor, block: DocumentBlock) -> Tensor:
    """Hidden states [tokens of the block, d_model]; a view, unless the padded ones are not contiguous."""
    return at(hidden, block.place).reshape(-1, hidden.shape[-1])


def _empty_embeddings(layer: Layer, shape: Sequence[int]) -> Embeddings:
    values = layer.weight.new_empty(shape)
    dtype = accumulation_dtype(values.dtype)
    return Embeddings(values, values.new_empty(shape[:-1], dtype=dtype) if layer.normalize else None)


def _project(layer: Layer, states: Tensor, scratch: Embeddings) -> Embeddings:
    """The projected embeddings of states [n, d_model], written into `scratch` [at least n, d]."""
    weight, bias, projected = layer.weight, layer.bias, scratch.rows(slice(0, len(states)))
    if layer.by_kernels and _are_laid_out(states, layer):
        plan = fused_plan(1, len(states), weight.shape, weight.dtype, weight.device)
        if plan is not None:
            _hidden_kernels().project(plan, states, weight, bias, *projected)
            return projected
    if bias is None:
        torch.mm(states, weight.T, out=projected.values)
    else:
        torch.addmm(bias, states, weight.T, out=projected.values)
    _normalize(layer, projected.values, projected)
    return projected


def _normalized_queries(layer: Layer, queries: Tensor) -> Embeddings:
    """The queries, normalised if the layer normalises."""
    if not layer.normalize:
        return Embeddings(queries, None)
    normalized = _empty_embeddings(layer, queries.shape)
    _normalize(layer, queries, normalized)
    return normalized


def _normalize(layer: Layer, embeddings: Tensor, out: Embeddings) -> None:
    """Write normalised embeddings and reciprocal norms to `out`, if it has them; may run in place."""
    if out.scales is None or embeddings.numel() == 0:
        return
    if layer.by_kernels:
        kernels().normalized_rows(embeddings.contiguous(), out.values, out.scales)
        return
    (embeddings,), (scales,) = in_range((embeddings,))
    out.scales.copy_(scales)
    torch.mul(embeddings, scales.unsqueeze(-1), out=out.values)


def _through_normalisation(grad: Tensor, embeddings: Embeddings) -> None:
    """Replace the gradient of normalised embeddings by that of the unnormalised ones, in place."""
    normalized, scales = embeddings
    if scales is None or grad.numel() == 0:
        return
    scales = scales.unsqueeze(-1)
    wide_grad = grad.to(scales.dtype)
    # A clamped norm is constant, so there the normalisation is linear.
    dot = torch.where(scales < 1.0 / SMALLEST_NORM, (normalized * wide_grad).sum(dim=-1, keepdim=True), 0.0)
    # A zero gradient stays zero, even for a token that is NaN.
    grad.copy_(((wide_grad - normalized * dot) * scales).masked_fill_(~wide_grad.any(dim=-1, keepdim=True), 0.0))
