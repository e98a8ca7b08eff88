"""The short way of `maxsim_from_hidden`: what a plain call comes to is decided once for tensors of a kind.

Plain are half-precision tensors on the current GPU, without a queries' mask, and what `maxsim` has a short way for. The
checks and decisions of `ops.hidden` take the host longer than a small problem takes the GPU; here a call is looked up,
and is then products and launches and nothing more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import choose
from .hidden_blocks import ALL, Block, padded_blocks
from .maxsim import (
    MASKINGS,
    are_halves_of_one_size,
    goes_straight_to_the_kernel,
    kernels,
    needs_gradient,
    product_precision,
)

# The types of a layer's tensors that are no subclass with a behaviour of its own.
_LAYER_TYPES = (Tensor, torch.nn.Parameter, type(None))
Kind = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


class Embeddings(NamedTuple):
    """Embeddings [.., d]; under `normalize` divided by their norms, and one over the norms [..]."""

    values: Tensor
    scale: Tensor | None


_Forward = tuple[Tensor, Tensor | None, Embeddings | None, Embeddings | None]


class Plan(NamedTuple):
    """What computes a call, and the options of the operator that it was decided for.

    forward
        Of queries, hidden states, weight, bias, documents' mask and boundaries: scores, and, if a gradient is needed,
        winners, queries and projected embeddings.
    gradients
        Of the scores' gradient, winners, queries, projected embeddings, and whether the gradient of the queries is
        needed, and that of the embeddings: both. None where no gradient is needed.
    """

    forward: Callable[..., _Forward]
    gradients: Callable[..., tuple[Tensor | None, Tensor | None]] | None
    options: tuple[bool, bool, str, str]


def plan_of(
    queries: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    documents_mask: Tensor | None,
    documents_cu_seqlens: Tensor | None,
    max_document_length: int | None,
    normalize: bool,
    masking: str,
    implementation: str,
    scratch_bytes: int,
) -> Plan | None:
    """The plan of such a call, or None where it is not plain. Nothing was checked before."""
    if (
        not goes_straight_to_the_kernel(queries, hidden)
        or type(weight) not in _LAYER_TYPES[:2]
        or type(bias) not in _LAYER_TYPES
        or not (documents_mask is None or type(documents_mask) is Tensor)
        or not (documents_cu_seqlens is None or type(documents_cu_seqlens) is Tensor)
        or not (max_document_length is None or type(max_document_length) is int)
        or not type(masking) is type(implementation) is str
    ):
        return None
    return decide(
        kind(queries), kind(hidden), kind(weight), kind(bias), kind(documents_mask), kind(documents_cu_seqlens),
        max_document_length, (hidden.data_ptr() | weight.data_ptr()) % 16 == 0,
        needs_gradient(queries, hidden, weight, bias), bool(normalize), masking, implementation, scratch_bytes,
    )  # fmt: skip


def kind(tensor: Tensor | None) -> Kind | None:
    """All that a decision depends on."""
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


@functools.lru_cache(maxsize=1024)
def decide(
    queries: Kind,
    hidden: Kind,
    weight: Kind,
    bias: Kind | None,
    documents_mask: Kind | None,
    cu_seqlens: Kind | None,
    max_document_length: int | None,
    aligned: bool,
    with_gradient: bool,
    normalize: bool,
    masking: str,
    implementation: str,
    scratch_bytes: int,
) -> Plan | None:
    """`plan_of` for tensors of these kinds; `aligned`: hidden states and weight begin at multiples of 16 bytes."""
    (shape, strides, dtype, device), (hidden_shape, *_), (weight_shape, *_) = queries, hidden, weight
    packed = cu_seqlens is not None
    *sizes, length, d_model = hidden_shape if len(hidden_shape) > 2 else (1, 0, *hidden_shape)
    if (
        len(shape) != 3
        or len(hidden_shape) not in ((2,) if packed else (3, 4))
        or (len(hidden_shape) == 4 and sizes[0] != shape[0])
        or any(other is not None and other[2:] != queries[2:] for other in (hidden, weight, bias))
        or tuple(weight_shape) != (shape[2], d_model)
        or not are_halves_of_one_size(shape, strides, dtype, shape, strides)
        or any(other is not None and other[1] != _contiguous(other[0]) for other in (queries, hidden, weight, bias))
        or (bias is not None and tuple(bias[0]) != (shape[2],))
        or (
            documents_mask is not None
            and (packed or documents_mask != (hidden_shape[:-1], _contiguous(hidden_shape[:-1]), torch.bool, device))
        )
        or masking not in MASKINGS
        or implementation not in ("auto", "triton")
        or choose(implementation, device, dtype, shape[2]) != "triton"
    ):
        return None
    options = (normalize, masking == "zero", implementation, "auto")
    n_tokens = hidden_shape[:-1].numel()
    if cu_seqlens is not None:
        (bounds, *_), bounds_strides, bounds_dtype, bounds_device = cu_seqlens
        if (
            bounds < 2
            or max_document_length is None
            or bounds_strides != (1,)
            or bounds_dtype not in (torch.int32, torch.int64)
            or bounds_device != device
        ):
            return None
        n_documents = bounds - 1
    elif max_document_length is not None:
        return None
    else:
        n_documents, bounds_dtype = sizes[-1], None
    if not with_gradient and aligned and (len(sizes) == 1 or packed or sizes[0] == 1):
        score = kernels().bound_fused(
            shape, strides, dtype, device, n_tokens, n_documents, length if not packed else 0, weight_shape,
            bounds_dtype, bias is not None, False, documents_mask is not None, normalize, masking == "zero",
        )  # fmt: skip
        if score is not None:
            return Plan(_alone(score), None, options)
    most = scratch_bytes // (shape[2] * dtype.itemsize)
    if packed:
        assert max_document_length is not None
        if with_gradient or n_tokens > most:
            return None
        compute = kernels().bound_maxsim_varlen(
            shape, strides, dtype, device, n_tokens, shape[2], True, n_documents, bounds_dtype, max_document_length,
            False, product_precision(dtype),
        )  # fmt: skip
        if compute is None:
            return None
        parts = [(Block(ALL, ALL, slice(0, n_tokens)), n_tokens, ALL, compute)]
        return Plan(
            _in_blocks(parts, queries, weight_shape, bias is not None, aligned, length, 1, normalize), None, options
        )
    groups, candidates = sizes if len(sizes) == 2 else (1, *sizes)
    blocks = padded_blocks((groups, candidates, length), most)
    if groups > 1 and blocks[0].documents.stop < candidates:
        # Of the candidates of one query, those of a block are not all.
        return None
    # What is projected is kept for the backward, and its gradient takes as much again.
    if with_gradient and 2 * n_tokens > most:
        return None
    parts = []
    for block in blocks:
        first, last = block.groups.start, block.groups.stop
        documents_shape = (last - first, block.documents.stop - block.documents.start, length, shape[2])
        compute = kernels().bound_maxsim(
            torch.Size((shape[0] if groups == 1 else last - first, *shape[1:])), strides, dtype, device,
            documents_shape, _contiguous(documents_shape), True, False, documents_mask is not None, with_gradient,
            False, masking == "zero", product_precision(dtype),
        )  # fmt: skip
        rows = block.rows
        parts.append((block, rows.stop - rows.start, slice(rows.start // length, rows.stop // length), compute))
    forward = _in_blocks(parts, queries, weight_shape, bias is not None, aligned, length, groups, normalize)
    if not with_gradient:
        return Plan(forward, None, options)
    documents_shape = (groups, candidates, length, shape[2])
    compute = kernels().bound_backward(
        shape, strides, dtype, device, documents_shape, _contiguous(documents_shape), False, "auto"
    )
    return Plan(forward, _gradients(compute, queries, n_tokens, normalize), options)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, of sizes that are not 0."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))


def _alone(score: Callable[..., Tensor]) -> Callable[..., _Forward]:
    """The forward of a kernel that projects and scores at once."""

    def forward(
        queries: Tensor,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        documents_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> _Forward:
        return score(queries, hidden, weight, bias, None, documents_mask, cu_seqlens), None, None, None

    return forward


def _in_blocks(
    parts: list,
    queries: Kind,
    weight_shape: torch.Size,
    has_bias: bool,
    aligned: bool,
    length: int,
    groups: int,
    normalize: bool,
) -> Callable[..., _Forward]:
    """The forward of blocks: of each the block, its tokens, its rows in the mask, and what scores it."""
    shape, _, dtype, device = queries
    size, d_model = weight_shape
    most = max(tokens for _, tokens, _, _ in parts)
    divide_queries = kernels().bound_units(shape, dtype, device)
    project = [
        kernels().bound_projection(tokens, weight_shape, dtype, device, has_bias, normalize) if aligned else None
        for _, tokens, _, _ in parts
    ]
    divide = [kernels().bound_units(torch.Size((tokens, size)), dtype, device) for _, tokens, _, _ in parts]

    def forward(
        queries: Tensor,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        documents_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> _Forward:
        # What the first launch does not need comes after it: the GPU begins with the product.
        scratch = hidden.new_empty((most, size))
        scale = hidden.new_empty(most, dtype=torch.float32) if normalize else None
        queries_scale = winners = None
        found: list[Tensor] = []
        for (block, tokens, of_mask, compute), project_block, divide_block in zip(parts, project, divide, strict=True):
            projected = scratch if tokens == most else scratch[:tokens]
            if project_block is not None:
                # It takes an address and a number of tokens.
                block_states = hidden if block.rows.start == 0 else hidden.view(-1, d_model)[block.rows]
                project_block(block_states, weight, bias, projected, scale)
            else:
                block_states = hidden.view(-1, d_model)[block.rows]
                if bias is None:
                    torch.mm(block_states, weight.t(), out=projected)
                else:
                    torch.addmm(bias, block_states, weight.t(), out=projected)
            if normalize:
                if project_block is None:
                    divide_block(projected, projected, scale)
                if not found:
                    units = torch.empty_like(queries)
                    queries_scale = hidden.new_empty(shape[0] * shape[1], dtype=torch.float32)
                    divide_queries(queries, units, queries_scale)
                    queries = units
            block_queries = queries if groups == 1 or len(parts) == 1 else queries[block.groups]
            block_mask = None if documents_mask is None else documents_mask.view(-1, length)[of_mask]
            scores, winners = compute(block_queries, projected, cu_seqlens, None, block_mask)
            found.append(scores)
        if len(found) > 1:
            scores = torch.cat(found, dim=1 if groups == 1 else 0)
        return scores, winners, Embeddings(queries, queries_scale), Embeddings(scratch, scale)

    return forward


def _gradients(
    compute: Callable[..., tuple[Tensor | None, Tensor | None]], queries: Kind, n_tokens: int, normalize: bool
) -> Callable[..., tuple[Tensor | None, Tensor | None]]:
    """The gradients of queries and projected embeddings [n_tokens, d], of one block."""
    shape, _, dtype, device = queries
    through_queries = kernels().bound_through_units(shape, dtype, dtype, device)
    through = kernels().bound_through_units(torch.Size((n_tokens, shape[2])), dtype, dtype, device)

    def gradients(
        grad_scores: Tensor,
        winners: Tensor,
        queries: Embeddings,
        projected: Embeddings,
        need_queries: bool,
        need_projected: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        grad_queries, grad_projected = compute(
            grad_scores, queries.values, projected.values, winners, need_queries, need_projected
        )
        if normalize and grad_queries is not None:
            through_queries(grad_queries, *queries)
        if normalize and grad_projected is not None:
            through(grad_projected, *projected)
        return grad_queries, grad_projected

    return gradients
