"""Scores from hidden states, and their gradients, on plain tensors: a block of documents at a time.

A block's documents are projected, once each, into a scratch of bounded size, which `compute` scores as any documents.
On Hopper a kernel projects and normalises, and for few query rows scores too, without a scratch (`kernels.hidden`).

The backward takes the gradient of the projected embeddings from `compute_gradients`, takes it through the normalisation
in place, and then multiplies matrices, once per block and gradient asked for:

    grad_hidden = G W,  grad_weight = G^T hidden,  grad_bias = sum of the rows of G
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.plan import choose
from ..kernels.plan_operations import fused_plan
from ..problem import Options, Tensors
from .by_block import DocumentBlock, at, compute_by_block, document_blocks, of_block
from .compute import compute_gradients, kernels
from .norms import SMALLEST_NORM, in_range

# Of projected embeddings, and in the backward of them and their gradient, held at once; more only where a single
# document has more.
SCRATCH_BYTES = 64 << 20


class Call(NamedTuple):
    """The arguments of the operator: the fields of `Tensors`, with hidden states and their layer, and of `Options`."""

    queries: Tensor
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    queries_mask: Tensor | None
    documents_mask: Tensor | None
    queries_cu_seqlens: Tensor | None
    documents_cu_seqlens: Tensor | None
    candidates_cu_seqlens: Tensor | None
    max_query_length: int
    max_document_length: int
    max_candidates: int
    normalize: bool
    reduction: str
    masking: str
    empty_score: float
    implementation: str

    @property
    def tensors(self) -> Tensors:
        """With hidden states in place of documents."""
        return Tensors(
            self.queries, self.hidden, self.queries_mask, self.documents_mask, self.queries_cu_seqlens,
            self.documents_cu_seqlens, self.candidates_cu_seqlens,
        )  # fmt: skip

    @property
    def options(self) -> Options:
        return Options(
            self.max_query_length, self.max_document_length, self.max_candidates, self.normalize, self.reduction,
            self.masking, self.empty_score, self.implementation,
        )  # fmt: skip

    @property
    def packed(self) -> bool:
        return self.documents_cu_seqlens is not None

    @property
    def tokens(self) -> int:
        """Of all documents, padding included."""
        return self.hidden.shape[:-1].numel()

    @property
    def by_kernels(self) -> bool:
        return choose(self.implementation, self.hidden.device, self.hidden.dtype, self.weight.shape[0]) == "triton"


N_TENSORS = 9


class Embeddings(NamedTuple):
    """Embeddings [.., d]; under `normalize` divided by their norms, and one over the norms [..]."""

    values: Tensor
    scales: Tensor | None


class Kept(NamedTuple):
    """What a forward leaves for its backward; the projected embeddings only where there is room for them."""

    winners: Tensor
    projected: Embeddings | None


class Needs(NamedTuple):
    """Which gradients are asked for."""

    queries: bool
    hidden: bool
    weight: bool
    bias: bool

    @property
    def projected(self) -> bool:
        return self.hidden or self.weight or self.bias


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def compute_hidden(call: Call, with_winners: bool) -> tuple[Tensor, Kept | None]:
    """Scores, and what the backward needs, if asked for.

    The projected embeddings are kept where the bound has room for them and for their gradient.
    """
    with _products_as_they_are(call.hidden.device.type), torch.no_grad():
        if not with_winners:
            scores = _fused(call)
            if scores is not None:
                return scores, None
        queries = _normalized_queries(call).values
        blocks = _blocks(call, SCRATCH_BYTES)
        scratch = _scratch(call, blocks)
        tensors, options = call.tensors._replace(queries=queries), call.options._replace(normalize=False)
        scores, winners = compute_by_block(
            tensors, options, with_winners, blocks, lambda block: _project(call, block, scratch).values
        )
        if winners is None:
            return scores, None
        keep = len(blocks) == 1 and 2 * scratch.values.numel() * scratch.values.element_size() <= SCRATCH_BYTES
        return scores, Kept(winners, scratch if keep else None)


def compute_hidden_gradients(call: Call, grad_scores: Tensor, kept: list[Kept], needs: Needs) -> Gradients:
    """Gradients of queries, hidden, weight and bias in their type; None for one that is not needed.

    `kept` holds what the forward did, and is emptied: it is let go before the gradient of the hidden states, which is
    larger than all of it, is allocated.
    """
    winners, projected = kept.pop()
    with _products_as_they_are(call.hidden.device.type), torch.no_grad():
        queries = _normalized_queries(call)
        blocks = _blocks(call, SCRATCH_BYTES // 2)
        if len(blocks) > 1:
            return _gradients_in_blocks(call, blocks, queries, projected, grad_scores, winners, needs)
        if projected is None:
            projected = _project(call, blocks[0], _scratch(call, blocks))
        grad_queries, gradient = _gradients_of_block(call, blocks[0], queries, projected, grad_scores, winners, needs)
        if grad_queries is not None:
            _through_normalisation(call, grad_queries, queries)
        hidden, weight, states = call.hidden, call.weight, _hidden_of(call, blocks[0])
        del queries, projected, winners
        return (
            grad_queries,
            torch.mm(gradient, weight).view(hidden.shape) if gradient is not None and needs.hidden else None,
            torch.mm(gradient.T, states) if gradient is not None and needs.weight else None,
            gradient.sum(dim=0) if gradient is not None and needs.bias else None,
        )


def _gradients_in_blocks(
    call: Call,
    blocks: list[DocumentBlock],
    queries: Embeddings,
    projected: Embeddings | None,
    grad_scores: Tensor,
    winners: Tensor,
    needs: Needs,
) -> Gradients:
    """`compute_hidden_gradients`, with sums over the blocks in float32 (float64 for float64)."""
    dtype = torch.float64 if call.hidden.dtype == torch.float64 else torch.float32
    hidden, weight = call.hidden, call.weight
    grad_queries = queries.values.new_zeros(queries.values.shape, dtype=dtype) if needs.queries else None
    grad_hidden = hidden.new_empty(hidden.shape) if needs.hidden else None
    grad_weight = weight.new_zeros(weight.shape, dtype=dtype) if needs.weight else None
    grad_bias = weight.new_zeros(weight.shape[0], dtype=dtype) if needs.bias else None
    scratch = _scratch(call, blocks) if projected is None else projected
    for block in blocks:
        embeddings = _project(call, block, scratch) if projected is None else _rows_of(projected, block.rows)
        block_queries, gradient = _gradients_of_block(call, block, queries, embeddings, grad_scores, winners, needs)
        if grad_queries is not None and block_queries is not None:
            (grad_queries if block.queries is None else grad_queries[block.queries]).add_(block_queries)
        if gradient is None:
            continue
        if grad_hidden is not None:
            torch.mm(gradient, weight, out=grad_hidden.view(-1, hidden.shape[-1])[block.rows])
        if grad_weight is not None:
            _add_product(grad_weight, gradient.T, _hidden_of(call, block))
        if grad_bias is not None:
            grad_bias += gradient.sum(dim=0, dtype=dtype)
    if grad_queries is not None:
        _through_normalisation(call, grad_queries, queries)
    return (
        None if grad_queries is None else grad_queries.to(call.queries.dtype),
        grad_hidden,
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None else grad_bias.to(weight.dtype),
    )


def _gradients_of_block(
    call: Call,
    block: DocumentBlock,
    queries: Embeddings,
    projected: Embeddings,
    grad_scores: Tensor,
    winners: Tensor,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the normalised queries, and of the block's projected embeddings [tokens of the block, d]."""
    tensors, options = call.tensors._replace(queries=queries.values), call.options._replace(normalize=False)
    tensors, options = of_block(tensors, options, block, projected.values)
    grad_queries, gradient = compute_gradients(
        tensors, options, at(grad_scores, block.scores), at(winners, block.documents), needs.queries,
        needs.projected,
    )  # fmt: skip
    if gradient is not None:
        gradient = gradient.view(projected.values.shape)
        _through_normalisation(call, gradient, projected)
    return grad_queries, gradient


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, not rounded in between where torch has such a product."""
    if total.dtype == left.dtype or not left.is_cuda:
        total += left @ right
    else:
        total += torch.mm(left, right, out_dtype=total.dtype)


def _products_as_they_are(device: str) -> AbstractContextManager[Any]:
    """Without autocast, which the tensors have followed already, and which takes no `out=` of another type."""
    # Entering it takes as long as a launch.
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _are_laid_out(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether hidden states and layer lie as `kernels.hidden` reads them."""
    return (
        hidden.is_contiguous()
        and weight.is_contiguous()
        and (bias is None or bias.is_contiguous())
        and (hidden.data_ptr() | weight.data_ptr()) % 16 == 0
    )


