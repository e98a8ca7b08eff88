"""What an index consists of, for those who look after it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..encoding.model_record import ModelRecord

__all__ = ["IndexInfo"]


@dataclass(frozen=True)
class IndexInfo:
    """What an index consists of.

    Attributes
    ----------
    path
        Its folder.
    documents, tokens
        How many it holds.
    bytes
        Of all its files.
    scored_bytes
        Of the rows that a search of all documents scores.
    dtype
        How embeddings are kept: the `dtype` of `indexes.Flat`.
    embedding_size
        Elements of an embedding (or of a hidden state); None if there are no documents.
    segments
        How many files hold their embeddings.
    generation
        How often it has been written.
    model
        Which model made the embeddings, as far as that was recorded.
    created_with
        Versions of the packages that wrote it last.
    """

    path: Path
    documents: int
    tokens: int
    bytes: int
    scored_bytes: int
    dtype: str
    embedding_size: int | None
    segments: int
    generation: int
    model: ModelRecord | None
    created_with: dict[str, str]
