"""sentence-transformers' `MultiVectorEncoder` with the flag `scorer`, saved with the model.

model = MultiVectorEncoder("lightonai/GTE-ModernColBERT-v1", scorer="pylate_flash")
model.save_pretrained("my-model")          # keeps the flag; sentence_transformers.MultiVectorEncoder loads it too
MultiVectorEncoder("my-model").scorer      # "pylate_flash"
"""

from __future__ import annotations

from . import _needs  # noqa: F401

# isort: split
import logging
from collections.abc import Callable
from typing import Any

import sentence_transformers.multi_vector_encoder.model as host
from torch import Tensor

from ...ops.checks import check_choice
from .. import SENTENCE_TRANSFORMERS
from . import scoring

__all__ = ["MultiVectorEncoder"]

logger = logging.getLogger(__name__)

SCORERS = ("auto", "pylate_flash", "torch")
# Further scorers that PyLate's models may be saved with.
_OF_PYLATE = ("flash", "lik")


class MultiVectorEncoder(host.MultiVectorEncoder):
    """The host's model with a flag that selects how `similarity` and `similarity_pairwise` compute.

    The host's losses and evaluators look up scoring functions by name, and follow `register` instead.

    Parameters
    ----------
    *args, **kwargs
        Passed to `sentence_transformers.MultiVectorEncoder`.
    scorer
        `"pylate_flash"`: this package. `"torch"`: the host's own code, registered or not. `"auto"`: this package while
        it is registered. None: the saved value, else `"auto"`.

    Raises
    ------
    ValueError
        If `scorer`, passed or saved, is none of these.
    """

    def __init__(self, *args: Any, scorer: str | None = None, **kwargs: Any) -> None:
        # Set before the weights are loaded, which is slow, and which reads the saved value.
        if scorer is not None:
            check_choice("scorer", scorer, SCORERS)
        self._scorer = scorer
        super().__init__(*args, **kwargs)

    @property
    def scorer(self) -> str:
        """The scorer of the similarities: `"auto"`, `"pylate_flash"` or `"torch"`."""
        return self._scorer or "auto"

    @scorer.setter
    def scorer(self, value: str) -> None:
        check_choice("scorer", value, SCORERS)
        self._scorer = value

    def similarity(self, embeddings1: Any, embeddings2: Any, **kwargs: Any) -> Tensor:
        """Score all pairs, [Nq, Nd], by the model's flags; arguments as in `scoring.maxsim`."""
        return self._scores("maxsim", super().similarity, embeddings1, embeddings2, **kwargs)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any, **kwargs: Any) -> Tensor:
        """Score N pairs, [N], by the model's flags; arguments as in `scoring.maxsim_pairwise`."""
        return self._scores("maxsim_pairwise", super().similarity_pairwise, embeddings1, embeddings2, **kwargs)

    def _scores(self, name: str, of_host: Callable[..., Tensor], *embeddings: Any, **kwargs: Any) -> Tensor:
        """Score by the function `name`, ours or the host's own one, or by the host's method, routed or not."""
        if self.scorer == "auto":
            return of_host(*embeddings, **kwargs)
        function: Callable[..., Tensor] = getattr(scoring, name)
        if self.scorer == "torch":
            function = SENTENCE_TRANSFORMERS.original(f"sentence_transformers.util.similarity:{name}")
        return function(*embeddings, **{"length_normalize": self.similarity_fn_name == "meanmaxsim", **kwargs})

    def _get_model_config(self) -> dict[str, Any]:
        return super()._get_model_config() | {"scorer": self.scorer}

    def _parse_model_config(self, model_config: dict[str, Any]) -> None:
        super()._parse_model_config(model_config)
        saved = model_config.get("scorer")
        if self._scorer is None and saved is not None:
            if saved in _OF_PYLATE:
                logger.warning('the model was saved with the scorer %r, which only PyLate has: using "auto"', saved)
                saved = "auto"
            check_choice("scorer", saved, SCORERS)
            self._scorer = saved
