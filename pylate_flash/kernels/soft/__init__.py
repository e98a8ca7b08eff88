"""The kernels of soft MaxSim: scores by online log-sum-exp, and gradients that compute the probabilities again."""

from __future__ import annotations

from .backward import soft_backward
from .forward import soft_forward

__all__ = ["soft_backward", "soft_forward"]
