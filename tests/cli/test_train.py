from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pylate_flash.cli.common import UserError
from pylate_flash.cli.models import PYLATE
from pylate_flash.cli.training.checkpoints import Checkpoints
from pylate_flash.cli.training.run import Progress, StopRequest
from pylate_flash.training import grad_cache
from tests.cli.commands import (
    HERE,
    assert_one_clear_sentence,
    model_class,
    train,
    trained,
    trainer_class,
    write_lines,
)
from tests.pylate_checkpoint import WORDS

LISTS = {"query": "q", "documents": ["one answer", "another"], "scores": [2.0, 1.0]}


def interrupt_after(step, monkeypatch, signals=(signal.SIGINT,)):
    """Patch the callback to send signals to this process at the end of a step."""
    on_step_end = Progress.on_step_end

    def interrupted(self, args, state, control, **kwargs):
        on_step_end(self, args, state, control, **kwargs)
        if state.global_step == step:
            for number in signals:
                signal.raise_signal(number)

    monkeypatch.setattr(Progress, "on_step_end", interrupted)


@pytest.mark.parametrize("loss", ["cached", "distillation"])
def test_train_with_the_other_losses(loss, pylate_checkpoint, pairs, tmp_path):
    if loss == "distillation":
        write_lines(pairs, *[LISTS] * 4)
    options = ("--loss", loss, "--batch-size", 4, "--mini-batch-size", 2, "--temperature", 0.5)
    result = trained(pairs, pylate_checkpoint, tmp_path / "out", *options, "--max-steps", 1, "--scorer", "torch")
    assert json.loads((tmp_path / "out" / "config_sentence_transformers.json").read_text())["scorer"] == "torch"
    unused = ["--mini-batch-size"] * (loss == "distillation")
    # sentence-transformers' distillation loss has a temperature.
    unused += ["--temperature"] * (loss == "distillation" and HERE == PYLATE)
    notes = [line for line in result.stderr.splitlines() if "note: " in line]
    assert notes == [f"pylate-flash: note: {option} has no effect with --loss {loss}" for option in unused]


def test_train_with_mini_batches_of_so_many_tokens(pylate_checkpoint, pairs, tmp_path, monkeypatch):
    limits, cut = [], grad_cache.mini_batches
    monkeypatch.setattr(grad_cache, "mini_batches", lambda *arguments: limits.append(arguments[2]) or cut(*arguments))
    options = ("--loss", "cached", "--batch-size", 4, "--max-steps", 1, "--mini-batch-tokens", 40)
    trained(pairs, pylate_checkpoint, tmp_path / "out", *options)
    trained(pairs, pylate_checkpoint, tmp_path / "both", *options, "--mini-batch-size", 3)
    # sentence-transformers' loss takes only one of the two.
    assert [tuple(limit) for limit in limits] == [(None, 40), (3 if HERE == PYLATE else None, 40)]
    result = trained(pairs, pylate_checkpoint, tmp_path / "none", "--max-steps", 1, "--mini-batch-tokens", "auto")
    assert "note: --mini-batch-tokens has no effect with --loss contrastive" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--mini-batch-tokens", "many"),
            "--mini-batch-tokens must be a number of at least 1, or auto, got many",
        ),
        (("--mini-batch-tokens", "0"), "--mini-batch-tokens must be a number of at least 1, or auto, got 0"),
        (("--mini-batch-tokens", "auto"), "--mini-batch-tokens auto needs a GPU"),
        (("--mini-batch-tokens", "auto", "--scorer", "torch"), "needs --scorer pylate_flash or auto, got torch"),
        (("--precision", "fp16"), "--precision fp16 needs a GPU"),
        (("--eval-steps", "2"), "--eval-steps needs --eval-data"),
        (("--eval-data", "no-such-file"), "there is no file no-such-file"),
        (("--temperature", "1e-300"), "--temperature must be a finite number above 0, got 1e-300"),
        (("--mini-batch-tokens", "9" * 5000), "--mini-batch-tokens must be a number of at least 1"),
    ],
)
def test_train_refuses_what_cannot_be(options, message, pylate_checkpoint, pairs, tmp_path):
    result = train(pairs, pylate_checkpoint, tmp_path / "out", "--loss", "cached", *options)
    assert_one_clear_sentence(result, message)
    assert not (tmp_path / "out").exists()


