from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pylate_flash import demo, evaluation, indexes, models
from pylate_flash.demo.corpus import build_corpus, read_package, split_docstring
from pylate_flash.demo.job import expected_seconds, prepare_output, time_left
from tests.cli.commands import succeed
from tests.tiny_demo import TINY, run_tiny_demo

LONG = "It takes a number of words to say this, and more of them to be a document that is worth finding later on. " * 2


def package(root: Path, name: str, files: dict[str, str]) -> None:
    for path, source in files.items():
        file = root / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")


def function(name: str, docstring: str) -> str:
    return f'def {name}():\n    """{docstring}"""\n\n'


# The corpus


@pytest.mark.parametrize(
    ("docstring", "query", "text"),
    [
        ("Sort a list. In place.\n\n    It is stable.\n", "Sort a list.", "In place.\n\nIt is stable."),
        ("Sort a list\n\nIt is stable.", "Sort a list", "It is stable."),
        ("Sort a list, e.g. of\n    numbers. Stable.", "Sort a list, e.g. of numbers.", "Stable."),
        ("Use version 1.5 of it. Yes.", "Use version 1.5 of it.", "Yes."),
        ("Call :func:`~json.loads` on ``text``. Done.", "Call json.loads on text.", "Done."),
        ("Sort.\n\nParameters\n----------\nx : list\n", "Sort.", "Parameters\n\nx : list"),
        ("Sort.\n\nExample:\n>>> sort([2, 1])\n[1, 2]\n\nStable.", "Sort.", "Example:\n\nStable."),
        (">>> sort([2, 1])\n[1, 2]", "", ""),
        ("", "", ""),
    ],
)
def test_split_docstring(docstring: str, query: str, text: str) -> None:
    result = split_docstring(docstring)
    assert (result[0], " ".join(result[1].split())) == (query, " ".join(text.split()))


