"""An exact index on disk, searched by several GPUs together: agreement with one GPU, and time.

    torchrun --nproc-per-node 2 docs/benchmarks/search_ranks.py --output search.json

The first rank writes documents of 64 to 192 tokens of random unit vectors in bfloat16 (float32 on CPUs), d = 128. All
ranks open the index, load their shares and search them; then the first does so alone. Data in the page cache is not
read from disk.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from pylate_flash.bench.calls import unit_vectors
from pylate_flash.indexes import Flat
from script_results import about, device_of_rank, ranks_of_torchrun, write

K, SIZE, SHORTEST, LONGEST, QUERY_LENGTH = 100, 128, 64, 192, 32
# Documents generated and added at a time.
BATCH = 10_000


def batches(documents: int, device: torch.device) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
    """Yield ids and embeddings of the documents, in batches."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    random, generator = torch.Generator().manual_seed(0), torch.Generator(device).manual_seed(0)
    for first in range(0, documents, BATCH):
        count = min(BATCH, documents - first)
        lengths = torch.randint(SHORTEST, LONGEST + 1, (count,), generator=random).tolist()
        rows = unit_vectors(sum(lengths), SIZE, generator=generator, dtype=dtype)
        yield [f"d{i}" for i in range(first, first + count)], list(rows.split(lengths))


def seconds(call: Callable[[], Any], together: bool) -> tuple[float, Any]:
    """Seconds of a call (if ``together``, until the last rank is done), and its result."""
    if together:
        dist.barrier()
    start = time.perf_counter()
    output = call()
    taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    if together:
        taken = taken.to("cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item(), output


def told(text: str) -> None:
    """Print progress on the first rank."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def measured(
    index: Flat, queries: list[torch.Tensor], steps: int, together: bool
) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
    """Seconds of a first search, which loads the rows, and of further ones; and the lists of all queries."""
    first, _ = seconds(partial(index.search, queries[:1], k=K), together)
    row: dict[str, Any] = {"first": first, "documents": index._search.rows.documents, "searches": {}}
    lists: list[list[dict[str, Any]]] = []
    for number in (1, 32, len(queries)):
        taken = []
        for _ in range(steps + 1):
            one, lists = seconds(partial(index.search, queries[:number], k=K), together)
            taken.append(one)
        row["searches"][str(number)] = statistics.median(taken[1:])
    return row, lists


def compare(folder: Path, documents: int, queries_number: int, steps: int) -> dict[str, Any]:
    """Measure on the ranks of the default process group.

    Returns
    -------
    dict
        "world", "documents", "bytes" and "added" (seconds to add them); "same": whether the lists equal those of one
        rank; "rows", for all ranks and for one: seconds of the "first" search, and "searches" by number of queries.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    device = device_of_rank()
    on_gpu = device.type == "cuda"
    result: dict[str, Any] = {"world": world, "documents": documents}
    options: dict[str, Any] = {"dtype": "bfloat16" if on_gpu else "float32", "device": device, "show_progress": False}
    open_index = partial(Flat, folder, "index", **options)
    generator = torch.Generator(device).manual_seed(1)
    drawn = unit_vectors(queries_number, QUERY_LENGTH, SIZE, generator=generator, dtype=torch.float32)
    queries = list(drawn.cpu())
    # Compile kernels before timing.
    small_index = Flat(None, **options)
    small_index.add_documents(batches(K, device))
    measured(small_index, queries, 1, together=False)
    del small_index
    if rank == 0:
        written = open_index()
        result["added"], _ = seconds(partial(written.add_documents, batches(documents, device)), False)
        result["bytes"] = written.info().bytes
        told(f"{result['bytes'] / 1e9:.1f} GB added in {result['added']:.1f} s")
        del written
    dist.barrier()
    index = open_index(group=dist.group.WORLD)
    row, lists = measured(index, queries, steps, together=True)
    result["rows"] = [{"ranks": world, **row}]
    told(f"all ranks: {row}")
    del index
    if on_gpu:
        torch.cuda.empty_cache()
    dist.barrier()
    if rank == 0:
        row, alone = measured(open_index(), queries, steps, together=False)
        result["rows"].append({"ranks": 1, **row})
        result["same"] = lists == alone
    dist.barrier()
    return result


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table."""
    alone = result["rows"][1]
    numbers = list(alone["searches"])
    lines = [f"| ranks | first search, s | {' | '.join(f'{number} queries, s' for number in numbers)} |"]
    lines.append("|---:" * (2 + len(numbers)) + "|")
    for row in result["rows"]:
        pairs = [(row["first"], alone["first"]), *((row["searches"][n], alone["searches"][n]) for n in numbers)]
        lines.append(f"| {row['ranks']} | {' | '.join(f'{own:.4f} ({own / one:.2f})' for own, one in pairs)} |")
    size = result["bytes"] / 1e9
    lines += [
        "",
        f"{result['documents']} documents, {size:.1f} GB, added by one rank in {result['added']:.1f} s; the lists are "
        f"{'the same' if result['same'] else 'NOT the same'}.",
    ]
    return "\n".join(lines)


def main(
    output: Annotated[Path, typer.Option(help="A .json file, which the first rank writes.")],
    documents: Annotated[int, typer.Option(help="Documents of the index.")] = 1_000_000,
    queries: Annotated[int, typer.Option(help="Queries of the largest search.")] = 1000,
    steps: Annotated[int, typer.Option(help="Searches that are timed.")] = 5,
    folder: Annotated[Path | None, typer.Option(help="Where there is room for the index, for a while.")] = None,
) -> None:
    """Compare and measure, in the processes that torchrun starts."""
    with ranks_of_torchrun(minutes=10):
        shared_folder: list[Any] = [tempfile.mkdtemp(dir=folder) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(shared_folder)
        try:
            result = compare(Path(shared_folder[0]), documents, queries, steps)
        finally:
            if dist.get_rank() == 0:
                shutil.rmtree(shared_folder[0], ignore_errors=True)
        if dist.get_rank() == 0:
            write({**result, **about()}, output)
            print(table(result), flush=True)


if __name__ == "__main__":
    typer.run(main)
