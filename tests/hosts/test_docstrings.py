"""The examples in the docstrings of the hosts' functions give what they say."""

from __future__ import annotations

import doctest

import pytest

from pylate_flash.hosts import colpali
from pylate_flash.hosts.sentence_transformers import scoring, xtr_scoring


@pytest.mark.parametrize(("module", "examples"), [(scoring, 4), (xtr_scoring, 2), (colpali, 2)])
def test_examples(module, examples):
    results = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    assert len(results) == examples
    for test in results:
        assert doctest.DocTestRunner().run(test).failed == 0
