"""XTR scores: each query token retrieves its k best document tokens of the entire batch, and only these score.

    score[i, j] = sum over s of best[i, s, j] / Z[i, j],   best[i, s, j] = max over retrieved t of <q[i, s], d[j, t]>

(Lee et al., "Rethinking the Role of Token Retrieval in Multi-Vector Retrieval", NeurIPS 2023.) If a query
token retrieves no token of a document, it contributes 0. `xtr_scores_reference` defines the two normalizers Z. A query
token retrieves every token that reaches its k-th largest similarity, and only a document's best token scores. So
`xtr_scores` compares the maxima [Nd, Nq * Lq] with the thresholds [Nq * Lq]; similarities are recomputed instead of
stored. The gradient is that of `maxsim` of scores divided by Z, restricted to the argmaxes that count; thresholds and Z
are constant as long as the retrieved set does not change.
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
# Lower bound of Z: PyLate's, and sentence-transformers'.
_LEAST = {"positive": 1e-3, "retrieved": 1.0}
# Maxima (query tokens x documents) computed at once. The other scratch of kernels per query token takes as much memory
# as the maxima of _BESIDE_MAXIMA documents.
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
    """The definition of `xtr_scores`, in plain torch, in the dtype that `maxsim_reference` computes in."""
    dtype = torch.promote_types(queries.dtype, torch.float32)
    (n_queries, query_length, _), (n_documents, length, _) = queries.shape, documents.shape
    q_active = queries.new_ones(queries.shape[:-1]) if queries_mask is None else queries_mask
    d_active = documents.new_ones(documents.shape[:-1]) if documents_mask is None else documents_mask
    weights, q_active, d_active = q_active.to(dtype).unsqueeze(-1), q_active.bool().unsqueeze(-1), d_active.bool()
    queries = queries.to(dtype).masked_fill(~q_active, 0.0)
    documents = documents.to(dtype).masked_fill(~d_active.unsqueeze(-1), 0.0)
    similarities = queries.flatten(0, 1) @ documents.flatten(0, 1).T
    # Order: NaN first, then by similarity (stable, so the lowest index wins ties), and masked tokens last.
    order = similarities.detach().sort(dim=-1, descending=True, stable=True).indices
    masked = ~d_active.flatten()[order]
    order = order.gather(-1, masked.to(torch.uint8).sort(dim=-1, stable=True).indices)
    retrieved = torch.zeros_like(similarities, dtype=torch.bool).scatter(-1, order[:, :k], True)
    retrieved |= similarities.isnan() & d_active.flatten()
    # [Nq, Lq, Nd, Ld]
    similarities, retrieved = (x.view(n_queries, query_length, n_documents, length) for x in (similarities, retrieved))
    scoring = retrieved & d_active
    padded = torch.nn.functional.pad(similarities.masked_fill(~scoring, -torch.inf), (0, 1), value=-torch.inf)
    best, counts = padded.max(dim=-1).values, scoring.any(dim=-1) & q_active
    if normalizer == "positive":
        # A token that was not retrieved counts as 0, and wins over negative similarities.
        counts &= ~(best <= 0) | retrieved.all(dim=-1)
    best = best.masked_fill(~counts, 0.0) * weights
    counted = (best > 0) if normalizer == "positive" else counts
    divisors = counted.sum(dim=1, dtype=dtype).clamp(min=_LEAST[normalizer])
    return (best.sum(dim=1) / divisors).masked_fill(~d_active.any(dim=-1), empty_score)


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

    Each query token retrieves the k most similar tokens of all documents. The score of a document is the sum over query
    tokens of the best similarity among its retrieved tokens, divided by a normalizer.

    Parameters
    ----------
    queries
        [Nq, Lq, d], float16, bfloat16, float32 or float64. Under autocast, the inputs take the autocast type.
    documents
        [Nd, Ld, d]: every query token retrieves from all of them.
    k
        Number of document tokens that each query token retrieves, at least 1; all, if there are fewer. Ties go to the
        lowest index, counted across all documents.
    queries_mask, documents_mask
        [Nq, Lq], which may hold weights, and [Nd, Ld], as in `maxsim`. A masked document token is retrieved after all
        active ones, and never scores.
    normalizer
        "positive", as in PyLate: a document token that is not retrieved counts as 0, which wins over negative
        similarities, and the sum is divided by the number of query tokens whose best for the document is positive, at
        least 0.001. "retrieved", as in sentence-transformers and the XTR paper: retrieved tokens score regardless of
        sign, and the sum is divided by the number of query tokens that retrieved a token of the document, at least 1.
    empty_score, implementation
        As in `maxsim`.

    Returns
    -------
    Tensor
        [Nq, Nd]; dtype and precision as in `maxsim`. NaN in an active token makes the scores of its document or query
        NaN. The gradient flows only to the best retrieved token, the one of lowest index for ties, and not through
        the selection or the normalizer. Scores and gradients are bitwise reproducible.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `maxsim`; also if k is not an integer, or less than 1, or `normalizer` is not one of its choices.

    Examples
    --------
    >>> queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> documents = torch.tensor([[[0.9, 0.1], [0.8, 0.2]], [[0.1, 0.7], [0.0, 0.6]]])
    >>> xtr_scores(queries, documents, k=2)
    tensor([[0.9000, 0.7000]])
    """
    # Clamp to the largest integer that an operator takes, which exceeds any number of tokens.
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
    """Scores, the tokens that receive a gradient, and the divisors of the scores."""
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


