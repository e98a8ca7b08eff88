"""Two trainings that should agree: the same model, data and seed, scored in two ways.

    python docs/benchmarks/drift.py scorers --output drift
    python docs/benchmarks/drift.py fusion --output drift

"scorers" compares PyLate's torch scorer and ours, "fusion" ours on embeddings and on hidden states (`fuse_projection`).
Both trainings run through `ColBERTTrainer` in bfloat16, deterministically, so their loss curves differ only by
rounding: PyLate rounds every similarity to bfloat16 under autocast, this package none. A third training repeats the
second, to show the difference of a mere repetition. "fusion" also measures the memory of a step in both ways, with and
without cached gradients (`step_memory`).
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Optional

import torch
import typer

import step_memory
from pylate_flash.bench.results import describe_machine, describe_versions
from script_results import date, write


class Comparison(str, Enum):
    """The comparisons; `WAYS` has two ways to score for each, by label the arguments of the loss."""

    scorers = "scorers"
    fusion = "fusion"


# Masking follows PyLate if PyLate is one of the two.
WAYS: dict[Comparison, dict[str, dict[str, Any]]] = {
    Comparison.scorers: {
        "PyLate's torch scorer": {"scorer": "torch", "masking": "zero"},
        "pylate_flash": {"scorer": "pylate_flash", "masking": "zero"},
    },
    Comparison.fusion: {
        "embeddings": {"scorer": "pylate_flash", "fuse_projection": False},
        "hidden states": {"scorer": "pylate_flash", "fuse_projection": True},
    },
}


@dataclass(frozen=True)
class Training:
    """The settings of the trainings."""

    steps: int = 300
    batch_size: int = 64
    learning_rate: float = 1e-5
    temperature: float = 1.0
    query_length: int = 32
    document_length: int = 96
    embedding_size: int = 128
    seed: int = 0


def train(model: str, pairs: list[dict[str, str]], way: dict[str, Any], training: Training) -> list[float]:
    """Train a ColBERT model contrastively and return the loss of every step.

    Parameters
    ----------
    model
        A model for `models.ColBERT`; an encoder without a projection gets a random one, from the seed.
    pairs
        Rows with "query" and "positive", repeated from the start when they run out.
    way
        How to score, as arguments of the loss.
    training
        Steps, sizes and seed.
    """
    from datasets import Dataset
    from transformers import PrinterCallback

    from pylate_flash import losses, models
    from pylate_flash.trainer import ColBERTTrainer, ColBERTTrainingArguments

    torch.manual_seed(training.seed)
    colbert = models.ColBERT(
        model,
        query_length=training.query_length,
        document_length=training.document_length,
        embedding_size=training.embedding_size,
    )
    loss = losses.Contrastive(colbert, temperature=training.temperature, **way)
    values: list[torch.Tensor] = []
    loss.register_forward_hook(lambda module, inputs, output: values.append(output.detach()))
    with tempfile.TemporaryDirectory() as checkpoints:
        trainer = ColBERTTrainer(
            model=colbert,
            args=ColBERTTrainingArguments(
                output_dir=checkpoints,
                max_steps=training.steps,
                per_device_train_batch_size=training.batch_size,
                learning_rate=training.learning_rate,
                warmup_steps=max(1, training.steps // 10),
                seed=training.seed,
                full_determinism=True,
                bf16=True,
                use_cpu=colbert.device.type == "cpu",
                save_strategy="no",
                report_to="none",
            ),
            train_dataset=Dataset.from_list(pairs),
            loss=loss,
        )
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train()
        finally:
            torch.use_deterministic_algorithms(False)
    return torch.stack(values).float().tolist()


def drift(first: list[float], second: list[float]) -> float:
    """Mean absolute difference of two loss curves of the same length."""
    return statistics.fmean(abs(a - b) for a, b in zip(first, second, strict=True))


def compare(
    model: str, pairs: list[dict[str, str]], training: Training, comparison: Comparison = Comparison.scorers
) -> dict[str, Any]:
    """Train in both ways; return the curves, their drift, and machine, versions and settings."""
    ways = WAYS[comparison]
    curves = {name: train(model, pairs, way, training) for name, way in ways.items()}
    last, way = list(ways.items())[-1]
    repetition = train(model, pairs, way, training)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "comparison": comparison.value,
        "date": date(),
        "machine": describe_machine(device),
        "versions": describe_versions(),
        "training": asdict(training),
        "pairs": len(pairs),
        "losses": curves,
        "mean_absolute_drift": drift(*curves.values()),
        "mean_absolute_drift_of_a_repetition": drift(curves[last], repetition),
    }


def memory_of_steps(
    model: str, training: Training, batch_sizes: list[int], comparison: Comparison = Comparison.fusion
) -> list[dict[str, Any]]:
    """Measure the memory of a training step at each batch size, in both ways, with and without cached gradients.

    Returns
    -------
    list of dict
        "batch_size", "loss", "way" and "bytes".
    """
    sizes = {name: getattr(training, name) for name in ("query_length", "document_length", "embedding_size")}
    return [
        {
            "batch_size": batch_size,
            "loss": loss,
            "way": name,
            "bytes": step_memory.measure(model, step_memory.Step(loss, way, batch_size, **sizes)),
        }
        for batch_size in batch_sizes
        for loss in ("Contrastive", "CachedContrastive")
        for name, way in WAYS[comparison].items()
    ]


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw both loss curves in one plot, and their difference below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained", facecolor="white")
    curves, difference = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
    (first_name, first), (second_name, second) = result["losses"].items()
    curves.plot(first, color="#b8c0cc", linewidth=4, label=first_name)
    curves.plot(second, color="#d1495b", linewidth=1, label=second_name)
    curves.set_ylabel("contrastive loss")
    curves.legend(frameon=False)
    difference.plot([b - a for a, b in zip(first, second, strict=True)], color="#2e4057")
    difference.axhline(0, color="black", linewidth=0.5)
    difference.set_ylabel("difference")
    difference.set_xlabel("training step")
    training = result["training"]
    figure.suptitle(
        f"{training['steps']} steps of {training['batch_size']} pairs in bfloat16, {result['machine']['name']}: "
        f"mean absolute drift {result['mean_absolute_drift']:.1e}"
    )
    figure.savefig(path, dpi=130)


def main(
    comparison: Annotated[Comparison, typer.Argument(help="scorers: PyLate's and ours. fusion: fuse_projection.")],
    output: Annotated[Path, typer.Option(help="Folder for a .json and a .png, named after the comparison.")],
    model: Annotated[
        Optional[str],  # noqa: UP007, UP045 - typer evaluates this on Python 3.10 as well
        typer.Option(help="A model or encoder folder.", show_default="the demo's encoder"),
    ] = None,
    pairs: Annotated[
        Optional[Path],  # noqa: UP007, UP045
        typer.Option(help='JSON lines of {"query", "positive"}.', show_default="the demo's pairs"),
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps.")] = Training.steps,
    batch_size: Annotated[int, typer.Option(help="Pairs per step.")] = Training.batch_size,
    memory_batch_size: Annotated[
        Optional[list[int]],  # noqa: UP007, UP045
        typer.Option(help="fusion: pairs per step of which to measure the memory.", show_default="64 and 256 on a GPU"),
    ] = None,
) -> None:
    """Train the same model twice, scored in two ways, and draw how the losses drift apart."""
    from pylate_flash import demo
    from pylate_flash.demo.job import default_model

    if pairs is None:
        corpus = demo.Settings().build_corpus()
        rows = [{"query": entry.query, "positive": entry.text} for entry in corpus.train]
    else:
        rows = [json.loads(line) for line in pairs.read_text(encoding="utf-8").splitlines()]
    model, training = model or default_model(), Training(steps=steps, batch_size=batch_size)
    result = compare(model, rows, training, comparison)
    if comparison is Comparison.fusion:
        if memory_batch_size is None:
            memory_batch_size = [64, 256] if torch.cuda.is_available() else []
        result["step_memory"] = memory_of_steps(model, training, memory_batch_size)
    write(result, output / f"drift-{comparison.value}.json")
    picture = output / f"drift-{comparison.value}.png"
    draw(result, picture)
    print(
        f"mean absolute drift {result['mean_absolute_drift']:.2e}, "
        f"of a repetition {result['mean_absolute_drift_of_a_repetition']:.2e}; {picture}"
    )
    for step in result.get("step_memory", []):
        print(f"{step['bytes'] / 2**20:8.0f} MiB: {step['loss']} of {step['batch_size']} pairs from {step['way']}")


if __name__ == "__main__":
    typer.run(main)
