"""MaxSim over packed tokens on a GPU, against the definition in float64 on the same, already rounded, inputs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_flash.ops import maxsim, maxsim_varlen
from pylate_flash.ops.varlen import maxsim_varlen_reference
from tests.gpu.tools import DTYPES, FLOAT, HALF, on_gpu, packed_of, unit
from tests.ops.cases import relative_error
from tests.ops.test_varlen import gradients as varlen_gradients
from tests.ops.test_varlen import packed

pytestmark = pytest.mark.gpu
# A kernel is compiled for each embedding size, so there are few of them.
SIZES = st.sampled_from([7, 48, 128])


def varlen_kernel(*tensors: torch.Tensor, **options) -> torch.Tensor:
    return maxsim_varlen(*tensors, **options, implementation="triton")


@settings(max_examples=60)
@given(case=packed(dtypes=DTYPES, sizes=SIZES))
def test_scores_and_gradients(case: tuple) -> None:
    (queries, documents, *bounds), options = case
    arguments, there = on_gpu(case)
    with torch.no_grad():
        scores = varlen_kernel(*arguments, **there)
    expected = maxsim_varlen_reference(queries.double(), documents.double(), *bounds, **options)
    torch.testing.assert_close(scores.cpu().double(), expected, rtol=2e-6, atol=2e-6)
    found = varlen_gradients(varlen_kernel, (arguments, there))
    for gradient, reference in zip(found, varlen_gradients(maxsim_varlen_reference, case, torch.float64), strict=True):
        assert gradient.dtype == queries.dtype
        assert relative_error(gradient.cpu(), reference) <= (1e-5 if gradient.dtype == FLOAT else 1e-2)


LONG = [70, 9000, 0, 300, 40_000, 1] + [180] * 200


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize(
    ("query_lengths", "candidates"),
    [([32], None), ([32, 7, 0, 20], None), ([300], None), ([32] * 40, None), ([32, 100], [0, 2, 206])],
)
@pytest.mark.parametrize("normalize", [False, True])
def test_with_long_documents(query_lengths, candidates, normalize: bool, dtype: torch.dtype) -> None:
    """A document of 40000 tokens is split into segments, more of them than one processor sees."""
    arguments = packed_of(
        [unit(length, 64, dtype=dtype, seed=i) for i, length in enumerate(query_lengths)],
        [unit(length, 64, dtype=dtype, seed=i) for i, length in enumerate(LONG)],
    )
    options = {
        "normalize": normalize,
        "candidates_cu_seqlens": None if candidates is None else torch.tensor(candidates),
    }
    found = varlen_gradients(varlen_kernel, (arguments, options))
    expected = varlen_gradients(partial(maxsim_varlen, implementation="blocked"), (arguments, options), torch.float64)
    for gradient, reference in zip(found, expected, strict=True):
        assert relative_error(gradient, reference) <= (1e-5 if dtype == FLOAT else 1e-2)
    scores, double = varlen_kernel(*arguments, **options), [tokens.double() for tokens in arguments[:2]]
    torch.testing.assert_close(
        scores.double(), maxsim_varlen(*double, *arguments[2:], **options).double(), rtol=2e-6, atol=2e-6
    )
    assert torch.equal(
        scores, varlen_kernel(*arguments, **options, max_query_length=max(query_lengths), max_document_length=40_000)
    )


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


def test_of_many_documents_equals_padded_ones() -> None:
    lengths = torch.randint(1, 400, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    documents = [unit(length, 128, dtype=HALF, seed=i) for i, length in enumerate(lengths)]
    padded = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    mask = torch.arange(padded.shape[1], device="cuda") < torch.tensor(lengths, device="cuda").unsqueeze(1)
    queries = unit(7, 30, 128, dtype=HALF, seed=1)
    found = maxsim_varlen(*packed_of(list(queries), documents))
    torch.testing.assert_close(found, maxsim(queries, padded, documents_mask=mask), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("n_queries", [1, 3, 32])
def test_packed_calls_with_everything_known_equal_the_longer_way(n_queries: int) -> None:
    queries = [unit(32, 128, dtype=HALF, seed=i) for i in range(n_queries)]
    documents = [unit(length, 128, dtype=HALF, seed=length) for length in (5, 64, 200, 65, 1)]
    arguments = packed_of(queries, documents)
    with torch.no_grad():
        known = maxsim_varlen(*arguments, max_query_length=32, max_document_length=200)
        again = maxsim_varlen(*arguments, max_query_length=32, max_document_length=200)
        longer = maxsim_varlen(*arguments)
    assert torch.equal(known, again)
    torch.testing.assert_close(known, longer, rtol=1e-6, atol=1e-6)
    tensors, bounds = arguments[:2], arguments[2:]
    graded = maxsim_varlen(tensors[0].clone().requires_grad_(), tensors[1], *bounds, max_query_length=32)
    torch.testing.assert_close(known, graded.detach(), rtol=1e-6, atol=1e-6)
