"""Damaged files: every command exits with 0, or with 2 and one sentence, and changes only its output.

`PYLATE_FLASH_FUZZ_CASES=2000 pytest tests/cli/test_fuzz.py` runs more than the few default cases. A case is a target
name and a seed, which failure messages contain.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from tests.cli.commands import invoke, succeed
from tests.cli.mutations import mutate, snapshot

CASES = int(os.environ.get("PYLATE_FLASH_FUZZ_CASES", "60"))
# Output folder of the commands.
OUTPUT = "out"
MODEL = ("--model", "model", "--device", "cpu")
EVALUATE = ("evaluate", "--data", "beir", *MODEL)
TRAIN = ("train", *MODEL, "--output", OUTPUT, "--batch-size", 2, "--max-steps", 1)
# Files that no command reads.
UNREAD = ("README.md", "reserve")
# The file to damage (or a folder, of which a random file is damaged), the command that reads it, and its weight among
# the cases.
TARGETS = {
    "corpus": ("beir/corpus.jsonl", EVALUATE, 2),
    "queries": ("beir/queries.jsonl", EVALUATE, 1),
    "qrels": ("beir/qrels/test.tsv", EVALUATE, 2),
    "pairs": ("pairs.jsonl", (*TRAIN, "--data", "pairs.jsonl"), 2),
    "lists": ("lists.jsonl", (*TRAIN, "--data", "lists.jsonl", "--loss", "distillation"), 2),
    "built": ("beir/corpus.jsonl", ("index", "--data", "beir/corpus.jsonl", "--index", OUTPUT, *MODEL), 1),
    "asked": ("beir/queries.jsonl", ("search", "--queries", "beir/queries.jsonl", "--index", "index", *MODEL), 1),
    "catalog": ("index", ("search", "cats", "--index", "index", *MODEL), 2),
    "segments": ("compacted", ("search", "cats", "--index", "compacted", *MODEL), 3),
    "verified": ("compacted", ("index", "verify", "--index", "compacted"), 2),
    "mined": ("pairs.jsonl", ("mine", *MODEL, "--output", OUTPUT, "--data", "pairs.jsonl", "--num-negatives", 1), 1),
    "model": ("model", EVALUATE, 6),
}


@pytest.fixture(scope="module")
def workspace(pylate_checkpoint, tmp_path_factory):
    """Minimal inputs of all commands: a model with a small vocabulary, an index of one document."""
    pytest.importorskip("ranx")
    folder = tmp_path_factory.mktemp("fuzz") / "workspace"
    shutil.copytree(pylate_checkpoint, folder / "model")
    (folder / "beir" / "qrels").mkdir(parents=True)
    (folder / "beir" / "corpus.jsonl").write_text('{"_id": "d1", "title": "cats", "text": "cats and dogs"}\n')
    (folder / "beir" / "queries.jsonl").write_text('{"_id": "q1", "text": "cats"}\n')
    (folder / "beir" / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\n")
    pairs = [
        {"query": "cats", "positive": "dogs", "negative": "and"},
        {"query": "and", "positive": "cats", "negative": "a"},
    ]
    lists = [{"query": "cats", "documents": ["dogs", "and"], "scores": [1.5, 0]} for _ in range(2)]
    for name, rows in (("pairs", pairs), ("lists", lists)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        succeed(*EVALUATE, "--index", "index")
        shutil.copytree("index", "compacted")
        succeed("index", "compact", "--index", "compacted")
    return folder


@pytest.mark.parametrize("target", TARGETS)
def test_damaged_files_end_in_one_sentence_or_do_no_harm(target, workspace, tmp_path, monkeypatch):
    share = TARGETS[target][2] / sum(share for _, _, share in TARGETS.values())
    failures = []
    for seed in range(max(1, round(CASES * share))):
        shutil.rmtree(tmp_path / "case", ignore_errors=True)
        work = shutil.copytree(workspace, tmp_path / "case" / "work")
        monkeypatch.chdir(work)
        damage = _damage(random.Random(f"{target} {seed}"), TARGETS[target][0])
        before = snapshot(tmp_path)
        result = invoke(*TARGETS[target][1])
        problems = _wrong_end(result) + _changes(before, snapshot(tmp_path))
        if problems:
            failures.append(f"{target} {seed}: {damage}: {'; '.join(problems)}")
    assert not failures, "\n".join([f"{len(failures)} cases:", *failures])


def _damage(rng, target):
    """Damage a file, or a random file of a folder."""
    file = Path(target)
    if file.is_dir():
        files = sorted(path for path in file.rglob("*") if path.is_file() and path.name not in UNREAD)
        file = rng.choice(files)
    return f"{file} {mutate(rng, file)}"


def _wrong_end(result):
    if result.exit_code == 0 and result.exception is None:
        return []
    sentences = [line for line in result.stderr.splitlines() if line.startswith("pylate-flash: ")]
    if result.exit_code == 2 and isinstance(result.exception, SystemExit) and len(sentences) == 1:
        return ["a traceback"] if "Traceback" in result.stderr else []
    return [f"exit {result.exit_code}, {result.exception!r}, {result.stderr[-300:]!r}"]


def _changes(before, after):
    names = sorted(name for name in before.keys() | after.keys() if before.get(name, b"") != after.get(name, b""))
    strangers = [name for name in names if Path(name).parts[:3] != ("case", "work", OUTPUT)]
    return [f"changed {', '.join(strangers)}"] if strangers else []
