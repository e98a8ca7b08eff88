"""A demo run of a few seconds: real text from small packages, and a tiny model with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from pylate_flash import demo

TINY = demo.Settings(
    documents=40,
    queries=12,
    pairs=32,
    batch_size=8,
    learning_rate=1e-3,
    query_length=16,
    document_length=32,
    train_document_length=24,
    test_packages=("tqdm", "requests"),
    train_packages=("seaborn",),
)


def run_tiny_demo(output: Path, model: str) -> tuple[dict[str, Any], str]:
    """Run the demo at this size; return its results and printed output."""
    with open(output.with_suffix(".log"), "w+", encoding="utf-8") as log:
        results = demo.run(output, model, TINY, device="cpu", console=Console(file=log, width=120))
        log.seek(0)
        return results, log.read()
