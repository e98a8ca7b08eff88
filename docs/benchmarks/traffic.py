"""Memory traffic of the kernels: counted from their plans, and measured by NVIDIA's profiler.

    python docs/benchmarks/traffic.py --output docs/benchmarks/results/traffic

`expected` counts the loads and stores of every kernel of a forward and a backward; `notebooks/walkthrough.ipynb` steps
through the same kernels load by load, with the same numbers. This script measures them as well: it runs itself under
`ncu` (Nsight Compute) for every shape, and writes both side by side. `ncu` flushes the caches before every kernel.
"""

from __future__ import annotations

import csv
import glob
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import triton
import typer

from pylate_flash import maxsim
from pylate_flash.bench.results import describe_machine
from pylate_flash.kernels import plan_backward, tables_backward
from pylate_flash.kernels.config import hopper_tail
from pylate_flash.kernels.forward import maxsim_forward
from pylate_flash.kernels.plan import ForwardPlan, forward_plan
from pylate_flash.problem import Options, Problem, Tensors, problem_of
from script_results import date, write

RESULTS = Path(__file__).resolve().parent / "results" / "traffic"

# Bytes between memory and L2, total L2 traffic, and L2 reads and writes by SMs.
METRICS = {
    "dram__bytes_read.sum": ("memory_read", "byte"),
    "dram__bytes_write.sum": ("memory_written", "byte"),
    "lts__t_bytes.sum": ("l2_all", "byte"),
    "lts__t_sectors_srcunit_tex_op_read.sum": ("l2_read", "sector"),
    "lts__t_sectors_srcunit_tex_op_write.sum": ("l2_written", "sector"),
}
UNITS = {"byte": 1, "sector": 32}
_NAMES = tuple(name for name, _ in METRICS.values())
# Paths of Nsight Compute if it is not on PATH.
PLACES = ("/opt/nvidia/nsight-compute/*/ncu", "/usr/local/cuda*/bin/ncu", "/usr/local/cuda*/nsight-compute-*/ncu")


@dataclass(frozen=True)
class Shape:
    """Numbers of queries and documents, their lengths, and whether gradients are computed too."""

    name: str
    Nq: int
    Nd: int
    Lq: int
    Ld: int
    backward: bool
    d: int = 128

    def tensors(self, device: torch.device, dtype: torch.dtype) -> Tensors:
        """Random unit vectors."""
        random = torch.Generator(device).manual_seed(0)
        drawn = (
            torch.randn(*shape, self.d, generator=random, device=device)
            for shape in ((self.Nq, self.Lq), (self.Nd, self.Ld))
        )
        return Tensors(*(torch.nn.functional.normalize(embeddings, dim=-1).to(dtype) for embeddings in drawn))


SHAPES = (
    Shape("long-query", 1, 1000, 1024, 1024, backward=False),
    Shape("in-batch", 512, 512, 32, 180, backward=True),
    Shape("pages", 64, 64, 1024, 1024, backward=True),
)


class Traffic(NamedTuple):
    """Bytes of a kernel: every load and store of its programs, and each distinct element once (`read`, `written`).

    Caches save at most the repeated loads, `loaded` minus `read`.
    """

    loaded: int
    stored: int
    read: int
    written: int


def expected(problem: Problem, argmax: torch.Tensor | None = None) -> dict[str, Traffic]:
    """Return the loads and stores of each kernel of a forward and, given an argmax, of a backward.

    Parameters
    ----------
    problem
        Queries [Nq, Lq, d] and documents [Nd, Ld, d], contiguous, in one batch, with neither masks nor `normalize`;
        with the argmax, if it is given.
    argmax
        The winning tokens [Nd, Nq * Lq], all of them valid.

    Returns
    -------
    dict
        Traffic by kernel name. The lookup tables of long lists and the reduction of their parts are left out, as they
        take less than a hundredth.

    Raises
    ------
    ValueError
        If the problem uses other kernels than those counted here.
    """
    plan = forward_plan(problem)
    if plan.kernel != "hopper" or problem.dtype.itemsize > 2:
        served = f"one of the kernel {plan.kernel!r} in {problem.dtype}"
        raise ValueError(f"problem must be one of the Hopper kernel's in half precision, got {served}")
    by_kernel = {"_hopper_kernel": _forward(problem, plan)}
    if argmax is not None:
        by_kernel["_gather_kernel"] = _gather(problem, argmax)
        by_kernel |= _lists(problem, argmax)
    return by_kernel


