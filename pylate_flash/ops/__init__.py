"""The operations: what is computed, with its plain-torch definition beside every fast version."""

from __future__ import annotations

from .hidden import maxsim_from_hidden, maxsim_from_hidden_reference
from .maxsim import maxsim, maxsim_pairs, maxsim_reference
from .varlen import maxsim_varlen, maxsim_varlen_pairs, pack, unpack

__all__ = [
    "maxsim",
    "maxsim_from_hidden",
    "maxsim_from_hidden_reference",
    "maxsim_pairs",
    "maxsim_reference",
    "maxsim_varlen",
    "maxsim_varlen_pairs",
    "pack",
    "unpack",
]
