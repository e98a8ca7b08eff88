"""A complete training step of a ColBERT model of ModernBERT's size, with cached gradients, by this package and PyLate.

    python docs/benchmarks/encoder_step.py run --output docs/benchmarks/results/batches/encoder-step.json

Weights are random, as are the words of the texts: 60 to 150 of a document, each one token, of 180 that there may be. A
step is a forward and a backward of the loss, in bfloat16 autocast on a GPU, and one of AdamW. Every system runs in a
process of its own, from the same weights and batch. `--revision NAME=FOLDER`, any number of times, adds another state
of this package: a folder that `pylate_flash` lies in, as `git archive` writes one.

Documents are taken as they are tokenized, and all with 180 tokens, where no length can be made use of: what a document
padded to them costs that is encoded as it is.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from script_results import about, write

ROOT = Path(__file__).resolve().parents[2]
QUERY_LENGTH, DOCUMENT_LENGTH, EMBEDDING_SIZE = 32, 180, 128
QUERY_WORDS, DOCUMENT_WORDS = (4, 20), (60, 150)
# Sizes that override the defaults of the model type, which are ModernBERT-base.
TINY = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
# Distinct words of the texts, within the vocabularies of both sizes.
WORDS = 900
# Tokens of a document besides its words: [CLS], [SEP] and PyLate's marker.
MARKERS = 3


@dataclass(frozen=True)
class Request:
    """What a process measures.

    ``backend`` is a backend of PyLate, whose own loss is then measured; None: this package's loss.
    ``mini_batch_tokens`` replaces ``mini_batch_size``. ``padded``: every document has the full length.
    """

    model: str
    batch_size: int
    steps: int
    warmup: int = 1
    backend: str | None = None
    mini_batch_size: int = 128
    mini_batch_tokens: int | None = None
    padded: bool = False


def make_model(folder: Path, sizes: dict[str, int]) -> None:
    """Write a ModernBERT encoder, and a tokenizer with one token per word."""
    from tokenizers import Tokenizer, pre_tokenizers, processors
    from tokenizers.models import WordLevel
    from transformers import ModernBertConfig, ModernBertModel, PreTrainedTokenizerFast

    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    special["mask_token"] = "[MASK]"
    size = 1000 if sizes else 50368
    tokens = [*special.values(), *(f"w{number}" for number in range(size - len(special)))]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    token_ids = {f"{name}_id": vocabulary[special[name]] for name in ("pad_token", "cls_token", "sep_token")}
    token_ids |= {"bos_token_id": token_ids["cls_token_id"], "eos_token_id": token_ids["sep_token_id"]}
    options: dict[str, Any] = {"vocab_size": size, **sizes, **token_ids}
    config = ModernBertConfig(**options)
    torch.manual_seed(0)
    ModernBertModel(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def texts(count: int, words: tuple[int, int], seed: int) -> list[str]:
    """Draw ``count`` texts of random words; ``words`` bounds the words of each."""
    drawn = random.Random(seed)
    return [" ".join(f"w{drawn.randrange(WORDS)}" for _ in range(drawn.randint(*words))) for _ in range(count)]


def measure_here(request: Request) -> dict[str, Any]:
    """Measure in this process, which should be fresh.

    Returns
    -------
    dict
        "seconds" of each step; "loss_share", the share of the loss's operation in them, or None if unknown;
        "peak_bytes" of all allocated GPU memory, or None without a GPU; "loss" of the first step; and "tokens" of the
        documents, without padding.

    Raises
    ------
    ValueError
        If the imported state of the package does not support the request.
    """
    from pylate import losses as pylate_losses
    from pylate.models import ColBERT
    from pylate.scores import ColBERTScores

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = ColBERT(
        request.model,
        query_length=QUERY_LENGTH,
        document_length=DOCUMENT_LENGTH,
        embedding_size=EMBEDDING_SIZE,
        device=str(device),
    ).train()
    loss: Any
    if request.backend is not None:
        score = _WithBackend(ColBERTScores(), request.backend)
        loss = pylate_losses.CachedContrastive(model, score, mini_batch_size=request.mini_batch_size)
    else:
        from pylate_flash import losses

        limits: dict[str, Any] = {"mini_batch_size": request.mini_batch_size}
        if request.mini_batch_tokens is not None:
            if "mini_batch_num_tokens" not in inspect.signature(losses.CachedContrastive).parameters:
                raise ValueError("mini_batch_tokens: this state of the package has no such limit")
            limits = {"mini_batch_num_tokens": request.mini_batch_tokens}
        loss = losses.CachedContrastive(model, scorer="pylate_flash", **limits)
    stopwatch = _stopwatch(loss) if request.backend is None else None
    most = DOCUMENT_LENGTH - MARKERS
    words = (most, most) if request.padded else DOCUMENT_WORDS
    columns = [
        model.tokenize(texts(request.batch_size, words, seed), is_query=is_query, pad=True)
        for seed, (is_query, words) in enumerate(((True, QUERY_WORDS), (False, words)))
    ]
    columns = [{name: value.to(device) for name, value in column.items()} for column in columns]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    values: list[float] = []

    def step() -> float:
        _wait(device)
        started = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=device.type == "cuda"):
            value = loss([dict(column) for column in columns])
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)
        values.append(value.item())
        return time.perf_counter() - started

    for _ in range(request.warmup):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if stopwatch is not None:
        stopwatch.read()
    seconds = [step() for _ in range(request.steps)]
    return {
        "seconds": seconds,
        "loss_share": None if stopwatch is None else stopwatch.read() / sum(seconds),
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "loss": values[0],
        "tokens": int(columns[1]["attention_mask"].sum()),
    }


class _WithBackend:
    """PyLate's score function with one of its backends."""

    def __init__(self, score: Any, backend: str) -> None:
        self.score, self.backend = score, backend

    def __call__(self, *embeddings: Any, **masks: Any) -> Any:
        return self.score(*embeddings, **masks, backend=self.backend)