def _scores_in_blocks(problem: Problem, tensors: Tensors, rule: Rule, number: int, output: Results) -> None:
    """Write the results to `output`, for `number` queries at a time and blocks of their tokens; no size is 0."""
    step = max(1, block_budget(problem.device) // problem.n_tokens)
    with without_autocast(problem.device):
        for _, (queries, documents, mask, active, *_), results in in_chunks(problem, tensors, output, number):
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
    output.scores.copy_(with_empty_score(output.scores, tensors, problem.empty_score))


def _retrieve(rows: Tensor, documents: Tensor, active: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """The best similarity of rows [R, d] with every document [Nd, R], its argmax, and whether it counts.

    A row retrieves every token above its threshold, the k-th largest similarity, and the first ones equal to it.
    `active` [Nd, Ld] is bool. Nothing counts for documents without an active token.
    """
    n_documents, length, _ = documents.shape
    similarities = inner_products(documents.flatten(0, 1), rows).T.contiguous()
    n_active = torch.full((n_documents,), length, device=rows.device)
    if active is not None:
        similarities.masked_fill_(~active.flatten(), -torch.inf)
        n_active = active.sum(dim=1)
    # The threshold is -inf if a row retrieves masked tokens too; then it retrieves all active ones.
    highest = similarities.topk(rule.k, dim=1, sorted=False).values
    thresholds = highest.masked_fill_(highest.isnan(), torch.inf).amin(dim=1, keepdim=True)
    best, argmax = similarities.unflatten(1, (n_documents, length)).max(dim=2)
    # A masked token may be the first of those at -inf.
    argmax.masked_fill_(best == -torch.inf, -1)
    nan = best.isnan()
    counts = ((best >= thresholds) | nan) & (n_active > 0)
    # A token that was not retrieved counts as 0, and wins over negative similarities.
    loses = (best <= 0) if rule.with_whole else torch.zeros_like(counts)
    below = similarities < thresholds
    # Rows that need counts: some ties with the threshold are not retrieved, or a full document may have best <= 0.
    tallied = similarities.shape[1] - below.sum(dim=1, keepdim=True, dtype=torch.int32) > rule.k
    if rule.with_whole:
        tallied |= thresholds <= 0
    # On a GPU, testing for such rows would synchronize.
    if similarities.device.type != "cpu" or tallied.any():
        equal = similarities == thresholds
        above = ~(below | equal)
        if active is not None:
            equal &= active.flatten()
        above, equal = (
            hits.unflatten(1, (n_documents, length)).sum(dim=2, dtype=torch.int32) for hits in (above, equal)
        )
        retrieved = retrieved_of(above, equal, rule.k - above.sum(dim=1, keepdim=True, dtype=torch.int32))
        counts &= (retrieved > 0) | ~tallied | nan
        # Masked tokens are retrieved after all active ones, in index order.
        masked = length - n_active
        complete = (masked == 0) | (masked.cumsum(0) <= rule.k - n_active.sum())
        loses &= ~(tallied & (retrieved >= n_active) & complete)
    return best.T, argmax.T, (counts & ~loses).T


def retrieved_of(above: Tensor, equal: Tensor, n_equal: Tensor) -> Tensor:
    """Number of tokens of each document that a row retrieves [R, Nd].

    A row retrieves all `above` [R, Nd] its threshold, and the first `n_equal` [R, 1] of those `equal` [R, Nd] to it.
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
