"""MaxSim from an encoder's hidden states: projection, L2 normalisation and score, without the projected documents.

    score[i, j] = sum over active s of  max over active t of  <q[i, s], e[j, t]>
    e = normalise(hidden W^T + b),  q = normalise(queries), which may be hidden states to project as well

`maxsim_from_hidden_reference` is the definition, in plain torch. `maxsim_from_hidden` projects every document token
once, a block of documents at a time into a scratch of bounded size, and gives the block to the kernels of `maxsim`; on
Hopper a kernel projects and normalises, and for few query rows scores too, without a scratch (`kernels.fused`). The
projected embeddings are rounded to the type of the hidden states, as a linear layer rounds them, and once more when
they were divided by their norms in float32, as `torch.nn.functional.normalize` rounds: they are the embeddings that the
model returns. What a plain call comes to is decided once (`ops.hidden_plans`).

The backward takes the gradient of the projected embeddings from the kernels of `maxsim`, which sum the winners' rows in
the projected space (d wide, not d_model), takes it through the normalisation in place, and then multiplies matrices,
once per block and gradient asked for:

    grad_hidden = G W,  grad_weight = G^T hidden,  grad_bias = sum of the rows of G
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import varlen
from .checks import check_choice, check_differentiation, check_embeddings, check_mask, no_second_derivative
from .dispatch import BACKWARDS, IMPLEMENTATIONS, choose
from .hidden_blocks import ALL, Block, packed_blocks, padded_blocks
from .hidden_plans import Embeddings, plan_of
from .maxsim import (
    MASKINGS,
    REDUCTIONS,
    _autocast,
    _finish,
    _grouped,
    _is_current,
    _is_plain,
    kernels,
    maxsim_reference,
    needs_gradient,
)
from .maxsim import _backward as _padded_backward
from .maxsim import _forward as _padded_forward
from .maxsim import _forward_shapes as _padded_forward_shapes
from .norms import SMALLEST_NORM, inverse_norms
from .varlen import _check_boundaries, _longest, maxsim_varlen_reference

# Of projected embeddings, and in the backward of them and their gradient, held at once; more only where a single
# document has more.
SCRATCH_BYTES = 64 << 20

_QUERIES = {3: "[Nq, Lq, d]"}
_HIDDEN = {3: "[Nd, Ld, d_model]", 4: "[Nq, K, Ld, d_model]"}
_PACKED_QUERIES = {3: "[Nq, Lq, d]", 2: "[Tq, d] with queries_cu_seqlens"}
_PACKED_HIDDEN = {2: "[T, d_model] with documents_cu_seqlens"}


def maxsim_from_hidden_reference(
    queries: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    documents_mask: Tensor | None = None,
    queries_mask: Tensor | None = None,
    *,
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
    """The definition of `maxsim_from_hidden`: a linear layer, normalisation, and `maxsim_reference`.

    Arguments and result are those of `maxsim_from_hidden`, except that everything is computed in, and the result has,
    the type that the inputs widen to: float64 for float64 inputs, else float32.
    """
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    queries, hidden, weight = queries.to(dtype), hidden.to(dtype), weight.to(dtype)
    documents = F.linear(hidden, weight, None if bias is None else bias.to(dtype))
    if queries_weight is not None:
        queries = F.linear(queries, queries_weight.to(dtype), None if queries_bias is None else queries_bias.to(dtype))
    if documents_cu_seqlens is None:
        return maxsim_reference(
            queries,
            documents,
            queries_mask,
            documents_mask,
            normalize=normalize,
            reduction=reduction,
            masking=masking,
            empty_score=empty_score,
        )
    if queries_cu_seqlens is None:
        active = torch.ones(queries.shape[:2], dtype=torch.bool) if queries_mask is None else queries_mask != 0
        queries, queries_cu_seqlens = varlen.pack([query[on] for query, on in zip(queries, active, strict=True)])
    return maxsim_varlen_reference(
        queries,
        documents,
        queries_cu_seqlens,
        documents_cu_seqlens,
        candidates_cu_seqlens=candidates_cu_seqlens,
        normalize=normalize,
        reduction=reduction,
        empty_score=empty_score,
    )


def maxsim_from_hidden(
    queries: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    documents_mask: Tensor | None = None,
    queries_mask: Tensor | None = None,
    *,
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
    backward: str = "auto",
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
    documents_mask
        [Nd, Ld] or [Nq, K, Ld], bool or 0/1 of any dtype, 1 where a token is active, as in `maxsim`. None: all. Not for
        packed ones.
    queries_mask
        [Nq, Lq], likewise. Not for packed queries.
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
    backward
        As in `maxsim`; "auto" for packed documents.

    Returns
    -------
    Tensor
        float32, [Nq, Nd] or [Nq, K]; for packed documents with candidates [Nd]. The projected embeddings have the type
        of `hidden`; products with them, NaN, infinities, ties and reproducibility are as in `maxsim`.

    Raises
    ------
    TypeError
        If an argument is no tensor, of another dtype than named above, or the dtypes differ.
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
    if (
        queries_mask is None
        and queries_weight is None
        and queries_bias is None
        and reduction == "sum"
        and empty_score == 0.0
        and backward == "auto"
        and queries_cu_seqlens is candidates_cu_seqlens is max_query_length is None
    ):
        tensors = queries, hidden, weight, bias, documents_mask, documents_cu_seqlens
        plan = plan_of(*tensors, max_document_length, normalize, masking, implementation, SCRATCH_BYTES)
        if plan is not None:
            if plan.gradients is None:
                return plan.forward(*tensors)[0]
            return _PlannedFromHidden.apply(queries, hidden, weight, bias, documents_mask, plan)
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    check_choice("backward", backward, BACKWARDS)
    check_choice("reduction", reduction, REDUCTIONS)
    check_choice("masking", masking, MASKINGS)
    packed = documents_cu_seqlens is not None
    _check_layout(
        packed,
        isinstance(queries, Tensor) and queries.dim() == 2,
        backward,
        documents_mask=documents_mask,
        queries_mask=queries_mask,
        queries_cu_seqlens=queries_cu_seqlens,
        candidates_cu_seqlens=candidates_cu_seqlens,
        max_query_length=max_query_length,
        max_document_length=max_document_length,
    )
    check_embeddings("hidden", hidden, _PACKED_HIDDEN if packed else _HIDDEN)
    check_embeddings("queries", queries, _PACKED_QUERIES if packed else _QUERIES)
    weight, bias = _checked_layer("", hidden, "hidden", weight, bias)
    queries_weight, queries_bias = _checked_layer("queries_", queries, "queries", queries_weight, queries_bias)
    layers = [tensor for tensor in (weight, bias, queries_weight, queries_bias) if tensor is not None]
    check_differentiation("maxsim_from_hidden", queries, hidden, *layers)
    hidden, queries = _autocast(hidden, queries)
    _check_like("queries", queries, hidden)
    _check_like("weight", weight, hidden)
    if queries_weight is not None:
        _check_like("queries_weight", queries_weight, hidden)
        queries = F.linear(queries, queries_weight, queries_bias)
    if queries.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"queries_weight must project to the size that weight projects to, {weight.shape[0]}, "
            f"got {queries.shape[-1]}"
            if queries_weight is not None
            else f"queries must have the size that weight projects to, {weight.shape[0]}, got {queries.shape[-1]}: "
            "hidden states need queries_weight"
        )
    if hidden.dim() == 4 and hidden.shape[0] != queries.shape[0]:
        raise ValueError(
            f"hidden of shape [Nq, K, Ld, d_model] must have one row of candidates per query, Nq = {queries.shape[0]}, "
            f"got {list(hidden.shape)}"
        )
    queries_mask = check_mask("queries_mask", queries_mask, queries)
    documents_mask = check_mask("documents_mask", documents_mask, hidden)
    options = normalize, masking == "zero", implementation, backward
    if documents_cu_seqlens is None:
        grouped = hidden.unsqueeze(0) if hidden.dim() == 3 else hidden
        grouped_mask = documents_mask
        if documents_mask is not None and hidden.dim() == 3:
            grouped_mask = documents_mask.unsqueeze(0)
        call = _Call(queries, grouped, weight, bias, queries_mask, grouped_mask, None, None, None, 0, 0, 0, *options)
        return _finish(_scores(call), queries, hidden, queries_mask, documents_mask, reduction, empty_score)
    if queries.dim() == 3:
        n_queries, max_query_length = queries.shape[:2]
        queries = queries.flatten(0, 1)
        queries_cu_seqlens = torch.arange(n_queries + 1, dtype=torch.int32, device=queries.device) * max_query_length
    assert queries_cu_seqlens is not None
    call = _packed_call(
        queries, hidden, weight, bias, queries_mask, queries_cu_seqlens, documents_cu_seqlens, candidates_cu_seqlens,
        max_query_length, max_document_length, options,
    )  # fmt: skip
    scores = _scores(call)
    if reduction == "mean":
        lengths = queries_cu_seqlens.diff() if queries_mask is None else queries_mask.sum(dim=-1)
        lengths = lengths.to(scores.device, non_blocking=True)
        if candidates_cu_seqlens is not None:
            owned = candidates_cu_seqlens.diff().to(scores.device, non_blocking=True)
            lengths = lengths.repeat_interleave(owned, output_size=scores.shape[0])
        scores = scores / lengths.clamp(min=1).view(-1, *(1 for _ in scores.shape[1:]))
    if empty_score != 0.0:
        empty = documents_cu_seqlens.diff().to(scores.device, non_blocking=True) == 0
        scores = scores.masked_fill(empty, empty_score)
    return scores


def _check_layout(packed: bool, packed_queries: bool, backward: str, **given: object) -> None:
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
    if packed and backward != "auto":
        raise ValueError(f'backward must be "auto" for packed documents, got {backward!r}')


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
    cast = _autocast(weight, weight)[0]
    if bias is None:
        return cast, None
    check_embeddings(f"{prefix}bias", bias, {1: "[d]"})
    if bias.shape[0] != weight.shape[0]:
        raise ValueError(f"{prefix}bias must have shape [{weight.shape[0]}], as {name} does, got {list(bias.shape)}")
    bias = _autocast(bias, bias)[0]
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


class _Call(NamedTuple):
    """The arguments of the operator.

    Padded: `queries` [Nq, Lq, d], `hidden` [G, K, Ld, d_model] in the grouped layout of `ops.maxsim`, masks of their
    shapes, no boundaries. Packed: `queries` [Tq, d], `hidden` [T, d_model], boundaries, no mask of the documents; one
    of the queries, [Nq, max_query_length], only where all of them have that length.
    """

    queries: Tensor
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    queries_mask: Tensor | None
    documents_mask: Tensor | None
    queries_cu_seqlens: Tensor | None
    documents_cu_seqlens: Tensor | None
    candidates_cu_seqlens: Tensor | None
    max_query_length: int
    max_document_length: int
    max_candidates: int
    normalize: bool
    zero_masked: bool
    implementation: str
    backward: str

    @property
    def packed(self) -> bool:
        return self.documents_cu_seqlens is not None

    @property
    def tokens(self) -> int:
        """Of all documents, padding included."""
        return self.hidden.shape[:-1].numel()


def _packed_call(
    queries: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    queries_mask: Tensor | None,
    queries_cu_seqlens: Tensor,
    documents_cu_seqlens: Tensor,
    candidates_cu_seqlens: Tensor | None,
    max_query_length: int | None,
    max_document_length: int | None,
    options: tuple[bool, bool, str, str],
) -> _Call:
    """The call after the checks of the boundaries, with bounds on what they hold."""
    _check_boundaries("queries_cu_seqlens", queries_cu_seqlens)
    _check_boundaries("documents_cu_seqlens", documents_cu_seqlens)
    n_documents = documents_cu_seqlens.shape[0] - 1
    max_candidates = 0
    if candidates_cu_seqlens is not None:
        _check_boundaries("candidates_cu_seqlens", candidates_cu_seqlens)
        if candidates_cu_seqlens.shape != queries_cu_seqlens.shape:
            raise ValueError(
                f"candidates_cu_seqlens must have Nq + 1 = {queries_cu_seqlens.shape[0]} entries, "
                f"got {candidates_cu_seqlens.shape[0]}"
            )
        max_candidates = _longest("candidates_cu_seqlens", candidates_cu_seqlens, n_documents, "documents", None)
    on_gpu = documents_cu_seqlens.device.type == "cuda"
    if max_document_length is None and on_gpu and not needs_gradient(queries, hidden, weight, bias):
        # A bound that costs nothing. The winners would be int32 by it, and not int16.
        max_document_length = hidden.shape[0]
    return _Call(
        queries, hidden, weight, bias, queries_mask, None, queries_cu_seqlens, documents_cu_seqlens,
        candidates_cu_seqlens,
        _longest("queries_cu_seqlens", queries_cu_seqlens, queries.shape[0], "queries", max_query_length),
        _longest("documents_cu_seqlens", documents_cu_seqlens, hidden.shape[0], "documents", max_document_length),
        max_candidates, *options,
    )  # fmt: skip


def _scores(call: _Call) -> Tensor:
    """Scores, by the operator, or past the dispatcher where nothing needs it."""
    with_gradient = needs_gradient(call.queries, call.hidden, call.weight, call.bias)
    if not _is_plain(call.queries, call.hidden) or type(call.weight) not in (Tensor, torch.nn.Parameter):
        return _maxsim_hidden(*call, with_gradient)[0]
    if with_gradient:
        return _FromHidden.apply(*call)
    return _forward(call, False)[0]


def _are_laid_out(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether hidden states and layer lie as `kernels.fused` reads them."""
    return (
        hidden.is_contiguous()
        and weight.is_contiguous()
        and (bias is None or bias.is_contiguous())
        and (hidden.data_ptr() | weight.data_ptr()) % 16 == 0
    )


