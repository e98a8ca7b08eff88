"""The benchmark suite, shipped, so that a user can measure a card of their own.

``pylate-flash bench [SUITE]`` and ``python -m pylate_flash.bench [SUITE]`` run it. From the bottom up:

- `protocol`: how one call is timed, the card's ceilings, and the floor that they give a piece of work.
- `rows`, `exact`: shapes with names and their work (`l2`: the ceiling of the GPU's cache, for steps); what is right, in
  float64, and how far a result is from it.
- `suite`: what a suite is (rows, inputs, systems), and the loop that checks, times and compares the systems.
- `calls`, `rerank`, `steps`: the inputs of what users call, and how each system is called for them.
- `forward`, `varlen`, `training`, `losses` (with `loss_steps`), `retrieval`: the suites. Another one is one more file
  like them, named in `SUITES` or by its path, as those in docs/benchmarks/suites.
- `peers`: the other packages that a suite may measure, and what is particular to them.
- `memory`: the memory of one system, in a process of its own (`fresh`), which the loop starts.
- `results`, `report`, `plot`: a result as JSON, as a table on the terminal, as a picture.

Importing this package needs neither PyLate nor the other packages measured.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pylate_flash.bench.suite import Suite

# The suites by name, and what they measure; each is a module here with a function `suite()`.
SUITES = {
    "forward": "scores of padded batches, on this device",
    "varlen": "packed documents of many lengths, and reranking through PyLate",
    "training": "forward, loss and backward, with uniform and with skewed argmax",
    "losses": "the same of large batches, up to 65536, in chunks, and by the losses of PyLate's users",
    "retrieval": "searches of an index of up to 8,800,000 documents, beside the operation and a PLAID index",
}


def load_suite(name: str) -> Suite:
    """Return the suite of that name, or what `suite()` returns in the Python file of that path.

    Raises
    ------
    ValueError
        If there is no such suite.
    """
    if name.endswith(".py"):
        return _of_file(Path(name).resolve())
    if name not in SUITES:
        raise ValueError(f"suite: there is no {name!r}, expected one of {', '.join(SUITES)}, or a .py file")
    suite: Suite = importlib.import_module(f"{__name__}.{name}").suite()
    return suite


def _of_file(path: Path) -> Suite:
    if not path.is_file():
        raise ValueError(f"suite: there is no file {path}")
    name = f"pylate_flash_suite_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    # Where dataclasses look for the names in their annotations.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "suite"):
        raise ValueError(f"suite: {path} has no function suite()")
    suite: Suite = module.suite()
    return replace(suite, script=str(path))
