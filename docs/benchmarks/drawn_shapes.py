"""Shapes that nobody chose: what the package computes in several ways, at shapes drawn at random.

    python docs/benchmarks/drawn_shapes.py --output drawn.json
    python docs/benchmarks/drawn_shapes.py --operations --shapes 50 --output operations.json

The rows of the suites are the shapes that kernels were tuned at. Between them, a plan may be wrong by any factor. So
this compares ways that should take about as long (packed documents, and padded ones under a mask; 8 bits and 16; with
`--operations`, other operations and what they are made of), and some with their floors, and names what takes much
longer than it should. Other packages, which tune themselves for minutes at every new shape, are not asked.

Kernels are compiled first, by several processes, each of which makes every call of its share of the shapes once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from tqdm import tqdm

from pylate_flash import (
    ResidualCodes,
    chamfer,
    maxsim,
    maxsim_cross_entropy,
    maxsim_from_hidden,
    maxsim_pairwise,
    maxsim_residual,
    maxsim_sparse_queries,
    maxsim_varlen,
    maxsim_varlen_pairwise,
    quantize,
    soft_maxsim,
    xtr_scores,
)
from pylate_flash.bench.calls import bounds_of, unit_vectors
from pylate_flash.bench.protocol import QUICK, Ceilings, floor_of, make_two_times_stopwatch, measure, measure_ceilings
from pylate_flash.bench.rows import L2, Row
from pylate_flash.bench.suite import CPU_FLOPS
from script_results import about, write

SIZES = (48, 64, 96, 128, 128, 128, 192, 256, 320, 384, 512, 768, 1024)
# What a shape may take, in operations and in bytes of its documents, and at least, or a launch is all that is seen.
MOST_FLOPS, LEAST_FLOPS, MOST_BYTES = 1.2e12, 1e9, 4e8
# What models give for a token, before it is projected.
HIDDEN_SIZE = 768
# Of what is launched and waited for, in milliseconds, whatever the shape.
OF_A_CALL = 0.005


# By name.
Calls = dict[str, Callable[[], Any]]


class Limit(NamedTuple):
    """`way` should take at most `factor` times as long as `other`, which is another one or a floor."""

    way: str
    other: str
    factor: float


LIMITS = (
    Limit("padded", "floor", 2.0),
    Limit("packed", "masked", 1.2),
    Limit("masked", "padded", 1.3),
    Limit("normalised", "padded", 1.5),
    Limit("int8", "padded", 1.1),
    Limit("fp8", "padded", 1.1),
    Limit("uint8", "int8", 1.3),
    Limit("packed int8", "packed", 1.1),
    Limit("packed 4 bits", "packed", 1.3),
    Limit("step", "floor of a step", 3.0),
    Limit("masked step", "step", 1.2),
    Limit("soft step", "step", 8.0),
    Limit("own documents", "one query", 1.2),
    Limit("own packed documents", "own documents", 1.2),
    Limit("pairs", "one query", 1.3),
    Limit("packed pairs", "pairs", 1.2),
    Limit("chamfer", "pairs", 2.5),
    Limit("queries mask", "padded", 1.2),
    Limit("half the tokens", "padded", 1.2),
    Limit("float32", "padded", 3.5),
    Limit("soft", "padded", 3.0),
    Limit("xtr", "padded", 3.0),
    Limit("hidden", "projected", 1.05),
    Limit("hidden step", "projected step", 1.05),
    Limit("cross entropy step", "step", 1.15),
    Limit("packed step", "masked step", 1.2),
    Limit("float32 step", "step", 3.5),
    Limit("pairs step", "pairs", 5.0),
    Limit("own documents step", "own documents", 5.0),
)


def draw(number: int, seed: int) -> list[Row]:
    """Shapes, whose lengths and numbers are drawn by their logarithms."""
    generator = random.Random(seed)
    found: list[Row] = []

    def between(low: int, high: int) -> int:
        return round(2 ** generator.uniform(math.log2(low), math.log2(high)))

    while len(found) < number:
        queries = generator.choice((1, between(2, 40), between(2, 40), between(40, 500)))
        length = between(6, 1000)
        row = Row(
            f"drawn-{seed}-{len(found)}",
            queries,
            between(50, 20_000),
            between(4, 200) if generator.random() < 0.75 else between(200, 1100),
            length,
            d=generator.choice(SIZES),
            shortest=max(1, length // generator.choice((2, 3, 8))),
        )
        elements = row.Nd * row.Ld * row.d
        if LEAST_FLOPS < 2.0 * row.Nq * row.Lq * elements < MOST_FLOPS and 2 * elements < MOST_BYTES:
            found.append(row)
    return found


def step(of: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> Callable[[], tuple[Tensor, ...]]:
    """A call with the gradients of all its inputs but boundaries."""
    inputs = tuple(tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs)
    leaves = [tensor for tensor in inputs if tensor.requires_grad]

    def run() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            found = of(*inputs, **options)
            return torch.autograd.grad(found, leaves, torch.ones_like(found))

    return run


def ways(row: Row, device: torch.device) -> Calls:
    """The calls to compare, in bfloat16, by name; codes only of sizes that have them."""
    generator = torch.Generator(device).manual_seed(0)
    unit = partial(unit_vectors, generator=generator, dtype=torch.bfloat16)
    queries, documents, lengths = unit(row.Nq, row.Lq, row.d), unit(row.Nd, row.Ld, row.d), row.lengths()
    mask = (torch.arange(row.Ld) < lengths.unsqueeze(1)).to(device)
    packed, bounds = documents[mask], bounds_of(lengths).to(device)
    packed_queries = queries.flatten(0, 1)
    query_bounds = torch.arange(row.Nq + 1, dtype=torch.int32, device=device) * row.Lq
    told: dict[str, Any] = {"max_query_length": row.Lq, "max_document_length": row.Ld}

    def of_packed(of: Any) -> Callable[[], Tensor]:
        return partial(maxsim_varlen, packed_queries, of, query_bounds, bounds, **told)

    found: Calls = {
        "padded": partial(maxsim, queries, documents),
        "masked": partial(maxsim, queries, documents, documents_mask=mask),
        "normalised": partial(maxsim, queries, documents, normalize=True),
        "packed": of_packed(packed),
        "step": step(maxsim, queries, documents),
        "masked step": step(maxsim, queries, documents, documents_mask=mask),
        "soft step": step(partial(soft_maxsim, beta=10.0), queries, documents),
        "packed int8": of_packed(quantize(packed)),
    }
    for precision in ("int8", "uint8", "fp8"):
        found[precision] = partial(maxsim, queries, quantize(documents, precision))
    if row.d <= 128 and row.d % 32 == 0:
        found["packed 4 bits"] = partial(maxsim_residual, queries, codes(len(packed), row.d, bounds, generator))
    return found


def operations(row: Row, device: torch.device) -> Calls:
    """Calls of other operations, and of `maxsim` what they should take about as long as, by name."""
    generator = torch.Generator(device).manual_seed(0)
    unit = partial(unit_vectors, generator=generator, dtype=torch.bfloat16)
    queries, documents, lengths = unit(row.Nq, row.Lq, row.d), unit(row.Nd, row.Ld, row.d), row.lengths()
    mask = (torch.arange(row.Ld) < lengths.unsqueeze(1)).to(device)
    queries_mask = torch.rand(row.Nq, row.Lq, device=device, generator=generator) < 0.9
    hidden, weight = unit(row.Nd, row.Ld, HIDDEN_SIZE), unit(row.d, HIDDEN_SIZE)
    each, every = max(1, row.Nd // row.Nq), torch.arange(row.Nd, device=device) % row.Nq
    alone, own = queries[: row.Nd], documents[: each * row.Nq].unflatten(0, (-1, each))
    meeting = queries[every]
    packed, bounds, boundaries = documents[mask], bounds_of(lengths).to(device), partial(torch.arange, device=device)
    told: dict[str, Any] = {"max_query_length": row.Lq, "max_document_length": row.Ld}
    candidates = boundaries(row.Nq + 1) * row.Nd // row.Nq
    labels, half = boundaries(row.Nq) % row.Nd, boundaries(0, row.Lq, 2).expand(row.Nd, -1).contiguous()

    def projected(queries: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
        return maxsim(queries, F.linear(hidden, weight), normalize=True)

    wide = queries.float(), documents.float()
    of_packed = queries.flatten(0, 1), packed, boundaries(row.Nq + 1) * row.Lq, bounds
    of_pairs = meeting.flatten(0, 1), packed, boundaries(row.Nd + 1) * row.Lq, bounds
    return {
        "padded": partial(maxsim, queries, documents),
        "one query": partial(maxsim, queries[:1], documents),
        "own documents": partial(maxsim, alone, own),
        "pairs": partial(maxsim_pairwise, meeting, documents),
        "packed pairs": partial(maxsim_varlen_pairwise, *of_pairs, **told),
        "chamfer": partial(chamfer, meeting, documents, metric="inner_product"),
        "queries mask": partial(maxsim, queries, documents, queries_mask=queries_mask),
        "half the tokens": partial(maxsim_sparse_queries, queries, documents, half),
        "float32": partial(maxsim, *wide),
        "soft": partial(soft_maxsim, queries, documents, 10.0),
        "xtr": partial(xtr_scores, queries, documents),
        "hidden": partial(maxsim_from_hidden, queries, hidden, weight),
        "projected": partial(projected, queries, hidden, weight),
        "hidden step": step(maxsim_from_hidden, queries, hidden, weight),
        "projected step": step(projected, queries, hidden, weight),
        "step": step(maxsim, queries, documents),
        "masked step": step(maxsim, queries, documents, documents_mask=mask),
        "packed step": step(maxsim_varlen, *of_packed, **told),
        "cross entropy step": step(maxsim_cross_entropy, queries, documents, labels=labels),
        "float32 step": step(maxsim, *wide),
        "pairs step": step(maxsim_pairwise, meeting, documents),
        "own documents step": step(maxsim, alone, own),
        "own packed documents": partial(maxsim_varlen, *of_packed, candidates_cu_seqlens=candidates, **told),
    }


def codes(n_tokens: int, size: int, bounds: Tensor, generator: torch.Generator) -> ResidualCodes:
    """Random codes of 4 bits, with as many centroids as PLAID would have."""
    device = generator.device
    number = min(n_tokens, 1 << int(16 * n_tokens**0.5).bit_length() - 1)
    draw_integers = partial(torch.randint, device=device, generator=generator)
    return ResidualCodes(
        draw_integers(number, (n_tokens,), dtype=torch.int32),
        draw_integers(256, (n_tokens, size // 2), dtype=torch.uint8),
        unit_vectors(number, size, generator=generator, dtype=torch.float16),
        torch.linspace(-1.0, 1.0, 16, device=device).half() / size**0.5,
        bounds,
    )


def beyond(times: Mapping[str, float]) -> dict[str, float]:
    """Which ways take longer than `LIMITS` say, with the factor that they take: "int8 / padded" and so on."""
    found = {}
    for way, other, factor in LIMITS:
        if way in times and other in times and times[way] > factor * times[other] + OF_A_CALL:
            found[f"{way} / {other}"] = round(times[way] / times[other], 2)
    return found


def call_once(of: Callable[[Row, torch.device], Calls], rows: list[Row], device: str) -> None:
    """Make every call of some shapes, so that its kernels are compiled and kept."""
    with torch.no_grad():
        for row in rows:
            for call in of(row, torch.device(device)).values():
                call()


def compare(
    of: Callable[[Row, torch.device], Calls], row: Row, device: torch.device, ceilings: Ceilings
) -> dict[str, Any]:
    """A shape with its floors, the times of its ways, of a GPU alone, and what is beyond a limit."""
    stopwatch = make_two_times_stopwatch(device, QUICK.flush_bytes)
    with torch.no_grad():
        timings = measure(of(row, device), stopwatch, QUICK)
    found = {
        name: timing.median_ms if timing.device_ms is None else timing.device_ms for name, timing in timings.items()
    }
    # Of padded documents, with their padding.
    whole = replace(row, shortest=None)
    floors = {"floor": whole, "floor of a step": replace(whole, step=True)}
    times = {name: floor_of(some.work(torch.bfloat16), ceilings).milliseconds for name, some in floors.items()} | found
    rounded = {name: float(f"{time:.4g}") for name, time in times.items()}
    return {"name": row.name, "shape": row.shape, "milliseconds": rounded, "beyond": beyond(times)}


def main(
    output: Annotated[Path, typer.Option(help="A .json file, written after every shape.", dir_okay=False)],
    shapes: Annotated[int, typer.Option(help="How many are drawn.", min=1)] = 100,
    seed: Annotated[int, typer.Option(help="Which shapes: other ones for each seed.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes that compile.", min=1)] = 12,
    other: Annotated[bool, typer.Option("--operations", help="Operations besides MaxSim, and float32.")] = False,
) -> None:
    """Compare the package's own ways at shapes drawn at random, on a GPU; a CPU gets smaller batches of them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, of = draw(shapes, seed), operations if other else ways
    if device.type == "cpu":
        rows = [row.within(CPU_FLOPS) for row in rows]
    else:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            shares = [pool.submit(call_once, of, rows[first::workers], device.type) for first in range(workers)]
            for share in tqdm(shares, desc="compiling", unit="share"):
                share.result()
    ceilings = measure_ceilings(device, torch.bfloat16, others=L2)
    result: dict[str, Any] = {**about(), "seed": seed, "rows": []}
    for row in tqdm(rows, desc="timing", unit="shape"):
        found = compare(of, row, device, ceilings)
        result["rows"].append(found)
        write(result, output)
        if found["beyond"]:
            named = ", ".join(f"{name} {factor}" for name, factor in found["beyond"].items())
            tqdm.write(f"{found['shape']}: {named}")


if __name__ == "__main__":
    typer.run(main)
