"""Losses that encode their texts twice: first for the value, then, in the backward, for the gradients (GradCache).

Shared by the cached losses of all hosts; `mini_batches` implements the two encoding passes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..encoding.projection import BIAS, WEIGHT, dense_layers, fold_dense, hidden_states
from .contrast import Batch, Padded, cross_entropy, timed
from .mini_batches import (
    Column,
    Limits,
    MiniBatch,
    Packed,
    encode,
    encode_again,
    mini_batches,
    right_documents,
    unpack_padded,
)
from .options import LossOptions


def autocast_in_force(device: str) -> dict[str, Any]:
    """Return the `torch.autocast` arguments that reproduce the current autocast in a backward outside of it."""
    return {
        "device_type": device,
        "dtype": torch.get_autocast_dtype(device),
        "enabled": torch.is_autocast_enabled(device),
        # The cache would keep weights cast in the first pass, without a graph: a second pass in the caller's autocast
        # would then pass no gradients to the parameters.
        "cache_enabled": False,
    }


def cached_cross_entropy(
    loss: Any,
    options: LossOptions,
    columns: Sequence[dict[str, Any]],
    keep_masks: Sequence[Tensor],
    limits: Limits,
    *,
    autocast: dict[str, Any],
    exclude: Tensor | None = None,
    arguments: Sequence[dict[str, Any]] | None = None,
    divided: bool = False,
) -> Tensor:
    """Compute the contrastive loss of tokenized columns, which are encoded again in the backward.

    Parameters
    ----------
    loss
        Has `model` and `show_progress_bar`, and may have a `stopwatch`.
    options
        How the kept tokens are compared.
    columns, keep_masks, limits, arguments
        As in `mini_batches`, queries first.
    autocast
        Result of `autocast_in_force`.
    exclude
        As in `cross_entropy`, in the order of the columns.
    divided
        Divide the value by the number of queries, but not its gradients.
    """
    # The projection does not map a hidden state of zeros to an embedding of zeros.
    zeros = options.masking == "zero" and not options.fuse_projection
    queries, *documents = mini_batches(columns, keep_masks, limits, [False] + [zeros] * (len(columns) - 1), arguments)
    labels = right_documents(queries, documents[0])
    if exclude is not None:
        positions = torch.cat([index * len(labels) + column.order for index, column in enumerate(documents)])
        exclude = exclude[queries.order][:, positions]
    parts = [queries.batches, [batch for column in documents for batch in column.batches]]
    with hidden_states(loss.model) if options.fuse_projection else nullcontext():
        tokens = [encode(part, loss.model, autocast, loss.show_progress_bar) for part in parts]
    projection = fold_dense(dense_layers(loss.model)) if options.fuse_projection else (None, None)
    with_grad = torch.is_grad_enabled()
    leaves = [
        None if tensor is None else tensor.detach().requires_grad_(with_grad) for tensor in (*tokens, *projection)
    ]
    with timed(loss, tokens[0].device):
        result = cross_entropy(options, _batch_of(options, queries, documents, leaves), labels, exclude)
    value = result.detach() / len(labels) if divided else result.detach()
    if with_grad:
        # Pass them in a list, which the hook clears: they are freed before the encoder needs the memory.
        retained = [result, *leaves]
        value.requires_grad_().register_hook(functools.partial(_encode_again, loss, parts, retained, autocast))
    return value


def _batch_of(
    options: LossOptions, queries: Column, documents: Sequence[Column], leaves: Sequence[Tensor | None]
) -> Batch:
    """Build a batch from `leaves`: kept tokens [T, d] of queries and documents, weight and bias; queries get padded."""
    query_tokens, document_tokens, weight, bias = leaves
    assert query_tokens is not None
    assert document_tokens is not None
    padded, queries_mask = unpack_padded(query_tokens, queries.n_kept, max(queries.lengths))
    lengths, longest = torch.cat([column.n_kept for column in documents]), max(max(c.lengths) for c in documents)
    candidates: Padded | Packed = Packed(document_tokens, lengths, longest)
    if weight is not None and options.masking == "zero":
        # A text with masked tokens needs a padding position; a text that fills its column needs none.
        states, mask = unpack_padded(document_tokens, lengths, min(longest + 1, documents[0].keep.shape[1]))
        candidates = Padded(states, states.new_ones(states.shape[:2], dtype=torch.bool) if mask is None else mask)
    return Batch(padded, queries_mask, [candidates], None if weight is None else (weight, bias))


def _encode_again(
    loss: Any, parts: Sequence[Sequence[MiniBatch]], retained: list[Any], autocast: dict[str, Any], grad_loss: Tensor
) -> None:
    """Compute the gradients of the kept tokens, and propagate them to the parameters.

    This runs once the loss has its gradient: with loss scaling for float16, no gradient underflows then.
    """
    if not retained:
        raise RuntimeError("the gradient of a cached loss is computed once: do not call its backward again")
    with timed(loss, grad_loss.device):
        torch.autograd.backward(retained[0], grad_loss.to(retained[0].dtype))
    gradients: list[Any] = [None if leaf is None else leaf.grad for leaf in retained[1:]]
    retained.clear()
    projection = {name: value for name, value in zip((WEIGHT, BIAS), gradients[-2:], strict=True) if value is not None}
    with hidden_states(loss.model) if projection else nullcontext():
        encode_again(
            list(zip(parts, gradients[:-2], strict=True)),
            loss.model,
            autocast,
            loss.show_progress_bar,
            projection,
        )
