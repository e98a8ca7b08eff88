"""Masks, weights and empty documents in every kernel of the forward, on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from pylate_flash.kernels.plan import ForwardPlan, forward_plan
from pylate_flash.kernels.tables import architecture
from pylate_flash.ops import maxsim, maxsim_reference, maxsim_varlen
from pylate_flash.ops.varlen import maxsim_varlen_reference
from pylate_flash.problem import Options, Tensors, problem_of
from tests.gpu.tools import FLOAT, HALF, equal, packed_of, random_mask, unit
from tests.ops.cases import Case, gradients, relative_error
from tests.ops.test_varlen import gradients as varlen_gradients

pytestmark = pytest.mark.gpu

# Kernel, queries, documents, type.
PADDED = [
    ("single", (1, 32, 128), (50, 70, 128), HALF),
    ("single", (1, 50, 512), (9, 70, 512), FLOAT),
    ("single", (6, 20, 48), (6, 5, 70, 48), HALF),
    ("stacked", (3, 32, 100), (50, 70, 100), HALF),  # no rows that can be copied 16 bytes at a time
    ("stacked", (16, 32, 128), (20, 70, 128), FLOAT),
    ("stacked", (3, 300, 64), (20, 70, 64), FLOAT),  # several sums of a query
    ("stacked", (3, 100, 60), (3, 5, 70, 60), HALF),
    ("hopper", (3, 32, 128), (50, 70, 128), HALF),
    ("hopper", (16, 32, 128), (50, 70, 128), HALF),
    ("hopper", (3, 300, 128), (20, 70, 128), HALF),
    ("hopper", (4, 150, 64), (4, 5, 70, 64), HALF),
]
# Kernel, whether documents are in pieces, lengths of queries and of documents, candidates, type.
SHORT, LONG = [40, 0, 3, 90, 0, 17], [40, 0, 9000, 90, 0, 17, 5000]
PACKED = [
    ("single", False, [32], SHORT, None, HALF),
    ("single", False, [32, 7, 20], SHORT, [0, 2, 2, 6], HALF),
    ("single", False, [100, 7, 0], SHORT, [0, 2, 4, 6], FLOAT),
    ("hopper", False, [32, 7, 20], SHORT, None, HALF),
    ("stacked", False, [32] * 16, SHORT, None, FLOAT),
    ("hopper", False, [32] * 16, SHORT, None, HALF),
    ("hopper", False, [32, 7, 0, 300], SHORT, None, HALF),
    ("single", True, [32], LONG, None, HALF),
    ("single", True, [100, 7, 20], LONG, [0, 2, 4, 7], HALF),
    ("stacked", True, [32, 7, 20], LONG, None, HALF),
    ("stacked", True, [32] * 16, LONG, None, FLOAT),
]


def kernel(*tensors: torch.Tensor, **options) -> torch.Tensor:
    return maxsim(*tensors, **options, implementation="triton")


def check_plan(plan: ForwardPlan, name: str, in_pieces: bool = False) -> None:
    if architecture(torch.device("cuda"))[0] == 9:
        assert plan.kernel == name
    assert plan.in_pieces == in_pieces


def masked(name: str, queries: tuple[int, ...], documents: tuple[int, ...], dtype: torch.dtype, **options) -> Case:
    """Masks with a query and documents of which no token is active."""
    case = Case(unit(*queries, dtype=dtype), unit(*documents, dtype=dtype, seed=1), None, None, options)
    queries_mask, documents_mask = (random_mask(t.shape[:-1], seed=seed) for seed, t in enumerate(case.tensors))
    if queries[0] > 1:
        queries_mask[1] = False
    documents_mask[..., 1, :] = False
    documents_mask[..., -1, :] = False
    documents_mask[..., 0, :] = True
    case = replace(case, queries_mask=queries_mask, documents_mask=documents_mask)
    tensors = Tensors(*case.tensors, queries_mask, documents_mask)
    check_plan(forward_plan(problem_of(tensors, Options(**options))), name)
    return case


@pytest.mark.parametrize("options", [{}, {"normalize": True, "masking": "zero", "reduction": "mean"}], ids=str)
@pytest.mark.parametrize(("name", "queries", "documents", "dtype"), PADDED)
def test_zeros_and_ones_of_any_type_give_the_same_bits(name, queries, documents, dtype, options: dict) -> None:
    case = masked(name, queries, documents, dtype, **options)
    with torch.no_grad():
        expected = kernel(*case.tensors, **case.keywords)
    expected_gradients = gradients(kernel, case)
    for of_queries, of_documents in [
        (torch.int64, torch.int64), (torch.uint8, torch.int32), (torch.float32, torch.float32),
        (torch.bfloat16, torch.float64), (torch.bool, torch.float16),
    ]:  # fmt: skip
        other = replace(
            case, queries_mask=case.queries_mask.to(of_queries), documents_mask=case.documents_mask.to(of_documents)
        )
        with torch.no_grad():
            assert torch.equal(kernel(*other.tensors, **other.keywords), expected)
        assert equal(gradients(kernel, other), expected_gradients)


def test_integers_other_than_zero_count_as_one() -> None:
    case = masked("hopper", (3, 32, 128), (50, 70, 128), HALF)
    many = replace(case, queries_mask=case.queries_mask * 3, documents_mask=case.documents_mask * -7)
    assert torch.equal(kernel(*many.tensors, **many.keywords), kernel(*case.tensors, **case.keywords))
    assert equal(gradients(kernel, many), gradients(kernel, case))


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"normalize": True, "masking": "zero", "reduction": "mean"}], ids=str)
@pytest.mark.parametrize(("name", "queries", "documents", "dtype"), PADDED)
def test_weights(name, queries, documents, dtype, options: dict, weights_dtype: torch.dtype) -> None:
    case = masked(name, queries, documents, dtype, **options)
    generator = torch.Generator("cuda").manual_seed(3)
    weights = 0.25 + 3 * torch.rand(queries[:2], device="cuda", generator=generator)
    # Of norms other than 1, which the gradient under normalize divides by.
    scales = [0.5 + torch.rand((*t.shape[:-1], 1), device="cuda", generator=generator) for t in case.tensors]
    case = replace(
        case, queries=(case.queries * scales[0]).to(dtype), documents=(case.documents * scales[1]).to(dtype),
        queries_mask=(weights * case.queries_mask).to(weights_dtype),
    )  # fmt: skip
    expected = maxsim_reference(*case.doubled().tensors, **case.keywords)
    with torch.no_grad():
        assert relative_error(kernel(*case.tensors, **case.keywords), expected) <= 2e-6
    tolerance = 1e-5 if dtype == FLOAT else 1e-2
    for gradient, reference in zip(gradients(kernel, case), gradients(maxsim_reference, case.doubled()), strict=True):
        assert gradient.dtype == dtype
        assert relative_error(gradient, reference) <= tolerance


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("masking", ["exclude", "zero"])
@pytest.mark.parametrize("with_queries_mask", [False, True])
@pytest.mark.parametrize(("name", "queries", "documents", "dtype"), PADDED)
def test_empty_score(name, queries, documents, dtype, with_queries_mask: bool, masking: str, reduction: str) -> None:
    case = masked(name, queries, documents, dtype, masking=masking, reduction=reduction, empty_score=-7.5)
    if not with_queries_mask:
        case = replace(case, queries_mask=None)
    with torch.no_grad():
        scores = kernel(*case.tensors, **case.keywords)
        plain = kernel(*case.tensors, **(case.keywords | {"empty_score": 0.0}))
    empty = ~case.documents_mask.any(-1).expand(scores.shape)
    assert empty.sum() == 2 * queries[0]
    assert (scores[empty] == -7.5).all()
    assert torch.equal(scores[~empty], plain[~empty])
    torch.testing.assert_close(
        scores.double(), maxsim_reference(*case.doubled().tensors, **case.keywords), rtol=2e-6, atol=2e-6
    )
    # With winners it is another kernel, or another launch of it.
    leaves = [tensor.detach().requires_grad_() for tensor in case.tensors]
    with_winners = kernel(*leaves, **case.keywords)
    assert (with_winners[empty] == -7.5).all()
    torch.testing.assert_close(with_winners.detach(), scores, rtol=2e-6, atol=2e-6)
    _, grad_documents = torch.autograd.grad(with_winners.sum(), leaves)
    assert not grad_documents[~case.documents_mask].any()


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("name", "in_pieces", "query_lengths", "lengths", "candidates", "dtype"), PACKED)
def test_packed(name, in_pieces, query_lengths, lengths, candidates, dtype, normalize: bool, reduction: str) -> None:
    """Empty documents and queries of unequal lengths, with gradients, of embeddings of any norm."""
    arguments = packed_of(
        [unit(n, 64, dtype=dtype, seed=i) * (0.5 + i % 3) for i, n in enumerate(query_lengths)],
        [unit(n, 64, dtype=dtype, seed=99 + i) * (0.5 + i % 4) for i, n in enumerate(lengths)],
    )
    owned = None if candidates is None else torch.tensor(candidates)
    options = {
        "candidates_cu_seqlens": owned, "normalize": normalize, "reduction": reduction, "empty_score": -7.5
    }  # fmt: skip
    case = Tensors(*arguments[:2], None, None, *arguments[2:], None if owned is None else owned.cuda())
    longest = Options(max(query_lengths), max(lengths), 6, normalize, reduction, empty_score=-7.5)
    check_plan(forward_plan(problem_of(case, longest)), name, in_pieces)

    on_cpu = tuple(tensor.cpu() for tensor in arguments)
    expected = maxsim_varlen_reference(*(t.double() for t in on_cpu[:2]), *on_cpu[2:], **options)
    function = partial(maxsim_varlen, implementation="triton")
    with torch.no_grad():
        scores = function(*arguments, **options)
    torch.testing.assert_close(scores.cpu().double(), expected, rtol=4e-6, atol=4e-6)
    assert (scores[..., [i for i, n in enumerate(lengths) if n == 0]] == -7.5).all()
    found = varlen_gradients(function, (arguments, options))
    references = varlen_gradients(maxsim_varlen_reference, (on_cpu, options), torch.float64)
    for gradient, reference in zip(found, references, strict=True):
        assert gradient.dtype == dtype
        assert relative_error(gradient.cpu(), reference) <= (1e-5 if dtype == FLOAT else 1e-2)
