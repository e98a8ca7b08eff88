"""The benchmark suite, shipped with the package so that users can measure their own GPU.

``pylate-flash bench [SUITE]`` and ``python -m pylate_flash.bench [SUITE]`` run it. From the bottom up:

- `protocol`: how a call is timed, the machine's ceilings, and the floor that they set for a computation.
- `rows`, `exact`: named shapes and their work (`l2`: the L2 bandwidth ceiling, for training steps); float64 references
  and the error of a result against them.
- `suite`: the definition of a suite (rows, inputs, systems), and the loop that checks, times and compares the systems.
- `calls`, `rerank`, `steps`: the inputs of each user-facing call, and how each system is called with them.
- `forward`, `varlen`, `training`, `losses` (with `loss_steps`), `retrieval`: the suites. To add one, add a file like
  them to `SUITES`, or pass its path, as for those in docs/benchmarks/suites.
- `peers`: the other packages that a suite may measure, and their peculiarities.
- `memory`: the memory of one system, measured in a fresh process (`fresh`) that the loop starts.
- `results`, `report`, `plot`: a result as JSON, as a table on the terminal, as a figure.

Importing this package requires neither PyLate nor the other packages measured.
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

# Name of each suite -> what it measures; each is a module of this package with a function `suite()`.
SUITES = {
    "forward": "scores of padded batches, on this device",
    "varlen": "packed documents of many lengths, and reranking through PyLate",
    "training": "forward, loss and backward, with uniform and with skewed argmax",
    "losses": "the same for large batches, up to 65536, in chunks and by losses of PyLate and sentence-transformers",
    "retrieval": "search of an index of up to 8,800,000 documents, next to the operation alone and a PLAID index",
}


def load_suite(name: str) -> Suite:
    """Return the suite of that name, or the one that `suite()` returns in the Python file at that path.

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
    # dataclasses resolve annotations through `sys.modules`.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "suite"):
        raise ValueError(f"suite: {path} has no function suite()")
    suite: Suite = module.suite()
    return replace(suite, script=str(path))
