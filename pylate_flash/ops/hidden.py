"""MaxSim from an encoder's hidden states: projection, L2 normalisation and score, without the projected documents.

    score[i, j] = sum over active s of  max over active t of  <q[i, s], e[j, t]>
    e = normalise(hidden W^T + b),  q = normalise(queries), which may be hidden states to project as well

The projected documents are never all materialized at once (`hidden_blocks`). As a linear layer does, the projection
rounds to the dtype of the hidden states; as in `torch.nn.functional.normalize`, embeddings are rounded again after the
division by their norms in float32. So they equal the embeddings that the model returns. The operator takes weight and
bias, and hidden states in place of documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem import Options, Tensors, empty_results
from .checks import (
    check_beside,
    check_differentiation,
    check_embeddings,
    check_layout,
    check_mask_layout,
    checked_flag,
    no_second_derivative,
)
from .hidden_blocks import compute_hidden, compute_hidden_gradients
from .maxsim_operator import CALL_SCHEMA, autocast, checked, reference_scores, with_lengths
from .operator import Operation

_QUERIES = {3: "[Nq, Lq, d]"}
_HIDDEN = {3: "[Nd, Ld, d_model]", 4: "[Nq, K, Ld, d_model]"}
_PACKED_QUERIES = {3: "[Nq, Lq, d]", 2: "[Tq, d] with queries_cu_seqlens"}
_PACKED_HIDDEN = {2: "[T, d_model] with documents_cu_seqlens"}
_WEIGHT = {2: "[d, d_model]"}


def maxsim_from_hidden_reference(
    queries: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    queries_weight: Tensor | None = None,
    queries_bias: Tensor | None = None,
    normalize: bool = True,
    **options: Any,
) -> Tensor:
    """The definition of `maxsim_from_hidden`, for padded tokens: a linear layer, then the definition of `maxsim`."""
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    queries, hidden, weight = queries.to(dtype), hidden.to(dtype), weight.to(dtype)
    documents = F.linear(hidden, weight, None if bias is None else bias.to(dtype))
    if queries_weight is not None:
        queries = F.linear(queries, queries_weight.to(dtype), None if queries_bias is None else queries_bias.to(dtype))
    return reference_scores(queries, documents, normalize=normalize, **options)


def maxsim_from_hidden(
    queries: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    queries_weight: Tensor | None = None,
    queries_bias: Tensor | None = None,
    queries_cu_seqlens: Tensor | None = None,
    documents_cu_seqlens: Tensor | None = None,
    candidates_cu_seqlens: Tensor | None = None,
    max_query_length: int | None = None,
    max_document_length: int | None = None,
    normalize: bool = True,
    reduction: str = "sum",
    masking: str = "exclude",
    empty_score: float = 0.0,
    implementation: str = "auto",
) -> Tensor:
    """MaxSim scores of queries against the projected hidden states of documents, differentiable.

    Equal to `maxsim(queries, torch.nn.functional.linear(hidden, weight, bias), normalize=True)`, except that at most
    64 MiB of projected documents (or one document) exist at any time. If a gradient is needed, they and their gradient
    may take half as many bytes as the hidden states, if that is more.

    Parameters
    ----------
    queries
        [Nq, Lq, d], float16, bfloat16, float32 or float64; with `queries_weight`, hidden states [Nq, Lq, d_queries],
        which are projected as well. With packed documents also packed: [Tq, d] and `queries_cu_seqlens`. Under
        autocast, all tensors are cast to the autocast dtype.
    hidden
        [Nd, Ld, d_model]: every query meets every document. [Nq, K, Ld, d_model]: each query meets its own K
        candidates. [T, d_model]: packed, with `documents_cu_seqlens`.
    weight, bias
        [d, d_model] and [d] or None: the linear layer, as in `torch.nn.Linear`.
    queries_mask, documents_mask
        [Nq, Lq], which may hold weights, and [Nd, Ld] or [Nq, K, Ld], or None, as in `maxsim`. Not for packed tokens.
    queries_weight, queries_bias
        [d, d_queries] and [d] or None: the linear layer of the queries. If both sides share one layer, pass the tensors
        of `weight` and `bias` again.
    queries_cu_seqlens, documents_cu_seqlens, candidates_cu_seqlens, max_query_length, max_document_length
        For packed tokens, as in `maxsim_varlen`. If the projected documents exceed the memory limit above, the call
        reads `documents_cu_seqlens`, which synchronizes if they are on the GPU.
    normalize
        Divide every query and every projected document embedding by its Euclidean norm (at least 1e-12) first.
    reduction, masking, empty_score, implementation
        As in `maxsim`. Packed documents have no masked tokens, so `masking` has no effect on them.

    Returns
    -------
    Tensor
        [Nq, Nd] or [Nq, K]; for packed documents with candidates [Nd]; of the dtype that `maxsim` returns. The
        projected embeddings have the dtype of `hidden`; products with them, NaN, infinities, ties and reproducibility
        are as in `maxsim`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `maxsim`; ValueError also if an argument does not apply to the layout.

    Examples
    --------
    >>> queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> hidden = torch.tensor([[[3.0, 0.0, 9.0], [0.0, 2.0, 9.0]], [[0.0, -1.0, 9.0], [-1.0, 0.0, 9.0]]])
    >>> maxsim_from_hidden(queries, hidden, weight=torch.eye(2, 3))
    tensor([[2., 0.]])
    """
    tensors = Tensors(
        queries, hidden, queries_mask, documents_mask, queries_cu_seqlens, documents_cu_seqlens, candidates_cu_seqlens
    )
    check_layout(tensors, max_query_length, max_document_length)
    unbounded = documents_cu_seqlens is not None and queries_cu_seqlens is None
    if unbounded and isinstance(queries, Tensor) and queries.dim() == 2:
        raise ValueError("queries of shape [Tq, d] need queries_cu_seqlens, got None")
    if queries_weight is not None or queries_bias is not None:
        queries = _projected_queries(queries, weight, queries_weight, queries_bias)
        tensors = tensors._replace(queries=queries)
    options = Options(0, 0, 0, checked_flag("normalize", normalize), reduction, masking, empty_score, implementation)
    if documents_cu_seqlens is not None:
        check_embeddings("hidden", hidden, _PACKED_HIDDEN)
        check_embeddings("queries", queries, _PACKED_QUERIES)
        learned = [tensor for tensor in (weight, bias) if isinstance(tensor, Tensor)]
        options = with_lengths(tensors, options, max_query_length, max_document_length, learned=learned)
    return _maxsim_hidden((weight, bias, *tensors, *options), "maxsim_from_hidden")


def _projected_queries(
    queries: Tensor, weight: Tensor, queries_weight: Tensor | None, queries_bias: Tensor | None
) -> Tensor:
    """The queries projected by their own layer, after its checks."""
    if queries_weight is None:
        raise ValueError("queries_bias needs queries_weight, got None")
    check_embeddings("queries", queries, {**_QUERIES, **_PACKED_QUERIES})
    check_embeddings("weight", weight, _WEIGHT)
    (queries,) = autocast(queries)
    layer = _checked_layer("queries_", queries_weight, queries_bias, "queries", queries)
    if queries_weight.shape[0] != weight.shape[0]:
        raise ValueError(
            f"queries_weight must project to the size that weight projects to, {weight.shape[0]}, "
            f"got {queries_weight.shape[0]}"
        )
    check_differentiation("maxsim_from_hidden", queries, *[tensor for tensor in layer if tensor is not None])
    return F.linear(queries, *layer)


def _checked_layer(
    prefix: str, weight: Tensor, bias: Tensor | None, states_name: str, states: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Check the linear layer of `states`, which are autocast already, and return it in the autocast dtype."""
    name = f"{prefix}weight"
    check_embeddings(name, weight, _WEIGHT)
    if weight.shape[1] != states.shape[-1]:
        raise ValueError(
            f"{name} must have shape [d, {states.shape[-1]}], as {states_name} has that size, got {list(weight.shape)}"
        )
    if weight.shape[0] == 0:
        raise ValueError(f"{name} must project to at least 1 dimension, got {list(weight.shape)}")
    (weight,) = autocast(weight)
    check_beside(name, weight, states_name, states)
    if bias is None:
        return weight, None
    check_embeddings(f"{prefix}bias", bias, {1: "[d]"})
    if bias.shape[0] != weight.shape[0]:
        raise ValueError(f"{prefix}bias must have shape [{weight.shape[0]}], as {name} does, got {list(bias.shape)}")
    (bias,) = autocast(bias)
    check_beside(f"{prefix}bias", bias, name, weight)
    return weight, bias


