"""No result depends on `torch.get_default_dtype()`, neither its values nor its type."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import pylate_flash as ops
from pylate_flash.ops.varlen import maxsim_varlen_reference


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float32)


QUERIES, DOCUMENTS, NONE = _random(2, 3, 8), _random(4, 5, 8), _random(4, 0, 8)
VALUES, BOUNDS = ops.pack(list(DOCUMENTS))
MINE, MY_BOUNDS = ops.pack(list(QUERIES))
NO_BOUNDS = torch.zeros(5, dtype=torch.int32)
CHOSEN = torch.zeros(4, 1, dtype=torch.int64)


@functools.cache
def codes() -> ops.ResidualCodes:
    pytest.importorskip("fastkmeans")
    return ops.train_residual_codec(VALUES, nbits=4, num_centroids=4).compress(VALUES, BOUNDS)


CALLS: dict[str, Callable[[], Tensor]] = {
    "maxsim": lambda: ops.maxsim(QUERIES, DOCUMENTS, normalize=True),
    "maxsim of nothing": lambda: ops.maxsim(QUERIES, NONE),
    "pairwise": lambda: ops.maxsim_pairwise(QUERIES, DOCUMENTS[:2]),
    "varlen": lambda: ops.maxsim_varlen(MINE, VALUES, MY_BOUNDS, BOUNDS),
    "varlen of nothing": lambda: ops.maxsim_varlen(MINE, VALUES[:0], MY_BOUNDS, NO_BOUNDS),
    "varlen's definition": lambda: maxsim_varlen_reference(MINE, VALUES[:0], MY_BOUNDS, NO_BOUNDS[:1]),
    "ragged": lambda: ops.maxsim_ragged(list(QUERIES), list(DOCUMENTS)),
    "ragged pairs": lambda: ops.maxsim_ragged_pairwise(list(QUERIES), list(DOCUMENTS[:2]), normalize=True),
    "quantized": lambda: ops.maxsim_varlen(MINE, ops.quantize(VALUES), MY_BOUNDS, BOUNDS),
    "residual": lambda: ops.maxsim_residual(QUERIES, codes()),
    "sparse": lambda: ops.maxsim_sparse_queries(QUERIES, DOCUMENTS, CHOSEN),
    "sparse of nothing": lambda: ops.maxsim_sparse_queries(QUERIES, NONE, CHOSEN),
    "soft": lambda: ops.soft_maxsim(QUERIES, DOCUMENTS, 2.0),
    "soft of nothing": lambda: ops.soft_maxsim(QUERIES, NONE, 2.0),
    "soft varlen": lambda: ops.soft_maxsim_varlen(MINE, VALUES, 2.0, MY_BOUNDS, BOUNDS),
    "hidden": lambda: ops.maxsim_from_hidden(QUERIES, DOCUMENTS, torch.eye(8, dtype=torch.float32)),
    "xtr": lambda: ops.xtr_scores(QUERIES, DOCUMENTS, k=3),
    "chamfer": lambda: ops.chamfer(DOCUMENTS, DOCUMENTS.flip(1)),
    "cross entropy": lambda: ops.maxsim_cross_entropy(QUERIES, DOCUMENTS),
    "cross entropy of nothing": lambda: ops.maxsim_cross_entropy(QUERIES, NONE),
}


@pytest.fixture
def set_default() -> Iterator[Callable[[torch.dtype], None]]:
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_results_do_not_depend_on_the_default_type(
    call: Callable[[], Tensor], set_default: Callable[[torch.dtype], None]
) -> None:
    expected = call()
    assert expected.dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float64):
        set_default(dtype)
        found = call()
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)
