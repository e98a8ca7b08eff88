"""The contrastive loss with negatives of all ranks: agreement with one process, time and memory.

    torchrun --nproc-per-node 2 docs/benchmarks/ranks.py --output ranks.json

`losses.Contrastive` gets precomputed embeddings, in bfloat16 on GPUs (NCCL) and float32 on CPUs (gloo). Each rank pads
its documents to its own length. Two batches are compared with one process that has the whole batch: a full one, split
evenly, and the last one of an epoch, of which the last rank has less. The full one is timed, on all ranks and on the
first alone.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer

from pylate_flash.bench.steps import Embedded
from script_results import about, device_of_rank, ranks_of_torchrun, write

TEMPERATURE = 0.5
GATHERINGS = ("all_gather", "ring")


@dataclass(frozen=True)
class Sizes:
    """Queries in a full batch over all ranks, and tokens per text; documents have ``shortest`` or more."""

    batch_size: int = 8192
    query_length: int = 32
    document_length: int = 180
    shortest: int = 60
    embedding_size: int = 128


@dataclass(frozen=True)
class Share:
    """The share of a rank: embeddings [N, L, d], which require gradients, and the mask of its documents [N, L]."""

    queries: torch.Tensor
    documents: torch.Tensor
    documents_mask: torch.Tensor

    @property
    def leaves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensors that get gradients."""
        return self.queries, self.documents


