"""The rows of all suites, of the package and of docs/benchmarks/suites."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pylate_flash.bench import SUITES, load_suite, suite
from pylate_flash.bench.rows import Row

SCRIPTS = sorted(Path(suite.__file__).parents[2].glob("docs/benchmarks/suites/*.py"))
ROWS = [(result.name, row) for result in map(load_suite, (*SUITES, *map(str, SCRIPTS))) for row in result.rows]


@pytest.mark.parametrize("row", [row for _, row in ROWS], ids=[f"{name}, {row.name}" for name, row in ROWS])
def test_a_row_shrinks_to_what_a_cpu_does_in_reasonable_time(row):
    small = row.within(suite.CPU_FLOPS)
    assert type(small) is type(row)
    # A single pair cannot shrink.
    is_pair = isinstance(row, Row) and small.Nq == small.documents == 1
    assert is_pair or small.work(torch.float32).flops <= suite.CPU_FLOPS
    assert row.within(1e18) == row
    if isinstance(row, Row):
        assert small == replace(row, Nq=small.Nq, Nd=small.Nd)
        assert 1 <= small.Nq <= row.Nq
        assert 1 <= small.Nd <= row.Nd
        # In a step of a batch, every query keeps a document of its own.
        assert row.own or not row.step or small.Nd >= small.Nq
        # A query with documents of its own keeps all of them.
        assert not row.own or small.Nd == row.Nd


def test_the_shape_says_what_is_not_usual():
    row = Row("row", 2, 30, 4, 50)
    assert row.shape == "2 x 30, 4 x 50"
    assert replace(row, d=96).shape == "2 x 30, 4 x 50, d = 96"
    assert replace(row, own=True, shortest=9, kind="packed").shape == "2 x 30 of its own, 4 x 9..50, packed"
    assert (row.documents, replace(row, own=True).documents) == (30, 60)


def test_work_counts_the_tokens_that_there_are():
    row = Row("row", 2, 30, 4, 50, d=16, shortest=9)
    lengths = row.lengths()
    assert len(lengths) == 30
    assert 9 <= int(lengths.min()) < int(lengths.max()) <= 50
    assert torch.equal(lengths, row.lengths())
    tokens = int(lengths.sum())
    work = row.work(torch.bfloat16)
    assert work.flops == 2 * 2 * 4 * tokens * 16
    assert work.bytes == 2 * 16 * (2 * 4 + tokens) + 4 * 2 * 30
    assert work.l2_bytes == 0
    step = replace(row, step=True).work(torch.bfloat16)
    assert step.flops == work.flops
    assert step.bytes == 2 * 2 * 16 * (2 * 4 + tokens) + 4 * 2 * 30
    # For every maximum a row of the documents, and one of the queries.
    assert step.l2_bytes == 2 * 2 * 16 * (2 * 30 * 4)
    own = replace(row, own=True)
    assert own.work(torch.bfloat16).flops == 2 * 4 * int(own.lengths().sum()) * 16
