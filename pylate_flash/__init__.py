"""Fused MaxSim scoring, losses and retrieval for PyLate, sentence-transformers and colpali-engine.

Importing this package changes nothing; `register()` routes the installed ones through it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .register import register, registered, unregister

if TYPE_CHECKING:
    from .ops import (
        QuantizedEmbeddings,
        ResidualCodec,
        ResidualCodes,
        chamfer,
        chamfer_varlen,
        explain,
        maxsim,
        maxsim_cross_entropy,
        maxsim_from_hidden,
        maxsim_kl_divergence,
        maxsim_margin_mse,
        maxsim_pairwise,
        maxsim_ragged,
        maxsim_ragged_pairwise,
        maxsim_residual,
        maxsim_sparse_queries,
        maxsim_varlen,
        maxsim_varlen_pairwise,
        pack,
        quantize,
        read_fast_plaid,
        soft_maxsim,
        soft_maxsim_varlen,
        train_residual_codec,
        unpack,
        xtr_scores,
    )

__version__ = "0.1.0"

__all__ = [
    "QuantizedEmbeddings",
    "ResidualCodec",
    "ResidualCodes",
    "__version__",
    "chamfer",
    "chamfer_varlen",
    "explain",
    "maxsim",
    "maxsim_cross_entropy",
    "maxsim_from_hidden",
    "maxsim_kl_divergence",
    "maxsim_margin_mse",
    "maxsim_pairwise",
    "maxsim_ragged",
    "maxsim_ragged_pairwise",
    "maxsim_sparse_queries",
    "maxsim_residual",
    "maxsim_varlen",
    "maxsim_varlen_pairwise",
    "pack",
    "quantize",
    "read_fast_plaid",
    "register",
    "registered",
    "soft_maxsim",
    "soft_maxsim_varlen",
    "train_residual_codec",
    "unpack",
    "unregister",
    "xtr_scores",
]


def __getattr__(name: str) -> Any:
    # Import the operations lazily: they import torch, which takes seconds, and `pylate-flash --help` does not need it.
    if name in __all__:
        from . import ops

        # Cache: later lookups bypass this function.
        globals()[name] = getattr(ops, name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
