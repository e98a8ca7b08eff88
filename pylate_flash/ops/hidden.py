"""MaxSim from an encoder's hidden states: projection, L2 normalisation and score, without the projected documents.

    score[i, j] = sum over active s of  max over active t of  <q[i, s], e[j, t]>
    e = normalise(hidden W^T + b),  q = normalise(queries), which may be hidden states to project as well

`maxsim_from_hidden_reference` is the definition, in plain torch. `maxsim_from_hidden` never has all projected documents
at once (`hidden_blocks`). The projected embeddings are rounded to the type of the hidden states, as a linear layer
rounds them, and once more when they were divided by their norms in float32, as `torch.nn.functional.normalize` rounds:
they are the embeddings that the model returns.

The operator `pylate_flash::maxsim_hidden` is the one way in, eager and compiled: it takes the fields of `Call`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.plan import IMPLEMENTATIONS
from ..problem import Options, Tensors, empty_results
from .checks import (
    check_choice,
    check_differentiation,
    check_embeddings,
    check_mask_layout,
    checked_flag,
    checked_number,
    no_second_derivative,
)
from .hidden_blocks import (
    N_TENSORS,
    Call,
    Kept,
    Needs,
    compute_hidden,
    compute_hidden_gradients,
)
from .maxsim import MASKINGS, REDUCTIONS, autocast, maxsim_reference
from .operator import NOT_PLAIN, Operation, cast_like, is_plain
from .varlen import with_lengths

_QUERIES = {3: "[Nq, Lq, d]"}
_HIDDEN = {3: "[Nd, Ld, d_model]", 4: "[Nq, K, Ld, d_model]"}
_PACKED_QUERIES = {3: "[Nq, Lq, d]", 2: "[Tq, d] with queries_cu_seqlens"}
_PACKED_HIDDEN = {2: "[T, d_model] with documents_cu_seqlens"}


def maxsim_from_hidden_reference(
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
    normalize: bool = True,
    reduction: str = "sum",
    masking: str = "exclude",
    empty_score: float = 0.0,
) -> Tensor:
    """The definition of `maxsim_from_hidden`: a linear layer, normalisation, and `maxsim_reference`, of padded tokens.

    Arguments and result are those of `maxsim_from_hidden`, except that everything is computed in, and the result has,
    the type that the inputs widen to: float64 for float64 inputs, else float32.
    """
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    queries, hidden, weight = queries.to(dtype), hidden.to(dtype), weight.to(dtype)
    documents = F.linear(hidden, weight, None if bias is None else bias.to(dtype))
    if queries_weight is not None:
        queries = F.linear(queries, queries_weight.to(dtype), None if queries_bias is None else queries_bias.to(dtype))
    if queries_cu_seqlens is not None:
        queries, queries_mask = _padded(queries, queries_cu_seqlens)
    if documents_cu_seqlens is not None:
        documents, documents_mask = _padded(documents, documents_cu_seqlens)
        masking = "exclude"
    scores = maxsim_reference(
        queries,
        documents,
        queries_mask=queries_mask,
        documents_mask=documents_mask,
        normalize=normalize,
        reduction=reduction,
        masking=masking,
        empty_score=empty_score,
    )
    if candidates_cu_seqlens is None:
        return scores
    owned = zip(scores, pairwise(candidates_cu_seqlens.tolist()), strict=True)
    return torch.cat([scores.new_empty(0), *(of_query[first:last] for of_query, (first, last) in owned)])


def _padded(values: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Packed tokens [T, d] as [N, longest, d], and their mask."""
    cu_seqlens = cu_seqlens.to(values.device)
    lengths = cu_seqlens.diff().unsqueeze(1)
    places = torch.arange(max([0, *lengths.flatten().tolist()]), device=values.device)
    tokens = (cu_seqlens[:-1].unsqueeze(1) + places).clamp(max=len(values) - 1)
    return values[tokens], places < lengths


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

    Equal to `maxsim(queries, torch.nn.functional.linear(hidden, weight, bias), normalize=True)`, except that of the
    projected documents no more than 64 MiB (or one document) exist at any time.

    Parameters
    ----------
    queries
        [Nq, Lq, d], float16, bfloat16, float32 or float64; with `queries_weight`, hidden states [Nq, Lq, d_queries]
        that are projected as well. With packed documents also packed: [Tq, d] and `queries_cu_seqlens`. Under autocast,
        all tensors take the autocast type.
    hidden
        [Nd, Ld, d_model]: every query meets every document. [Nq, K, Ld, d_model]: each query meets its own K
        candidates. [T, d_model]: packed, with `documents_cu_seqlens`.
    weight, bias
        [d, d_model] and [d] or None: the linear layer, as `torch.nn.Linear` holds it.
    queries_mask
        [Nq, Lq], bool, 0/1, 1 where a token is active, or floating weights, as in `maxsim`. None: all. Not
        for packed queries.
    documents_mask
        [Nd, Ld] or [Nq, K, Ld], bool or 0/1. None: all. Not for packed documents.
    queries_weight, queries_bias
        [d, d_queries] and [d] or None: the linear layer of the queries. The tensors of `weight` and `bias` themselves
        where one layer serves both sides.
    queries_cu_seqlens, documents_cu_seqlens, candidates_cu_seqlens, max_query_length, max_document_length
        For packed tokens, as in `maxsim_varlen`. Where the projected documents take more than the 64 MiB, the call
        reads `documents_cu_seqlens`, and waits for the GPU if they lie there.
    normalize
        Divide every query and every projected document embedding by its Euclidean norm (at least 1e-12) first.
    reduction, masking, empty_score, implementation
        As in `maxsim`. Packed documents have no masked token, so that `masking` changes nothing.

    Returns
    -------
    Tensor
        [Nq, Nd] or [Nq, K]; for packed documents with candidates [Nd]; of the type that `maxsim` returns. The projected
        embeddings have the type of `hidden`; products with them, NaN, infinities, ties and reproducibility are as in
        `maxsim`.

    Raises
    ------
    TypeError
        If an argument is no dense tensor, of another dtype than named above, or the dtypes differ.
    ValueError
        If shapes, devices or sizes do not fit together, an argument is given that the layout has no use for, an option
        is none of its choices, or implementation="triton" cannot take the input.
    RuntimeError
        As in `maxsim`.

    Examples
    --------
    >>> import torch
    >>> queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    >>> hidden = torch.tensor([[[3.0, 0.0, 9.0], [0.0, 2.0, 9.0]], [[0.0, -1.0, 9.0], [-1.0, 0.0, 9.0]]])
    >>> maxsim_from_hidden(queries, hidden, weight=torch.eye(2, 3))
    tensor([[2., 0.]])
    """
    packed = documents_cu_seqlens is not None
    _check_layout(
        packed,
        isinstance(queries, Tensor) and queries.dim() == 2,
        documents_mask=documents_mask,
        queries_mask=queries_mask,
        queries_cu_seqlens=queries_cu_seqlens,
        candidates_cu_seqlens=candidates_cu_seqlens,
        max_query_length=max_query_length,
        max_document_length=max_document_length,
    )
    if queries_weight is not None or queries_bias is not None:
        queries = _projected_queries(queries, hidden, weight, bias, queries_weight, queries_bias)
    options = Options(0, 0, 0, checked_flag("normalize", normalize), reduction, masking, empty_score, implementation)
    if packed:
        check_embeddings("hidden", hidden, _PACKED_HIDDEN)
        check_embeddings("queries", queries, _PACKED_QUERIES)
        tensors = Tensors(queries, hidden, None, None, queries_cu_seqlens, documents_cu_seqlens, candidates_cu_seqlens)
        learned = [layer for layer in (weight, bias) if isinstance(layer, Tensor)]
        options = with_lengths(tensors, options, max_query_length, max_document_length, learned=learned)
    arguments = (
        queries, hidden, weight, bias, queries_mask, documents_mask, queries_cu_seqlens, documents_cu_seqlens,
        candidates_cu_seqlens, *options,
    )  # fmt: skip
    return _maxsim_hidden(arguments, "maxsim_from_hidden")


def _projected_queries(
    queries: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    queries_weight: Tensor | None,
    queries_bias: Tensor | None,
) -> Tensor:
    """The queries by their own layer, after the checks of both layers."""
    check_embeddings("hidden", hidden, {**_HIDDEN, **_PACKED_HIDDEN})
    check_embeddings("queries", queries, {**_QUERIES, **_PACKED_QUERIES})
    weight, _ = _checked_layer("", hidden, "hidden", weight, bias)
    queries_weight, queries_bias = _checked_layer("queries_", queries, "queries", queries_weight, queries_bias)
    layers = [tensor for tensor in (queries_weight, queries_bias) if tensor is not None]
    check_differentiation("maxsim_from_hidden", queries, hidden, *layers)
    hidden, queries = autocast(hidden, queries)
    _check_like("queries", queries, hidden)
    assert queries_weight is not None
    _check_like("queries_weight", queries_weight, hidden)
    if queries_weight.shape[0] != weight.shape[0]:
        raise ValueError(
            f"queries_weight must project to the size that weight projects to, {weight.shape[0]}, "
            f"got {queries_weight.shape[0]}"
        )
    return F.linear(queries, queries_weight, queries_bias)


def _check(arguments: tuple, called: str) -> tuple:
    """The operator's arguments after every check, in the autocast type under autocast."""
    call = Call(*arguments)
    queries, hidden, weight, bias = call[:4]
    check_choice("implementation", call.implementation, IMPLEMENTATIONS)
    check_choice("reduction", call.reduction, REDUCTIONS)
    check_choice("masking", call.masking, MASKINGS)
    empty_score = checked_number("empty_score", call.empty_score)
    packed = call.documents_cu_seqlens is not None
    check_embeddings("hidden", hidden, _PACKED_HIDDEN if packed else _HIDDEN)
    check_embeddings("queries", queries, _PACKED_QUERIES if packed else _QUERIES)
    weight, bias = _checked_layer("", hidden, "hidden", weight, bias)
    check_differentiation(called, queries, hidden, weight, *() if bias is None else (bias,))
    hidden, queries = autocast(hidden, queries)
    _check_like("queries", queries, hidden)
    _check_like("weight", weight, hidden)
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
    if call.queries_mask is not None:
        check_mask_layout("queries_mask", call.queries_mask, queries)
    if call.documents_mask is not None:
        check_mask_layout("documents_mask", call.documents_mask, hidden)
    return queries, hidden, weight, bias, *arguments[4:-2], empty_score, call.implementation