def counts(sizes: Sizes, world: int, ragged: bool) -> list[int]:
    """The number of queries per rank: equal, but if ``ragged`` a third of that on the last one."""
    n_queries = [sizes.batch_size // world] * world
    if ragged:
        n_queries[-1] = max(1, n_queries[-1] // 3)
    return n_queries


def share_of(rank: int, count: int, sizes: Sizes, device: torch.device) -> Share:
    """Draw the share of a rank; odd ranks have shorter documents."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    random = torch.Generator(device).manual_seed(rank)
    longest = sizes.document_length - (sizes.document_length - sizes.shortest) // 4 * (rank % 2)
    lengths = torch.randint(sizes.shortest, longest + 1, (count, 1), generator=random, device=device)
    padded = int(lengths.max())

    def draw(length: int) -> torch.Tensor:
        drawn = torch.randn(count, length, sizes.embedding_size, generator=random, device=device)
        return drawn.to(dtype).requires_grad_()

    return Share(draw(sizes.query_length), draw(padded), torch.arange(padded, device=device) < lengths)


def whole(shares: list[Share]) -> Share:
    """Concatenate all shares, with documents padded to the longest."""
    longest = max(share.documents.shape[1] for share in shares)
    with torch.no_grad():
        documents = torch.cat(
            [F.pad(share.documents, (0, 0, 0, longest - share.documents.shape[1])) for share in shares]
        )
        masks = torch.cat(
            [F.pad(share.documents_mask, (0, longest - share.documents_mask.shape[1])) for share in shares]
        )
        queries = torch.cat([share.queries for share in shares])
    return Share(queries.requires_grad_(), documents.requires_grad_(), masks)


def step(share: Share, **arguments: Any) -> torch.Tensor:
    """Return the loss; the gradients are in the share's leaves."""
    from pylate_flash import losses

    model: Any = Embedded()
    model.do_query_expansion = True
    loss = losses.Contrastive(model, temperature=TEMPERATURE, scorer="pylate_flash", **arguments)
    for leaf in share.leaves:
        leaf.grad = None
    ids = [torch.full(leaf.shape[:2], 100, device=leaf.device) for leaf in share.leaves]
    masks = [torch.ones_like(ids[0]), share.documents_mask.long()]
    value = loss(
        [
            {"input_ids": tokens, "attention_mask": mask, "token_embeddings": leaf}
            for tokens, mask, leaf in zip(ids, masks, share.leaves, strict=True)
        ]
    )
    value.backward()
    return value.detach()


def gathered(tensors: list[torch.Tensor], rank: int, like: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Return on the first rank the tensors of all ranks, with the shapes of ``like``; elsewhere this rank's own.

    They are sent in float32.
    """
    if rank:
        for tensor in tensors:
            dist.send(tensor.float().contiguous(), 0)
        return [tensors]
    by_rank = [tensors]
    for source in range(1, dist.get_world_size()):
        received = [torch.empty(other.shape, dtype=torch.float32, device=other.device) for other in like[source]]
        for tensor in received:
            dist.recv(tensor, source)
        by_rank.append(received)
    return by_rank


def errors(sizes: Sizes, ragged: bool, gather: str, rank: int, device: torch.device) -> dict[str, float] | None:
    """Relative errors (Frobenius norm) of the loss and gradients of all ranks against one process.

    None on all ranks but the first.
    """
    world = dist.get_world_size()
    shares = [share_of(other, count, sizes, device) for other, count in enumerate(counts(sizes, world, ragged))]
    value = step(shares[rank], gather_across_devices=True, gather=gather)
    dist.all_reduce(value)
    own_gradients = [leaf.grad for leaf in shares[rank].leaves if leaf.grad is not None]
    by_rank = gathered(own_gradients, rank, [list(share.leaves) for share in shares])
    if rank:
        return None
    combined = whole(shares)
    expected = step(combined)
    # The loss is the mean over all queries, and each rank's is scaled by the number of ranks; so are gradients.
    value /= world**2
    gradients = [[gradient.double() / world**2 for gradient in rank_gradients] for rank_gradients in by_rank]
    return {"loss": abs(value.item() / expected.item() - 1.0), **distances(gradients, shares, combined)}


def distances(gradients: list[list[torch.Tensor]], shares: list[Share], combined: Share) -> dict[str, float]:
    """Relative errors of the shares' gradients against those of one process with all shares."""
    errors_by_name = {}
    for index, name in enumerate(("queries", "documents")):
        gradient = combined.leaves[index].grad
        assert gradient is not None
        difference, start = 0.0, 0
        for share, rank_gradients in zip(shares, gradients, strict=True):
            count, length, _ = share.leaves[index].shape
            right = gradient[start : start + count, :length].double()
            difference += (rank_gradients[index] - right).square().sum().item()
            start += count
        errors_by_name[name] = (difference / gradient.double().square().sum().item()) ** 0.5
    return errors_by_name


def measure(share: Share, steps: int, device: torch.device, **arguments: Any) -> tuple[float, int]:
    """Median seconds of a step, and its peak bytes beyond those held before (0 on a CPU)."""
    seconds = []
    peak = before = 0
    for number in range(steps + 2):
        for leaf in share.leaves:
            leaf.grad = None
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        if arguments:
            dist.barrier()
        started = time.perf_counter()
        step(share, **arguments)
        if device.type == "cuda":
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        if number >= 2:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), peak


def link(share: Share, steps: int, device: torch.device) -> dict[str, float]:
    """Median seconds of an all-gather of the documents, and the bytes that each rank contributes."""
    documents = share.documents.detach().contiguous()
    longest = torch.tensor(documents.shape[1], device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    documents = F.pad(documents, (0, 0, 0, int(longest) - documents.shape[1]))
    received = [torch.empty_like(documents) for _ in range(dist.get_world_size())]
    seconds = []
    for _ in range(steps + 2):
        dist.barrier()
        started = time.perf_counter()
        dist.all_gather(received, documents)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return {"seconds": largest((statistics.median(seconds[2:]), 0), device)[0], "bytes": documents.nbytes}


def largest(values: tuple[float, int], device: torch.device) -> tuple[float, int]:
    """The longest time and the most memory over all ranks."""
    maxima = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(maxima, dist.ReduceOp.MAX)
    return maxima[0].item(), int(maxima[1])


def compare(sizes: Sizes, steps: int) -> dict[str, Any]:
    """Measure on the ranks of the default process group; only the first rank has the errors.

    Returns
    -------
    dict
        "world"; "errors" of loss, queries and documents, per gathering and batch; "rows": ranks, gathering (None for
        one process with the whole batch), "seconds", and "bytes" per rank, None on CPUs; "link": from `link`.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    device = device_of_rank()
    result: dict[str, Any] = {"world": world, "errors": {}, "rows": []}
    for gather in GATHERINGS:
        for name, ragged in (("full batch", False), ("last batch", True)):
            result["errors"][f"{gather}, {name}"] = errors(sizes, ragged, gather, rank, device)
    even = counts(sizes, world, False)
    if rank == 0:
        full_batch = whole([share_of(other, count, sizes, device) for other, count in enumerate(even)])
        seconds, taken = measure(full_batch, steps, device)
        result["rows"].append({"ranks": 1, "gather": None, "seconds": seconds, "bytes": taken or None})
        del full_batch
    dist.barrier()
    share = share_of(rank, even[rank], sizes, device)
    for gather in GATHERINGS:
        own = measure(share, steps, device, gather_across_devices=True, gather=gather)
        seconds, taken = largest(own, device)
        result["rows"].append({"ranks": world, "gather": gather, "seconds": seconds, "bytes": taken or None})
    result["link"] = link(share, steps, device)
    return result


def table(result: dict[str, Any]) -> str:
    """The result as Markdown tables."""
    first = result["rows"][0]["seconds"]
    lines = ["| ranks | gathered | s | of one rank's | GB of a rank |", "|---:|---|---:|---:|---:|"]
    for row in result["rows"]:
        taken = "-" if row["bytes"] is None else f"{row['bytes'] / 1e9:.2f}"
        share = row["seconds"] / first
        lines.append(f"| {row['ranks']} | {row['gather'] or '-'} | {row['seconds']:.4f} | {share:.2f} | {taken} |")
    exchange = result["link"]
    lines += [
        "",
        f"Gathering the documents, {exchange['bytes'] / 1e6:.0f} MB of each rank, alone: {exchange['seconds']:.4f} s.",
    ]
    lines += ["", "| batch | loss | queries | documents |", "|---|---:|---:|---:|"]
    for name, entry in result["errors"].items():
        lines.append(f"| {name} | {entry['loss']:.1e} | {entry['queries']:.1e} | {entry['documents']:.1e} |")
    return "\n".join(lines)


def main(
    output: Annotated[Path, typer.Option(help="A .json file, which the first rank writes.")],
    batch_size: Annotated[int, typer.Option(help="Queries of all ranks together.")] = Sizes.batch_size,
    steps: Annotated[int, typer.Option(help="Steps that are timed.")] = 10,
) -> None:
    """Compare and measure, in the processes that torchrun starts."""
    with ranks_of_torchrun(minutes=3):
        result = compare(Sizes(batch_size), steps)
        if dist.get_rank() == 0:
            write({**result, **about(), "batch_size": batch_size}, output)
            print(table(result), flush=True)


if __name__ == "__main__":
    typer.run(main)