def _fused(call: _Call) -> Tensor | None:
    """Scores by the kernel that projects and scores at once, or None where it does not serve the call."""
    queries, hidden, weight = call.queries, call.hidden, call.weight
    if not hidden.is_cuda or call.implementation == "blocked" or call.candidates_cu_seqlens is not None:
        return None
    if call.packed:
        assert call.queries_cu_seqlens is not None
        n_queries = call.queries_cu_seqlens.shape[0] - 1
        if queries.shape[0] != n_queries * call.max_query_length:
            # They are not all of one length.
            return None
        queries = queries.unflatten(0, (n_queries, call.max_query_length))
    elif hidden.shape[0] > 1:
        return None
    bounds, mask = call.documents_cu_seqlens, call.documents_mask
    if (
        0 in queries.shape
        or call.tokens == 0
        or queries.stride(-1) != 1
        or not _are_laid_out(hidden, weight, call.bias)
    ):
        return None
    score = kernels().bound_fused(
        queries.shape, queries.stride(), queries.dtype, queries.device, call.tokens,
        hidden.shape[1] if bounds is None else bounds.shape[0] - 1, hidden.shape[2] if bounds is None else 0,
        weight.shape, None if bounds is None else bounds.dtype, call.bias is not None, call.queries_mask is not None,
        mask is not None, call.normalize, call.zero_masked,
    )  # fmt: skip
    if score is None:
        return None
    with kernels().on_device(hidden):
        return score(
            queries,
            hidden,
            weight,
            call.bias,
            None if call.queries_mask is None else call.queries_mask.contiguous(),
            None if mask is None else mask.contiguous(),
            None if bounds is None else bounds.to(hidden.device, non_blocking=True),
        )


