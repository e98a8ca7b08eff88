"""MaxSim over packed tokens on a GPU, against the definition in float64 on the same, already rounded, inputs."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pylate_flash import explain
from pylate_flash.kernels import plan
from pylate_flash.ops import maxsim, maxsim_varlen
from pylate_flash.ops.operator import repeated
from tests.gpu.tools import CAPABILITY, FLOAT, HALF, packed_of, unit
from tests.ops.cases import relative_error
from tests.ops.test_varlen import gradients as varlen_gradients

pytestmark = pytest.mark.gpu


def varlen_kernel(*tensors: torch.Tensor, **options) -> torch.Tensor:
    return maxsim_varlen(*tensors, **options, implementation="triton")


LONG = [70, 9000, 0, 300, 40_000, 1] + [180] * 200


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize(
    ("query_lengths", "candidates"),
    [([32], None), ([32, 7, 0, 20], None), ([300], None), ([32] * 40, None), ([32, 100], [0, 2, 206])],
)
@pytest.mark.parametrize("normalize", [False, True])
def test_with_long_documents(query_lengths, candidates, normalize: bool, dtype: torch.dtype) -> None:
    """A document of 40000 tokens is split into segments, more of them than one SM processes."""
    arguments = packed_of(
        [unit(length, 64, dtype=dtype, seed=i) for i, length in enumerate(query_lengths)],
        [unit(length, 64, dtype=dtype, seed=i) for i, length in enumerate(LONG)],
    )
    options = {
        "normalize": normalize,
        "candidates_cu_seqlens": None if candidates is None else torch.tensor(candidates),
    }
    actual = varlen_gradients(varlen_kernel, (arguments, options))
    expected = varlen_gradients(partial(maxsim_varlen, implementation="blocked"), (arguments, options), torch.float64)
    for gradient, reference in zip(actual, expected, strict=True):
        assert relative_error(gradient, reference) <= (1e-5 if dtype == FLOAT else 1e-2)
    double = [tokens.double() for tokens in arguments[:2]]
    exact, longest_query = maxsim_varlen(*double, *arguments[2:], **options).double(), max(query_lengths)
    # If its length is not passed, it is not split for several queries.
    for longest in (None, 40_000):
        scores = varlen_kernel(*arguments, **options, max_query_length=longest_query, max_document_length=longest)
        torch.testing.assert_close(scores.double(), exact, rtol=2e-6, atol=2e-6)
    bound = {"max_query_length": longest_query, "max_document_length": len(arguments[1])}
    assert torch.equal(varlen_kernel(*arguments, **options), varlen_kernel(*arguments, **options, **bound))


def test_ties_and_nan_across_segments() -> None:
    documents = [unit(1, 64, seed=1).repeat(20_000, 1), unit(50, 64), unit(9000, 64, seed=2)]
    documents[2][8765, 3] = torch.nan
    for query_lengths in ([20], [20, 30]):
        arguments = packed_of([unit(length, 64, seed=length) for length in query_lengths], documents)
        tokens = arguments[1].requires_grad_()
        scores = varlen_kernel(*arguments)
        assert scores[:, 2].isnan().all()
        assert scores[:, :2].isfinite().all()
        (gradient,) = torch.autograd.grad(scores[:, 0].sum(), tokens, retain_graph=True)
        assert (gradient != 0).any(dim=1).nonzero().flatten().tolist() == [0]
        (gradient,) = torch.autograd.grad(scores[:, 2].sum(), tokens)
        assert (gradient != 0).any(dim=1).nonzero().flatten().tolist() == [20_050 + 8765]


@pytest.mark.parametrize(("size", "query_length"), [(128, 32), (96, 32), (64, 60), (48, 7), (256, 16), (128, 60)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normalize", [False, True])
def test_one_query_and_many_short_documents(normalize: bool, dtype: torch.dtype, size: int, query_length: int) -> None:
    """Documents are walked as one row; on Hopper as one stream if the query takes too many registers, or with norms."""
    lengths = [(37 * index) % 45 for index in range(6000)]
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    documents, query = unit(int(bounds[-1]), size, dtype=dtype), unit(query_length, size, dtype=dtype, seed=1)
    documents[100, 3] = torch.nan
    call = query, documents, torch.tensor([0, query_length], device="cuda"), bounds
    options = {"max_query_length": query_length, "max_document_length": 44, "empty_score": -2.0, "normalize": normalize}
    cu_seqlens = dict(zip(("queries_cu_seqlens", "documents_cu_seqlens"), call[2:], strict=True))
    named = {name: options[name] for name in ("max_query_length", "max_document_length", "normalize")}
    # Tiles of 16 columns are not left half empty by 22 tokens, of which a document has as many on average.
    streamed = CAPABILITY[0] == 9 and (not normalize or size > 128 or query_length > 16)
    kernel = "short" if not normalize and query_length * size <= 4096 else "hopper" if streamed else "single"
    assert explain(*call[:2], **cu_seqlens, **named).forward.kernel == kernel
    actual = varlen_kernel(*call, **options)
    for _ in range(20):
        torch.testing.assert_close(varlen_kernel(*call, **options), actual, rtol=0.0, atol=0.0, equal_nan=True)
    double = query.double(), documents.double(), *call[2:]
    expected = maxsim_varlen(*double, **options, implementation="blocked")
    torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=2e-6, equal_nan=True)


def test_of_many_documents_equals_padded_ones() -> None:
    lengths = torch.randint(1, 400, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    documents = [unit(length, 128, dtype=HALF, seed=i) for i, length in enumerate(lengths)]
    padded = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    mask = torch.arange(padded.shape[1], device="cuda") < torch.tensor(lengths, device="cuda").unsqueeze(1)
    queries = unit(7, 30, 128, dtype=HALF, seed=1)
    result = maxsim_varlen(*packed_of(list(queries), documents))
    torch.testing.assert_close(result, maxsim(queries, padded, documents_mask=mask), rtol=2e-6, atol=2e-6)


# Empty documents at the start, at the end and in runs; ends before, at and past multiples of 8 tokens and of 64.
STREAMS = {
    "every length": [index % 141 for index in range(600)],
    "few": [0, 0, 1, 0],
    "ends of eights": [0] * 70 + [8, 7, 9, 64, 63, 65, 56, 72, 128, 1, 0, 0] * 40 + [0] * 70,
    "one token": [1] * 1000,
    "every other has none": ([5, 0] * 20 + [0, 5] * 20) * 8,
    "one is long": [5] * 200 + [1500] + [5] * 200,
}


@pytest.mark.skipif(CAPABILITY[0] != 9, reason="the kernel is for compute capability 9.0")
@pytest.mark.parametrize("lengths", STREAMS.values(), ids=STREAMS.keys())
@pytest.mark.parametrize(
    ("size", "dtype"),
    [(128, HALF), (16, HALF), (32, torch.bfloat16), (48, torch.bfloat16), (96, HALF), (320, torch.bfloat16)],
)
@pytest.mark.parametrize(("n_queries", "query_length"), [(32, 32), (3, 32), (5, 77), (70, 1), (2, 128)])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_stream_of_documents(lengths, size: int, dtype, n_queries: int, query_length: int, normalize: bool) -> None:
    """Scores are reproducible, equal the definition's within rounding, and are NaN for a document with NaN."""
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    documents = unit(max(1, int(bounds[-1])), size, dtype=dtype)
    queries = unit(n_queries * query_length, size, dtype=dtype, seed=1)
    # Similarities of both signs, and negative ones only.
    documents[::3] = -queries[: len(documents[::3])].sum(dim=0) / query_length
    documents[len(documents) // 2, 3] = torch.nan
    queries_bounds = torch.arange(n_queries + 1, device="cuda", dtype=torch.int32) * query_length
    call, longest = (queries, documents, queries_bounds, bounds), max(1, *lengths)
    options = {"normalize": normalize, "max_query_length": query_length, "max_document_length": longest}
    cu_seqlens = {"queries_cu_seqlens": queries_bounds, "documents_cu_seqlens": bounds}
    assert explain(*call[:2], **cu_seqlens, **options).forward.config.stream
    options["empty_score"] = -2.0
    actual = varlen_kernel(*call, **options)
    for _ in range(20):
        torch.testing.assert_close(varlen_kernel(*call, **options), actual, rtol=0.0, atol=0.0, equal_nan=True)
    double = queries.double(), documents.double(), queries_bounds, bounds
    expected = maxsim_varlen(*double, **options, implementation="blocked")
    # Similarities of about 1 may cancel.
    torch.testing.assert_close(actual.double(), expected, rtol=0.0, atol=query_length * 2**-20, equal_nan=True)
    assert (actual[:, bounds.diff() == 0] == -2.0).all()


@pytest.mark.skipif(CAPABILITY[0] != 9, reason="the kernel is for compute capability 9.0")
@pytest.mark.parametrize("lengths", STREAMS.values(), ids=STREAMS.keys())
@pytest.mark.parametrize(("n_queries", "query_length"), [(32, 32), (6, 20), (5, 77), (70, 1), (4, 256)])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_stream_has_the_bits_of_documents_by_themselves(
    lengths, n_queries: int, query_length: int, normalize: bool, monkeypatch
) -> None:
    """Equal documents have equal scores, whichever block of a search they are in."""
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    documents = unit(max(1, int(bounds[-1])), 128, dtype=HALF)
    queries = unit(n_queries * query_length, 128, dtype=HALF, seed=1)
    queries_bounds = torch.arange(n_queries + 1, device="cuda", dtype=torch.int32) * query_length
    call = queries, documents, queries_bounds, bounds
    options = {"normalize": normalize, "max_query_length": query_length, "max_document_length": max(1, *lengths)}
    cu_seqlens = {"queries_cu_seqlens": queries_bounds, "documents_cu_seqlens": bounds}
    result = varlen_kernel(*call, **options)
    repeated.forget()
    monkeypatch.setattr(plan, "is_streamed", lambda *_: False)
    forward = explain(*call[:2], **cu_seqlens, **options).forward
    assert (forward.kernel, forward.config.stream) == ("hopper", False)
    alone = varlen_kernel(*call, **options)
    repeated.forget()
    assert torch.equal(result, alone)
