"""Results of operations do not share memory with the inputs, and inputs are unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from pylate_flash import (
    ResidualCodec,
    maxsim,
    maxsim_cross_entropy,
    maxsim_ragged_pairwise,
    pack,
    quantize,
    train_residual_codec,
)
from tests.ops.operations import calls
from tests.ops.residual_cases import residual_codes


def tensors_of(value: object) -> Iterator[Tensor]:
    """All tensors in a value."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif is_dataclass(value):
        yield from tensors_of([getattr(value, field.name) for field in fields(value)])


def places(value: object) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_of(value) if tensor.numel()}


def codec() -> ResidualCodec:
    return ResidualCodec(torch.eye(8), torch.zeros(3), torch.zeros(4))


GENERATOR = torch.Generator().manual_seed(0)
ROWS, BOUNDS, CODES = torch.rand(4, 8, generator=GENERATOR), torch.tensor([0, 1, 4]), residual_codes([1, 2], 8, 4)
QUERIES = torch.rand(2, 3, 8, generator=GENERATOR, requires_grad=True)
LEARNED = {"temperature": torch.ones((), requires_grad=True), "labels": torch.tensor([0, 1])}
# A function, its positional arguments and its options.
CALLS: dict[str, tuple[Callable[..., Any], tuple, dict[str, Any]]] = {
    **{name: (call.function, call.tensors, call.options) for name, call in calls(masked=True).items()},
    **{f"{name}, one": (call.function, call.tensors, call.options) for name, call in calls(one=True).items()},
    "quantized": (maxsim, (QUERIES.detach(), quantize(QUERIES)), {}),
    "ragged pairs without a gradient": (maxsim_ragged_pairwise, ([ROWS], [ROWS]), {}),
    "learned temperature": (maxsim_cross_entropy, (QUERIES, QUERIES.detach()), LEARNED),
    "losses and statistics": (
        maxsim_cross_entropy, (QUERIES, QUERIES.detach()), {"loss_reduction": "none", "with_statistics": True},
    ),
    "pack": (pack, (list(QUERIES),), {}),
    "quantize": (quantize, (ROWS,), {"cu_seqlens": BOUNDS}),
    "quantize to bytes": (quantize, (ROWS, "uint8"), {"cu_seqlens": BOUNDS}),
    "dequantize": (lambda documents: documents.dequantize(), (quantize(ROWS),), {}),
    "compress": (
        lambda *args: [getattr(codec().compress(*args), name) for name in ("codes", "residuals", "cu_seqlens")],
        (ROWS, BOUNDS), {},
    ),
    "decompress": (lambda documents: documents.decompress(), (CODES,), {}),
    "train": (train_residual_codec, (ROWS, 4), {"dtype": torch.float32}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_changed_or_kept(name: str) -> None:
    if name == "train":
        pytest.importorskip("fastkmeans")
    function, arguments, options = CALLS[name]
    if name.partition(",")[0] in calls():
        arguments = tuple(tensor.clone().requires_grad_() for tensor in arguments)
    inputs = [*tensors_of(list(arguments)), *tensors_of(list(options.values()))]
    before = [tensor.detach().clone() for tensor in inputs]
    result = function(*arguments, **options)
    learned = [tensor for tensor in inputs if tensor.requires_grad]
    scores = [tensor for tensor in tensors_of(result) if tensor.requires_grad]
    gradients = torch.autograd.grad(scores[0].sum(), learned) if scores else ()
    assert places(result)
    assert not places([result, gradients]) & places(inputs)
    for tensor, previous in zip(inputs, before, strict=True):
        assert torch.equal(tensor, previous)
