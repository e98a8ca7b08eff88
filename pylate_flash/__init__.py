"""Fused MaxSim scoring, losses and retrieval for PyLate.

Importing this package changes nothing; `register()` routes PyLate through it.
"""

from __future__ import annotations

from .ops import maxsim, maxsim_pairs
from .register import register, registered, unregister

__version__ = "0.1.0"

__all__ = ["__version__", "maxsim", "maxsim_pairs", "register", "registered", "unregister"]
