"""Soft MaxSim kernels on a GPU against the definition in float64, on the same, already rounded, inputs."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pylate_flash.ops import soft_maxsim, soft_maxsim_reference, soft_maxsim_varlen
from pylate_flash.problem import Options, Tensors
from tests.gpu.tools import DTYPES, HALF, SIZES, memory_of, on_gpu, packed_of, random_mask, unit
from tests.ops.cases import Case, cases, relative_error
from tests.ops.test_soft import (
    check_gradients,
    check_masked_gradients,
    soft_gradients,
    varlen_gradients,
    varlen_reference,
)

pytestmark = pytest.mark.gpu

kernel = functools.partial(soft_maxsim, implementation="triton")
varlen_kernel = functools.partial(soft_maxsim_varlen, implementation="triton")


def check(case: Case, beta: float) -> None:
    """Check scores, and gradients by their error and their direction."""
    exact = case.queries.dtype == torch.float32
    expected = soft_maxsim_reference(*case.doubled().tensors, beta, **case.keywords)
    scores = kernel(*case.tensors, beta, **case.keywords)
    torch.testing.assert_close(scores.double(), expected, rtol=2e-6, atol=2e-6)
    expected = soft_gradients(soft_maxsim_reference, case.doubled(), beta)
    # Every score decreases with beta, so this is the sum of the absolute gradients of beta.
    learned = torch.tensor(beta, dtype=torch.float64, device="cuda", requires_grad=True)
    total = soft_maxsim_reference(*case.doubled().tensors, learned, **case.keywords).sum()
    slope = torch.autograd.grad(total, learned, materialize_grads=True)[0].abs().item()
    actual = soft_gradients(kernel, case, beta)
    check_gradients(actual, expected, 1e-5 if exact else 1e-2, max(1.0, slope))
    for gradient, reference in zip(actual[1:], expected[1:], strict=True):
        assert gradient.dtype == case.queries.dtype
        if reference.any():
            assert F.cosine_similarity(gradient.double().flatten(), reference.flatten(), dim=0) >= 0.9999


@settings(max_examples=40)
@given(case=cases(dtypes=DTYPES, max_batch=7, max_length=200, sizes=SIZES), beta=st.sampled_from([0.3, 2.0, 20.0]))
def test_scores_and_gradients(case: Case, beta: float) -> None:
    check(on_gpu(case), beta)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("queries_shape", "documents_shape"),
    [
        ((1, 32, 128), (100, 300, 128)),
        ((1, 1024, 128), (20, 1000, 128)),
        ((32, 32, 128), (64, 180, 128)),
        ((130, 33, 128), (70, 45, 128)),
        ((16, 32, 96), (16, 70, 96)),
        ((16, 32, 256), (16, 70, 256)),
        ((5, 32, 320), (40, 64, 320)),
        ((2, 200, 4096), (3, 150, 4096)),
        ((8, 32, 128), (8, 16, 300, 128)),
        ((64, 1, 128), (64, 1, 128)),
    ],
)
def test_shapes_in_use(queries_shape: tuple[int, ...], documents_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(Case(unit(*queries_shape, dtype=dtype), unit(*documents_shape, dtype=dtype, seed=1), None, None, {}), 10.0)


@pytest.mark.parametrize("candidates", [None, torch.tensor([0, 2, 2, 5], dtype=torch.int32)])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_tokens(dtype: torch.dtype, normalize: bool, candidates: Tensor | None) -> None:
    queries = [unit(length, 128, dtype=dtype, seed=length) for length in (32, 0, 70)]
    documents = [unit(length, 128, dtype=dtype, seed=length) for length in (300, 1, 0, 64, 129)]
    options = {"normalize": normalize, "candidates_cu_seqlens": candidates, "reduction": "mean", "empty_score": -5.0}
    arguments = packed_of(queries, documents)
    expected = varlen_reference(*(t.double() for t in arguments[:2]), 10.0, *arguments[2:], **options)
    torch.testing.assert_close(
        varlen_kernel(*arguments[:2], 10.0, *arguments[2:], **options).double(), expected, rtol=2e-6, atol=2e-6
    )
    actual = varlen_gradients(varlen_kernel, (arguments, options), 10.0)
    expected = varlen_gradients(varlen_reference, (arguments, options), 10.0, torch.float64)
    check_gradients(actual, expected, 1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(
    ("size", "length"),
    [(128, length) for length in (1, 15, 17, 63, 64, 65, 80, 96, 130, 191)]
    + [(size, length) for size in (64, 96, 256, 320) for length in (96, 191)],
)
def test_what_is_left_after_whole_tiles(size: int, length: int) -> None:
    """The tail of padded documents has its own product, in every width; under a mask, tails are different."""
    queries, documents = (unit(9, n, size, dtype=HALF, seed=n) for n in (70, length))
    masks = [random_mask((9, n)) for n in (70, length)]
    masks[1][3] = False
    everything = {"normalize": True, "masking": "zero", "empty_score": -2.0}
    for case in (
        Case(queries, documents, None, None, {}),
        Case(queries, documents, masks[0].float() * 1.5, masks[1], everything),
    ):
        expected = soft_maxsim_reference(*case.doubled().tensors, 10.0, **case.keywords)
        actual = kernel(*case.tensors, 10.0, **case.keywords)
        torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_logarithms_of_sums(dtype: torch.dtype) -> None:
    """The gradient is computed from them, for every row and document, in both layouts."""
    queries, documents = unit(4, 100, 128, dtype=dtype), unit(4, 3, 150, 128, dtype=dtype, seed=1)
    for scored, similarities in (
        (documents[:, 0], torch.einsum("qsd,ntd->nqst", queries.double(), documents[:, 0].double())),
        (documents, torch.einsum("qsd,qntd->qnst", queries.double(), documents.double())),
    ):
        tensors, beta = Tensors(queries, scored), torch.tensor(10.0, device="cuda")
        _, lse = torch.ops.pylate_flash.soft_maxsim_forward(beta, *tensors, *Options(implementation="triton"))
        expected = torch.logsumexp(10.0 * similarities, dim=-1).view(lse.shape)
        torch.testing.assert_close(lse.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_packed_documents_of_all_lengths(dtype: torch.dtype) -> None:
    """Split among programs by tokens, many documents per program or many programs per document; some are empty."""
    lengths = torch.randint(0, 300, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    queries = [unit(32, 128, dtype=dtype, seed=seed) for seed in range(5)]
    for document_lengths in (lengths, [0, 5000, 0, 1, 7000, 64]):
        documents = [unit(length, 128, dtype=dtype, seed=length) for length in document_lengths]
        arguments = packed_of(queries, documents)
        options = {"candidates_cu_seqlens": None, "empty_score": -5.0}
        expected = varlen_reference(*(t.double() for t in arguments[:2]), 10.0, *arguments[2:], **options)
        actual = varlen_kernel(*arguments[:2], 10.0, *arguments[2:], **options)
        torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("length", [40, 128, 150])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity(dtype: torch.dtype, length: int) -> None:
    """Values that are not finite stay in their document, wherever in a tile they are."""
    queries, documents = unit(3, 70, 128, dtype=dtype).abs() + 0.01, unit(8, length, 128, dtype=dtype, seed=1)
    documents[0, length - 1, 1] = torch.nan
    documents[1, 2, 0] = torch.inf
    documents[2] = -torch.inf
    documents[3, 38, 0] = -torch.inf
    documents[4, : length - 1] = -torch.inf
    documents[5, :4, 0], documents[5, 7, 3] = torch.inf, torch.nan
    documents[6, 1, 0], documents[6, 2, 0] = -torch.inf, torch.inf
    expected = soft_maxsim_reference(queries.double(), documents.double(), 10.0)
    actual = kernel(queries, documents.requires_grad_(), 10.0)
    torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=2e-6, equal_nan=True)
    assert actual.isnan().any(dim=0).tolist() == [True, False, False, False, False, True, False, False]
    assert actual.isinf().any(dim=0).tolist() == [False, True, True, False, False, False, True, False]
    (gradient,) = torch.autograd.grad(actual.sum(), documents)
    assert gradient[[3, 7]].isfinite().all()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_masked_tokens_have_no_gradient_beside_what_is_not_finite(value: float, normalize: bool) -> None:
    check_masked_gradients(kernel, value, normalize, "cuda")


def test_exponents_that_grow_from_tile_to_tile() -> None:
    """Every tile's maximum is larger than all before it, or smaller: sums are rescaled, or not."""
    queries, documents = unit(2, 64, 128, dtype=HALF), unit(2, 64 * 5 + 20, 128, dtype=HALF, seed=1)
    scale = torch.linspace(0.1, 8.0, documents.shape[1], device="cuda")
    for scales in (scale, scale.flip(0)):
        scaled = (documents * scales[None, :, None]).to(documents.dtype)
        for beta in (0.1, 10.0, 1000.0):
            expected = soft_maxsim_reference(queries.double(), scaled.double(), beta)
            torch.testing.assert_close(kernel(queries, scaled, beta).double(), expected, rtol=2e-6, atol=2e-6)


