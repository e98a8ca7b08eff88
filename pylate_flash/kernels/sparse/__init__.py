"""Scores of chosen query tokens: every document meets those rows of a query that were chosen for it."""

from __future__ import annotations

from .forward import sparse_forward
from .plan import sparse_plan

__all__ = ["sparse_forward", "sparse_plan"]
