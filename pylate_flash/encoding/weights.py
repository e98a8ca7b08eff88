"""An error for models loaded with randomly initialized weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

# Loggers on which transformers reports missing weights: of an encoder, and of adapters.
_LOGGERS = ("transformers.modeling_utils", "transformers.integrations.peft")


@contextmanager
def no_missing_weights(whose: str = "its weights") -> Iterator[None]:
    """Raise a ValueError if transformers loads an encoder or adapters with weights missing from their files.

    It initializes those at random and logs a table of their names, the only place where they appear. Poolers do not
    count: many encoders lack them, and late interaction does not use them.

    Parameters
    ----------
    whose
        The owner of missing weights in the message.
    """
    missing: list[str] = []

    def look(record: logging.LogRecord) -> bool:
        rows = re.sub(r"\x1b\[[0-9;]*m", "", record.getMessage()).splitlines()
        # Layers that lack the same weight share a row, as `layer.{0, 1}`, with a space.
        names = (re.match(r"(\S.*?) *\| *MISSING\b", row) for row in rows)
        missing.extend(name[1] for name in names if name and "pooler" not in name[1])
        # The parent's level is read now, because importing transformers inside the context may set it.
        logger = logging.getLogger(record.name)
        assert logger.parent is not None
        return record.levelno >= (levels[record.name] or logger.parent.getEffectiveLevel())

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = {logger.name: logger.level for logger in loggers}
    for logger in loggers:
        logger.setLevel(logging.WARNING)
        logger.addFilter(look)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(look)
            logger.setLevel(levels[logger.name])
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"{whose} lack {', '.join(sorted(missing)[:3])}{more}")
