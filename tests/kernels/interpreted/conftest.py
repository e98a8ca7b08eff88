"""Run here under TRITON_INTERPRET=1 alone, as `make test` does, with an interpreter that is fast enough."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from triton.language.core import is_builtin


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(
                pytest.mark.skip(
                    reason="needs TRITON_INTERPRET=1 from the start, as `make test` sets it for this folder"
                )
            )


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    """Memory that no kernel writes is not 0 by luck: `torch.empty` gives NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def known_builtins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter looks for the language's functions whenever one calls another, a third of the time."""
    from triton.runtime import interpreter

    names: dict[object, list[str]] = {}

    def patch_builtin(package, builder, scope) -> None:
        if package not in names:
            names[package] = [name for name, _ in inspect.getmembers(package)]
            names[package] = [name for name in names[package] if callable(getattr(package, name))]
        for name in names[package]:
            member = getattr(package, name)
            if is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    monkeypatch.setattr(interpreter, "_patch_builtin", patch_builtin)


@pytest.fixture(autouse=True)
def known_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a combine function that it does not know, the interpreter reduces element by element."""
    from triton.runtime.interpreter import ReduceOps

    from pylate_flash.kernels.reductions import larger

    apply = ReduceOps.apply_impl

    def apply_known(self: ReduceOps, arguments):
        if self.combine_fn is larger:
            # numpy's maximum propagates NaN, as `larger` does.
            return self.min_max(arguments[0], val_reduce_op=np.max)
        return apply(self, arguments)

    monkeypatch.setattr(ReduceOps, "apply_impl", apply_known)


@pytest.fixture(autouse=True)
def masks_stay_bool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter makes integers of a bool that meets a block, and since Triton 3.9 takes none for a mask."""
    from triton.runtime.interpreter import InterpreterBuilder

    splat = InterpreterBuilder.create_splat

    def splat_as_it_is(self: InterpreterBuilder, shape, scalar):
        handle = splat(self, shape, scalar)
        if scalar.data.dtype == np.bool_:
            handle.data = handle.data.astype(np.bool_)
        return handle

    monkeypatch.setattr(InterpreterBuilder, "create_splat", splat_as_it_is)
