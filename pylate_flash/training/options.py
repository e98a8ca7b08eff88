"""What a loss of any host is asked for, resolved once for a batch; and the checks of what several losses take."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

from torch import Tensor

from ..ops.checks import is_positive


class LossOptions(NamedTuple):
    """How the queries of a batch are compared with its documents: options of the operations of `ops.losses`.

    `gather` is one of `distributed.GATHERINGS` where the documents of all ranks are compared, and None where there is
    one rank, or each has its own; `times_ranks` multiplies such a loss by their number, as PyLate has it. The ring
    takes neither `margin` nor `symmetric`. With `smooth` scores are of `soft_maxsim`, which takes neither these two nor
    the ring. With `fuse_projection` they are of hidden states.
    """

    temperature: float | Tensor = 1.0
    size_average: bool = True
    masking: str = "exclude"
    normalize: bool = True
    reduction: str = "sum"
    empty_score: float = 0.0
    fuse_projection: bool = False
    smooth: float | Tensor | None = None
    # Of a contrastive loss.
    margin: float | None = None
    symmetric: bool = False
    gather: str | None = None
    times_ranks: bool = False
    # Of a distillation.
    teacher_temperature: float = 1.0
    normalize_scores: bool = False

    @property
    def loss_reduction(self) -> str:
        return "mean" if self.size_average else "sum"

    def scoring(self) -> dict[str, Any]:
        """What operations that score take."""
        return {name: getattr(self, name) for name in ("masking", "normalize", "reduction", "empty_score")}


def check_temperature(temperature: Any, name: str = "temperature") -> None:
    """A number above 0, or a tensor of one element, as a learned temperature is."""
    if isinstance(temperature, Tensor):
        if temperature.numel() != 1:
            raise ValueError(f"{name}: a tensor of shape {tuple(temperature.shape)}; expected a number or one element")
    elif isinstance(temperature, bool) or not isinstance(temperature, numbers.Real):
        raise TypeError(f"{name}: {type(temperature).__name__}; expected a number or a tensor of one element")
    elif not is_positive(float(temperature)):
        raise ValueError(f"{name}: {temperature}; expected a finite number above 0, in float32 too")


def check_sizes(**sizes: Any) -> None:
    """Numbers of texts, tokens or queries, by their names: integers from 1 on, or None."""
    for name, size in sizes.items():
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, numbers.Integral):
            raise TypeError(f"{name}: {type(size).__name__}; expected an integer")
        if size < 1:
            raise ValueError(f"{name}: {size}; expected at least 1")
