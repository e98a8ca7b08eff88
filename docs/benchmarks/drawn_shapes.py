"""Random shapes: compare several calls of the package that should take about as long.

    python docs/benchmarks/drawn_shapes.py --output drawn.json
    python docs/benchmarks/drawn_shapes.py --operations --shapes 50 --output operations.json

The rows of the suites are the shapes that kernels were tuned for. Between them, a plan may be slow by any factor. This
script compares calls that should take about as long (packed documents, and padded ones with a mask; 8 bits and 16; with
`--operations`, other operations and their parts), and some with their floors, and reports those that take much longer
than they should. Other packages, which tune for minutes at every new shape, are not measured.

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
# Limits of a shape, in operations and in bytes of its documents; below the least, only the launch would be measured.
MOST_FLOPS, LEAST_FLOPS, MOST_BYTES = 1.2e12, 1e9, 4e8
# The hidden size of models, before the projection.
HIDDEN_SIZE = 768
# Milliseconds of launch and synchronisation that any call may take on top, whatever the shape.
OF_A_CALL = 0.005


# Calls by name.
Calls = dict[str, Callable[[], Any]]


class Limit(NamedTuple):
    """`way` should take at most `factor` times as long as `other`, which is another call or a floor."""

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
    """Draw shapes, with log-uniform lengths and numbers."""
    generator = random.Random(seed)
    rows: list[Row] = []

    def between(low: int, high: int) -> int:
        return round(2 ** generator.uniform(math.log2(low), math.log2(high)))

    while len(rows) < number:
        queries = generator.choice((1, between(2, 40), between(2, 40), between(40, 500)))
        length = between(6, 1000)
        row = Row(
            f"drawn-{seed}-{len(rows)}",
            queries,
            between(50, 20_000),
            between(4, 200) if generator.random() < 0.75 else between(200, 1100),
            length,
            d=generator.choice(SIZES),
            shortest=max(1, length // generator.choice((2, 3, 8))),
        )
        elements = row.Nd * row.Ld * row.d
        if LEAST_FLOPS < 2.0 * row.Nq * row.Lq * elements < MOST_FLOPS and 2 * elements < MOST_BYTES:
            rows.append(row)
    return rows


def step(operation: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> Callable[[], tuple[Tensor, ...]]:
    """A call with the gradients of all floating-point inputs."""
    inputs = tuple(tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs)
    leaves = [tensor for tensor in inputs if tensor.requires_grad]

    def run() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            output = operation(*inputs, **options)
            return torch.autograd.grad(output, leaves, torch.ones_like(output))

    return run


def ways(row: Row, device: torch.device) -> Calls:
    """The calls to compare, in bfloat16, by name; residual codes only for embedding sizes that support them."""
    generator = torch.Generator(device).manual_seed(0)
    unit = partial(unit_vectors, generator=generator, dtype=torch.bfloat16)
    queries, documents, lengths = unit(row.Nq, row.Lq, row.d), unit(row.Nd, row.Ld, row.d), row.lengths()
    mask = (torch.arange(row.Ld) < lengths.unsqueeze(1)).to(device)
    packed, bounds = documents[mask], bounds_of(lengths).to(device)
    packed_queries = queries.flatten(0, 1)
    query_bounds = torch.arange(row.Nq + 1, dtype=torch.int32, device=device) * row.Lq
    max_lengths: dict[str, Any] = {"max_query_length": row.Lq, "max_document_length": row.Ld}

    def of_packed(tokens: Any) -> Callable[[], Tensor]:
        return partial(maxsim_varlen, packed_queries, tokens, query_bounds, bounds, **max_lengths)

    calls: Calls = {
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
        calls[precision] = partial(maxsim, queries, quantize(documents, precision))
    if row.d <= 128 and row.d % 32 == 0:
        calls["packed 4 bits"] = partial(maxsim_residual, queries, codes(len(packed), row.d, bounds, generator))
    return calls


def operations(row: Row, device: torch.device) -> Calls:
    """Calls of other operations, and the `maxsim` calls that should take about as long, by name."""
    generator = torch.Generator(device).manual_seed(0)
    unit = partial(unit_vectors, generator=generator, dtype=torch.bfloat16)
    queries, documents, lengths = unit(row.Nq, row.Lq, row.d), unit(row.Nd, row.Ld, row.d), row.lengths()
    mask = (torch.arange(row.Ld) < lengths.unsqueeze(1)).to(device)
    queries_mask = torch.rand(row.Nq, row.Lq, device=device, generator=generator) < 0.9
    hidden, weight = unit(row.Nd, row.Ld, HIDDEN_SIZE), unit(row.d, HIDDEN_SIZE)
    n_own, query_of_document = max(1, row.Nd // row.Nq), torch.arange(row.Nd, device=device) % row.Nq
    own_queries, own_documents = queries[: row.Nd], documents[: n_own * row.Nq].unflatten(0, (-1, n_own))
    paired_queries = queries[query_of_document]
    packed, bounds, boundaries = documents[mask], bounds_of(lengths).to(device), partial(torch.arange, device=device)
    max_lengths: dict[str, Any] = {"max_query_length": row.Lq, "max_document_length": row.Ld}
    candidates = boundaries(row.Nq + 1) * row.Nd // row.Nq
    labels, half = boundaries(row.Nq) % row.Nd, boundaries(0, row.Lq, 2).expand(row.Nd, -1).contiguous()

    def projected(queries: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
        return maxsim(queries, F.linear(hidden, weight), normalize=True)

    float32_inputs = queries.float(), documents.float()
    packed_inputs = queries.flatten(0, 1), packed, boundaries(row.Nq + 1) * row.Lq, bounds
    packed_pairs = paired_queries.flatten(0, 1), packed, boundaries(row.Nd + 1) * row.Lq, bounds
    return {
        "padded": partial(maxsim, queries, documents),
        "one query": partial(maxsim, queries[:1], documents),
        "own documents": partial(maxsim, own_queries, own_documents),
        "pairs": partial(maxsim_pairwise, paired_queries, documents),
        "packed pairs": partial(maxsim_varlen_pairwise, *packed_pairs, **max_lengths),
        "chamfer": partial(chamfer, paired_queries, documents, metric="inner_product"),
        "queries mask": partial(maxsim, queries, documents, queries_mask=queries_mask),
        "half the tokens": partial(maxsim_sparse_queries, queries, documents, half),
        "float32": partial(maxsim, *float32_inputs),
        "soft": partial(soft_maxsim, queries, documents, 10.0),
        "xtr": partial(xtr_scores, queries, documents),
        "hidden": partial(maxsim_from_hidden, queries, hidden, weight),
        "projected": partial(projected, queries, hidden, weight),
        "hidden step": step(maxsim_from_hidden, queries, hidden, weight),
        "projected step": step(projected, queries, hidden, weight),
        "step": step(maxsim, queries, documents),
        "masked step": step(maxsim, queries, documents, documents_mask=mask),
        "packed step": step(maxsim_varlen, *packed_inputs, **max_lengths),
        "cross entropy step": step(maxsim_cross_entropy, queries, documents, labels=labels),
        "float32 step": step(maxsim, *float32_inputs),
        "pairs step": step(maxsim_pairwise, paired_queries, documents),
        "own documents step": step(maxsim, own_queries, own_documents),
        "own packed documents": partial(maxsim_varlen, *packed_inputs, candidates_cu_seqlens=candidates, **max_lengths),
    }


def codes(n_tokens: int, size: int, bounds: Tensor, generator: torch.Generator) -> ResidualCodes:
    """Random 4-bit residual codes, with as many centroids as PLAID would have."""
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
    """The calls that exceed `LIMITS`, with the factor that they take, as "int8 / padded" and so on."""
    factors = {}
    for way, other, factor in LIMITS:
        if way in times and other in times and times[way] > factor * times[other] + OF_A_CALL:
            factors[f"{way} / {other}"] = round(times[way] / times[other], 2)
    return factors


def call_once(make_calls: Callable[[Row, torch.device], Calls], rows: list[Row], device: str) -> None:
    """Make every call of some shapes once, so that its kernels are compiled and cached."""
    with torch.no_grad():
        for row in rows:
            for call in make_calls(row, torch.device(device)).values():
                call()


def compare(
    make_calls: Callable[[Row, torch.device], Calls], row: Row, device: torch.device, ceilings: Ceilings
) -> dict[str, Any]:
    """Measure a shape: floors, times of its calls (device time on a GPU), and those beyond a limit."""
    stopwatch = make_two_times_stopwatch(device, QUICK.flush_bytes)
    with torch.no_grad():
        timings = measure(make_calls(row, device), stopwatch, QUICK)
    measured = {
        name: timing.median_ms if timing.device_ms is None else timing.device_ms for name, timing in timings.items()
    }
    # Floors count the padding, as for padded documents.
    padded_row = replace(row, shortest=None)
    floors = {"floor": padded_row, "floor of a step": replace(padded_row, step=True)}
    times = {
        name: floor_of(floor_row.work(torch.bfloat16), ceilings).milliseconds for name, floor_row in floors.items()
    } | measured
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
    rows, make_calls = draw(shapes, seed), operations if other else ways
    if device.type == "cpu":
        rows = [row.within(CPU_FLOPS) for row in rows]
    else:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            shares = [pool.submit(call_once, make_calls, rows[first::workers], device.type) for first in range(workers)]
            for share in tqdm(shares, desc="compiling", unit="share"):
                share.result()
    ceilings = measure_ceilings(device, torch.bfloat16, others=L2)
    result: dict[str, Any] = {**about(), "seed": seed, "rows": []}
    for row in tqdm(rows, desc="timing", unit="shape"):
        entry = compare(make_calls, row, device, ceilings)
        result["rows"].append(entry)
        write(result, output)
        if entry["beyond"]:
            named = ", ".join(f"{name} {factor}" for name, factor in entry["beyond"].items())
            tqdm.write(f"{entry['shape']}: {named}")


if __name__ == "__main__":
    typer.run(main)
