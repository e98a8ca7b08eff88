"""The scores of `scoring` divided by the number of query tokens (MeanMaxSim), by sentence-transformers' names.

Each is the function of the same name without `mean_`, with the same arguments, of which only the default of
`length_normalize` is another: True.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

from . import scoring

__all__ = [
    "mean_colbert_kd_scores",
    "mean_colbert_scores",
    "mean_colbert_scores_pairwise",
    "mean_maxsim",
    "mean_maxsim_pairwise",
]

_Scores = TypeVar("_Scores", bound=Callable[..., Any])


def _mean(scores: _Scores) -> _Scores:
    """The same code with another default, so that neither a signature nor a call is written twice."""
    function = cast(FunctionType, scores)
    name = f"mean_{function.__name__}"
    # No other default is a bool.
    defaults = tuple(True if value is False else value for value in function.__defaults__ or ())
    found = FunctionType(function.__code__, function.__globals__, name, defaults)
    found.__annotations__, found.__module__, found.__qualname__ = function.__annotations__, __name__, name
    found.__doc__ = f"`{function.__name__}` that divides by the number of query tokens, unless told otherwise."
    return cast(_Scores, found)


mean_maxsim = _mean(scoring.maxsim)
mean_maxsim_pairwise = _mean(scoring.maxsim_pairwise)
mean_colbert_scores = _mean(scoring.colbert_scores)
mean_colbert_scores_pairwise = _mean(scoring.colbert_scores_pairwise)
mean_colbert_kd_scores = _mean(scoring.colbert_kd_scores)