def _forward(problem: Problem, plan: ForwardPlan) -> Traffic:
    row, columns, length = problem.size * problem.dtype.itemsize, plan.tile.columns, problem.document_length
    tokens = -(-length // columns) * columns
    tail = 0 if problem.with_argmax else hopper_tail(plan.tile, length)
    if tail:
        # The last product of a document is narrower.
        tokens -= columns - tail
    loaded = (plan.n_runs * problem.rows + plan.row_blocks * problem.n_documents * tokens) * row
    written = 4 * plan.n_sums * problem.n_queries * problem.n_documents
    if problem.with_argmax:
        written += problem.rows * problem.n_documents * problem.argmax_dtype.itemsize
    return Traffic(loaded, written, (problem.rows + problem.n_documents * length) * row, written)


def _gather(problem: Problem, argmax: torch.Tensor) -> Traffic:
    if (shares := plan_backward.gather_plan(problem).n_splits) > 1:
        raise ValueError(f"problem must have rows for all processors, but {shares} programs share those of each")
    row, pairs = problem.size * problem.dtype.itemsize, argmax.numel()
    written = problem.rows * row
    index_bytes = problem.argmax_dtype.itemsize
    chosen = sum(len(document.unique()) for document in argmax)
    read = pairs * index_bytes + 4 * problem.n_queries * problem.n_documents + chosen * row
    return Traffic(pairs * (index_bytes + 4 + row), written, read, written)


def _lists(problem: Problem, argmax: torch.Tensor) -> dict[str, Traffic]:
    plan = plan_backward.lists_plan(problem, lent=True)
    if plan.alone_bits:
        raise ValueError("problem must have lists that several programs sort")
    documents, rows, length, segment = problem.n_documents, problem.rows, problem.document_length, plan.segment
    index_bytes, list_bytes, chunk = (
        problem.argmax_dtype.itemsize,
        plan.list_dtype.itemsize,
        1 << tables_backward.LIST_CHUNK_BITS,
    )
    pairs, row, part = argmax.numel(), problem.size * problem.dtype.itemsize, problem.size * 4
    starts = documents * (length + 1) * plan.starts_dtype.itemsize
    order = documents * plan.n_chunks * chunk * 2
    counts = documents * plan.n_chunks * length * 4
    reached = documents * plan.n_chunks * -(-length // tables_backward.LIST_BLOCK_TOKENS) * 4
    # Distinct tokens chosen by the rows of a chunk; each has a start and an end there, of two bytes.
    runs = 4 * sum(len(part.unique()) for document in argmax for part in document.split(chunk))
    sorts = order + counts + reached
    scans = counts + starts

    # A token's own program sums its list up to a segment boundary; others sum the rest, each into a part.
    chosen = torch.stack([document.long().bincount(minlength=length) for document in argmax])
    ends = chosen.cumsum(1)
    boundaries = (-(-(ends - chosen) // segment) + 1) * segment
    n_parts = -(-(ends - boundaries).clamp(min=0) // segment)
    in_parts = int((n_parts > 0).sum())
    stored = (documents * length - in_parts) * row + (in_parts + int(n_parts.sum())) * part
    read = starts + pairs * list_bytes + 4 * problem.n_queries * documents + rows * row
    return {
        "_sort_kernel": Traffic(pairs * index_bytes, sorts + runs, pairs * index_bytes, sorts),
        "_scan_kernel": Traffic(2 * counts + reached, scans, counts + reached, scans),
        "_place_kernel": Traffic(
            order + pairs * (index_bytes + 4),
            pairs * list_bytes,
            order + pairs * index_bytes + runs,
            pairs * list_bytes,
        ),
        "_sum_kernel": Traffic(2 * starts + pairs * (list_bytes + 4 + row), stored, read, stored),
    }


def profiler(patterns: tuple[str, ...] = PLACES) -> str:
    """Return the path of `ncu`.

    Raises
    ------
    FileNotFoundError
        If it is neither on PATH nor matched by one of the glob `patterns`.
    """
    executable = shutil.which("ncu") or next(
        (path for pattern in patterns for path in sorted(glob.glob(pattern))[::-1]), None
    )
    if executable is None:
        raise FileNotFoundError(f"ncu (NVIDIA Nsight Compute) must be on PATH or in one of {', '.join(patterns)}")
    return executable


def parse(printed: str) -> dict[str, dict[str, float]]:
    """Return the metrics of each kernel in a profile, summed over its launches.

    Parameters
    ----------
    printed
        Output of `ncu --csv --page raw --print-units base`: a line of names, one of units, and one per launch.

    Raises
    ------
    ValueError
        If it has no table, or a metric is missing.
    """
    # Other lines of ncu begin with ==.
    table = [line for line in printed.splitlines() if line.startswith('"')]
    if len(table) < 3 or not table[0].startswith('"ID"'):
        raise ValueError(f"ncu must print a table, got: {printed[-2000:]}")
    units, *launches = csv.DictReader(table)
    metrics: dict[str, dict[str, float]] = {}
    for launch in launches:
        of_kernel = metrics.setdefault(launch["Kernel Name"], dict.fromkeys(("launches", *_NAMES), 0))
        of_kernel["launches"] += 1
        for metric, (name, unit) in METRICS.items():
            value = launch.get(metric) or ""
            if not re.fullmatch(r"[0-9.,]+", value) or units[metric] != unit:
                raise ValueError(f"ncu must measure {metric} by {unit}, got {value!r} {units.get(metric)!r}")
            of_kernel[name] += float(value.replace(",", "")) * UNITS[unit]
    return metrics


def measure(shape: Shape) -> dict[str, dict[str, float]]:
    """Profile a shape in a separate process, and return the metrics as `parse` does.

    Raises
    ------
    RuntimeError
        If `ncu` fails; the message ends with what it printed.
    """
    command = [
        profiler(), "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off",
        "--metrics", ",".join(METRICS),
        "--kernel-name", "regex:_(hopper|gather|finish|sort|scan|place|sum|combine)_kernel",
        sys.executable, str(Path(__file__).resolve()), "--profiled", shape.name,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:1])} failed ({done.returncode}): {done.stdout}{done.stderr}")
    return parse(done.stdout)


def run(shape: Shape) -> None:
    """Run a shape once to compile, and once between the profiler's start and stop."""
    device = torch.device("cuda")
    tensors = shape.tensors(device, torch.bfloat16)
    queries, documents = (tensor.requires_grad_(shape.backward) for tensor in tensors[:2])
    weights = torch.randn(shape.Nq, shape.Nd, device=device)
    for profiled in (False, True):
        torch.cuda.synchronize()
        if profiled:
            torch.cuda.profiler.start()
        scores = maxsim(queries, documents)
        if shape.backward:
            torch.autograd.grad(scores, (queries, documents), weights)
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def compare(shape: Shape, device: torch.device) -> dict[str, Any]:
    """Return a shape's kernels, each with its expected and measured traffic."""
    tensors = shape.tensors(device, torch.bfloat16)
    problem = problem_of(tensors, Options(), shape.backward)
    argmax = maxsim_forward(problem, tensors)[1]
    counted = expected(problem, argmax)
    kernels = {
        name: {"expected": counted[name]._asdict() if name in counted else None, "measured": measured}
        for name, measured in measure(shape).items()
    }
    if missing := counted.keys() - kernels.keys():
        raise RuntimeError(f"{shape.name}: ncu saw no launch of {', '.join(sorted(missing))}")
    return {"name": shape.name, "shape": f"{shape.Nq} x {shape.Nd}, {shape.Lq} x {shape.Ld}", "kernels": kernels}


def main(
    output: Annotated[Path, typer.Option(help="Folder that the result is written to.")] = RESULTS,
    profiled: Annotated[str, typer.Option(help="What is run under the profiler: the name of a shape.")] = "",
) -> None:
    """Profile every shape, and write a JSON file named after the GPU and the date."""
    if profiled:
        run(next(shape for shape in SHAPES if shape.name == profiled))
        return
    device = torch.device("cuda")
    profiler()
    machine = describe_machine(device)
    result: dict[str, Any] = {
        "date": date(),
        "machine": machine,
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "l2_bytes": torch.cuda.get_device_properties(device).L2_cache_size,
        "rows": [compare(shape, device) for shape in SHAPES],
    }
    card = re.sub(r"[^a-z0-9]+", "-", machine["name"].lower()).strip("-")
    path = output / f"traffic-{card}-{result['date'][:10]}.json"
    write(result, path)
    print(f"{path}: written")


if __name__ == "__main__":
    typer.run(main)