def test_a_single_step_has_a_learning_rate(pylate_checkpoint, pairs, tmp_path):
    trained(pairs, pylate_checkpoint, tmp_path / "out", "--max-steps", 1)
    before, after = (path / "1_Dense" / "model.safetensors" for path in (pylate_checkpoint, tmp_path / "out"))
    assert before.read_bytes() != after.read_bytes()


def test_train_finds_the_largest_mini_batch(pylate_checkpoint, pairs, tmp_path, monkeypatch):
    """With the CPU treated as a GPU that has room for all documents of a batch."""
    monkeypatch.setattr("pylate_flash.cli.train._check_device", lambda *_: None)
    options = ("--loss", "cached", "--batch-size", 4, "--max-steps", 1, "--mini-batch-tokens", "auto")
    result = trained(pairs, pylate_checkpoint, tmp_path / "out", *options)
    documents = len(json.loads(pairs.read_text().splitlines()[0])) - 1
    assert f"mini-batches of at most {4 * documents * 12} tokens, by trial on cpu" in result.stdout.splitlines()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_train_computes_in_the_precision_that_is_asked_for(precision, pylate_checkpoint, pairs, tmp_path, monkeypatch):
    result, forward = set(), torch.nn.Linear.forward

    def observed(self, states):
        result.add(self.training and forward(self, states).dtype)
        return forward(self, states)

    monkeypatch.setattr(torch.nn.Linear, "forward", observed)
    trained(pairs, pylate_checkpoint, tmp_path / "out", "--max-steps", 1, "--precision", precision)
    assert result - {False} == {torch.bfloat16 if precision == "bf16" else torch.float32}


@pytest.mark.parametrize("loss", ["contrastive", "cached", "distillation"])
def test_train_evaluates_on_lines_of_their_own(loss, pylate_checkpoint, pairs, tmp_path):
    """After each epoch, or every `--eval-steps`; evaluation does not change the trained weights."""
    if loss == "distillation":
        write_lines(pairs, *({**LISTS, "query": f"{WORDS[i]} new"} for i in range(8)))
    lines = pairs.read_text().splitlines()
    pairs.write_text("\n".join(lines[:6]))
    eval_data = tmp_path / "eval.jsonl"
    eval_data.write_text("\n".join(lines[6:]))
    options = ("--loss", loss, "--batch-size", 3, "--epochs", 2)
    trained(pairs, pylate_checkpoint, tmp_path / "without", *options)
    each_epoch = trained(pairs, pylate_checkpoint, tmp_path / "epochs", *options, "--eval-data", eval_data)
    assert f"{len(lines) - 6} evaluation lines" in each_epoch.stdout.splitlines()
    each_step = trained(
        pairs, pylate_checkpoint, tmp_path / "steps", *options, "--eval-data", eval_data, "--eval-steps", 1
    )
    for result, steps in ((each_epoch, [2, 4]), (each_step, [1, 2, 3, 4])):
        shown = [line for line in result.stderr.splitlines() if line.endswith("on --eval-data")]
        assert [line.partition(", loss ")[0] for line in shown] == [f"step {step} of 4" for step in steps]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("without", "epochs", "steps")]
    for name, tensor in weights[0].items():
        assert torch.equal(weights[1][name], tensor)
        assert torch.equal(weights[2][name], tensor)


