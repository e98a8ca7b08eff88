"""The backend and the masking in force, which `register` and `use_scorer` set, and what asks for them.

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
    """What `use_scorer` sets for its block; None leaves the choice to what is in force outside."""

    backend: str | None
    masking: str | None


# What `register` was given; None: not registered.
registered_masking: str | None = None
default: ContextVar[Scorer | None] = ContextVar("pylate_flash_scorer", default=None)


def asks_for_ours() -> bool:
    """Whether PyLate's functions, where they are routed, are for this caller too: not by another's `use_scorer`."""
    return registered_masking is not None or default.get() is not None


def backend_in_force(backend: str | None = None) -> str:
    """The backend of a call: `backend` if given, else `use_scorer`'s, else the environment's, else `"auto"`.

    Raises
    ------
    ValueError
        If that backend is unknown.
    """
    if backend is not None:
        return check_backend(backend)
    used = default.get()
    if used is not None and used.backend not in (None, "auto"):
        return used.backend
    return check_backend(os.environ.get(ENVIRONMENT_VARIABLE, "auto"), name=ENVIRONMENT_VARIABLE)


def masking_in_force(masking: str | None = None) -> str:
    """The masking of a call: `masking` if given, else `use_scorer`'s, else `register`'s, else `"exclude"`.

    Raises
    ------
    ValueError
        If `masking` is unknown.
    """
    if masking is not None:
        return check_masking(masking)
    used = default.get()
    return (used and used.masking) or registered_masking or "exclude"


def check_backend(backend: object, name: str = "backend") -> str:
    """Return `backend` in lower case, as PyLate reads it, or raise ValueError naming the known ones."""
    known = backend.lower() if isinstance(backend, str) else backend
    if known not in BACKENDS:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    return known


def check_masking(masking: object) -> str:
    """Return `masking`, or raise ValueError naming the known ones."""
    if masking not in MASKINGS:
        raise ValueError(f"masking must be one of {', '.join(map(repr, MASKINGS))}, got {masking!r}")
    return masking