def _check(arguments: tuple, called: str) -> tuple:
    """The operator's arguments after every check, under autocast in the autocast dtype."""
    weight, bias, tensors, options = _call(arguments)
    packed = tensors.documents_cu_seqlens is not None
    check_embeddings("hidden", tensors.documents, _PACKED_HIDDEN if packed else _HIDDEN)
    check_embeddings("queries", tensors.queries, _PACKED_QUERIES if packed else _QUERIES)
    tensors, options = checked(tensors, options)
    queries, hidden = tensors[:2]
    layer = _checked_layer("", weight, bias, "hidden", hidden)
    check_beside("queries", queries, "hidden", hidden)
    if queries.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"queries must have the size that weight projects to, {weight.shape[0]}, got {queries.shape[-1]}: hidden "
            "states need queries_weight"
        )
    if hidden.dim() == 4 and hidden.shape[0] != queries.shape[0]:
        raise ValueError(
            f"hidden of shape [Nq, K, Ld, d_model] must have one row of candidates per query, Nq = {queries.shape[0]}, "
            f"got {list(hidden.shape)}"
        )
    check_mask_layout("queries_mask", tensors.queries_mask, queries)
    check_mask_layout("documents_mask", tensors.documents_mask, hidden)
    return *layer, *tensors, *options


_N_TENSORS = 2 + len(Tensors._fields)


def _call(arguments: Sequence[Any]) -> tuple[Tensor, Tensor | None, Tensors, Options]:
    weight, bias, *tensors = arguments[:_N_TENSORS]
    return weight, bias, Tensors(*tensors), Options(*arguments[_N_TENSORS:])


def _compute(arguments: tuple, with_argmax: bool) -> tuple[Tensor | None, ...]:
    return compute_hidden(*_call(arguments), with_argmax)


def _compute_gradients(
    grad_scores: Tensor, saved: list[Tensor], arguments: tuple, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    return compute_hidden_gradients(*_call(arguments), grad_scores, saved, needs)


_maxsim_hidden = Operation(
    "maxsim_hidden",
    f"Tensor weight, Tensor? bias, {CALL_SCHEMA}",
    ("weight", "bias", "queries", "documents"),
    ("argmax",),
    _check,
    _compute,
    _compute_gradients,
    lambda *arguments: empty_results(*_call(arguments)[2:]),
    no_second_derivative("maxsim_from_hidden"),
)
