"""A model's hidden states and its projection, apart: what `ops.maxsim_from_hidden` takes in place of embeddings.

A ColBERT of PyLate is an encoder followed by one or several Dense layers, whose output is normalised where it is
scored. A `MultiVectorEncoder` of sentence-transformers 6 has modules that normalise, and that say which tokens are
scored, as well. Where the Dense layers are linear, they are one matrix and one bias together (`fold_dense`), and
`hidden_states` makes the model return what the encoder does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .texts import encoder_of

# What `hidden_states` adds to the features that the model returns.
WEIGHT, BIAS = "projection_weight", "projection_bias"

_TOKENS = "token_embeddings"


class _Host(NamedTuple):
    """The classes of a host: its model, and the modules that such a model may have. A subclass may compute anything."""

    title: str
    model: type
    encoder: type
    dense: tuple[type, ...]
    normalize: tuple[type, ...] = ()
    # What leaves embeddings alone.
    masks: tuple[type, ...] = ()


@functools.cache
def _hosts() -> list[_Host]:
    """The hosts that are installed."""
    found = []
    with suppress(ModuleNotFoundError):
        import pylate.models as pylate
        from sentence_transformers.models import Dense, Transformer

        found.append(_Host("a ColBERT of PyLate", pylate.ColBERT, Transformer, (pylate.Dense, Dense)))
    # An older sentence-transformers, which PyLate needs, has no such models.
    with suppress(ModuleNotFoundError):
        from sentence_transformers.base import modules as st
        from sentence_transformers.multi_vector_encoder.model import MultiVectorEncoder
        from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

        parts = st.Transformer, (st.Dense,), (st.Normalize,), (MultiVectorMask,)
        found.append(_Host("a MultiVectorEncoder", MultiVectorEncoder, *parts))
    return found


def masks_of(model: Any) -> list[nn.Module] | None:
    """The modules of a model that mask tokens; None where one may make other tokens, as pooling does."""
    modules = list(unwrapped(model).children())
    masks = {kind for host in _hosts() for kind in host.masks}
    known = {kind for host in _hosts() for kind in (host.encoder, *host.dense, *host.normalize)} | masks
    return [one for one in modules if type(one) in masks] if {type(one) for one in modules} <= known else None


def fold_dense(modules: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None]:
    """The one linear layer that a chain of linear Dense layers is.

    Parameters
    ----------
    modules
        `pylate.models.Dense` or sentence-transformers' Dense layers, in the order in which they are applied, with an
        identity for activation function; PyLate's may have a residual connection. At least one.

    Returns
    -------
    tuple of Tensor
        The weight [d, d_model] and the bias [d], or None. They are those of the layer itself where there is but one,
        without a residual; otherwise they are computed from those of the layers. Gradients flow to the layers.

    Raises
    ------
    ValueError
        If there is no module, or one of them is not such a layer.
    """
    if not modules:
        raise ValueError("modules must hold at least one Dense layer, got none")
    weight, bias = _linear(modules[0], 0)
    for index, module in enumerate(modules[1:], start=1):
        next_weight, next_bias = _linear(module, index)
        if next_weight.shape[1] != weight.shape[0]:
            raise ValueError(
                f"modules: Dense layer {index} takes {next_weight.shape[1]} dimensions, and the one before it gives "
                f"{weight.shape[0]}"
            )
        weight = next_weight @ weight
        if bias is not None:
            bias = next_weight @ bias
        if next_bias is not None:
            bias = next_bias if bias is None else bias + next_bias
    return weight, bias


def _linear(module: Any, index: int) -> tuple[Tensor, Tensor | None]:
    name = f"modules: layer {index}, {type(module).__name__},"
    if type(module) not in [kind for host in _hosts() for kind in host.dense]:
        raise ValueError(f"{name} is no Dense layer of PyLate or sentence-transformers, so it cannot be fused")
    if type(module.activation_function) is not nn.Identity:
        activation = type(module.activation_function).__name__
        raise ValueError(
            f"{name} has the activation function {activation}; only a linear layer (Identity) can be fused"
        )
    layers = [module.linear]
    if getattr(module, "use_residual", False) and module.in_features != module.out_features:
        layers.append(module.residual)
    for layer in layers:
        if type(layer) is not nn.Linear:
            raise ValueError(f"{name} has a {type(layer).__name__} where only a torch.nn.Linear can be fused")
    weight: Tensor = module.linear.weight
    if len(layers) == 2:
        weight = weight + module.residual.weight
    elif getattr(module, "use_residual", False):
        weight = weight + torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
    return weight, module.linear.bias


class _Projection(NamedTuple):
    """What stands between the encoder's hidden states and the embeddings that are scored."""

    dense: list[nn.Module]
    normalize: list[nn.Module]
    # Whether embeddings are normalised: by the model, or where they are scored.
    normalizes: bool


