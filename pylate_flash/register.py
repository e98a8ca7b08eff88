"""Make the installed hosts (PyLate, sentence-transformers, colpali-engine) run through this package, reversibly.

`pylate_flash.hosts` has what of each host is routed, and how. Importing this module imports neither torch nor a host,
and changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from . import _switches
from .hosts import HOSTS
from .hosts.host import Host
from .hosts.pylate import ROUTES as _PYLATE_ROUTES

__all__ = ["register", "registered", "unregister", "use_scorer"]

_lock = threading.RLock()
_registered: set[str] = set()  # names of hosts


def register(host: str | None = None, *, masking: str = "exclude", strict: bool = True) -> None:
    """Make PyLate, sentence-transformers and colpali-engine score, train and evaluate through the fused MaxSim.

    PyLate: `pylate.scores.colbert_scores`, `colbert_scores_pairwise` and `colbert_kd_scores` gain the backend
    `"pylate_flash"`, as their argument `backend`, in the environment variable `PYLATE_SCORES_BACKEND` (read at every
    call), and as the one that `"auto"` prefers; also where they were imported before. `pylate.scores.XTRScores` and
    `XTRKDScores` follow the backend in force. `pylate.rank.rerank`, `pylate.scores.ColBERTScores` and PyLate's losses
    and evaluators become those of this package.

    sentence-transformers: `util.maxsim`, `maxsim_pairwise`, and the functions of `multi_vector_encoder.scoring` are
    served by `pylate_flash.hosts.sentence_transformers`, also where they were imported before. With them go
    `MultiVectorEncoder.similarity` and `similarity_pairwise`, the evaluators and the losses.

    colpali-engine: `utils.maxsim.maxsim_inbatch` and `maxsim_kd`, also where they were imported before, and with them
    its losses and `score_multi_vector`; and the smooth maximum of a batch in its losses, but not that of their explicit
    negatives. `COLPALI_SCORES_BACKEND` still names another backend.

    Registering again only updates `masking`.

    Parameters
    ----------
    host
        `"pylate"`, `"sentence-transformers"` or `"colpali-engine"`. None: all that are installed.
    masking
        PyLate only: what a masked document token does, where a call or a model does not say: `"exclude"` (it never wins
        the max) or `"zero"` (its similarity counts as 0, as in PyLate's torch scorer).
    strict
        Whether a version that the tests do not run with is an error.

    Raises
    ------
    ValueError
        If `host` or `masking` is unknown.
    ImportError
        If the host, or every one of them, is missing, or in a version outside the supported range. Nothing was changed
        then.

    Examples
    --------
    >>> register("pylate")
    >>> unregister()
    """
    _switches.check_masking(masking)
    with _lock:
        hosts = _hosts(host)
        for found in hosts:
            found.check(strict)
        held: list[Host] = []
        try:
            for found in hosts:
                if found.name not in _registered:
                    found.hold()
                    held.append(found)
        except BaseException:
            for found in held:
                found.release()
            raise
        _registered.update(found.name for found in held)
        if "pylate" in [found.name for found in hosts]:
            _switches.registered_masking = masking


def unregister(host: str | None = None) -> None:
    """Undo `register()`: every module of the host holds the very objects that it held before. Without it, do nothing.

    Parameters
    ----------
    host
        As in `register`. None: all that are registered.

    Raises
    ------
    ValueError
        If `host` is unknown.
    """
    with _lock:
        for name in sorted(_registered) if host is None else [_known(host).name]:
            if name in _registered:
                HOSTS[name].release()
                _registered.discard(name)
                if name == "pylate":
                    _switches.registered_masking = None


@contextmanager
def registered(host: str | None = None, *, masking: str = "exclude", strict: bool = True) -> Iterator[None]:
    """Register for the block of a `with`, then go back to the state before it, registered or not.

    Parameters
    ----------
    host, masking, strict
        As in `register`.
    """
    with _lock:
        before, masking_before = set(_registered), _switches.registered_masking
        register(host, masking=masking, strict=strict)
        touched = [found.name for found in _hosts(host)]
    try:
        yield
    finally:
        with _lock:
            for name in touched:
                if name not in before:
                    unregister(name)
                else:
                    register(name, masking=masking_before or "exclude", strict=False)


@contextmanager
def use_scorer(backend: str | None = None, masking: str | None = None) -> Iterator[None]:
    """Set the backend and the masking of the calls in the block of a `with` that name none.

    PyLate's scoring functions follow it too, registered or not: their other callers, in other threads or tasks, do not
    notice.

    Parameters
    ----------
    backend
        `"pylate_flash"`, `"torch"`, `"flash"` or `"lik"`; `"auto"` leaves the choice to `PYLATE_SCORES_BACKEND`, and
        without it to this package. None keeps what is in force.
    masking
        `"exclude"` or `"zero"`. None keeps what is in force.

    Raises
    ------
    ValueError
        If `backend` or `masking` is none of these.
    ImportError
        If the installed PyLate is outside the supported range.
    """
    outer = _switches.default.get() or _switches.Scorer(None, None)
    default = _switches.Scorer(
        outer.backend if backend is None else _switches.check_backend(backend),
        outer.masking if masking is None else _switches.check_masking(masking),
    )
    with _lock:
        if _PYLATE_ROUTES.holders == 0:
            HOSTS["pylate"].check()
        _PYLATE_ROUTES.hold()
    token = _switches.default.set(default)
    try:
        yield
    finally:
        _switches.default.reset(token)
        _PYLATE_ROUTES.release()


def _known(host: str) -> Host:
    if host not in HOSTS:
        raise ValueError(f"host must be one of {', '.join(map(repr, HOSTS))}, or None, got {host!r}")
    return HOSTS[host]


def _hosts(host: str | None) -> list[Host]:
    """The host of this name, or all that are installed."""
    if host is not None:
        return [_known(host)]
    found = [known for known in HOSTS.values() if known.is_there()]
    if not found:
        extras = " or ".join(f'"pylate-flash[{known.about.extra}]"' for known in HOSTS.values())
        raise ImportError(f"there is nothing to register: install a host, with pip install {extras}")
    return found
