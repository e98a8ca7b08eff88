"""The inspection of lists of tensors in C agrees with its definition in Python."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_flash.ops import compute, lists
from pylate_flash.ops.lists import Sequences, is_like, sequences_of


def rows(length: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(length * size).view(length, size).to(dtype)


FORMS = {
    "rows": rows,
    "of a longer one": lambda length, size: rows(length + 2, size)[1 : length + 1],
    "columns": lambda length, size: rows(length, size + 3)[:, :size],
    "turned": lambda length, size: rows(size, length).T,
    "one row many times": lambda length, size: rows(1, size).expand(length, size),
    "overlapping windows": lambda length, size: torch.arange(4.0 * (length + 1) + size).unfold(0, size, 4)[:length],
    "flat": lambda length, size: rows(length, size).view(-1),
    "with a dimension more": lambda length, size: rows(length, size)[None],
    "half": lambda length, size: rows(length, size, torch.float16),
    "float64": lambda length, size: rows(length, size, torch.float64),
    "elsewhere": lambda length, size: rows(length, size).to("meta"),
    "with a gradient": lambda length, size: rows(length, size).requires_grad_(),
    "parameter": lambda length, size: torch.nn.Parameter(rows(length, size)),
    "array": lambda length, size: rows(length, size).numpy(),
    "list": lambda length, size: rows(length, size).tolist(),
}  # fmt: skip
SIZES = st.integers(0, 3), st.sampled_from([1, 2, 4, 8])


def forms(names: Sequence[str]) -> st.SearchStrategy:
    return st.builds(lambda name, length, size: FORMS[name](length, size), st.sampled_from(names), *SIZES)


# The compiler of Triton's own launcher also compiles the inspection beside the kernels.
compiles = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None
    or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    or not any(map(shutil.which, ("gcc", "clang")))
    or not Path(sysconfig.get_paths()["include"], "Python.h").exists(),
    reason="no Triton, nothing that compiles for Python, or an older torch",
)


@compiles
@pytest.mark.parametrize("recorded", [True, False], ids=["gradients", "no gradients"])
@settings(max_examples=400)
@given(first=forms(["rows", "half", "with a gradient", "parameter", "overlapping windows"]), other=forms(list(FORMS)))
def test_the_look_beside_the_kernels_sees_what_the_definition_sees(
    first: torch.Tensor, other: object, recorded: bool
) -> None:
    """Where no gradient is recorded, it does not matter which tensor needs one."""
    compared = [first, other]
    if not recorded:
        compared = [value.detach() if type(value) is torch.Tensor else value for value in compared]
    expected = is_like(compared[0], compared[0]) and is_like(*compared)
    with torch.set_grad_enabled(recorded):
        actual = compute.kernels().list_metadata([first, other])
    assert (actual is not None) == expected
    if actual is not None:
        assert actual.lengths.tolist() == [len(v) for v in (first, other)]
        assert actual.addresses.tolist() == [v.data_ptr() for v in (first, other)]


@pytest.mark.parametrize("way", [pytest.param("kernels", marks=compiles), "definition"])
@settings(max_examples=100)
@given(values=st.lists(forms(["rows", "of a longer one", "overlapping windows", "columns", "array"]), min_size=1))
def test_lists_are_what_their_items_are(values: list, way: str) -> None:
    expected = [torch.as_tensor(value) for value in values]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lists, "kernels_run_on", lambda *kind: None if way == "kernels" else "they do not")
        if len({tensor.shape[1] for tensor in expected}) > 1:
            with pytest.raises(ValueError, match="values must have one embedding size"):
                sequences_of("values", values)
            return
        actual = sequences_of("values", values)
    assert actual.size == expected[0].shape[1]
    assert (actual.shortest, actual.longest) == (min(map(len, expected)), max(map(len, expected)))
    assert actual.lengths.tolist() == [len(tensor) for tensor in expected]
    assert actual.bounds.tolist() == [0, *np.cumsum([len(tensor) for tensor in expected])]
    assert actual.addresses.tolist() == [tensor.data_ptr() for tensor in actual.tensors]
    for tensor, value in zip(actual.tensors, expected, strict=True):
        assert tensor.is_contiguous()
        assert torch.equal(tensor, value)


def test_tensors_that_are_alike_have_one_example() -> None:
    def examples(*values: torch.Tensor) -> int:
        result: Sequences = sequences_of("values", values)
        return len(result.examples)

    assert examples(rows(3, 8), rows(0, 8), rows(1, 8)) == 1
    assert examples(*[rows(2, 8).requires_grad_()] * 3) == 1
    assert examples(rows(2, 8), rows(2, 8), rows(2, 8).requires_grad_()) == 3


def test_without_what_describes_tensors_in_c_the_definition_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "kernels_run_on", lambda *kind: None)
    monkeypatch.setattr(lists, "describer", lambda: None)
    values = [rows(3, 8), rows(1, 8)]
    result = sequences_of("values", values)
    assert result.known_addresses is None
    assert result.lengths.tolist() == [3, 1]
    assert result.addresses.tolist() == [value.data_ptr() for value in values]
