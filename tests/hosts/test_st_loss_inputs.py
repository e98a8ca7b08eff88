"""hosts.sentence_transformers.losses: arguments and batches of another kind are named."""

from __future__ import annotations

from fractions import Fraction

import pytest
from sentence_transformers.multi_vector_encoder import scoring
from torch import Tensor

from pylate_flash.hosts.sentence_transformers import losses
from tests.hosts.test_st_loss_classes import FOUR, labels_of
from tests.hosts.test_st_losses import columns


@pytest.mark.parametrize(("name", "count", "n_labels"), FOUR)
def test_inputs_of_another_kind_are_named(name, count, n_labels, tiny_encoder, texts):
    kind, features = getattr(losses, name), columns(tiny_encoder, texts, count)
    with pytest.raises(TypeError, match="model: str; expected a MultiVectorEncoder"):
        kind("bert-base-uncased")
    with pytest.raises(TypeError, match="similarity_fct: str; expected a function"):
        kind(tiny_encoder, similarity_fct="maxsim")
    loss = kind(tiny_encoder)
    for batch, message in (
        (None, "NoneType; expected a list of tokenized columns"),
        (features[0], "(dict|BatchEncoding|BatchFeature); expected a list of tokenized columns"),
        ([*features, "text"], f"column {count + 1} is 'text'; expected a dictionary of tensors"),
        ([*features, {}], f"column {count + 1} is {{}}; expected a dictionary of tensors"),
    ):
        with pytest.raises(TypeError, match=f"sentence_features: {message}"):
            loss(batch, labels_of(n_labels))
    empty = [{key: value[:0] if isinstance(value, Tensor) else value for key, value in f.items()} for f in features]
    with pytest.raises(ValueError, match="sentence_features: columns without texts"):
        loss(empty, labels_of(n_labels))


def test_temperatures_are_numbers_or_fractions(tiny_encoder, texts):
    features, labels = columns(tiny_encoder, texts, 3), labels_of(3)
    with pytest.raises(TypeError, match="temperature: NoneType; expected a number"):
        losses.MultiVectorDistillKLDivLoss(tiny_encoder, temperature=None)
    for name in ("temperature", "student_temperature", "teacher_temperature"):
        with pytest.raises(TypeError, match=f"{name}: str; expected a number"):
            losses.MultiVectorDistillKLDivLoss(tiny_encoder, **{name: "1"})
        values = [
            losses.MultiVectorDistillKLDivLoss(tiny_encoder, **{name: number})(features, labels)
            for number in (Fraction(1, 2), 0.5)
        ]
        assert values[0] == values[1]
    arguments = {"similarity_fct": scoring.XTRScores(top_k=4), "scale": Fraction(1, 2)}
    assert losses.MultiVectorMultipleNegativesRankingLoss(tiny_encoder, **arguments)(features).isfinite()