def test_read_package_finds_what_is_public_without_running_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(
        tmp_path,
        "fakedocs",
        {
            "__init__.py": f'"""A package that must not be imported. {LONG}"""\nraise SystemExit("imported")\n',
            "_private.py": function("solve", f"Solve a system of equations. {LONG}")
            + function("_hidden", f"Hide this function from everyone. {LONG}")
            + f'class Thing:\n    """Hold one thing and another. {LONG}"""\n'
            + f'    def turn(self):\n        """Turn the thing upside down. {LONG}"""\n',
            "short.py": function("brief", f"Too short. {LONG}") + function("empty", "There is nothing after this one."),
            "broken.py": "def broken(:\n",
            "pair.py": function("half", rf"Decode half of a pair here. \ud800 {LONG}"),
            "tests/test_it.py": function("test_it", f"Test that it all works. {LONG}"),
        },
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert {entry.name: entry.query for entry in read_package("fakedocs")} == {
        "fakedocs": "A package that must not be imported.",
        "fakedocs.solve": "Solve a system of equations.",
        "fakedocs.Thing": "Hold one thing and another.",
        "fakedocs.Thing.turn": "Turn the thing upside down.",
        "fakedocs.pair.half": "Decode half of a pair here.",
    }
    assert all(entry.text.isascii() for entry in read_package("fakedocs"))
    assert read_package("there_is_no_such_package") == []
    # Whole files are read, and only as many as needed.
    assert 1 <= len(read_package("fakedocs", enough=1)) <= 3


def test_corpus_is_deterministic_split_by_package_and_has_no_duplicates() -> None:
    corpus = TINY.build_corpus()
    assert corpus == TINY.build_corpus()
    assert len(corpus.queries) == TINY.queries
    assert corpus.queries == corpus.documents[: TINY.queries]
    test, train = ({entry.package for entry in side} for side in (corpus.documents, corpus.train))
    assert test == {"tqdm", "requests"}
    assert train == {"seaborn"}
    entries = corpus.documents + corpus.train
    for texts in ([entry.query.casefold() for entry in entries], [entry.text.casefold() for entry in entries]):
        assert len(set(texts)) == len(texts)
    for entry in entries:
        assert 4 <= len(entry.query.split()) <= 40
        assert len(entry.text.split()) >= 20
        assert entry.query not in entry.text


def test_a_text_of_both_sides_stays_in_the_test_collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = function("shared", f"Share this with the other one. {LONG}")
    package(tmp_path, "fakeone", {"a.py": same + function("one", f"Do the first thing here. {LONG} One.")})
    package(tmp_path, "faketwo", {"a.py": same + function("two", f"Do the second thing here. {LONG} Two.")})
    monkeypatch.syspath_prepend(tmp_path)
    corpus = build_corpus(test_packages=["fakeone"], train_packages=["faketwo"])
    assert {entry.name for entry in corpus.documents} == {"fakeone.a.shared", "fakeone.a.one"}
    assert {entry.name for entry in corpus.train} == {"faketwo.a.two"}


def test_corpus_limits_are_shared_by_the_packages() -> None:
    corpus = build_corpus(documents=12, queries=5, pairs=3, test_packages=["tqdm", "seaborn"], train_packages=["click"])
    assert [sum(e.package == name for e in corpus.documents) for name in ("tqdm", "seaborn")] == [6, 6]
    assert (len(corpus.queries), len(corpus.train)) == (5, 3)


def test_corpus_refuses_a_package_on_both_sides_and_sides_without_text() -> None:
    with pytest.raises(ValueError, match="both have tqdm"):
        build_corpus(test_packages=["tqdm"], train_packages=["tqdm", "click"])
    with pytest.raises(ValueError, match="none of the packages no_such_package is installed"):
        build_corpus(test_packages=["no_such_package"], train_packages=["click"])


# The run


@pytest.fixture
def finished(tiny_demo: tuple[Path, dict[str, Any], str], tmp_path: Path) -> tuple[Path, dict[str, Any], str]:
    """A copy of the demo's output folder, its results and printed output, for a single test."""
    return shutil.copytree(tiny_demo[0], tmp_path / "finished"), *tiny_demo[1:]


def test_demo_leaves_what_it_says(finished: tuple[Path, dict[str, Any], str]) -> None:
    output, results, printed = finished
    assert json.loads((output / "results.json").read_text()) == json.loads(json.dumps(results))
    assert (output / "demo.png").read_bytes().startswith(b"\x89PNG")
    documents, queries, qrels = evaluation.load_beir_folder(output / "data")
    assert (len(documents), len(queries), len(qrels)) == (TINY.documents, TINY.queries, TINY.queries)
    assert set(indexes.Flat(output, "index").documents_ids) == {document["id"] for document in documents}
    assert models.ColBERT(str(output / "model"), device="cpu").scorer == "pylate_flash"
    assert f"{results['after']['torch']['ndcg@10']:.4f}" in printed
    assert "pylate-flash search" in printed


def test_demo_results_are_those_of_the_saved_model_and_index(finished: tuple[Path, dict[str, Any], str]) -> None:
    output, results, _ = finished
    model = models.ColBERT(str(output / "model"), device="cpu")
    result = evaluation.evaluate_retrieval(
        model,
        *evaluation.load_beir_folder(output / "data"),
        index=indexes.Flat(output, "index", device="cpu"),
        show_progress=False,
    )
    assert result.metrics == pytest.approx(results["after"]["pylate_flash"], abs=1e-6)


def test_demo_trains_and_the_scorers_agree(finished: tuple[Path, dict[str, Any], str]) -> None:
    _, results, _ = finished
    assert results["training"]["steps"] == TINY.pairs // TINY.batch_size
    assert results["training"]["in_batch_negatives_per_query"] == TINY.batch_size - 1
    assert results["before"] != results["after"]
    for moment in ("before", "after"):
        assert results["agreement"][moment]["holds"]
        assert results["agreement"][moment]["identical_up_to_ties"] == TINY.queries


def test_demo_runs_again_over_its_own_output_and_spares_other_files(
    finished: tuple[Path, dict[str, Any], str], tiny_colbert_path: str
) -> None:
    output, first, _ = finished
    (output / "notes.txt").write_text("mine")
    second, _ = run_tiny_demo(output, tiny_colbert_path)
    assert second["after"] == first["after"]
    assert second["training"]["loss"] == first["training"]["loss"]
    assert (output / "notes.txt").read_text() == "mine"


def test_the_command_trains_the_model_that_it_has_checked(
    finished: tuple[Path, dict[str, Any], str], tiny_colbert_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("loaded once more")

    monkeypatch.setattr("pylate_flash.demo.job.Settings", lambda: TINY)
    monkeypatch.setattr("pylate_flash.demo.job.load_encoder", refuse)
    succeed("demo", "--model", tiny_colbert_path, "--device", "cpu", "--output", tmp_path / "out")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["after"] == finished[1]["after"]


def test_the_time_that_is_left_follows_the_pace_of_this_machine() -> None:
    expected = expected_seconds(demo.Settings())
    total = sum(expected)
    assert 90 < total < 300
    assert time_left(expected, 0, 1.0) == f"about {total / 60:.1f} min left"
    # Loading took ten times as long, which says nothing about the remaining steps.
    assert time_left(expected, 1, 10 * expected[0]) == f"about {sum(expected[1:]) / 60:.1f} min left"
    # Each step took twice the expected time: so will the remaining ones.
    assert time_left(expected, 2, 2 * sum(expected[:2])) == f"about {2 * sum(expected[2:]) / 60:.1f} min left"
    assert time_left(expected, 4, 2 * sum(expected[:4])) == "about 5 s left"


def test_each_step_says_how_long_is_left(finished: tuple[Path, dict[str, Any], str]) -> None:
    _, _, printed = finished
    steps = [line for line in printed.splitlines() if "left)" in line]
    assert [step.split(".")[0].split()[-1] for step in steps] == ["1", "2", "3", "4"]


def test_demo_refuses_a_folder_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("mine")
    with pytest.raises(ValueError, match="not the output of an earlier demo"):
        prepare_output(tmp_path)
    assert (tmp_path / "model" / "weights").read_text() == "mine"
    with pytest.raises(ValueError, match="is a file"):
        prepare_output(tmp_path / "model" / "weights")


def test_data_and_model_folders_are_those_of_the_demo(
    finished: tuple[Path, dict[str, Any], str], tmp_path: Path, minilm_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, _, _ = finished
    assert demo.data_folder(output) == output / "data"
    assert demo.model_folder(output) == str(output / "model")
    # Without a demo: a small collection, and the demo's initial encoder.
    monkeypatch.setattr("pylate_flash.demo.job.QUICK", TINY)
    documents, _, _ = evaluation.load_beir_folder(demo.data_folder(tmp_path / "new"))
    assert len(documents) == TINY.documents
    assert demo.model_folder(tmp_path / "new") == minilm_path


def test_data_whose_writing_was_interrupted_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pylate_flash.demo.job.QUICK", TINY)
    replace = os.replace
    for number in range(4):
        remaining = [number]

        def interrupted(source: str, target: Path, remaining: list[int] = remaining) -> None:
            if not remaining[0]:
                raise KeyboardInterrupt
            remaining[0] -= 1
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr("os.replace", interrupted)
            with pytest.raises(KeyboardInterrupt):
                demo.data_folder(tmp_path)
        documents, queries, _ = evaluation.load_beir_folder(demo.data_folder(tmp_path))
        assert (len(documents), len(queries)) == (TINY.documents, TINY.queries)
        shutil.rmtree(tmp_path / "data")


def test_training_improves_a_real_encoder(minilm_path: str) -> None:
    """The demo's claim at test size: nDCG@10 is higher after training than before."""
    settings = demo.Settings(
        documents=60,
        queries=60,
        pairs=96,
        batch_size=16,
        query_length=24,
        document_length=32,
        train_document_length=32,
        test_packages=("requests", "tqdm", "click"),
        train_packages=("seaborn",),
    )
    corpus = settings.build_corpus()
    model = demo.load_encoder(minilm_path, settings, device="cpu")
    documents = [{"id": entry.name, "text": entry.text} for entry in corpus.documents]
    queries = {entry.name: entry.query for entry in corpus.queries}
    qrels = {entry.name: {entry.name: 1} for entry in corpus.queries}

    def ndcg() -> float:
        return evaluation.evaluate_retrieval(
            model, documents, queries, qrels, k=50, metrics=["ndcg@10"], show_progress=False
        ).metrics["ndcg@10"]

    before = ndcg()
    demo.train(model, corpus, settings)
    assert ndcg() > before + 0.01