def test_train_says_what_it_trains_on(pylate_checkpoint, tmp_path):
    row = {"query": "question", "positive": "an answer", "negative_2": "b", "negative_1": "a", "url": "x", "id": 1}
    data = write_lines(
        tmp_path / "train.jsonl",
        *({key: f"{text} {i}" if isinstance(text, str) else text for key, text in row.items()} for i in range(6)),
    )
    result = trained(data, pylate_checkpoint, tmp_path / "out", "--batch-size", 4, "--epochs", 1.5)
    printed = result.stdout.splitlines()
    summary = printed.pop(-2)
    assert re.fullmatch(r"3 of 3 steps done in \d\d:\d\d; loss \d\S* at the start, \d\S* at the end", summary)
    # The last two steps do not fill a logging interval; a separate line logs their loss.
    assert f"step 3 of 3, loss {summary.split()[-4]}, " in result.stderr
    assert printed == [
        "6 lines (query, positive, negative_1, negative_2), contrastive loss, scorer pylate_flash, cpu",
        "2 hard negatives per query, 11 negatives including in-batch ones; longest query 10 characters, longest "
        "document 11, truncated to 8 and 12 tokens",
        "3 steps of 4 lines, 1.5 epochs",
        f"Model written to {tmp_path / 'out'}",
    ]
    assert result.stderr.count("note: ") == 1
    assert "note: unused keys: 'url', 'id'\n" in result.stderr
    first, second, *more = result.stderr.splitlines()
    assert (first, second) == (f"Loading {data} ...", f"Loading the model {pylate_checkpoint} ...")
    assert next(line for line in more if line.startswith("step")).startswith("step 1 of 3, loss ")


def test_train_replaces_a_model_only_when_asked_to(pylate_checkpoint, pairs, tmp_path):
    """Only model files are replaced, including weights in other formats; other files stay."""
    old = tmp_path / "old"
    shutil.copytree(pylate_checkpoint, old)
    (old / ".git").mkdir()
    for name in (".git/HEAD", "notes.txt", "pytorch_model.bin"):
        (old / name).touch()
    result = trained(pairs, pylate_checkpoint, old, "--max-steps", 1, "--overwrite")
    assert result.stdout.endswith(f"Model written to {old}; other files kept: .git, notes.txt\n")
    trained(pairs, pylate_checkpoint, tmp_path / "new", "--max-steps", 1)
    assert {path.name for path in old.iterdir()} == {
        *(path.name for path in (tmp_path / "new").iterdir()), ".git", "notes.txt",
    }  # fmt: skip
    assert (old / ".git" / "HEAD").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old", "train.jsonl"]


def test_train_writes_into_a_linked_folder_and_into_the_current_one(pylate_checkpoint, pairs, tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    trained(pairs, pylate_checkpoint, tmp_path / "link", "--max-steps", 1)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "modules.json").is_file()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    trained(pairs, pylate_checkpoint, ".", "--max-steps", 1)
    assert (tmp_path / "here" / "modules.json").is_file()


def test_train_tries_the_output_before_it_loads_a_model(pairs, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for output, named, message in (("file/out", "file", "is a file"), ("file", "file", "is a file"), ("loop",) * 3):
        assert_one_clear_sentence(train(pairs, "no-such/model", tmp_path / output), tmp_path / named, message)


def test_an_interrupted_run_resumes_to_the_same_weights(pylate_checkpoint, pairs, tmp_path, monkeypatch):
    """Interrupted in the middle of the second of three epochs."""
    options = ("--batch-size", 4, "--epochs", 3, "--lr", 1e-3)
    uninterrupted, out = tmp_path / "whole", tmp_path / "out"
    trained(pairs, pylate_checkpoint, uninterrupted, *options)
    with monkeypatch.context() as patch:
        interrupt_after(3, patch)
        result = train(pairs, pylate_checkpoint, out, *options)
    assert result.exit_code == 130
    checkpoint = out / "checkpoints" / "checkpoint-3"
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"pylate-flash: interrupted after step 3 of 6; the current model is in {checkpoint}")
    assert "the same command with --resume" in last
    assert [path.name for path in out.iterdir()] == ["checkpoints"]
    assert (checkpoint / "modules.json").is_file()

    # A new run neither overwrites it silently nor continues it with other settings.
    assert_one_clear_sentence(train(pairs, pylate_checkpoint, out, *options), "--resume", "--overwrite")
    changed = train(pairs, pylate_checkpoint, out, *options[:-1], 1e-4, "--resume", "--query-length", 8)
    assert_one_clear_sentence(changed, "was started with --lr 0.001, not 0.0001, --query-length unset, not 8")
    with pairs.open("a") as lines:
        lines.write('{"query": "q", "positive": "p"}\n')
    assert_one_clear_sentence(train(pairs, pylate_checkpoint, out, *options, "--resume"), "--data has changed")
    pairs.write_text("".join(pairs.read_text().splitlines(keepends=True)[:-1]))
    # A checkpoint whose writing was killed.
    (out / "checkpoints" / "checkpoint-4").mkdir()
    (out / "checkpoints" / "checkpoint-4" / "trainer_state.json").write_text("{")

    for file in ("model.safetensors", "optimizer.pt"):
        original = (checkpoint / file).read_bytes()
        (checkpoint / file).write_bytes(original[:100])
        damaged = train(pairs, pylate_checkpoint, out, *options, "--resume")
        assert damaged.exit_code == 2
        assert f"--resume: the checkpoint {checkpoint} cannot be loaded: " in damaged.stderr.splitlines()[-1]
        (checkpoint / file).write_bytes(original)

    result = trained(pairs, pylate_checkpoint, out, *options, "--resume")
    assert [line.split(",")[0] for line in result.stderr.splitlines() if line.startswith("step ")] == ["step 6 of 6"]
    assert "6 of 6 steps done in " in result.stdout
    assert content(out) == content(uninterrupted)
    assert_one_clear_sentence(train(pairs, pylate_checkpoint, out, *options, "--resume"), "--overwrite replaces it")


