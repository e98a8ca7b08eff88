"""`pylate-flash train`."""

from __future__ import annotations

import ctypes
import math
import re
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer
from tqdm import tqdm

from ..encoding.texts import read_lengths
from . import options
from .common import UserError, check_device, explained, loading, note, say
from .files import check_file, writable_folder
from .models import (
    SENTENCE_TRANSFORMERS,
    check_encoding_host,
    check_model_name,
    check_scorer,
    host_of,
    load_model,
)
from .ranks import device_of_rank, together
from .training.checkpoints import CHECKPOINTS, Checkpoints
from .training.hosts import USED_BY, Loss, make_loss, make_trainer
from .training.output import check_output, first_non_finite, saved_elsewhere, write_model

if TYPE_CHECKING:
    from ..data.training import TrainingData
    from ..training.trainer_mixin import MeasuredTrainer
    from .models import Model
    from .training.run import StopRequest


# The options that must not change if a run is resumed.
_SETTINGS = (
    *("data", "model", "loss", "batch_size", "epochs", "max_steps", "lr", "temperature", "query_length"),
    *("document_length", "scorer", "seed", "precision", "eval_data", "eval_steps"),
)


# The compute precision; weights are float32.
Precision = Literal["fp32", "bf16", "fp16"]


def train(
    context: typer.Context,
    data: Annotated[
        Path,
        typer.Option(
            help='JSON lines, a file or a pipe. A line: `{"query": "...", "positive": "...", "negative": "..."}`; with '
            '`--loss distillation`: `{"query": "...", "documents": ["...", "..."], "scores": [9.5, 0.3]}`.'
        ),
    ],
    model: Annotated[
        str, typer.Option(help="Encoder, ColBERT model or MultiVectorEncoder to start from: a folder or a name.")
    ],
    output: Annotated[Path, typer.Option(help="Folder for the trained model, and for checkpoints during training.")],
    loss: Annotated[
        Loss,
        typer.Option(
            metavar="NAME",
            help="contrastive, cached or distillation. `cached` trains large batches in the memory of small ones.",
        ),
    ] = "contrastive",
    batch_size: Annotated[
        int,
        typer.Option(
            min=1,
            help="Maximum lines per step and device. With `contrastive` and `cached`, lines that share a text are "
            "never in the same batch.",
        ),
    ] = 32,
    mini_batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Texts encoded at a time, with `--loss cached`. Default: {options.MINI_BATCH_SIZE}, or as many "
            "as `--mini-batch-tokens` allows.",
        ),
    ] = None,
    mini_batch_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Maximum tokens encoded at a time, with `--loss cached`. `auto`: as many as fit into GPU memory, "
            "determined by trial.",
        ),
    ] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the data. Not with `--max-steps`.")] = 1.0,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Number of training steps. Not with `--epochs`, which it replaces.")
    ] = None,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 3e-5,
    temperature: Annotated[
        float,
        typer.Option(
            help="Divides the scores in the contrastive losses, and those of a MultiVectorEncoder in distillation. 1 "
            "suits sums of the maxima of 32 query tokens, which differ by whole units; 0.02, common for single "
            "cosines, would be far too low."
        ),
    ] = 1.0,
    query_length: options.QueryLength = None,
    document_length: options.DocumentLength = None,
    scorer: Annotated[
        options.Scorer,
        typer.Option(
            metavar="NAME",
            help=f"Computes the scores, and is saved with the model: {options.SCORERS}. flash and lik "
            "work with PyLate only.",
        ),
    ] = "pylate_flash",
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of the order of lines, of dropout, and of a new projection.")
    ] = options.SEED,
    precision: Annotated[
        Precision,
        typer.Option(
            help="`bf16` and `fp16` compute in half precision where that is safe (autocast); `fp16` needs a GPU."
        ),
    ] = "fp32",
    eval_data: Annotated[
        Path | None,
        typer.Option(help="Held-out lines in the format of `--data`: their loss is shown during training."),
    ] = None,
    eval_steps: Annotated[
        int | None,
        typer.Option(min=1, help="Evaluate on `--eval-data` every N steps. Default: after each epoch."),
    ] = None,
    device: options.Device = None,
    save_steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Write a checkpoint every N steps. The last two are kept, in `checkpoints` in the output folder, "
            "until the model is written.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue from the last checkpoint of an interrupted run, as if it had not been interrupted. The "
            "other options must be unchanged. Not with `--overwrite`.",
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace an existing model, or the checkpoints of an interrupted run; other files are kept. Not with "
            "`--resume`.",
        ),
    ] = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Train a ColBERT model, or a MultiVectorEncoder of sentence-transformers 6, on a file of JSON lines.

    The type of `--model` and the installed libraries decide which of the two libraries trains it.

    `contrastive` and `cached` expect `{"query": "...", "positive": "...", "negative": "..."}` in each line, with any
    number of hard negatives, the same in every line: none, `negative`, or `negative_1`, `negative_2` and so on. The
    other documents of a batch are negatives too. `distillation` expects
    `{"query": "...", "documents": ["...", ...], "scores": [1.5, ...]}` with a teacher's score for each document.

    Ctrl-C or SIGTERM ends the training after the current step and writes a checkpoint, which is also a model;
    `--resume` continues from it. Once the model is written, the checkpoints are removed.

    Under `torchrun --nproc-per-node N $(which pylate-flash) train ...`, N processes train together, each on its own
    GPU: every step takes one batch from each. The first writes the model. `--resume` needs the same number again.
    """
    check_encoding_host("pylate-flash train")
    sources = {name: context.get_parameter_source(name) for name in context.params}
    explicit = {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}
    _check_options(explicit, data, eval_data, epochs, lr, temperature)
    check_model_name(model)
    with explained(kinds=(ValueError, OSError, RuntimeError)):  # a link that leads to itself
        output = output.resolve()
        checkpoints = Checkpoints(output)
    with together() as ranks:
        first = not ranks.rank
        with explained(kinds=(ValueError, OSError, RuntimeError)):
            ranks.agreed(lambda: check_output(output, checkpoints, overwrite, resume))
        loading(str(data))
        host = host_of(model, trust_remote_code)
        tokens = _tokens(mini_batch_tokens, host, scorer)
        with explained():
            check_device(device)
            from ..data.training import read_training_file

            lines = read_training_file(data, distillation=loss == "distillation")
            evaluated = None
            if eval_data is not None:
                evaluated = read_training_file(eval_data, distillation=loss == "distillation")
        if loss != "distillation" and lines.documents_per_query == 1 and 1 in (batch_size, len(lines.rows)):
            raise UserError(
                "a batch of one line with one document has no negatives to learn from: raise --batch-size, or give "
                f"{data} more lines or hard negatives"
            )
        values = context.params | {
            "data": lines.digest,
            "model": str(Path(model).resolve()) if Path(model).is_dir() else model,
            "epochs": None if max_steps else epochs,
            "temperature": temperature if loss in USED_BY[host]["temperature"] else None,
            "eval_data": None if evaluated is None else evaluated.digest,
        }
        settings = {_option(name): values[name] for name in _SETTINGS} | {"processes": ranks.size}
        checkpoint = checkpoints.check(settings) if resume else None
        loading(f"the model {model}")
        import torch

        from .training.run import StopRequest

        torch.manual_seed(seed)
        with writable_folder(output, "--output") if first else nullcontext():
            loaded = load_model(
                model,
                trust_remote_code=trust_remote_code,
                device=device_of_rank(device, ranks),
                scorer=scorer,
                query_length=query_length,
                document_length=document_length,
            )
            check_scorer(None if scorer == "auto" else scorer, loaded)
            _check_device(loaded, precision, tokens if loss == "cached" else None)
            try:
                if checkpoint is None and first:
                    with explained("--output: "):
                        checkpoints.begin(settings)
                with StopRequest(ranks) as request:
                    trainer = make_trainer(
                        loaded,
                        lines.rows,
                        None if evaluated is None else evaluated.rows,
                        make_loss(loaded, loss, scorer, mini_batch_size, tokens, temperature),
                        scorer,
                        output_dir=str(checkpoints.folder),
                        num_train_epochs=epochs,
                        max_steps=max_steps or -1,
                        per_device_train_batch_size=batch_size,
                        learning_rate=lr,
                        seed=seed,
                        per_device_eval_batch_size=batch_size,
                        bf16=precision == "bf16",
                        fp16=precision == "fp16",
                        eval_strategy="no" if evaluated is None else "steps" if eval_steps else "epoch",
                        eval_steps=eval_steps,
                        save_strategy="no" if save_steps is None else "steps",
                        save_steps=save_steps or 1,
                    )
                    _print_summary(trainer, lines, loss, scorer, data)
                    if evaluated is not None:
                        say(f"{len(evaluated.rows)} evaluation lines")
                    if loss == "cached" and tokens == "auto":
                        _find_budget(trainer, batch_size * lines.documents_per_query, precision)
                    _print_notes(lines, loss, explicit, host)
                    _run(trainer, loaded, request, checkpoint, checkpoints, output)
                    if request.signal is not None and trainer.state.global_step < trainer.state.max_steps:
                        _say_where_it_is(trainer, checkpoints, overwrite)
                        raise typer.Exit(128 + request.signal)
                    if first:
                        _write(loaded, output)
                if first:
                    checkpoints.remove()
            finally:
                if first:
                    checkpoints.tidy()


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _tokens(value: str | None, host: str, scorer: options.Scorer) -> int | str | None:
    """Parse `--mini-batch-tokens`; allowed values depend on the library of the loss, and on the scorer."""
    if value is None:
        return None
    if value != "auto" and not re.fullmatch("0*[1-9][0-9]{0,14}", value):
        raise UserError(f"--mini-batch-tokens must be a number of at least 1, or auto, got {value:.100}")
    # sentence-transformers' own loss takes a number, but does not count padding, so it does not bound the memory.
    of_st = host == SENTENCE_TRANSFORMERS
    if scorer not in ("pylate_flash", "auto") and (value == "auto" or not of_st):
        name = "--mini-batch-tokens auto" if of_st else "--mini-batch-tokens"
        raise UserError(f"{name} needs --scorer pylate_flash or auto, got {scorer}")
    return value if value == "auto" else int(value)


def _check_device(loaded: Model, precision: Precision, tokens: int | str | None) -> None:
    if precision == "fp16" and loaded.device.type == "cpu":
        raise UserError("--precision fp16 needs a GPU; bf16 also works on a CPU")
    if tokens == "auto" and loaded.device.type != "cuda":
        raise UserError(
            f"--mini-batch-tokens auto needs a GPU, and the model is on {loaded.device}; give a number instead, for "
            "instance 8192"
        )


def _check_options(
    explicit: set[str], data: Path, eval_data: Path | None, epochs: float, lr: float, temperature: float
) -> None:
    for one, other in (("resume", "overwrite"), ("max_steps", "epochs")):
        if {one, other} <= explicit:
            raise UserError(f"{_option(one)} and {_option(other)} exclude each other; give only one of them")
    for name, value in (("--epochs", epochs), ("--lr", lr), ("--temperature", temperature)):
        # Checked as float32, to which it is converted.
        if not 0 < ctypes.c_float(value).value < math.inf:
            raise UserError(f"{name} must be a finite number above 0, got {value:g}")
    if "eval_steps" in explicit and eval_data is None:
        raise UserError("--eval-steps needs --eval-data, the lines to evaluate on")
    for path in (data, eval_data):
        if path is not None:
            check_file(path)


def _find_budget(trainer: MeasuredTrainer, documents: int, precision: Precision) -> None:
    import torch

    from ..training.token_budget import largest_token_budget

    loss, device = trainer.loss, next(trainer.loss.parameters()).device
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    with explained("--mini-batch-tokens auto: "):
        loss.mini_batch_num_tokens = largest_token_budget(loss, documents, dtype)
    say(f"mini-batches of at most {loss.mini_batch_num_tokens} tokens, by trial on {device}")


def _print_summary(
    trainer: MeasuredTrainer, lines: TrainingData, loss: Loss, scorer: options.Scorer, data: Path
) -> None:
    args, rows, loaded = trainer.args, lines.rows, cast("Model", trainer.model)
    per_epoch = len(trainer.get_train_dataloader())
    full = math.ceil(len(rows) / (args.train_batch_size * args.world_size))
    size: float = min(args.train_batch_size, len(rows))
    on_average = ""
    if per_epoch > full:
        if per_epoch == len(rows) and lines.documents_per_query == 1:
            raise UserError(
                f"any two lines of {data} share a text, and such lines are never in the same batch, so there are no "
                "negatives to learn from: give lines with other texts, or hard negatives"
            )
        size, on_average = len(rows) / (per_epoch * args.world_size), " on average"
    say(f"{len(rows)} lines ({', '.join(rows.column_names)}), {loss} loss, scorer {scorer}, {loaded.device}")
    if loss == "distillation":
        candidates = f"{lines.documents_per_query} documents per query"
    else:
        hard = lines.documents_per_query - 1
        candidates = f"{hard} hard negative{'' if hard == 1 else 's'} per query, "
        candidates += (
            f"{round(size * lines.documents_per_query - 1, 1):g} negatives including in-batch ones{on_average}"
        )
    query, document = lines.longest()
    query_length, document_length = read_lengths(loaded)
    say(
        f"{candidates}; longest query {query} characters, longest document {document}, "
        f"truncated to {query_length} and {document_length} tokens"
    )
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
    per_process = f" in each of {args.world_size} processes" if args.world_size > 1 else ""
    say(f"{steps} steps of {round(size, 1):g} lines{on_average}{per_process}, {steps / per_epoch:.3g} epochs")
    if per_epoch > full:
        say(
            "note: some texts repeat, and lines that share a text are never in the same batch, where a positive would "
            f"be a negative: an epoch has {per_epoch} batches instead of {full}"
        )


def _print_notes(lines: TrainingData, loss: Loss, explicit: set[str], host: str) -> None:
    if lines.ignored:
        names = ", ".join(map(repr, lines.ignored[:10])) + (", ..." if len(lines.ignored) > 10 else "")
        note(f"pylate-flash: note: unused keys: {names}")
    for name in sorted(explicit & USED_BY[host].keys()):
        if loss not in USED_BY[host][name]:
            note(f"pylate-flash: note: {_option(name)} has no effect with --loss {loss}")


def _run(
    trainer: MeasuredTrainer,
    loaded: Model,
    request: StopRequest,
    checkpoint: Path | None,
    checkpoints: Checkpoints,
    output: Path,
) -> None:
    """Train; report an error that ends the training as one sentence."""
    import torch

    from .training.run import Guard

    guard = Guard(trainer, request)
    started = time.monotonic()
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    except FloatingPointError as error:
        raise UserError(f"{error}; nothing was written to {output}") from error
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"out of memory on {loaded.device}; a smaller --batch-size needs less, and so does --loss cached "
            "with a smaller --mini-batch-size or --mini-batch-tokens"
        ) from error
    except Exception as error:
        if checkpoint is not None and not guard.started:
            raise UserError(f"--resume: the checkpoint {checkpoint} cannot be loaded: {error}") from error
        if guard.saving:
            sentence = saved_elsewhere(loaded, f"a checkpoint could not be written: {error}")
            last = checkpoints.last()
            if last is not None:
                sentence += f"; the last complete checkpoint is {last}, and --resume continues from it"
            raise UserError(sentence) from error
        raise
    state, took = trainer.state, tqdm.format_interval(time.monotonic() - started)
    losses, evaluated = (
        [entry[name] for entry in state.log_history if name in entry] for name in ("loss", "eval_loss")
    )
    say(
        f"{state.global_step} of {state.max_steps} steps done in {took}; loss {losses[0]:.4g} at the start, "
        f"{losses[-1]:.4g} at the end" + (f", {evaluated[-1]:.4g} on --eval-data" if evaluated else "")
    )


def _say_where_it_is(trainer: MeasuredTrainer, checkpoints: Checkpoints, overwrite: bool) -> None:
    step, steps = trainer.state.global_step, trainer.state.max_steps
    instead = "--resume instead of --overwrite" if overwrite else "--resume"
    note(
        f"pylate-flash: interrupted after step {step} of {steps}; the current model is in {checkpoints.last()}, and "
        f"the same command with {instead} continues the training"
    )


def _write(loaded: Model, output: Path) -> None:
    tensor = first_non_finite(loaded)
    if tensor is not None:
        raise UserError(
            f"the trained model is not finite (first such tensor: {tensor}), so nothing was written to {output}; a "
            "lower --lr may help"
        )
    other_names = write_model(loaded, output)
    other_names = [name for name in other_names if name != CHECKPOINTS]
    say(f"Model written to {output}" + (f"; other files kept: {', '.join(other_names)}" if other_names else ""))
