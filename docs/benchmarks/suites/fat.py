"""The suite `fat`: scores of embeddings as large as the hidden size of a model.

A kernel that holds a full embedding on chip has a cliff where it no longer fits; the time should be linear in d.
"""

from __future__ import annotations

from dataclasses import replace

from pylate_flash.bench import forward
from pylate_flash.bench.rows import Row
from pylate_flash.bench.suite import Suite

ROWS = tuple(Row(f"fat-{size}", 1, 128, 1024, 1024, d=size) for size in (256, 512, 768, 1024, 2048, 4096))


def suite() -> Suite:
    """Return the suite."""
    return replace(forward.suite(), name="fat", title="MaxSim forward of long embeddings", rows=ROWS)
