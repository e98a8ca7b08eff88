"""The options of a loss of any host, resolved once per batch, and checks of arguments that several losses share."""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..ops.checks import is_positive


class LossOptions(NamedTuple):
    """How the queries of a batch are compared with its documents: options of the operations of `ops.losses`.

    `gather` is one of `distributed.GATHERINGS` if documents are compared across ranks, and None for a single rank or
    rank-local documents; `times_ranks` multiplies a gathered loss by the number of ranks, as PyLate does. The ring
    supports neither `margin` nor `symmetric`. `smooth` scores with `soft_maxsim`, which supports neither of these two
    nor the ring. `fuse_projection` scores from hidden states.
    """

    temperature: float | Tensor = 1.0
    size_average: bool = True
    masking: str = "exclude"
    normalize: bool = True
    reduction: str = "sum"
    empty_score: float = 0.0
    fuse_projection: bool = False
    smooth: float | Tensor | None = None
    # Contrastive losses only.
    margin: float | None = None
    symmetric: bool = False
    gather: str | None = None
    times_ranks: bool = False
    # Distillation losses only.
    teacher_temperature: float | Tensor = 1.0
    normalize_scores: bool = False

    @property
    def loss_reduction(self) -> str:
        return "mean" if self.size_average else "sum"

    def scoring(self) -> dict[str, Any]:
        """Return the keyword arguments of the scoring operations."""
        return {name: getattr(self, name) for name in ("masking", "normalize", "reduction", "empty_score")}


def check_temperature(temperature: Any, name: str = "temperature") -> Any:
    """Return a number above 0 as a float, or a one-element tensor, such as a learned temperature; raise for others.

    The hosts' code computes with it and tensors, which a fraction cannot.
    """
    if isinstance(temperature, Tensor):
        if temperature.numel() != 1:
            raise ValueError(f"{name}: a tensor of shape {tuple(temperature.shape)}; expected a number or one element")
        return temperature
    if isinstance(temperature, bool) or not isinstance(temperature, numbers.Real):
        raise TypeError(f"{name}: {type(temperature).__name__}; expected a number or a tensor of one element")
    if not is_positive(float(temperature)):
        raise ValueError(f"{name}: {temperature}; expected a finite number above 0, in float32 too")
    return float(temperature)


def check_margin(margin: Any) -> None:
    """Raise unless `margin` is a finite number or None."""
    if margin is None:
        return
    if isinstance(margin, bool) or not isinstance(margin, numbers.Real):
        raise TypeError(f"margin: {type(margin).__name__}; expected a number or None")
    if not math.isfinite(margin):
        raise ValueError(f"margin: {margin}; expected a finite number")


def check_sizes(**sizes: Any) -> None:
    """Raise unless each named number of texts, tokens or queries is an integer of at least 1, or None."""
    for name, size in sizes.items():
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, numbers.Integral):
            raise TypeError(f"{name}: {type(size).__name__}; expected an integer")
        if size < 1:
            raise ValueError(f"{name}: {size}; expected at least 1")


def check_flags(**flags: Any) -> None:
    """Raise unless each named flag is a bool, lest "False" counts as True."""
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(f"{name}: {flag!r:.100}; expected True or False")
