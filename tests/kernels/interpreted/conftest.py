"""These tests run only under TRITON_INTERPRET=1, as `make test` sets it, with an interpreter made fast enough."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pylate_flash.kernels import plan, tables
from pylate_flash.problem import Problem


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marks = [pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")]
    if os.environ.get("TRITON_INTERPRET") != "1":
        reason = "needs TRITON_INTERPRET=1 from the start, as `make test` sets it for this folder"
        marks.append(pytest.mark.skip(reason=reason))
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for mark in marks:
                item.add_marker(mark)


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    """Fill `torch.empty` with NaN, or the largest integer, so that unwritten memory is not 0 by luck."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def patched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch the language once per launch; the interpreter does so whenever one function calls another."""
    from triton.runtime import interpreter

    patch, launched = interpreter._patch_lang, interpreter.GridExecutor.__call__
    scopes: dict[int, Any] = {}

    def patch_once(function: Callable) -> Any:
        module = id(function.__globals__)
        if module not in scopes:
            scopes[module] = patch(function)
        return scopes[module]

    def launch(self: Any, *arguments: Any, **kwargs: Any) -> None:
        scopes.clear()
        launched(self, *arguments, **kwargs)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)


@pytest.fixture(autouse=True)
def types_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache the types of blocks, shapes and arrays, which the interpreter computes anew for every value."""
    from triton.language import core
    from triton.runtime import interpreter

    type_of, array_type_of = core._type_for_tuple_values, interpreter._get_np_dtype
    make_block = core.block_type.__init__
    types: dict[tuple, Any] = {}
    array_types: dict[str, np.dtype] = {}
    blocks: dict[tuple, dict[str, Any]] = {}

    def shape_of(values: Iterable) -> tuple:
        return tuple([value.value if type(value) is core.constexpr else value for value in values])

    def known_type(values: list, fields: Any = None) -> Any:
        shape = shape_of(values)
        if fields is not None or not {int}.issuperset(map(type, shape)):
            return type_of(values, fields)
        if shape not in types:
            types[shape] = type_of(values)
        return types[shape]

    def known_array_type(dtype: Any) -> np.dtype:
        name = dtype.scalar.name
        if name not in array_types:
            array_types[name] = array_type_of(dtype.scalar)
        return array_types[name]

    def make_known_block(self: Any, element_ty: Any, shape: Iterable) -> None:
        key = element_ty.name, *shape_of(shape)
        if key in blocks:
            vars(self).update(blocks[key], element_ty=element_ty)
        else:
            make_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()

    monkeypatch.setattr(core, "_type_for_tuple_values", known_type)
    monkeypatch.setattr(interpreter, "_get_np_dtype", known_array_type)
    monkeypatch.setattr(core.block_type, "__init__", make_known_block)


@pytest.fixture(autouse=True)
def known_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce with numpy where the combine function is `larger`; the interpreter goes element by element."""
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
    """Keep bools that are broadcast to a block; as integers, Triton 3.9 and later reject them as masks."""
    from triton.runtime.interpreter import InterpreterBuilder

    splat = InterpreterBuilder.create_splat

    def splat_as_it_is(self: InterpreterBuilder, shape, scalar):
        handle = splat(self, shape, scalar)
        if scalar.data.dtype == np.bool_:
            handle.data = handle.data.astype(np.bool_)
        return handle

    monkeypatch.setattr(InterpreterBuilder, "create_splat", splat_as_it_is)


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split documents of more than 70 tokens into segments of at most 70."""

    def splits(problem: Problem, *_: int, **__: int) -> plan.Splits:
        work = problem.n_tokens + problem.n_documents * tables.DOCUMENT_COST
        return plan.Splits(70, 70, -(-work // 70))

    monkeypatch.setattr(plan, "splits_of", splits)
