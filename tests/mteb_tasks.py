"""mteb tasks that need no network."""

from __future__ import annotations

import functools

import mteb
from datasets import Dataset
from mteb.abstasks import AbsTaskRetrieval


def local_task(collections, candidates=None, name="Local"):
    """A task on a single collection, "default", or on one collection per language."""
    languages = ["eng-Latn"] if "default" in collections else {subset: [f"{subset}-Latn"] for subset in collections}

    class Task(AbsTaskRetrieval):
        metadata = mteb.TaskMetadata(
            name=name,
            description="of this test",
            type="Retrieval" if candidates is None else "Reranking",
            category="t2t",
            eval_langs=languages,
            main_score="ndcg_at_10",
            dataset={"path": f"local/{name}", "revision": "1"},
        )

        def load_data(self, **kwargs):
            self.dataset = {
                subset: {
                    "test": {
                        "corpus": Dataset.from_list(documents),
                        "queries": Dataset.from_list([{"id": id_, "text": text} for id_, text in queries.items()]),
                        "relevant_docs": {id_: dict(judged) for id_, judged in qrels.items()},
                        "top_ranked": candidates,
                    }
                }
                for subset, (documents, queries, qrels) in collections.items()
            }
            self.data_loaded = True

    return Task()


def take_offline(monkeypatch, collection, get_model=None):
    """Make mteb return one task on this collection for any task name, and cache no results."""
    monkeypatch.setattr(mteb, "get_tasks", lambda tasks: [local_task({"default": collection}, name=tasks[0])])
    monkeypatch.setattr(mteb, "evaluate", functools.partial(mteb.evaluate, cache=None, show_progress_bar=False))
    if get_model is not None:
        monkeypatch.setattr(mteb, "get_model", get_model)
