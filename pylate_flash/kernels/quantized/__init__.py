"""The forward of quantized documents: scores of 8-bit values, in memory of the scores' size."""

from __future__ import annotations

import torch
from torch import Tensor

from ...problem import Problem, Tensors
from ..forward.common import add_sums
from ..forward.inputs import Inputs
from ..rows import active_tokens, inverse_norms
from .plan import quantized_before, quantized_plan
from .rows import divided_by_norms, quantize_rows
from .stacked import score_quantized

__all__ = ["quantized_forward"]


def quantized_forward(problem: Problem, tensors: Tensors, scales: Tensor, offsets: Tensor | None) -> Tensor:
    """Scores, float32, of `problem.scores_shape`; the documents are values, with contiguous scales and offsets.

    Tensors are as `kernels.forward.maxsim_forward` takes them; no dimension is 0, and a document may be empty.
    """
    plan = quantized_plan(problem)
    queries, documents, queries_mask, documents_mask, _, cu_seqlens, candidates = tensors
    kind = problem.kind
    active = bounds = values = queries_scale = None
    if documents_mask is not None:
        active, bounds = active_tokens(documents_mask)
    if kind.quantize_queries:
        dtype = torch.int8 if kind.quantized == torch.uint8 else kind.quantized
        n_queries, length, device = problem.n_queries, problem.query_length, problem.device
        values = torch.empty(n_queries, length, problem.size, dtype=dtype, device=device)
        queries_scale = torch.empty(n_queries, length, dtype=torch.float32, device=device)
        if quantized_before(problem, plan):
            quantize_rows(queries, problem.query_strides, values, queries_scale, kind.normalize)
            queries, values = values, None
    elif kind.normalize:
        queries_scale = inverse_norms(queries)
    if kind.normalize:
        scales, offsets = divided_by_norms(documents, problem.document_strides, scales, offsets)
    sums_shape = problem.scores_shape if plan.n_sums == 1 else (plan.n_sums, *problem.scores_shape)
    sums = torch.empty(*sums_shape, dtype=torch.float32, device=problem.device)
    inputs = Inputs(
        queries, documents, queries_mask, active, bounds, queries_scale, scales, cu_seqlens, None, candidates, None,
        None,
    )  # fmt: skip
    if plan.kernel == "hopper":
        # Not every Triton has what it is written in.
        from ..forward.hopper import score_hopper

        score_hopper(problem, plan, inputs, sums, None)
    else:
        score_quantized(problem, plan, inputs, values, offsets, sums)
    return sums if plan.n_sums == 1 else add_sums(problem, plan, sums)
