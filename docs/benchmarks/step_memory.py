"""The memory of one training step of a ColBERT model, measured in a fresh process.

Weights and gradients of the parameters are allocated before. Counted is the peak of a forward and a backward beyond
them, in bfloat16 autocast: the encoder's activations, hidden states, embeddings, scores and their gradients.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pylate_flash.bench import fresh, memory

# Texts encoded at a time if gradients are cached.
MINI_BATCH_SIZE = 16


@dataclass(frozen=True)
class Step:
    """A training step: a loss of `pylate_flash.losses`, its arguments, and the sizes of model and batch."""

    loss: str
    arguments: dict[str, Any]
    batch_size: int
    query_length: int = 32
    document_length: int = 96
    embedding_size: int = 128


def measure(model: str, step: Step) -> int:
    """Return the bytes that a step takes.

    Parameters
    ----------
    model
        A model for `models.ColBERT`.
    step
        The step to measure.

    Raises
    ------
    RuntimeError
        If the process fails; the message ends with what it wrote.
    """
    request = json.dumps([model, asdict(step)])
    (taken,) = fresh.run_for_memory(Path(__file__).resolve(), request)
    return taken


def measure_here(model: str, step: Step) -> int:
    """Measure in this process, which should be fresh."""
    from pylate_flash import losses, models

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    colbert = models.ColBERT(
        model,
        query_length=step.query_length,
        document_length=step.document_length,
        embedding_size=step.embedding_size,
        device=str(device),
    ).train()
    arguments = {"mini_batch_size": MINI_BATCH_SIZE} if step.loss == "CachedContrastive" else {}
    loss = getattr(losses, step.loss)(colbert, **arguments, **step.arguments)
    # Texts of full length, so that an encoder that skips padding has the same work.
    columns = [
        colbert.tokenize(["a " * length] * step.batch_size, is_query=is_query, pad=True)
        for is_query, length in ((True, step.query_length), (False, step.document_length))
    ]
    columns = [{name: value.to(device) for name, value in column.items()} for column in columns]

    def run() -> None:
        # Copied, as the model modifies its inputs.
        with torch.autocast(device.type, dtype=torch.bfloat16):
            value = loss([dict(column) for column in columns])
        value.backward()

    # The first run allocates gradients, compiles and tunes.
    run()
    return memory.peak(run, device)


if __name__ == "__main__":
    model_name, request = json.loads(sys.argv[1])
    print(measure_here(model_name, Step(**request)))
