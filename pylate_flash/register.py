"""Make the installed hosts (PyLate, sentence-transformers, colpali-engine) run through this package, reversibly.

`pylate_flash.hosts` has what of each host is routed, and how. Importing this module imports neither torch nor a host,
and changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from . import _config
from .hosts import HOSTS
from .hosts.host import Host
from .hosts.pylate import ROUTES as _PYLATE_ROUTES

__all__ = ["register", "registered", "unregister", "use_scorer"]

_lock = threading.RLock()
# What holds each host registered, the latest last: register(), and every open block of registered(); with its masking.
_holders: dict[str, dict[object, str]] = {name: {} for name in HOSTS}
_REGISTER = "register()"


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

    mteb, where it is named: its wrappers of PyLate's models and of `MultiVectorEncoder` search tasks of texts by
    `hosts.mteb`, exactly, in place of PLAID, and encode a corpus once.

    Registering again only updates `masking`.

    Functions bound before run fused. Classes of PyLate's that were bound before keep its own code with fused scores,
    and are not the classes that its names stand for then: register before losses are imported or subclassed.

    Parameters
    ----------
    host
        `"pylate"`, `"sentence-transformers"`, `"colpali-engine"`, also by the name of its extra, `"colpali"`, or
        `"mteb"`. None: all that are installed, but for mteb.
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
        If the host, or every one of them, is missing, in a version outside the supported range, or lacks what is
        routed, or has something else in its place. Nothing was changed then.

    Examples
    --------
    >>> register("pylate")
    >>> unregister()
    """
    _hold(_REGISTER, host, masking, strict)


def unregister(host: str | None = None) -> None:
    """Undo `register()`: every module of the host holds the very objects that it held before. Without it, do nothing.

    While a block of `registered` is open, here or in another thread or task, the host stays registered until its end.

    Parameters
    ----------
    host
        As in `register`. None: all that are registered.

    Raises
    ------
    ValueError
        If `host` is unknown.
    """
    _let_go(_REGISTER, list(HOSTS) if host is None else [_known(host).name])


@contextmanager
def registered(host: str | None = None, *, masking: str = "exclude", strict: bool = True) -> Iterator[None]:
    """Register for the block of a `with`.

    Afterwards a host is as it was, unless `register` or another block still open holds it: blocks may be nested, and
    overlap in threads or tasks. All of them share one masking, that of the latest.

    Parameters
    ----------
    host, masking, strict
        As in `register`.
    """
    holder = object()
    names = _hold(holder, host, masking, strict)
    try:
        yield
    finally:
        _let_go(holder, names)


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
    outer = _config.default.get() or _config.Scorer(None, None)
    default = _config.Scorer(
        outer.backend if backend is None else _config.check_backend(backend),
        outer.masking if masking is None else _config.check_masking(masking),
    )
    with _lock:
        if _PYLATE_ROUTES.holders == 0:
            HOSTS["pylate"].check("use_scorer")
        _PYLATE_ROUTES.hold()
    token = _config.default.set(default)
    try:
        yield
    finally:
        # First: a generator that is closed in another context than it began in cannot reset this one.
        _PYLATE_ROUTES.release()
        _config.default.reset(token)


def _hold(holder: object, host: str | None, masking: str, strict: bool) -> list[str]:
    """Let somebody hold this host, or all that are installed; returns their names."""
    _config.check_masking(masking)
    with _lock:
        hosts = _hosts(host)
        for found in hosts:
            found.check(f'{"register" if holder is _REGISTER else "registered"}("{found.name}")', strict)
        routed: list[Host] = []
        try:
            for found in hosts:
                if not _holders[found.name]:
                    _route(found)
                    routed.append(found)
        except BaseException:
            for found in routed:
                found.routes.release()
            raise
        names = [found.name for found in hosts]
        for name in names:
            _holders[name].pop(holder, None)
            _holders[name][holder] = masking
        _update_masking()
    return names


def _let_go(holder: object, names: list[str]) -> None:
    """Undo `_hold` of these hosts, of which the last holder gives back what was routed."""
    with _lock:
        for name in names:
            if _holders[name].pop(holder, None) is not None and not _holders[name]:
                HOSTS[name].routes.release()
        _update_masking()


def _update_masking() -> None:
    _config.registered_masking = next(reversed(_holders["pylate"].values()), None)


def _route(host: Host) -> None:
    try:
        host.routes.hold()
    except (AttributeError, ImportError) as error:
        # What a newer version has not, or not any more as it was.
        raise ImportError(f"{host.about.title} {host.version()} cannot be registered: {error}") from error


def _known(host: str) -> Host:
    """The host of this name, or whose extra has this name."""
    for known in HOSTS.values():
        if host in (known.name, known.about.extra):
            return known
    raise ValueError(f"host must be one of {', '.join(map(repr, HOSTS))}, or None, got {host!r}")


def _hosts(host: str | None) -> list[Host]:
    """The host of this name, or all that are installed."""
    if host is not None:
        return [_known(host)]
    unnamed = [known for known in HOSTS.values() if not known.about.by_name]
    found = [known for known in unnamed if known.is_there()]
    if not found:
        extras = " or ".join(f'"pylate-flash[{known.about.extra}]"' for known in unnamed)
        raise ImportError(f"there is nothing to register: install a host, with pip install {extras}")
    return found