def test_float16_holds_the_gradient_of_a_loss_that_was_scaled() -> None:
    """Before it is summed, and where the result fits: probabilities times 65536 do not fit into float16."""
    queries, documents = unit(4, 32, 128, dtype=torch.float16), unit(5, 180, 128, dtype=torch.float16, seed=1)
    queries.requires_grad_()
    documents.requires_grad_()
    gradients = torch.autograd.grad((65536.0 * kernel(queries, documents, 100.0)).sum() * 0.25, (queries, documents))
    plain = torch.autograd.grad(kernel(queries, documents, 100.0).sum(), (queries, documents))
    for actual, expected in zip(gradients, plain, strict=True):
        fits = expected.double().abs() * 16384 < 65504
        assert relative_error(actual[fits], expected[fits].double() * 16384) <= 1e-3


def test_opcheck() -> None:
    queries, documents = (unit(3, n, 32, dtype=HALF, seed=n).requires_grad_() for n in (20, 70))
    beta, mask = torch.tensor(5.0, device="cuda", requires_grad=True), torch.ones(3, 20, device="cuda")
    tensors = Tensors(queries, documents, mask)
    torch.library.opcheck(torch.ops.pylate_flash.soft_maxsim.default, (beta, *tensors, *Options(normalize=True)))


def test_memory_does_not_hold_the_similarities() -> None:
    """64 x 64 of 1024 x 1024 tokens: 16 GiB of float32 similarities."""
    queries, documents = (unit(64, 1024, 128, dtype=HALF, seed=seed).requires_grad_() for seed in (0, 1))
    beta = torch.tensor(10.0, device="cuda", requires_grad=True)
    grad = torch.ones(64, 64, device="cuda")
    leaves = queries, documents, beta
    peak, result_bytes = memory_of(lambda: torch.autograd.grad(kernel(*leaves), leaves, grad))
    assert peak - result_bytes <= 64 << 20
