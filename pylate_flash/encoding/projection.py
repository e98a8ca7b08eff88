"""Hidden states and projection of a model, separately: the inputs of `ops.maxsim_from_hidden` in place of embeddings.

A PyLate ColBERT is an encoder followed by one or more Dense layers, whose output is normalised during scoring. A
`MultiVectorEncoder` of sentence-transformers 6 also has modules that normalise, and that mask tokens. Linear Dense
layers fold into one matrix and one bias (`fold_dense`), and `hidden_states` makes the model return the output of its
encoder.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.checks import check_integer
from .texts import encoder_of

# Keys that `hidden_states` adds to the features returned by the model.
WEIGHT, BIAS = "projection_weight", "projection_bias"

_TOKENS = "token_embeddings"


class _Host(NamedTuple):
    """The classes of a host: its model and supported modules, matched exactly, as a subclass may compute anything."""

    title: str
    model: type
    encoder: type
    dense: tuple[type, ...]
    normalize: tuple[type, ...] = ()
    # Modules that do not change embeddings.
    masks: tuple[type, ...] = ()


@functools.cache
def _hosts() -> list[_Host]:
    """The installed hosts."""
    hosts = []
    with suppress(ModuleNotFoundError):
        import pylate.models as pylate
        from sentence_transformers.models import Dense, Transformer

        hosts.append(_Host("a ColBERT of PyLate", pylate.ColBERT, Transformer, (pylate.Dense, Dense)))
    # The older sentence-transformers that PyLate needs has no such models.
    with suppress(ModuleNotFoundError):
        from sentence_transformers.base import modules as st
        from sentence_transformers.multi_vector_encoder.model import MultiVectorEncoder
        from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

        parts = st.Transformer, (st.Dense,), (st.Normalize,), (MultiVectorMask,)
        hosts.append(_Host("a MultiVectorEncoder", MultiVectorEncoder, *parts))
    return hosts


def masks_of(model: Any) -> list[nn.Module] | None:
    """The modules of a model that mask tokens; None if another module may change the tokens, as pooling does."""
    modules = list(unwrapped(model).children())
    masks = {kind for host in _hosts() for kind in host.masks}
    known = {kind for host in _hosts() for kind in (host.encoder, *host.dense, *host.normalize)} | masks
    return [m for m in modules if type(m) in masks] if {type(m) for m in modules} <= known else None


def fold_dense(modules: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None]:
    """Fold a chain of linear Dense layers into one linear layer.

    Parameters
    ----------
    modules
        `pylate.models.Dense` or sentence-transformers' Dense layers, in order of application, with the identity as
        activation function; PyLate's may have a residual connection. At least one.

    Returns
    -------
    tuple of Tensor
        The weight [d, d_model] and the bias [d], or None: those of the layer itself for a single layer without a
        residual; otherwise computed from those of the layers. Gradients flow to the layers.

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
                f"modules: Dense layer {index} takes {next_weight.shape[1]} dimensions, expected "
                f"{weight.shape[0]}, which the one before it gives"
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
        raise ValueError(f"{name} is not a Dense layer of PyLate or sentence-transformers, so it cannot be fused")
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
    """The modules between the encoder's hidden states and the scored embeddings."""

    dense: list[nn.Module]
    normalize: list[nn.Module]
    # Whether embeddings are normalised, by the model or during scoring.
    normalizes: bool


def dense_layers(model: Any, argument: str = "fuse_projection") -> list[nn.Module]:
    """The Dense layers after a model's encoder, if `ops.maxsim_from_hidden` can replace them.

    Parameters
    ----------
    model
        A PyLate ColBERT or a MultiVectorEncoder of sentence-transformers 6, possibly compiled, or inside DDP or another
        wrapper with `.module`.
    argument
        Name of the caller's argument that asks for it, for the messages.

    Returns
    -------
    list of torch.nn.Module
        At least one, in order of application, as `fold_dense` takes them.

    Raises
    ------
    ValueError
        If the model is not an encoder followed by linear Dense layers, and in a MultiVectorEncoder optionally by a
        Normalize and masks; the message names the module and the reason.
    """
    return _projection(model, argument).dense


def normalizes(model: Any) -> bool:
    """Whether the projected embeddings of a model, as in `dense_layers`, are normalised for scoring."""
    return _projection(model).normalizes


