"""Calls of a function, recorded while it does what it does."""

from __future__ import annotations

from typing import Any

import pytest


def recorded(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[tuple, dict[str, Any]]]:
    """The arguments of each of its calls, by position and by name, which grow as it is called."""
    calls: list[tuple[tuple, dict[str, Any]]] = []
    function = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **options: calls.append((args, options)) or function(*args, **options))
    return calls
