"""How long the demo takes, and how long is left of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .job import Settings

# Seconds per token on two cores at 2 GHz, by all-MiniLM-L6-v2: encoded, and trained on.
_ENCODED, _TRAINED = 2.0e-4, 7.0e-4
# Imports; reading docstrings; searches, metrics and the picture.
_LOADING, _READING, _REST = 12.0, 6.0, 8.0


class Schedule:
    """Steps with the seconds that they are expected to take, corrected by how long the first of them took here.

    The demo `started` at that time of `time.perf_counter`.
    """

    def __init__(self, settings: Settings, started: float) -> None:
        evaluation = _REST + _ENCODED * settings.documents * settings.document_length
        training = _TRAINED * settings.pairs * (settings.query_length + settings.train_document_length)
        self._seconds = [_LOADING + _READING, evaluation, training, evaluation, 2.0]
        self._started = started
        self._done = 0

    def step_done(self) -> None:
        """The next of the steps begins: before training, training, after training, results."""
        self._done += 1

    def left(self) -> str:
        """About how long everything that is still to do will take, in words."""
        expected = sum(self._seconds[: self._done])
        # Loading says little about the speed of products: with nothing else done, expect the usual.
        pace = (time.perf_counter() - self._started) / expected if self._done > 1 else 1.0
        seconds = pace * sum(self._seconds[self._done :])
        if seconds < 90:
            return f"about {max(5, 5 * round(seconds / 5))} s left"
        return f"about {seconds / 60:.0f} min left" if seconds > 300 else f"about {seconds / 60:.1f} min left"
