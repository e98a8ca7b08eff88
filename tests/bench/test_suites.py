"""Every suite at a tiny size: its systems are right, wrong results have errors, and its floors are those of a card."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from pylate_flash.bench import SUITES as IN_PACKAGE
from pylate_flash.bench import exact, loss_steps, losses, retrieval, suite
from pylate_flash.bench.protocol import Ceilings, Rounds, floor_of
from pylate_flash.bench.retrieval import Search
from pylate_flash.bench.rows import Row
from pylate_flash.bench.suite import OURS
from pylate_flash.bench.varlen import Arrays
from suites import cpu, hosts, launch, xtr
from suites.chamfer import Sets
from suites.hidden import States
from suites.quantized import Quantized
from suites.residual import Residual
from suites.soft import SoftBatch
from suites.sparse import Pruned
from tests.bench import stand_ins

CPU = torch.device("cpu")
STATES = States("forward", 3, 5, 4, 12, d=8, d_model=24)
STEP_OF_STATES = replace(STATES, name="step", Nq=4, Nd=4, step=True)


def tiny(row: Any, Nd: int = 5, Ld: int = 40) -> Any:
    """The same row at a test size; no document is so short that PyLate's padding wins."""
    shortest = None if row.shortest is None else Ld - 10
    return replace(row, Nq=min(row.Nq, 5), Nd=min(row.Nd, Nd), Lq=4, Ld=Ld, shortest=shortest, d=16)


SUITES: dict[str, Sequence[Any]] = {
    "forward": (Row("one", 1, 70, 4, 7, d=16), Row("several", 3, 6, 2, 9, d=24)),
    "varlen": (
        Row("one", 1, 9, 4, 11, d=16, shortest=3),
        Row("several", 3, 70, 5, 11, d=16, shortest=3),
        Arrays("rerank", 3, 4, 5, 40, d=16, shortest=30),
    ),
    "training": (
        Row("in-batch", 6, 6, 5, 20, d=16, step=True),
        Row("negatives", 3, 9, 5, 20, d=16, step=True),
        Row("candidates", 4, 3, 5, 20, d=16, step=True, own=True),
        Row("skewed", 12, 12, 16, 40, step=True, kind="skewed"),
        Row("skewed candidates", 8, 6, 16, 40, step=True, kind="skewed", own=True),
    ),
    "losses": (
        Row("batch", 40, 40, 4, 6, d=16, step=True),
        Row("given", 40, 40, 4, 6, d=16, step=True, kind=losses.GIVEN),
    ),
    "retrieval": (
        Search("all", 3, 40, 4, 9, d=16, shortest=2),
        Search("subset", 3, 40, 4, 9, d=16, shortest=2, kind="subset"),
        Search("filter", 1, 40, 4, 9, d=16, shortest=2, kind="filter"),
    ),
    "quantized": (Quantized("one", 1, 70, 8, 17, d=64), Quantized("several", 3, 6, 8, 19, d=64)),
    "residual": (Residual("one", 1, 70, 8, 17, 64, nbits=4), Residual("several", 3, 6, 8, 19, 64, nbits=2)),
    "hosts": [tiny(row, Nd=5 if row.step else 9, Ld=13) for row in hosts.ROWS],
    "launch": [tiny(row) for row in launch.ROWS],
    # Candidates of a step are so short that a masked token's 0 is the best similarity.
    "cpu": [tiny(row, Ld=8 if row.step else 40) for row in cpu.ROWS],
    "chamfer": (Sets("distances", 3, 40, 3), Sets("step", 3, 40, 20, step=True)),
    "soft": (SoftBatch("scores", 5, 5, 4, 7, d=16), SoftBatch("step", 5, 5, 4, 7, d=16, step=True)),
    "sparse": (Pruned("pruned", 1, 1100, 6, 9, d=16, k=3),),
    "xtr": (Row("small", 12, 12, 4, 9, d=16, step=True),),
    "hidden": (
        STATES,
        STEP_OF_STATES,
        replace(STATES, name="packed", shortest=3),
        replace(STEP_OF_STATES, name="step-packed", shortest=3),
    ),
}


def rows_of(*names: str) -> Any:
    rows = [(name, row) for name in names for row in SUITES[name]]
    return pytest.mark.parametrize(("name", "row"), [pytest.param(*row, id=f"{row[0]}, {row[1].name}") for row in rows])


def suite_of(name: str) -> suite.Suite:
    return import_module(f"pylate_flash.bench.{name}" if name in IN_PACKAGE else f"suites.{name}").suite()


