"""`pylate-flash train`."""

from __future__ import annotations

import shutil
import tempfile
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import (
    Scorer,
    UserError,
    be_quiet,
    check_device,
    check_file,
    check_model_name,
    check_scorer,
    console,
    explained,
    load_model,
)

if TYPE_CHECKING:
    import torch

    from ..models import ColBERT


class Loss(str, Enum):
    """The losses of `pylate_flash.losses`."""

    contrastive = "contrastive"
    cached = "cached"
    distillation = "distillation"


def train(
    data: Annotated[Path, typer.Option(help="JSON lines; what they hold is explained above.")],
    model: Annotated[str, typer.Option(help="Encoder or ColBERT model to start from: a folder or a name.")],
    output: Annotated[Path, typer.Option(help="Folder for the trained model.")],
    loss: Annotated[Loss, typer.Option(help="`cached` trains large batches in the memory of small ones.")] = (
        Loss.contrastive
    ),
    batch_size: Annotated[int, typer.Option(min=1, help="Lines per step and device.")] = 32,
    mini_batch_size: Annotated[int, typer.Option(min=1, help="Texts encoded at a time, with `--loss cached`.")] = 32,
    epochs: Annotated[float, typer.Option(min=0.0, help="Times that the data are seen.")] = 1.0,
    max_steps: Annotated[int, typer.Option(help="Stop after this many steps; -1: after the epochs.")] = -1,
    lr: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = 3e-5,
    temperature: Annotated[float, typer.Option(help="Divides the scores in the contrastive losses.")] = 1.0,
    query_length: Annotated[int | None, typer.Option(min=4, help="Tokens of a query. Default: the model's.")] = None,
    document_length: Annotated[
        int | None, typer.Option(min=4, help="Tokens of a document, at most. Default: the model's.")
    ] = None,
    scorer: Annotated[Scorer, typer.Option(help="Computes the scores; saved with the model.")] = Scorer.pylate_flash,
    seed: Annotated[int, typer.Option(help="Of the order of lines, of dropout, and of a new projection.")] = 42,
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bfloat16 where that is safe (autocast).")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... Default: a GPU if there is one.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model that is already there.")] = False,
) -> None:
    """Train a ColBERT model on a file of JSON lines.

    `contrastive` and `cached` expect `{"query": "...", "positive": "...", "negative": "..."}` in each line, `negative`
    in all or in none; the other documents of a batch are negatives too. `distillation` expects
    `{"query": "...", "documents": ["...", ...], "scores": [1.5, ...]}` with a teacher's score for each document.
    """
    check_file(data)
    check_model_name(model)
    _check_new_folder(output, overwrite)
    if temperature <= 0:
        raise UserError(f"--temperature must be above 0, got {temperature:g}")
    be_quiet()
    with explained():
        check_device(device)
        from ..training_data import read_training_file

        lines = read_training_file(data, distillation=loss is Loss.distillation)
    import torch

    from .. import losses
    from ..trainer import ColBERTTrainer, ColBERTTrainingArguments

    torch.manual_seed(seed)
    colbert = load_model(
        model, device=device, scorer=scorer.value, query_length=query_length, document_length=document_length
    )
    check_scorer(None if scorer is Scorer.auto else scorer.value, colbert.device)
    function: torch.nn.Module
    if loss is Loss.distillation:
        function = losses.Distillation(colbert)
    elif loss is Loss.cached:
        function = losses.CachedContrastive(colbert, mini_batch_size=mini_batch_size, temperature=temperature)
    else:
        function = losses.Contrastive(colbert, temperature=temperature)
    console.print(
        f"{len(lines)} lines ({', '.join(lines.column_names)}), {loss.value} loss, scorer {scorer.value}, "
        f"{colbert.device}",
        highlight=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = ColBERTTrainer(
            model=colbert,
            args=ColBERTTrainingArguments(
                output_dir=folder,
                num_train_epochs=epochs,
                max_steps=max_steps,
                per_device_train_batch_size=batch_size,
                learning_rate=lr,
                warmup_steps=0.1,
                seed=seed,
                bf16=bf16,
                scorer=scorer.value,
                use_cpu=colbert.device.type == "cpu",
                logging_steps=10,
                logging_first_step=True,
                save_strategy="no",
                report_to="none",
                dataloader_pin_memory=colbert.device.type == "cuda",
            ),
            train_dataset=lines,
            loss=function,
        )
        trainer.train()
    _save_model(colbert, output)


def _save_model(model: ColBERT, output: Path) -> None:
    """Save a model to a folder that holds, at every moment, all of the old model, nothing, or all of the new one."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as folder:
        model.save_pretrained(f"{folder}/model")
        if output.is_dir():
            shutil.rmtree(output)
        Path(folder, "model").rename(output)


def _check_new_folder(path: Path, overwrite: bool) -> None:
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; name a folder")
    if path.is_dir() and any(path.iterdir()):
        if not (path / "modules.json").is_file():
            raise UserError(f"{path} holds files that are no model; name another folder")
        if not overwrite:
            raise UserError(f"there is a model in {path} already; --overwrite replaces it")
