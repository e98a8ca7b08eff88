"""pylate_flash.encoding.texts, with the same checkpoint in whichever library is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pylate_flash.cli.models import load_model
from pylate_flash.encoding.texts import encode, longest_input, set_text_lengths, text_lengths
from tests.pylate_checkpoint import DOCUMENT_LENGTH, QUERY_LENGTH, embeddings_by_hand

TEXTS = ["cats", "old dogs and new trains . bread", " ".join(["red planes ."] * 8)]


@pytest.fixture
def model(pylate_checkpoint: Path) -> Any:
    return load_model(str(pylate_checkpoint), device="cpu")


@pytest.mark.parametrize("is_query", [True, False])
def test_either_library_makes_of_a_text_what_pylate_means_by_it(
    is_query: bool, model: Any, pylate_checkpoint: Path
) -> None:
    actual = encode(model, TEXTS, is_query=is_query, batch_size=2)
    assert len(actual) == len(TEXTS)
    for text, embeddings in zip(TEXTS, actual, strict=True):
        expected = embeddings_by_hand(pylate_checkpoint, text, is_query).numpy()
        np.testing.assert_allclose(np.asarray(embeddings), expected, atol=1e-6)


@pytest.mark.parametrize("model", ["folder/of-a-model", None])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match=f"model must be a ColBERT model or .* got {type(model).__name__}"):
        encode(model, ["a"], is_query=True)


def test_lengths_are_read_and_set(pylate_checkpoint: Path, model: Any) -> None:
    assert text_lengths(model) == (QUERY_LENGTH, DOCUMENT_LENGTH)
    assert longest_input(model) == 32
    other = load_model(str(pylate_checkpoint), device="cpu", query_length=6, document_length=5)
    assert text_lengths(other) == (6, 5)
    (query,), (document,) = (encode(other, [TEXTS[2]], is_query=is_query) for is_query in (True, False))
    assert (len(query), len(document)) == (6, 5)


def test_a_model_without_lengths_says_so() -> None:
    class Bare(list):
        model_type = "MultiVectorEncoder"

    with pytest.raises(
        ValueError, match="document_length: the first module of the model, object, has no document_length"
    ):
        set_text_lengths(Bare([object()]), document_length=5)
