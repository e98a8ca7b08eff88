"""A loss whose texts are encoded twice: its value first, and in its backward the gradients of the encoder (GradCache).

What a cached loss of every host does; `mini_batches` has the two passes themselves.
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
    """The arguments of `torch.autocast` that repeat what is in force for a type of device, in a backward outside it."""
    return {
        "device_type": device,
        "dtype": torch.get_autocast_dtype(device),
        "enabled": torch.is_autocast_enabled(device),
        # It would hold weights that were cast in the first pass, and so lead no gradient to the parameters, for a
        # second one that runs in the caller's autocast too.
        "cache_enabled": False,
    }


def cached_cross_entropy(
    loss: Any,
    options: LossOptions,
    columns: Sequence[dict[str, Any]],
    kept: Sequence[Tensor],
    limits: Limits,
    *,
    autocast: dict[str, Any],
    exclude: Tensor | None = None,
    arguments: Sequence[dict[str, Any]] | None = None,
    divided: bool = False,
) -> Tensor:
    """The contrastive loss of tokenized columns, which in its backward encodes them again.

    Parameters
    ----------
    loss
        Has `model` and `show_progress_bar`, and may have a `stopwatch`.
    options
        How the kept tokens are compared.
    columns, kept, limits, arguments
        Texts, queries first, and what is kept of them, as in `mini_batches`.
    autocast
        What `autocast_in_force` has said.
    exclude
        As in `cross_entropy`, in the order of the columns.
    divided
        Divide the value by the number of queries, and not its gradients.
    """
    # A hidden state of zeros is no embedding of zeros.
    zeros = options.masking == "zero" and not options.fuse_projection
    queries, *documents = mini_batches(columns, kept, limits, [False] + [zeros] * (len(columns) - 1), arguments)
    labels = right_documents(queries, documents[0])
    if exclude is not None:
        places = torch.cat([index * len(labels) + column.order for index, column in enumerate(documents)])
        exclude = exclude[queries.order][:, places]
    parts = [queries.batches, [batch for column in documents for batch in column.batches]]
    with hidden_states(loss.model) if options.fuse_projection else nullcontext():
        tokens = [encode(part, loss.model, autocast, loss.show_progress_bar) for part in parts]
    projection = fold_dense(dense_layers(loss.model)) if options.fuse_projection else (None, None)
    with_grad = torch.is_grad_enabled()
    leaves = [
        None if tensor is None else tensor.detach().requires_grad_(with_grad) for tensor in (*tokens, *projection)
    ]
    with timed(loss, tokens[0].device):
        computed = cross_entropy(options, _batch_of(options, queries, documents, leaves), labels, exclude)
    value = computed.detach() / len(labels) if divided else computed.detach()
    if with_grad:
        # In a list, which gives them away: they are freed before the encoder needs the memory.
        held = [computed, *leaves]
        value.requires_grad_().register_hook(functools.partial(_encode_again, loss, parts, held, autocast))
    return value


def _batch_of(
    options: LossOptions, queries: Column, documents: Sequence[Column], leaves: Sequence[Tensor | None]
) -> Batch:
    """The kept tokens [T, d] of queries, padded, and of the columns of documents, packed; weight and bias, or None."""
    of_queries, of_documents, weight, bias = leaves
    assert of_queries is not None
    assert of_documents is not None
    padded, queries_mask = unpack_padded(of_queries, queries.n_kept, max(queries.lengths))
    lengths, longest = torch.cat([column.n_kept for column in documents]), max(max(c.lengths) for c in documents)
    together: Padded | Packed = Packed(of_documents, lengths, longest)
    if weight is not None and options.masking == "zero":
        # With a place of padding where a text has masked tokens, and with none where it has not.
        states, mask = unpack_padded(of_documents, lengths, min(longest + 1, documents[0].kept.shape[1]))
        together = Padded(states, states.new_ones(states.shape[:2], dtype=torch.bool) if mask is None else mask)
    return Batch(padded, queries_mask, [together], None if weight is None else (weight, bias))


def _encode_again(
    loss: Any, parts: Sequence[Sequence[MiniBatch]], held: list[Any], autocast: dict[str, Any], grad_loss: Tensor
) -> None:
    """Give the kept tokens their gradients, and pass these on to the parameters.

    Not before the loss has its own: a loss scaled for float16 is, so that no gradient of it is lost in rounding.
    """
    if not held:
        raise RuntimeError("the gradient of a cached loss is computed once: do not ask for its backward again")
    with timed(loss, grad_loss.device):
        torch.autograd.backward(held[0], grad_loss.to(held[0].dtype))
    gradients: list[Any] = [None if leaf is None else leaf.grad for leaf in held[1:]]
    held.clear()
    projection = {name: value for name, value in zip((WEIGHT, BIAS), gradients[-2:], strict=True) if value is not None}
    with hidden_states(loss.model) if projection else nullcontext():
        encode_again(
            list(zip(parts, gradients[:-2], strict=True)),
            loss.model,
            autocast,
            loss.show_progress_bar,
            projection,
        )
