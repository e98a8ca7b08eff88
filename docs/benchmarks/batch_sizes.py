"""What larger batches teach: the demo's model, trained with several batch sizes, each for as many steps and examples.

    python docs/benchmarks/batch_sizes.py prepare batch-sizes.tar.gz
    python docs/benchmarks/batch_sizes.py run batch-sizes.tar.gz --output docs/benchmarks/results/batches/sizes.json

The first needs what the demo needs, and packs its text and its encoder into one file, so that the second, which wants a
GPU, gives the same wherever it runs. The encoder's weights are rounded to half precision there, and the vectors of
tokens that no text has are replaced by their mean. But for the batch size, the number of steps and the seed, all is as
in `demo.FULL`; gradients are cached in all runs, and a GPU computes in bfloat16.
"""

from __future__ import annotations

import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from pylate_flash import demo
from pylate_flash.bench.results import describe_machine, describe_versions
from script_results import date, write

SETTINGS = replace(demo.FULL, pairs=12288)
BATCH_SIZES = (64, 512, 2048)
SEEDS = (1, 2, 3)
# Every batch size is trained for this many steps, and for three epochs of all pairs.
STEPS = 72
EXAMPLES = 3 * SETTINGS.pairs
# Tokens encoded at a time.
MINI_BATCH_TOKENS = 32768
# The right document counts up to this rank.
RANKS = 10


@dataclass(frozen=True)
class Run:
    """One training run."""

    batch_size: int
    steps: int
    seed: int

    @property
    def examples(self) -> int:
        """The number of pairs seen, repeats included."""
        return self.batch_size * self.steps


