"""Quality and cost of an index in fewer bits, with and without rescoring in 16 bits, compared with PLAID.

    python docs/benchmarks/few_bits.py MODEL RESULTS.json PICTURE.png FOLDER...

For every BEIR folder: nDCG@10, recall of exact search's best 100, milliseconds per query, and bytes per token that a
search reads, all with the same embeddings. Codecs are trained on every fourth document.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from pylate_flash.beir import evaluate_run, load_beir_folder, recall_of
from pylate_flash.cli.models import load_model
from pylate_flash.encoding.texts import encode
from pylate_flash.indexes import Flat

K, RESCORED = 100, 200
FEWER = ("int8", "fp8", "residual4", "residual2")


def measured(search: Callable[..., Any], queries: list[Any], **options: int) -> tuple[Any, float]:
    """The hits, and milliseconds per query: the best of three, after a warm-up that loads."""
    hits, times = search(queries, k=K, **options), []
    for _ in range(3):
        started = time.perf_counter()
        hits = search(queries, k=K, **options)
        times.append(1e3 * (time.perf_counter() - started) / len(queries))
    return hits, min(times)


def rows(model: Any, folder: Path) -> dict[str, Any]:
    """Measure all systems on a collection."""
    documents, queries, qrels = load_beir_folder(folder)
    ids = [document["id"] for document in documents]
    embeddings: list[Any] = encode(model, [document["text"] for document in documents], is_query=False)
    queries_embeddings = encode(model, [queries[query] for query in qrels], is_query=True)
    best, results = None, []

    def add(name: str, search: Callable[..., Any], nbytes: float | None, **options: int) -> None:
        nonlocal best
        hits, milliseconds = measured(search, queries_embeddings, **options)
        best = best or hits
        metrics, _ = evaluate_run(dict(zip(qrels, hits, strict=True)), qrels)
        row = {"system": name, "ndcg@10": metrics["ndcg@10"], "exact@100": recall_of(hits, best, K)}
        results.append({**row, "milliseconds": milliseconds, "bytes": nbytes})
        print(folder.name, results[-1], file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as root:
        for dtype in ("float32", "bfloat16", *FEWER):
            index_dtype = f"{dtype}+bfloat16" if dtype in FEWER else dtype
            index = Flat(root, dtype, dtype=index_dtype, device=str(model.device), show_progress=False)
            if dtype.startswith("residual"):
                index.train_codec(embeddings[::4])
            index.add_documents(ids, embeddings)
            info = index.info()
            add(dtype, index, info.scored_bytes / info.tokens)
            if dtype in FEWER:
                rescored_bytes = min(RESCORED, len(ids)) / len(ids) * 2 * (info.embedding_size or 0)
                add(
                    f"{dtype}, {RESCORED} again",
                    index,
                    info.scored_bytes / info.tokens + rescored_bytes,
                    rescore=RESCORED,
                )
        try:
            from pylate import indexes

            plaid = indexes.PLAID(root, "plaid", override=True, device=str(model.device), show_progress=False)
            plaid.add_documents(documents_ids=ids, documents_embeddings=embeddings)
            add("PLAID", plaid, None)
        except ImportError:
            pass
    return {"collection": folder.name, "documents": len(ids), "queries": len(queries_embeddings), "rows": results}


def table(collections: list[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    lines = ["| | nDCG@10 | of the exact 100 | ms a query | bytes a token |", "|---|---|---|---|---|"]
    for one in collections:
        lines.append(f"| **{one['collection']}**, {one['documents']:,} documents | | | | |")
        for row in one["rows"]:
            nbytes = "" if row["bytes"] is None else f"{row['bytes']:.0f}"
            numbers = f"{row['ndcg@10']:.4f} | {row['exact@100']:.4f} | {row['milliseconds']:.2f} | {nbytes}"
            lines.append(f"| {row['system']} | {numbers} |")
    return "\n".join(lines)


def draw(collections: list[dict[str, Any]], path: Path) -> None:
    """Draw quality against time, one panel per collection; dot size shows bytes per token."""
    figure = Figure(figsize=(6.4 * len(collections), 4.4), layout="constrained", facecolor="white")
    for axes, one in zip(figure.subplots(1, len(collections), squeeze=False)[0], collections, strict=True):
        # An index has the same color with and without rescoring; PLAID, whose bytes are unknown, is black.
        systems = list(dict.fromkeys(row["system"].split(",")[0] for row in one["rows"]))
        for row in one["rows"]:
            system, *rescored = row["system"].split(",")
            color = "black" if row["bytes"] is None else colormaps["tab10"](systems.index(system))
            axes.scatter(
                row["milliseconds"], row["exact@100"], s=20 + (row["bytes"] or 40), alpha=0.8, color=color,
                marker="^" if rescored else "o", label=f"{row['system']}: nDCG@10 {row['ndcg@10']:.3f}",
            )  # fmt: skip
        axes.set(xlabel="milliseconds a query", ylabel="of the exact best 100")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_title(f"{one['collection']}, {one['documents']:,} documents", loc="left")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    model, results, picture, *folders = sys.argv[1:]
    loaded = load_model(model, device="cuda" if torch.cuda.is_available() else "cpu")
    collections = []
    for folder in folders:
        collections.append(rows(loaded, Path(folder)))
        # Written after every collection, in case the run is interrupted.
        machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
        about = {"machine": machine, "threads": torch.get_num_threads(), "torch": torch.__version__}
        Path(results).write_text(json.dumps({**about, "collections": collections}, indent=1) + "\n")
        draw(collections, Path(picture))
    print(table(collections))


if __name__ == "__main__":
    main()