def _check_layout(packed: bool, packed_queries: bool, **given: object) -> None:
    """Raise if an argument is given for which the layout has no use, or one is not without which it is not known."""
    useless: tuple[str, ...] = ("documents_mask",) if packed else ("candidates_cu_seqlens", "max_document_length")
    useless += ("queries_mask",) if packed and packed_queries else ("queries_cu_seqlens", "max_query_length")
    for name in useless:
        if given[name] is not None:
            documents = "packed" if packed else "padded (documents_cu_seqlens is None)"
            queries = "packed" if packed_queries else "padded"
            raise ValueError(
                f"{name} has no meaning where documents are {documents} and queries {queries}: leave it out"
            )
    if packed and packed_queries and given["queries_cu_seqlens"] is None:
        raise ValueError("queries of shape [Tq, d] need queries_cu_seqlens, got None")


def _checked_layer(
    prefix: str, states: Tensor, of: str, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The linear layer of `states` after every check of its shapes, in the autocast type under autocast."""
    if weight is None and prefix:
        if bias is not None:
            raise ValueError(f"{prefix}bias needs {prefix}weight, got None")
        return weight, bias  # type: ignore[return-value]
    name = f"{prefix}weight"
    weight = check_embeddings(name, weight, {2: "[d, d_model]"})
    if weight.shape[1] != states.shape[-1]:
        raise ValueError(
            f"{name} must have shape [d, {states.shape[-1]}], as {of} has that size, got {list(weight.shape)}"
        )
    if weight.shape[0] == 0:
        raise ValueError(f"{name} must project to at least 1 dimension, got {list(weight.shape)}")
    (cast,) = autocast(weight)
    if bias is None:
        return cast, None
    check_embeddings(f"{prefix}bias", bias, {1: "[d]"})
    if bias.shape[0] != weight.shape[0]:
        raise ValueError(f"{prefix}bias must have shape [{weight.shape[0]}], as {name} does, got {list(bias.shape)}")
    (bias,) = autocast(bias)
    for what, found, expected in (("dtype", bias.dtype, cast.dtype), ("device", bias.device, weight.device)):
        if found != expected:
            kind = TypeError if what == "dtype" else ValueError
            raise kind(f"{prefix}bias must have the {what} of {name}, {expected}, got {found}")
    return cast, bias


def _check_like(name: str, tensor: Tensor, hidden: Tensor) -> None:
    if tensor.device != hidden.device:
        raise ValueError(f"{name} must be on the device of hidden, {hidden.device}, got {tensor.device}")
    if tensor.dtype != hidden.dtype:
        raise TypeError(f"{name} must have the dtype of hidden, {hidden.dtype}, got {tensor.dtype}")


def _compute(arguments: tuple, with_winners: bool) -> tuple[Tensor, Tensor | None]:
    scores, kept = compute_hidden(Call(*arguments), with_winners)
    return scores, None if kept is None else kept.winners


def _compute_gradients(
    grad_scores: Tensor, kept: Sequence[Tensor], arguments: tuple, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    return compute_hidden_gradients(Call(*arguments), grad_scores, [Kept(kept[0], None)], Needs(*needs))


def _function_of(operation: Operation) -> type[torch.autograd.Function]:
    class Function(torch.autograd.Function):
        """The operator where a gradient is needed: keeps winners, and of plain tensors the projected embeddings too.

        These an operator, whose outputs have one shape whatever their size, could not return only where there is room.
        """

        @staticmethod
        def forward(ctx, call, *tensors):
            key, options, called = call
            winners = None
            # Not among the saved tensors, which live until the whole backward is over.
            ctx.kept = []
            ctx.likes = [None if tensor is None else (tensor.dtype, tensor.shape) for tensor in tensors[:4]]
            if key is NOT_PLAIN:
                scores, winners = operation.operator_forward(*tensors, *options)
            else:
                arguments = operation.check((*tensors, *options), called)
                tensors, options = arguments[:N_TENSORS], arguments[N_TENSORS:]
                scores, kept = compute_hidden(Call(*arguments), True)
                ctx.kept.append(kept)
            ctx.save_for_backward(*tensors, winners)
            ctx.options = options
            return scores

        @staticmethod
        def backward(ctx, grad_scores):
            *tensors, winners = ctx.saved_tensors
            call, needs = Call(*tensors, *ctx.options), Needs(*ctx.needs_input_grad[1:5])
            if winners is None and not ctx.kept:
                # A second backward through a retained graph.
                ctx.kept.append(compute_hidden(call, True)[1])
            if winners is None and not torch.is_grad_enabled() and is_plain(grad_scores):
                found: tuple[Tensor | None, ...] = compute_hidden_gradients(call, grad_scores, ctx.kept, needs)
            else:
                # A graph of the backward is asked for: the operator has one, which says that there is no second
                # derivative.
                kept = ctx.kept[0].winners if winners is None else winners
                gradients = operation.operator_backward(grad_scores, kept, *call, *needs)
                found = tuple([gradient if need else None for gradient, need in zip(gradients, needs, strict=True)])
            return None, *cast_like(found, ctx.likes), *(None,) * (N_TENSORS - len(needs))

    return Function


def _shapes(*arguments) -> tuple[Tensor, Tensor]:
    call = Call(*arguments)
    return empty_results(call.tensors, call.options)


_maxsim_hidden = Operation(
    "maxsim_hidden",
    "Tensor queries, Tensor hidden, Tensor weight, Tensor? bias, Tensor? queries_mask, Tensor? documents_mask, "
    "Tensor? queries_cu_seqlens, Tensor? documents_cu_seqlens, Tensor? candidates_cu_seqlens, SymInt max_query_length, "
    "SymInt max_document_length, SymInt max_candidates, bool normalize, str reduction, str masking, float empty_score, "
    "str implementation",
    ("queries", "hidden", "weight", "bias"), ("winners",), _check, _compute, _compute_gradients, _shapes,
    no_second_derivative("maxsim_from_hidden"), _function_of,
)  # fmt: skip