def _blocks(call: _Call, limit: int) -> tuple[Block, ...]:
    """All documents in blocks of at most `limit` bytes of projected embeddings, or of one document."""
    most = limit // (call.weight.shape[0] * call.hidden.element_size())
    if call.tokens <= most:
        return (Block(ALL, ALL, slice(0, call.tokens)),)
    if call.documents_cu_seqlens is not None:
        return packed_blocks(call.documents_cu_seqlens, most)
    return padded_blocks(call.hidden.shape[:3], most)


def _hidden_of(call: _Call, block: Block) -> Tensor:
    """Hidden states [tokens of the block, d_model]; a view, unless the padded ones are not contiguous."""
    if call.packed:
        return call.hidden[block.rows]
    return call.hidden[block.groups, block.documents].reshape(-1, call.hidden.shape[-1])


def _empty_embeddings(call: _Call, shape: Iterable[int]) -> Embeddings:
    """Uninitialised embeddings of that many tokens."""
    values = call.hidden.new_empty((*shape, call.weight.shape[0]))
    if not call.normalize:
        return Embeddings(values, None)
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    return Embeddings(values, values.new_empty(values.shape[:-1], dtype=dtype))


def _normalize(call: _Call, embeddings: Tensor, out: Embeddings) -> None:
    """Write the embeddings divided by their norms, rounded, and one over these; `out` may hold the embeddings."""
    assert out.scale is not None
    if _by_kernels(call):
        if embeddings.numel():
            with kernels().on_device(embeddings):
                kernels().unit_rows(embeddings.contiguous(), *out)
        return
    out.scale.copy_(inverse_norms(embeddings))
    torch.mul(embeddings, out.scale.unsqueeze(-1), out=out.values)


