"""The operator `pylate_flash::maxsim`, and the definition of MaxSim, over all layouts.

One operator serves eager and compiled calls, with padded and packed tokens: it takes the fields of `Tensors` and
`Options`. Operations with further arguments check and compute the common part with the functions of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..kernels.choice import IMPLEMENTATIONS, choose
from ..problem import Options, Tensors, empty_results, rounded_total
from .checks import (
    FLOATING,
    check,
    check_choice,
    check_packing,
    check_tensor,
    checked_number,
    is_readable,
)
from .compute import compute, compute_gradients, kernels
from .norms import normalized
from .operator import Operation, is_plain, needs_gradient
from .packing import longest, padded

REDUCTIONS = ("sum", "mean")
MASKINGS = ("exclude", "zero")
_CHOICES = {"reduction": REDUCTIONS, "masking": MASKINGS, "implementation": IMPLEMENTATIONS}
# Limit on the candidates of all queries together that get programs of their own, unless there are more documents.
_MOST_CANDIDATES = 1 << 30
# Alternatives to a tensor, in messages: for queries, documents and their masks.
_OTHERWISE = "", "", " or None", " or None"


def reference_scores(
    queries: Tensor,
    documents: Tensor,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    queries_cu_seqlens: Tensor | None = None,
    documents_cu_seqlens: Tensor | None = None,
    candidates_cu_seqlens: Tensor | None = None,
    *,
    normalize: bool = False,
    reduction: str = "sum",
    masking: str = "exclude",
    empty_score: float = 0.0,
    maximum: Callable[[Tensor], Tensor] = lambda similarities: similarities.max(dim=-1).values,
    scale: float | Tensor = 1.0,
) -> Tensor:
    """The definition of all scores; `maximum` reduces the last dimension of the scaled similarities."""
    dtype = torch.promote_types(queries.dtype, torch.float32)
    if queries_cu_seqlens is not None:
        queries, queries_mask = padded(queries, queries_cu_seqlens)
    if documents_cu_seqlens is not None:
        # Packed documents have no masked tokens.
        (documents, documents_mask), masking = padded(documents, documents_cu_seqlens), "exclude"
    # Groups of candidates: one shared by all queries, [1, Nd, Ld, d], or one per query, [Nq, K, Ld, d].
    groups = documents if documents.dim() == 4 else documents.unsqueeze(0)
    query_active = queries.new_ones(queries.shape[:-1]) if queries_mask is None else queries_mask
    document_active = (
        groups.new_ones(groups.shape[:-1]) if documents_mask is None else documents_mask.view(groups.shape[:-1])
    )
    weights, query_active, document_active = query_active.to(dtype), query_active.bool(), document_active.bool()
    # The values of masked tokens must not matter, even if they are NaN.
    queries = queries.to(dtype).masked_fill(~query_active.unsqueeze(-1), 0.0)
    groups = groups.to(dtype).masked_fill(~document_active.unsqueeze(-1), 0.0)
    if normalize:
        queries, groups = normalized(queries), normalized(groups)
    # A batched matrix product would repeat the queries for every document.
    similarities = scale * torch.einsum("qsd,qntd->qnst", queries, groups)
    similarities = similarities.masked_fill(~document_active.unsqueeze(-2), 0.0 if masking == "zero" else -torch.inf)
    # Append a token that counts only in empty documents, because a maximum needs at least one element.
    empty = ~document_active.any(dim=-1)
    alone = torch.where(empty, 0.0, -torch.inf).to(dtype)[..., None, None].expand(*similarities.shape[:-1], 1)
    best = maximum(torch.cat([similarities, alone], dim=-1))
    best = best.masked_fill(empty.unsqueeze(-1) | ~query_active.unsqueeze(1), 0.0)
    scores = (best * weights.unsqueeze(1)).sum(dim=-1)
    if reduction == "mean":
        scores = scores / query_active.sum(dim=-1, keepdim=True).clamp(min=1)
    scores = scores.masked_fill(empty, empty_score)
    if candidates_cu_seqlens is None:
        return scores
    candidate_ranges = zip(scores, pairwise(candidates_cu_seqlens.tolist()), strict=True)
    return torch.cat([scores.new_empty(0), *(row[first:last] for row, (first, last) in candidate_ranges)])


def with_lengths(
    tensors: Tensors,
    options: Options,
    max_query_length: int | None,
    max_document_length: int | None,
    max_candidates: int | None = None,
    learned: Sequence[Tensor] = (),
) -> Options:
    """The options with these lengths, computed where they are None; checks the boundaries as far as they are readable.

    Computing a length from boundaries on a GPU synchronizes. `learned` are further tensors that may need a gradient.
    """
    check_packing(tensors)
    queries, documents, _, _, queries_bounds, bounds, candidates = tensors
    assert bounds is not None
    if queries_bounds is not None:
        max_query_length = longest("queries_cu_seqlens", queries_bounds, len(queries), "queries", max_query_length)
    total = documents.shape[0]
    if max_document_length is None and bounds.is_cuda and not needs_gradient(queries, documents, *learned):
        # An upper bound without synchronization, the same for many totals.
        max_document_length = rounded_total(total) if isinstance(total, int) else total
    max_document_length = longest("documents_cu_seqlens", bounds, total, "documents", max_document_length)
    if candidates is not None and max_candidates is None:
        max_candidates = most_candidates(candidates, bounds.shape[0] - 1)
    # Not `or 0`: the truth of a symbolic length may be unknown while compiling.
    max_query_length = 0 if max_query_length is None else max_query_length
    max_candidates = 0 if max_candidates is None else max_candidates
    return Options(max_query_length, max_document_length, max_candidates, *options[3:])


def most_candidates(candidates: Tensor, n_documents: int) -> int:
    """The most candidates of a query, or fewer if one query has far more than the rest; checks boundaries on the host.

    Every query gets programs for as many, within a launch's limit of 2**31 - 1; they loop over any further candidates.
    So the mean will do where reading the boundaries would synchronize, or there is nothing to read.
    """
    if not is_readable(candidates):
        return n_documents // candidates.shape[0] + 1
    max_candidates = longest("candidates_cu_seqlens", candidates, n_documents, "documents", None)
    return min(max_candidates, max(_MOST_CANDIDATES, n_documents) // max(1, candidates.shape[0] - 1) + 1)


def checked(tensors: Tensors, options: Options) -> tuple[Tensors, Options]:
    """Prepare a call for an operator: check the options and what the operator would not accept; autocast."""
    for option, choices in _CHOICES.items():
        value = getattr(options, option)
        if type(value) is not str or value not in choices:
            check_choice(option, value, choices)
    empty_score = options.empty_score
    if type(empty_score) is not float or empty_score != 0.0:
        options = options._replace(empty_score=checked_number("empty_score", empty_score))
    for name, tensor, otherwise in zip(Tensors._fields, tensors[:4], _OTHERWISE, strict=False):
        if tensor is None and otherwise:
            continue
        # Plain tensors are covered by later checks.
        if type(tensor) is not Tensor or tensor.is_nested:
            check_tensor(name, tensor, otherwise=otherwise)
    if torch._C._is_any_autocast_enabled():
        queries, documents = tensors[:2]
        cast = autocast(queries, documents, implementation=options.implementation)
        if cast[0] is not queries or cast[1] is not documents:
            tensors = Tensors(cast[0], cast[1], *tensors[2:])
    return tensors, options


def autocast(*tensors: Tensor, implementation: str = "blocked") -> tuple[Tensor, ...]:
    """Cast tensors to the autocast dtype if autocast is on; float64 is left alone, as by torch's own operations.

    Tensors that are no embeddings are returned as they are, for the checks to reject. If kernels serve the call and no
    gradient flows through the casts, one launch casts both tensors.
    """
    if not torch._C._is_any_autocast_enabled():
        return tensors
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    if implementation != "blocked" and _cast_together(implementation, dtype, *tensors):
        return kernels().cast_both(*tensors, dtype)
    return tuple([tensor.to(dtype) if tensor.dtype in _AUTOCAST else tensor for tensor in tensors])


def _cast_together(implementation: str, dtype: torch.dtype, queries: Tensor, documents: Tensor) -> bool:
    """Whether a single kernel casts both tensors."""
    if not is_plain(queries, documents) or needs_gradient(queries, documents):
        return False
    return all(
        tensor.dtype in _AUTOCAST
        and tensor.dtype != dtype
        and tensor.numel() > 0
        and tensor.is_contiguous()
        and tensor.device == queries.device
        and choose(implementation, tensor.device, dtype, tensor.shape[-1]) == "triton"
        for tensor in (queries, documents)
    )


_AUTOCAST = tuple(dtype for dtype in FLOATING if dtype != torch.float64)


TENSORS_SCHEMA = (
    "Tensor queries, Tensor documents, Tensor? queries_mask, Tensor? documents_mask, Tensor? queries_cu_seqlens, "
    "Tensor? documents_cu_seqlens, Tensor? candidates_cu_seqlens"
)
OPTIONS_SCHEMA = (
    "SymInt max_query_length, SymInt max_document_length, SymInt max_candidates, bool normalize, str reduction, "
    "str masking, float empty_score, str implementation"
)
CALL_SCHEMA = f"{TENSORS_SCHEMA}, {OPTIONS_SCHEMA}"
N_TENSORS = len(Tensors._fields)
_DOCUMENTS_CU_SEQLENS = Tensors._fields.index("documents_cu_seqlens")
_NORMALIZE = N_TENSORS + Options._fields.index("normalize")


def call_of(arguments: tuple) -> tuple[Tensors, Options]:
    """The call described by the arguments of the operator."""
    return Tensors(*arguments[:N_TENSORS]), Options(*arguments[N_TENSORS:])


def _check(arguments: tuple, called: str) -> tuple:
    call = call_of(arguments)
    tensors, options = checked(*call)
    return arguments if tensors is call[0] and options is call[1] else (*tensors, *options)


def checked_shapes(tensors: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """`empty_results` after every check of the tensors."""
    check(tensors)
    return empty_results(tensors, options)


maxsim_operation = Operation(
    "maxsim",
    CALL_SCHEMA,
    ("queries", "documents"),
    ("argmax",),
    _check,
    lambda arguments, keep: compute(*call_of(arguments), keep),
    lambda grad, saved, arguments, needs: compute_gradients(*call_of(arguments), grad, saved[0], *needs),
    lambda *arguments: checked_shapes(*call_of(arguments)),
)


def scores_of(operation: str, tensors: Tensors, options: Options) -> Tensor:
    """The scores of a call; `operation` is the name of the public function."""
    return scores_of_arguments((*tensors, *options), operation)


def scores_of_arguments(arguments: tuple, operation: str, prepare: Callable[[tuple], tuple] | None = None) -> Tensor:
    """The scores for the operator's arguments, or for those that `prepare` maps to them (`Operation`)."""
    # For packed documents without norms, kernels use the boundaries alone, not the total.
    packed = 1 if arguments[_DOCUMENTS_CU_SEQLENS] is not None and not arguments[_NORMALIZE] else -1
    return maxsim_operation(arguments, operation, packed, prepare)
