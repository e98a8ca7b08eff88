"""`Flat`, an exact index for multi-vector retrieval: PyLate's index interface, for the embeddings of any model."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .encoding.model_record import ModelRecord
from .index.arguments import (
    Embeddings,
    batches_of,
    check_distinct,
    check_states,
    check_unquantized,
    checked_memory,
    checked_path,
    checked_queries,
    ids_of,
    linear_layer,
    sequences_of,
    subsets_of,
)
from .index.filters import Metadata, Where, checked_metadata
from .index.ranks import Hits, Ranks
from .index.recorded import Recorded
from .index.scorers import EMPTY_SCORE
from .index.search import Search, SearchResult
from .index.state import IndexInfo
from .index.store import PackedStore
from .ops.checks import check_choice, checked_device, checked_flag

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# If PyLate is installed, its retriever accepts only subclasses of its own index class.
if TYPE_CHECKING or importlib.util.find_spec("pylate") is not None:
    from pylate.indexes.base import Base
else:
    Base = object

__all__ = ["EMPTY_SCORE", "Flat", "IndexInfo", "ModelRecord"]

SCORERS = ("pylate_flash", "auto", "torch", "flash", "lik")


class Flat(Recorded, Base):  # type: ignore[misc]  # it returns tensors, which every caller takes, not nested lists
    """Exact MaxSim search over all documents, as they are stored: no clustering, no candidates missed.

    Embeddings are stored packed (no padding) in flat files on the disk; see `pylate_flash.index` for the files and for
    what happens when a write is interrupted. A search scores the collection block by block and keeps the best `k`, so
    its memory does not grow with the collection. On a CUDA device, as many embeddings as fit stay in its memory.
    Threads may share an index: those that search or change it take turns.

    With a `projection`, an index stores hidden states of an encoder instead of embeddings, and projects and normalises
    them during the search: the files are larger, but another projection needs no new encoding.

    Parameters
    ----------
    index_folder
        Folder that holds indexes. None: keep this index in memory, on `device`, and nothing on the disk, for example
        for an evaluation during training. Embeddings that are added from that device stay there.
    index_name
        Plain name of this index's folder in `index_folder`. An existing index is opened.
    override
        Start from an empty index; an existing one is emptied at once.
    dtype
        How embeddings are stored: "float32", "float16" or "bfloat16". None: as in the existing index, or float32,
        which stores float32 and narrower embeddings exactly. Queries are rounded to it before they are scored. Or in 8
        bits with a scale for each token, as `quantize` makes them: "int8", "uint8" or "fp8", 16 bytes and a byte for
        each element. Then this package's scorer quantizes queries as well, as `maxsim_varlen` does, and the scorers of
        other packages dequantize what is stored. Or as residual codes, as in PLAID, of 4 or 2 bits for each element
        and 8 bytes: "residual4" or "residual2", whose scores are those of `maxsim_residual`. Their codec is trained by
        `train_codec`, or else on the first addition. Embeddings of fewer than 16 bits may be stored in 16 as well, on
        the disk or in CPU memory, where `rescore` reads them: "residual4+bfloat16", "int8+float16" and so on.
    scorer
        "pylate_flash" (or "auto"): this package's kernels. For comparison, with equal scores up to rounding: PyLate's
        "torch", "flash" or "lik"; without PyLate, "torch" is `util.maxsim` of sentence-transformers.
    device
        Where to score. None: CUDA if there is one, else the CPU.
    show_progress
        Draw progress bars over additions of several batches and searches of several blocks.
    projection
        A ColBERT model or a MultiVectorEncoder, whose current Dense layers project hidden states [L, d_model] to
        embeddings [L, d]; or a weight [d, d_model] and a bias [d] (or None).
        `encoding.projection.encode_hidden_states` returns the states to add. The projection is not saved: pass it
        again to open the index. Queries are embeddings, normalised as well.

    device_memory
        Bytes of device memory that embeddings may take, or "auto": most of what is free on a GPU, and nothing on a CPU.
        The rest is read from the disk for every search, in blocks: a GPU scores one while the next ones are in flight,
        which takes about 0.4 GB of its memory.
    group
        Processes of `torch.distributed` (NCCL or gloo) that search together, `torch.distributed.group.WORLD` for all.
        Each opens the same index on its own device and scores its own segments. All of them must call each search; the
        arguments of the first rank apply, and all ranks get the results that one process would get. Only one process
        may add or remove documents; the others then open the index again.

    Raises
    ------
    TypeError, ValueError
        If an argument is of another type or not one of its choices, or the projection cannot be fused: nothing has
        changed then. If a file of the existing index is missing, damaged, or of a newer format (the message names it),
        or the projection takes another size than the index stores.
    OSError
        If the folder cannot be read or, with `override`, cannot be written.

    Examples
    --------
    >>> import numpy as np
    >>> from pylate_flash import indexes, retrieve
    >>> index = indexes.Flat("indexes", "example", override=True, device="cpu")
    >>> index = index.add_documents(["a", "b"], [np.eye(4, dtype="float32"), np.eye(4, dtype="float32")[:1]])
    >>> retrieve.ColBERT(index=index).retrieve([np.eye(4, dtype="float32")[:2]], k=1)
    [[{'id': 'a', 'score': 2.0}]]
    """

    is_end_to_end_index = True

    def __init__(
        self,
        index_folder: str | os.PathLike[str] | None = "indexes",
        index_name: str = "colbert",
        override: bool = False,
        dtype: str | None = None,
        scorer: str = "pylate_flash",
        device: str | torch.device | None = None,
        show_progress: bool = True,
        projection: Any = None,
        device_memory: int | str = "auto",
        group: ProcessGroup | None = None,
    ) -> None:
        path = checked_path(index_folder, index_name)
        self.scorer = scorer
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = checked_device("device", default if device is None else device)
        self.show_progress = show_progress
        # Everything is checked before `override` empties an index.
        override, memory = checked_flag("override", override), checked_memory(device_memory)
        layer = None if projection is None else linear_layer(projection)
        if layer is not None and dtype is not None:
            check_unquantized(dtype, path or Path("memory"))
        ranks = None if group is None else Ranks(group)
        self._store = PackedStore(path, dtype=dtype, override=override, device=self.device)
        self._again: Search | None = None
        self._search = Search(self._store, self.device, memory, self._linear(layer), ranks)

    def _linear(self, layer: tuple[Tensor, Tensor | None] | None) -> tuple[Tensor, Tensor | None] | None:
        """Copy the projection layer to the device, in the dtype of the index, if it fits the index."""
        if layer is None:
            return None
        check_unquantized(self._store.layout.kept_as, self.index_path)
        size = layer[0].shape[1]
        if self._store.embedding_size not in (None, size):
            raise ValueError(
                f"projection takes hidden states of size {size}, but the index in {self.index_path} stores vectors of "
                f"size {self._store.embedding_size}"
            )
        # Copies: training may go on to change the model's own weights.
        weight, bias = (
            tensor if tensor is None else tensor.detach().to(self.device, self._store.layout.dtype, copy=True)
            for tensor in layer
        )
        assert weight is not None
        return weight, bias

    @property
    def scorer(self) -> str:
        """Name of the scoring backend; it may be set at any time."""
        return self._scorer

    @scorer.setter
    def scorer(self, value: str) -> None:
        check_choice("scorer", value, SCORERS)
        self._scorer = value

    @property
    def documents_ids(self) -> list[str]:
        """Ids of all documents, in the order in which they were added."""
        return self._store.ids

    def __len__(self) -> int:
        return len(self._store)

    def __contains__(self, document_id: object) -> bool:
        return isinstance(document_id, str) and self._store.positions_of([document_id])[0] >= 0

    def add_documents(  # type: ignore[override]  # PyLate's indexes return themselves, its base says None
        self,
        documents_ids: str | Sequence[str] | Iterable[tuple],
        documents_embeddings: Embeddings | None = None,
        batch_size: int = 2000,
        replace: bool = False,
        metadata: Sequence[Metadata | None] | None = None,
    ) -> Flat:
        """Add documents: all of them or, on an error, none.

        Parameters
        ----------
        documents_ids
            One id per document, distinct and, unless `replace`, new. Or, without embeddings, an iterator of batches
            (ids, embeddings) or (ids, embeddings, metadata), which are added one by one: batches that were added
            stay even if a later one fails, and one batch at a time is in memory.
        documents_embeddings
            One [L_i, d] array or tensor per document, of a floating dtype; L_i may be 0. An array [N, L, d] is N
            documents of L tokens each, so padding rows in it would count as tokens. [L, d] is one document. Hidden
            states [L_i, d_model] if the index has a projection.
        batch_size
            Documents that are converted and checked at a time.
        replace
            If an id is already in the index, replace its document; the new one is last in the order of documents.
        metadata
            One dictionary per document (or None), for `where` in a search: printable keys that do not begin with "#"
            and differ by more than case; values that are strings, numbers, booleans or None.

        Returns
        -------
        Flat
            This index.

        Raises
        ------
        TypeError
            If an id is not a string, or embeddings are not numbers of a floating dtype.
        ValueError
            If the numbers of ids and documents differ, an id is repeated or already in the index, an embedding size
            differs from the index's, or a value is NaN or infinite.
        RuntimeError
            If another process is writing to the index, or has written to it since it was opened here.
        OSError
            If a file cannot be written, as on a full disk. The message names the index, which is unchanged.
        """
        if documents_embeddings is None:
            if metadata is not None:
                raise TypeError(
                    "metadata must be in the batches of an iterator, (ids, embeddings, metadata), got a list"
                )
            for ids, embeddings, batch_metadata in batches_of(documents_ids):
                self.add_documents(ids, embeddings, batch_size, replace, batch_metadata)
            return self
        replace, ids = checked_flag("replace", replace), ids_of("documents_ids", documents_ids)
        documents = sequences_of("documents_embeddings", documents_embeddings)
        if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
            raise ValueError(f"batch_size must be an integer of at least 1, got {batch_size!r}")
        if len(ids) != len(documents):
            raise ValueError(
                f"documents_ids and documents_embeddings must have the same length, got {len(ids)} ids and "
                f"{len(documents)} documents"
            )
        if self.projection is not None:
            check_states(documents, self.projection[0].shape[1])
        check_distinct("documents_ids", ids)
        checked = checked_metadata(metadata, len(ids))
        progress = self.show_progress and len(ids) > batch_size
        self._store.add(
            ids, documents, batch_size=batch_size, show_progress=progress, replace=replace, metadata=checked
        )
        return self

    def remove_documents(  # type: ignore[override]
        self, documents_ids: str | Sequence[str], erase: bool = False
    ) -> Flat:
        """Remove documents: all of them or, on an error, none. It needs no free disk space.

        Searches no longer return them. Their embeddings are deleted from the disk when more than a quarter of the file
        that holds them is removed, by `compact`, or at once with `erase`.

        Parameters
        ----------
        documents_ids
            Ids of documents in the index; no ids, with `erase`, to erase documents that were removed before.
        erase
            Delete their embeddings, and those of documents that were removed before, from the disk at once: the files
            that hold them are rewritten, which takes as much disk space. If this fails, the documents may be removed
            already; repeat it without ids.

        Returns
        -------
        Flat
            This index.

        Raises
        ------
        TypeError
            If an id is not a string.
        ValueError
            If an id is not in the index, or is given twice.
        RuntimeError
            If another process is writing to the index, or has written to it since it was opened here.
        OSError
            If a file cannot be written, as on a full disk. The message names the index, which is unchanged.
        """
        erase, ids = checked_flag("erase", erase), ids_of("documents_ids", documents_ids)
        check_distinct("documents_ids", ids)
        self._store.remove(self._positions("documents_ids", ids), erase)
        return self

    # Maintenance

    def info(self) -> IndexInfo:
        """Return a summary of the index."""
        state = self._store.state
        return IndexInfo(
            path=self.index_path,
            documents=len(self),
            tokens=self._store.tokens,
            bytes=self._store.nbytes,
            scored_bytes=self._store.tokens * self._store.layout.nbytes,
            dtype=state.dtype,
            embedding_size=state.embedding_size,
            segments=len(self._store.segments),
            generation=state.generation,
            model=state.model,
            created_with=dict(state.created_with),
        )

    def verify(self, show_progress: bool = False) -> IndexInfo:
        """Open the files again and read all of them.

        Parameters
        ----------
        show_progress
            Draw a progress bar.

        Returns
        -------
        IndexInfo
            A summary of what was read.

        Raises
        ------
        ValueError
            If a file is missing or malformed, or the folder is gone, a checksum or a count is wrong, an id occurs
            twice, or a value is NaN or infinite. The message names the file.
        OSError
            If a file cannot be read. The message names it.
        """
        if self._store.in_memory:
            self._store.verify(show_progress)
            return self.info()
        # Open the folder anew: the files that this object has open may have been replaced in it since.
        index = Flat(self.index_path.parent, self.index_path.name, device="cpu", show_progress=False)
        if self._store.state.generation and not index._store.exists:
            raise ValueError(
                f"{self.index_path / 'catalog.sqlite'} is missing: it was deleted while the index was open"
            )
        index._store.verify(show_progress)
        return index.info()

    def compact(self) -> Flat:
        """Write the documents into as few files as their size (512 MiB) allows.

        Additions and removals keep the number of files low; this minimizes it, and deletes what is left of removed
        documents. It needs disk space for one file at a time.

        Returns
        -------
        Flat
            This index.

        Raises
        ------
        RuntimeError, OSError
            As `add_documents`.
        """
        self._store.compact()
        return self

    def search(
        self,
        queries_embeddings: Embeddings,
        k: int = 10,
        subset: Sequence[Sequence[str]] | Sequence[str] | None = None,
        matches: bool = False,
        where: Where | None = None,
        rescore: int | None = None,
    ) -> list[list[SearchResult]]:
        """Return the `k` best documents of every query.

        Parameters
        ----------
        queries_embeddings
            One [L_i, d] array or tensor per query, or [Nq, L, d]; [L, d] is one query.
        k
            Documents per query; fewer are returned if there are fewer.
        subset
            Ids to search among: a list for all queries, or one list per query. As in PyLate's PLAID index, ids
            that are not in the index are ignored.
        matches
            Also return which tokens match.
        where
            Search only documents whose metadata satisfy an SQLite expression, such as
            "year >= 2020 and lang = 'en'", or with parameters ("year >= ?", [2020]) or ("year >= :year",
            {"year": 2020}). It may be untrusted: it can only read metadata and call plain functions, such as `lower`
            and `date`, sees strings of at most 256 KiB and patterns of at most 1000 bytes (from Python 3.11 on), and is
            stopped after ten seconds. A key that a document lacks is NULL. Documents that another process has removed
            meanwhile are left out.
        rescore
            Number of best documents of each query, at least `k`, to score again from their 16-bit copies. The best `k`
            by the new scores are returned, with these scores.

        Returns
        -------
        list[list[SearchResult]]
            For every query `{"id", "score"}`, best first; equal scores in the order in which the documents were
            added. A document without tokens scores `EMPTY_SCORE`, the lowest float32. With `matches` also
            `"matches"`: for every token of the query, which of the document's tokens is most similar to it (the first
            of equal ones), and the similarity, `[(token, similarity), ...]`; empty for a document without tokens.

        Raises
        ------
        TypeError
            If queries are not of a floating dtype, or `subset` or `where` has none of its forms.
        ValueError
            If the index is empty, `k` is less than 1, an embedding size differs from the index's, a query holds NaN or
            infinite values, there are not as many subsets as queries, `rescore` is less than `k` or the index stores no
            16-bit copies, `where` is not an expression over metadata, a file of the index has been truncated or holds
            other values than were written, or a score is not finite, for example because products of embeddings
            overflow.
        RuntimeError
            If another process of the group could not search, or has not opened the index again since it changed.
        """
        make_request = partial(self._asked, queries_embeddings, k, subset, matches, where, rescore)
        results: list[list[SearchResult]] = []
        # Threads that search the same index, or change it, take turns.
        with self._store.lock:
            search, scorer = self._search, self._search.scorer(self.scorer)
            request = make_request() if search.ranks is None else search.ranks.agreed(make_request)
            if request is None:
                return results
            queries = request["queries"]
            matches, rescore, k = request.pop("matches"), request.pop("rescore"), request["k"]
            request["k"] = rescore or k
            with torch.no_grad():
                hits: Iterable[Hits] = search.hits(scorer=scorer, show_progress=self.show_progress, **request)
                if search.ranks is not None:
                    hits = search.ranks.merged(hits, len(queries), request["k"])
                if rescore is not None:
                    search = self._again = self._again or Search(self._store, self.device, 0, None, beside=True)
                    scorer = search.scorer(self.scorer)
                    hits = search.again(queries, k, scorer, hits)
                for batch in hits:
                    ranked = search.results(batch)
                    if matches:
                        search.add_matches(ranked, batch, queries[len(results) : len(results) + len(ranked)], scorer)
                    results += ranked
        return results

    # PyLate's name for `search`.
    __call__ = search

    def _asked(
        self,
        queries_embeddings: Embeddings,
        k: int,
        subset: Any,
        matches: bool,
        where: Where | None,
        rescore: int | None,
    ) -> dict[str, Any] | None:
        """Check the arguments of a search and convert them; None if there are no queries."""
        queries = sequences_of("queries_embeddings", queries_embeddings)
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
            raise ValueError(f"k must be an integer of at least 1, got {k!r}")
        matches = checked_flag("matches", matches)
        if rescore is not None:
            if isinstance(rescore, bool) or not isinstance(rescore, (int, np.integer)) or rescore < k:
                raise ValueError(f"rescore must be an integer of at least k = {k}, got {rescore!r:.100}")
            if self._store.layout.beside is None:
                raise ValueError(
                    f"rescore: the index in {self.index_path} stores only {self._store.layout.kept_as!r}; expected a "
                    'combined dtype, such as "residual4+bfloat16"'
                )
        if not len(self):
            raise ValueError(f"the index in {self.index_path} is empty: add documents before searching")
        shared, subsets = subsets_of(subset, len(queries))
        positions = None
        if shared is not None:
            positions = np.unique(self._store.positions_of(shared))
            positions = positions[positions >= 0]
        if where is not None:
            filtered = self._store.positions_where(where)
            positions = filtered if positions is None else np.intersect1d(positions, filtered, assume_unique=True)
        if not queries:
            return None
        size = self._store.embedding_size if self.projection is None else self.projection[0].shape[0]
        # Ranks exchange host memory.
        device = self.device if self._search.ranks is None else torch.device("cpu")
        packed = checked_queries(queries, size, self.index_path, device, self._store.layout.asked)
        return {
            "queries": packed, "k": int(k), "positions": positions, "subsets": subsets, "matches": matches,
            "rescore": rescore, "generation": self._store.state.generation,
        }  # fmt: skip
