"""The cost of quantized documents in retrieval: nDCG@10, and the overlap of the best 20 documents.

    python docs/benchmarks/quality.py demo-output/data demo-output/model --output docs/benchmarks/results/quality/

Every query is scored exactly against every document of a collection in BEIR's layout: with embeddings in bfloat16, with
documents in 8 bits and queries in 8 bits or unquantized, and with documents as residual codes of a codec trained on
them.
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

# Documents retrieved per query, and the depth of the reported overlap.
_KEPT = 100
OVERLAP = 20
# Queries scored at a time.
_QUERIES = 64


def best_documents(scores: Tensor, k: int) -> Tensor:
    """The `k` best documents (or all) of each query [Nq, k], best first; ties rank the first document first."""
    return scores.cpu().argsort(dim=1, descending=True, stable=True)[:, :k]


def overlap(first: Tensor, second: Tensor) -> float:
    """Mean share of the documents [Nq, k] in the first that are also in the second."""
    return (first.unsqueeze(2) == second.unsqueeze(1)).any(dim=2).double().mean().item()


def measure(documents: list[Tensor], queries: list[Tensor], evaluate: Any) -> list[dict[str, Any]]:
    """The rows of the table, one per precision, bfloat16 first, then residual codes; bytes are those of documents.

    Parameters
    ----------
    documents, queries
        Token embeddings [L_i, d], on one device.
    evaluate
        Maps scores [Nq, Nd] to nDCG@10.
    """
    values, bounds = pack([document.bfloat16() for document in documents])
    query_values, query_bounds = pack([query.bfloat16() for query in queries])

    def scores(precision: str | None, quantize_queries: bool) -> Tensor:
        stored = values if precision is None else quantize(values, precision)
        query_scores = []
        for first in range(0, len(queries), _QUERIES):
            part = query_bounds[first : first + _QUERIES + 1]
            chunk = query_values[int(part[0]) : int(part[-1])]
            query_scores.append(maxsim_varlen(chunk, stored, part - part[0], bounds, quantize_queries=quantize_queries))
        return torch.cat(query_scores)

    def residual_scores(stored: ResidualCodes) -> Tensor:
        query_scores = []
        for first in range(0, len(queries), _QUERIES):
            chunk = [query.bfloat16() for query in queries[first : first + _QUERIES]]
            mask = pad_sequence([query.new_ones(len(query), dtype=torch.bool) for query in chunk], batch_first=True)
            query_scores.append(maxsim_residual(pad_sequence(chunk, batch_first=True), stored, queries_mask=mask))
        return torch.cat(query_scores)

    rows: list[dict[str, Any]] = []
    plain = scores(None, False)

    def add(stored: str, queries: str, query_scores: Tensor, n_bytes: int) -> None:
        ndcg = evaluate(query_scores)
        rows.append(
            {
                "documents": stored,
                "queries": queries,
                "ndcg@10": ndcg,
                "difference": ndcg - (rows[0]["ndcg@10"] if rows else ndcg),
                f"overlap@{OVERLAP}": overlap(best_documents(query_scores, OVERLAP), best_documents(plain, OVERLAP)),
                "bytes": n_bytes,
            }
        )

    add("bfloat16", "bfloat16", plain, values.nbytes)
    for precision in PRECISIONS:
        for quantize_queries in (True, False):
            query_type = "bfloat16" if not quantize_queries else "fp8" if precision == "fp8" else "int8"
            query_scores = scores(precision, quantize_queries)
            add(precision, query_type, query_scores, quantize(values, precision).nbytes)
    for nbits in reversed(NBITS):
        stored = train_residual_codec(values, nbits=nbits).compress(values, bounds)
        add(f"residual, {nbits} bits", "bfloat16", residual_scores(stored), stored.nbytes)
    return rows


def run(data: Path, model: str) -> list[dict[str, Any]]:
    """The rows of the table for a collection and a model."""
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
        top_scores = scores.cpu().gather(1, best).tolist()
        rankings = [
            [{"id": ids[document], "score": score} for document, score in zip(*row, strict=True)]
            for row in zip(best.tolist(), top_scores, strict=True)
        ]
        # For a single metric ranx returns a bare number instead of a dict.
        return evaluation.evaluate(rankings, qrels, queries=list(queries), metrics=["ndcg@10", "recall@100"])["ndcg@10"]

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
