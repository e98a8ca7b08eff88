"""What an index records: embeddings, the model and the codec that made them, and the corpora that were added."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..encoding.model_record import ModelRecord, places_of, relative_to
from .arguments import Embeddings, ids_of, sequences_of
from .search import Search
from .store import PackedStore

if TYPE_CHECKING:
    from typing_extensions import Self


class Recorded:
    """Base of `indexes.Flat` that records the model, the codec and the corpora."""

    _store: PackedStore
    _search: Search
    show_progress: bool
    device: torch.device

    @property
    def index_path(self) -> Path:
        """Absolute path of the folder of this index; the path "memory" if it is in memory."""
        return self._store.path

    @property
    def projection(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight [d, d_model] and bias [d] (or None) that project the stored hidden states, on the device; or None."""
        return self._search.projection

    @property
    def model(self) -> ModelRecord | None:
        """The model that made the embeddings; None if it was not recorded."""
        return self._store.state.model

    def record_model(self, model: Any, name: str | os.PathLike[str] | None = None) -> Self:
        """Record which model makes the embeddings, so that `check_model` can refuse another one.

        Parameters
        ----------
        model
            A ColBERT model of this package or of PyLate, or a `MultiVectorEncoder` of sentence-transformers.
        name
            What it was loaded from: a folder or a name. A folder is also recorded relative to the index, so that both
            can be moved together. None: as recorded before, if anything was.

        Returns
        -------
        Self
            This index.

        Raises
        ------
        TypeError, ValueError
            If the index holds documents and another model is recorded, `model` has no weights to identify it by, or
            `name` is of another type.
        RuntimeError, OSError
            As `add_documents`.
        """
        if name is not None and not isinstance(name, str | os.PathLike):
            raise TypeError(f"name must be that of a model or its folder, or None, got {type(name).__name__}")
        record = ModelRecord.of(model, name, self.index_path, hidden_states=self.projection is not None)
        recorded = self.model
        if recorded is not None:
            differences = recorded.differences(record)
            if differences and len(self._store):
                raise ValueError(
                    f"the index in {self.index_path} holds embeddings of the model {recorded}, but {record} is a "
                    f"different model: it differs in {'; '.join(differences)}"
                )
            if not differences and (
                name is None or (record.name, record.relative) == (recorded.name, recorded.relative)
            ):
                return self
        self._store.note(model=record)
        return self

    @property
    def corpora(self) -> list[Path]:
        """Current paths of the files and folders whose texts were added, as far as they were recorded.

        For one that no longer exists, the path is where it was.
        """
        paths = []
        for absolute, relative in self._store.state.corpora:
            candidates = [Path(candidate) for candidate in places_of(absolute, relative, self.index_path)]
            paths.append(next((candidate for candidate in candidates if candidate.exists()), candidates[-1]))
        return paths

    def record_corpus(self, path: str | os.PathLike[str]) -> Self:
        """Record another file or folder whose texts are added, so that a search can show them.

        Raises what `add_documents` raises for an index that cannot be written to.
        """
        record = os.path.abspath(path), relative_to(path, self.index_path)
        recorded = self._store.state.corpora
        if record not in recorded:
            self._store.note(corpora=(*recorded, record))
        return self

    def check_model(self, model: Any) -> None:
        """Refuse a model that is not the recorded one; if none is recorded, accept every model.

        Raises
        ------
        ValueError
            If weights, lengths, prefixes or other settings differ. The message says which.
        """
        if self.model is None:
            return
        hidden_states = bool(self.model.settings.get("hidden_states"))
        differences = self.model.differences(ModelRecord.of(model, None, self.index_path, hidden_states))
        if differences:
            raise ValueError(
                f"the index in {self.index_path} was built with the model {self.model}, but this is a different "
                f"model: it differs in {'; '.join(differences)}"
            )

    def train_codec(self, documents_embeddings: Embeddings) -> Self:
        """Train the codec of an index that stores residual codes, on a sample of the documents that will be added.

        It has 16 * sqrt(T) centroids for T tokens (of which at most 2 million are used), as in PLAID, but at most one
        per 16 tokens, rounded down to a power of two. Without this call it is trained on the first addition, which may
        differ from those that follow. The same embeddings give the same codec on one machine.

        Parameters
        ----------
        documents_embeddings
            As in `add_documents`.

        Returns
        -------
        Self
            This index.

        Raises
        ------
        TypeError, ValueError
            If embeddings are not as in `add_documents`, have a size that is not a multiple of 8, or are all zero; if
            the index does not store residual codes, or has documents already.
        MissingExtraError
            If fastkmeans is not installed, which PyLate brings, and the extra `residual`.
        RuntimeError, OSError
            As `add_documents`.
        """
        self._store.train(sequences_of("documents_embeddings", documents_embeddings), self.show_progress)
        return self

    def get_documents_embeddings(self, documents_ids: Sequence[Sequence[str]]) -> list[list[Tensor]]:
        """Return the embeddings of documents, as `rank.rerank` takes them.

        Parameters
        ----------
        documents_ids
            Lists of ids of documents in the index, for example one list per query.

        Returns
        -------
        list[list[Tensor]]
            For every id a float32 tensor [L_i, d] on the CPU, projected and normalised if the index has a projection.

        Raises
        ------
        TypeError
            If an id is not a string.
        ValueError
            If an id is not in the index.
        """
        if isinstance(documents_ids, str) or not isinstance(documents_ids, Iterable):
            raise TypeError(f"documents_ids must be a list of lists of strings, got {type(documents_ids).__name__}")
        embeddings, scorer = [], self._search.scorer("pylate_flash")
        for i, ids in enumerate(documents_ids):
            positions = self._positions(f"documents_ids[{i}]", ids_of(f"documents_ids[{i}]", ids))
            device = torch.device("cpu") if self.projection is None else self.device
            read = (self._store.read(positions[j : j + 1]).to(device) for j in range(len(positions)))
            embeddings.append([scorer.embeddings(rows).to("cpu", torch.float32) for rows in read])
        return embeddings

    def _positions(self, name: str, ids: list[str]) -> np.ndarray:
        positions = self._store.positions_of(ids)
        if (positions < 0).any():
            unknown = ids[int(np.argmin(positions))]
            raise ValueError(f"{name}: {unknown!r:.100} is not in the index in {self.index_path}")
        return positions
