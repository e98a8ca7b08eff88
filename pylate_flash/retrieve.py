"""PyLate's retriever, so that `from pylate import retrieve` becomes `from pylate_flash import retrieve`.

It is PyLate's own class: `ColBERT(index=indexes.Flat(...))` searches end to end through `indexes.Flat`.
"""

from __future__ import annotations

from .hosts.pylate import _needs  # noqa: F401

# isort: split
from pylate.retrieve import ColBERT

__all__ = ["ColBERT"]
