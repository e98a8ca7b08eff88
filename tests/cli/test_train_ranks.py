"""`pylate-flash train` with two processes over gloo, as torchrun would start them."""

from __future__ import annotations

import json
import os
import signal

import pytest

from pylate_flash.cli.common import UserError
from pylate_flash.cli.training.run import Progress
from tests.cli.commands import CPU, assert_one_clear_sentence, invoke
from tests.ranks import free_port, run_ranks

pytest.importorskip("pylate")

WORLD = 2


def train_as_rank(rank, world, port, arguments, folder, signalled, failing):
    """Run the command; at the end of step 3, some ranks fail, or get SIGTERM twice (torchrun forwards it)."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HF_HUB_OFFLINE": "1"}
    on_step_end = Progress.on_step_end

    def interrupted(self, args, state, control, **kwargs):
        on_step_end(self, args, state, control, **kwargs)
        if state.global_step == 3 and rank in failing:
            raise UserError("out of memory")
        if state.global_step == 3 and rank in signalled:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)

    Progress.on_step_end = interrupted
    result = invoke(*arguments)
    (folder / f"rank-{rank}").write_text(json.dumps([result.exit_code, result.stdout, result.stderr]))


def by_ranks(folder, arguments, signalled=(), failing=(), **kwargs):
    """Train with two ranks; return their exit codes, standard outputs and standard errors."""
    run_ranks(train_as_rank, (WORLD, free_port(), arguments, folder, signalled, failing), WORLD, **kwargs)
    return zip(*(json.loads((folder / f"rank-{rank}").read_text()) for rank in range(WORLD)), strict=True)


@pytest.fixture
def by_two(tmp_path, tiny_colbert_path, pairs):
    """Function that trains into a named folder; returns the folder, the arguments, and the results of `by_ranks`."""
    options = ["--batch-size", 2, "--epochs", 3, "--lr", 1e-3, "--loss", "contrastive"]

    def run(name, *more, **kwargs):
        arguments = ["train", "--data", pairs, "--model", tiny_colbert_path, "--output", tmp_path / name, *CPU]
        arguments = [str(argument) for argument in (*arguments, *options, *more)]
        return tmp_path / name, arguments, *by_ranks(tmp_path, arguments, **kwargs)

    return run


def test_a_run_of_two_that_is_stopped_resumes_to_the_same_weights(by_two):
    uninterrupted, _, codes, printed, notes = by_two("whole")
    assert codes == (0, 0), notes
    assert "of 2 lines in each of 2 processes" in printed[0]
    assert printed[1] == ""
    assert not [path.name for path in uninterrupted.iterdir() if path.name.startswith(("checkpoints", "unfinished"))]

    out, arguments, codes, _, notes = by_two("out", signalled=(1,))
    assert codes == (128 + signal.SIGTERM,) * 2
    assert f"interrupted after step 3 of 6; the current model is in {out / 'checkpoints' / 'checkpoint-3'}" in notes[0]
    assert notes[1] == ""
    assert_one_clear_sentence(invoke(*arguments, "--resume"), "--resume", "processes 2, not 1")
    _, arguments, codes, printed, notes = by_two("out")
    assert codes == (2, 2)
    assert "--resume continues it" in notes[0]
    assert notes[1] == ""
    _, _, codes, printed, notes = by_two("out", "--resume")
    assert codes == (0, 0), notes
    assert "6 of 6 steps done" in printed[0]
    assert (out / "model.safetensors").read_bytes() == (uninterrupted / "model.safetensors").read_bytes()


def test_an_error_of_one_process_is_said_by_it_and_ends_the_other(by_two):
    _, _, codes, _, notes = by_two("out", failing=(1,))
    assert codes[1] == 2
    assert notes[1] == "pylate-flash: out of memory\n"
    assert codes[0] != 0