def _projection(model: Any, argument: str = "fuse_projection") -> _Projection:
    model = unwrapped(model)
    host = next((host for host in _hosts() if isinstance(model, host.model)), None)
    if host is None:
        titles = " or ".join(host.title for host in _hosts()) or "of a host library, but none is installed"
        raise ValueError(f"{argument}: the model must be {titles}, got {type(model).__name__}")
    encoder, *rest = model.children()
    if not isinstance(encoder, host.encoder):
        raise ValueError(
            f"{argument}: module 0 of the model is a {type(encoder).__name__}, expected a Transformer that gives "
            "token embeddings"
        )
    normalize = [module for module in rest if type(module) in host.normalize]
    layers = [module for module in rest if type(module) not in host.normalize + host.masks]
    if not layers:
        raise ValueError(f"{argument}: the model has no Dense layer after its encoder, so there is nothing to fuse")
    try:
        fold_dense(layers)
    except ValueError as error:
        raise ValueError(f"{argument}: the model cannot be fused after its encoder; {error}") from None
    if not host.normalize:
        # PyLate normalises during scoring.
        return _Projection(layers, [], True)
    for module in (*layers, *normalize):
        names = module.module_input_name, module.module_output_name
        if names != (_TOKENS, _TOKENS):
            raise ValueError(
                f"{argument}: a {type(module).__name__} of the model maps {names[0]!r} to {names[1]!r}; only "
                f"a module that maps {_TOKENS!r} to {_TOKENS!r} can be fused"
            )
    if normalize and rest.index(normalize[0]) < rest.index(layers[-1]):
        raise ValueError(
            f"{argument}: the model normalises before its last Dense layer; only a model that normalises "
            "after it can be fused"
        )
    return _Projection(layers, normalize, bool(normalize))


def unwrapped(model: Any) -> Any:
    """The model inside DDP, `torch.compile` and other wrappers."""
    # Models of the hosts are nn.Sequential.
    while not isinstance(model, nn.Sequential):
        inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
        if inner is None:
            return model
        model = inner
    return model


@contextmanager
def hidden_states(model: Any) -> Iterator[None]:
    """Make the model return its encoder's hidden states as `"token_embeddings"`, and their projection, in this context.

    The output also has `"projection_weight"` [d, d_model] and `"projection_bias"` ([d], absent without a bias). They
    come from the model's own forward, because DDP only synchronizes parameters reachable from its output.

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
    first, *rest = [*layers, *normalize]

    def hand_over(features: dict[str, Tensor]) -> dict[str, Tensor]:
        weight, bias = fold_dense(layers)
        # A parameter itself has no grad_fn, through which DDP finds it.
        features[WEIGHT] = weight.view_as(weight)
        if bias is not None:
            features[BIAS] = bias.view_as(bias)
        return features

    # A hook, such as accelerate's, may have set a layer's forward; without one, the class's forward applies again.
    saved_forwards = {layer: vars(layer)["forward"] for layer in (first, *rest) if "forward" in vars(layer)}
    try:
        first.forward = hand_over
        for layer in rest:
            layer.forward = lambda features: features
        yield
    finally:
        for layer in (first, *rest):
            del layer.forward
        for layer, forward in saved_forwards.items():
            layer.forward = forward


def encode_hidden_states(
    model: Any,
    documents: Sequence[str],
    *,
    batch_size: int = 32,
    show_progress_bar: bool = False,
    convert_to_numpy: bool = True,
) -> list[Any]:
    """The encoder's hidden states of documents, for the tokens that `model.encode` returns embeddings of.

    `indexes.Flat(..., projection=model)` stores them. Prefix, lengths, prompt and skiplist are those of `encode` for
    documents.

    Parameters
    ----------
    model
        As in `dense_layers`.
    documents
        Texts of the documents.
    batch_size
        Texts encoded at a time.
    show_progress_bar
        Draw a progress bar.
    convert_to_numpy
        Return arrays (float32 for bfloat16, which numpy lacks); otherwise tensors on the model's device.

    Returns
    -------
    list
        For each document [tokens, d_model].

    Raises
    ------
    ValueError
        As `dense_layers`, or if `batch_size` is below 1.
    TypeError
        If `documents` is a single text, or `batch_size` is not an integer.
    """
    if isinstance(documents, str):
        raise TypeError(f"documents must be a list of texts, got the text {documents!r:.100}")
    check_integer("batch_size", batch_size, minimum=1)
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