def _through_normalisation(call: _Call, grad: Tensor, embeddings: Embeddings) -> None:
    """Replace the gradient of the embeddings by that of what they were before they were divided by their norms."""
    if embeddings.scale is None or grad.numel() == 0:
        return
    if _by_kernels(call):
        with kernels().on_device(grad):
            kernels().through_unit_rows(grad, *embeddings)
        return
    scale, units = embeddings.scale.unsqueeze(-1), embeddings.values
    wide = grad.to(scale.dtype)
    # Where the norm was clamped, the division is linear.
    along = torch.where(scale < 1.0 / SMALLEST_NORM, (units * wide).sum(dim=-1, keepdim=True), 0.0)
    # Where there is no gradient, there is none either of a token that is not a number.
    grad.copy_(((wide - units * along) * scale).masked_fill_(~wide.any(dim=-1, keepdim=True), 0.0))


def _by_kernels(call: _Call) -> bool:
    return choose(call.implementation, call.hidden.device, call.hidden.dtype, call.weight.shape[0]) == "triton"


def _with_unit_queries(call: _Call) -> tuple[_Call, Embeddings]:
    """The call with its queries divided by their norms, if they are to be."""
    if not call.normalize:
        return call, Embeddings(call.queries, None)
    units = _empty_embeddings(call, call.queries.shape[:-1])
    _normalize(call, call.queries, units)
    return call._replace(queries=units.values), units


