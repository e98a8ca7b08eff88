"""Scores of residual codes, decompressed on the chip, and their gradient, which reads the rows that have won alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..forward.common import add_sums
from .forward import score_residual
from .gradient import gradient_sums
from .plan import residual_gradient_plan, residual_plan

if TYPE_CHECKING:
    from ...problem import Problem, Tensors

__all__ = ["Codes", "residual_backward", "residual_forward"]


class Codes(NamedTuple):
    """The tensors of `ops.residual_codes.ResidualCodes`, contiguous, and the candidates [Nq, K], or None."""

    codes: Tensor
    residuals: Tensor
    centroids: Tensor
    bucket_weights: Tensor
    cu_seqlens: Tensor
    scales: Tensor
    candidates: Tensor | None

    @property
    def nbits(self) -> int:
        return self.bucket_weights.shape[0].bit_length() - 1


def residual_forward(problem: Problem, tensors: Tensors, codes: Codes) -> tuple[Tensor, Tensor | None]:
    """Scores, float32, [Nq, Nd] or [Nq, K], and winners, int32, [Nd, Nq * Lq] or [Nq * K, Lq], if the problem has them.

    Queries are padded [Nq, Lq, d] with contiguous rows. Where there are candidates, every query is a group of the
    problem, and `problem.n_documents` the number of its candidates. No dimension is 0, and a document may be empty.
    """
    plan = residual_plan(problem, codes.nbits, codes.candidates is not None)
    shape = problem.n_queries, problem.n_documents
    sums_shape = shape if plan.n_sums == 1 else (plan.n_sums, *shape)
    sums = torch.empty(*sums_shape, dtype=torch.float32, device=problem.device)
    winners = None
    if problem.with_winners:
        documents = problem.groups * problem.n_documents
        winners = torch.empty(documents, problem.rows, dtype=torch.int32, device=problem.device)
    score_residual(problem, plan, tensors, codes, sums, winners)
    return sums if plan.n_sums == 1 else add_sums(problem, plan, sums), winners


def residual_backward(problem: Problem, tensors: Tensors, codes: Codes, grad_scores: Tensor, winners: Tensor) -> Tensor:
    """The gradient of the queries [Nq, Lq, d], in their type, from that of the scores, float32 with any strides."""
    sums = gradient_sums(problem, residual_gradient_plan(problem), codes, grad_scores, winners)
    total = sums.sum(dim=0).view(tensors.queries.shape)
    if problem.kind.weighted:
        assert tensors.queries_mask is not None
        total *= tensors.queries_mask.unsqueeze(-1)
    return total.to(problem.dtype)