# Rows that other packages have no call for, or serve through PyLate. Documents of fewer bits, an index, chosen tokens
# and sets of points have no stand-ins.
THROUGH_PYLATE = {("launch", "rerank"), ("launch", "step-contrastive"), ("varlen", "rerank")}
MISSING = {
    "lik": {
        *THROUGH_PYLATE,
        ("launch", "varlen-candidates"),
        ("launch", "hidden-masks"),
        ("hidden", "packed"),
        ("hidden", "step-packed"),
    },
    "flash_maxsim": {
        *THROUGH_PYLATE,
        ("losses", "given"),
        *(("launch", name) for name in ("varlen-candidates", "hidden", "hidden-documents-mask", "hidden-masks")),
    },
}
WITHOUT_STAND_INS = ("quantized", "residual", "retrieval", "sparse", "chamfer")


@pytest.fixture(autouse=True)
def of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.put_in_place(monkeypatch)
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    for module, name, value in (
        (launch, "IN_TURN", 3),
        (xtr, "RETRIEVED", 20),
        (hosts, "MINI_BATCH", 3),
        (hosts, "SCORED_AT_ONCE", (2, 5)),
        (hosts, "CHUNK_ELEMENTS", (10**3, 10**8)),
        (loss_steps, "LOOP_QUERIES", 16),
        (loss_steps, "CHUNKS", (16, 64)),
        (retrieval, "SUBSET", 7),
        (retrieval, "KEPT", 5),
        (retrieval, "K", 12),
    ):
        monkeypatch.setattr(module, name, value)


