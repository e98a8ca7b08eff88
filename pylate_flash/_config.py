"""The backend and masking in force, set by `register` and `use_scorer`, and the functions that resolve them.

Importing this module imports neither torch nor PyLate.
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from typing import NamedTuple

BACKENDS = ("auto", "pylate_flash", "torch", "flash", "lik")
MASKINGS = ("exclude", "zero")
ENVIRONMENT_VARIABLE = "PYLATE_SCORES_BACKEND"


class Scorer(NamedTuple):
    """Backend and masking set by `use_scorer` for its block; None inherits from the enclosing context."""

    backend: str | None
    masking: str | None


# The masking of `register`; None: not registered.
registered_masking: str | None = None
default: ContextVar[Scorer | None] = ContextVar("pylate_flash_scorer", default=None)


def asks_for_ours() -> bool:
    """Whether PyLate's routed functions serve this caller: not if only another caller's `use_scorer` routes them."""
    return registered_masking is not None or default.get() is not None


def backend_in_force(backend: str | None = None) -> str:
    """Resolve the backend of a call: `backend` if given, else `use_scorer`'s, else the environment's, else `"auto"`.

    Raises
    ------
    ValueError
        If that backend is unknown.
    """
    if backend is not None:
        return check_backend(backend)
    scorer = default.get()
    if scorer is not None and scorer.backend not in (None, "auto"):
        return scorer.backend
    return check_backend(os.environ.get(ENVIRONMENT_VARIABLE, "auto"), name=ENVIRONMENT_VARIABLE)


def masking_in_force(masking: str | None = None) -> str:
    """Resolve the masking of a call: `masking` if given, else `use_scorer`'s, else `register`'s, else `"exclude"`.

    Raises
    ------
    ValueError
        If `masking` is unknown.
    """
    if masking is not None:
        return check_masking(masking)
    scorer = default.get()
    return (scorer and scorer.masking) or registered_masking or "exclude"


def check_backend(backend: object, name: str = "backend") -> str:
    """Return `backend` in lower case, as PyLate reads it, or raise ValueError naming the known ones."""
    lowered = backend.lower() if isinstance(backend, str) else backend
    if lowered not in BACKENDS:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    return lowered


def check_masking(masking: object) -> str:
    """Return `masking`, or raise ValueError naming the known ones."""
    if masking not in MASKINGS:
        raise ValueError(f"masking must be one of {', '.join(map(repr, MASKINGS))}, got {masking!r}")
    return masking
