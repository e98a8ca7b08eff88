"""`pylate-flash index build`: resuming after a kill, and building with several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pylate_flash import indexes
from pylate_flash.cli import indexing
from tests.cli.commands import CPU, ids_in, invoke, succeed, write_corpus
from tests.ranks import free_port, run_ranks

# Runs in a separate process that imports everything once. Each build is a forked child, killed after a fraction of the
# time that a full build takes from its first write to its last.
KILLED_BUILDER = """
import os, random, signal, sys, time
from pathlib import Path

import torch
from pylate_flash import indexes, models
from pylate_flash.cli import app, indexing

torch.set_num_threads(1)
indexing.SECONDS_BETWEEN_WRITES = 0.0
corpus, model, folder, kills = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])

def start(index):
    child = os.fork()
    if child:
        return child
    try:
        sys.stdout = sys.stderr = open(os.devnull, "w")
        here = ["--data", corpus, "--model", model, "--index", str(index), "--batch-size", "1", "--device", "cpu"]
        app(["index", "build", *here], prog_name="pylate-flash", standalone_mode=False)
    finally:
        os._exit(0)

def begun(index):
    try:
        return any(name.startswith("catalog.sqlite") for name in os.listdir(index))
    except FileNotFoundError:
        # It is made to try whether it can be, and goes again.
        return False

def wait_for_files(index, child):
    while not begun(index) and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.001)
    return time.monotonic()

child = start(folder / "whole")
began = wait_for_files(folder / "whole", child)
os.waitpid(child, 0)
seconds = time.monotonic() - began

chance = random.Random(0)
for kill in range(kills):
    index = folder / f"killed-{kill}"
    child = start(index)
    wait_for_files(index, child)
    # One in each share of the time, so that few kills are spread over a build as well.
    time.sleep(seconds * (kill + chance.random()) / kills)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_killed_build_goes_on_where_it_stopped(tmp_path, tiny_colbert_path):
    kills = int(os.environ.get("PYLATE_FLASH_TEST_KILLS", "3"))
    ids = [f"d{i}" for i in range(64)]
    corpus = write_corpus(tmp_path / "corpus.jsonl", *ids)
    arguments = [corpus, tiny_colbert_path, tmp_path, str(kills)]
    environment = {**os.environ, "PYTHONPATH": str(Path(indexes.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", KILLED_BUILDER, *arguments], check=True, env=environment, timeout=500)
    reference = indexes.Flat(tmp_path, "whole", device="cpu").get_documents_embeddings([ids])[0]
    for kill in range(kills):
        index = tmp_path / f"killed-{kill}"
        assert ids_in(index) == ids[: len(ids_in(index))]
        assert len(ids_in(index)) % 8 == 0
        succeed("index", "verify", "--index", index)
        succeed("index", "build", "--data", corpus, "--model", tiny_colbert_path, "--index", index, *CPU)
        assert ids_in(index) == ids
        succeed("index", "verify", "--index", index)
        actual = indexes.Flat(tmp_path, index.name, device="cpu").get_documents_embeddings([ids])[0]
        for document, expected in zip(actual, reference, strict=True):
            np.testing.assert_allclose(document.numpy(), expected.numpy(), atol=1e-5)


def build_as_rank(rank, world, port, arguments, folder, failure):
    """Run the command as torchrun would start it; rank 1 may fail in its second call of `encode`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    encode, calls = indexing.encode, []

    def failing(*args, **options):
        calls.append(args)
        if rank == 1 and len(calls) == 2 and failure == "it ends":
            os._exit(0)
        if rank == 1 and len(calls) == 2 and failure == "it fails":
            raise ValueError("no such token")
        return encode(*args, **options)

    indexing.encode, indexing.SECONDS_BETWEEN_WRITES = failing, 0.0
    result = invoke(*arguments)
    (folder / f"rank-{rank}").write_text(json.dumps([result.exit_code, result.stdout, result.stderr]))


def build_by_two(folder, arguments, failure=None, **kwargs):
    """Build an index with two ranks; return their exit codes and outputs."""
    run_ranks(build_as_rank, (2, free_port(), arguments, folder, failure), 2, **kwargs)
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*"))]


@pytest.fixture
def built_by_two(tmp_path, tiny_colbert_path):
    """Function that builds with two ranks, of which one may fail; returns their outputs and the build arguments."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", *(f"d{i}" for i in range(45)))
    build = ["index", "build", "--data", corpus, "--model", tiny_colbert_path, "--batch-size", "1", *CPU, "--index"]
    return lambda failure=None: (build_by_two(tmp_path, [*build, tmp_path / "index"], failure), build)


def test_two_processes_build_the_index_of_one(built_by_two, tmp_path):
    (first, second), build = built_by_two()
    assert first[0] == second[0] == 0
    assert f"{tmp_path / 'index'} holds 45 documents" in first[1]
    assert second[1:] == ["", ""]
    succeed(*build, tmp_path / "one")
    ids = ids_in(tmp_path / "one")
    assert ids_in(tmp_path / "index") == ids == [f"d{i}" for i in range(45)]
    actual, reference = (
        indexes.Flat(tmp_path, name, device="cpu").get_documents_embeddings([ids])[0] for name in ("index", "one")
    )
    for document, expected in zip(actual, reference, strict=True):
        np.testing.assert_allclose(document.numpy(), expected.numpy(), atol=1e-6)
    repeated, _ = built_by_two()
    assert "Nothing to do" in repeated[0][1]
    assert [code for code, *_ in repeated] == [0, 0]


@pytest.mark.parametrize(
    ("failure", "sentence"),
    [
        ("it ends", "another process of the group has ended"),
        ("it fails", "rank 1 could not encode: ValueError: no such"),
    ],
)
def test_a_process_that_fails_ends_all_in_one_sentence(failure, sentence, built_by_two, tmp_path):
    outputs, build = built_by_two(failure)
    code, _, stderr = outputs[0]
    assert code == 2
    *notes, last = stderr.strip().splitlines()
    assert last.startswith("pylate-flash: ")
    assert sentence in last
    assert not any(note.startswith("pylate-flash: ") for note in notes)
    # Documents added before the failure stay, and a single process can resume.
    assert ids_in(tmp_path / "index") == [f"d{i}" for i in range(16)]
    succeed("index", "verify", "--index", tmp_path / "index")
    succeed(*build, tmp_path / "index")
    assert len(ids_in(tmp_path / "index")) == 45
