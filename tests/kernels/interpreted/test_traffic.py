"""Backward kernels load and store what `docs/benchmarks/traffic.py` expects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import traffic
from pylate_flash.kernels import tables, tables_backward
from pylate_flash.kernels.backward import maxsim_backward
from pylate_flash.kernels.launch import Kernel
from pylate_flash.problem import Options, Tensors, problem_of


class Counted:
    """Bytes that each kernel loads and stores, and their addresses."""

    def __init__(self) -> None:
        self.kernel = ""
        self.every: dict[tuple[str, str], int] = {}
        self.addresses: dict[tuple[str, str], set[int]] = {}

    def add(self, access: str, pointers: Any, mask: Any) -> None:
        key, size = (self.kernel, access), pointers.get_element_ty().primitive_bitwidth // 8
        result = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
        self.every[key] = self.every.get(key, 0) + result.size * size
        self.addresses.setdefault(key, set()).update((result.ravel()[:, None] + np.arange(size)).ravel().tolist())

    def traffic(self, kernel: str) -> traffic.Traffic:
        once = [len(self.addresses[kernel, access]) for access in ("load", "store")]
        return traffic.Traffic(self.every[kernel, "load"], self.every[kernel, "store"], *once)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    from triton.runtime.interpreter import InterpreterBuilder

    counts, call = Counted(), Kernel.__call__
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def called(self: Kernel, *arguments: Any, **options: Any) -> None:
        counts.kernel = self.function.fn.__name__
        call(self, *arguments, **options)

    def loaded(self: InterpreterBuilder, pointers: Any, mask: Any, *rest: Any) -> Any:
        counts.add("load", pointers, mask)
        return load(self, pointers, mask, *rest)

    def stored(self: InterpreterBuilder, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        counts.add("store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(Kernel, "__call__", called)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", loaded)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", stored)
    return counts


@pytest.mark.parametrize("skewed", [False, True])
def test_the_backward(skewed: bool, counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """With chunks of 16 rows, and list segments of 16."""
    limits = {"LIST_CHUNK_BITS": 4, "LIST_SEGMENT": 16, "ALONE_ROWS": 0, "ALONE_ROWS_OF_FEW": 0, "FEW_ROWS": 0}
    for name, value in limits.items():
        monkeypatch.setattr(tables_backward, name, value)
    monkeypatch.setattr(tables, "architecture", lambda device: (9, 1))
    random = torch.Generator().manual_seed(0)
    queries, documents = (torch.randn(*shape, generator=random).bfloat16() for shape in ((5, 8, 16), (3, 13, 16)))
    argmax = torch.randint(0, 13, (3, 40), generator=random, dtype=torch.int16)
    if skewed:
        argmax[torch.rand(argmax.shape, generator=random) < 0.9] = 4
    tensors = Tensors(queries, documents)
    grad_scores = torch.randn(5, 3, generator=random)
    maxsim_backward(problem_of(tensors, Options(), True), tensors, grad_scores, argmax, True, True)
    expected = traffic.expected(problem_of(tensors, Options(), True), argmax)
    del expected["_hopper_kernel"]
    for kernel in expected.keys() - {"_sum_kernel"}:
        assert counted.traffic(kernel) == expected[kernel], kernel
    # Look-ups of the segments of long lists are not counted: a few bytes at multiples of 16.
    actual, without = counted.traffic("_sum_kernel"), expected["_sum_kernel"]
    n_boundaries = 3 * 2
    assert actual[1::2] == without[1::2]
    assert 0 < actual.loaded - without.loaded <= n_boundaries * 12
    assert 0 <= actual.read - without.read <= n_boundaries * 12
    assert (counted.every.get(("_combine_kernel", "store"), 0) > 0) == skewed
