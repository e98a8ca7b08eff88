"""The blocked implementation where small groups of similarities are batched, and the memory of its backward."""

from __future__ import annotations

import pytest
import torch

from pylate_flash import maxsim, maxsim_varlen, pack
from pylate_flash.ops import maxsim_reference, products
from pylate_flash.ops.tiles import groups_at_once, operands_of
from pylate_flash.ops.varlen import maxsim_varlen_reference
from pylate_flash.problem import Options, Tensors, problem_of
from tests.ops.cases import Case, gradients, relative_error
from tests.ops.test_varlen import gradients as packed_gradients

OPTIONS = {"normalize": True, "reduction": "mean", "masking": "zero", "empty_score": -3.0}


def candidates(n_queries: int, k: int, masked: bool = True) -> Case:
    generator = torch.Generator().manual_seed(0)
    queries, documents = (
        torch.randn(n_queries, 4, 8, generator=generator),
        torch.randn(n_queries, k, 6, 8, generator=generator),
    )
    queries_mask = torch.rand(n_queries, 4, generator=generator) > 0.3 if masked else None
    documents_mask = torch.rand(n_queries, k, 6, generator=generator) > 0.4 if masked else None
    if documents_mask is not None:
        documents_mask[1, 0] = False
    return Case(queries, documents, queries_mask, documents_mask, OPTIONS if masked else {})


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("budget", [1 << 20, 2000, 800, 300, 50, 1])
def test_any_number_ofgroups_at_once_gives_the_definition(
    budget: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From all at once to a part of one document's rows."""
    monkeypatch.setattr(products, "_BLOCK_CPU", budget)
    case = candidates(7, 3, masked)
    expected = maxsim_reference(*case.doubled().tensors, **case.keywords)
    torch.testing.assert_close(maxsim(*case.tensors, **case.keywords).double(), expected, rtol=2e-6, atol=2e-6)
    for actual, reference in zip(gradients(maxsim, case), gradients(maxsim_reference, case.doubled()), strict=True):
        assert actual.is_contiguous()
        assert relative_error(actual, reference) <= 1e-5


def test_groups_of_few_similarities_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, product = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *arguments: calls.append(1) or product(*arguments))
    maxsim(torch.randn(50, 4, 8), torch.randn(50, 2, 6, 8))
    assert len(calls) == 1


@pytest.mark.parametrize("budget", [1 << 20, 3000, 600, 40])
@pytest.mark.parametrize("normalize", [False, True])
def test_packed_pairs_go_together(budget: int, normalize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and documents without tokens, queries without documents, and with several."""
    monkeypatch.setattr(products, "_BLOCK_CPU", budget)
    torch.manual_seed(0)
    queries, queries_bounds = pack([torch.randn(n, 8) for n in (3, 0, 5, 2, 4, 1)])
    documents, documents_bounds = pack([torch.randn(n, 8) for n in (4, 7, 0, 1, 30, 2, 9, 3)])
    arguments = queries, documents, queries_bounds, documents_bounds
    options = {"candidates_cu_seqlens": torch.tensor([0, 1, 3, 3, 5, 6, 8]), "normalize": normalize,
               "empty_score": -2.0}  # fmt: skip
    case = arguments, options
    expected = maxsim_varlen_reference(*arguments, **options)
    torch.testing.assert_close(maxsim_varlen(*arguments, **options), expected)
    torch.testing.assert_close(packed_gradients(maxsim_varlen, case), packed_gradients(maxsim_varlen_reference, case))


def test_documents_without_tokens_may_have_a_block_to_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_BLOCK_CPU", 1)
    torch.manual_seed(0)
    queries, documents = torch.randn(5, 8), torch.randn(8, 8)
    bounds = torch.tensor([0, 2, 5]), torch.tensor([0, 0, 0, 3, 8, 8, 8])
    for candidates in (None, torch.tensor([0, 3, 6])):
        case = (queries, documents, *bounds), {"normalize": True, "candidates_cu_seqlens": candidates}
        torch.testing.assert_close(
            packed_gradients(maxsim_varlen, case), packed_gradients(maxsim_varlen_reference, case)
        )


def test_runs_of_queries_stay_within_the_budget() -> None:
    bounds = [torch.tensor(b) for b in ([0, 3, 6, 9, 12], [0, 10, 20, 520, 530, 540], [0, 1, 2, 4, 5])]
    tensors = Tensors(torch.randn(12, 8), torch.randn(540, 8), None, None, *bounds)
    arguments = operands_of(problem_of(tensors, Options(3, 500, 2)), tensors)
    assert groups_at_once(arguments, 8 * 100) == [(0, 2), (2, 3), (3, 4)]
    assert groups_at_once(arguments, 1 << 20) == [(0, 4)]
    assert groups_at_once(arguments, 1) == [(0, 1), (1, 2), (2, 3), (3, 4)]


@pytest.mark.parametrize("packed", [False, True])
def test_the_backward_needs_its_gradient_and_a_block(packed: bool) -> None:
    """1 x 1000 x 180 in bfloat16 is 44 MiB; widened to float32, or padded, it would be 88 MiB more."""
    queries, documents = torch.randn(1, 8, 128).bfloat16(), torch.randn(1000, 180, 128).bfloat16().requires_grad_()
    scores = (
        maxsim_varlen(queries[0], documents.flatten(0, 1), torch.tensor([0, 8]), torch.arange(1001) * 180)
        if packed
        else maxsim(queries, documents)
    )
    with torch.profiler.profile(profile_memory=True) as profile:
        scores.sum().backward()
    held, peak = 0, 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    gradient = documents.numel() * 2
    # A block is 16 MiB in float32: its widened tokens, its gradient, and that gradient through the norms.
    assert gradient <= peak <= gradient + 3 * (16 << 20)
