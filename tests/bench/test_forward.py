from __future__ import annotations

import pytest
import torch

from pylate_flash.bench import exact, forward
from pylate_flash.bench.calls import chunk_sizes
from pylate_flash.bench.exact import relative_error
from pylate_flash.bench.forward import ROWS
from pylate_flash.bench.protocol import Ceilings, floor_of
from pylate_flash.bench.rows import Row
from tests.bench import stand_ins

CPU = torch.device("cpu")


def by_hand(inputs):
    """The definition, a product at a time."""
    queries, documents = inputs.queries.double(), inputs.documents.double()
    return torch.stack(
        [torch.stack([(query @ document.T).max(dim=1).values.sum() for document in documents]) for query in queries]
    )


@pytest.mark.parametrize("row", [Row("one", 1, 5, 4, 7, d=16), Row("several", 3, 6, 2, 9, d=24)])
def test_reference_is_the_definition(row, monkeypatch):
    inputs = forward.make_inputs(row, CPU, torch.float32)
    expected = by_hand(inputs)
    torch.testing.assert_close(inputs.reference(), expected, rtol=1e-12, atol=0)
    # The same when only two documents fit at a time.
    monkeypatch.setattr(exact, "REFERENCE_BYTES", 2 * 8 * row.Nq * row.Lq * row.Ld)
    torch.testing.assert_close(inputs.reference(), expected, rtol=1e-12, atol=0)


def test_inputs_are_unit_vectors_and_the_same_each_time():
    row = Row("row", 2, 3, 4, 5, d=16)
    inputs = forward.make_inputs(row, CPU, torch.float32)
    assert inputs.queries.shape == (2, 4, 16)
    assert inputs.documents.shape == (3, 5, 16)
    assert inputs.lengths().tolist() == [5, 5, 5]
    torch.testing.assert_close(inputs.documents.norm(dim=-1), torch.ones(3, 5))
    assert torch.equal(inputs.documents, forward.make_inputs(row, CPU, torch.float32).documents)
    assert not torch.equal(inputs.queries[0], inputs.queries[1])


def test_odd_rows_have_a_floor_of_their_own_size():
    assert set(forward.ODD) <= set(ROWS)
    row = forward.ODD[0]
    assert (row.d, row.shape) == (320, "5 x 3000, 32 x 64, d = 320")
    work = row.work(torch.bfloat16)
    assert work.flops == 2 * 5 * 3000 * 32 * 64 * 320
    assert work.bytes == 2 * 320 * (5 * 32 + 3000 * 64) + 4 * 5 * 3000
    floor = floor_of(work, Ceilings(790e12, 4.3e12))
    assert floor.bound == "memory"
    assert floor.milliseconds == pytest.approx(1e3 * work.bytes / 4.3e12)


def test_chunks_are_the_largest_that_fit():
    inputs = forward.make_inputs(Row("row", 1, 100, 4, 7, d=16), CPU, torch.float32)
    assert chunk_sizes(inputs.queries, inputs.documents) == [4, 16, 64, 100]
    # 1 GiB holds the similarities of 256 x 1024 x 1024 float32, one query against 256 documents.
    assert chunk_sizes(torch.empty(1, 1024, 16), torch.empty(300, 1024, 16)) == [4, 16, 64, 256]
    # 64 x 64 x 32 x n similarities of two bytes, six times: 1.5 MiB * n, and there are 2048 MiB.
    queries = torch.empty(64, 32, 8, dtype=torch.bfloat16, device="meta")
    largest = [chunk_sizes(queries, torch.empty(64, n, 8, device="meta"), held=6.0)[-1] for n in (1000, 1500, 6000)]
    assert largest == [64, 16, 4]


LIK, FM = ["maxsim", "maxsim_forward"], ["flash_maxsim", "flash_maxsim_persistent"]


@pytest.mark.parametrize(
    ("row", "lik", "flash_maxsim"),
    [
        (Row("short", 1, 4, 32, 8), LIK, FM),
        (Row("long", 1, 4, 1024, 8), LIK[:1], FM),
        (Row("long, of long documents", 1, 4, 512, 512, d=16), LIK, [*FM, "splitk", "flash_maxsim_qreuse"]),
        (Row("odd", 1, 3, 512, 512, d=16), LIK, [*FM, "splitk"]),
        (Row("several", 2, 4, 32, 8), LIK, ["flash_maxsim_batched", "flash_maxsim_persistent"]),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_other_packages_take_every_way_that_they_have(row, lik, flash_maxsim, monkeypatch):
    stand_ins.put_in_place(monkeypatch)
    inputs = forward.make_inputs(row, CPU, torch.float32)
    assert [candidate.label for candidate in inputs.lik()] == lik
    assert [candidate.label for candidate in inputs.flash_maxsim()] == flash_maxsim
    for candidate in (*inputs.lik(), *inputs.flash_maxsim()):
        assert relative_error(candidate.call(), inputs.reference()) < 1e-5
