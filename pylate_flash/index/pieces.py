"""The embeddings of a store, wherever they are: in shards, in the journal, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from .journal import Journal
from .layout import Layout
from .shards import Shard

__all__ = ["Pieces"]


class Pieces:
    """Shards and, after them, perhaps a journal, put end to end.

    Attributes
    ----------
    shards, journal
        The pieces.
    kept_on
        Where `read` finds the embeddings: the CPU stands for the files.
    """

    def __init__(self, layout: Layout, shards: list[Shard], journal: Journal | None) -> None:
        self.shards, self.journal = shards, journal
        self.kept_on = torch.device("cpu")
        self._layout = layout
        self._all: list[Shard | Journal] = [*shards, *([] if journal is None else [journal])]
        # The last piece may grow, and where it begins stays.
        self._starts = np.cumsum([0] + [piece.rows for piece in self._all[:-1]])
        self._copies: dict[Shard | Journal, torch.Tensor] = {}

    def __iter__(self) -> Iterator[Shard | Journal]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def followed_by(self, layout: Layout, shards: list[Shard], journal: Journal | None) -> Pieces:
        """Other pieces, for which the copies of those that stay need not be made again."""
        pieces = Pieces(layout, shards, journal)
        pieces._copies = {piece: self._copies[piece] for piece in pieces if piece in self._copies}
        return pieces

    def read(self, runs: list[tuple[int, int]], device: torch.device, room: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of all pieces put end to end: the runs from start to stop, packed; in `room` [*, width] if they fit.

        Returns
        -------
        torch.Tensor
            [T, width] on `device`. It may be the pieces' own memory, so it must not be written to.

        Raises
        ------
        ValueError
            If a shard has been truncated, or holds other values than were written. The message names it.
        OSError
            If a shard cannot be read. The message names it.
        """
        slices = [some for run in runs for some in self._slices(*run)]
        if self.kept_on.type != "cpu" and slices:
            copies = [self._copies[piece][first:last] for piece, first, last in slices]
            return (copies[0] if len(copies) == 1 else torch.cat(copies)).to(device)
        if len(slices) == 1:
            piece, first, last = slices[0]
            if isinstance(piece, Journal):
                return piece.values[first:last].to(device)
        rows = sum(last - first for _, first, last in slices)
        fits = room is not None and rows <= len(room)
        values = room[:rows] if room is not None and fits else self._empty(rows)
        done = 0
        for piece, first, last in slices:
            piece.read_into(values[done : done + last - first], first)
            done += last - first
        return values.to(device)

    def bytes_to_copy(self, device: torch.device) -> int:
        """Bytes that `keep_on` would copy to `device`, beside those that are there already."""
        return sum(piece.rows for piece in self._all if not self._is_on(device, piece)) * self._layout.nbytes

    def keep_on(self, device: torch.device) -> None:
        """Copy all embeddings to `device`, from where `read` serves them; with the CPU, give the copies up."""
        if device == self.kept_on:
            return
        self.kept_on = torch.device("cpu")
        if device.type == "cpu":
            self._copies = {}
            return
        for piece in self._all:
            if not self._is_on(device, piece):
                values = self._empty(piece.rows)
                piece.read_into(values, 0)
                self._copies[piece] = values.to(device)
        self.kept_on = device

    def _empty(self, rows: int) -> torch.Tensor:
        return torch.empty(rows, self._layout.width, dtype=self._layout.dtype)

    def _is_on(self, device: torch.device, piece: Shard | Journal) -> bool:
        copy = self._copies.get(piece)
        if copy is None or len(copy) != piece.rows or copy.device.type != device.type:
            return False
        # A tensor knows which GPU it is on, also where `device` is just "cuda".
        return device.index in (None, copy.device.index)

    def appended(self) -> None:
        """Take note that the journal has grown: what it holds must be copied again."""
        if self.kept_on.type != "cpu":
            self.kept_on = torch.device("cpu")

    def _slices(self, start: int, stop: int) -> list[tuple[Shard | Journal, int, int]]:
        """Rows start..stop of all pieces put end to end: a piece, from which of its rows to which."""
        found = []
        piece = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            begin = int(self._starts[piece])
            end = min(stop, begin + self._all[piece].rows)
            if start < end:
                found.append((self._all[piece], start - begin, end - begin))
                start = end
            piece += 1
        return found
