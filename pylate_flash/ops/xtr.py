"""XTR's scores: query tokens retrieve their k best document tokens of the whole batch, and only these score.

    score[i, j] = sum over s of best[i, s, j] / Z[i, j],   best[i, s, j] = max over retrieved t of <q[i, s], d[j, t]>

(Lee et al., "Rethinking the Role of Token Retrieval in Multi-Vector Retrieval", NeurIPS 2023.) A document of which a
query token retrieves nothing gets 0 from it. `xtr_scores_reference` says what the two normalizers Z are. What a query
token retrieves is all that reaches its k-th largest similarity, and of a document's tokens only the best one scores. So
`xtr_scores` takes the maxima [Nd, Nq * Lq], the thresholds [Nq * Lq], and a comparison; similarities are computed again
instead of kept. The gradient is that of `maxsim`, with only the argmax that counts, of scores divided by Z; thresholds
and Z are constant between changes of what is retrieved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.choice import choose
from ..problem import Options, Problem, Results, Rule, Tensors
from .call_parts import checked_masks, in_chunks, with_empty_score
from .checks import LARGEST, check_choice, check_integer, check_tensor, checked_problem
from .compute import compute_gradients, kernels, without_autocast
from .maxsim_operator import CALL_SCHEMA, call_of, checked, checked_shapes
from .operator import Operation
from .products import block_budget, inner_products

NORMALIZERS = ("positive", "retrieved")
# The least Z of each: PyLate's, and sentence-transformers'.
_LEAST = {"positive": 1e-3, "retrieved": 1.0}
# Maxima of query tokens and documents that are computed at once, and what else kernels keep of a query token, which
# takes as much memory as the maxima with so many documents.
_MAXIMA_AT_ONCE = 1 << 23
_BESIDE_MAXIMA = 1 << 10


def xtr_scores_reference(
    queries: Tensor,
    documents: Tensor,
    *,
    k: int = 256,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    normalizer: str = "positive",
    empty_score: float = 0.0,
) -> Tensor:
    """The definition of `xtr_scores`, in plain torch, in the type that `maxsim_reference` computes in."""
    wide = torch.promote_types(queries.dtype, torch.float32)
    (n_queries, query_length, _), (n_documents, length, _) = queries.shape, documents.shape
    on = queries.new_ones(queries.shape[:-1]) if queries_mask is None else queries_mask
    there = documents.new_ones(documents.shape[:-1]) if documents_mask is None else documents_mask
    weights, on, there = on.to(wide).unsqueeze(-1), on.bool().unsqueeze(-1), there.bool()
    queries = queries.to(wide).masked_fill(~on, 0.0)
    documents = documents.to(wide).masked_fill(~there.unsqueeze(-1), 0.0)
    similarities = queries.flatten(0, 1) @ documents.flatten(0, 1).T
    # Of equal similarities the first comes first, NaN before all, and masked tokens after all.
    order = similarities.detach().sort(dim=-1, descending=True, stable=True).indices
    masked = ~there.flatten()[order]
    order = order.gather(-1, masked.to(torch.uint8).sort(dim=-1, stable=True).indices)
    retrieved = torch.zeros_like(similarities, dtype=torch.bool).scatter(-1, order[:, :k], True)
    retrieved |= similarities.isnan()
    # [Nq, Lq, Nd, Ld]
    similarities, retrieved = (x.view(n_queries, query_length, n_documents, length) for x in (similarities, retrieved))
    scoring = retrieved & there
    padded = torch.nn.functional.pad(similarities.masked_fill(~scoring, -torch.inf), (0, 1), value=-torch.inf)
    best, counts = padded.max(dim=-1).values, scoring.any(dim=-1) & on
    if normalizer == "positive":
        # A token that was not retrieved counts as 0, and wins over negative ones.
        counts &= ~(best <= 0) | retrieved.all(dim=-1)
    best = best.masked_fill(~counts, 0.0) * weights
    counted = (best > 0) if normalizer == "positive" else counts
    divisors = counted.sum(dim=1, dtype=wide).clamp(min=_LEAST[normalizer])
    return (best.sum(dim=1) / divisors).masked_fill(~there.any(dim=-1), empty_score)


def xtr_scores(
    queries: Tensor,
    documents: Tensor,
    *,
    k: int = 256,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    normalizer: str = "positive",
    empty_score: float = 0.0,
    implementation: str = "auto",
) -> Tensor:
    """XTR scores of queries against documents, differentiable, in memory that does not grow with Lq * Ld.

    Each query token retrieves the k tokens, of all documents together, that are most similar to it. A document scores
    the sum, over query tokens, of the best similarity among its retrieved tokens, divided by a normalizer.

    Parameters
    ----------
    queries
        [Nq, Lq, d], float16, bfloat16, float32 or float64. Under autocast, the inputs take the autocast type.
    documents
        [Nd, Ld, d]: every query token retrieves from all of them.
    k
        How many document tokens each query token retrieves, at least 1; all, where there are not as many. Of equally
        similar ones, those of the lowest index, counted through all documents.
    queries_mask, documents_mask
        [Nq, Lq], which may hold weights, and [Nd, Ld], as in `maxsim`. A masked document token is retrieved after all
        active ones, and never scores.
    normalizer
        "positive", as in PyLate: a token of a document that is not retrieved counts as 0, which wins over negative
        similarities, and the sum is divided by the number of query tokens of which the document's best is positive, at
        least 0.001. "retrieved", as in sentence-transformers and in XTR's paper: retrieved tokens score whatever their
        sign, and the sum is divided by the number of query tokens that retrieved one of the document's, at least 1.
    empty_score, implementation
        As in `maxsim`.

    Returns
    -------
    Tensor
        [Nq, Nd]; type and precision as in `maxsim`. NaN in an active token makes the scores of its document, or of its
        query, NaN. The gradient flows to the best retrieved token only, of the lowest index; none flows through
        what is retrieved, or through the normalizer. Scores and gradients are bitwise reproducible.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `maxsim`; also if k is no integer, or less than 1, or `normalizer` is neither of its choices.

    Examples
    --------
    >>> queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> documents = torch.tensor([[[0.9, 0.1], [0.8, 0.2]], [[0.1, 0.7], [0.0, 0.6]]])
    >>> xtr_scores(queries, documents, k=2)
    tensor([[0.9000, 0.7000]])
    """
    # What is more than an operator takes is more than there are of anything.
    k = LARGEST if isinstance(k, int) and k > LARGEST else k
    check_integer("k", k, 1)
    k = k if isinstance(k, torch.SymInt) else int(k)
    check_choice("normalizer", normalizer, NORMALIZERS)
    check_tensor("documents", documents, {3: "[Nd, Ld, d]"})
    options = Options(empty_score=empty_score, implementation=implementation)
    return _xtr((*Tensors(queries, documents, queries_mask, documents_mask), *options, k, normalizer), "xtr_scores")


def _check(arguments: tuple, called: str) -> tuple:
    *call, k, normalizer = arguments
    tensors, options = checked(*call_of(tuple(call)))
    return *tensors, *options, k, normalizer


def _compute(arguments: tuple, _: bool) -> Results:
    """Scores, the tokens that a gradient flows to, and what scores were divided by."""
    (tensors, options), (k, normalizer) = call_of(arguments[:-2]), arguments[-2:]
    problem = checked_problem(tensors, options, with_argmax=True)
    chosen = choose(options.implementation, problem.device, problem.dtype, problem.size)
    tensors = Tensors(*tensors[:2], *checked_masks(tensors))
    scores = torch.empty(problem.scores_shape, dtype=problem.scores_dtype, device=problem.device)
    argmax = torch.empty(problem.argmax_shape, dtype=problem.argmax_dtype, device=problem.device)
    results, least = Results(scores, argmax, torch.empty_like(scores)), _LEAST[normalizer]
    if problem.is_empty:
        scores = with_empty_score(scores.zero_(), tensors, options.empty_score)
        return Results(scores, argmax.fill_(-1), results.divisors.fill_(least))
    rule = Rule(min(k, problem.n_tokens), normalizer == "positive", least)
    number = max(1, _MAXIMA_AT_ONCE // (max(problem.n_documents, _BESIDE_MAXIMA) * problem.query_length))
    compute = kernels().xtr_scores if chosen == "triton" else _scores_in_blocks
    compute(problem, tensors, rule, number, results)
    return results


def _scores_in_blocks(problem: Problem, tensors: Tensors, rule: Rule, number: int, to: Results) -> None:
    """Leave the results in `to`, `number` queries at a time, and of those some tokens; no size is 0."""
    step = max(1, block_budget(problem.device) // problem.n_tokens)
    with without_autocast(problem.device):
        for _, (queries, documents, mask, active, *_), results in in_chunks(problem, tensors, to, number):
            blocks = [_retrieve(rows, documents, active, rule) for rows in queries.flatten(0, 1).split(step)]
            best, argmax, counts = (torch.cat(parts, dim=1) for parts in zip(*blocks, strict=True))
            if mask is not None:
                counts &= mask.flatten() != 0
            best = best.where(counts, 0.0)
            if mask is not None and mask.is_floating_point():
                best = best * mask.flatten()
            counted = (best > 0) if rule.with_whole else counts
            sums, divisors = (
                values.unflatten(1, (len(queries), -1)).sum(dim=2, dtype=best.dtype).T for values in (best, counted)
            )
            results.divisors.copy_(divisors).clamp_(min=rule.least)
            results.scores.copy_(sums).div_(results.divisors)
            results.argmax.copy_(argmax.where(counts, -1))
    to.scores.copy_(with_empty_score(to.scores, tensors, problem.empty_score))


def _retrieve(rows: Tensor, documents: Tensor, active: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """The best similarity of rows [R, d] with every document [Nd, R], its argmax, and whether it counts.

    A row retrieves what lies above its threshold, the k-th largest similarity, and of what equals it the first ones.
    `active` [Nd, Ld] is bool. Of documents with no active token nothing counts.
    """
    n_documents, length, _ = documents.shape
    similarities = inner_products(documents.flatten(0, 1), rows).T.contiguous()
    n_active = torch.full((n_documents,), length, device=rows.device)
    if active is not None:
        similarities.masked_fill_(~active.flatten(), -torch.inf)
        n_active = active.sum(dim=1)
    # -inf where masked tokens are left to be retrieved; then all active ones are.
    highest = similarities.topk(rule.k, dim=1, sorted=False).values
    thresholds = highest.masked_fill_(highest.isnan(), torch.inf).amin(dim=1, keepdim=True)
    best, argmax = similarities.unflatten(1, (n_documents, length)).max(dim=2)
    nan = best.isnan()
    counts = ((best >= thresholds) | nan) & (n_active > 0)
    # A token that was not retrieved counts as 0, and wins over negative ones.
    loses = (best <= 0) if rule.with_whole else torch.zeros_like(counts)
    below = similarities < thresholds
    # Rows of which not all that equals the threshold is retrieved, or documents as a whole with a negative best.
    tallied = similarities.shape[1] - below.sum(dim=1, keepdim=True, dtype=torch.int32) > rule.k
    if rule.with_whole:
        tallied |= thresholds <= 0
    # To know that there is none, a GPU would be waited for.
    if similarities.device.type != "cpu" or tallied.any():
        equal = similarities == thresholds
        above = ~(below | equal)
        if active is not None:
            equal &= active.flatten()
        above, equal = (
            each.unflatten(1, (n_documents, length)).sum(dim=2, dtype=torch.int32) for each in (above, equal)
        )
        retrieved = retrieved_of(above, equal, rule.k - above.sum(dim=1, keepdim=True, dtype=torch.int32))
        counts &= (retrieved > 0) | ~tallied | nan
        # Masked tokens come after all active ones, in their order.
        masked = length - n_active
        complete = (masked == 0) | (masked.cumsum(0) <= rule.k - n_active.sum())
        loses &= ~(tallied & (retrieved >= n_active) & complete)
    return best.T, argmax.T, (counts & ~loses).T


def retrieved_of(above: Tensor, equal: Tensor, n_equal: Tensor) -> Tensor:
    """How many tokens of each document a row retrieves [R, Nd].

    These are the `above` [R, Nd] its threshold, and of those `equal` [R, Nd] to it the first `n_equal` [R, 1].
    """
    before = equal.cumsum(dim=1, dtype=torch.int32) - equal
    return above + (n_equal - before).clamp(min=0).minimum(equal)


def _compute_gradients(
    grad_scores: Tensor, saved: Sequence[Tensor], arguments: tuple, needs: tuple[bool, bool]
) -> tuple[Tensor | None, ...]:
    argmax, divisors = saved
    return compute_gradients(*call_of(arguments[:-2]), grad_scores / divisors, argmax, *needs)


def _shapes(*arguments) -> tuple[Tensor, Tensor, Tensor]:
    scores, argmax = checked_shapes(*call_of(arguments[:-2]))
    return scores, argmax, torch.empty_like(scores)


_xtr = Operation(
    "xtr_scores",
    f"{CALL_SCHEMA}, SymInt k, str normalizer",
    ("queries", "documents"),
    ("argmax", "divisors"),
    _check,
    _compute,
    _compute_gradients,
    _shapes,
)
