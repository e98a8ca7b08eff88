"""Soft MaxSim: a smooth maximum over document tokens, summed over the query, whose gradient reaches every token.

    score[i, j] = sum over active s of  (1 / beta) log sum over active t of  exp(beta <queries[i, s], documents[j, t]>)

As beta grows, the smooth maximum decreases to the maximum, and the score to that of `maxsim`; the excess is at most
log(Ld) / beta per query token. If a gradient is needed, the forward saves the log-sum-exp [documents, rows], from which
the backward recomputes the token probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..problem import Options, Tensors, accumulation_dtype
from .blocked import blocked_forward
from .checks import (
    check_positive,
    check_tensor,
    checked_flag,
    checked_problem,
    no_second_derivative,
)
from .compute import gradients_by, kernels, scores_by
from .maxsim_operator import CALL_SCHEMA, call_of, checked, checked_shapes, reference_scores, with_lengths
from .norms import unscaled
from .operator import Operation
from .tiles import Block, Operands, Part, blocks


def soft_maxsim_reference(queries: Tensor, documents: Tensor, beta: float | Tensor, **options: Any) -> Tensor:
    """The definition of `soft_maxsim`, in plain torch, in the dtype that `maxsim_reference` computes in."""

    def maximum(exponents: Tensor) -> Tensor:
        return exponents.logsumexp(dim=-1) / beta

    return reference_scores(queries, documents, **options, maximum=maximum, scale=beta)


def soft_maxsim(
    queries: Tensor,
    documents: Tensor,
    beta: float | Tensor,
    *,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    normalize: bool = False,
    reduction: str = "sum",
    masking: str = "exclude",
    empty_score: float = 0.0,
    implementation: str = "auto",
) -> Tensor:
    """Soft MaxSim scores of queries against documents, differentiable, in memory that does not grow with Lq * Ld.

    Parameters
    ----------
    queries, documents
        [Nq, Lq, d], and [Nd, Ld, d], shared by all queries, or [Nq, K, Ld, d], K candidates per query, as in `maxsim`.
    beta
        Inverse temperature, positive and finite: a number, or a floating tensor with one element on the device of the
        queries, which receives a gradient. Used in float32 (float64 with float64 inputs). The value of a tensor on a
        GPU is not checked, because that would synchronize.
    queries_mask, documents_mask
        [Nq, Lq], which may hold weights, and [Nd, Ld] or [Nq, K, Ld], or None, as in `maxsim`.
    masking
        "exclude": masked document tokens are ignored. "zero": each masked token adds a term with similarity 0 to the
        sum, as embeddings padded with zeros do; it receives no gradient.
    normalize, reduction, empty_score, implementation
        As in `maxsim`.

    Returns
    -------
    Tensor
        [Nq, Nd] or [Nq, K], of the dtype that `maxsim` returns. Half inputs multiply in their own dtype and accumulate
        in float32; their gradients multiply probabilities rounded to bfloat16. float32 inputs follow torch's
        setting, as in `maxsim`; float64 inputs compute in float64. NaN in an active token gives NaN, and infinities
        behave as in `torch.logsumexp`. Scores and gradients are bitwise reproducible.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `maxsim`; also if beta is not a single positive finite number in the dtype in which it is used.

    Examples
    --------
    >>> queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> documents = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, -1.0], [-1.0, 0.0]]])
    >>> soft_maxsim(queries, documents, 2.0)
    tensor([[1.8133, 0.1269]])
    >>> soft_maxsim(queries, documents, 1e4)
    tensor([[1.5000, 0.0000]])
    """
    options = Options(0, 0, 0, checked_flag("normalize", normalize), reduction, masking, empty_score, implementation)
    tensors = Tensors(queries, documents, queries_mask, documents_mask)
    return soft_scores_of("soft_maxsim", tensors, beta, options)


def soft_maxsim_varlen(
    queries: Tensor,
    documents: Tensor,
    beta: float | Tensor,
    queries_cu_seqlens: Tensor,
    documents_cu_seqlens: Tensor,
    *,
    candidates_cu_seqlens: Tensor | None = None,
    max_query_length: int | None = None,
    max_document_length: int | None = None,
    normalize: bool = False,
    reduction: str = "sum",
    empty_score: float = 0.0,
    implementation: str = "auto",
) -> Tensor:
    """Soft MaxSim scores of packed queries against packed documents, differentiable.

    Parameters
    ----------
    queries, documents
        [Tq, d] and [Td, d], of the types that `soft_maxsim` takes.
    beta
        As in `soft_maxsim`.
    queries_cu_seqlens, documents_cu_seqlens, candidates_cu_seqlens, max_query_length, max_document_length
        As in `maxsim_varlen`.
    normalize, reduction, empty_score, implementation
        As in `soft_maxsim`.

    Returns
    -------
    Tensor
        [Nq, Nd], or [Nd] with candidates. Type, precision, NaN, infinities and gradients as in `soft_maxsim`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `soft_maxsim`, and for boundaries as in `maxsim_varlen`.

    Examples
    --------
    >>> queries, queries_cu_seqlens = pack([torch.eye(2)])
    >>> documents, documents_cu_seqlens = pack([torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[0.0, -1.0]])])
    >>> soft_maxsim_varlen(queries, documents, 2.0, queries_cu_seqlens, documents_cu_seqlens)
    tensor([[ 1.8133, -1.0000]])
    """
    check_tensor("queries", queries, {2: "[Tq, d]"})
    check_tensor("documents", documents, {2: "[Td, d]"})
    tensors = Tensors(queries, documents, None, None, queries_cu_seqlens, documents_cu_seqlens, candidates_cu_seqlens)
    options = Options(0, 0, 0, checked_flag("normalize", normalize), reduction, "exclude", empty_score, implementation)
    options = with_lengths(tensors, options, max_query_length, max_document_length)
    return soft_scores_of("soft_maxsim_varlen", tensors, beta, options)


def soft_scores_of(operation: str, tensors: Tensors, beta: float | Tensor, options: Options) -> Tensor:
    """The scores of a call; `operation` names the called function in messages."""
    tensor, value = (beta, None) if isinstance(beta, Tensor) else (None, beta)
    return _soft_maxsim((tensor, *tensors, *options, value), operation)


def _check(arguments: tuple, called: str) -> tuple:
    """Beta is the first argument if it is a tensor, and the last if it is a number."""
    tensor, *call, value = arguments
    tensors, options = checked(*call_of(tuple(call)))
    dtype, device = accumulation_dtype(tensors.queries.dtype), tensors.queries.device
    check_positive("beta", value if tensor is None else tensor, tensors.queries, dtype)
    beta = torch.full((), float(value), dtype=dtype, device=device) if tensor is None else tensor.to(dtype).view(())
    return beta, *tensors, *options


def _compute(arguments: tuple, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Scores, and with `with_lse` log(sum(exp(beta * similarity))) over the tokens, [documents, rows]."""
    beta, (tensors, options) = arguments[0], call_of(arguments[1:])
    problem = checked_problem(tensors, options)

    def in_blocks(operands: Operands, scores: Tensor, lse: Tensor | None) -> None:
        blocked_forward(operands, partial(_log_sums, beta=beta), scores, lse, together=False)

    saved = (0.0, beta.dtype) if with_lse else None
    return scores_by(
        problem, tensors, options, lambda *inputs: kernels().soft_forward(*inputs, beta, with_lse), in_blocks, saved
    )


