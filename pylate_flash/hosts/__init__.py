"""The host libraries that pylate_flash supports, and the functions of each that are routed while it is registered.

    pylate/                PyLate: its scoring functions, and the names that this package's own modules replace
    sentence_transformers/ sentence-transformers 6: MaxSim, the scores of its losses, and the cached loss
    colpali.py             colpali-engine: the MaxSim of its losses and processors, and the smooth maximum of its losses
    mteb.py                mteb: search, for models of PyLate and of sentence-transformers

Importing this module imports neither torch nor a host.
"""

from __future__ import annotations

from .._extras import HOSTS as ABOUT
from . import pylate
from .host import Host
from .routes import Routes

_SIMILARITY = "sentence_transformers.util.similarity"
_SCORING = "sentence_transformers.multi_vector_encoder.scoring.colbert"
_XTR = "sentence_transformers.multi_vector_encoder.scoring.xtr"
_COLPALI_LOSS = "colpali_engine.loss.late_interaction_losses:ColbertModule"
_CACHED = "sentence_transformers.multi_vector_encoder.losses.cached_multiple_negatives_ranking"

# The other scoring functions (`mean_maxsim`, `XTRScores`, ...) and the other losses call these.
SENTENCE_TRANSFORMERS = Routes(
    {
        f"{_SIMILARITY}:maxsim": f"{__name__}.sentence_transformers.scoring:maxsim",
        f"{_SIMILARITY}:maxsim_pairwise": f"{__name__}.sentence_transformers.scoring:maxsim_pairwise",
        f"{_SCORING}:colbert_scores": f"{__name__}.sentence_transformers.scoring:colbert_scores",
        f"{_SCORING}:colbert_kd_scores": f"{__name__}.sentence_transformers.scoring:colbert_kd_scores",
        f"{_XTR}:xtr_scores": f"{__name__}.sentence_transformers.xtr_scoring:xtr_scores",
        f"{_CACHED}:CachedMultiVectorMultipleNegativesRankingLoss.calculate_loss": (
            f"{__name__}.sentence_transformers.losses:calculate_loss"
        ),
    },
    helpers={
        f"{_SIMILARITY}:maxsim": "_maxsim_score_documents",
        f"{_SIMILARITY}:maxsim_pairwise": "_maxsim_score_pairs",
    },
)

COLPALI = Routes(
    {
        f"colpali_engine.utils.maxsim:{name}": f"{__name__}.colpali:served_{name}"
        for name in ("maxsim_inbatch", "maxsim_kd")
    }
    | {f"{_COLPALI_LOSS}._inbatch_scores": f"{__name__}.colpali:served_inbatch_scores"}
)

_MTEB_WRAPPERS = (
    "mteb.models.model_implementations.pylate_models:PylateSearchEncoder",
    "mteb.models.sentence_transformer_wrapper:MultiVectorSearchEncoderWrapper",
)

MTEB = Routes(
    {
        f"{wrapper}.{name}": f"{__name__}.mteb:served_{name}"
        for wrapper in _MTEB_WRAPPERS
        for name in ("index", "search")
    }
)

# By distribution name, which `register` takes.
HOSTS = {
    host.name: host
    for host in (
        # Any PyLate version: an older one has scores too, but not these.
        Host(ABOUT["pylate"], "pylate", "0", pylate),
        Host(ABOUT["sentence_transformers"], "sentence_transformers", "6.0", SENTENCE_TRANSFORMERS),
        Host(ABOUT["colpali_engine"], "colpali_engine", "0.3.18", COLPALI),
        Host(ABOUT["mteb"], "mteb", "2.26", MTEB),
    )
}
