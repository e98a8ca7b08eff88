"""Indexes in memory behave as those on disk, and write no files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from pylate_flash.index.documents import Documents
from pylate_flash.index.loading import Loader
from pylate_flash.indexes import Flat
from tests.stores import EACH_DTYPE, documents_of


def answers(index: Flat) -> tuple:
    ids = index.documents_ids
    queries = documents_of([3, 5], 24, seed=9)
    result = index(queries, k=5), index(queries, k=3, subset=[ids[::2], ids[:4]])
    embeddings = [tensor.tolist() for tensor in index.get_documents_embeddings([ids])[0]]
    return ids, result, embeddings, index.info().tokens


@EACH_DTYPE
def test_it_does_what_one_on_the_disk_does(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    documents = documents_of([4, 0, 7, 1, 3, 2, 9, 5], 24)
    for steps in range(6):
        indexes = [
            Flat(folder, str(steps), dtype=dtype, device="cpu", show_progress=False) for folder in (None, "there")
        ]
        for index in indexes:
            index.add_documents(list("abcd"), documents[:4])
            index.add_documents(["e"], documents[4:5])
            if steps > 0:
                index.remove_documents(["c"])
            if steps > 1:
                index.add_documents(["a", "f"], documents[5:7], replace=True)
            if steps > 2:
                index.compact()
            if steps > 3:
                index.remove_documents(["f", "e"], erase=True)
            if steps > 4:
                index.add_documents(["g", "c"], [documents[7], documents[0]])
            assert index.verify().documents == len(index)
        assert answers(indexes[0]) == answers(indexes[1])
        with pytest.raises(ValueError, match="'b' is already in the index in memory"):
            indexes[0].add_documents(["b"], documents[:1])
        assert answers(indexes[0]) == answers(indexes[1])
    assert os.listdir(tmp_path) == ["there"]
    assert indexes[0].info().bytes == sum(len(document) for document in documents_of([0, 1, 2, 5, 4], 24)) * (
        indexes[0]._store.layout.all_nbytes
    )


def test_it_keeps_a_copy_of_what_was_added() -> None:
    document = documents_of([3])[0]
    index = Flat(None, device="cpu")
    index.add_documents(["a"], [document])
    saved = document.clone()
    document.zero_()
    assert torch.equal(index.get_documents_embeddings([["a"]])[0][0], saved)


def test_an_addition_that_fails_leaves_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Flat(None, device="cpu").add_documents(["a"], documents_of([3]))
    with pytest.raises(ValueError, match="document 'c' hold NaN"):
        index.add_documents(["b", "c"], [torch.ones(1, 4), torch.full((1, 4), float("nan"))])
    assert index.documents_ids == ["a"]
    index.add_documents(["b"], documents_of([2]))
    assert index.documents_ids == ["a", "b"]


def test_two_of_them_are_two() -> None:
    first, second = Flat(None, device="cpu"), Flat(None, device="cpu")
    first.add_documents(["a"], documents_of([3]))
    assert (len(first), len(second), "a" in second) == (1, 0, False)
    assert first.info().generation == 1


def test_embeddings_stay_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, whose tensors have no values to copy to the host."""
    index = Flat(None, device="cpu")
    index._store._device = torch.device("meta")
    # The NaN check calls `item`.
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: 0.0)
    index._store.add(["a", "b"], list(torch.empty(2, 3, 4, device="meta")))
    (part,) = index._store.documents.parts
    assert part.memory is not None
    assert (part.memory.device.type, tuple(part.memory.shape)) == ("meta", (6, 4))
    # Loading for a search does not copy them to the host either.
    values = torch.empty(6, 4, device="meta")
    Loader(Documents([part]), torch.device("cpu")).start([(0, 6)], values).wait()
