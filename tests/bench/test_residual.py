from __future__ import annotations

import pytest
import torch

from pylate_flash.bench import exact, residual
from pylate_flash.bench.protocol import Ceilings, floor_of
from pylate_flash.bench.residual import ROWS, Residual
from pylate_flash.bench.suite import CPU_FLOPS, OURS
from tests.ops.residual_cases import residual_codes

CPU = torch.device("cpu")
TINY = (Residual("one", 1, 70, 8, 17, 64, nbits=4), Residual("several", 3, 6, 8, 19, 64, nbits=2))


@pytest.mark.parametrize("row", TINY, ids=lambda row: row.name)
def test_systems_score_what_the_reference_does(row, monkeypatch):
    inputs = residual.make_inputs(row, CPU, torch.float32)
    # Several documents at a time.
    monkeypatch.setattr(exact, "REFERENCE_BYTES", 4 * 8 * row.Ld * row.d)
    expected = inputs.reference()
    assert expected.shape == (row.Nq, row.Nd)
    systems = {system.name: system for system in residual.suite().systems if system.peer is None}
    assert set(systems) == {OURS, f"{OURS}_decompressed", "torch"}
    for system in systems.values():
        for candidate in system.candidates(inputs):
            torch.testing.assert_close(candidate.call().double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("nbits", [2, 4])
def test_indices_in_the_other_order_are_those_from_the_lowest_bits(nbits):
    documents = residual_codes([9], 8, nbits)
    found = residual.in_other_order(documents.residuals, nbits)
    assert found.dtype == torch.uint8
    lowest_first = torch.stack([found >> place & (1 << nbits) - 1 for place in range(0, 8, nbits)], dim=-1).flatten(1)
    sums = documents.centroids[documents.codes] + documents.bucket_weights[lowest_first.long()]
    expected = torch.nn.functional.normalize(sums.float(), dim=-1)
    torch.testing.assert_close(documents.decompress(), expected)
    assert torch.equal(residual.in_other_order(found, nbits), documents.residuals)


def test_floors_are_those_of_a_card():
    """The table of an H200: 790 TFLOP/s of bfloat16 and 4.45 TB/s."""
    ceilings = Ceilings(flops_per_second=790e12, bytes_per_second=4.45e12)
    floors = {row.name: floor_of(row.work(torch.bfloat16), ceilings).milliseconds for row in ROWS}
    expected = {
        "textual-4": 0.00531, "textual-2": 0.00315, "rerank-10k-4": 0.0495, "rerank-10k-2": 0.0311,
        "serve-32-4": 0.0612, "serve-32-2": 0.0612,
    }  # fmt: skip
    assert floors == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_is_cut_for_a_cpu(row):
    cut = row.within(CPU_FLOPS)
    assert cut.n_centroids <= cut.Nd * cut.Ld