def dense_layers(model: Any) -> list[nn.Module]:
    """The Dense layers after a model's encoder, where `ops.maxsim_from_hidden` can take their place.

    Parameters
    ----------
    model
        A ColBERT of PyLate or a MultiVectorEncoder of sentence-transformers 6, also inside DDP or another wrapper with
        `.module`, or compiled.

    Returns
    -------
    list of torch.nn.Module
        In the order in which they are applied, at least one, which `fold_dense` takes.

    Raises
    ------
    ValueError
        If the model is not an encoder followed by linear Dense layers, and for a MultiVectorEncoder by no more than a
        Normalize and masks; it names the module and says why.
    """
    return _projection(model).dense


def normalizes(model: Any) -> bool:
    """Whether the projected embeddings of a model, which is as in `dense_layers`, are normalised to be scored."""
    return _projection(model).normalizes


def _projection(model: Any) -> _Projection:
    model = unwrapped(model)
    host = next((host for host in _hosts() if isinstance(model, host.model)), None)
    if host is None:
        titles = " or ".join(host.title for host in _hosts()) or "of a host, and none is installed"
        raise ValueError(f"fuse_projection: the model must be {titles}, got {type(model).__name__}")
    encoder, *others = model.children()
    if not isinstance(encoder, host.encoder):
        raise ValueError(
            f"fuse_projection: module 0 of the model is a {type(encoder).__name__}, expected a Transformer that gives "
            "token embeddings"
        )
    normalize = [module for module in others if type(module) in host.normalize]
    layers = [module for module in others if type(module) not in host.normalize + host.masks]
    if not layers:
        raise ValueError("fuse_projection: the model has no Dense layer after its encoder, so there is nothing to fuse")
    try:
        fold_dense(layers)
    except ValueError as error:
        raise ValueError(f"fuse_projection: the model cannot be fused after its encoder; {error}") from None
    if not host.normalize:
        # PyLate normalises where it scores.
        return _Projection(layers, [], True)
    for module in (*layers, *normalize):
        names = module.module_input_name, module.module_output_name
        if names != (_TOKENS, _TOKENS):
            raise ValueError(
                f"fuse_projection: a {type(module).__name__} of the model makes {names[1]!r} of {names[0]!r}; only "
                f"what makes {_TOKENS!r} of {_TOKENS!r} can be fused"
            )
    if normalize and others.index(normalize[0]) < others.index(layers[-1]):
        raise ValueError(
            "fuse_projection: the model normalises before its last Dense layer; only what is normalised after it "
            "can be fused"
        )
    return _Projection(layers, normalize, bool(normalize))


def unwrapped(model: Any) -> Any:
    """The model inside DDP, `torch.compile` and other wrappers."""
    # The models of the hosts are sequences of modules.
    while not isinstance(model, nn.Sequential):
        inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
        if inner is None:
            return model
        model = inner
    return model


@contextmanager
def hidden_states(model: Any) -> Iterator[None]:
    """In this block, the model returns its encoder's hidden states as `"token_embeddings"`, and how to project them.

    The output has `"projection_weight"` [d, d_model] and `"projection_bias"` ([d], absent where there is none) as well.
    They come from the model's own forward, because DDP only waits for parameters that lead to its output.

    Parameters
    ----------
    model
        As in `dense_layers`.

    Raises
    ------
    ValueError
        As `dense_layers`.
    """
    layers, normalize, _ = _projection(model)
    first, *others = [*layers, *normalize]

    def hand_over(features: dict[str, Tensor]) -> dict[str, Tensor]:
        weight, bias = fold_dense(layers)
        # A parameter itself has no gradient function, by which DDP would find it.
        features[WEIGHT] = weight.view_as(weight)
        if bias is not None:
            features[BIAS] = bias.view_as(bias)
        return features

    # A hook may have given a layer a forward of its own, as accelerate's do; without one, it is the class's again.
    before = {layer: vars(layer)["forward"] for layer in (first, *others) if "forward" in vars(layer)}
    try:
        first.forward = hand_over
        for layer in others:
            layer.forward = lambda features: features
        yield
    finally:
        for layer in (first, *others):
            del layer.forward
        for layer, forward in before.items():
            layer.forward = forward


def encode_hidden_states(
    model: Any,
    documents: Sequence[str],
    *,
    batch_size: int = 32,
    show_progress_bar: bool = False,
    convert_to_numpy: bool = True,
) -> list[Any]:
    """The encoder's hidden states of documents, of those tokens of which `model.encode` gives embeddings.

    They are what `indexes.Flat(..., projection=model)` keeps. Prefix, lengths, prompt and skiplist are `encode`'s, of
    documents.

    Parameters
    ----------
    model
        As in `dense_layers`.
    documents
        Their texts.
    batch_size
        Texts encoded at a time.
    show_progress_bar
        Draw a progress bar.
    convert_to_numpy
        Arrays (float32 for bfloat16, which numpy has not); otherwise tensors on the model's device.

    Returns
    -------
    list
        For each document [tokens, d_model].

    Raises
    ------
    ValueError
        As `dense_layers`.
    """
    with hidden_states(model):
        if not documents:
            return []
        return encoder_of(unwrapped(model), is_query=False)(
            list(documents),
            batch_size=batch_size,
            show_progress_bar=show_progress_bar,
            convert_to_numpy=convert_to_numpy,
            normalize_embeddings=False,
        )