def runs(batch_sizes: Iterable[int], steps: int, examples: int, seeds: Iterable[int]) -> list[Run]:
    """Every batch size with every seed, for `steps` steps and for `examples` examples; longest first.

    Raises
    ------
    ValueError
        If a batch size does not divide the examples.
    """
    all_runs = set()
    for batch_size in batch_sizes:
        if examples % batch_size:
            raise ValueError(f"examples: {examples}; expected a multiple of every batch size, {batch_size} among them")
        all_runs |= {Run(batch_size, number, seed) for number in (steps, examples // batch_size) for seed in seeds}
    return sorted(all_runs, key=lambda run: (-run.examples, run.batch_size, run.steps, run.seed))


def pack(archive: Path, encoder: str, settings: demo.Settings) -> None:
    """Write the demo's texts, truncated to as many words as tokens are read, and its encoder into one file."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer

    corpus = settings.build_corpus()
    most = max(settings.document_length, settings.train_document_length)

    def cut(entries: list[Any]) -> list[Any]:
        return [replace(entry, text=" ".join(entry.text.split()[:most])) for entry in entries]

    corpus = replace(corpus, documents=cut(corpus.documents), queries=cut(corpus.queries), train=cut(corpus.train))
    with tempfile.TemporaryDirectory() as folder:
        corpus.write(Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(encoder)
        tokenizer.save_pretrained(folder)
        (Path(folder) / "config.json").write_bytes((Path(encoder) / "config.json").read_bytes())
        texts = [text for entry in (*corpus.documents, *corpus.train) for text in (entry.query, entry.text)]
        used = {*tokenizer.all_special_ids, *(token for ids in tokenizer(texts)["input_ids"] for token in ids)}
        weights = load_file(Path(encoder) / "model.safetensors")
        (name,) = (name for name in weights if name.endswith("word_embeddings.weight"))
        vectors = weights[name].float()
        unused = torch.ones(len(vectors), dtype=torch.bool)
        unused[sorted(used)] = False
        # PyLate's two markers become new tokens, initialised around the mean of all.
        vectors[unused] = vectors[unused].mean(dim=0)
        weights[name] = vectors
        half = {key: value.half() if value.is_floating_point() else value for key, value in weights.items()}
        save_file(half, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        with tarfile.open(archive, "w:gz") as file:
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file():
                    file.add(path, path.relative_to(folder).as_posix())


@contextmanager
def unpacked(archive: Path) -> Iterator[Path]:
    """A temporary folder with the content that `pack` has written."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
        yield Path(folder)


def ndcg(scores: torch.Tensor, right: torch.Tensor) -> float:
    """nDCG@10 of scores [Nq, Nd] where each query has one right document, `right` [Nq].

    Ties rank the first document first. NaN, from a diverged model, ranks last.
    """
    own = scores.gather(1, right.unsqueeze(1))
    behind = torch.arange(scores.shape[1], device=scores.device) > right.unsqueeze(1)
    rank = scores.shape[1] - ((scores < own) | ((scores == own) & behind)).sum(dim=1)
    return torch.where(rank <= RANKS, 1.0 / torch.log2(1.0 + rank.double()), 0.0).mean().item()


def evaluate(colbert: Any, folder: Path) -> float:
    """nDCG@10 on the test split, from the scores of all documents."""
    from pylate_flash import maxsim_ragged
    from pylate_flash.evaluation import load_beir_folder

    documents, queries, qrels = load_beir_folder(folder)
    positions = {document["id"]: index for index, document in enumerate(documents)}
    right = torch.tensor([positions[next(iter(qrels[query]))] for query in queries])
    options: dict[str, Any] = {"convert_to_tensor": True, "show_progress_bar": False, "batch_size": 256}
    embedded = [
        [tokens.float() for tokens in colbert.encode(texts, is_query=is_query, **options)]
        for texts, is_query in ((list(queries.values()), True), ([entry["text"] for entry in documents], False))
    ]
    scores = maxsim_ragged(*embedded)
    return ndcg(scores, right.to(scores.device))


def load(folder: Path, settings: demo.Settings) -> Any:
    """The encoder, with a projection initialised from the settings' seed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return demo.load_encoder(str(folder), settings, device).float()


def train(folder: Path, run: Run, settings: demo.Settings) -> dict[str, Any]:
    """Train one model and evaluate it before and after.

    Returns
    -------
    dict
        The run's fields, its examples, "ndcg@10" and "ndcg@10_before", "seconds" of the training, and "loss", the
        curve as [step, value].
    """
    from datasets import load_dataset
    from transformers import PrinterCallback

    from pylate_flash import losses
    from pylate_flash.trainer import ColBERTTrainer, ColBERTTrainingArguments

    settings = replace(settings, seed=run.seed)
    colbert = load(folder, settings)
    before = evaluate(colbert, folder)
    pairs = load_dataset(
        "json", data_files=str(folder / "train.jsonl"), split="train", cache_dir=str(folder / f"cache-{hash(run)}")
    )
    with tempfile.TemporaryDirectory() as checkpoints:
        trainer = ColBERTTrainer(
            model=colbert,
            args=ColBERTTrainingArguments(
                output_dir=checkpoints,
                max_steps=run.steps,
                per_device_train_batch_size=run.batch_size,
                learning_rate=settings.learning_rate,
                warmup_steps=max(1, run.steps // 10),
                seed=run.seed,
                bf16=colbert.device.type == "cuda",
                use_cpu=colbert.device.type == "cpu",
                logging_steps=max(1, run.steps // 36),
                logging_first_step=True,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=pairs,
            loss=losses.CachedContrastive(
                colbert,
                mini_batch_num_tokens=MINI_BATCH_TOKENS,
                temperature=settings.temperature,
                scorer="pylate_flash",
            ),
        )
        trainer.remove_callback(PrinterCallback)
        length, colbert.document_length = colbert.document_length, settings.train_document_length
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
        colbert.document_length = length
    colbert.eval()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        **asdict(run),
        "examples": run.examples,
        "ndcg@10_before": before,
        "ndcg@10": evaluate(colbert, folder),
        "seconds": round(seconds, 1),
        "loss": [[entry["step"], round(entry["loss"], 4)] for entry in log],
    }


def train_all(
    archive: Path, planned: list[Run], settings: demo.Settings, output: Path, jobs: int, compared: dict[str, int]
) -> dict[str, Any]:
    """Train all runs, `jobs` at a time, and write the result after each, so that an interruption loses little.

    `compared` has the "steps" and "examples" that comparable runs share.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {
        "date": date(),
        "machine": describe_machine(device),
        "versions": describe_versions(),
        "settings": asdict(settings),
        "mini_batch_tokens": MINI_BATCH_TOKENS,
        "compared": compared,
        "planned": len(planned),
        "runs": [],
    }

    def keep(run: dict[str, Any]) -> None:
        result["runs"].append(run)
        result["runs"].sort(key=lambda run: (run["batch_size"], run["steps"], run["seed"]))
        write(result, output)
        print(
            f"batch of {run['batch_size']}, {run['steps']} steps, seed {run['seed']}: "
            f"nDCG@10 {run['ndcg@10_before']:.3f} to {run['ndcg@10']:.3f} in {run['seconds']:.0f} s",
            flush=True,
        )

    with unpacked(archive) as folder:
        if jobs == 1:
            for run in planned:
                keep(train(folder, run, settings))
        else:
            with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
                for done in as_completed([pool.submit(train, folder, run, settings) for run in planned]):
                    keep(done.result())
    return result


app = typer.Typer(help=__doc__, no_args_is_help=True)


@app.command()
def prepare(archive: Annotated[Path, typer.Argument(help="Where to write, a .tar.gz.")]) -> None:
    """Pack the demo's text and encoder."""
    from pylate_flash.demo.job import default_model

    pack(archive, default_model(), SETTINGS)
    print(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB")


@app.command()
def run(
    archive: Annotated[Path, typer.Argument(help="What `prepare` has written.")],
    output: Annotated[Path, typer.Option(help="A .json file.")],
    jobs: Annotated[int, typer.Option(help="Trainings at a time, on the same GPU.")] = 3,
) -> None:
    """Train and evaluate."""
    planned = runs(BATCH_SIZES, STEPS, EXAMPLES, SEEDS)
    train_all(archive, planned, SETTINGS, output, jobs, {"steps": STEPS, "examples": EXAMPLES})


if __name__ == "__main__":
    app()
