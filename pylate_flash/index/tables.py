"""Ids, lengths and places of documents, in tables to which appending costs the same however long they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["Documents", "blocks"]


class _Growing:
    """A one-dimensional int64 array with room to grow, so that n appended values cost n on average."""

    def __init__(self, values: Sequence[int]) -> None:
        self._room = np.array(values, dtype=np.int64)
        self._size = len(self._room)

    @property
    def values(self) -> np.ndarray:
        """What has been appended, as a view that stays as it is when more follows."""
        return self._room[: self._size]

    def extend(self, values: np.ndarray) -> None:
        size = self._size + len(values)
        if size > len(self._room):
            room = np.empty(max(size, 2 * len(self._room)), dtype=np.int64)
            room[: self._size] = self.values
            self._room = room
        self._room[self._size : size] = values
        self._size = size


class Documents:
    """What is known about every document of a store, beside its embeddings.

    Attributes
    ----------
    ids
        In the order of the documents.
    position
        For every id its place in that order.
    rows
        Rows of all files put end to end; those of documents that are only marked as removed are among them.
    """

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.position: dict[str, int] = {}
        self.rows = 0
        self._lengths, self._starts = _Growing([]), _Growing([])

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every document. Shape: [N], int64."""
        return self._lengths.values

    @property
    def starts(self) -> np.ndarray:
        """The row with which every document begins. Shape: [N], int64."""
        return self._starts.values

    def check_new(self, ids: Sequence[str]) -> None:
        """Raise a ValueError if one of `ids` is there already, or is repeated; it names the first."""
        new = set(ids)
        if len(new) < len(ids) or not self.position.keys().isdisjoint(new):
            seen = set(self.position)
            for id_ in ids:
                if id_ in seen:
                    raise ValueError(f"the document {id_!r:.100} is there twice")
                seen.add(id_)

    def extend(self, ids: Sequence[str], lengths: np.ndarray, removed: Sequence[int] = ()) -> None:
        """Append documents, whose ids are new, less those at the places `removed`, whose rows stay."""
        starts = self.rows + lengths.cumsum() - lengths
        self.rows += int(lengths.sum())
        if removed:
            kept = np.ones(len(ids), dtype=bool)
            kept[list(removed)] = False
            ids, lengths, starts = [ids[i] for i in np.flatnonzero(kept)], lengths[kept], starts[kept]
        start = len(self.ids)
        self.ids.extend(ids)
        self.position.update(zip(ids, range(start, len(self.ids)), strict=True))
        self._lengths.extend(lengths)
        self._starts.extend(starts)

    def kept(self, keep: np.ndarray) -> Documents:
        """Those of a mask [N], where they are."""
        documents = Documents()
        documents.extend([self.ids[i] for i in np.flatnonzero(keep)], self.lengths[keep])
        documents.rows, documents._starts = self.rows, _Growing(self.starts[keep])
        return documents

    def close(self, begin: int, end: int) -> None:
        """Take note that the rows from `begin` to `end` are gone, but for those of the documents, put end to end."""
        inside = (self.starts >= begin) & (self.starts < end)
        lengths, gone = self.lengths[inside], end - begin - int(self.lengths[inside].sum())
        self.starts[self.starts >= end] -= gone
        self.starts[inside] = begin + lengths.cumsum() - lengths
        self.rows -= gone


def blocks(lengths: np.ndarray, limit: int) -> list[tuple[int, int]]:
    """Cut a sequence of documents into stretches of at most `limit` tokens.

    A document longer than `limit` is a stretch of its own. A document counts as one token at least, so that empty ones
    cannot make a stretch of unbounded length.

    Parameters
    ----------
    lengths
        Tokens per document. Shape: [N].
    limit
        Tokens per stretch, at least 1.

    Returns
    -------
    list of (start, stop)
        They cover 0..N in order.
    """
    ends = np.cumsum(np.maximum(lengths, 1))
    stretches, start = [], 0
    while start < len(lengths):
        before = int(ends[start - 1]) if start else 0
        stop = max(int(np.searchsorted(ends, before + limit, side="right")), start + 1)
        stretches.append((start, stop))
        start = stop
    return stretches
