"""The gradients of soft MaxSim, which compute the probabilities again; the forward has its scores."""

from __future__ import annotations

from .backward import soft_backward

__all__ = ["soft_backward"]
