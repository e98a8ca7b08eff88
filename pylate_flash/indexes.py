"""`Flat`, an exact index for multi-vector retrieval, behind PyLate's index interface."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pylate.indexes.base import Base
from pylate.rank import RerankResult
from torch import Tensor
from tqdm import tqdm

from .ops import maxsim_from_hidden, maxsim_varlen, pack
from .projection import dense_layers, fold_dense
from .scores import colbert_scores
from .store import PackedStore, blocks

__all__ = ["Flat"]

SCORERS = ("pylate_flash", "auto", "torch", "flash", "lik")
# A document without tokens has nothing that could match, so it comes after every document that has.
EMPTY_SCORE = float(np.finfo(np.float32).min)
# Embeddings scored at a time: enough to amortise a call, small enough for a CPU's memory next to the model.
_BLOCK_BYTES_CPU = 32 << 20
_BLOCK_BYTES_CUDA = 512 << 20
_QUERY_TOKENS = 4096
# PyLate's torch scorer builds the similarities of all token pairs; this bounds how many at a time.
_TORCH_PAIRS = 1 << 24


class _Packed(NamedTuple):
    """Packed tokens [T, d], their cu_seqlens [N + 1], on one device, and the length of the longest sequence."""

    values: Tensor
    cu_seqlens: Tensor
    longest: int


Embeddings = Sequence[np.ndarray | Tensor | list] | np.ndarray | Tensor


class Flat(Base):
    """Exact MaxSim search over all documents: no clustering, no quantisation, no candidates missed.

    Embeddings are kept packed (no padding) in safetensors shards and memory-mapped; see `pylate_flash.store` for the
    files and what happens when a write is interrupted. A search scores the collection block by block and keeps the
    best `k`, so its memory does not grow with the collection. On a CUDA device the embeddings stay there if they fit.

    With a `projection`, an index keeps hidden states of an encoder in place of embeddings, and projects and normalises
    them while it searches: larger files, for which another projection needs no new encoding.

    Parameters
    ----------
    index_folder
        Folder that holds indexes.
    index_name
        This index's own folder in it. An existing index is opened.
    override
        Start from an empty index; an existing one is emptied at once.
    dtype
        How embeddings are kept: "float32", "float16" or "bfloat16". None: as the existing index does, or float32,
        which keeps float32 and narrower embeddings exactly. Queries are rounded to it before they are scored.
    scorer
        "pylate_flash" (or "auto"): this package's kernels. "torch", "flash" or "lik": PyLate's scorer of that name, for
        comparison; every document is scored without padding, so all of them give the same scores up to rounding.
    device
        Where to score. None: CUDA if there is one, else the CPU.
    show_progress
        Draw progress bars over additions of several batches and searches of several blocks.
    projection
        A ColBERT model, whose Dense layers as they are now project hidden states [L, d_model] to embeddings [L, d]; or
        a weight [d, d_model] and a bias [d] (or None). `projection.encode_hidden_states` gives the states to add. It is
        not saved: give it again to open the index. Queries are embeddings, and normalised as well.

    Raises
    ------
    ValueError
        If an argument is none of its choices, a file of the existing index is missing, damaged, or of a newer format
        (the message names it), or the projection cannot be fused, or takes another size than the index keeps.

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
        index_folder: str | os.PathLike[str] = "indexes",
        index_name: str = "colbert",
        override: bool = False,
        dtype: str | None = None,
        scorer: str = "pylate_flash",
        device: str | torch.device | None = None,
        show_progress: bool = True,
        projection: Any = None,
    ) -> None:
        self.scorer = scorer
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.show_progress = show_progress
        layer = None if projection is None else _linear_layer(projection)
        self._store = PackedStore(Path(index_folder) / index_name, dtype=dtype, override=override)
        self.projection: tuple[Tensor, Tensor | None] | None = None
        if layer is None:
            return
        size = layer[0].shape[1]
        if self._store.embedding_size not in (None, size):
            raise ValueError(
                f"projection takes hidden states of size {size}, and the index in {self.index_path} keeps vectors of "
                f"size {self._store.embedding_size}"
            )
        # Copies: training may go on with the model's own.
        weight, bias = (
            tensor if tensor is None else tensor.detach().to(self.device, self._store.dtype, copy=True)
            for tensor in layer
        )
        assert weight is not None
        self.projection = weight, bias

    @property
    def scorer(self) -> str:
        """What computes the scores; it may be set at any time."""
        return self._scorer

    @scorer.setter
    def scorer(self, value: str) -> None:
        if value not in SCORERS:
            raise ValueError(f"scorer must be one of {', '.join(map(repr, SCORERS))}, got {value!r}")
        self._scorer = value

    @property
    def index_path(self) -> Path:
        """The folder of this index."""
        return self._store.path

    @property
    def documents_ids(self) -> list[str]:
        """Ids of all documents, in the order in which they were added."""
        return list(self._store.ids)

    def __len__(self) -> int:
        return len(self._store)

    def __contains__(self, document_id: object) -> bool:
        return document_id in self._store.position

    def add_documents(  # type: ignore[override]  # PyLate's indexes return themselves, its base says None
        self, documents_ids: str | Sequence[str], documents_embeddings: Embeddings, batch_size: int = 2000
    ) -> Flat:
        """Add documents: all of them or, on an error, none.

        Parameters
        ----------
        documents_ids
            One id per document, distinct and new: to replace a document, remove it first.
        documents_embeddings
            One [L_i, d] array or tensor per document, of a floating dtype; L_i may be 0. An array [N, L, d] is N
            documents of L tokens each, so padding rows in it would count as tokens. [L, d] is one document. Hidden
            states [L_i, d_model] if the index has a projection.
        batch_size
            Documents that are converted and checked at a time.

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
        """
        ids = _ids("documents_ids", documents_ids)
        documents = _sequences("documents_embeddings", documents_embeddings)
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size must be an integer of at least 1, got {batch_size!r}")
        if len(ids) != len(documents):
            raise ValueError(
                f"documents_ids and documents_embeddings must have the same length, got {len(ids)} ids and "
                f"{len(documents)} documents"
            )
        if self.projection is not None:
            _check_states(documents, self.projection[0].shape[1])
        _check_distinct("documents_ids", ids)
        for id_ in ids:
            if id_ in self:
                raise ValueError(
                    f"documents_ids: {id_!r} is already in the index in {self.index_path}; remove it to replace it"
                )
        progress = self.show_progress and len(ids) > batch_size
        self._store.add(ids, documents, batch_size=batch_size, show_progress=progress)
        return self

    def remove_documents(self, documents_ids: str | Sequence[str]) -> Flat:  # type: ignore[override]
        """Remove documents: all of them or, on an error, none. Their embeddings are deleted from the disk.

        Parameters
        ----------
        documents_ids
            Ids of documents in the index.

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
        """
        ids = _ids("documents_ids", documents_ids)
        _check_distinct("documents_ids", ids)
        self._store.remove(self._positions("documents_ids", ids))
        return self

    def __call__(
        self,
        queries_embeddings: Embeddings,
        k: int = 10,
        subset: Sequence[Sequence[str]] | Sequence[str] | None = None,
    ) -> list[list[RerankResult]]:
        """Return the `k` best documents of every query.

        Parameters
        ----------
        queries_embeddings
            One [L_i, d] array or tensor per query, or [Nq, L, d]; [L, d] is one query.
        k
            Documents per query; fewer come back if there are fewer.
        subset
            Ids among which to search: a list for all queries, or one list per query. As in PyLate's PLAID index, ids
            that are not in the index are ignored.

        Returns
        -------
        list[list[RerankResult]]
            For every query `{"id", "score"}`, best first; equal scores in the order in which the documents were
            added. A document without tokens scores -10000.

        Raises
        ------
        TypeError
            If queries are not of a floating dtype, or `subset` is neither of its forms.
        ValueError
            If the index is empty, `k` is less than 1, an embedding size differs from the index's, a query holds NaN or
            infinite values, or there are not as many subsets as queries.
        """
        queries = _sequences("queries_embeddings", queries_embeddings)
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
            raise ValueError(f"k must be an integer of at least 1, got {k!r}")
        if not len(self):
            raise ValueError(f"the index in {self.index_path} is empty: add documents before searching")
        subsets = self._subsets(subset, len(queries))
        queries = [self._query(i, query) for i, query in enumerate(queries)]
        if not queries:
            return []
        if self.device.type == "cuda" and self._store.nbytes < 0.8 * _free_memory(self.device):
            self._store.keep_on(self.device)
        with torch.no_grad():
            if isinstance(subsets, list):
                return self._search_candidates(queries, subsets, int(k))
            return self._search(queries, subsets, int(k))

    def get_documents_embeddings(  # type: ignore[override]  # tensors, which every caller takes, not nested lists
        self, documents_ids: Sequence[Sequence[str]]
    ) -> list[list[Tensor]]:
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
        found = []
        for i, ids in enumerate(documents_ids):
            positions = self._positions(f"documents_ids[{i}]", _ids(f"documents_ids[{i}]", ids))
            device = None if self.projection is None else self.device
            read = (self._store.read(positions[j : j + 1], device) for j in range(len(positions)))
            # A copy: what is read is the index's own memory.
            found.append([self._embeddings(values).to("cpu", torch.float32, copy=True) for values in read])
        return found

    def _embeddings(self, values: Tensor) -> Tensor:
        """Embeddings [T, d] from what the index keeps."""
        return values if self.projection is None else F.normalize(F.linear(values, *self.projection), dim=-1)

    def _positions(self, name: str, ids: list[str]) -> np.ndarray:
        for id_ in ids:
            if id_ not in self:
                raise ValueError(f"{name}: {id_!r} is not in the index in {self.index_path}")
        return np.array([self._store.position[id_] for id_ in ids], dtype=np.int64)

    def _subsets(self, subset: object, queries: int) -> np.ndarray | list[np.ndarray]:
        """Positions to search, ascending: one array for all queries, or a list with one array per query."""
        if subset is None:
            return np.arange(len(self))
        if isinstance(subset, str) or not isinstance(subset, Sequence):
            raise TypeError(f"subset must be a list of ids or a list of such lists, got {type(subset).__name__}")
        known = self._store.position
        if all(isinstance(item, str) for item in subset):
            return np.array(sorted({known[id_] for id_ in subset if id_ in known}), dtype=np.int64)
        if any(isinstance(item, str) for item in subset):
            raise TypeError("subset must be a list of ids or a list of such lists, got a mixture of the two")
        if len(subset) != queries:
            raise ValueError(f"subset must have one list of ids per query, got {len(subset)} for {queries} queries")
        ids = [_ids(f"subset[{i}]", item) for i, item in enumerate(subset)]
        return [np.array(sorted({known[id_] for id_ in item if id_ in known}), dtype=np.int64) for item in ids]

    def _query(self, i: int, query: Tensor) -> Tensor:
        size = self._store.embedding_size if self.projection is None else self.projection[0].shape[0]
        if query.shape[1] != size:
            raise ValueError(
                f"queries_embeddings[{i}] has embedding size {query.shape[1]}, the index in {self.index_path} {size}"
            )
        query = query.detach().to(self.device, self._store.dtype)
        if not torch.isfinite(query).all():
            raise ValueError(f"queries_embeddings[{i}] holds NaN or infinite values")
        return query

    def _blocks(self, lengths: np.ndarray) -> tqdm:
        limit = _BLOCK_BYTES_CUDA if self.device.type == "cuda" else _BLOCK_BYTES_CPU
        stretches = blocks(lengths, max(1, limit // self._store.token_bytes))
        disable = not self.show_progress or len(stretches) < 2
        return tqdm(stretches, desc="Searching", unit="block", disable=disable)

    def _search(self, queries: list[Tensor], positions: np.ndarray, k: int) -> list[list[RerankResult]]:
        """Every query against the same documents."""
        lengths = np.array([len(query) for query in queries])
        chunks = [_packed(queries[start:stop]) for start, stop in blocks(lengths, _QUERY_TOKENS)]
        sizes = [len(chunk.cu_seqlens) - 1 for chunk in chunks]
        best = [
            (
                torch.empty(size, 0, dtype=torch.float32, device=self.device),
                torch.empty(size, 0, dtype=torch.int64, device=self.device),
            )
            for size in sizes
        ]
        # The store is walked once, whatever the number of queries: it may have to come from the disk.
        for start, stop in self._blocks(self._store.lengths[positions]):
            documents = self._documents(positions[start:stop])
            block = torch.from_numpy(positions[start:stop]).to(self.device)
            for i, chunk in enumerate(chunks):
                scores = torch.cat([best[i][0], self._score(chunk, documents)], dim=1)
                found = torch.cat([best[i][1], block.expand(sizes[i], -1)], dim=1)
                # Columns are in the order of insertion, and only a stable sort keeps it among equals; topk does not.
                scores, order = torch.sort(scores, dim=1, descending=True, stable=True)
                best[i] = scores[:, :k].clone(), found.gather(1, order[:, :k])
        return [
            self._results(scores, found)
            for chunk_scores, chunk_found in best
            for scores, found in zip(chunk_scores.tolist(), chunk_found.tolist(), strict=True)
        ]

    def _search_candidates(
        self, queries: list[Tensor], candidates: list[np.ndarray], k: int
    ) -> list[list[RerankResult]]:
        """Every query against documents of its own."""
        counts = np.array([len(positions) for positions in candidates])
        positions = np.concatenate(candidates)
        owners = np.repeat(np.arange(len(queries)), counts)
        # A block holds whole documents and the queries that own them.
        lengths = self._store.lengths[positions]
        first = np.flatnonzero(np.diff(owners, prepend=-1))
        lengths[first] += np.array([len(queries[i]) for i in owners[first]], dtype=np.int64)
        scores = np.empty(len(positions), dtype=np.float32)
        for start, stop in self._blocks(lengths):
            low, high = owners[start], owners[stop - 1] + 1
            owned = np.bincount(owners[start:stop] - low, minlength=high - low)
            # On the host, where the op plans its launch.
            cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum(owned)]).astype(np.int32))
            documents = self._documents(positions[start:stop])
            scores[start:stop] = self._score(_packed(queries[low:high]), documents, cu_seqlens).cpu().numpy()
        results = []
        for own, found in zip(np.split(scores, np.cumsum(counts)[:-1]), candidates, strict=True):
            order = np.argsort(-own, kind="stable")[:k]
            results.append(self._results(own[order].tolist(), found[order].tolist()))
        return results

    def _results(self, scores: list[float], positions: list[int]) -> list[RerankResult]:
        return [RerankResult(id=self._store.ids[i], score=score) for score, i in zip(scores, positions, strict=True)]

    def _documents(self, positions: np.ndarray) -> _Packed:
        lengths = self._store.lengths[positions]
        cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        values = self._store.read(positions, self.device)
        return _Packed(values, cu_seqlens.to(self.device, non_blocking=True), int(lengths.max(initial=0)))

    def _score(self, queries: _Packed, documents: _Packed, candidates: Tensor | None = None) -> Tensor:
        """Scores [Nq, Nd] of packed queries and documents; with `candidates` [Nq + 1], of each document's own query."""
        if self.scorer not in ("pylate_flash", "auto"):
            documents = documents._replace(values=self._embeddings(documents.values))
            return _pylate_scores(queries, documents, candidates, self.scorer)
        if self.projection is None:
            return maxsim_varlen(
                queries.values,
                documents.values,
                queries.cu_seqlens,
                documents.cu_seqlens,
                candidates_cu_seqlens=candidates,
                max_query_length=queries.longest,
                max_document_length=documents.longest,
                empty_score=EMPTY_SCORE,
            )
        return maxsim_from_hidden(
            queries.values,
            documents.values,
            *self.projection,
            queries_cu_seqlens=queries.cu_seqlens,
            documents_cu_seqlens=documents.cu_seqlens,
            candidates_cu_seqlens=candidates,
            max_query_length=queries.longest,
            max_document_length=documents.longest,
            empty_score=EMPTY_SCORE,
        )


