"""`indexes.Flat` with a MultiVectorEncoder: its results, and which models may search it."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

from pylate_flash import indexes
from pylate_flash.encoding.projection import encode_hidden_states


@pytest.fixture
def index(tiny_encoder, texts, tmp_path):
    index = indexes.Flat(tmp_path, "example", device="cpu", show_progress=False)
    index.add_documents([f"d{i}" for i in range(40)], tiny_encoder.encode_document(texts(1, 40)))
    return index


@pytest.mark.parametrize("convert_to_numpy", [False, True])
def test_it_finds_what_the_models_similarity_ranks_first(convert_to_numpy, index, tiny_encoder, texts):
    queries = tiny_encoder.encode_query(texts(2, 6), convert_to_numpy=convert_to_numpy)
    scores = tiny_encoder.similarity(queries, tiny_encoder.encode_document(texts(1, 40)))
    expected = scores.sort(dim=1, descending=True, stable=True)
    for actual, best, order in zip(index(queries, k=7), expected.values, expected.indices, strict=True):
        assert [result["score"] for result in actual] == pytest.approx(best[:7].tolist(), rel=1e-5)
        # Texts may occur twice, and ties may come in any order.
        assert {result["id"] for result in actual if result["score"] > best[6] + 1e-4} <= {f"d{i}" for i in order[:7]}


def test_another_model_is_refused(index, tiny_encoder, tiny_encoder_path, tmp_path):
    index.record_model(tiny_encoder, tiny_encoder_path)
    again = indexes.Flat(tmp_path, "example", device="cpu")
    assert again.model is not None
    assert again.model.locate(again.index_path) == tiny_encoder_path
    again.check_model(MultiVectorEncoder(tiny_encoder_path, device="cpu"))

    other = MultiVectorEncoder(tiny_encoder_path, device="cpu")
    with torch.no_grad():
        other[1].linear.weight.mul_(2)
    with pytest.raises(ValueError, match="a different model: it differs in weights"):
        again.check_model(other)
    for name, change in (
        ("tokens", lambda model: setattr(model, "3", MultiVectorMask(skiplist_words=["the"]))),
        ("prompts", lambda model: model.prompts.update(query="search: ")),
    ):
        other = MultiVectorEncoder(tiny_encoder_path, device="cpu")
        change(other)
        with pytest.raises(ValueError, match=f"a different model: it differs in .*{name}"):
            again.check_model(other)


def test_kept_hidden_states_find_what_embeddings_find(index, tiny_encoder, texts, tmp_path):
    """Of scored tokens only, in input order; with another projection, the results are those of its embeddings."""
    documents, queries = texts(1, 40), tiny_encoder.encode_query(texts(2, 6))
    states = encode_hidden_states(tiny_encoder, documents, batch_size=7)
    for state, embedding in zip(states, tiny_encoder.encode_document(documents), strict=True):
        projected = torch.nn.functional.normalize(torch.from_numpy(state) @ tiny_encoder[1].linear.weight.T, dim=-1)
        torch.testing.assert_close(projected, embedding)
    states_index = indexes.Flat(tmp_path, "states", device="cpu", show_progress=False, projection=tiny_encoder)
    states_index.add_documents([f"d{i}" for i in range(40)], states)
    for actual, expected in zip(states_index(queries, k=5), index(queries, k=5), strict=True):
        assert [result["score"] for result in actual] == pytest.approx(
            [result["score"] for result in expected], rel=1e-5
        )

    del tiny_encoder[2]
    with pytest.raises(ValueError, match="projection: the model does not normalise its embeddings, but the index does"):
        indexes.Flat(tmp_path, "others", device="cpu", projection=tiny_encoder)
    assert [tuple(state.shape) for state in encode_hidden_states(tiny_encoder, documents[:3])] == [
        tuple(state.shape) for state in states[:3]
    ]
