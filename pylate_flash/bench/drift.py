"""Two trainings that should be one: the same model, data and seed, scored by PyLate's torch scorer and by ours.

    python -m pylate_flash.bench.drift --output drift/

Both run through `ColBERTTrainer` in bfloat16, deterministically, and what is left between their loss curves is
rounding: PyLate rounds every similarity to bfloat16 under autocast, and this package none. A third training, of our
scorer again, shows what a mere repetition differs by.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Optional

import torch
import typer

from pylate_flash.bench.results import describe_machine, describe_versions


@dataclass(frozen=True)
class Training:
    """How the trainings go."""

    steps: int = 300
    batch_size: int = 64
    learning_rate: float = 1e-5
    temperature: float = 1.0
    query_length: int = 32
    document_length: int = 96
    embedding_size: int = 128
    seed: int = 0


def train(model: str, pairs: list[dict[str, str]], scorer: str, training: Training) -> list[float]:
    """Train a ColBERT model contrastively and return the loss of every step.

    Parameters
    ----------
    model
        What `models.ColBERT` loads; an encoder without a projection gets one, with random weights from the seed.
    pairs
        Rows with "query" and "positive", taken again from the start when they run out.
    scorer
        "torch" or "pylate_flash". Masked tokens count as PyLate counts them, so that both score the same.
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
    loss = losses.Contrastive(colbert, temperature=training.temperature, scorer=scorer, masking="zero")
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


def compare(model: str, pairs: list[dict[str, str]], training: Training) -> dict[str, Any]:
    """Train with each scorer; the curves, how far they drift apart, and where and with what that was."""
    curves = {name: train(model, pairs, name, training) for name in ("torch", "pylate_flash")}
    repetition = train(model, pairs, "pylate_flash", training)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(device),
        "versions": describe_versions(),
        "training": asdict(training),
        "pairs": len(pairs),
        "losses": curves,
        "mean_absolute_drift": drift(*curves.values()),
        "mean_absolute_drift_of_a_repetition": drift(curves["pylate_flash"], repetition),
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw both loss curves, one over the other, and their difference below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained", facecolor="white")
    curves, difference = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
    torch_curve, our_curve = result["losses"]["torch"], result["losses"]["pylate_flash"]
    curves.plot(torch_curve, color="#b8c0cc", linewidth=4, label="PyLate's torch scorer")
    curves.plot(our_curve, color="#d1495b", linewidth=1, label="pylate_flash")
    curves.set_ylabel("contrastive loss")
    curves.legend(frameon=False)
    difference.plot([ours - theirs for ours, theirs in zip(our_curve, torch_curve, strict=True)], color="#2e4057")
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
    output: Annotated[Path, typer.Option(help="Folder for drift.json and drift.png.")],
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
) -> None:
    """Train the same model with PyLate's torch scorer and with ours, and draw how the losses drift apart."""
    from pylate_flash import demo
    from pylate_flash.demo.job import default_model

    if pairs is None:
        corpus = demo.Settings().build_corpus()
        rows = [{"query": entry.query, "positive": entry.text} for entry in corpus.train]
    else:
        rows = [json.loads(line) for line in pairs.read_text(encoding="utf-8").splitlines()]
    result = compare(model or default_model(), rows, Training(steps=steps, batch_size=batch_size))
    output.mkdir(parents=True, exist_ok=True)
    (output / "drift.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw(result, output / "drift.png")
    print(
        f"mean absolute drift {result['mean_absolute_drift']:.2e}, "
        f"of a repetition {result['mean_absolute_drift_of_a_repetition']:.2e}; {output / 'drift.png'}"
    )


if __name__ == "__main__":
    typer.run(main)
