"""Record the calls of a function without changing what it does."""

from __future__ import annotations

from typing import Any

import pytest


def recorded(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[tuple, dict[str, Any]]]:
    """Patch a function to append the (args, kwargs) of each call to the returned list."""
    calls: list[tuple[tuple, dict[str, Any]]] = []
    function = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **options: calls.append((args, options)) or function(*args, **options))
    return calls
