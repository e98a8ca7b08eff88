"""MaxSim, the score of late interaction: for every query token its best document token, summed over the query.

    score[i, j] = sum over active s of  max over active t of  <queries[i, s], documents[j, t]>

(Khattab and Zaharia, "ColBERT", SIGIR 2020.) `maxsim_reference` is the definition, in plain torch. `maxsim` and
`maxsim_pairwise` compute the same without its [Nq, Nd, Lq, Ld] tensor: by Triton kernels on CUDA (`kernels.forward`),
and in blocks of plain torch elsewhere (`ops.blocked`).

The gradient of a maximum flows to the token that attains it, so where one is needed the forward keeps the winners
[documents, rows] (-1: no gradient), and the backward moves rows between winners and query tokens.

The operator `pylate_flash::maxsim` is the one way in, eager and compiled, for padded and packed tokens alike: it takes
the fields of `Tensors` and of `Options`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels.plan import IMPLEMENTATIONS
from ..problem import Options, Tensors, empty_results
from .checks import (
    FLOATING,
    check,
    check_choice,
    check_differentiation,
    check_mask_layout,
    check_tensor,
    checked_flag,
    checked_number,
)
from .compute import compute, compute_gradients
from .norms import normalized
from .operator import Operation
from .quantization import QuantizedEmbeddings

REDUCTIONS = ("sum", "mean")
MASKINGS = ("exclude", "zero")


def maxsim_reference(
    queries: Tensor,
    documents: Tensor,
    *,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    normalize: bool = False,
    reduction: str = "sum",
    masking: str = "exclude",
    empty_score: float = 0.0,
) -> Tensor:
    """The definition of `maxsim`, in plain torch: builds the whole similarity tensor, and autograd differentiates it.

    Arguments and result are those of `maxsim`, except that it checks nothing, and computes in, and returns, the type
    that the inputs widen to: float64 for float64 inputs, else float32. Products are taken in that type.
    """
    return reference_scores(
        queries, documents, queries_mask, documents_mask, normalize, reduction, masking, empty_score
    )


def reference_scores(
    queries: Tensor,
    documents: Tensor,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    normalize: bool = False,
    reduction: str = "sum",
    masking: str = "exclude",
    empty_score: float = 0.0,
    maximum: Callable[[Tensor], Tensor] = lambda similarities: similarities.max(dim=-1).values,
    scale: float | Tensor = 1.0,
) -> Tensor:
    """`maxsim_reference` with another maximum, over the last dimension, of scaled similarities."""
    wide = torch.promote_types(queries.dtype, torch.float32)
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
    similarities = scale * (queries.unsqueeze(1) @ groups.transpose(-1, -2))
    similarities = similarities.masked_fill(~there.unsqueeze(-2), 0.0 if masking == "zero" else -torch.inf)
    # One more token, which takes no part unless it is alone, as there is no maximum of none.
    empty = ~there.any(dim=-1)
    alone = torch.where(empty, 0.0, -torch.inf).to(wide)[..., None, None].expand(*similarities.shape[:-1], 1)
    best = maximum(torch.cat([similarities, alone], dim=-1))
    best = best.masked_fill(empty.unsqueeze(-1) | ~on.unsqueeze(1), 0.0)
    scores = (best * weights.unsqueeze(1)).sum(dim=-1)
    if reduction == "mean":
        scores = scores / on.sum(dim=-1, keepdim=True).clamp(min=1)
    return scores.masked_fill(empty, empty_score)


def maxsim(
    queries: Tensor,
    documents: Tensor | QuantizedEmbeddings,
    *,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    normalize: bool = False,
    reduction: str = "sum",
    masking: str = "exclude",
    empty_score: float = 0.0,
    quantize_queries: bool = True,
    implementation: str = "auto",
) -> Tensor:
    """MaxSim scores of queries against documents, differentiable, in memory that does not grow with Lq * Ld.

    Parameters
    ----------
    queries
        [Nq, Lq, d], float16, bfloat16, float32 or float64. Under autocast, the inputs take the autocast type.
    documents
        [Nd, Ld, d]: every query meets every document. [Nq, K, Ld, d]: each query meets its own K candidates. Of the
        type of the queries, or quantized to 8 bits (`quantize`): then there is no gradient, and scores are those of the
        dequantized embeddings.
    queries_mask
        [Nq, Lq], bool or 0/1 of uint8, a signed integer or a floating dtype of at least 16 bits, 1 where a token is
        active; active tokens need not be a prefix. None: all. A floating mask may hold weights: a token's best
        similarity counts that many times in the sum. No gradient flows to them. Negative and infinite weights, NaN, and
        integers other than 0 and 1 are an error on the CPU. On a GPU, where to look would be to wait, such a weight is
        taken as it is, and such an integer counts as 1.
    documents_mask
        [Nd, Ld] or [Nq, K, Ld], bool or 0/1 of these dtypes. None: all. Other values are an error on the CPU, and
        count as 1 on a GPU.
    normalize
        Divide every embedding by its Euclidean norm (at least 1e-12) first. Infinite norms are NaN, and so are
        those of 2**64 and more on a GPU.
    reduction
        "sum" over the active query tokens, or "mean": divided by their number (MeanMaxSim).
    masking
        "exclude": a masked document token never wins. "zero": its similarity counts as 0, as in PyLate's torch scorer,
        so that a query token's best is at least 0 where the document has a masked token; where that 0 wins, no gradient
        flows.
    empty_score
        Score of a document with no active token: 0 as in PyLate, or a large negative number to rank it last. A query
        with no active token scores 0 against every other document.
    quantize_queries
        Of quantized documents only. True: queries are quantized too, to fp8 where documents are, else to int8, and
        tensor cores multiply 8 bits, at twice the rate of 16; scores are those of dequantized queries. That changes a
        similarity about as much as quantizing the documents did. False: queries keep their type, to which documents
        are widened while they are multiplied.
    implementation
        "auto", or by name: "triton" (CUDA, compute capability >= 8.0, 8.9 for fp8, at most 4096 dimensions, no float64)
        or "blocked" (plain torch in blocks). `explain` tells which it is, and why.

    Returns
    -------
    Tensor
        [Nq, Nd] or [Nq, K], float32, or float64 for float64 inputs. Half inputs multiply in their own type and
        accumulate in float32; float32 inputs follow `torch.get_float32_matmul_precision()`. NaN in an active token
        gives NaN, and infinities behave as in a product of torch. Ties go to the lowest token index, except that a
        CPU's products may round the similarities of two equal tokens to different last bits, and the gradient flows to
        the winner only. Scores and gradients are bitwise reproducible. Products of fp8 are summed with about 13 bits by
        tensor cores, a relative error of up to 1e-3.

    Raises
    ------
    TypeError
        If an argument is no dense tensor, of another dtype than named above, or the two dtypes differ.
    ValueError
        If shapes, devices or embedding sizes do not fit together, a mask holds values that it may not, or requires a
        gradient, an option is none of its choices, or an implementation asked for by name cannot take the input.
    RuntimeError
        If the call is differentiated by `torch.func`, in forward mode, or twice; or with quantized documents at all.

    Examples
    --------
    >>> import torch
    >>> queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> documents = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, -1.0], [-1.0, 0.0]]])
    >>> maxsim(queries, documents)
    tensor([[1.5000, 0.0000]])
    """
    # Those of `Options`, of which there is no need to make one where the call is repeated.
    options = 0, 0, 0, checked_flag("normalize", normalize), reduction, masking, empty_score, implementation
    if isinstance(documents, QuantizedEmbeddings):
        # It builds on this module.
        from .quantized import scores_of_quantized

        tensors = Tensors(queries, documents.values, queries_mask, documents_mask)
        return scores_of_quantized("maxsim", tensors, Options(*options), documents, quantize_queries)
    return _maxsim((queries, documents, queries_mask, documents_mask, None, None, None, *options), "maxsim")


def maxsim_pairwise(
    queries: Tensor,
    documents: Tensor,
    *,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    normalize: bool = False,
    reduction: str = "sum",
    masking: str = "exclude",
    empty_score: float = 0.0,
    implementation: str = "auto",
) -> Tensor:
    """MaxSim score of every query with the document of the same index: the diagonal of `maxsim`.

    Parameters
    ----------
    queries
        [N, Lq, d], of the types that `maxsim` takes.
    documents
        [N, Ld, d].
    queries_mask, documents_mask
        [N, Lq], which may hold weights, and [N, Ld], or None, as in `maxsim`.
    normalize, reduction, masking, empty_score, implementation
        As in `maxsim`.

    Returns
    -------
    Tensor
        [N]; type, precision, NaN, ties and gradients as in `maxsim`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `maxsim`; ValueError also if there are not as many documents as queries.

    Examples
    --------
    >>> import torch
    >>> queries = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    >>> maxsim_pairwise(queries, torch.tensor([[[2.0, 0.0]], [[0.0, 3.0]]]))
    tensor([2., 3.])
    """
    options = 0, 0, 0, checked_flag("normalize", normalize), reduction, masking, empty_score, implementation
    arguments = queries, documents, queries_mask, documents_mask, None, None, None, *options
    return scores_of_arguments(arguments, "maxsim", _as_candidates).squeeze(1)


def _as_candidates(arguments: tuple) -> tuple:
    """Pairs as queries that have one candidate each."""
    queries, documents, queries_mask, documents_mask, *others = arguments
    check_tensor("queries", queries, {3: "[N, Lq, d]"})
    check_tensor("documents", documents, {3: "[N, Ld, d]"})
    if queries.shape[0] != documents.shape[0]:
        raise ValueError(
            f"documents must have one document per query, {queries.shape[0]}, got {documents.shape[0]} documents"
        )
    if documents_mask is not None:
        check_mask_layout("documents_mask", documents_mask, documents)
        documents_mask = documents_mask.unsqueeze(1)
    return queries, documents.unsqueeze(1), queries_mask, documents_mask, *others


def scores_of(operation: str, tensors: Tensors, options: Options) -> Tensor:
    """The scores of a call, by the name of what was called."""
    return scores_of_arguments((*tensors, *options), operation)


def scores_of_arguments(arguments: tuple, operation: str, prepare: Callable[[tuple], tuple] | None = None) -> Tensor:
    """The scores for the arguments of the operator, or for those that `prepare` makes them of (`Operation`)."""
    # Of packed documents without norms, kernels look at the boundaries alone.
    packed = 1 if arguments[_DOCUMENTS_CU_SEQLENS] is not None and not arguments[_NORMALIZE] else -1
    return _maxsim(arguments, operation, packed, prepare)


def checked(
    operation: str, tensors: Tensors, options: Options, implementations: tuple[str, ...] = IMPLEMENTATIONS
) -> Tensors:
    """What comes before an operator: checks of the options, and of what it would not take; autocast."""
    check_choice("reduction", options.reduction, REDUCTIONS)
    check_choice("masking", options.masking, MASKINGS)
    check_choice("implementation", options.implementation, implementations)
    checked_number("empty_score", options.empty_score)
    queries, documents, queries_mask, documents_mask = tensors[:4]
    check_tensor("queries", queries)
    check_tensor("documents", documents)
    if queries_mask is not None:
        check_tensor("queries_mask", queries_mask, otherwise=" or None")
    if documents_mask is not None:
        check_tensor("documents_mask", documents_mask, otherwise=" or None")
    check_differentiation(operation, queries, documents)
    cast = autocast(queries, documents)
    return tensors if cast[0] is queries and cast[1] is documents else Tensors(cast[0], cast[1], *tensors[2:])


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in the autocast type under autocast, which leaves float64 alone, as for torch's own operations.

    What are no embeddings stay what they are, for the checks to refuse.
    """
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple([tensor.to(dtype) if tensor.dtype in _AUTOCAST else tensor for tensor in tensors])


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
_N_TENSORS = len(Tensors._fields)
_DOCUMENTS_CU_SEQLENS = Tensors._fields.index("documents_cu_seqlens")
_NORMALIZE = _N_TENSORS + Options._fields.index("normalize")


def call_of(arguments: tuple) -> tuple[Tensors, Options]:
    """The call that has these arguments of the operator."""
    return Tensors(*arguments[:_N_TENSORS]), Options(*arguments[_N_TENSORS:])


def _check(arguments: tuple, called: str) -> tuple:
    tensors, options = call_of(arguments)
    used = checked(called, tensors, options)
    if type(options.empty_score) is not float:
        options = options._replace(empty_score=checked_number("empty_score", options.empty_score))
    return *used, *options


def _compute(arguments: tuple, with_winners: bool) -> tuple[Tensor, Tensor | None]:
    return compute(*call_of(arguments), with_winners)


def _compute_gradients(
    grad_scores: Tensor, saved: Sequence[Tensor], arguments: tuple, needs: tuple[bool, bool]
) -> tuple[Tensor | None, ...]:
    return compute_gradients(*call_of(arguments), grad_scores, saved[0], *needs)


def _shapes(*arguments) -> tuple[Tensor, Tensor]:
    tensors, options = call_of(arguments)
    check(tensors)
    return empty_results(tensors, options)


_maxsim = Operation(
    "maxsim", CALL_SCHEMA, ("queries", "documents"), ("winners",), _check, _compute, _compute_gradients, _shapes
)
