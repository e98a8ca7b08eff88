"""The kernels of hidden states on Hopper: projected and scored at once, or projected. Not every Triton has Gluon."""

from __future__ import annotations

from .fused import score
from .projection import project

__all__ = ["project", "score"]
