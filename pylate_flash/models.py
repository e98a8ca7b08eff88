"""PyLate's models with the flags `scorer`, `masking` and `fuse_projection`, saved with the model.

    model = models.ColBERT("colbert-ir/colbertv2.0", scorer="pylate_flash")
    model.save_pretrained("my-model")     # keeps the flags; pylate.models.ColBERT loads the folder as well
    models.ColBERT("my-model").scorer     # "pylate_flash"

Plain PyLate and sentence-transformers checkpoints load here too.
"""

from __future__ import annotations

from .hosts.pylate import _needs  # noqa: F401

# isort: split
import functools
from collections.abc import Callable
from typing import Any

import pylate.models
import torch
from pylate.models import Dense
from torch import Tensor

from ._config import check_backend, check_masking, masking_in_force
from .encoding.projection import dense_layers
from .encoding.texts import longest_input
from .scores import colbert_scores, colbert_scores_pairwise

__all__ = ["ColBERT", "Dense"]


class ColBERT(pylate.models.ColBERT):
    """PyLate's ColBERT with flags that select how it is scored.

    `similarity`, `similarity_pairwise`, the losses, the evaluators and `rank.rerank` given this model follow its flags.
    They are attributes that can be set at any time.

    Parameters
    ----------
    *args, **kwargs
        Passed to `pylate.models.ColBERT`.
    scorer
        `"pylate_flash"`, `"torch"`, `"flash"`, `"lik"`, or `"auto"`, which defers to `use_scorer`, then to the
        environment variable `PYLATE_SCORES_BACKEND`, then to this package. None: the saved value, else `"auto"`.
    masking
        `"exclude"` or `"zero"`, see `scores.colbert_scores`. None: the saved value, else the one in force (see
        `register`), which is `"exclude"` by default.
    fuse_projection
        Whether the losses, and `rank.rerank` of texts, score from the encoder's hidden states, so that the projected
        documents are not stored: this helps in reranking, but not in training. None: the saved value, else False.

    Raises
    ------
    ValueError
        If a flag, passed or saved, has another value, or `fuse_projection` is set and a module of the model cannot be
        fused; the message names the module.
    """

    def __init__(
        self,
        *args: Any,
        scorer: str | None = None,
        masking: str | None = None,
        fuse_projection: bool | None = None,
        **kwargs: Any,
    ) -> None:
        # Check before the weights are loaded: a typo should not cost minutes.
        if scorer is not None:
            check_backend(scorer, name="scorer")
        if masking is not None:
            check_masking(masking)
        if fuse_projection is not None:
            _check_fuse_projection(fuse_projection)
        # Layers that PyLate appends when the checkpoint has no projection, with their initial weights: see `append`.
        self._drawn: list[tuple[Dense, Tensor]] = []
        self._constructing = True
        super().__init__(*args, **kwargs)
        self._constructing = False
        if scorer is None:
            # A saved null is as none.
            scorer = self._model_config.get("scorer")
        self.scorer = "auto" if scorer is None else scorer
        masking = masking if masking is not None else self._model_config.get("masking")
        if masking is not None:
            self.masking = masking
        # The saved value as it is, for the setter to check.
        saved: Any = self._model_config.get("fuse_projection")
        if fuse_projection or saved is not None:
            self.fuse_projection = saved if fuse_projection is None else fuse_projection

    # The flags live in `_model_config`, which sentence-transformers reads from config_sentence_transformers.json and
    # writes back with every key it read: they also survive loading and saving with plain PyLate.

    @property
    def scorer(self) -> str:
        """The scoring backend: `"auto"`, `"pylate_flash"`, `"torch"`, `"flash"` or `"lik"`."""
        return self._model_config["scorer"]

    @scorer.setter
    def scorer(self, value: str) -> None:
        self._model_config["scorer"] = check_backend(value, name="scorer")

    @property
    def masking(self) -> str:
        """How masked document tokens count, `"exclude"` or `"zero"`; the one in force if the flag was never set."""
        return masking_in_force(self._model_config.get("masking"))

    @masking.setter
    def masking(self, value: str) -> None:
        self._model_config["masking"] = check_masking(value)

    @property
    def fuse_projection(self) -> bool:
        """Whether losses and reranking score from hidden states; False if the flag was never set."""
        return bool(self._model_config.get("fuse_projection", False))

    @fuse_projection.setter
    def fuse_projection(self, value: bool) -> None:
        _check_fuse_projection(value)
        if value:
            dense_layers(self)
        self._model_config["fuse_projection"] = value  # type: ignore[assignment]

    @property
    def similarity(self) -> Callable[..., Tensor]:
        """`scores.colbert_scores` with the model's flags: [Nq, Lq, d] and [Nd, Ld, d] to [Nq, Nd]."""
        return functools.partial(colbert_scores, backend=self._backend(), masking=self.masking)

    @property
    def similarity_pairwise(self) -> Callable[..., Tensor]:
        """`scores.colbert_scores_pairwise` with the model's flags: N queries and N documents to [N]."""
        return functools.partial(colbert_scores_pairwise, backend=self._backend(), masking=self.masking)

    @property
    def projection_is_random(self) -> bool:
        """Whether a layer of the projection has random weights: drawn at loading, neither trained nor replaced since.

        PyLate adds such a layer to an encoder without a projection, with different weights on every load: the results
        of such a model are meaningless, and no other model can search what it indexed. A model that was saved and
        loaded again has the weights of its file, whatever they are.
        """
        layers = {id(module) for module in self}
        return any(
            id(layer) in layers and torch.equal(initial_weight.to(layer.linear.weight), layer.linear.weight)
            for layer, initial_weight in self._drawn
        )

    @property
    def longest_input(self) -> int | None:
        """Maximum number of tokens the encoder has positions for, special tokens included; None if unlimited."""
        return longest_input(self)

    def append(self, module: Any) -> ColBERT:
        """Append a module, as `torch.nn.Sequential.append` does."""
        if self._constructing and not (len(self) == 1 and _has_stanford_projection(self[0])):
            self._drawn.append((module, module.linear.weight.detach().clone()))
        return super().append(module)

    def _backend(self) -> str | None:
        return None if self.scorer == "auto" else self.scorer

    @classmethod
    def load(cls, input_path: str) -> ColBERT:
        """Load the model saved in the folder `input_path`."""
        return cls(model_name_or_path=input_path)


def _check_fuse_projection(value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"fuse_projection must be True or False, got {value!r}")


def _has_stanford_projection(encoder: Any) -> bool:
    """Whether the encoder's checkpoint is a Stanford ColBERT checkpoint, which stores the projection with it."""
    return (encoder.auto_model.config.architectures or [None])[0] == "HF_ColBERT"