def _project(call: _Call, block: Block, scratch: Embeddings) -> Embeddings:
    """The projected embeddings [tokens of the block, d], written into `scratch` [at least as many, d]."""
    states, weight, bias = _hidden_of(call, block), call.weight, call.bias
    count = states.shape[0]
    projected = Embeddings(scratch.values[:count], None if scratch.scale is None else scratch.scale[:count])
    if _by_kernels(call) and _are_laid_out(states, weight, bias):
        project = kernels().bound_projection(
            count, weight.shape, weight.dtype, weight.device, bias is not None, call.normalize
        )
        if project is not None:
            with kernels().on_device(states):
                project(states, weight, bias, *projected)
            return projected
    if bias is None:
        torch.mm(states, weight.T, out=projected.values)
    else:
        torch.addmm(bias, states, weight.T, out=projected.values)
    if call.normalize:
        _normalize(call, projected.values, projected)
    return projected


def _scratch(call: _Call, blocks: tuple[Block, ...]) -> Embeddings:
    return _empty_embeddings(call, [max(block.rows.stop - block.rows.start for block in blocks)])


def _padded_block(call: _Call, block: Block, projected: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Queries, documents and their masks, as the forward of `ops.maxsim` takes them."""
    queries, queries_mask, documents_mask = call.queries, call.queries_mask, call.documents_mask
    if call.hidden.shape[0] > 1:
        queries = queries[block.groups]
        queries_mask = None if queries_mask is None else queries_mask[block.groups]
    if documents_mask is not None:
        documents_mask = documents_mask[block.groups, block.documents]
    shape = call.hidden[block.groups, block.documents].shape[:-1]
    return queries, projected.view(*shape, projected.shape[-1]), queries_mask, documents_mask


def _packed_block(call: _Call, block: Block) -> tuple[Tensor, Tensor, Tensor | None]:
    """Boundaries of the queries, of the block's documents, and of each query's candidates among these."""
    queries, documents, candidates = call.queries_cu_seqlens, call.documents_cu_seqlens, call.candidates_cu_seqlens
    assert queries is not None
    assert documents is not None
    if block.documents != ALL:
        start, end = block.documents.start, block.documents.stop
        documents = documents[start : end + 1] - block.rows.start
        candidates = None if candidates is None else candidates.clamp(start, end) - start
    return queries, documents, candidates


def _score_block(call: _Call, block: Block, projected: Tensor, with_winners: bool) -> tuple[Tensor, Tensor]:
    """Scores of the block's documents, and their winners, or an empty tensor unless asked for."""
    if call.packed:
        queries_bounds, bounds, candidates = _packed_block(call, block)
        return varlen._forward(
            call.queries, projected, queries_bounds, bounds, candidates, call.max_query_length,
            call.max_document_length, call.max_candidates, False, with_winners, call.implementation,
            call.queries_mask,
        )  # fmt: skip
    queries, documents, queries_mask, documents_mask = _padded_block(call, block, projected)
    return _padded_forward(
        queries, documents, queries_mask, documents_mask, False, call.zero_masked, with_winners, call.implementation,
        call.backward,
    )  # fmt: skip


def _of_scores(call: _Call, block: Block, scores: Tensor) -> Tensor:
    """The scores of the block: of a padded layout [Nq, K], of packed documents [Nq, Nd], or [Nd] with candidates."""
    if call.packed:
        return scores[..., block.documents]
    return scores[:, block.documents] if call.hidden.shape[0] == 1 else scores[block.groups, block.documents]


def _of_winners(call: _Call, block: Block, winners: Tensor) -> Tensor:
    return winners[block.documents] if call.packed else winners[block.groups, block.documents]


def _products_as_they_are(device: str) -> AbstractContextManager[Any]:
    """Without autocast, which the tensors have followed already, and which takes no `out=` of another type."""
    # Entering it takes as long as a launch.
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _forward(call: _Call, with_winners: bool) -> tuple[Tensor, Tensor, Embeddings | None]:
    """Scores float32, winners (an empty tensor unless asked for), and all projected embeddings, if they may be kept.

    They may where a gradient is needed and there is room in the bound for them and for their gradient.
    """
    with _products_as_they_are(call.hidden.device.type), torch.no_grad():
        if not with_winners:
            scores = _fused(call)
            if scores is not None:
                return scores, call.hidden.new_empty(0, dtype=torch.int16), None
        call = _with_unit_queries(call)[0]
        blocks = _blocks(call, SCRATCH_BYTES)
        scratch = _scratch(call, blocks)
        if len(blocks) == 1:
            projected = _project(call, blocks[0], scratch)
            scores, winners = _score_block(call, blocks[0], projected.values, with_winners)
            keep = with_winners and 2 * projected.values.numel() * projected.values.element_size() <= SCRATCH_BYTES
            return scores, winners, projected if keep else None
        scores, winners = _forward_shapes(call, with_winners)
        for block in blocks:
            projected = _project(call, block, scratch)
            block_scores, block_winners = _score_block(call, block, projected.values, with_winners)
            _of_scores(call, block, scores).copy_(block_scores)
            if with_winners:
                _of_winners(call, block, winners).copy_(block_winners)
        return scores, winners, None


class _Needs(NamedTuple):
    """Which gradients are asked for."""

    queries: bool
    hidden: bool
    weight: bool
    bias: bool

    @property
    def projected(self) -> bool:
        return self.hidden or self.weight or self.bias


def _backward(
    call: _Call, grad_scores: Tensor, kept: list, needs: _Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of queries, hidden, weight and bias in their type; None for one that is not needed.

    `kept` holds the winners and the projected embeddings (or None), and is emptied: they are let go before the
    gradient of the hidden states, which is larger than both, is allocated.
    """
    winners, projected = kept
    kept.clear()
    with _products_as_they_are(call.hidden.device.type), torch.no_grad():
        call, queries = _with_unit_queries(call)
        blocks = _blocks(call, SCRATCH_BYTES // 2)
        if len(blocks) > 1:
            return _backward_in_blocks(call, blocks, queries, projected, grad_scores, winners, needs)
        if projected is None:
            projected = _project(call, blocks[0], _scratch(call, blocks))
        grad_queries, gradient = _backward_block(call, blocks[0], projected, grad_scores, winners, needs)
        if grad_queries is not None:
            _through_normalisation(call, grad_queries, queries)
        hidden, weight, states = call.hidden, call.weight, _hidden_of(call, blocks[0])
        del call, queries, projected, winners
        return (
            grad_queries,
            torch.mm(gradient, weight).view(hidden.shape) if needs.hidden else None,
            torch.mm(gradient.T, states) if needs.weight else None,
            gradient.sum(dim=0) if needs.bias else None,
        )


def _backward_in_blocks(
    call: _Call,
    blocks: tuple[Block, ...],
    queries: Embeddings,
    projected: Embeddings | None,
    grad_scores: Tensor,
    winners: Tensor,
    needs: _Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """`_backward`, with sums over the blocks in float32 (float64 for float64)."""
    dtype = torch.float64 if call.hidden.dtype == torch.float64 else torch.float32
    hidden, weight = call.hidden, call.weight
    grad_queries = call.queries.new_zeros(call.queries.shape, dtype=dtype) if needs.queries else None
    grad_hidden = hidden.new_empty(hidden.shape) if needs.hidden else None
    grad_weight = weight.new_zeros(weight.shape, dtype=dtype) if needs.weight else None
    grad_bias = weight.new_zeros(weight.shape[0], dtype=dtype) if needs.bias else None
    scratch = _scratch(call, blocks)
    for block in blocks:
        if projected is None:
            embeddings = _project(call, block, scratch)
        else:
            scale = projected.scale
            embeddings = Embeddings(projected.values[block.rows], None if scale is None else scale[block.rows])
        block_grad_queries, gradient = _backward_block(call, block, embeddings, grad_scores, winners, needs)
        if grad_queries is not None and block_grad_queries is not None:
            grouped = not call.packed and hidden.shape[0] > 1
            (grad_queries[block.groups] if grouped else grad_queries).add_(block_grad_queries)
        if grad_hidden is not None:
            torch.mm(gradient, weight, out=grad_hidden.view(-1, hidden.shape[-1])[block.rows])
        if grad_weight is not None:
            _add_product(grad_weight, gradient.T, _hidden_of(call, block))
        if grad_bias is not None:
            grad_bias += gradient.sum(dim=0, dtype=dtype)
    if grad_queries is not None:
        _through_normalisation(call, grad_queries, queries)
    return (
        None if grad_queries is None else grad_queries.to(call.queries.dtype),
        grad_hidden,
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None else grad_bias.to(weight.dtype),
    )


def _backward_block(
    call: _Call, block: Block, projected: Embeddings, grad_scores: Tensor, winners: Tensor, needs: _Needs
) -> tuple[Tensor | None, Tensor]:
    """Gradients of the (unit) queries, or None, and of the block's projected embeddings [tokens of the block, d]."""
    grad_scores, winners = _of_scores(call, block, grad_scores), _of_winners(call, block, winners)
    values = projected.values
    if call.packed:
        queries_bounds, bounds, candidates = _packed_block(call, block)
        grad_queries, gradient = varlen._backward(
            grad_scores, call.queries, values, queries_bounds, bounds, candidates, winners, call.max_query_length,
            call.max_document_length, False, needs.queries, needs.projected, call.implementation,
        )  # fmt: skip
    else:
        queries, documents, _, _ = _padded_block(call, block, values)
        grad_queries, gradient = _padded_backward(
            grad_scores, queries, documents, winners, False, needs.queries, needs.projected, call.implementation,
            call.backward,
        )  # fmt: skip
    gradient = gradient.view(-1, values.shape[-1])
    if needs.projected:
        _through_normalisation(call, gradient, projected)
    return grad_queries if needs.queries else None, gradient


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, not rounded in between where torch has such a product."""
    if total.dtype == left.dtype or not left.is_cuda:
        total += left @ right
    else:
        total += torch.mm(left, right, out_dtype=total.dtype)


def _forward_shapes(call: _Call, with_winners: bool) -> tuple[Tensor, Tensor]:
    """Uninitialised scores and winners."""
    if not call.packed:
        return _padded_forward_shapes(call.queries, call.hidden, with_winners)
    assert call.queries_cu_seqlens is not None
    assert call.documents_cu_seqlens is not None
    return varlen._forward_shapes(
        call.queries, call.hidden, call.queries_cu_seqlens, call.documents_cu_seqlens, call.candidates_cu_seqlens,
        call.max_query_length, call.max_document_length, call.max_candidates, call.normalize, with_winners,
        call.implementation,
    )  # fmt: skip


_TENSORS = _Call._fields[:9]


class _FromHidden(torch.autograd.Function):
    """What the operator does to plain tensors, without the dispatcher between.

    It also keeps the projected embeddings for the backward where it may, which an operator, whose outputs have one
    shape whatever their size, cannot.
    """

    @staticmethod
    def forward(ctx, *arguments):
        call = _Call(*arguments)
        scores, winners, projected = _forward(call, True)
        ctx.save_for_backward(*arguments[: len(_TENSORS)])
        ctx.options = arguments[len(_TENSORS) :]
        # Not among the saved tensors, which live until the whole backward is over.
        ctx.kept = [winners, projected]
        return scores

    @staticmethod
    def backward(ctx, grad_scores):
        call = _Call(*ctx.saved_tensors, *ctx.options)
        found = _gradients(call, grad_scores, ctx.kept, _Needs(*ctx.needs_input_grad[:4]))
        return *found, *(None for _ in _Call._fields[4:])


def _gradients(call: _Call, grad_scores: Tensor, kept: list, needs: _Needs) -> tuple[Tensor | None, ...]:
    """`_backward` of a node of the graph that has `kept` what its forward did."""
    if not kept:
        # A second backward through a retained graph.
        kept += _forward(call, True)[1:]
    if torch.is_grad_enabled():
        # A graph of the backward is asked for: the operator has one, which says that there is no second derivative.
        gradients = _maxsim_hidden_backward(grad_scores, kept[0], *call, *needs)
        return tuple([gradient if need else None for gradient, need in zip(gradients, needs, strict=True)])
    return _backward(call, grad_scores, kept, needs)


class _PlannedFromHidden(torch.autograd.Function):
    """The same of what `hidden_plans` has decided."""

    @staticmethod
    def forward(ctx, queries, hidden, weight, bias, documents_mask, plan):
        scores, *kept = plan.forward(queries, hidden, weight, bias, documents_mask, None)
        ctx.save_for_backward(queries, hidden, weight, bias, documents_mask)
        ctx.plan = plan
        ctx.kept = kept
        return scores

    @staticmethod
    def backward(ctx, grad_scores):
        queries, hidden, weight, bias, documents_mask = ctx.saved_tensors
        need_queries, need_hidden, need_weight, need_bias, *_ = ctx.needs_input_grad
        device = hidden.device.type
        if not ctx.kept or torch.is_grad_enabled() or torch.is_autocast_enabled(device) or not _is_current(hidden):
            mask = None if documents_mask is None else _grouped(documents_mask, 3)
            call = _Call(
                queries, _grouped(hidden), weight, bias, None, mask, None, None, None, 0, 0, 0, *ctx.plan.options
            )
            # The longer way divides the queries again.
            kept = ctx.kept[::2]
            ctx.kept.clear()
            needs = _Needs(need_queries, need_hidden, need_weight, need_bias)
            grad_queries, grad_hidden, *rest = _gradients(call, grad_scores, kept, needs)
            return grad_queries, None if grad_hidden is None else grad_hidden.view(hidden.shape), *rest, None, None
        need_projected = need_hidden or need_weight or need_bias
        grad_queries, gradient = ctx.plan.gradients(grad_scores, *ctx.kept, need_queries, need_projected)
        # Let go before the gradient of the hidden states, which is larger than all of it, is allocated.
        ctx.kept.clear()
        return (
            grad_queries,
            torch.mm(gradient, weight).view(hidden.shape) if need_hidden else None,
            torch.mm(gradient.t(), hidden.view(-1, hidden.shape[-1])) if need_weight else None,
            gradient.sum(dim=0) if need_bias else None,
            None,
            None,
        )


_LIBRARY = torch.library.Library("pylate_flash", "FRAGMENT")
_CALL = (
    "Tensor queries, Tensor hidden, Tensor weight, Tensor? bias, Tensor? queries_mask, Tensor? documents_mask, "
    "Tensor? queries_cu_seqlens, Tensor? documents_cu_seqlens, Tensor? candidates_cu_seqlens, SymInt max_query_length, "
    "SymInt max_document_length, SymInt max_candidates, bool normalize, bool zero_masked, str implementation, "
    "str backward"
)
_LIBRARY.define(f"maxsim_hidden({_CALL}, bool with_winners) -> (Tensor, Tensor)")
_LIBRARY.define(
    f"maxsim_hidden_backward(Tensor grad_scores, Tensor winners, {_CALL}, bool need_queries, bool need_hidden, "
    "bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor, Tensor)"
)
_maxsim_hidden = torch.ops.pylate_flash.maxsim_hidden.default
_maxsim_hidden_backward = torch.ops.pylate_flash.maxsim_hidden_backward.default


def _operator(*arguments) -> tuple[Tensor, Tensor]:
    *call, with_winners = arguments
    return _forward(_Call(*call), with_winners)[:2]


def _operator_backward(grad_scores, winners, *arguments) -> tuple[Tensor, ...]:
    call, needs = _Call(*arguments[:-4]), _Needs(*arguments[-4:])
    gradients = _backward(call, grad_scores, [winners, None], needs)
    return tuple(call.hidden.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _backward_shapes(grad_scores, winners, *arguments) -> tuple[Tensor, ...]:
    call, needs = _Call(*arguments[:-4]), arguments[-4:]
    return tuple(
        call.hidden.new_empty(tensor.shape if need and tensor is not None else 0)
        for tensor, need in zip(call[:4], needs, strict=True)
    )


def _save_for_backward(ctx, inputs, output) -> None:
    *call, with_winners = inputs
    if not with_winners and any(tensor is not None and tensor.requires_grad for tensor in call[:4]):
        raise RuntimeError("pylate_flash::maxsim_hidden: a gradient needs with_winners=True")
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*call[: len(_TENSORS)], output[1])
    ctx.options = call[len(_TENSORS) :]


def _gradient(ctx, grad_scores, _):
    *tensors, winners = ctx.saved_tensors
    needs = ctx.needs_input_grad[:4]
    gradients = _maxsim_hidden_backward(grad_scores, winners, *tensors, *ctx.options, *needs)
    found = (gradient if need else None for gradient, need in zip(gradients, needs, strict=True))
    return *found, *(None for _ in range(len(_Call._fields) + 1 - 4))


_LIBRARY.impl("maxsim_hidden", _operator, "CompositeExplicitAutograd")
_LIBRARY.impl("maxsim_hidden_backward", _operator_backward, "CompositeExplicitAutograd")
torch.library.register_fake(
    "pylate_flash::maxsim_hidden", lambda *arguments: _forward_shapes(_Call(*arguments[:-1]), arguments[-1])
)
torch.library.register_fake("pylate_flash::maxsim_hidden_backward", _backward_shapes)
torch.library.register_autograd("pylate_flash::maxsim_hidden", _gradient, setup_context=_save_for_backward)
torch.library.register_autograd("pylate_flash::maxsim_hidden_backward", no_second_derivative("maxsim_from_hidden"))
