"""The parts of PyLate that are routed to this package.

- The three scoring functions, and the scoring method of `XTRScores`, run other code and remain the same objects
  (`routes`). PyLate's own code serves the backends "torch", "flash" and "lik".
- `rerank`, `ColBERTScores`, the losses and the evaluators are looked up by name when they are used, so their names are
  rebound in every loaded PyLate module that holds them.

Importing this module imports neither torch nor PyLate.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from ..routes import Routes

# Functions of pylate.scores that keep their identity and gain the backend.
SCORING_FUNCTIONS = ("colbert_scores", "colbert_scores_pairwise", "colbert_kd_scores")
# Names of pylate.<module> that refer to the same names of pylate_flash.<module> while registered ...
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
# ... except these, which refer to other names.
RENAMED = {"CachedContrastive": "RegisteredCachedContrastive"}

# The functions of this package that serve PyLate's, and the paths of those.
_PATHS = {name: f"pylate.scores.colbert:{name}" for name in SCORING_FUNCTIONS}
_PATHS["XTRScores._score"] = "pylate.scores.xtr:XTRScores._score"

# Held by register() and by every open use_scorer() block.
ROUTES = Routes(
    {path: f"pylate_flash.scores:{name}" for name, path in _PATHS.items()}, asked="pylate_flash._config:asks_for_ours"
)
_rebound: list[tuple[Any, Any]] = []  # (PyLate's object, ours) for each name of REBOUND, while registered


def hold() -> None:
    """Route PyLate's functions, and rebind its names."""
    pairs = []
    for module, names in REBOUND.items():
        pylate_module = importlib.import_module(f"pylate.{module}")
        our_module = importlib.import_module(f"pylate_flash.{module}")
        pairs += [(getattr(pylate_module, name), getattr(our_module, RENAMED.get(name, name))) for name in names]
    ROUTES.hold()
    for theirs, ours in pairs:
        _rebind(theirs, ours)
    _rebound[:] = pairs


def release() -> None:
    """Undo `hold`."""
    for theirs, ours in _rebound:
        _rebind(ours, theirs)
    _rebound.clear()
    ROUTES.release()


def original(name: str) -> Callable:
    """Return PyLate's own scoring function or method `name`: never routed, so it knows only PyLate's own backends."""
    return ROUTES.original(_PATHS[name])


def _rebind(old: Any, new: Any) -> None:
    """Bind every name of a loaded PyLate module that is bound to `old` to `new`."""
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name.partition(".")[0] != "pylate":
            continue
        if isinstance(old, type) and module_name == old.__module__:
            # PyLate's losses call `super(Contrastive, self)`: in that module the name must remain the class itself,
            # or the constructor of a subclass would call itself.
            continue
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)
