"""MaxSim with the semantics of sentence-transformers: `util.similarity` and `multi_vector_encoder.scoring`.

Scores are float32, or float64 for float64 embeddings. A masked token is ignored: it never wins, and adds nothing.
Without a mask, tokens of zeros in a padded batch count as masked; in a list, all tokens are active. A document without
tokens scores -1e9.

Differences from its own functions: half embeddings are multiplied exactly and accumulated in float32, where its own
round every similarity; embeddings of two floating dtypes are promoted, where its own raise an error; and weights of
query tokens must not be negative, infinite or NaN.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeGuard, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from ...ops.checks import check_same, checked_mask
from ...ops.maxsim_operator import scores_of_arguments, with_lengths
from ...ops.nonzero import nonzero_rows
from ...ops.ragged import maxsim_ragged, maxsim_ragged_pairwise
from ...problem import Options, Tensors
from .. import SENTENCE_TRANSFORMERS
from .operands import Operand, as_tensor, blocks, floating, mask_name, side, with_masks

__all__ = [
    "colbert_kd_scores",
    "colbert_scores",
    "colbert_scores_pairwise",
    "maxsim",
    "maxsim_pairwise",
    "mean_colbert_kd_scores",
    "mean_colbert_scores",
    "mean_colbert_scores_pairwise",
    "mean_maxsim",
    "mean_maxsim_pairwise",
]

logger = logging.getLogger(__name__)

Embeddings = list | np.ndarray | Tensor
Mask = Tensor | np.ndarray | list | None
# Arguments of the similarities and of the scores of losses, as errors name them.
_SIDES = "a", "b"
_EMBEDDINGS = "queries_embeddings", "documents_embeddings"
_Scores = TypeVar("_Scores", bound=Callable[..., Any])

# Score of a document without tokens, before the division by the number of query tokens.
EMPTY_DOCUMENT_SCORE = -1e9


def maxsim(
    a: Embeddings,
    b: Embeddings,
    a_mask: Mask = None,
    b_mask: Mask = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    device: str | torch.device | None = None,
) -> Tensor:
    """Score every query of `a` against every document of `b`: for each query token its best document token, summed.

    Parameters
    ----------
    a, b
        Queries and documents: a padded batch [N, L, d], a list of N [L_i, d], or one [L, d]; tensors or arrays, of
        floating or integer type.
    a_mask
        [Nq, Lq], also for a padded list, or a list of masks: 0 masks a token, other values are its weight.
    b_mask
        [Nd, Ld], likewise: 0 masks a token.
    chunk_elements
        Maximum number of embedding elements copied at once, to be packed or moved to `device`. None: 100 million. No
        similarities are stored, so they do not count.
    length_normalize
        Divide by the number of active query tokens, at least 1.
    device
        Device of the computation. None: that of `b`, or of `a` if `b` holds arrays.

    Returns
    -------
    Tensor
        [Nq, Nd], float32 or float64, differentiable, on the device of `b`, or of `a` if `b` holds arrays.

    Raises
    ------
    TypeError, ValueError
        If shapes or types do not fit.

    Examples
    --------
    >>> import torch
    >>> queries = [torch.tensor([[1.0, 0.0], [0.0, 1.0]])]
    >>> documents = [torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[0.0, -1.0]])]
    >>> maxsim(queries, documents)
    tensor([[ 1.5000, -1.0000]])
    """
    return _maxsim("maxsim", a, b, a_mask, b_mask, chunk_elements, length_normalize, device)


def maxsim_pairwise(
    a: Embeddings,
    b: Embeddings,
    a_mask: Mask = None,
    b_mask: Mask = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    device: str | torch.device | None = None,
) -> Tensor:
    """Score every query of `a` against the document of the same index in `b`: scores [N].

    Arguments, result and errors are those of `maxsim`; `a` and `b` must have the same number of items.

    Examples
    --------
    >>> import torch
    >>> maxsim_pairwise([torch.eye(2)], [torch.ones(3, 2)])
    tensor([2.])
    """
    return _maxsim("maxsim_pairwise", a, b, a_mask, b_mask, chunk_elements, length_normalize, device, pairs=True)


def colbert_scores(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Mask = None,
    documents_mask: Mask = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """Score every query against every document of every group in one call: the `similarity_fct` of the losses.

    Parameters
    ----------
    queries_embeddings
        [Nq, Lq, d], a tensor, an array, or a list of equally long ones.
    documents_embeddings
        [G, N, Ld, d], likewise: G groups of N documents.
    queries_mask
        [Nq, Lq]: 0 masks a token, other values are its weight. None: tokens of zeros are padding.
    documents_mask
        [G, N, Ld], or [1, N, Ld] for all groups: 0 masks a token. None: tokens of zeros are padding.
    chunk_elements
        Accepted for compatibility: nothing is copied here.
    length_normalize
        Divide by the number of active query tokens, at least 1.

    Returns
    -------
    Tensor
        [Nq, G * N], float32 or float64, differentiable; column g * N + n belongs to document n of group g.

    Raises
    ------
    TypeError, ValueError
        If shapes or types do not fit.

    Examples
    --------
    >>> import torch
    >>> colbert_scores(torch.ones(2, 1, 1), torch.tensor([1.0, 2.0, 3.0, 4.0]).view(2, 2, 1, 1))
    tensor([[1., 2., 3., 4.],
            [1., 2., 3., 4.]])
    """
    if _learns(queries_mask):
        return _original("colbert_scores")(
            queries_embeddings, documents_embeddings, queries_mask, documents_mask, chunk_elements, length_normalize
        )
    documents = _groups(documents_embeddings, documents_mask).flat()
    return _scores(_queries(queries_embeddings, queries_mask, documents.values.device), documents, length_normalize)


def colbert_scores_pairwise(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Mask = None,
    documents_mask: Mask = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """`maxsim_pairwise` with the parameter names of the losses' other score functions."""
    sides = queries_embeddings, documents_embeddings, queries_mask, documents_mask
    return _maxsim("maxsim_pairwise", *sides, chunk_elements, length_normalize, None, True, _EMBEDDINGS)