def _packed(sequences: list[Tensor]) -> _Packed:
    return _Packed(*pack(sequences), max(len(sequence) for sequence in sequences))


def _pylate_scores(queries: _Packed, documents: _Packed, candidates: Tensor | None, backend: str) -> Tensor:
    """As `Flat._score`, by PyLate's scorer.

    It takes padded tensors and counts a padded document token as a similarity of 0, so documents are stacked with
    others of their length. Padded query tokens add 0 to a sum, which is right.
    """
    values, cu_seqlens = queries.values, queries.cu_seqlens.tolist()
    split = [values[start:stop] for start, stop in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)]
    if candidates is not None:
        bounds = candidates.tolist()
        owned = [
            _pylate_scores(
                _packed([query]), documents._replace(cu_seqlens=documents.cu_seqlens[start : stop + 1]), None, backend
            )[0]
            for query, start, stop in zip(split, bounds[:-1], bounds[1:], strict=True)
        ]
        return torch.cat(owned)
    padded = torch.nn.utils.rnn.pad_sequence(split, batch_first=True)
    if backend == "torch":
        # It rounds every similarity to the inputs' type, where the others accumulate in float32.
        padded = padded.float()
    query_lengths = torch.tensor([len(query) for query in split], device=values.device)
    mask = None
    if (query_lengths != padded.shape[1]).any():
        mask = torch.arange(padded.shape[1], device=values.device) < query_lengths[:, None]
    lengths = documents.cu_seqlens.diff()
    scores = values.new_full((len(split), len(lengths)), EMPTY_SCORE, dtype=torch.float32)
    for length in lengths.unique().tolist():
        if not length:
            continue
        batch = max(1, _TORCH_PAIRS // (max(1, padded.shape[0] * padded.shape[1]) * length))
        for some in torch.nonzero(lengths == length)[:, 0].split(batch):
            rows = documents.cu_seqlens[some].long()[:, None] + torch.arange(length, device=values.device)
            stacked = documents.values[rows].to(padded.dtype)
            scores[:, some] = colbert_scores(padded, stacked, queries_mask=mask, backend=backend).float()
    return scores


def _linear_layer(projection: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the argument `projection`."""
    if not isinstance(projection, tuple):
        return fold_dense(dense_layers(projection))
    shapes = [list(tensor.shape) if isinstance(tensor, Tensor) else tensor for tensor in projection]
    pair = len(projection) == 2 and isinstance(projection[0], Tensor) and projection[0].ndim == 2
    if not pair or not (projection[1] is None or shapes[1] == shapes[0][:1]):
        raise ValueError(
            f"projection must be a ColBERT model, or a weight [d, d_model] and a bias [d] or None, got {shapes}"
        )
    return projection


def _check_states(documents: list[Tensor], size: int) -> None:
    for i, document in enumerate(documents):
        if document.shape[1] != size:
            raise ValueError(
                f"documents_embeddings[{i}] has size {document.shape[1]}, and the index's projection takes hidden "
                f"states of size {size}"
            )


def _free_memory(device: torch.device) -> int:
    """Bytes of a CUDA device that can be allocated, those that PyTorch has reserved and not in use among them."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def _ids(name: str, ids: object) -> list[str]:
    """Return `ids` as a list of strings; a single string is a list of one."""
    if isinstance(ids, str):
        return [str(ids)]
    if not isinstance(ids, (Sequence, np.ndarray)):
        raise TypeError(f"{name} must be a list of strings, got {type(ids).__name__}")
    for i, id_ in enumerate(ids):
        if not isinstance(id_, str):
            raise TypeError(f"{name}[{i}] must be a string, got {id_!r} of type {type(id_).__name__}")
    return [str(id_) for id_ in ids]


def _check_distinct(name: str, ids: list[str]) -> None:
    if len(set(ids)) < len(ids):
        seen = set()
        for id_ in ids:
            if id_ in seen:
                raise ValueError(f"{name}: {id_!r} is given twice")
            seen.add(id_)


def _sequences(name: str, embeddings: object) -> list[Tensor]:
    """Return embeddings in any of PyLate's forms as a list of floating tensors [L_i, d]."""
    if isinstance(embeddings, (np.ndarray, Tensor)):
        if embeddings.ndim not in (2, 3):
            raise ValueError(f"{name} must have shape [L, d] or [N, L, d], got {list(embeddings.shape)}")
        embeddings = [embeddings] if embeddings.ndim == 2 else list(embeddings)
    if not isinstance(embeddings, Sequence) or isinstance(embeddings, str):
        raise TypeError(f"{name} must be a list of [L, d] arrays or tensors, got {type(embeddings).__name__}")
    tensors = []
    for i, item in enumerate(embeddings):
        if isinstance(item, list):
            item = np.asarray(item, dtype=np.float32)
        if isinstance(item, np.ndarray) and np.issubdtype(item.dtype, np.number):
            # torch warns about arrays that cannot be written to, and refuses negative strides.
            item = torch.from_numpy(np.require(item, requirements=["C", "W"]))
        if not isinstance(item, Tensor):
            raise TypeError(f"{name}[{i}] must be an array or tensor of numbers, got {type(item).__name__}")
        if not item.is_floating_point():
            raise TypeError(f"{name}[{i}] must be of a floating dtype, got {item.dtype}")
        if item.ndim != 2 or item.shape[1] == 0:
            raise ValueError(f"{name}[{i}] must have shape [L, d] with d of at least 1, got {list(item.shape)}")
        tensors.append(item)
    return tensors
