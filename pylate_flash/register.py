"""Everything that touches PyLate's modules: the backend "pylate_flash", its switches, and the way back.

Two mechanisms, because two kinds of references to PyLate's objects exist.

- The three scoring functions are held everywhere: `from pylate.scores import colbert_scores` in user code, the default
  argument of `Distillation`, the `similarity` of every loaded model. No rebinding of names reaches all of these, so the
  function objects stay and their `__code__` is exchanged, for code that asks this module who serves the call. PyLate's
  own code lives on in a twin function, which serves the backends "torch", "flash" and "lik".
- `rerank`, `ColBERTScores`, the losses and the evaluators are looked up by name when they are used, so their names are
  rebound in every loaded PyLate module that holds them.

Importing this module imports neither torch nor PyLate, and changes nothing.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from packaging.specifiers import SpecifierSet

from . import _switches

SUPPORTED_PYLATE = ">=1.6,<1.7"

# What is routed: functions of pylate.scores that keep their identity and gain the backend ...
SCORING_FUNCTIONS = ("colbert_scores", "colbert_scores_pairwise", "colbert_kd_scores")
# ... and names of pylate.<module> that stand for those of pylate_flash.<module> while registered, the same ones ...
REBOUND = {
    "scores": ("ColBERTScores",),
    "rank": ("rerank",),
    "losses": ("Contrastive", "CachedContrastive", "Distillation"),
    "evaluation": (
        "ColBERTTripletEvaluator",
        "ColBERTDistillationEvaluator",
        "PyLateInformationRetrievalEvaluator",
        "NanoBEIREvaluator",
    ),
}
# ... or these.
RENAMED = {"CachedContrastive": "RegisteredCachedContrastive"}


_lock = threading.RLock()
_rebound: list[tuple[Any, Any]] = []  # (PyLate's object, ours) for each name of REBOUND, while registered
_route_holders = 0  # register() and every open use_scorer() block hold the routes


def register(masking: str = "exclude") -> None:
    """Make PyLate score, train, rerank and evaluate through the fused MaxSim.

    `pylate.scores.colbert_scores`, `colbert_scores_pairwise` and `colbert_kd_scores` gain the backend
    `"pylate_flash"`, as their argument `backend`, in the environment variable `PYLATE_SCORES_BACKEND` (read at every
    call), and as the one that `"auto"` prefers; also where they were imported before. `pylate.rank.rerank`,
    `pylate.scores.ColBERTScores` and PyLate's losses and evaluators become those of this package.

    Registering again only updates `masking`.

    Parameters
    ----------
    masking
        What a masked document token does, where a call or a model does not say: `"exclude"` (it never wins the max) or
        `"zero"` (its similarity counts as 0, as in PyLate's torch scorer).

    Raises
    ------
    ValueError
        If `masking` is neither of the two.
    ImportError
        If the installed PyLate is outside the supported range. Nothing was changed then.
    """
    _switches.check_masking(masking)
    with _lock:
        if _switches.registered_masking is None:
            _check_pylate_version()
            pairs = []
            for module, names in REBOUND.items():
                pylate_module = importlib.import_module(f"pylate.{module}")
                our_module = importlib.import_module(f"pylate_flash.{module}")
                pairs += [
                    (getattr(pylate_module, name), getattr(our_module, RENAMED.get(name, name))) for name in names
                ]
            _hold_routes()
            for theirs, ours in pairs:
                _rebind(theirs, ours)
            _rebound[:] = pairs
        _switches.registered_masking = masking


def unregister() -> None:
    """Undo `register()`: every PyLate module holds the very objects that it held before. Without it, do nothing."""
    with _lock:
        if _switches.registered_masking is None:
            return
        for theirs, ours in _rebound:
            _rebind(ours, theirs)
        _rebound.clear()
        _release_routes()
        _switches.registered_masking = None


@contextmanager
def registered(masking: str = "exclude") -> Iterator[None]:
    """Register for the block of a `with`, then go back to the state before it, registered or not.

    Parameters
    ----------
    masking
        As in `register`.
    """
    with _lock:
        before = _switches.registered_masking
        register(masking)
    try:
        yield
    finally:
        with _lock:
            if before is None:
                unregister()
            else:
                register(before)


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
    _hold_routes()
    token = _switches.default.set(default)
    try:
        yield
    finally:
        _switches.default.reset(token)
        _release_routes()


def _serve(name: str, *arguments: Any, backend: str | None) -> Any:
    """A call of PyLate's scoring function `name` while it is routed."""
    if _switches.registered_masking is None and _switches.default.get() is None:
        # Routed for a use_scorer() block elsewhere: this caller gets PyLate as it is.
        return _switches.original(name)(*arguments, backend=backend)
    from . import scores

    return getattr(scores, name)(*arguments, backend=backend)


# The code that the scoring functions of PyLate run while routed. It sees PyLate's globals, hence the import inside; the
# parameters are PyLate's, and its defaults stay on the function.


def _route_colbert_scores(
    queries_embeddings, documents_embeddings, queries_mask=None, documents_mask=None, backend=None
):
    from pylate_flash.register import _serve

    return _serve(
        "colbert_scores", queries_embeddings, documents_embeddings, queries_mask, documents_mask, backend=backend
    )


def _route_colbert_scores_pairwise(queries_embeddings, documents_embeddings, backend=None):
    from pylate_flash.register import _serve

    return _serve("colbert_scores_pairwise", queries_embeddings, documents_embeddings, backend=backend)


def _route_colbert_kd_scores(
    queries_embeddings, documents_embeddings, queries_mask=None, documents_mask=None, backend=None
):
    from pylate_flash.register import _serve

    return _serve(
        "colbert_kd_scores", queries_embeddings, documents_embeddings, queries_mask, documents_mask, backend=backend
    )


def _hold_routes() -> None:
    """Route PyLate's scoring functions, if this is their first holder."""
    global _route_holders
    with _lock:
        if _route_holders == 0:
            _check_pylate_version()
            module = importlib.import_module("pylate.scores.colbert")
            routes = {name: globals()[f"_route_{name}"].__code__ for name in SCORING_FUNCTIONS}
            for name, route in routes.items():
                function = getattr(module, name)
                _switches.twins[name] = FunctionType(
                    function.__code__, function.__globals__, name, function.__defaults__, function.__closure__
                )
                function.__code__ = route
        _route_holders += 1


def _release_routes() -> None:
    """Give PyLate's scoring functions their own code back, if this was the last holder."""
    global _route_holders
    with _lock:
        _route_holders -= 1
        if _route_holders == 0:
            module = importlib.import_module("pylate.scores.colbert")
            for name, twin in _switches.twins.items():
                getattr(module, name).__code__ = twin.__code__
            _switches.twins.clear()


def _rebind(old: Any, new: Any) -> None:
    """Bind every name of a loaded PyLate module that is bound to `old` to `new`."""
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name.partition(".")[0] != "pylate":
            continue
        if isinstance(old, type) and module_name == old.__module__:
            # PyLate's losses say `super(Contrastive, self)`: there the name has to remain the class itself, or the
            # constructor of a subclass of it would call itself.
            continue
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)


def _check_pylate_version() -> None:
    import pylate

    if not SpecifierSet(SUPPORTED_PYLATE).contains(pylate.__version__, prereleases=True):
        raise ImportError(
            f"this version of pylate_flash supports PyLate {SUPPORTED_PYLATE}, and PyLate {pylate.__version__} is "
            f'installed; install a supported one: pip install "pylate{SUPPORTED_PYLATE}"'
        )