def _fused(call: Call) -> Tensor | None:
    """Scores by the kernel that projects and scores at once, or None where it does not serve the call."""
    queries, hidden, weight, bias = call[:4]
    if (
        not hidden.is_cuda
        or call.implementation == "blocked"
        or call.candidates_cu_seqlens is not None
        or (hidden.dim() == 4 and hidden.shape[0] > 1)
    ):
        return None
    if call.queries_cu_seqlens is not None:
        n_queries = call.queries_cu_seqlens.shape[0] - 1
        if queries.shape[0] != n_queries * call.max_query_length:
            # They are not all of one length.
            return None
        queries = queries.view(n_queries, call.max_query_length, queries.shape[1])
    plan = fused_plan(queries.shape[0] * queries.shape[1], call.tokens, weight.shape, hidden.dtype, hidden.device)
    if plan is None or queries.stride(2) != 1 or not _are_laid_out(hidden, weight, bias):
        return None
    return _hidden_kernels().score(plan, call.tensors._replace(queries=queries), call.options, weight, bias)


@functools.cache
def _hidden_kernels() -> ModuleType:
    """The kernels of hidden states, imported where they run only: not every Triton has Gluon."""
    from ..kernels import hidden

    return hidden


def _blocks(call: Call, limit: int) -> list[DocumentBlock]:
    """All documents in blocks of at most `limit` bytes of projected embeddings, or of one document."""
    return document_blocks(call.tensors, limit // (call.weight.shape[0] * call.hidden.element_size()))


def _hidden_of(call: Call, block: DocumentBlock) -> Tensor:
    """Hidden states [tokens of the block, d_model]; a view, unless the padded ones are not contiguous."""
    return at(call.hidden, block.place).reshape(-1, call.hidden.shape[-1])


def _rows_of(embeddings: Embeddings, rows: slice) -> Embeddings:
    values, scales = embeddings
    return Embeddings(values[rows], None if scales is None else scales[rows])


def _scratch(call: Call, blocks: list[DocumentBlock]) -> Embeddings:
    """Uninitialised embeddings of the largest block."""
    count = call.tokens if len(blocks) == 1 else max(block.rows.stop - block.rows.start for block in blocks)
    return _empty_embeddings(call, (count, call.weight.shape[0]))


def _empty_embeddings(call: Call, shape: tuple[int, ...]) -> Embeddings:
    values = call.hidden.new_empty(shape)
    if not call.normalize:
        return Embeddings(values, None)
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    return Embeddings(values, values.new_empty(shape[:-1], dtype=dtype))


def _project(call: Call, block: DocumentBlock, scratch: Embeddings) -> Embeddings:
    """The projected embeddings [tokens of the block, d], written into `scratch` [at least as many, d]."""
    states, weight, bias = _hidden_of(call, block), call.weight, call.bias
    count = states.shape[0]
    projected = _rows_of(scratch, slice(0, count))
    if call.by_kernels and _are_laid_out(states, weight, bias):
        plan = fused_plan(1, count, weight.shape, weight.dtype, weight.device)
        if plan is not None:
            _hidden_kernels().project(plan, states, weight, bias, *projected)
            return projected
    if bias is None:
        torch.mm(states, weight.T, out=projected.values)
    else:
        torch.addmm(bias, states, weight.T, out=projected.values)
    if call.normalize:
        _normalize(call, projected.values, projected)
    return projected


def _normalized_queries(call: Call) -> Embeddings:
    """The queries, divided by their norms if they are to be."""
    if not call.normalize:
        return Embeddings(call.queries, None)
    normalized = _empty_embeddings(call, call.queries.shape)
    _normalize(call, call.queries, normalized)
    return normalized


def _normalize(call: Call, embeddings: Tensor, out: Embeddings) -> None:
    """Write the embeddings divided by their norms, rounded, and one over these; `out` may hold the embeddings."""
    assert out.scales is not None
    if embeddings.numel() == 0:
        return
    if call.by_kernels:
        kernels().normalized_rows(embeddings.contiguous(), out.values, out.scales)
        return
    (embeddings,), (scales,) = in_range((embeddings,))
    out.scales.copy_(scales)
    torch.mul(embeddings, scales.unsqueeze(-1), out=out.values)


def _through_normalisation(call: Call, grad: Tensor, embeddings: Embeddings) -> None:
    """Replace the gradient of the embeddings by that of what they were before they were divided by their norms."""
    normalized, scales = embeddings
    if scales is None or grad.numel() == 0:
        return
    if call.by_kernels:
        kernels().through_normalized_rows(grad, normalized, scales)
        return
    scales = scales.unsqueeze(-1)
    wide = grad.to(scales.dtype)
    # Where the norm was clamped, the division is linear.
    along = torch.where(scales < 1.0 / SMALLEST_NORM, (normalized * wide).sum(dim=-1, keepdim=True), 0.0)
    # Where there is no gradient, there is none either of a token that is not a number.
    grad.copy_(((wide - normalized * along) * scales).masked_fill_(~wide.any(dim=-1, keepdim=True), 0.0))
