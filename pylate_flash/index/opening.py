"""Opening an index: the parts that its catalog names, checked, and the segments of their rows."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

import torch

from .catalog import Catalog
from .codes import Codec
from .documents import Documents
from .parts import SEGMENT_NAME, Part, Segment

__all__ = ["loss", "opened"]


def opened(catalog: Catalog, device: torch.device) -> tuple[Documents, list[Part], Codec | None]:
    """The documents of a catalog, and the last parts of which rows have not come to the disk, with a warning.

    And the codec that makes residual codes, on a device. It names a file that is missing, damaged, or of a newer format
    in a ValueError, and one that cannot be opened in an OSError.
    """
    folder = catalog.path.parent
    while True:
        state, rows = catalog.read()
        try:
            names = dict.fromkeys(row[1] for row, _ in rows)
            segments = {name: Segment(folder / _checked_name(name)) for name in names}
            parts = [Part.from_row(row, removed, state.layout, segments) for row, removed in rows]
            if state.layout.nbits and rows and catalog.codec is None:
                raise ValueError("the codec of its residual codes is missing")
            codec = None if catalog.codec is None else Codec.parse(catalog.codec, device)
            count = Documents(parts).count
            if count != state.documents:
                raise ValueError(f"it holds {count} documents, and says {state.documents}")
            lost = _lost(catalog, parts)
            kept = parts[: len(parts) - len(lost)]
            for part in kept:
                part.check_size()
        except (OSError, ValueError) as error:
            # A writer may have deleted segments after the catalog was read here.
            if catalog.read()[0].generation != state.generation:
                continue
            if str(folder) in str(error):
                raise
            raise ValueError(f"{catalog.path} is damaged: {error}") from None
        if lost:
            warnings.warn(loss(catalog, lost), stacklevel=4)
        return Documents(kept), lost, codec


def _lost(catalog: Catalog, parts: list[Part]) -> list[Part]:
    begin = catalog.unflushed
    new = [part for part in parts if begin is not None and part.numbers[-1] >= begin]
    catalog.written.update(part.segment for part in new if part.segment is not None)
    first = next((part for part in new if part.is_lost()), None)
    return [] if first is None else parts[parts.index(first) :]


def loss(catalog: Catalog, lost: Sequence[Part]) -> str:
    """What to say of parts of which rows have not come to the disk."""
    count = sum(part.documents - len(part.removed) for part in lost)
    return (
        f"{catalog.path}: the last {count} documents that were added to the index are lost, which had not reached the "
        "disk, as after a power failure"
    )


def _checked_name(name: object) -> str:
    # It is used as a path: nothing outside the folder may be named.
    if not isinstance(name, str) or not re.fullmatch(SEGMENT_NAME.replace("*", "[0-9a-f]{12}"), name):
        raise ValueError(f"bad name {name!r:.100} of a segment")
    return name
