"""Models that are loaded with weights drawn at random, made an error."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_missing_weights"]

# Where transformers logs what it did not find: weights of an encoder, and of adapters.
_LOGGERS = ("transformers.modeling_utils", "transformers.integrations.peft")


@contextmanager
def no_missing_weights(whose: str = "its weights") -> Iterator[None]:
    """Raise a ValueError where transformers loads an encoder, or adapters, whose weights are not all in their files.

    It draws those at random and logs a table of their names, which is nowhere else to be had. Poolers do not count:
    they are missing from many encoders, and late interaction has no use for them.

    Parameters
    ----------
    whose
        What the message says lacks something.
    """
    missing: list[str] = []

    def look(record: logging.LogRecord) -> bool:
        rows = re.sub(r"\x1b\[[0-9;]*m", "", record.getMessage()).splitlines()
        # Layers that lack the same stand in one row, as `layer.{0, 1}`, with a space.
        names = (re.match(r"(\S.*?) *\| *MISSING\b", row) for row in rows)
        missing.extend(name[1] for name in names if name and "pooler" not in name[1])
        # As of now: where transformers is imported only in here, that sets what it shows.
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