def _compute_gradients(
    grad_scores: Tensor, saved: Sequence[Tensor], arguments: tuple, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    (lse,), beta, (tensors, options) = saved, arguments[0], call_of(arguments[1:])
    problem = checked_problem(tensors, options)
    return gradients_by(
        problem, tensors, options, grad_scores, (beta, *tensors[:2]), needs,
        lambda grad_scores: kernels().soft_gradients(problem, tensors, beta, grad_scores, lse, needs),
        lambda operands, grad_scores: _blocked_backward(operands, beta, grad_scores, lse, needs),
    )  # fmt: skip


def _log_sums(block: Block, part: Part, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's contribution to the scores [documents, R], and log(sum(exp(exponents))), 0 for empty documents."""
    lse = _exponents(block, part, beta).logsumexp(dim=1)
    if block.empty is not None:
        lse.masked_fill_(block.empty, 0.0)
    values = lse / beta
    if part.weights is not None:
        values = values.masked_fill_(part.weights == 0, 0.0) * part.weights
    return values, lse


def _blocked_backward(
    operands: Operands, beta: Tensor, grad_scores: Tensor, lse: Tensor, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of beta, queries [rows, d] and documents, in their shapes; probabilities are computed once."""
    need_beta, need_queries, need_documents = needs
    grad_scores = grad_scores.to(operands.dtype).reshape(-1, operands.n_documents)
    slope = torch.zeros((), dtype=torch.float64, device=operands.device)
    grad_rows = torch.zeros_like(operands.queries, dtype=operands.dtype) if need_queries else None
    grad_documents = None
    zeros = partial(torch.zeros_like, operands.documents, memory_format=torch.contiguous_format)
    for block in blocks(operands, together=False):
        values = block.values.to(operands.dtype)
        scaled = values if block.scale is None else values * block.scale.unsqueeze(1)
        active = block.exist if block.mask is None else block.mask
        if block.mask is not None:
            # Masked tokens may be NaN.
            scaled = scaled.masked_fill(~block.mask.flatten().unsqueeze(1), 0.0)
        grad: Tensor | None = None
        for part in block.parts:
            exponents = _exponents(block, part, beta)
            probabilities = exponents.sub_(lse[block.documents, part.columns].unsqueeze(1)).exp_()
            grad_values = part.spread(grad_scores, block.documents)
            grad_values = grad_values if part.weights is None else grad_values * part.weights
            grad_values = grad_values if block.empty is None else grad_values.masked_fill(block.empty, 0.0)
            if need_beta:
                # The derivative of (1 / beta) log(sum(exp(beta s))) by beta is -entropy / beta**2.
                entropy = torch.special.entr(probabilities).sum(dim=1)
                slope -= (entropy * grad_values).masked_fill_(grad_values == 0.0, 0.0).sum(dtype=torch.float64)
            grad_products = probabilities.mul_(grad_values.unsqueeze(1))
            rows = part.rows[0].to(operands.dtype)
            rows = rows if part.scale is None else rows * part.scale[0].unsqueeze(1)
            if part.weights is not None:
                inactive = part.weights[0] == 0
                grad_products.masked_fill_(inactive, 0.0)
                rows = rows.masked_fill(inactive.unsqueeze(1), 0.0)
            if active is not None:
                grad_products.masked_fill_(~active.unsqueeze(2), 0.0)
            grad_products = grad_products.flatten(0, 1) if block.exist is None else grad_products[block.exist]
            if need_documents:
                grad = grad_products @ rows if grad is None else grad.addmm_(grad_products, rows)
            if grad_rows is not None:
                grad_rows[part.of] += grad_products.T @ scaled
        if grad is not None:
            if block.mask is not None:
                # 0 times an infinite query is NaN.
                grad.masked_fill_(~block.mask.flatten().unsqueeze(1), 0.0)
            grad = unscaled(grad, values, block.scale)
            if len(grad) == operands.documents.shape[:-1].numel():
                grad_documents = grad.view(operands.documents.shape)
                continue
            if grad_documents is None:
                # Some documents may be scored against no query token.
                grad_documents = zeros()
            operands.tokens(grad_documents, block.documents).copy_(grad)
    if need_documents and grad_documents is None:
        grad_documents = zeros()
    if grad_rows is not None:
        if operands.weights is not None:
            grad_rows.masked_fill_((operands.weights == 0).unsqueeze(1), 0.0)
        grad_rows = unscaled(grad_rows, operands.queries, operands.queries_scale)
    return (slope / beta.double().square()).to(beta.dtype) if need_beta else None, grad_rows, grad_documents


def _exponents(block: Block, part: Part, beta: Tensor) -> Tensor:
    """beta * similarity [documents, Ld, R]."""
    similarities = block.similarities(part, block.exist if block.mask is None else block.mask)
    return similarities.mul_(beta if part.scale is None else beta * part.scale)


def _shapes(*arguments) -> tuple[Tensor, Tensor]:
    scores, lse = checked_shapes(*call_of(arguments[1:]))
    return scores, torch.empty_like(lse, dtype=scores.dtype)


_soft_maxsim = Operation(
    "soft_maxsim",
    f"Tensor beta, {CALL_SCHEMA}",
    ("beta", "queries", "documents"),
    ("lse",),
    _check,
    _compute,
    _compute_gradients,
    _shapes,
    no_second_derivative("soft_maxsim", "the probabilities of its tokens are not kept"),
)
