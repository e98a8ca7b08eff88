"""A loss whose texts are encoded twice: its value first, and in its backward the gradients of the encoder (GradCache).

What a cached loss of every host does; `mini_batches` has the two passes themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..encoding.projection import BIAS, WEIGHT, dense_layers, fold_dense, hidden_states
from .contrast import timed
from .mini_batches import Column, MiniBatch, Packed, encode, encode_again, unpack_padded

# Of each part its tokens [T, d], then the weight and the bias of the projection where they are hidden states.
Leaves = list[Tensor | None]


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


def kept_operands(
    queries: Column, documents: Sequence[Column], of_queries: Tensor | None, of_documents: Tensor | None
) -> tuple[Tensor, Tensor | None, Packed]:
    """The kept tokens of queries, padded, with their mask, and those of the columns of documents, packed."""
    assert of_queries is not None
    assert of_documents is not None
    padded, queries_mask = unpack_padded(of_queries, queries.n_kept, max(queries.lengths))
    lengths = torch.cat([column.n_kept for column in documents])
    return padded, queries_mask, Packed(of_documents, lengths, max(max(column.lengths) for column in documents))


def cached_loss(
    loss: Any,
    parts: Sequence[Sequence[MiniBatch]],
    of_tokens: Callable[[Leaves], Tensor],
    autocast: dict[str, Any],
    fused: bool,
    value_over: int = 1,
) -> Tensor:
    """The loss of the kept tokens of mini-batches, which in its backward encodes them again.

    Parameters
    ----------
    loss
        Has `model` and `show_progress_bar`, and may have a `stopwatch`.
    parts
        Mini-batches whose tokens are kept one after the other.
    of_tokens
        The loss, differentiable, of the kept tokens of the parts.
    autocast
        What `autocast_in_force` has said.
    fused
        Keep hidden states in place of embeddings.
    value_over
        Divides the value, and not its gradients.
    """
    with hidden_states(loss.model) if fused else nullcontext():
        tokens = [encode(part, loss.model, autocast, loss.show_progress_bar) for part in parts]
    projection = fold_dense(dense_layers(loss.model)) if fused else (None, None)
    with_grad = torch.is_grad_enabled()
    leaves = [
        None if tensor is None else tensor.detach().requires_grad_(with_grad) for tensor in (*tokens, *projection)
    ]
    with timed(loss, tokens[0].device):
        computed = of_tokens(leaves)
    value = computed.detach()
    if value_over != 1:
        value = value / value_over
    if with_grad:
        # In a list, which gives them away: they are freed before the encoder needs the memory.
        held = [computed, *leaves]
        value.requires_grad_().register_hook(functools.partial(_encode_again, loss, parts, held, autocast))
    return value


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
