"""The benchmark suite of losses on a GPU, at a small size: its reference, and every installed system."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from pylate_flash.bench import losses, suite
from pylate_flash.bench.protocol import Ceilings, Rounds
from pylate_flash.bench.rows import Row
from tests.gpu.tools import unit

pytestmark = pytest.mark.gpu

ROWS = (Row("batch", 96, 96, 32, 180, step=True), Row("given", 64, 64, 32, 180, step=True, kind=losses.GIVEN))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [128, 136])
def test_the_products_of_the_reference_are_in_float32(dtype: torch.dtype, size: int) -> None:
    rows, documents = unit(70, size, dtype=dtype), unit(9, 20, size, dtype=dtype, seed=1)
    actual = losses.products(rows, documents)
    assert actual.dtype == torch.float32
    expected = torch.einsum("rd,ntd->rnt", rows.double(), documents.double()).flatten(1)
    # Sums of 136 products of which none exceeds 1, in float32.
    assert (actual - expected).abs().max() <= 136 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_system_computes_the_step(dtype: torch.dtype) -> None:
    actual = replace(losses.suite(), rows=ROWS)
    result = suite.run(actual, torch.device("cuda"), dtype, Rounds(1, 2, 0), ceilings=Ceilings(1e14, 1e12))
    for row in result["rows"]:
        for name, state in row["systems"].items():
            # Other packages may be inaccurate, which their rows report.
            allowed = ("ok", "absent") if name.startswith(suite.OURS) else ("ok", "absent", "wrong")
            assert state["status"] in allowed, f"{row['name']}, {name}: {state}"
        assert row["systems"]["pylate_flash"]["status"] == "ok"
    batch, arguments = (row["systems"] for row in result["rows"])
    assert batch["pylate_flash_loop"]["status"] == "ok"
    if find_spec("pylate"):
        assert arguments["pylate_flash_contrastive"]["status"] == arguments["pylate_flash_cached"]["status"] == "ok"
