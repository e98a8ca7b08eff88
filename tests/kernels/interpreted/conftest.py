"""Make Triton's interpreter fast enough: with a combine function that it does not know, it reduces element by element.

Also skips everything here unless TRITON_INTERPRET=1, which `tests/kernels/test_interpreter.py` sets.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="tests/kernels/test_interpreter.py runs it in the interpreter"))


@pytest.fixture(autouse=True)
def known_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import ReduceOps

    from pylate_flash.kernels.reductions import larger

    apply = ReduceOps.apply_impl

    def apply_known(self: ReduceOps, arguments):
        if self.combine_fn is larger:
            # numpy's maximum propagates NaN, as `larger` does.
            return self.min_max(arguments[0], val_reduce_op=np.max)
        return apply(self, arguments)

    monkeypatch.setattr(ReduceOps, "apply_impl", apply_known)
