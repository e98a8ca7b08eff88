"""Run the command line in this process."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from pylate_flash import indexes
from pylate_flash.cli import app

CPU = ("--device", "cpu")


def invoke(*arguments, input=None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=input, prog_name="pylate-flash")


def succeed(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout


def assert_one_clear_sentence(result, *parts):
    """Exit code 2, and on stderr one line that holds every part, after notes of what was loaded."""
    assert result.exit_code == 2, result.output + repr(result.exception)
    assert isinstance(result.exception, SystemExit)
    *notes, sentence = result.stderr.strip().splitlines()
    assert all(note.startswith("Loading ") for note in notes), result.stderr
    assert sentence.startswith("pylate-flash: ")
    for part in parts:
        assert str(part) in sentence


def write_corpus(path, *ids):
    path.write_text("".join(json.dumps({"_id": id_, "text": f"the text of {id_}"}) + "\n" for id_ in ids))
    return path


def ids_in(index):
    return indexes.Flat(index.parent, index.name, device="cpu").documents_ids
