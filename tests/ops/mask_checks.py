"""Checks of every forward kernel with masks of any dtype, query weights and empty documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pylate_flash.kernels.plan import ForwardPlan, forward_plan
from pylate_flash.ops import maxsim_reference
from pylate_flash.ops.varlen import maxsim_varlen_reference
from pylate_flash.problem import Options, Tensors, problem_of
from tests.ops.cases import Case, gradients, relative_error
from tests.ops.test_varlen import gradients as varlen_gradients

Function = Callable[..., Tensor]
# Options of the calls that get masks.
ALL_OPTIONS = ({}, {"normalize": True, "masking": "zero", "reduction": "mean"})
EMPTY_SCORE = -7.5


def masked(queries: Tensor, documents: Tensor, **options) -> Case:
    """A case with masks, one query and some documents of which have no active token."""
    generator = torch.Generator(queries.device).manual_seed(2)
    queries_mask, documents_mask = (
        torch.rand(t.shape[:-1], device=t.device, generator=generator) > 0.3 for t in (queries, documents)
    )
    if len(queries) > 1:
        queries_mask[1] = False
    documents_mask[..., 1, :] = False
    documents_mask[..., -1, :] = False
    documents_mask[..., 0, :] = True
    return Case(queries, documents, queries_mask, documents_mask, options)


def plan_of(case: Case) -> ForwardPlan:
    tensors = Tensors(*case.tensors, case.queries_mask, case.documents_mask)
    return forward_plan(problem_of(tensors, Options(**case.options)))


def scores_of(kernel: Function, case: Case, **options) -> Tensor:
    with torch.no_grad():
        return kernel(*case.tensors, **case.keywords | options)


def check_types(kernel: Function, case: Case, types: list[tuple[torch.dtype, torch.dtype]]) -> None:
    """Masks of zeros and ones give bitwise equal results in any dtype."""
    expected = scores_of(kernel, case), *gradients(kernel, case)
    for q_dtype, d_dtype in types:
        assert case.queries_mask is not None
        assert case.documents_mask is not None
        other = replace(
            case, queries_mask=case.queries_mask.to(q_dtype), documents_mask=case.documents_mask.to(d_dtype)
        )
        actual = scores_of(kernel, other), *gradients(kernel, other)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def check_weights(kernel: Function, case: Case, dtype: torch.dtype = torch.float32) -> None:
    """Check query weights on embeddings whose norms, which the gradient under normalize divides by, are not 1."""
    generator = torch.Generator(case.queries.device).manual_seed(3)
    kwargs = {"device": case.queries.device, "generator": generator}
    weights = 0.25 + 3 * torch.rand(case.queries.shape[:2], **kwargs)  # type: ignore[call-overload]
    scales = (0.5 + torch.rand((*t.shape[:-1], 1), **kwargs) for t in case.tensors)  # type: ignore[call-overload]
    queries, documents = ((t * scale).to(t.dtype) for t, scale in zip(case.tensors, scales, strict=True))
    case = replace(case, queries=queries, documents=documents, queries_mask=(weights * case.queries_mask).to(dtype))
    expected = maxsim_reference(*case.doubled().tensors, **case.keywords)
    assert relative_error(scores_of(kernel, case), expected) <= 2e-6
    for gradient, reference in zip(gradients(kernel, case), gradients(maxsim_reference, case.doubled()), strict=True):
        assert gradient.dtype == queries.dtype
        assert relative_error(gradient, reference) <= (1e-5 if queries.dtype == torch.float32 else 1e-2)


def check_empty_score(kernel: Function, case: Case, atol: float = 2e-6) -> None:
    case = replace(case, options=case.options | {"empty_score": EMPTY_SCORE})
    scores, plain = scores_of(kernel, case), scores_of(kernel, case, empty_score=0.0)
    assert case.documents_mask is not None
    empty = ~case.documents_mask.any(-1).expand(scores.shape)
    assert empty.sum() == 2 * len(case.queries)
    assert (scores[empty] == EMPTY_SCORE).all()
    assert torch.equal(scores[~empty], plain[~empty])
    expected = maxsim_reference(*case.doubled().tensors, **case.keywords)
    torch.testing.assert_close(scores.double(), expected, rtol=2e-6, atol=atol)
    # With argmax another kernel runs, or the same with other tiles, which may sum in another order.
    leaves = [tensor.detach().requires_grad_() for tensor in case.tensors]
    with_argmax = kernel(*leaves, **case.keywords)
    assert (with_argmax[empty] == EMPTY_SCORE).all()
    torch.testing.assert_close(with_argmax.detach(), scores, rtol=2e-6, atol=atol)
    _, grad_documents = torch.autograd.grad(with_argmax.sum(), leaves)
    assert not grad_documents[~case.documents_mask].any()


def check_packed(
    kernel: Function, arguments: tuple[Tensor, ...], options: dict, rtol: float, atol: float
) -> ForwardPlan:
    """Check empty documents and queries of unequal lengths, with gradients; return the forward plan."""
    options = options | {"empty_score": EMPTY_SCORE}
    owned, (query_lengths, lengths) = options["candidates_cu_seqlens"], (bounds.diff() for bounds in arguments[2:])
    on_cpu = tuple(tensor.cpu() for tensor in arguments)
    expected = maxsim_varlen_reference(*(t.double() for t in on_cpu[:2]), *on_cpu[2:], **options)
    with torch.no_grad():
        scores = kernel(*arguments, **options)
    torch.testing.assert_close(scores.cpu().double(), expected, rtol=rtol, atol=atol)
    assert (scores[..., lengths == 0] == EMPTY_SCORE).all()
    actual = varlen_gradients(kernel, (arguments, options))
    references = varlen_gradients(maxsim_varlen_reference, (on_cpu, options), torch.float64)
    for gradient, reference, tokens in zip(actual, references, arguments, strict=False):
        assert gradient.dtype == tokens.dtype
        assert relative_error(gradient.cpu(), reference) <= (1e-5 if tokens.dtype == torch.float32 else 1e-2)
    owned = None if owned is None else owned.to(scores.device)
    longest = Options(int(query_lengths.max()), int(lengths.max()), 6, options["normalize"], empty_score=EMPTY_SCORE)
    return forward_plan(problem_of(Tensors(*arguments[:2], None, None, *arguments[2:], owned), longest))
