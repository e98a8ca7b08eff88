"""Run the command line in this process."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from pylate_flash import indexes
from pylate_flash.cli import app
from pylate_flash.cli.models import PYLATE, SENTENCE_TRANSFORMERS
from pylate_flash.hosts import HOSTS

CPU = ("--device", "cpu")
# The installed library that loads PyLate's checkpoints.
HERE = PYLATE if HOSTS[PYLATE].is_there() else SENTENCE_TRANSFORMERS


def invoke(*arguments, input=None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=input, prog_name="pylate-flash")


def succeed(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.stdout


def assert_one_clear_sentence(result, *parts):
    """Check for exit code 2 and a single error line on stderr with every part, after loading messages."""
    assert result.exit_code == 2, result.output + repr(result.exception)
    assert isinstance(result.exception, SystemExit)
    *notes, sentence = result.stderr.strip().splitlines()
    # sentence-transformers shows a progress bar while it creates the model card.
    known = ("Loading ", "Computing widget examples")
    assert all(note.startswith(known) or not note.strip() for note in notes), result.stderr
    assert sentence.startswith("pylate-flash: ")
    for part in parts:
        assert str(part) in sentence


def write_lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(data, model, output, *options):
    return invoke("train", "--data", data, "--model", model, "--output", output, *CPU, *options)


def trained(data, model, output, *options):
    result = train(data, model, output, *options)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result


def evaluate(beir, model, *options):
    return invoke("evaluate", "--data", beir, "--model", model, *CPU, *options)


def trainer_class():
    """The trainer class for PyLate checkpoints in this environment."""
    if HERE == PYLATE:
        from pylate_flash.trainer import ColBERTTrainer

        return ColBERTTrainer
    from pylate_flash.hosts.sentence_transformers.trainer import MultiVectorEncoderTrainer

    return MultiVectorEncoderTrainer


def model_class():
    """The model class for PyLate checkpoints in this environment."""
    if HERE == PYLATE:
        from pylate_flash.models import ColBERT

        return ColBERT
    from pylate_flash.hosts.sentence_transformers.models import MultiVectorEncoder

    return MultiVectorEncoder


def write_corpus(path, *ids):
    return write_lines(path, *({"_id": id_, "text": f"the text of {id_}"} for id_ in ids))


def ids_in(index):
    return indexes.Flat(index.parent, index.name, device="cpu").documents_ids
