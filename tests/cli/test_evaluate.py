from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from pylate_flash.indexes import Flat
from tests.cli.commands import CPU, assert_one_clear_sentence, evaluate, invoke, succeed
from tests.stores import written_by_another

pytest.importorskip("ranx")


def test_evaluate_with_the_scorer_asked_for(beir, tiny_colbert_path):
    arguments = ("evaluate", "--data", beir, "--model", tiny_colbert_path, "--device", "cpu")
    assert "pylate_flash" in succeed(*arguments)
    assert "\n torch " in succeed(*arguments, "--scorer", "torch")


def test_both_scorers_search_with_queries_encoded_once(pylate, beir, pylate_checkpoint, monkeypatch):
    from pylate_flash.models import ColBERT

    encoded, encode = [], ColBERT.encode

    def record(self, sentences, **options):
        encoded.extend(sentences)
        return encode(self, sentences, **options)

    monkeypatch.setattr(ColBERT, "encode", record)
    succeed("evaluate", "--data", beir, "--model", pylate_checkpoint, "--device", "cpu", "--compare-torch")
    assert encoded.count("trains") == 1


def test_caches_that_cannot_be_written_are_an_error_of_one_sentence(beir, tiny_colbert_path, tmp_path, monkeypatch):
    (tmp_path / "ranx.py").write_text("raise PermissionError(13, 'Permission denied', '/home/.ir_datasets')\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "ranx"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    result = invoke("evaluate", "--data", beir, "--model", tiny_colbert_path, "--device", "cpu")
    assert_one_clear_sentence(result, "cannot write its caches", "set NUMBA_CACHE_DIR", "/home/.ir_datasets")


@pytest.mark.parametrize("file", ["corpus.jsonl", "queries.jsonl"])
def test_evaluate_names_file_and_line(beir, tiny_colbert_path, file):
    with (beir / file).open("a") as lines:
        lines.write('{"_id": "x", "text":\n')
    number = len((beir / file).read_text().splitlines())
    result = invoke("evaluate", "--data", beir, "--model", tiny_colbert_path)
    assert_one_clear_sentence(result, beir / file, f"line {number}", "not valid JSON")


def test_evaluate_names_the_line_of_a_judgement(beir, tiny_colbert_path):
    (beir / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td9\t1\n")
    result = invoke("evaluate", "--data", beir, "--model", tiny_colbert_path)
    assert_one_clear_sentence(result, "test.tsv, line 2", "'d9'")


def test_evaluate_names_what_is_missing(beir, tiny_colbert_path, tmp_path):
    model = ("--model", tiny_colbert_path)
    assert_one_clear_sentence(invoke("evaluate", "--data", tmp_path / "none", *model), tmp_path / "none", "BEIR")
    assert_one_clear_sentence(invoke("evaluate", "--data", beir, "--split", "dev", *model), "dev", "test")
    nowhere = tmp_path / "nowhere" / "m.json"
    assert_one_clear_sentence(invoke("evaluate", "--data", beir, "--json", nowhere, *model), "--json", nowhere.parent)


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("/no/such/model", ["there is no model in '/no/such/model'"]),
        ("{folder}", ["is not a model", "modules.json"]),
        ("{folder}/beir/corpus.jsonl", ["is a file"]),
        ("no-such/name", ["'no-such/name' cannot be loaded"]),
        ("demo-output/model", ["there is no model in 'demo-output/model'", "pylate-flash demo"]),
    ],
)
def test_an_unknown_model_is_one_sentence(beir, tmp_path, model, parts, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke("evaluate", "--data", beir, "--model", model.format(folder=tmp_path))
    assert_one_clear_sentence(result, *parts)


def test_a_model_that_does_not_load_is_one_sentence(beir, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    result = invoke("evaluate", "--data", beir, "--model", tmp_path / "broken")
    assert_one_clear_sentence(result, f"the model in {tmp_path / 'broken'} cannot be loaded")


def test_results_go_to_standard_output_and_notes_to_standard_error(beir, pylate_checkpoint):
    result = evaluate(beir, pylate_checkpoint)
    assert result.exit_code == 0
    assert "nDCG@10" in result.stdout
    assert "Loading" not in result.stdout
    assert result.stderr == f"Loading the model {pylate_checkpoint} ...\n"


@pytest.mark.parametrize("device", ["meta", "cuda:99", "toaster", ""])
def test_a_device_that_cannot_compute_is_one_sentence(beir, pylate_checkpoint, device):
    result = invoke("evaluate", "--data", beir, "--model", pylate_checkpoint, "--device", device)
    assert_one_clear_sentence(result, f"--device {device}", "cannot compute here: ")


@pytest.mark.parametrize("option", ["--index", "--json"])
@pytest.mark.parametrize("place", ["corpus.jsonl/x", "qrels", "/proc/x", "a" * 300])
def test_places_that_cannot_be_written_are_refused_before_any_work(beir, option, place, monkeypatch):
    monkeypatch.setattr("pylate_flash.cli.evaluate.loading", fail)
    before = sorted(beir.rglob("*"))
    assert_one_clear_sentence(invoke("evaluate", "--data", beir, "--model", "m", option, beir / place), f"{option}: ")
    assert sorted(beir.rglob("*")) == before


def fail(*arguments, **options):
    raise AssertionError("this must not be reached")


@pytest.mark.parametrize(("option", "form", "part"), [("--json", "json", '"ndcg@10"'), ("--picture", "svg", "nDCG@10")])
def test_files_are_written_at_once_or_not_at_all(option, form, part, beir, pylate_checkpoint, tmp_path, monkeypatch):
    real, link = tmp_path / f"real.{form}", tmp_path / f"link.{form}"
    real.write_text("before")
    link.symlink_to(real.name)
    arguments = ("evaluate", "--data", beir, "--model", pylate_checkpoint, *CPU, option, link)
    replace = os.replace

    def fill(source, target):
        if str(target).endswith(f".{form}") and "index" not in str(target):
            raise OSError(28, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fill)
        assert_one_clear_sentence(invoke(*arguments), f"{option}: ", "No space left on device")
    assert real.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beir", link.name, real.name]
    succeed(*arguments)
    assert part in real.read_text()
    assert link.is_symlink()


def test_an_index_that_was_kept_knows_its_model(beir, pylate_checkpoint, tmp_path):
    lengths = ("--query-length", 6, "--document-length", 10)
    model = shutil.copytree(pylate_checkpoint, tmp_path / "model")
    succeed("evaluate", "--data", beir, "--model", model, "--device", "cpu", *lengths, "--index", tmp_path / "index")
    assert "d2" in succeed("search", "trains", "--index", tmp_path / "index", "--device", "cpu")


def test_an_index_that_was_not_finished_is_not_left(beir, pylate_checkpoint, tmp_path, monkeypatch):
    def stop(*arguments, index, **options):
        index.add_documents(["d1"], [torch.ones(1, 4)])
        raise KeyboardInterrupt

    monkeypatch.setattr("pylate_flash.beir.evaluate_retrieval", stop)
    result = evaluate(beir, pylate_checkpoint, "--index", tmp_path / "index")
    assert result.exit_code == 130
    assert not (tmp_path / "index").exists()


@pytest.fixture
def kept(tmp_path):
    """Folder of an existing index, with an unrelated file in it."""
    Flat(tmp_path, "index", device="cpu").add_documents(["old"], [torch.ones(1, 4)])
    (tmp_path / "index" / "notes.txt").write_text("mine")
    return tmp_path / "index"


def names_in(index):
    """Files of an index, except SQLite's temporary ones while it is open."""
    return {path.name for path in index.iterdir() if path.suffix[:8] != ".sqlite-"}


def test_overwrite_touches_nothing_while_another_process_writes(beir, pylate_checkpoint, kept):
    before = {name: (kept / name).read_bytes() for name in names_in(kept)}
    with written_by_another(kept):
        result = evaluate(beir, pylate_checkpoint, "--index", kept, "--overwrite")
    assert_one_clear_sentence(result, "another process is writing to the index", kept)
    assert {name: (kept / name).read_bytes() for name in names_in(kept)} == before


@pytest.mark.parametrize("form", ["folder", "link", "."])
def test_overwrite_that_is_not_finished_leaves_an_empty_index_and_other_files(
    beir, pylate_checkpoint, kept, monkeypatch, form
):
    def stop(*arguments, index, **options):
        index.add_documents(["d1"], [torch.ones(1, 4)])
        raise KeyboardInterrupt

    path = kept
    if form == "link":
        path = kept.with_name("link")
        path.symlink_to(kept)
    elif form == ".":
        monkeypatch.chdir(kept)
        path = Path()
    monkeypatch.setattr("pylate_flash.beir.evaluate_retrieval", stop)
    result = evaluate(beir, pylate_checkpoint, "--index", path, "--overwrite")
    assert result.exit_code == 130
    assert names_in(kept) == {"catalog.sqlite", "committed", "reserve", "notes.txt"}
    assert (kept / "notes.txt").read_text() == "mine"
    assert len(Flat(kept.parent, kept.name, device="cpu")) == 0


def test_what_another_process_has_added_stays(beir, pylate_checkpoint, tmp_path, monkeypatch):
    def stop(*arguments, index, **options):
        Flat(tmp_path, "index", device="cpu").add_documents(["theirs"], [torch.ones(1, 4)])
        raise KeyboardInterrupt

    monkeypatch.setattr("pylate_flash.beir.evaluate_retrieval", stop)
    result = evaluate(beir, pylate_checkpoint, "--index", tmp_path / "index")
    assert result.exit_code == 130
    assert Flat(tmp_path, "index", device="cpu").documents_ids == ["theirs"]


def test_an_index_that_another_process_writes_to_ends_the_evaluation(beir, pylate_checkpoint, tmp_path, monkeypatch):
    def write(*arguments, index, **options):
        Flat(tmp_path, "index", device="cpu").add_documents(["theirs"], [torch.ones(1, 4)])
        index.add_documents(["ours"], [torch.ones(1, 4)])

    monkeypatch.setattr("pylate_flash.beir.evaluate_retrieval", write)
    result = evaluate(beir, pylate_checkpoint, "--index", tmp_path / "index")
    assert_one_clear_sentence(result, "has been written to since it was opened here")
    assert Flat(tmp_path, "index", device="cpu").documents_ids == ["theirs"]


def test_an_index_that_appears_while_the_model_is_loaded_stays(beir, pylate_checkpoint, tmp_path, monkeypatch):
    def appear(*arguments):
        Flat(tmp_path, "index", device="cpu").add_documents(["theirs"], [torch.ones(1, 4)])

    monkeypatch.setattr("pylate_flash.cli.evaluate.check_scorer", appear)
    result = evaluate(beir, pylate_checkpoint, "--index", tmp_path / "index")
    assert_one_clear_sentence(result, "there is already an index in", "--overwrite replaces it")
    assert Flat(tmp_path, "index", device="cpu").documents_ids == ["theirs"]


def test_an_index_needs_a_name_that_every_system_takes(beir, pylate_checkpoint, tmp_path):
    result = invoke("evaluate", "--data", beir, "--model", pylate_checkpoint, "--index", tmp_path / "a:b")
    assert_one_clear_sentence(result, "--index: ", "colon", "'a:b'")
    assert "index_name" not in result.stderr


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--overwrite",), "--overwrite replaces the index in --index"),
        (("--compare-torch", "--scorer", "torch"), "leave out --scorer torch"),
    ],
)
def test_options_that_mean_nothing_together_say_so(beir, options, part):
    assert_one_clear_sentence(invoke("evaluate", "--data", beir, "--model", "m", *options), part)


def test_a_model_name_that_is_no_text_is_refused(beir):
    result = invoke("evaluate", "--data", beir, "--model", "caf\udce9")
    assert_one_clear_sentence(result, "--model must be valid UTF-8 text, got 'caf\\udce9'")


def test_the_help_shows_a_line_of_every_file():
    printed = " ".join(succeed("evaluate", "--help").replace("│", " ").split())
    for part in ('{"_id": "d1", "title": "optional", "text": "..."}', '{"_id": "q1", "text": "..."}', "q1, d1 and"):
        assert part in printed
    assert all(len(line) <= 80 for line in succeed("evaluate", "--help").splitlines())


def test_evaluate_keeps_its_hands_off_other_files(beir, tiny_colbert_path, output):
    arguments = ("evaluate", "--data", beir, "--model", tiny_colbert_path, "--index")
    before = sorted(beir.rglob("*"))
    assert_one_clear_sentence(invoke(*arguments, beir), "holds files that are not an index")
    assert sorted(beir.rglob("*")) == before
    assert_one_clear_sentence(invoke(*arguments, output / "index"), "--overwrite")
