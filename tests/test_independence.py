"""Test isolation: a test that changes shared state fails, and random numbers depend only on who draws them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.independence import seed

pytest_plugins = ["pytester"]

TESTS = """
    import os
    import sys
    from dataclasses import dataclass

    import numpy as np
    import pytest
    import torch
    from torch.utils import _python_dispatch

    from pylate_flash.ops import products

    @dataclass(slots=True)
    class Pair:
        first: torch.Tensor

    NUMBERS = torch.tensor([[1.0, float("nan")], [3.0, 4.0]]).T
    NAMED = {"a": [torch.tensor([True, False])], "b": Pair(torch.ones(2, dtype=torch.bfloat16))}
    NAMED["itself"] = NAMED
    ARRAY = np.arange(3)

    @pytest.fixture(scope="module")
    def layer():
        return torch.nn.Linear(2, 2).requires_grad_(False)

    @pytest.fixture
    def own():
        return torch.zeros(2)

    @pytest.mark.parametrize("round", [1, 2])
    def test_reads(round, layer, own):
        own += 1
        layer(own)
        assert NUMBERS.tolist()[0] == [1.0, 3.0]
        assert NAMED["a"][0].tolist() == [True, False]
        assert NAMED["b"].first.tolist() == [1.0, 1.0]
        assert ARRAY.tolist() == [0, 1, 2]
        assert torch.get_default_dtype() == torch.float32
        assert torch.get_float32_matmul_precision() == "highest"
        assert not _python_dispatch.is_in_torch_dispatch_mode()
        assert os.getcwd() != "/" != sys.path[-1]
        assert products._BLOCK_CPU > 3
        assert "SET_HERE" not in os.environ

    def test_view():
        NUMBERS[0, 0] = 2

    def test_list():
        NAMED["a"][0].fill_(True)

    def test_dataclass():
        NAMED["b"].first.zero_()

    def test_array():
        ARRAY[1] = 7

    def test_fixture(layer):
        layer.bias += 1

    def test_setting():
        torch.set_default_dtype(torch.float64)

    def test_newer_setting():
        torch.backends.cuda.matmul.fp32_precision = "tf32"

    def test_mode():
        _python_dispatch._is_in_torch_dispatch_mode = True

    def test_folder():
        os.chdir("/")

    def test_name():
        products._BLOCK_CPU = 3

    def test_takes_back():
        os.environ["SET_HERE"] = "1"
        sys.path.append("/")

    test_reads_again = test_reads
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], pytest.RunResult]:
    """Run the tests of a source in a subprocess: in this process, pytester would import further torch modules and then
    remove them again."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    pytester.makeconftest(
        "from tests.independence import pytest_fixture_post_finalizer, pytest_fixture_setup, unchanged"
    )

    def run(tests: str) -> pytest.RunResult:
        pytester.makepyfile(tests)
        return pytester.runpytest_subprocess("-p", "no:xdist", "-p", "no:random_order")

    return run


def test_a_test_that_changes_what_others_read_fails(run: Callable[[str], pytest.RunResult]) -> None:
    result = run(TESTS)
    result.assert_outcomes(passed=15, errors=10)
    for test, name in (
        ("view", "NUMBERS"),
        ("list", "NAMED['a'][0]"),
        ("dataclass", "NAMED['b'].first"),
        ("array", "ARRAY"),
        ("fixture", "the fixture layer.bias"),
        ("setting", "torch's default type"),
        ("newer_setting", "torch's float32 precision"),
        ("mode", "torch's flags of dispatch modes"),
        ("folder", "the working folder"),
        ("name", "pylate_flash.ops.products._BLOCK_CPU"),
    ):
        line_index = next(n for n, line in enumerate(result.outlines) if f"ERROR at teardown of test_{test} " in line)
        assert result.outlines[line_index + 1] == f"the test has changed {name}, which other tests read"


COMPILES = """
    import torch

    def twice(numbers, times):
        return numbers * times, torch.compiler.is_compiling()

    def is_compiled(times):
        return torch.compile(twice, backend="eager", dynamic=False)(torch.ones(2), times)[1]

    def test_too_often():
        for times in range(torch._dynamo.config.recompile_limit):
            assert is_compiled(0.5 + times)
        assert not is_compiled(0.25)

    def test_another():
        assert is_compiled(0.25)
"""


def test_what_was_compiled_too_often_in_one_test_is_compiled_in_the_next(
    run: Callable[[str], pytest.RunResult],
) -> None:
    run(COMPILES).assert_outcomes(passed=2)


def draw() -> tuple[float, ...]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


OF_FILE = draw()


@pytest.fixture(scope="module")
def of_fixture() -> tuple[float, ...]:
    return draw()


def test_random_numbers_are_those_of_what_draws_them(
    request: pytest.FixtureRequest, of_fixture: tuple[float, ...]
) -> None:
    of_test = draw()
    names = request.node.parent.nodeid, "of_fixture", request.node.nodeid
    for name, result in zip(names, (OF_FILE, of_fixture, of_test), strict=True):
        seed(name)
        assert draw() == result
