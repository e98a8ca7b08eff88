"""The complete step at a tiny size: what each system gets, and which results are stored."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("pylate")

import encoder_step
from encoder_step import Request
from pylate_flash import losses


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    encoder_step.make_model(folder, encoder_step.TINY)
    return str(folder)


@pytest.fixture
def request_(model):
    return Request(model, batch_size=6, steps=2, mini_batch_size=4)


def test_every_system_computes_the_same_step(request_):
    ours = encoder_step.measure_here(request_)
    by_tokens = encoder_step.measure_here(replace(request_, mini_batch_tokens=2 * encoder_step.DOCUMENT_LENGTH))
    pylate = encoder_step.measure_here(replace(request_, backend="torch"))
    # PyLate lets padding win over negative similarities, of which random weights have none.
    assert by_tokens["loss"] == pytest.approx(ours["loss"], rel=1e-5)
    assert pylate["loss"] == pytest.approx(ours["loss"], rel=1e-4)
    for result in (ours, by_tokens, pylate):
        assert len(result["seconds"]) == 2
        assert result["tokens"] == ours["tokens"]
        assert result["peak_bytes"] is None
    assert 0.0 < ours["loss_share"] < 1.0
    assert pylate["loss_share"] is None
    words = [len(text.split()) for text in encoder_step.texts(6, encoder_step.DOCUMENT_WORDS, seed=1)]
    assert len(set(words)) > 1
    assert ours["tokens"] == sum(words) + 6 * encoder_step.MARKERS


def test_padded_documents_have_all_their_tokens(request_):
    result = encoder_step.measure_here(replace(request_, batch_size=2, steps=1, warmup=0, padded=True))
    assert result["tokens"] == 2 * encoder_step.DOCUMENT_LENGTH


def test_a_state_without_a_limit_of_tokens_says_so(request_, monkeypatch):
    monkeypatch.setattr(losses, "CachedContrastive", lambda model, scorer, mini_batch_size: None)
    with pytest.raises(ValueError, match="mini_batch_tokens: this state of the package has no such limit"):
        encoder_step.measure_here(replace(request_, mini_batch_tokens=100))


def test_every_system_has_a_process_and_its_package(tmp_path, monkeypatch, capsys):
    requests = []

    def measured(command, env, **options):
        request = Request(**json.loads(command[-1]))
        requests.append((request, env["PYTHONPATH"].split(":")[0]))
        assert command[:3] == [sys.executable, encoder_step.__file__, "measure"]
        assert (Path(request.model) / "tokenizer.json").exists()
        if request.backend == "flash":
            return SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nImportError: flash_maxsim")
        results = {"seconds": [3.0, 1.0, 2.0], "loss_share": 0.02, "peak_bytes": 10**9, "loss": 1.0, "tokens": 9}
        return SimpleNamespace(returncode=0, stdout=f"a note\n{json.dumps(results)}\n", stderr="")

    monkeypatch.setattr(encoder_step.subprocess, "run", measured)
    monkeypatch.setenv("PYTHONPATH", f"{encoder_step.ROOT}:elsewhere")
    output = tmp_path / "new" / "result.json"
    encoder_step.run(output, 8, 32, 3, [f"before={tmp_path}"], ["lik", "flash"], tiny=True)
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == len(requests) == 9
    assert [row["system"] for row in rows if row["documents"] == "padded"] == [
        "pylate_flash",
        "pylate_flash, mini-batches of 128 texts",
        "before",
    ]
    for row, (request, package) in zip(rows, requests, strict=True):
        assert package == str(tmp_path if row["system"] == "before" else encoder_step.ROOT)
        assert row["batch_size"] == request.batch_size
        assert (row["documents"] == "padded") == request.padded
        # Older states, which may lack the option, do not get it.
        assert (request.mini_batch_tokens is not None) == (row["system"] == "pylate_flash")
        assert row.get("median_s") == (None if row["system"] == "PyLate, flash" else 2.0)
    assert rows[-1]["batch_size"] == 32
    printed = capsys.readouterr().out
    assert "| PyLate, flash | 8 | tokenized | ImportError: flash_maxsim | - | - |" in printed
    assert "| before | 8 | padded | 2.000 | 2.0% | 1.00 |" in printed
