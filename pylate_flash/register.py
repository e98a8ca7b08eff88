"""Make the installed hosts (PyLate, sentence-transformers, colpali-engine) run through this package, reversibly.

`pylate_flash.hosts` defines what is routed in each host, and how. Importing this module imports neither torch nor a
host, and changes nothing.
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
# Per host, what keeps it registered, latest last, with its masking: register() and the open registered() blocks.
_holders: dict[str, dict[object, str]] = {name: {} for name in HOSTS}
_REGISTER = "register()"


def register(host: str | None = None, *, masking: str = "exclude", strict: bool = True) -> None:
    """Make PyLate, sentence-transformers and colpali-engine score, train and evaluate through the fused MaxSim.

    PyLate: `pylate.scores.colbert_scores`, `colbert_scores_pairwise` and `colbert_kd_scores` gain the backend
    `"pylate_flash"`: for the argument `backend`, for the environment variable `PYLATE_SCORES_BACKEND` (read on every
    call), and as the first choice of `"auto"`; references imported earlier are affected too. `pylate.scores.XTRScores`
    and `XTRKDScores` follow the backend in force. `pylate.rank.rerank`, `pylate.scores.ColBERTScores` and PyLate's
    losses and evaluators become those of this package.

    sentence-transformers: `util.maxsim`, `maxsim_pairwise`, and the functions of `multi_vector_encoder.scoring` are
    served by `pylate_flash.hosts.sentence_transformers`; references imported earlier are affected too. So are
    `MultiVectorEncoder.similarity` and `similarity_pairwise`, the evaluators and the losses.

    colpali-engine: `utils.maxsim.maxsim_inbatch` and `maxsim_kd`, including references imported earlier, hence its
    losses and `score_multi_vector`; and the smooth maximum over a batch in its losses, but not that of their explicit
    negatives. `COLPALI_SCORES_BACKEND` can still select another backend.

    mteb, only if named: its wrappers of PyLate's models and of `MultiVectorEncoder` run text retrieval tasks through
    `hosts.mteb`: exact search in place of PLAID, encoding each corpus once.

    Registering again only updates `masking`.

    Functions imported earlier run fused. PyLate classes imported earlier keep PyLate's code with fused scores, and
    are not the classes that PyLate's names then refer to: register before losses are imported or subclassed.

    Parameters
    ----------
    host
        `"pylate"`, `"sentence-transformers"`, `"colpali-engine"`, also by the name of its extra, `"colpali"`, or
        `"mteb"`. None: all installed hosts except mteb.
    masking
        PyLate only: how masked document tokens count if neither the call nor the model sets it: `"exclude"` (never win
        the max) or `"zero"` (similarity 0, as in PyLate's torch scorer).
    strict
        Whether a version that is not covered by the tests is an error.

    Raises
    ------
    ValueError
        If `host` or `masking` is unknown.
    ImportError
        If the host, or every host, is missing or in a version outside the supported range, or if a routed function is
        missing or has been replaced. Nothing is changed then.

    Examples
    --------
    >>> register("pylate")
    >>> unregister()
    """
    _hold(_REGISTER, host, masking, strict)


def unregister(host: str | None = None) -> None:
    """Undo `register()`: every module of the host holds the same objects as before. No-op if not registered.

    While a block of `registered` is open, in this or another thread or task, the host stays registered until it ends.

    Parameters
    ----------
    host
        As in `register`. None: all registered hosts.

    Raises
    ------
    ValueError
        If `host` is unknown.
    """
    _let_go(_REGISTER, list(HOSTS) if host is None else [_known(host).name])


@contextmanager
def registered(host: str | None = None, *, masking: str = "exclude", strict: bool = True) -> Iterator[None]:
    """Context manager that registers hosts for the duration of a `with` block.

    A host is restored at the end unless `register` or another open block still holds it: blocks may be nested, and may
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
    """Context manager that sets the default backend and masking of the calls in a `with` block.

    PyLate's scoring functions follow it too, registered or not. Callers in other threads or tasks are not affected.

    Parameters
    ----------
    backend
        `"pylate_flash"`, `"torch"`, `"flash"` or `"lik"`; `"auto"` leaves the choice to `PYLATE_SCORES_BACKEND`, and
        without it to this package. None keeps the backend in force.
    masking
        `"exclude"` or `"zero"`. None keeps the masking in force.

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
        # Release first: reset() raises if the generator is closed in another context than it started in.
        _PYLATE_ROUTES.release()
        _config.default.reset(token)


def _hold(holder: object, host: str | None, masking: str, strict: bool) -> list[str]:
    """Add `holder` to this host, or to all installed hosts, and route them if needed; return their names."""
    _config.check_masking(masking)
    with _lock:
        hosts = _hosts(host)
        for entry in hosts:
            entry.check(f'{"register" if holder is _REGISTER else "registered"}("{entry.name}")', strict)
        routed: list[Host] = []
        try:
            for entry in hosts:
                if not _holders[entry.name]:
                    _route(entry)
                    routed.append(entry)
        except BaseException:
            for entry in routed:
                entry.routes.release()
            raise
        names = [entry.name for entry in hosts]
        for name in names:
            _holders[name].pop(holder, None)
            _holders[name][holder] = masking
        _update_masking()
    return names


def _let_go(holder: object, names: list[str]) -> None:
    """Undo `_hold` for these hosts; the routes of a host are released with its last holder."""
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
        # A newer version has removed or changed a routed object.
        raise ImportError(f"{host.about.title} {host.version()} cannot be registered: {error}") from error


def _known(host: str) -> Host:
    """Return the host of this name, or whose extra has this name."""
    for candidate in HOSTS.values():
        if host in (candidate.name, candidate.about.extra):
            return candidate
    raise ValueError(f"host must be one of {', '.join(map(repr, HOSTS))}, or None, got {host!r}")


def _hosts(host: str | None) -> list[Host]:
    """Return the host of this name, or all installed hosts that need not be named explicitly."""
    if host is not None:
        return [_known(host)]
    default_hosts = [candidate for candidate in HOSTS.values() if not candidate.about.by_name]
    installed = [candidate for candidate in default_hosts if candidate.is_there()]
    if not installed:
        extras = " or ".join(f'"pylate-flash[{candidate.about.extra}]"' for candidate in default_hosts)
        raise ImportError(f"there is nothing to register: install a host, with pip install {extras}")
    return installed