def _stopwatch(loss: Any) -> Any:
    """The stopwatch of the loss's operation, or None if this state of the package has none."""
    try:
        from pylate_flash.training.contrast import Stopwatch
    except ImportError:
        return None
    loss.stopwatch = Stopwatch()
    return loss.stopwatch


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(request: Request, package: Path = ROOT) -> dict[str, Any]:
    """`measure_here` in a process that imports `pylate_flash` from a folder; on failure {"failed": reason}."""
    environment = dict(os.environ)
    other_paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != ROOT]
    environment["PYTHONPATH"] = os.pathsep.join([str(package.resolve()), *other_paths])
    command = [sys.executable, str(Path(__file__).resolve()), "measure", json.dumps(asdict(request))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def row_of(system: str, request: Request, measured: dict[str, Any]) -> dict[str, Any]:
    """Build a row of the result."""
    row = {
        "system": system,
        "batch_size": request.batch_size,
        "documents": "padded" if request.padded else "tokenized",
        **{name: value for name, value in measured.items() if name != "seconds"},
    }
    if "seconds" in measured:
        row["median_s"] = statistics.median(measured["seconds"])
        row["steps"] = len(measured["seconds"])
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = ["| system | batch | documents | s | loss operation | GPU memory, GB |", "|---|---:|---|---:|---:|---:|"]
    for row in rows:
        seconds = f"{row['median_s']:.3f}" if "median_s" in row else row["failed"]
        share = "-" if row.get("loss_share") is None else f"{row['loss_share']:.1%}"
        memory = "-" if row.get("peak_bytes") is None else f"{row['peak_bytes'] / 1e9:.2f}"
        lines.append(f"| {row['system']} | {row['batch_size']} | {row['documents']} | {seconds} | {share} | {memory} |")
    return "\n".join(lines)


app = typer.Typer(help=__doc__, no_args_is_help=True)


@app.command("measure", hidden=True)
def measure_command(request: str) -> None:
    """What `run` starts for each system."""
    print(json.dumps(measure_here(Request(**json.loads(request)))))


@app.command()
def run(
    output: Annotated[Path, typer.Option(help="A .json file.")],
    batch_size: Annotated[int, typer.Option(help="Pairs of a step.")] = 1024,
    large_batch_size: Annotated[int, typer.Option(help="Pairs of a step whose memory is measured too.")] = 4096,
    steps: Annotated[int, typer.Option(help="Steps that are timed, of each system.")] = 5,
    revision: Annotated[list[str], typer.Option(help="NAME=FOLDER: another state of this package.")] = [],  # noqa: B006
    backend: Annotated[list[str], typer.Option(help="PyLate's backends.")] = ["lik", "flash"],  # noqa: B006
    tiny: Annotated[bool, typer.Option("--tiny", help="A model of two small layers: to try the script.")] = False,
) -> None:
    """Measure all systems, one after the other, and write what there is after each."""
    packages = {name: Path(folder) for name, _, folder in (entry.partition("=") for entry in revision)}
    result: dict[str, Any] = {
        **about(),
        "model": "tiny" if tiny else "ModernBERT-base",
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), TINY if tiny else {})
        first = Request(folder, batch_size, steps)
        by_tokens = replace(first, mini_batch_tokens=first.mini_batch_size * DOCUMENT_LENGTH)
        requests: list[tuple[str, Request, Path]] = []
        for padded in (False, True):
            requests.append(("pylate_flash", replace(by_tokens, padded=padded), ROOT))
            requests.append(("pylate_flash, mini-batches of 128 texts", replace(first, padded=padded), ROOT))
            requests += [(name, replace(first, padded=padded), package) for name, package in packages.items()]
        requests += [(f"PyLate, {name}", replace(first, backend=name), ROOT) for name in backend]
        requests.append(("pylate_flash", replace(by_tokens, batch_size=large_batch_size, steps=2), ROOT))
        for name, request, package in requests:
            result["rows"].append(row_of(name, request, measure(request, package)))
            write(result, output)
            print(table(result["rows"][-1:]).splitlines()[-1], flush=True)
    print(table(result["rows"]))


if __name__ == "__main__":
    app()
