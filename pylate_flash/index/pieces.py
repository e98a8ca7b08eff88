"""The rows of a store, wherever they are: in its parts, or in copies of them on a GPU."""

from __future__ import annotations

import numpy as np
import torch

from .layout import Layout
from .parts import Part

__all__ = ["Pieces"]


class Pieces:
    """Parts put end to end.

    Attributes
    ----------
    parts
        They may grow in number.
    kept_on
        Where `read` finds the rows: the CPU stands for the files.
    """

    def __init__(self, layout: Layout, parts: list[Part]) -> None:
        self.parts = parts
        self.kept_on = torch.device("cpu")
        self.layout = layout
        self._ends = np.zeros(0, dtype=np.int64)
        self._copies: dict[Part, torch.Tensor] = {}

    def followed_by(self, pieces: Pieces) -> Pieces:
        """Others, for which the copies of those parts that stay need not be made again."""
        pieces._copies = {part: self._copies[part] for part in pieces.parts if part in self._copies}
        return pieces

    def read(self, runs: list[tuple[int, int]], device: torch.device, room: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of all parts put end to end: the runs from start to stop, packed; in `room` [*, width] if they fit.

        Returns
        -------
        torch.Tensor
            [T, width] on `device`. It may be the store's own memory, so it must not be written to.

        Raises
        ------
        ValueError
            If a segment has been truncated, or holds other rows than were written. The message names it.
        OSError
            If a segment cannot be read. The message names it.
        """
        slices = [some for run in runs for some in self._slices(*run)]
        if self.kept_on.type != "cpu" and slices:
            copies = [self._copies[part][first:last] for part, first, last in slices]
            return (copies[0] if len(copies) == 1 else torch.cat(copies)).to(device)
        rows = sum(last - first for _, first, last in slices)
        values = room[:rows] if room is not None and rows <= len(room) else self._empty(rows)
        done = 0
        for part, first, last in slices:
            part.read_into(values[done : done + last - first], first)
            done += last - first
        return values.to(device)

    def bytes_to_copy(self, device: torch.device) -> int:
        """Bytes that `keep_on` would copy to `device`, beside those that are there already."""
        return sum(part.nbytes for part in self.parts if not self._is_on(device, part))

    def keep_on(self, device: torch.device) -> None:
        """Copy all rows to `device`, from where `read` serves them; with the CPU, give the copies up."""
        if device == self.kept_on:
            return
        self.kept_on = torch.device("cpu")
        if device.type == "cpu":
            self._copies = {}
            return
        for part in self.parts:
            if not self._is_on(device, part):
                values = self._empty(part.rows)
                part.read_into(values, 0)
                self._copies[part] = values.to(device)
        self.kept_on = device

    def appended(self) -> None:
        """Take note that there is one more part, which must be copied as well."""
        self.kept_on = torch.device("cpu")

    def _empty(self, rows: int) -> torch.Tensor:
        return torch.empty(rows, self.layout.width, dtype=self.layout.dtype)

    def _is_on(self, device: torch.device, part: Part) -> bool:
        copy = self._copies.get(part)
        # A tensor knows which GPU it is on, also where `device` is just "cuda".
        return copy is not None and copy.device.type == device.type and device.index in (None, copy.device.index)

    def _slices(self, start: int, stop: int) -> list[tuple[Part, int, int]]:
        """Rows start..stop of all parts put end to end: a part, from which of its rows to which."""
        if len(self._ends) != len(self.parts):
            self._ends = np.cumsum([part.rows for part in self.parts])
        found = []
        index = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            part, end = self.parts[index], int(self._ends[index])
            begin = end - part.rows
            last = min(stop, end)
            if start < last:
                found.append((part, start - begin, last - begin))
                start = last
            index += 1
        return found