def spoiled(result: Any, factor: float) -> list[Any]:
    """Copies of a result, each with one part multiplied."""
    if isinstance(result, torch.Tensor):
        return [result * factor]
    make = getattr(type(result), "_make", tuple)
    return [
        make([*result[:index], part * factor, *result[index + 1 :]])
        for index, part in enumerate(result)
        if isinstance(part, torch.Tensor)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@rows_of(*SUITES)
def test_every_system_that_runs_here_is_right_and_what_is_wrong_has_an_error(name, row, dtype) -> None:
    actual = suite_of(name)
    inputs = actual.make_inputs(row, CPU, dtype)
    reference = actual.reference(inputs)
    ran, missing = {}, []
    for system in actual.systems:
        if system.yardstick or (system.peer is not None and system.peer.unavailable(CPU)):
            continue
        if system.name in MISSING and (name in WITHOUT_STAND_INS or (name, row.name) in THROUGH_PYLATE):
            continue
        try:
            candidates = list(system.candidates(inputs))
        except (suite.Unavailable, ImportError) as why:
            missing.append(str(why))
            continue
        limit = system.tolerance
        if system.name.startswith(OURS):
            limit = min(limit, suite.MARGIN * actual.accuracy(inputs, dtype))
        for candidate in candidates:
            if candidate.label.startswith(("lik, ", "flash, ")):
                continue  # through PyLate, which calls them on a GPU only
            with torch.no_grad():
                # Twice: no gradients may be left from the previous call.
                results = [candidate.read(candidate.call()) for _ in range(2)]
            assert max(actual.error(result, reference) for result in results) <= limit, candidate.label
            ran.setdefault(system.name, results[-1])
    for why in missing:
        if OURS not in ran and why.startswith(("needs PyLate", "sentence-transformers: ")):
            pytest.skip(why)
    for system in MISSING:
        if name not in WITHOUT_STAND_INS and any(system == s.name for s in actual.systems):
            assert (system in ran) == ((name, row.name) not in MISSING[system])
    assert all(actual.error(wrong, reference) > 0.09 for wrong in spoiled(ran[OURS], 1.1))
    assert all(actual.error(wrong, reference) == math.inf for wrong in spoiled(ran[OURS], math.nan))


@rows_of("forward", "varlen", "training", "chamfer", "soft", "sparse", "xtr", "hidden")
def test_references_are_the_operations_in_float64_and_the_same_in_parts(name, row, monkeypatch) -> None:
    """The operations' own tests compare them with loops over numbers."""
    if isinstance(row, Arrays):
        pytest.skip("arrays are of float32")
    results = suite_of(name)
    inputs = results.make_inputs(row, CPU, torch.float64)
    for candidate in results.systems[0].candidates(inputs):
        with torch.no_grad():
            result = candidate.read(candidate.call())
        for nbytes in (exact.REFERENCE_BYTES, 1):
            monkeypatch.setattr(exact, "REFERENCE_BYTES", nbytes)
            # A teacher's scores are drawn in float32.
            assert results.error(result, results.reference(inputs)) <= (1e-6 if name == "training" else 1e-9)


@rows_of(*SUITES)
def test_inputs_are_the_same_each_time(name, row) -> None:
    if (name, row.name) in THROUGH_PYLATE:
        pytest.importorskip("pylate")
    result = suite_of(name)
    first, second = (result.reference(result.make_inputs(row, CPU, torch.float32)) for _ in range(2))
    if isinstance(first, torch.Tensor):
        first, second = (first,), (second,)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_runs(name, ceilings) -> None:
    results = suite_of(name)
    tiny_suite = replace(results, rows=SUITES[name][-2:], facts=None)
    result = suite.run(tiny_suite, CPU, torch.float32, Rounds(0, 2, 0), ceilings=ceilings, quick=True)
    assert result["complete"]
    assert result["protocol"]["reduced"] == (name != "cpu")
    yardsticks = [system.name for system in results.systems if system.yardstick]
    for row in result["rows"]:
        states = row["systems"]
        if states[OURS]["status"] == "absent":
            assert "PyLate" in states[OURS]["reason"] or "sentence-transformers" in states[OURS]["reason"]
            continue
        own = [state["status"] for system, state in states.items() if system.startswith((OURS, "torch"))]
        assert {*own} <= {"ok", "absent"}
        timed = {system: states[system]["median_ms"] for system in yardsticks if "median_ms" in states[system]}
        assert (row["bound"] in timed) == bool(timed)
        assert not timed or row["floor_ms"] == min(timed.values())
        counted = {system.name for system in results.systems if system.counted}
        assert row.get("multiples", {}).keys() == counted


# Milliseconds, calculated by hand, of an H200 (790 TFLOP/s of bfloat16, 1400 of fp8, 1e13 exponentials/s).
FLOORS = {
    ("forward", 4.3e12): {
        **{"textual": 0.018, "long-doc": 0.061, "medium": 0.061, "visual": 0.170, "colpali": 0.340, "serve-32": 0.061},
        **{"rerank-10k": 0.179, "batch-512": 0.489, "edge-48": 0.183, "rerank-100": 0.0011, "odd-5-d320": 0.0286},
        **{"odd-7-d72": 0.0076, "odd-3-d96": 0.0297, "odd-2": 0.102, "odd-96": 0.175, "odd-256-d96": 1.358},
    },
    # With the mean length of each row; drawn lengths differ by a percent.
    ("varlen", 4.3e12): {"varlen-uniform": 0.077, "varlen-ragged": 0.352, "rerank": 0.132},
    ("training", 4.3e12): {"train-1024": 1.957},
    ("hidden", 4.3e12): {
        "rerank": 0.107,
        "rerank-8k": 0.514,
        "serve-32": 0.178,
        "in-batch-256": 0.134,
        "rerank-packed": 0.3215,
    },
    ("quantized", 4.45e12): {"rerank-10k": 0.089, "colpali": 0.192, "serve-32": 0.0345},
    ("residual", 4.45e12): {
        **{"textual-4": 0.00531, "rerank-10k-4": 0.0495, "serve-32-4": 0.0612},
        **{"textual-2": 0.00315, "rerank-10k-2": 0.0311, "serve-32-2": 0.0612},
    },
    ("retrieval", 4.3e12): {
        **{"50k-1": 0.381, "50k-200": 13.28, "50k-1000": 66.4, "400k-1000": 531, "50k-subset": 0.382},
        **{"400k-subset": 1.53},
    },
    ("sparse", 4.45e12): {
        **{"pruned-1k": 0.0173, "pruned-10k": 0.1727, "pruned-visual": 0.0590, "pruned-colpali": 0.0591},
    },
    ("chamfer", 4.3e12): {"points-64": 0.0435, "points-64-step": 0.0435, "points-3": 0.00204},
    # In a step, exponentials follow the products.
    ("soft", 4.3e12): {"colpali-64": 1.392, "colpali-64-step": 6.426},
}


@pytest.mark.parametrize(("name", "bandwidth"), FLOORS, ids=[name for name, _ in FLOORS])
def test_floors_are_those_of_a_card(name: str, bandwidth: float, monkeypatch) -> None:
    # Restore the numbers of ids, and of documents of a filter, that are measured.
    monkeypatch.undo()
    rows = {row.name: row for row in suite_of(name).rows}
    ceilings = Ceilings(790e12, bandwidth, eight_bit_flops_per_second=1400e12, exponentials_per_second=1e13)
    expected = FLOORS[name, bandwidth]
    actual = {row: floor_of(rows[row].work(torch.bfloat16), ceilings).milliseconds for row in expected}
    assert actual == pytest.approx(expected, rel=0.02, abs=6e-4 if name in ("forward", "hidden") else 0)
    if name == "quantized":
        # Products of 8 bits whose rate was not measured count as twice as fast as the others.
        ceilings = replace(ceilings, eight_bit_flops_per_second=None)
        assert floor_of(rows["colpali"].work(torch.bfloat16), ceilings).milliseconds == pytest.approx(0.170, rel=0.02)