@pytest.mark.parametrize("evaluating", [False, True])
def test_a_signal_leaves_out_the_evaluation(evaluating, pylate_checkpoint, pairs, tmp_path, monkeypatch):
    """Whether the evaluation is due or already running; the weights equal those of an uninterrupted run.

    The model has dropout: evaluation must not consume random numbers of the training.
    """
    model = tmp_path / "model"
    shutil.copytree(pylate_checkpoint, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"hidden_dropout_prob": 0.1}))
    options = ("--batch-size", 4, "--epochs", 3, "--lr", 1e-3, "--eval-data", pairs)
    uninterrupted, out = tmp_path / "whole", tmp_path / "out"
    assert "on --eval-data" in trained(pairs, model, uninterrupted, *options).stderr
    batches = []

    def interrupt(self, args, state, control, **kwargs):
        batches.append(state.global_step)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        if evaluating:
            patch.setattr(Progress, "on_prediction_step", interrupt)
        else:
            interrupt_after(2, patch)
        result = train(pairs, model, out, *options)
    assert result.exit_code == 130
    assert "interrupted after step 2 of 6" in result.stderr.splitlines()[-1]
    assert "on --eval-data" not in result.stderr
    # The evaluation has two batches, and stops after the first.
    assert batches == [2] * evaluating
    trained(pairs, model, out, *options, "--resume")
    assert content(out) == content(uninterrupted)


