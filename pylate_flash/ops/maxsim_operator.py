"""The operator `pylate_flash::maxsim`, and the definition of MaxSim, over all layouts.

An operator is the one way in, eager and compiled, for padded and packed tokens alike: it takes the fields of `Tensors`
and of `Options`. What other operations take beside these, they check and compute by what is here.
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
# Candidates that all queries together get programs for, at most, unless there are more documents.
_MOST_CANDIDATES = 1 << 30
# What queries, documents and their masks may be besides tensors, as messages say it.
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
    """The definition of all scores, by the `maximum` over the last dimension of scaled similarities."""
    wide = torch.promote_types(queries.dtype, torch.float32)
    if queries_cu_seqlens is not None:
        queries, queries_mask = padded(queries, queries_cu_seqlens)
    if documents_cu_seqlens is not None:
        # There is no masked token among those that are packed.
        (documents, documents_mask), masking = padded(documents, documents_cu_seqlens), "exclude"
    # One group of candidates for all queries, [1, Nd, Ld, d], or one for each, [Nq, K, Ld, d].
    groups = documents if documents.dim() == 4 else documents.unsqueeze(0)
    on = queries.new_ones(queries.shape[:-1]) if queries_mask is None else queries_mask
    there = groups.new_ones(groups.shape[:-1]) if documents_mask is None else documents_mask.view(groups.shape[:-1])
    weights, on, there = on.to(wide), on.bool(), there.bool()
    # What a masked token is, a NaN even, does not matter.
    queries = queries.to(wide).masked_fill(~on.unsqueeze(-1), 0.0)
    groups = groups.to(wide).masked_fill(~there.unsqueeze(-1), 0.0)
    if normalize:
        queries, groups = normalized(queries), normalized(groups)
    # A product of matrices would repeat queries for every document.
    similarities = scale * torch.einsum("qsd,qntd->qnst", queries, groups)
    similarities = similarities.masked_fill(~there.unsqueeze(-2), 0.0 if masking == "zero" else -torch.inf)
    # One more token, which takes no part unless it is alone, as there is no maximum of none.
    empty = ~there.any(dim=-1)
    alone = torch.where(empty, 0.0, -torch.inf).to(wide)[..., None, None].expand(*similarities.shape[:-1], 1)
    best = maximum(torch.cat([similarities, alone], dim=-1))
    best = best.masked_fill(empty.unsqueeze(-1) | ~on.unsqueeze(1), 0.0)
    scores = (best * weights.unsqueeze(1)).sum(dim=-1)
    if reduction == "mean":
        scores = scores / on.sum(dim=-1, keepdim=True).clamp(min=1)
    scores = scores.masked_fill(empty, empty_score)
    if candidates_cu_seqlens is None:
        return scores
    owned = zip(scores, pairwise(candidates_cu_seqlens.tolist()), strict=True)
    return torch.cat([scores.new_empty(0), *(of_query[first:last] for of_query, (first, last) in owned)])


def with_lengths(
    tensors: Tensors,
    options: Options,
    max_query_length: int | None,
    max_document_length: int | None,
    max_candidates: int | None = None,
    learned: Sequence[Tensor] = (),
) -> Options:
    """The options with these lengths, those that are None found out, and what is readable of the boundaries checked.

    On a GPU, finding out is waiting for it. `learned` are tensors besides these that a gradient may be needed of.
    """
    check_packing(tensors)
    queries, documents, _, _, queries_bounds, bounds, candidates = tensors
    assert bounds is not None
    if queries_bounds is not None:
        max_query_length = longest("queries_cu_seqlens", queries_bounds, len(queries), "queries", max_query_length)
    total = documents.shape[0]
    if max_document_length is None and bounds.is_cuda and not needs_gradient(queries, documents, *learned):
        # A bound that costs nothing, the same for many totals.
        max_document_length = rounded_total(total) if isinstance(total, int) else total
    max_document_length = longest("documents_cu_seqlens", bounds, total, "documents", max_document_length)
    if candidates is not None and max_candidates is None:
        n_documents = bounds.shape[0] - 1
        # Kernels only have to know about how many there are of a query: the mean, where to look would be to wait.
        max_candidates = n_documents // candidates.shape[0] + 1
        if is_readable(candidates):
            max_candidates = most_candidates(candidates, n_documents)
    # By no truth of a number, which a compiler may know only when it runs.
    max_query_length = 0 if max_query_length is None else max_query_length
    max_candidates = 0 if max_candidates is None else max_candidates
    return Options(max_query_length, max_document_length, max_candidates, *options[3:])


def most_candidates(candidates: Tensor, n_documents: int) -> int:
    """The most candidates of a query, or fewer where one has far more than others; boundaries on the host are checked.

    Every query gets programs for as many, of which a launch takes 2**31 - 1: they walk more where there are more.
    """
    most = longest("candidates_cu_seqlens", candidates, n_documents, "documents", None)
    if not is_readable(candidates):
        return most
    return min(most, max(_MOST_CANDIDATES, n_documents) // max(1, candidates.shape[0] - 1) + 1)


def checked(tensors: Tensors, options: Options) -> tuple[Tensors, Options]:
    """What comes before an operator: checks of the options, and of what it would not take; autocast."""
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
        # Of plain ones, checks to come say the same.
        if type(tensor) is not Tensor or tensor.is_nested:
            check_tensor(name, tensor, otherwise=otherwise)
    if torch._C._is_any_autocast_enabled():
        queries, documents = tensors[:2]
        cast = autocast(queries, documents, implementation=options.implementation)
        if cast[0] is not queries or cast[1] is not documents:
            tensors = Tensors(cast[0], cast[1], *tensors[2:])
    return tensors, options


def autocast(*tensors: Tensor, implementation: str = "blocked") -> tuple[Tensor, ...]:
    """Tensors in the autocast type under autocast, which leaves float64 alone, as for torch's own operations.

    What are no embeddings stay what they are, for the checks to refuse. Where kernels serve a call, and no
    gradient flows through the casts, two take one launch.
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
    """Whether a kernel is to cast both."""
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
    """The call that has these arguments of the operator."""
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
    """The scores of a call, by the name of what was called."""
    return scores_of_arguments((*tensors, *options), operation)


def scores_of_arguments(arguments: tuple, operation: str, prepare: Callable[[tuple], tuple] | None = None) -> Tensor:
    """The scores for the arguments of the operator, or for those that `prepare` makes them of (`Operation`)."""
    # Of packed documents without norms, kernels look at the boundaries alone.
    packed = 1 if arguments[_DOCUMENTS_CU_SEQLENS] is not None and not arguments[_NORMALIZE] else -1
    return maxsim_operation(arguments, operation, packed, prepare)
