"""The operations, each with a plain-torch reference definition beside its fast implementation."""

# ruff: noqa: F401 (re-exports)

from __future__ import annotations

from .chamfer import chamfer, chamfer_reference, chamfer_varlen
from .explanation import Explanation, explain
from .hidden import maxsim_from_hidden, maxsim_from_hidden_reference
from .loss_scores import cross_entropy_reference, kl_divergence_reference, margin_mse_reference
from .losses import LossStatistics, maxsim_cross_entropy, maxsim_kl_divergence, maxsim_margin_mse
from .maxsim import maxsim, maxsim_pairwise, maxsim_reference
from .packing import pack, unpack
from .quantization import QuantizedEmbeddings, quantize
from .ragged import maxsim_ragged, maxsim_ragged_pairwise
from .residual import maxsim_residual, maxsim_residual_reference
from .residual_codec import ResidualCodec, read_fast_plaid, train_residual_codec
from .residual_codes import ResidualCodes
from .soft import soft_maxsim, soft_maxsim_reference, soft_maxsim_varlen
from .sparse_queries import maxsim_sparse_queries, maxsim_sparse_queries_reference
from .varlen import maxsim_varlen, maxsim_varlen_pairwise
from .xtr import xtr_scores, xtr_scores_reference
