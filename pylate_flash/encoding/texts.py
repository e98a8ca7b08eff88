"""A common interface to PyLate models and sentence-transformers' `MultiVectorEncoder`: encoding and text lengths.

Importing this module imports neither library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class TextLengths(NamedTuple):
    """The maximum query and document lengths of a model; None if only its tokenizer limits them."""

    query_length: int | None
    document_length: int | None


def is_multi_vector_encoder(model: Any) -> bool:
    """Whether a model is a sentence-transformers `MultiVectorEncoder`; otherwise it is assumed to be PyLate's."""
    return getattr(model, "model_type", None) == "MultiVectorEncoder"


def encode(
    model: Any, texts: Sequence[str], *, is_query: bool, batch_size: int = 32, show_progress: bool = False
) -> list[np.ndarray]:
    """Encode queries or documents with a model of either library: [L_i, d] per text, without padding."""
    options = {"batch_size": batch_size, "show_progress_bar": show_progress}
    if is_multi_vector_encoder(model):
        # PyLate's default.
        options["convert_to_numpy"] = True
    return list(encoder_of(model, is_query)(list(texts), **options))


def check_encodes(model: Any) -> None:
    """Raise TypeError unless a model can encode; a string, such as the path of one, has an `encode` too."""
    if isinstance(model, str) or not hasattr(model, "encode"):
        raise TypeError(f"model must be a ColBERT model or a MultiVectorEncoder, got {type(model).__name__}")


def encoder_of(model: Any, is_query: bool) -> Callable[..., Any]:
    """The function that encodes queries or documents with a model of either library: takes texts and its options."""
    check_encodes(model)
    if is_multi_vector_encoder(model):
        return model.encode_query if is_query else model.encode_document
    return functools.partial(model.encode, is_query=is_query)


def prompt_of(model: Any, is_query: bool) -> str:
    """The prompt that a model of either library prepends to the text of a query or document."""
    names: tuple[str | None, ...] = (getattr(model, "default_prompt_name", None),)
    if is_multi_vector_encoder(model):
        names = ("query",) if is_query else ("document", "passage", "corpus")
    return next((model.prompts[name] for name in names if name in model.prompts), "")


def text_lengths(model: Any) -> TextLengths:
    """The configured lengths of a model of either library.

    If queries are expanded to a fixed length, which sentence-transformers stores with the expansion, it is that length.
    """
    if not is_multi_vector_encoder(model):
        return TextLengths(getattr(model, "query_length", None), getattr(model, "document_length", None))
    encoder = model[0]
    expansion: Any = getattr(encoder, "query_expansion", None)
    fixed = expansion is not None and expansion["strategy"] == "fixed"
    query_length = expansion["length"] if fixed else getattr(encoder, "query_length", None)
    return TextLengths(query_length, getattr(encoder, "document_length", None))


def set_text_lengths(model: Any, query_length: int | None = None, document_length: int | None = None) -> None:
    """Set the lengths of a `MultiVectorEncoder` that `text_lengths` reads; None leaves a length unchanged.

    ValueError if the first module of the model has no such length.
    """
    encoder = model[0]
    for name, length in (("query_length", query_length), ("document_length", document_length)):
        if length is not None and not hasattr(encoder, name):
            raise ValueError(f"{name}: the first module of the model, {type(encoder).__name__}, has no {name}")
    if query_length is not None:
        expansion = encoder.query_expansion
        if expansion is not None:
            fixed = expansion["strategy"] == "fixed"
            length = query_length if fixed else min(query_length, expansion["length"])
            # The expansion must not exceed the truncation limit, so that limit is reset first.
            encoder.query_length = None
            encoder.query_expansion = {**expansion, "length": length}
            encoder.query_length = None if fixed else query_length
        else:
            encoder.query_length = query_length
    if document_length is not None:
        encoder.document_length = document_length


def longest_input(model: Any) -> int | None:
    """The number of positions of an encoder, special tokens included; None if unlimited."""
    encoder = getattr(model[0], "auto_model", None)
    limit = getattr(getattr(encoder, "config", None), "max_position_embeddings", None)
    if encoder is None or not isinstance(limit, int) or limit < 1:
        return None
    # RoBERTa models number positions from padding_idx + 1.
    tables = (module for name, module in encoder.named_modules() if name.endswith("position_embeddings"))
    padding = getattr(next(tables, None), "padding_idx", None)
    return limit if padding is None else limit - padding - 1


def read_lengths(model: Any) -> tuple[int | None, int | None]:
    """The maximum number of tokens read of a query and of a document; None if unlimited."""
    limits = [longest_input(model)]
    if is_multi_vector_encoder(model):
        # PyLate sets this limit on every encode call, so it counts only here.
        limits.append(getattr(model[0], "max_seq_length", None))
    query, document = (
        min((tokens for tokens in (length, *limits) if tokens is not None), default=None)
        for length in text_lengths(model)
    )
    return query, document
