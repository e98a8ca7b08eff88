"""Public operations: where they are exported, the examples in their docstrings, and that these name every parameter."""

from __future__ import annotations

import doctest
import inspect
import re

import pytest
import torch

import pylate_flash
from pylate_flash import ops

# Packages that an example needs beyond the required dependencies.
NEEDS = {"train_residual_codec": "fastkmeans"}
OPERATIONS = [name for name, value in vars(ops).items() if inspect.isfunction(value)]


@pytest.mark.parametrize("name", OPERATIONS)
def test_examples(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    names = {public: getattr(pylate_flash, public) for public in pylate_flash.__all__} | {"torch": torch}
    failures: list[str] = []
    for example in doctest.DocTestFinder().find(getattr(ops, name), name=name, globs=names):
        doctest.DocTestRunner(verbose=False).run(example, out=failures.append)
    assert not failures, "".join(failures)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if not name.endswith("_reference")])
def test_parameters_results_and_errors_are_named(name: str) -> None:
    operation = getattr(ops, name)
    assert getattr(pylate_flash, name) is operation
    assert name in pylate_flash.__all__
    sections = re.split(r"\n *(\w+)\n *-+\n", inspect.getdoc(operation) or "")
    text = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert {"Parameters", "Returns", "Raises"} <= text.keys()
    headings = re.findall(r"^(\w+(?:, \w+)*)$", text["Parameters"], flags=re.MULTILINE)
    named = [parameter for heading in headings for parameter in heading.split(", ")]
    assert named == list(dict.fromkeys(named))
    assert set(named) == inspect.signature(operation).parameters.keys()