def colbert_kd_scores(
    queries_embeddings: Embeddings,
    documents_embeddings: Embeddings,
    queries_mask: Mask = None,
    documents_mask: Mask = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
) -> Tensor:
    """Score every query against its own candidates in one call: the `similarity_fct` of distillation.

    As `colbert_scores`, but for documents [Nq, K, Ld, d], K candidates of each query, with a mask [Nq, K, Ld] or
    [1, K, Ld]; the scores are [Nq, K].

    Examples
    --------
    >>> import torch
    >>> colbert_kd_scores(torch.ones(2, 1, 1), torch.tensor([1.0, 2.0, 3.0, 4.0]).view(2, 2, 1, 1))
    tensor([[1., 2.],
            [3., 4.]])
    """
    if _learns(queries_mask):
        return _original("colbert_kd_scores")(
            queries_embeddings, documents_embeddings, queries_mask, documents_mask, chunk_elements, length_normalize
        )
    documents = _groups(documents_embeddings, documents_mask)
    queries = _queries(queries_embeddings, queries_mask, documents.values.device)
    _check_candidates(len(queries.values), documents.values)
    return _scores(queries, documents, length_normalize)


def _mean(scores: _Scores) -> _Scores:
    """Copy a function with `length_normalize=True` as the default, so that no signature or call is written twice."""
    function = cast(FunctionType, scores)
    name = f"mean_{function.__name__}"
    # `length_normalize` is the only parameter with a bool default.
    defaults = tuple(True if value is False else value for value in function.__defaults__ or ())
    result = FunctionType(function.__code__, function.__globals__, name, defaults)
    result.__annotations__, result.__module__, result.__qualname__ = function.__annotations__, __name__, name
    result.__doc__ = f"`{function.__name__}` that divides by the number of query tokens, unless told otherwise."
    return cast(_Scores, result)


mean_maxsim = _mean(maxsim)
mean_maxsim_pairwise = _mean(maxsim_pairwise)
mean_colbert_scores = _mean(colbert_scores)
mean_colbert_scores_pairwise = _mean(colbert_scores_pairwise)
mean_colbert_kd_scores = _mean(colbert_kd_scores)


