"""Padded documents as one stream of tokens, masked or not, on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pylate_flash import explain, maxsim, quantize
from pylate_flash.kernels import plan
from pylate_flash.ops.operator import repeated
from pylate_flash.ops.quantized import maxsim_quantized_reference
from tests.gpu.tools import CAPABILITY, HALF, PRECISIONS, random_mask, unit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CAPABILITY[0] != 9, reason="the kernel is for compute capability 9.0"),
]
# Documents and their length: short, at, below and above a multiple of eight columns and of 64, and long; so many that
# they are a stream for 96 query rows, unless they have equal lengths.
SHAPES = [(100_000, 1), (14_000, 7), (1500, 64), (1500, 65), (520, 180), (93, 1000)]
MASKS = ["none", "prefixes", "scattered", "prefixes and scattered", "few of all tokens"]
QUERIES = [(32, 32), (3, 32), (5, 77)]


def mask_of(name: str, documents: int, length: int) -> Tensor | None:
    """A mask with no active token in some documents, and all in others."""
    if name == "none":
        return None
    lengths = (torch.arange(documents, device="cuda") * 37 % (length + 2) - 1).clamp(min=0)
    prefixes = torch.arange(length, device="cuda") < lengths.unsqueeze(1)
    if name == "prefixes":
        return prefixes
    if name == "few of all tokens":
        return random_mask((documents, length), share=0.02)
    scattered = random_mask((documents, length))
    if name == "prefixes and scattered":
        scattered[::3] = prefixes[::3]
    return scattered


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("size", "dtype"), [(128, HALF), (16, torch.float16), (96, torch.float16), (384, HALF)])
@pytest.mark.parametrize(("n_queries", "query_length"), QUERIES)
def test_scores(name: str, shape: tuple[int, int], size: int, dtype, n_queries: int, query_length: int) -> None:
    """Scores are reproducible, equal the definition's within rounding, and are NaN for a document with NaN."""
    mask, documents = mask_of(name, *shape), unit(*shape, size, dtype=dtype)
    queries = unit(n_queries, query_length, size, dtype=dtype, seed=1)
    # Similarities of both signs, and negative ones only.
    documents[::3] = -queries[0].sum(dim=0) / query_length
    documents[len(documents) // 2, 0, 3] = torch.nan
    if mask is not None or n_queries == 32:
        assert explain(queries, documents, documents_mask=mask).forward.config.stream
    options = {"documents_mask": mask, "empty_score": -2.0}
    actual = maxsim(queries, documents, **options)
    for _ in range(10):
        torch.testing.assert_close(maxsim(queries, documents, **options), actual, rtol=0.0, atol=0.0, equal_nan=True)
    expected = maxsim(queries.double(), documents.double(), **options, implementation="blocked")
    # Similarities of about 1 may cancel.
    torch.testing.assert_close(actual.double(), expected, rtol=0.0, atol=query_length * 2**-20, equal_nan=True)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("weights", "masking"), [(False, "exclude"), (True, "exclude"), (True, "zero")])
def test_bits_of_documents_by_themselves(
    name: str, shape: tuple[int, int], grouped: bool, normalize: bool, weights: bool, masking: str, monkeypatch
) -> None:
    """Equal documents have equal scores, whichever kernel serves a call."""
    n_queries, query_length = (6, 130) if grouped else (24, 40)
    queries, mask = unit(n_queries, query_length, 128, dtype=HALF, seed=1), mask_of(name, *shape)
    documents = unit(*shape, 128, dtype=HALF)
    options = {"normalize": normalize, "documents_mask": mask, "masking": masking}
    if grouped:
        documents = unit(n_queries, *shape, 128, dtype=HALF)
        options["documents_mask"] = None if mask is None else torch.stack(2 * [mask, mask.flip(0), mask.flip(1)])
    if weights:
        options["queries_mask"] = torch.rand(n_queries, query_length, device="cuda")
    call = queries, documents
    assert explain(*call, **options).forward.config.stream
    result = maxsim(*call, **options, empty_score=-2.0)
    repeated.forget()
    monkeypatch.setattr(plan, "is_streamed", lambda *_: False)
    forward = explain(*call, **options).forward
    assert (forward.kernel, forward.config.stream) == ("hopper", False)
    alone = maxsim(*call, **options, empty_score=-2.0)
    repeated.forget()
    assert torch.equal(result, alone)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
@pytest.mark.parametrize("size", [64, 256, 320])
@pytest.mark.parametrize(("normalize", "masking"), [(False, "exclude"), (True, "exclude"), (False, "zero")])
def test_quantized(precision: str, name: str, shape: tuple[int, int], size: int, normalize: bool, masking: str) -> None:
    queries, documents = unit(8, 32, size, dtype=HALF, seed=1), quantize(unit(*shape, size), precision)
    options = {"documents_mask": mask_of(name, *shape), "normalize": normalize, "masking": masking}
    # Unmasked documents of 64 and of 180 tokens fill whole tiles.
    alike = options["documents_mask"] is None and shape[1] in (64, 180)
    assert explain(queries, documents, **options).forward.config.stream != alike
    options["empty_score"] = -2.0
    actual = maxsim(queries, documents, **options)
    tolerance = 1e-3 if precision == "fp8" else 2e-6
    expected = maxsim_quantized_reference(queries, documents, **options)
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    for _ in range(10):
        assert torch.equal(maxsim(queries, documents, **options), actual)