def content(folder):
    """Files of a model, except the model card, which contains the time."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "README.md")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_sigterm_keeps_the_old_model_and_the_last_checkpoints(pylate_checkpoint, pairs, tmp_path, monkeypatch):
    old = tmp_path / "old"
    shutil.copytree(pylate_checkpoint, old)
    before = content(old)
    interrupt_after(4, monkeypatch, (signal.SIGTERM,))
    options = ("--batch-size", 2, "--max-steps", 6, "--overwrite", "--save-steps", 1)
    result = train(pairs, pylate_checkpoint, old, *options)
    assert result.exit_code == 128 + signal.SIGTERM
    assert "with --resume instead of --overwrite continues" in result.stderr
    results = content(old)
    assert {name: results[name] for name in before} == before
    names = sorted(path.name for path in (old / "checkpoints").iterdir())
    assert names == ["checkpoint-3", "checkpoint-4", "run.json"]


def test_what_a_run_left_that_was_killed_early_is_in_nobodys_way(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.begin({"--lr": 1.0})
    (checkpoints.folder / "checkpoint-1").mkdir()
    assert not checkpoints.exist()
    with pytest.raises(UserError, match="--resume: there is no checkpoint in"):
        checkpoints.check({"--lr": 1.0})
    checkpoints.tidy()
    assert list(tmp_path.iterdir()) == []


def test_settings_that_are_damaged_are_not_resumed_from(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.begin({"--lr": 1.0})
    (checkpoints.folder / "checkpoint-1").mkdir()
    (checkpoints.folder / "checkpoint-1" / "trainer_state.json").write_text('{"global_step": 1}')
    for damaged in ("{", "[]", "{}", "3"):
        (checkpoints.folder / "run.json").write_text(damaged)
        with pytest.raises(UserError, match=r"--resume: .*run.json is damaged"):
            checkpoints.check({"--lr": 1.0})


def test_a_second_signal_interrupts_at_once():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as request:
        signal.raise_signal(signal.SIGTERM)
        assert request.signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_settings_that_cannot_be_written_leave_nothing(pylate_checkpoint, pairs, tmp_path, monkeypatch):
    def full(self, *arguments, **options):
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    result = train(pairs, pylate_checkpoint, tmp_path / "out")
    assert_one_clear_sentence(result, "--output: No space left on device")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_cannot_be_written_does_not_lose_the_model(pylate_checkpoint, pairs, tmp_path, monkeypatch):
    def full(self, folder):
        raise RuntimeError("No space left on device")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(trainer_class(), "_save_optimizer_and_scheduler", full)
    result = train(pairs, pylate_checkpoint, tmp_path / "out", "--batch-size", 4, "--save-steps", 1)
    assert result.exit_code == 2
    sentence = result.stderr.splitlines()[-1]
    assert sentence.startswith("pylate-flash: a checkpoint could not be written: No space left on device")
    assert Path(sentence.split(" is in ")[1], "modules.json").is_file()
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_and_a_model_that_cannot_be_written_leave_the_last_checkpoint(
    pylate_checkpoint, pairs, tmp_path, monkeypatch
):
    """When the output disk and the disk of temporary files are both full."""
    save = model_class().save_pretrained

    def full(self, path, *arguments, **options):
        save(self, path, *arguments, **options)
        if Path(path).name != "checkpoint-1":
            raise RuntimeError("No space left on device")

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(model_class(), "save_pretrained", full)
    out = tmp_path / "out"
    result = train(pairs, pylate_checkpoint, out, "--batch-size", 2, "--save-steps", 1)
    assert result.exit_code == 2
    full_twice = "No space left on device; nor could the model be saved to a temporary folder: No space left on dev"
    last = out / "checkpoints" / "checkpoint-1"
    sentence = result.stderr.splitlines()[-1]
    assert sentence.startswith(f"pylate-flash: a checkpoint could not be written: {full_twice}")
    assert sentence.endswith(f"; the last complete checkpoint is {last}, and --resume continues from it")
    assert list((tmp_path / "temporary").iterdir()) == []
    monkeypatch.setattr(model_class(), "save_pretrained", save)
    trained(pairs, pylate_checkpoint, out, "--batch-size", 2, "--resume")


def test_train_with_a_loss_that_is_not_finite_writes_nothing(pylate_checkpoint, pairs, tmp_path):
    result = train(pairs, pylate_checkpoint, tmp_path / "out", "--lr", 1e38, "--batch-size", 2, "--save-steps", 1)
    assert result.exit_code == 2
    assert "not finite" in result.stderr.splitlines()[-1]
    assert "a lower learning rate may help" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "out" / "modules.json").exists()
    for weights in (tmp_path / "out").rglob("*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(weights).values())


def test_a_model_that_is_not_finite_is_not_written(pylate_checkpoint, pairs, tmp_path, monkeypatch):
    """Such a model is not trained either."""

    def spoil(self, **kwargs):
        self.state.log_history = [{"loss": 1.0}]
        with torch.no_grad():
            self.model[1].linear.weight[3, 4] = float("inf")

    with monkeypatch.context() as patch:
        patch.setattr(trainer_class(), "train", spoil)
        result = train(pairs, pylate_checkpoint, tmp_path / "out")
    assert_one_clear_sentence(result, "the trained model is not finite", "1.linear.weight", "--lr")
    assert not (tmp_path / "out").exists()

    shutil.copytree(pylate_checkpoint, tmp_path / "spoilt")
    weights = load_file(tmp_path / "spoilt" / "1_Dense" / "model.safetensors")
    weights["linear.weight"][0, 0] = float("nan")
    save_file(weights, tmp_path / "spoilt" / "1_Dense" / "model.safetensors")
    result = train(pairs, tmp_path / "spoilt", tmp_path / "out")
    assert_one_clear_sentence(result, "the model in", "its weights are broken")


@pytest.mark.parametrize(
    ("line", "parts"),
    [("{", ["not valid JSON"]), ('{"query": "q"}', ["'positive' is missing"]), ("[]", ["expected a JSON object"])],
)
def test_train_names_file_and_line(pairs, pylate_checkpoint, tmp_path, line, parts):
    with pairs.open("a") as lines:
        lines.write(line + "\n")
    result = train(pairs, pylate_checkpoint, tmp_path / "out")
    assert_one_clear_sentence(result, f"{pairs}, line 9", *parts)
    assert not (tmp_path / "out").exists()


def test_train_reads_a_pipe(pairs, pylate_checkpoint, tmp_path):
    """The lines of a pipe can be read only once."""
    reading, writing = os.pipe()
    os.write(writing, pairs.read_bytes())
    os.close(writing)
    result = trained(Path(f"/dev/fd/{reading}"), pylate_checkpoint, tmp_path / "out", "--max-steps", 1)
    assert "8 lines (query, positive)" in result.stdout
    os.close(reading)


@pytest.mark.parametrize("name", ["--temperature", "--lr", "--epochs"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_train_refuses_numbers_that_are_none(pairs, pylate_checkpoint, tmp_path, name, value):
    result = train(pairs, pylate_checkpoint, tmp_path / "out", name, value)
    assert_one_clear_sentence(result, f"{name} must be a finite number above 0, got {value}")


@pytest.mark.parametrize(("name", "value"), [("--seed", -1), ("--seed", 2**32), ("--max-steps", 0)])
def test_train_refuses_numbers_out_of_range(pairs, pylate_checkpoint, tmp_path, name, value):
    result = train(pairs, pylate_checkpoint, tmp_path / "out", name, value)
    assert result.exit_code == 2
    assert f"'{name}'" in result.stderr
    assert isinstance(result.exception, SystemExit)
    assert not (tmp_path / "out").exists()


def test_train_names_options_that_exclude_each_other(pairs, pylate_checkpoint, tmp_path):
    for options in (("--resume", "--overwrite"), ("--max-steps", 3, "--epochs", 1.0)):
        result = train(pairs, pylate_checkpoint, tmp_path / "out", *options)
        assert_one_clear_sentence(result, *(part for part in options if str(part).startswith("--")), "exclude")


def test_train_checks_its_arguments_before_it_starts(pairs, pylate_checkpoint, tmp_path):
    out = tmp_path / "out"
    assert_one_clear_sentence(train(tmp_path / "no.jsonl", pylate_checkpoint, out), "no file", tmp_path / "no.jsonl")
    assert_one_clear_sentence(train(tmp_path, pylate_checkpoint, out), tmp_path, "is a folder")
    result = train(pairs, pylate_checkpoint, tmp_path)
    assert_one_clear_sentence(result, tmp_path, "holds files that are not a model (train.jsonl)")
    result = train(pairs, pylate_checkpoint, pylate_checkpoint)
    assert_one_clear_sentence(result, "there is already a model in", "--overwrite")
    assert_one_clear_sentence(train(pairs, pylate_checkpoint, out, "--device", "nonsense"), "--device nonsense")
    assert_one_clear_sentence(train(pairs, pylate_checkpoint, out, "--resume"), "there is no checkpoint in")
    assert_one_clear_sentence(train(pairs, pylate_checkpoint, out, "--batch-size", 1), "--batch-size", "no negatives")
    for option in ("--query-length", "--document-length"):
        result = train(pairs, pylate_checkpoint, out, option, 100_000)
        assert_one_clear_sentence(result, f"{option} 100000 is more than the 32 tokens that the model in")
    assert not out.exists()
    (out / "unfinished-model-x" / "model").mkdir(parents=True)
    assert_one_clear_sentence(train(pairs, pylate_checkpoint, out), "was killed", out / "unfinished-model-x")
    shutil.rmtree(out)
    (out / "checkpoints" / "mine").mkdir(parents=True)
    assert_one_clear_sentence(train(pairs, pylate_checkpoint, out, "--overwrite"), "was not created by `train`")
