"""Output folder of a trained model: which files are replaced, which stay, and the state after a failure."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pylate_flash.cli.common import UserError
from pylate_flash.cli.files import other_files, writable_folder
from pylate_flash.cli.training.output import holds_model, write_model

ROOT = ("config.json", "model.safetensors", "modules.json", "tokenizer.json", "README.md")


class Model:
    """Mock of a ColBERT model with an encoder and one Dense layer."""

    def save_pretrained(self, path):
        write(Path(path), "new", "1_Dense", *ROOT, "1_Dense/config.json", "1_Dense/model.safetensors")


def write(folder, content, dense, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    modules = [{"idx": 0, "path": "", "by": content}, {"idx": 1, "path": dense, "by": content}]
    (folder / "modules.json").write_text(json.dumps(modules))


def content(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path):
    """An old model with other files than the new one, among unrelated files."""
    folder = tmp_path / "model"
    write(folder, "old", "2_Dense", *ROOT, "pytorch_model.bin", "adapter_config.json", "2_Dense/config.json")
    write_others(folder)
    return folder


def write_others(folder):
    for name in (".git/HEAD", "notes.txt", "train.jsonl", "2_Dense/notes.txt", "data/config.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")


def test_only_the_files_of_the_old_model_are_replaced(folder):
    retained = write_model(Model(), folder)  # type: ignore[arg-type]
    result = content(folder)
    mine = {".git/HEAD", "notes.txt", "train.jsonl", "2_Dense/notes.txt", "data/config.json"}
    assert {name for name, text in result.items() if text == "mine"} == mine
    assert result.keys() - mine == {*ROOT, "1_Dense/config.json", "1_Dense/model.safetensors"}
    assert not any("old" in text for text in result.values())
    assert retained == [".git", "2_Dense", "data", "notes.txt", "train.jsonl"]


@pytest.mark.parametrize("path", ["../outside", "{outside}", "link", "link/../../outside"])
def test_nothing_outside_of_the_folder_is_touched(folder, tmp_path, path):
    """Whatever paths the old model's modules.json contains."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "config.json").write_text("mine")
    (folder / "link").symlink_to(outside)
    write(folder, "old", path.format(outside=outside))
    write_model(Model(), folder)  # type: ignore[arg-type]
    assert content(outside) == {"config.json": "mine"}
    assert (folder / "config.json").read_text() == "new"


def test_a_broken_list_of_modules_is_replaced(folder):
    for broken in ("[" * 200_000, '[{"path": 3}]', "{", "3", "\x00"):
        (folder / "modules.json").write_text(broken)
        write_model(Model(), folder)  # type: ignore[arg-type]
        assert json.loads((folder / "modules.json").read_text())[0]["by"] == "new"


def test_between_the_moves_nothing_looks_like_a_model(folder, monkeypatch):
    """Neither like a model nor, without modules.json, like an encoder: it is all old, all new, or none."""
    rename = Path.rename
    states = []

    def observed(self, target):
        result = rename(self, target)
        states.append({name: (folder / name).read_text() for name in ROOT if (folder / name).exists()})
        return result

    monkeypatch.setattr(Path, "rename", observed)
    write_model(Model(), folder)  # type: ignore[arg-type]
    assert len(states) > 2 * len(ROOT)
    for state in states[:-1]:
        assert "config.json" not in state
    assert set(states[-1]) == set(ROOT)
    assert not any("old" in text for text in states[-1].values())


def test_a_move_that_fails_leaves_the_old_model_and_names_the_new_one(folder, monkeypatch):
    """For every single move."""
    before, rename = content(folder), Path.rename
    failures = 0
    while True:
        calls = 0

        def failing(self, target):
            nonlocal calls
            calls += 1
            if calls == failures + 1:  # noqa: B023
                raise PermissionError(13, "Permission denied", str(self))
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", failing)
        try:
            write_model(Model(), folder)  # type: ignore[arg-type]
            break
        except UserError as error:
            failures += 1
            (aside,) = re.findall(r"Permission denied.*; it is in (.*)", str(error))
            assert holds_model(Path(aside))
            assert content(Path(aside))["model.safetensors"] == "new"
            result = content(folder)
            assert {name: text for name, text in result.items() if not name.startswith("unfinished-model-")} == before
    assert failures > 2 * len(ROOT)
    assert (folder / "modules.json").read_text().count("new")


def test_a_model_that_cannot_be_written_there_is_saved_elsewhere(folder, tmp_path):
    class FullDisk(Model):
        def save_pretrained(self, path):
            super().save_pretrained(path)
            if Path(path).is_relative_to(folder):
                raise RuntimeError("No space left on device")

    before = content(folder)
    with pytest.raises(
        UserError, match=f"could not be written to {folder}: No space left.*; the model is in "
    ) as raised:
        write_model(FullDisk(), folder)  # type: ignore[arg-type]
    assert content(folder) == before
    assert content(Path(str(raised.value).split("; the model is in ")[1]))["model.safetensors"] == "new"


def test_a_model_that_cannot_be_written_anywhere_leaves_nothing(folder, tmp_path, monkeypatch):
    class FullDisks(Model):
        def save_pretrained(self, path):
            super().save_pretrained(path)
            raise RuntimeError(f"No space left for {Path(path).relative_to(tmp_path).parts[0]}")

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    before = content(folder)
    message = "No space left for model; nor could the model be saved to a temporary folder: No space left for temporary"
    with pytest.raises(UserError, match=f"the model could not be written to {folder}: {message}$"):
        write_model(FullDisks(), folder)  # type: ignore[arg-type]
    assert content(folder) == before
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_folder_is_tried_out_and_leaves_nothing(tmp_path):
    with writable_folder(tmp_path / "a" / "b", "--output"):
        assert (tmp_path / "a" / "b").is_dir()
    assert not (tmp_path / "a").exists()
    with writable_folder(tmp_path / "a" / "b", "--output"):
        (tmp_path / "a" / "b" / "model").touch()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["model"]
    (tmp_path / "file").touch()
    refused = pytest.raises(UserError, match="--output: .*file is a file")
    with refused, writable_folder(tmp_path / "file" / "out", "--output"):
        pass


def test_an_empty_file_system_or_repository_counts_as_empty(tmp_path):
    for name in ("lost+found", ".git"):
        (tmp_path / name).mkdir()
    (tmp_path / ".gitattributes").touch()
    assert other_files(tmp_path) == []
    (tmp_path / "thesis.txt").touch()
    assert other_files(tmp_path) == ["thesis.txt"]
