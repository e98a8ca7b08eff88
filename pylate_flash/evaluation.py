"""Evaluation: BEIR folders, retrieval metrics with `indexes.Flat`, PyLate's evaluators scored by the model's flags.

    documents, queries, qrels = load_beir_folder("data/cranfield")
    result = evaluate_retrieval(model, documents, queries, qrels)
    result.metrics                 # {"ndcg@10": ..., "map": ..., "recall@100": ..., "mrr@10": ...}

These functions come from `pylate_flash.beir`, which does not need PyLate. The names of `pylate.evaluation` are exported
too, so that `from pylate import evaluation` becomes `from pylate_flash import evaluation`.
"""

from __future__ import annotations

from .hosts.pylate import _needs  # noqa: F401

# isort: split
from collections.abc import Callable
from typing import Any

from pylate.evaluation import evaluate, get_beir_triples, load_beir, load_custom_dataset
from pylate.evaluation.colbert_distillation import ColBERTDistillationEvaluator as _PyLateDistillation
from pylate.evaluation.colbert_triplet import ColBERTTripletEvaluator as _PyLateTriplet
from pylate.evaluation.nano_beir_evaluator import NanoBEIREvaluator as _PyLateNanoBEIR
from pylate.evaluation.pylate_information_retrieval_evaluator import (
    PyLateInformationRetrievalEvaluator as _PyLateInformationRetrieval,
)
from sentence_transformers.evaluation import SentenceEvaluator

from .beir import RetrievalEvaluation, evaluate_retrieval, evaluate_run, load_beir_folder, recall_of
from .register import use_scorer
from .scores import scorer_of

__all__ = [
    "ColBERTDistillationEvaluator",
    "ColBERTTripletEvaluator",
    "NanoBEIREvaluator",
    "PyLateInformationRetrievalEvaluator",
    "RetrievalEvaluation",
    "evaluate",
    "evaluate_retrieval",
    "evaluate_run",
    "get_beir_triples",
    "load_beir",
    "load_beir_folder",
    "load_custom_dataset",
    "recall_of",
]


class _ScoredAsTheModelSays(SentenceEvaluator):
    """Mixin that makes a PyLate evaluator score by the flags of the evaluated model, whatever is registered."""

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate `model`; the other arguments and the result are those of PyLate's evaluator."""
        with use_scorer(*scorer_of(model)):
            return super().__call__(model, *args, **kwargs)


class _AsksTheModel(_ScoredAsTheModelSays):
    """The same for evaluators that cache the similarity function of their first model: read it from each model."""

    score_functions: dict[str, Callable] | None
    _asks: bool | None = None

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate `model`; the other arguments and the result are those of PyLate's evaluator."""
        if self._asks is None:
            self._asks = self.score_functions is None
        if self._asks and self.score_functions is not None:
            for evaluator in (self, *getattr(self, "evaluators", ())):
                evaluator.score_functions = {model.similarity_fn_name: model.similarity}
        return super().__call__(model, *args, **kwargs)


class ColBERTTripletEvaluator(_ScoredAsTheModelSays, _PyLateTriplet):
    """PyLate's `ColBERTTripletEvaluator`, scored by the flags of the model that it evaluates."""


class ColBERTDistillationEvaluator(_ScoredAsTheModelSays, _PyLateDistillation):
    """PyLate's `ColBERTDistillationEvaluator`, scored by the flags of the model that it evaluates."""


class PyLateInformationRetrievalEvaluator(_AsksTheModel, _PyLateInformationRetrieval):
    """PyLate's `PyLateInformationRetrievalEvaluator`, scored by the flags of the model that it evaluates."""


class NanoBEIREvaluator(_AsksTheModel, _PyLateNanoBEIR):
    """PyLate's `NanoBEIREvaluator`, scored by the flags of the model that it evaluates."""
