"""Every search path returns the ranking of PyLate's exhaustive scores on the Cranfield collection."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from pylate_flash.beir import load_beir_folder
from pylate_flash.index import resident, search
from pylate_flash.indexes import Flat

WORD = re.compile("[a-z]+")
SIZE, K = 32, 100


class Collection:
    """Abstracts and queries with a small-integer vector per word, so that every sum of products is exact."""

    def __init__(self, folder: Path) -> None:
        documents, queries, _ = load_beir_folder(folder)
        self.ids = [document["id"] for document in documents]
        words = [WORD.findall(text.lower()) for text in [*(d["text"] for d in documents), *list(queries.values())[::5]]]
        word_ids = {word: i for i, word in enumerate(sorted(set(sum(words, []))))}
        vectors = torch.randint(-2, 3, (len(word_ids), SIZE), generator=torch.Generator().manual_seed(0)).float()
        tokens = [vectors[[word_ids[word] for word in row]] if row else vectors[:0] for row in words]
        self.documents, self.queries = tokens[: len(documents)], tokens[len(documents) :]
        self.metadata = [{"place": i} for i in range(len(documents))]
        self.scores = self._scores()

    def _scores(self) -> torch.Tensor:
        """PyLate's scores of all queries and documents, one document length at a time, as it scores padding."""
        from pylate.scores import colbert_scores

        queries = torch.nn.utils.rnn.pad_sequence(self.queries, batch_first=True)
        scores = torch.full((len(queries), len(self.documents)), torch.finfo(torch.float32).min)
        lengths = defaultdict(list)
        for i, document in enumerate(self.documents):
            lengths[len(document)].append(i)
        for length, positions in lengths.items():
            if length:
                scores[:, positions] = colbert_scores(queries, torch.stack([self.documents[i] for i in positions]))
        return scores

    def best(self, mask: torch.Tensor) -> list[list[dict]]:
        """Top K per query among the documents True in mask [N] or [Nq, N]; ties in index order."""
        order = self.scores.masked_fill(~mask, -torch.inf).sort(dim=1, descending=True, stable=True)
        counts = mask.expand(len(self.queries), -1).sum(dim=1).clamp(max=K).tolist()
        return [
            [{"id": self.ids[i], "score": score} for score, i in zip(values[:count], positions[:count], strict=True)]
            for values, positions, count in zip(order.values.tolist(), order.indices.tolist(), counts, strict=True)
        ]


@pytest.fixture(scope="module")
def collection(cranfield: Path) -> Collection:
    pytest.importorskip("pylate")
    return Collection(cranfield)


def assert_exact(
    collection: Collection, folder: Path, dtype: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resident, partly resident, streamed, in memory; all, filtered, subsets; with and without removed documents."""
    for name in ("STREAMED_BYTES_CPU", "STREAMED_BYTES_CUDA"):
        monkeypatch.setattr(resident, name, 1 << 20)
    for name in ("_GATHERED_BYTES_CPU", "_GATHERED_BYTES_CUDA"):
        monkeypatch.setattr(search, name, 2 << 20)
    monkeypatch.setattr(search, "_SCORES", 500 * len(collection.queries))
    ids, everything = collection.ids, torch.ones(len(collection.ids), dtype=torch.bool)
    remaining, matching = everything.clone(), everything.clone()
    remaining[5::9] = False
    in_subset = torch.rand(len(collection.queries), len(ids), generator=torch.Generator().manual_seed(1)) < 0.3
    matching[500:700] = False
    indexes = [Flat(None, dtype=dtype, device=device, show_progress=False)]
    writer = Flat(folder, "index", dtype=dtype, device=device, show_progress=False)
    for index in (indexes[0], writer):
        for start in range(0, len(ids), 450):
            batch = slice(start, start + 450)
            index.add_documents(ids[batch], collection.documents[batch], metadata=collection.metadata[batch])
    subsets = [[id_ for id_, selected in zip(ids, row, strict=True) if selected] for row in in_subset.tolist()]
    for state in ("whole", "removed", "compact"):
        if state == "removed":
            for index in (indexes[0], writer):
                index.remove_documents(ids[5::9])
        if state == "compact":
            writer.compact()
        half = writer._store.tokens * writer._store.layout.nbytes // 2
        opened = [
            Flat(folder, "index", device=device, show_progress=False, device_memory=memory)
            for memory in (0, half + (3 << 20), 1 << 40)
        ]
        live = everything if state == "whole" else remaining
        calls = (
            ({}, live),
            ({"where": "place < 500 or place >= 700"}, live & matching),
            ({"subset": ids[100:900]}, live & (torch.arange(len(ids)) >= 100) & (torch.arange(len(ids)) < 900)),
            ({"subset": subsets}, live & in_subset),
            ({"subset": subsets, "where": ("place < ? or place >= 700", [500])}, live & in_subset & matching),
        )
        expected = [collection.best(mask) for _, mask in calls]
        for index in [*indexes, *opened]:
            for (call, _), lists in zip(calls, expected, strict=True):
                assert index(collection.queries, k=K, **call) == lists
        # The middle one is partly resident and partly streamed.
        assert [index._search.rows.n_resident for index in opened][::2] == [0, len(opened[2]._search.rows.bounds) - 1]
        assert 0 < opened[1]._search.rows.n_resident < len(opened[1]._search.rows.bounds) - 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_roads_are_exact(
    collection: Collection, tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_exact(collection, tmp_path, dtype, "cpu", monkeypatch)