def _maxsim(
    name: str,
    a: Embeddings,
    b: Embeddings,
    a_mask: Mask,
    b_mask: Mask,
    chunk_elements: int | None,
    length_normalize: bool,
    device: str | torch.device | None,
    pairs: bool = False,
    names: tuple[str, str] = _SIDES,
) -> Tensor:
    """Implement `maxsim`, or with `pairs` `maxsim_pairwise`; `name` is that of the host's function.

    `names` are those of `a` and `b` in errors.
    """
    if _learns(a_mask):
        return _original(name)(a, b, a_mask, b_mask, chunk_elements, length_normalize, device)
    scores = _read_in_place(a, b, a_mask, b_mask, length_normalize, device, pairs, names)
    if scores is not None:
        return scores
    queries, documents = side(names[0], a, a_mask), side(names[1], b, b_mask)
    if pairs and len(queries) != len(documents):
        raise ValueError(
            f"{names[0]} and {names[1]} must hold the same number of items, to be paired, got {len(queries)} and "
            f"{len(documents)}"
        )
    home = documents.device or queries.device or torch.device("cpu")
    target_device = _placed(device, home)
    if len(queries) == 0 or len(documents) == 0:
        return torch.zeros((0,) if pairs else (len(queries), len(documents)), device=home)
    queries, documents = with_masks(queries, documents, target_device)
    all_queries = None if pairs else queries.operand(0, len(queries), target_device, documents.packs)
    parts = []
    for start, stop in blocks([queries, documents] if pairs else [documents], target_device, chunk_elements):
        chunk = queries.operand(start, stop, target_device, documents.packs) if all_queries is None else all_queries
        block = documents.operand(start, stop, target_device, True)
        chunk_scores = _scores(chunk, block, length_normalize, pairs, names)
        parts.append(chunk_scores.to(home))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=0 if pairs else 1)


def _scores(
    queries: Operand,
    documents: Operand,
    length_normalize: bool,
    pairs: bool = False,
    names: tuple[str, str] = _EMBEDDINGS,
) -> Tensor:
    """Score operands on one device: all pairs [Nq, Nd], candidates [Nq, K], or pairs [N]."""
    _warn_of_empty(documents)
    values, document_values = queries.values, documents.values
    if documents.cu_seqlens is not None and document_values.shape[0] == 0:
        # A list of empty documents has no embedding size.
        document_values = values.new_zeros(0, values.shape[-1])
    if queries.cu_seqlens is not None and values.shape[0] == 0:
        values = document_values.new_zeros(0, document_values.shape[-1])
    if values.dtype != document_values.dtype:
        dtype = torch.promote_types(values.dtype, document_values.dtype)
        values, document_values = values.to(dtype), document_values.to(dtype)
    check_same(values, document_values, names=names)
    weights, documents_mask = _weights(names[0], queries.mask), documents.mask
    if documents_mask is not None and documents_mask.dtype != torch.bool:
        # On a GPU the operation itself treats any nonzero value as active.
        documents_mask = documents_mask.detach() if documents_mask.is_cuda else documents_mask != 0
    options = Options(empty_score=EMPTY_DOCUMENT_SCORE)
    if documents.cu_seqlens is not None:
        candidates = None
        if pairs:
            candidates = torch.arange(documents.cu_seqlens.shape[0], dtype=torch.int32, device=values.device)
        tensors = Tensors(values, document_values, weights, None, queries.cu_seqlens, documents.cu_seqlens, candidates)
        options = with_lengths(tensors, options, queries.longest, documents.longest, 1 if pairs else None)
    else:
        assert documents_mask is not None
        if pairs:
            document_values, documents_mask = document_values.unsqueeze(1), documents_mask.unsqueeze(1)
        tensors = Tensors(values, document_values, weights, documents_mask)
    scores = scores_of_arguments((*tensors, *options), "maxsim")
    if pairs and scores.dim() == 2:
        scores = scores.squeeze(1)
    return _divided(scores, queries.counts(), pairs) if length_normalize else scores


def _read_in_place(
    queries: Embeddings,
    documents: Embeddings,
    queries_mask: Mask,
    documents_mask: Mask,
    length_normalize: bool,
    device: str | torch.device | None,
    pairs: bool,
    names: tuple[str, str],
) -> Tensor | None:
    """Score with kernels that read the documents of a list in place; None if they have to be packed."""
    if documents_mask is not None or not _lies_on_a_gpu(documents):
        return None
    target_device = documents[0].device
    if _placed(device, target_device) != target_device:
        return None
    query_values: Any = queries
    mask = operand = None
    if queries_mask is not None or not _lies_on_a_gpu(queries) or queries[0].device != target_device:
        batch = side(names[0], queries, queries_mask)
        if len(batch) == 0:
            return None
        operand = batch.operand(0, len(batch), target_device, False)
        query_values, mask = operand.values, _weights(names[0], operand.mask)
    if pairs and len(query_values) != len(documents):
        return None
    operation = maxsim_ragged_pairwise if pairs else maxsim_ragged
    try:
        scores = operation(query_values, documents, queries_mask=mask, empty_score=EMPTY_DOCUMENT_SCORE)
    except (TypeError, ValueError):
        # Integers, mixed dtypes or devices: the general path converts them, or raises the host's error.
        return None
    if not length_normalize:
        return scores
    if operand is not None:
        return _divided(scores, operand.counts(), pairs)
    lengths = np.fromiter(map(Tensor.size, query_values, itertools.repeat(0)), dtype=np.int64, count=len(query_values))
    return _divided(scores, torch.from_numpy(lengths.clip(min=1)).to(target_device, non_blocking=True), pairs)


