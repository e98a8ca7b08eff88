"""MaxSim of chosen query tokens: every document meets only those tokens of a query that were chosen for it.

    score[i, j] = sum over s in query_tokens[i, j] of  max over active t of  <queries[i, s], documents[j, t]>

That is what reranking with pruned queries computes. `maxsim_sparse_queries_reference` is the definition, in plain
torch. `maxsim_sparse_queries` takes no products of tokens that were not chosen: by a Triton kernel on CUDA
(`kernels.sparse`), which gathers the rows of the query for each document, and in blocks of plain torch elsewhere.

The gradient is that of `maxsim`, where tokens that were not chosen have no winner.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.select import choose
from .blocked import Inputs, block_budget, blocked_forward
from .checks import check_tensor, is_readable
from .compute import blocked_inputs, kernels, weighted, with_empty_score
from .maxsim import checked, maxsim_gradients, maxsim_reference, needs_gradient
from .problem import Options, Problem, Tensors, check, problem_of, sizes_of, winners_dtype


def maxsim_sparse_queries_reference(
    queries: Tensor,
    documents: Tensor,
    query_tokens: Tensor,
    *,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    normalize: bool = False,
    reduction: str = "sum",
    masking: str = "exclude",
    empty_score: float = 0.0,
) -> Tensor:
    """The definition of `maxsim_sparse_queries`, in plain torch: `maxsim` of every pair, its other tokens masked.

    Arguments and result are those of `maxsim_sparse_queries`, except that it checks nothing, and computes in, and
    returns, the type that the inputs widen to: float64 for float64 inputs, else float32.
    """
    chosen = _chosen(query_tokens, queries)
    pairs = chosen.shape[:2]
    on = queries.new_ones(queries.shape[:2]) if queries_mask is None else queries_mask
    there = None if documents_mask is None else documents_mask.expand(*pairs, -1).flatten(0, 1).unsqueeze(1)
    scores = maxsim_reference(
        queries.unsqueeze(1).expand(*pairs, -1, -1).flatten(0, 1),
        documents.expand(*pairs, -1, -1).flatten(0, 1).unsqueeze(1),
        queries_mask=(on.unsqueeze(1) * chosen).flatten(0, 1),
        documents_mask=there,
        normalize=normalize,
        reduction=reduction,
        masking=masking,
        empty_score=empty_score,
    )
    return scores.view(pairs)


def maxsim_sparse_queries(
    queries: Tensor,
    documents: Tensor,
    query_tokens: Tensor,
    *,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    normalize: bool = False,
    reduction: str = "sum",
    masking: str = "exclude",
    empty_score: float = 0.0,
    implementation: str = "auto",
) -> Tensor:
    """MaxSim scores of the query tokens that are chosen for each document, differentiable.

    Parameters
    ----------
    queries
        [Nq, Lq, d], of the types that `maxsim` takes.
    documents
        [Nd, Ld, d]: every query meets every document. [Nq, K, Ld, d]: each query meets its own K candidates.
    query_tokens
        The positions, from 0 to Lq - 1, of the query tokens that a document is scored by, int32 or int64: [Nq, Nd, k],
        of every pair, or [Nq, K, k] with candidates; [Nd, k]: the same positions in every query. -1 chooses none, so
        that documents may have fewer than k. A token that is named twice counts once. Other values are an error on the
        CPU. On a GPU, where to look would be to wait, they choose none.
    queries_mask
        [Nq, Lq], which may hold weights, as in `maxsim`: a masked token adds nothing where it is chosen.
    documents_mask
        [Nd, Ld] or [Nq, K, Ld], as in `maxsim`.
    normalize, masking, empty_score, implementation
        As in `maxsim`.
    reduction
        "sum" over the chosen tokens that are active, or "mean": divided by their number.

    Returns
    -------
    Tensor
        float32, [Nq, Nd] or [Nq, K]; precision, NaN, ties and gradients as in `maxsim`. A document of which no token is
        chosen scores 0. Scores and gradients are bitwise reproducible.

    Raises
    ------
    TypeError
        As in `maxsim`; also if query_tokens is no tensor of int32 or int64.
    ValueError
        As in `maxsim`; also if query_tokens has another shape or device than named above, or holds values that it may
        not.
    RuntimeError
        As in `maxsim`.

    Examples
    --------
    >>> import torch
    >>> queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> documents = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, -1.0], [-1.0, 0.0]]])
    >>> maxsim_sparse_queries(queries, documents, torch.tensor([[1, 0], [1, -1]]))
    tensor([[1.5000, 0.0000]])
    >>> maxsim_sparse_queries(queries, documents, torch.tensor([[0], [0]]))
    tensor([[1., 0.]])
    """
    check_tensor("queries", queries, {3: "[Nq, Lq, d]"})
    check_tensor("documents", documents, {3: "[Nd, Ld, d]", 4: "[Nq, K, Ld, d]"})
    options = Options(0, 0, 0, bool(normalize), reduction, masking, empty_score, implementation)
    if not isinstance(query_tokens, Tensor):
        raise TypeError(f"query_tokens must be a torch.Tensor, got {type(query_tokens).__name__}")
    tensors = checked("maxsim_sparse_queries", Tensors(queries, documents, queries_mask, documents_mask), options)
    mean = reduction == "mean"
    scores, _ = _sparse_queries(
        *tensors[:2], query_tokens, *tensors[2:4], bool(normalize), masking, 0.0 if mean else empty_score,
        implementation, needs_gradient(*tensors[:2]),
    )  # fmt: skip
    if not mean:
        return scores
    counted = _chosen(query_tokens, queries)
    if queries_mask is not None:
        counted = counted & (queries_mask != 0).unsqueeze(1)
    # The score of an empty document is not divided.
    return with_empty_score(scores / counted.sum(dim=-1).clamp(min=1), tensors, empty_score)


def _chosen(query_tokens: Tensor, queries: Tensor) -> Tensor:
    """[Nq, Nd or K, Lq], bool: whether a query token is chosen for a document."""
    n_queries, length = queries.shape[:2]
    query_tokens = _positions(query_tokens, queries).long()
    chosen = query_tokens.new_zeros(*query_tokens.shape[:-1], length + 1, dtype=torch.bool)
    # In the last place, what chooses none.
    chosen.scatter_(-1, torch.where(query_tokens < 0, length, query_tokens), True)
    return chosen[..., :length].expand(n_queries, -1, -1)


def _positions(query_tokens: Tensor, queries: Tensor) -> Tensor:
    """The same with -1 where it chooses none: past the end of a query too."""
    return torch.where((query_tokens >= 0) & (query_tokens < queries.shape[1]), query_tokens, -1)


_LIBRARY = torch.library.Library("pylate_flash", "FRAGMENT")
# Scores, and the winners that a gradient flows to, of no elements unless they are asked for.
_LIBRARY.define(
    "maxsim_sparse_queries(Tensor queries, Tensor documents, Tensor query_tokens, Tensor? queries_mask, "
    "Tensor? documents_mask, bool normalize, str masking, float empty_score, str implementation, bool with_winners) "
    "-> (Tensor, Tensor)"
)
_sparse_queries = torch.ops.pylate_flash.maxsim_sparse_queries.default


def _check_query_tokens(query_tokens: Tensor, tensors: Tensors) -> None:
    """Raise unless these are positions of query tokens for each document."""
    queries, documents = tensors[:2]
    if query_tokens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"query_tokens must be int32 or int64, got {query_tokens.dtype}")
    if query_tokens.device != queries.device:
        raise ValueError(f"query_tokens must be on {queries.device}, got {query_tokens.device}")
    n_queries, n_documents, shape = queries.shape[0], documents.shape[-3], query_tokens.shape
    alike = documents.dim() == 3
    if shape[:-1] != (n_queries, n_documents) and not (alike and shape[:-1] == (n_documents,)):
        raise ValueError(
            f"query_tokens must have shape [{n_queries}, {n_documents}, k]"
            f"{f' or [{n_documents}, k]' if alike else ''}, got {list(shape)}"
        )
    if not is_readable(query_tokens):
        return
    length = queries.shape[1]
    wrong = query_tokens[(query_tokens < -1) | (query_tokens >= length)]
    if wrong.numel():
        raise ValueError(
            f"query_tokens must hold positions from 0 to {length - 1}, or -1 for none, got {wrong[0].item()}"
        )


def _scores(
    queries: Tensor,
    documents: Tensor,
    query_tokens: Tensor,
    queries_mask: Tensor | None,
    documents_mask: Tensor | None,
    normalize: bool,
    masking: str,
    empty_score: float,
    implementation: str,
    with_winners: bool,
) -> tuple[Tensor, Tensor]:
    tensors = Tensors(queries, documents, queries_mask, documents_mask)
    options = Options(normalize=normalize, masking=masking, empty_score=empty_score)
    problem = problem_of(tensors, options, with_winners)
    _check_query_tokens(query_tokens, tensors)
    chosen = choose(implementation, problem.device, problem.dtype, problem.size)
    winners = queries.new_empty(0, dtype=problem.winners_dtype)
    if with_winners:
        winners = torch.full(problem.winners_shape, -1, dtype=problem.winners_dtype, device=problem.device)
    if problem.is_empty or query_tokens.numel() == 0:
        scores = torch.zeros(problem.scores_shape, device=problem.device)
        return with_empty_score(scores, tensors, empty_score), winners
    query_tokens = query_tokens.expand(problem.n_queries, -1, -1)
    found = winners if with_winners else None
    if chosen == "triton":
        return kernels().sparse_scores(problem, tensors, query_tokens, found), winners
    # Under autocast the inputs have the autocast type already; the products inside must not be rounded to it.
    with torch.autocast(problem.device.type, enabled=False):
        scores = _in_blocks(problem, tensors, _positions(query_tokens, queries), found)
    return with_empty_score(scores.float(), tensors, empty_score), winners


def _in_blocks(problem: Problem, tensors: Tensors, query_tokens: Tensor, winners: Tensor | None) -> Tensor:
    """Scores in the accumulation dtype, in blocks of plain torch: gathered query tokens [documents, k, d] as pairs.

    `query_tokens` [Nq, Nd or K, k]. Winners are written into `winners`, which holds -1.
    """
    given = weighted(*blocked_inputs(problem, tensors))
    length, (n_groups, n_documents) = problem.query_length, given.documents.shape[:2]
    step = max(1, block_budget(problem.device) // (query_tokens.shape[-1] * problem.size))
    scores = []
    for query in range(problem.n_queries):
        group = query if n_groups > 1 else 0
        for first in range(0, n_documents, step):
            block = slice(first, first + step)
            chosen = query_tokens[query, block].sort(dim=-1).values
            counted = chosen >= 0
            counted[:, 1:] &= chosen[:, 1:] != chosen[:, :-1]
            chosen = chosen.clamp(min=0).long()
            mask = counted if given.queries_mask is None else counted & given.queries_mask[query][chosen]
            pairs = Inputs(
                given.queries[query][chosen],
                given.documents[group, block].unsqueeze(1),
                mask,
                None if given.documents_mask is None else given.documents_mask[group, block].unsqueeze(1),
                None if given.queries_scale is None else given.queries_scale[query][chosen],
                None if given.documents_scale is None else given.documents_scale[group, block].unsqueeze(1),
            )
            of_block, found = blocked_forward(pairs, problem.kind.zero_masked, winners is not None)
            scores.append(of_block.squeeze(1))
            if winners is not None and found is not None:
                # In the last place, what does not count.
                placed = winners.new_full((len(chosen), length + 1), -1)
                placed.scatter_(1, torch.where(counted, chosen, length), found.squeeze(1).to(winners.dtype))
                of_query = winners.view(-1, n_documents, problem.rows)[group, block]
                start = 0 if problem.groups > 1 else query * length
                of_query[:, start : start + length] = placed[:, :length]
    return torch.cat(scores).view(problem.scores_shape)


def _backward(ctx, grad_scores: Tensor, _winners: Tensor | None) -> tuple:
    queries, documents, queries_mask, documents_mask, winners = ctx.saved_tensors
    needs = ctx.needs_input_grad[:2]
    tensors = Tensors(queries, documents, queries_mask, documents_mask)
    found = maxsim_gradients(grad_scores, winners, tensors, ctx.options, *needs)
    return *(gradient if need else None for gradient, need in zip(found, needs, strict=True)), *(None,) * 8


def _setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    queries, documents, _, queries_mask, documents_mask, normalize, masking, _, implementation, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(queries, documents, queries_mask, documents_mask, output[1])
    ctx.options = Options(normalize=normalize, masking=masking, implementation=implementation)


def _shapes(
    queries: Tensor,
    documents: Tensor,
    query_tokens: Tensor,
    queries_mask: Tensor | None,
    documents_mask: Tensor | None,
    *options,
) -> tuple[Tensor, Tensor]:
    """Uninitialised scores and winners."""
    tensors = Tensors(queries, documents, queries_mask, documents_mask)
    check(tensors)
    _check_query_tokens(query_tokens, tensors)
    sizes = sizes_of(tensors, Options())
    scores = queries.new_empty(sizes.scores_shape, dtype=torch.float32)
    shape = sizes.winners_shape if options[-1] else (0,)
    return scores, queries.new_empty(shape, dtype=winners_dtype(sizes.document_length))


_LIBRARY.impl("maxsim_sparse_queries", _scores, "CompositeExplicitAutograd")
torch.library.register_fake("pylate_flash::maxsim_sparse_queries", _shapes)
torch.library.register_autograd("pylate_flash::maxsim_sparse_queries", _backward, setup_context=_setup_context)
