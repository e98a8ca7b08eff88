"""Model folders that are broken, contain code, or lack a projection: one-sentence errors before any work."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pylate_flash.cli.common import UserError
from pylate_flash.cli.models import PYLATE, load_model
from tests.cli.commands import HERE, assert_one_clear_sentence, evaluate, invoke, model_class

DEEP = "[" * 200_000


def cut(path):
    path.write_bytes(path.read_bytes()[:300])


def edit(path, change):
    """Edit a JSON file in place."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def spoil(path):
    tensors = load_file(path)
    save_file({name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}, path)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated weights": (lambda m: cut(m / "model.safetensors"), "SafetensorError"),
    "garbage weights": (lambda m: (m / "model.safetensors").write_bytes(b"garbage" * 9), "SafetensorError"),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), "no file named model.safetensors"),
    "NaN for weights": (lambda m: spoil(m / "1_Dense" / "model.safetensors"), "NaN or infinite embeddings"),
    "another size": (
        lambda m: edit(m / "config.json", lambda c: c.update(intermediate_size=24)),
        "the sizes of its weights do not match its config.json",
    ),
    "fewer words than the tokenizer has": (
        lambda m: edit(m / "tokenizer.json", lambda t: t["model"]["vocab"].update(cats=9999)),
        "its tokenizer has a word of id 9999, and its encoder embeddings for",
    ),
    "fewer layers than its config asks for": (
        lambda m: edit(m / "config.json", lambda c: c.update(num_hidden_layers=2)),
        "its weights lack encoder.layer.1.",
    ),
    "layers without end": (
        lambda m: edit(m / "config.json", lambda c: c.update(num_hidden_layers=2**63)),
        "its config.json asks for 9223372036854775808 layers ('num_hidden_layers')",
    ),
    "the weights of another encoder": (
        lambda m: save_file({"other.weight": torch.ones(2)}, m / "model.safetensors", {"format": "pt"}),
        "its weights lack embeddings.",
    ),
    "empty modules.json": (lambda m: (m / "modules.json").write_text(""), "its modules.json is not valid JSON"),
    "half a configuration": (
        lambda m: (m / "config_sentence_transformers.json").write_text("["),
        "its config_sentence_transformers.json is not valid JSON",
    ),
    "modules that are no list": (lambda m: (m / "modules.json").write_text("{}"), "must hold a JSON list"),
    "no weights of a layer": (lambda m: (m / "1_Dense" / "model.safetensors").unlink(), "cannot be loaded"),
    "no modules": (lambda m: (m / "modules.json").write_text("[]"), "at least one module"),
    "modules without types": (lambda m: edit(m / "modules.json", lambda c: c[1].pop("type")), '"type"'),
    "an unknown type": (
        lambda m: edit(m / "modules.json", lambda c: c[1].update(type="pylate.models.Nothing")),
        "Nothing",
    ),
    "a config that is a list": (
        lambda m: (m / "config.json").write_text("[1]"),
        "its config.json must hold a JSON object",
    ),
    "a module's config that is a number": (
        lambda m: (m / "1_Dense" / "config.json").write_text("1"),
        "its 1_Dense/config.json must hold a JSON object",
    ),
    "deep JSON": (
        lambda m: (m / "config.json").write_text(DEEP),
        "its config.json is not valid JSON: it is nested too",
    ),
    "a deep tokenizer": (lambda m: (m / "tokenizer.json").write_text(DEEP), "its tokenizer.json is not valid JSON"),
    "a garbage tokenizer": (lambda m: (m / "tokenizer.json").write_text("garbage"), "its tokenizer.json is not valid"),
    "no tokenizer": (
        lambda m: [(m / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json")],
        "cannot be loaded",
    ),
    "a length that is no number": (
        lambda m: edit(m / "config_sentence_transformers.json", lambda c: c.update(query_length="long")),
        "its query_length, 'long', must be an integer" if HERE == PYLATE else "requires 'length': a positive int",
    ),
    "a length above the positions": (
        lambda m: edit(m / "config_sentence_transformers.json", lambda c: c.update(document_length=33)),
        "its document_length, 33, is more than the 32 tokens that it can read; give a lower --document-length",
    ),
}


@pytest.fixture
def folder(pylate_checkpoint, tmp_path):
    """A model that a test may break."""
    return shutil.copytree(pylate_checkpoint, tmp_path / "model")


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_model_is_one_sentence(case, folder, beir):
    change, part = BROKEN[case]
    change(folder)
    result = evaluate(beir, folder)
    assert_one_clear_sentence(result, f"the model in {folder}", part)
    assert len(result.stderr.splitlines()[-1]) < 700


def test_a_tokenizer_without_words_is_refused(folder, beir):
    """transformers creates one with only special tokens, and PyLate shrinks the encoder to it: all texts are equal."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    edit(folder / "config.json", lambda c: c.update(model_type="bert"))
    assert_one_clear_sentence(evaluate(beir, folder), "its tokenizer has no words")


def test_panics_of_a_loader_are_one_sentence_too(folder, beir, monkeypatch):
    class PanicException(BaseException):
        """As raised by Rust libraries."""

    def panic(*arguments, **options):
        raise PanicException("index out of bounds")

    monkeypatch.setattr(f"{model_class().__module__}.{model_class().__name__}", panic)
    assert_one_clear_sentence(evaluate(beir, folder), "PanicException: index out of bounds")


def test_ctrl_c_while_loading_interrupts(folder, beir, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"{model_class().__module__}.{model_class().__name__}", interrupt)
    assert evaluate(beir, folder).exit_code == 130


def bring_code(folder, tmp_path):
    """Give a module a custom class from the folder; return the file that its code creates when it runs."""
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(
        f"import pathlib\nfrom pylate.models import Dense\n\npathlib.Path({str(ran)!r}).touch()\n\n\n"
        "class Own(Dense):\n    pass\n"
    )
    edit(folder / "modules.json", lambda modules: modules[1].update(type="own.Own"))
    return ran


def test_code_of_a_folder_runs_only_if_it_is_trusted(pylate, folder, beir, tmp_path):
    ran = bring_code(folder, tmp_path)
    assert_one_clear_sentence(evaluate(beir, folder), "modules.json names 'own.Own'", "--trust-remote-code")
    assert not ran.exists()
    assert evaluate(beir, folder, "--trust-remote-code").exit_code == 0
    assert ran.exists()


def test_the_demo_runs_no_code_of_a_folder_that_is_not_trusted(pylate, folder, tmp_path):
    ran = bring_code(folder, tmp_path)
    demo = ("demo", "--model", folder, "--device", "cpu", "--output", tmp_path / "out")
    assert_one_clear_sentence(invoke(*demo), "modules.json names 'own.Own'", "--trust-remote-code")
    assert not ran.exists()
    # Trusted code then fails for another reason: this model reads 32 tokens, the demo's documents have 64.
    assert_one_clear_sentence(invoke(*demo, "--trust-remote-code"), "64 is more than the 32 tokens")
    assert ran.exists()
    assert not (tmp_path / "out").exists()


def test_the_demo_says_at_once_that_there_is_no_such_model(pylate, tmp_path):
    result = invoke("demo", "--model", "nomodel", "--device", "cpu", "--output", tmp_path / "out")
    assert_one_clear_sentence(result, "the model 'nomodel' cannot be loaded: there is no such folder")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("key", "value"), [("activation_function", "os.getcwd"), ("types", {"a": "antigravity.fly"})])
def test_functions_that_a_configuration_names_are_not_called(folder, beir, key, value):
    edit(folder / "1_Dense" / "config.json", lambda config: config.update({key: value}))
    name = value if isinstance(value, str) else value["a"]
    assert_one_clear_sentence(evaluate(beir, folder), f"its 1_Dense/config.json names {name!r}", "--trust-remote-code")


def test_code_that_a_configuration_asks_for_names_the_option(folder, beir):
    edit(folder / "config.json", lambda c: c.update(model_type="own", auto_map={"AutoConfig": "own.Config"}))
    assert_one_clear_sentence(evaluate(beir, folder), "its own code; --trust-remote-code runs it")


def test_a_random_projection_is_refused_for_searching_and_named_otherwise(pylate_checkpoint, folder, beir, tmp_path):
    encoder, lengths = folder, ("--query-length", 8, "--document-length", 12)
    shutil.rmtree(encoder / "1_Dense")
    for name in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
        (encoder / name).unlink()
    result = evaluate(beir, encoder, *lengths, "--index", tmp_path / "index")
    assert_one_clear_sentence(result, f"the model in {encoder}", "train it first with `pylate-flash train`")
    assert not (tmp_path / "index").exists()
    result = evaluate(beir, encoder, *lengths)
    assert result.exit_code == 0
    assert "Warning" in result.stderr
    assert "random" in result.stderr
    assert "Warning" not in result.stdout
    assert "Warning" not in evaluate(beir, pylate_checkpoint).stderr
    with pytest.raises(UserError, match="train it first"):
        load_model(str(encoder), searching=True, device="cpu", query_length=8, document_length=12)


@pytest.mark.parametrize(("option", "value"), [("--query-length", 100000), ("--document-length", 33)])
def test_lengths_above_the_positions_are_refused(pylate_checkpoint, beir, option, value):
    result = evaluate(beir, pylate_checkpoint, option, value)
    assert_one_clear_sentence(result, f"{option} {value} is more than the 32 tokens")


@pytest.mark.parametrize(("offline", "part"), [("1", "HF_HUB_OFFLINE is set"), ("", "could be downloaded")])
def test_a_name_that_is_not_found_names_the_offline_mode(pylate, beir, monkeypatch, offline, part):
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    assert_one_clear_sentence(evaluate(beir, "no-such/name"), "'no-such/name'", part)


def test_an_encoder_without_a_pooler_is_complete(folder, beir):
    tensors = load_file(folder / "model.safetensors")
    remaining = {name: tensor for name, tensor in tensors.items() if "pooler" not in name}
    assert len(remaining) < len(tensors)
    save_file(remaining, folder / "model.safetensors", {"format": "pt"})
    assert evaluate(beir, folder).exit_code == 0