def _lies_on_a_gpu(sequences: Any) -> TypeGuard[list]:
    """Whether kernels may read this list in place, judged by its first sequence; the operation checks all of them."""
    return (
        isinstance(sequences, list)
        and len(sequences) > 0
        and isinstance(sequences[0], Tensor)
        and sequences[0].is_cuda
        and not torch.compiler.is_compiling()
    )


def _weights(name: str, mask: Tensor | None) -> Tensor | None:
    """Convert the mask of the queries `name` for the operations: bool, or detached floating weights, checked."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    return checked_mask(mask_name(name), mask.detach() if mask.is_floating_point() else mask.float(), weights=True)


def _divided(scores: Tensor, counts: Tensor, pairs: bool) -> Tensor:
    """Divide scores [Nq, N], or of pairs [N], by the numbers of query tokens [Nq]."""
    return scores / (counts if pairs else counts.unsqueeze(1))


def _queries(embeddings: Embeddings, mask: Mask, device: torch.device) -> Operand:
    """Convert the queries of a loss, a padded batch, to an operand."""
    queries = side("queries_embeddings", as_tensor("queries_embeddings", embeddings), mask)
    return queries.operand(0, len(queries), device, False)


def _groups(embeddings: Embeddings, mask: Mask, one_for_all: bool = True) -> Operand:
    """Convert the documents [G, N, Ld, d] of a loss and their mask [G, N, Ld], or one for all groups, to an operand."""
    documents = floating(as_tensor("documents_embeddings", embeddings))
    if documents.dim() != 4:
        raise ValueError(f"documents_embeddings must have shape [G, N, Ld, d], got {list(documents.shape)}")
    if mask is None:
        return Operand(documents, nonzero_rows(documents))
    mask = as_tensor("documents_mask", mask).to(documents.device)
    if one_for_all and mask.dim() == 3 and mask.shape[0] == 1:
        mask = mask.expand(documents.shape[0], -1, -1)
    if mask.shape != documents.shape[:3]:
        raise ValueError(f"documents_mask must have shape {list(documents.shape[:3])}, got {list(mask.shape)}")
    return Operand(documents, mask)


def _check_candidates(n_queries: int, documents: Tensor) -> None:
    if len(documents) != n_queries:
        raise ValueError(
            "documents_embeddings must have as many groups of candidates as there are queries, "
            f"{n_queries}, got shape {list(documents.shape)}"
        )


def _placed(device: str | torch.device | None, home: torch.device) -> torch.device:
    """Resolve a device: None is `home`, and "cuda" without an index the current CUDA device."""
    if device is None:
        return home
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _learns(mask: Mask) -> bool:
    """Whether weights of query tokens require a gradient, which the operation does not compute; logged once."""
    if isinstance(mask, Tensor) and mask.requires_grad and torch.is_grad_enabled():
        _log_learned_weights()
        return True
    return False


@functools.cache
def _log_learned_weights() -> None:
    logger.warning(
        "weights of query tokens that require a gradient are scored by sentence-transformers itself: pylate_flash has "
        "no gradient for them"
    )


def _original(name: str) -> Any:
    [path] = [path for path in SENTENCE_TRANSFORMERS.served if path.endswith(f":{name}")]
    return SENTENCE_TRANSFORMERS.original(path)


def _warn_of_empty(documents: Operand) -> None:
    """Warn once if a document has no tokens, unless checking would wait for the device."""
    if torch.compiler.is_compiling():
        return
    if documents.cu_seqlens is not None:
        empty = bool((documents.cu_seqlens.diff() == 0).any())
    else:
        assert documents.mask is not None
        empty = documents.mask.device.type == "cpu" and not bool((documents.mask != 0).any(dim=-1).all())
    if empty:
        # transformers adds this method to every logger.
        getattr(logger, "warning_once", logger.warning)(
            f"a document has no token, and scores {EMPTY_DOCUMENT_SCORE:.0e}: its embedding is empty, or all of its "
            "tokens are masked, as MultiVectorMask does with skiplist_words and keep_only_token_ids"
        )
