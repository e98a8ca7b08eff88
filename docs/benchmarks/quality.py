"""What quantizing documents costs in retrieval: nDCG@10, and how many of the best 20 documents stay.

    python docs/benchmarks/quality.py demo-output/data demo-output/model --output docs/benchmarks/results/quality/

Every query is scored against every document of a collection in BEIR's layout, exactly: with embeddings in bfloat16,
with documents in 8 bits and queries too, and with queries as they are; and with documents as residual codes, by a codec
that is trained on them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import torch
import typer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pylate_flash import ResidualCodes, maxsim_residual, maxsim_varlen, pack, quantize, train_residual_codec
from pylate_flash.bench.results import describe_machine, describe_versions
from pylate_flash.ops.quantization import PRECISIONS
from pylate_flash.ops.residual_codes import NBITS
from script_results import date, write

# Documents of a query that are kept, and those whose overlap is told.
_KEPT = 100
OVERLAP = 20
# Queries that are scored at a time.
_QUERIES = 64


def best_documents(scores: Tensor, k: int) -> Tensor:
    """The `k` best documents of each query [Nq, k], or all, best first; of equal scores the first document."""
    return scores.cpu().argsort(dim=1, descending=True, stable=True)[:, :k]


def overlap(first: Tensor, second: Tensor) -> float:
    """Mean share of the documents [Nq, k] of the first that are among those of the second."""
    return (first.unsqueeze(2) == second.unsqueeze(1)).any(dim=2).double().mean().item()


def measure(documents: list[Tensor], queries: list[Tensor], evaluate: Any) -> list[dict[str, Any]]:
    """The table: a row for each precision, bfloat16 first, and for residual codes; bytes are those of documents.

    Parameters
    ----------
    documents, queries
        Token embeddings [L_i, d], on one device.
    evaluate
        From scores [Nq, Nd], the nDCG@10.
    """
    values, bounds = pack([document.bfloat16() for document in documents])
    query_values, query_bounds = pack([query.bfloat16() for query in queries])

    def scores(precision: str | None, quantize_queries: bool) -> Tensor:
        kept = values if precision is None else quantize(values, precision)
        found = []
        for first in range(0, len(queries), _QUERIES):
            part = query_bounds[first : first + _QUERIES + 1]
            some = query_values[int(part[0]) : int(part[-1])]
            found.append(maxsim_varlen(some, kept, part - part[0], bounds, quantize_queries=quantize_queries))
        return torch.cat(found)

    def residual_scores(kept: ResidualCodes) -> Tensor:
        found = []
        for first in range(0, len(queries), _QUERIES):
            some = [query.bfloat16() for query in queries[first : first + _QUERIES]]
            mask = pad_sequence([query.new_ones(len(query), dtype=torch.bool) for query in some], batch_first=True)
            found.append(maxsim_residual(pad_sequence(some, batch_first=True), kept, queries_mask=mask))
        return torch.cat(found)

    rows: list[dict[str, Any]] = []
    plain = scores(None, False)

    def add(kept: str, queries: str, found: Tensor, n_bytes: int) -> None:
        ndcg = evaluate(found)
        rows.append(
            {
                "documents": kept,
                "queries": queries,
                "ndcg@10": ndcg,
                "difference": ndcg - (rows[0]["ndcg@10"] if rows else ndcg),
                f"overlap@{OVERLAP}": overlap(best_documents(found, OVERLAP), best_documents(plain, OVERLAP)),
                "bytes": n_bytes,
            }
        )

    add("bfloat16", "bfloat16", plain, values.nbytes)
    for precision in PRECISIONS:
        for quantize_queries in (True, False):
            of_queries = "bfloat16" if not quantize_queries else "fp8" if precision == "fp8" else "int8"
            found = scores(precision, quantize_queries)
            add(precision, of_queries, found, quantize(values, precision).nbytes)
    for nbits in reversed(NBITS):
        kept = train_residual_codec(values, nbits=nbits).compress(values, bounds)
        add(f"residual, {nbits} bits", "bfloat16", residual_scores(kept), kept.nbytes)
    return rows


def run(data: Path, model: str) -> list[dict[str, Any]]:
    """The table of a collection and a model."""
    from pylate_flash import evaluation, models

    documents, queries, qrels = evaluation.load_beir_folder(data)
    queries = {key: text for key, text in queries.items() if key in qrels}
    colbert = models.ColBERT(model)
    ids = [document["id"] for document in documents]

    def encode(texts: list[str], is_query: bool) -> list[Tensor]:
        embeddings = colbert.encode(texts, is_query=is_query, convert_to_tensor=True, show_progress_bar=False)
        return [torch.as_tensor(embedding, device=colbert.device) for embedding in embeddings]

    def evaluate(scores: Tensor) -> float:
        best = best_documents(scores, _KEPT)
        kept = scores.cpu().gather(1, best).tolist()
        found = [
            [{"id": ids[document], "score": score} for document, score in zip(*row, strict=True)]
            for row in zip(best.tolist(), kept, strict=True)
        ]
        # Of a single metric, ranx returns the number alone.
        return evaluation.evaluate(found, qrels, queries=list(queries), metrics=["ndcg@10", "recall@100"])["ndcg@10"]

    with torch.no_grad():
        return measure(
            encode([document["text"] for document in documents], False), encode(list(queries.values()), True), evaluate
        )


def main(
    data: Annotated[Path, typer.Argument(help="A folder in BEIR's layout.")],
    model: Annotated[str, typer.Argument(help="A model folder.")],
    output: Annotated[
        Optional[Path],  # noqa: UP007, UP045 - typer evaluates this on Python 3.10 as well
        typer.Option(help="A folder for the table, a JSON file named as the collection's folder."),
    ] = None,
) -> None:
    """Print what quantizing the documents of a collection changes."""
    rows = run(data, model)
    for row in rows:
        print("  ".join(f"{key} {value:.4f}" if isinstance(value, float) else f"{value}" for key, value in row.items()))
    if output is not None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        result = {
            "collection": data.resolve().name,
            "date": date().partition("T")[0],
            "machine": describe_machine(device),
            "versions": describe_versions(),
            "rows": rows,
        }
        write(result, output / f"{result['collection']}.json")


if __name__ == "__main__":
    typer.run(main)
