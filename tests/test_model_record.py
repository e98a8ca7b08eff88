"""The model an index was built with is recorded and located again, and other models are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pylate_flash import models
from pylate_flash.encoding.model_record import ModelRecord, fingerprint
from pylate_flash.indexes import Flat
from tests.stores import change_state, small


@pytest.fixture
def model(tiny_colbert_path: str) -> models.ColBERT:
    return models.ColBERT(tiny_colbert_path, device="cpu")


def filled(path: Path, **options) -> Flat:
    return small(path, **options).add_documents(["a"], [np.ones((2, 4), dtype=np.float32)])


def test_the_model_of_an_index_is_remembered_with_all_that_changes_embeddings(
    tmp_path: Path, model: models.ColBERT, tiny_colbert_path: str
) -> None:
    assert filled(tmp_path).record_model(model, tiny_colbert_path).model is not None
    record = small(tmp_path).model
    assert record is not None
    assert record.name == tiny_colbert_path
    assert record.fingerprint == fingerprint(model)
    assert (record.query_length, record.document_length) == (model.query_length, model.document_length)
    assert (record.query_prefix, record.document_prefix) == (model.query_prefix, model.document_prefix)
    assert record.settings["skiplist_words"] == model.skiplist_words
    assert record.settings["do_query_expansion"] is model.do_query_expansion
    small(tmp_path).check_model(models.ColBERT(tiny_colbert_path, device="cpu"))
    small(tmp_path).check_model(torch.nn.parallel.DataParallel(model))
    # Changing documents leaves the record unchanged.
    index = small(tmp_path).add_documents(["b"], [np.ones((1, 4), dtype=np.float32)])
    assert index.remove_documents("a").compact().model == small(tmp_path).model == record


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda model: next(model.parameters()).data.view(-1)[:1].add_(1e-3), "weights .sha256 .* recorded, .* here"),
        (lambda model: setattr(model, "query_length", 7), "query_length .* recorded, 7 here"),
        (lambda model: setattr(model, "document_length", 9), "document_length .* recorded, 9 here"),
        (lambda model: setattr(model, "query_prefix", "query: "), "query_prefix .* recorded, 'query: ' here"),
        (lambda model: setattr(model, "document_prefix", ""), "document_prefix .* recorded, '' here"),
        (lambda model: setattr(model, "skiplist_words", ["the"]), r"skiplist_words .* recorded, \['the'\] here"),
        (lambda model: setattr(model, "do_query_expansion", False), "do_query_expansion .True recorded, False here"),
        (lambda model: model.half(), "weights"),
    ],
)
def test_another_model_is_refused_by_what_differs(
    tmp_path: Path, model: models.ColBERT, tiny_colbert_path: str, change, difference: str
) -> None:
    index = filled(tmp_path).record_model(model, tiny_colbert_path)
    change(model)
    with pytest.raises(ValueError, match=f"was built with the model {tiny_colbert_path} .* differs in {difference}"):
        index.check_model(model)
    with pytest.raises(
        ValueError,
        match=f"holds embeddings of the model {tiny_colbert_path} .*, but other .* is a different model: it differs",
    ):
        index.record_model(model, "other")
    assert index.model is not None
    assert index.model.name == tiny_colbert_path
    # An empty index takes another model.
    assert index.remove_documents("a").record_model(model, "other").model.name == "other"


def test_to_record_the_same_model_again_changes_nothing_but_its_name(
    tmp_path: Path, model: models.ColBERT, tiny_colbert_path: str
) -> None:
    index = filled(tmp_path).record_model(model)
    assert index.model.name is None
    with pytest.raises(ValueError, match="does not record where its model is: name the model"):
        index.model.locate(index.index_path)
    index.record_model(model, tiny_colbert_path)
    generation = index.info().generation
    index.record_model(model, tiny_colbert_path).record_model(model)
    assert index.info().generation == generation
    assert index.model.name == tiny_colbert_path


def test_an_index_that_remembers_no_model_takes_any(tmp_path: Path, model: models.ColBERT) -> None:
    filled(tmp_path).check_model(model)
    assert small(tmp_path).model is None
    with pytest.raises(ValueError, match="model must be a torch.nn.Module, .* got str"):
        filled(tmp_path / "other").record_model("name")


def test_a_model_folder_is_found_again_after_both_were_moved(tmp_path: Path, model: models.ColBERT) -> None:
    (tmp_path / "old" / "model").mkdir(parents=True)
    index = filled(tmp_path / "old").record_model(model, tmp_path / "old" / "model")
    assert index.model.locate(index.index_path) == str(tmp_path / "old" / "model")
    (tmp_path / "old").rename(tmp_path / "new")
    index = small(tmp_path / "new")
    assert index.model.locate(index.index_path) == str(tmp_path / "new" / "model")
    # Only the index was moved.
    (tmp_path / "old").mkdir()
    (tmp_path / "new" / "model").rename(tmp_path / "old" / "model")
    assert index.model.locate(index.index_path) == str(tmp_path / "old" / "model")
    (tmp_path / "old" / "model").rmdir()
    with pytest.raises(ValueError, match="no longer exists, neither in .*new/model nor in .*old/model"):
        index.model.locate(index.index_path)


def test_a_name_that_is_no_folder_is_kept_as_it_is(tmp_path: Path, model: models.ColBERT) -> None:
    index = filled(tmp_path).record_model(model, "lightonai/GTE-ModernColBERT-v1")
    assert (index.model.name, index.model.relative) == ("lightonai/GTE-ModernColBERT-v1", None)
    assert index.model.locate(tmp_path / "anywhere") == "lightonai/GTE-ModernColBERT-v1"


def test_an_index_of_hidden_states_may_be_searched_with_another_projection(
    tmp_path: Path, model: models.ColBERT
) -> None:
    index = small(tmp_path, projection=model).record_model(model)
    list(model.children())[1].linear.weight.data.mul_(2)
    index.check_model(model)
    next(model.parameters()).data.view(-1)[:1].add_(1e-3)
    with pytest.raises(ValueError, match="differs in weights"):
        index.check_model(model)


def test_a_fingerprint_is_of_names_types_shapes_and_values() -> None:
    def module(**weights: torch.Tensor) -> torch.nn.Module:
        created = torch.nn.Module()
        for name, value in weights.items():
            created.register_buffer(name, value)
        return created

    ones = torch.ones(2, 3)
    same = [module(a=ones), module(a=ones.clone()), module(a=torch.ones(3, 2).T)]
    different = [
        module(b=ones),
        module(a=ones.half()),
        module(a=ones.int()),
        module(a=torch.ones(3, 2)),
        module(a=-ones),
        module(a=ones, b=torch.ones(0)),
        module(a=torch.ones(6)),
    ]
    assert len({fingerprint(one) for one in same}) == 1
    assert len({fingerprint(one) for one in [same[0], *different]}) == 1 + len(different)
    with pytest.raises(ValueError, match="its weight a is on the device 'meta'"):
        fingerprint(module(a=torch.ones(2, device="meta")))


@pytest.mark.parametrize(
    "change", [{"name": 3}, {"fingerprint": None}, {"query_length": "32"}, {"settings": []}, {"document_prefix": 1}]
)
def test_a_damaged_record_is_an_error_that_names_the_catalog(
    tmp_path: Path, model: models.ColBERT, change: dict
) -> None:
    index = filled(tmp_path).record_model(model, "name")
    assert index.model is not None
    change_state(index.index_path, model=replace(index.model, **change))
    with pytest.raises(ValueError, match=f"catalog.sqlite is damaged: its model's {next(iter(change))} is"):
        small(tmp_path)


def test_a_record_says_what_it_is_of() -> None:
    record = ModelRecord(name=None, relative=None, fingerprint="ab" * 32)
    assert str(record) == "a model without a name (weights sha256 abababababab...)"
    assert ModelRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
