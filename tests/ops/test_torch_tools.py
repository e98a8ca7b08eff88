"""The operations under torch's own tools: the default compiler, views, and the other ways to differentiate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from pylate_flash import (
    chamfer,
    maxsim,
    maxsim_cross_entropy,
    maxsim_from_hidden,
    maxsim_kl_divergence,
    maxsim_pairwise,
    maxsim_residual,
    maxsim_sparse_queries,
    maxsim_varlen,
    soft_maxsim,
    xtr_scores,
)
from tests.ops.residual_cases import residual_codes

QUERIES, DOCUMENTS, CANDIDATES = torch.randn(2, 3, 4), torch.randn(3, 5, 4), torch.randn(2, 3, 5, 4)
WEIGHT, TEACHER = torch.randn(4, 4), torch.randn(2, 3)
BOUNDS = torch.tensor([0, 3, 6]), torch.tensor([0, 5, 10, 15])
CODES = residual_codes([5, 0, 3], 8, 4)

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "in-batch": lambda queries: maxsim(queries, DOCUMENTS),
    "candidates": lambda queries: maxsim(queries, CANDIDATES, normalize=True),
    "pairs": lambda queries: maxsim_pairwise(queries, DOCUMENTS[:2]),
    "packed": lambda queries: maxsim_varlen(
        queries.flatten(0, 1), DOCUMENTS.flatten(0, 1), *BOUNDS, max_query_length=3, max_document_length=5
    ),
    "Chamfer": lambda queries: chamfer(queries, DOCUMENTS[:2]),
    "XTR": lambda queries: xtr_scores(queries, DOCUMENTS, k=4),
    "from hidden states": lambda queries: maxsim_from_hidden(queries, DOCUMENTS, WEIGHT),
    "sparse": lambda queries: maxsim_sparse_queries(queries, DOCUMENTS, torch.tensor([[0]]).expand(len(DOCUMENTS), 1)),
    "residual": lambda queries: maxsim_residual(torch.nn.functional.pad(queries, (0, 4)), CODES),
    "soft": lambda queries: soft_maxsim(queries, DOCUMENTS, 2.0),
    "cross entropy": lambda queries: maxsim_cross_entropy(queries, DOCUMENTS),
    "divergence": lambda queries: maxsim_kl_divergence(queries, CANDIDATES, TEACHER),
}


def step(operation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """What training does with an operation."""

    def run(queries: Tensor) -> tuple[Tensor, Tensor]:
        scores = operation(queries)
        return scores.detach(), torch.autograd.grad(scores.square().sum(), queries)[0]

    return run


@pytest.fixture(params=OPERATIONS)
def operation(request) -> Callable[[Tensor], Tensor]:
    return OPERATIONS[request.param]


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        (maxsim, (QUERIES, DOCUMENTS)),
        (maxsim_from_hidden, (QUERIES, DOCUMENTS, WEIGHT)),
    ],
)
def test_compiles_by_default(operation: Callable[..., Tensor], arguments: tuple[Tensor, ...]) -> None:
    """With inductor, which reads results by the strides that the operators promise."""
    leaves = [tensor.clone().requires_grad_() for tensor in arguments]
    found, expected = torch.compile(operation, fullgraph=True)(*leaves), operation(*leaves)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(scores.sum(), leaves) for scores in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_a_loss_compiles_by_default() -> None:
    with torch.no_grad():
        found = torch.compile(maxsim_cross_entropy, fullgraph=True)(QUERIES, DOCUMENTS)
    torch.testing.assert_close(found, maxsim_cross_entropy(QUERIES, DOCUMENTS))


def test_a_label_out_of_range_is_not_a_number_where_no_value_can_be_looked_at() -> None:
    compiled = torch.compile(maxsim_cross_entropy, fullgraph=True, backend="aot_eager")
    losses = compiled(QUERIES, DOCUMENTS, labels=torch.tensor([3, 2]), loss_reduction="none")
    assert losses.isnan().tolist() == [True, False]


def test_results_are_contiguous(operation: Callable[[Tensor], Tensor]) -> None:
    """As the operators say of them, whatever computes them, and as `view` needs."""
    scores = operation(QUERIES)
    assert torch.equal(scores.view(-1), scores.reshape(-1))
    assert torch.equal(OPERATIONS["in-batch"](QUERIES.transpose(0, 1).contiguous().transpose(0, 1)).view(-1),
                       OPERATIONS["in-batch"](QUERIES).view(-1))  # fmt: skip
    _, gradient = step(operation)(QUERIES.permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_())
    torch.testing.assert_close(gradient, step(operation)(QUERIES.clone().requires_grad_())[1])


def forward_mode(operation: Callable[[Tensor], Tensor], queries: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return operation(forward_ad.make_dual(queries, torch.ones_like(queries)))


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda operation, queries: torch.func.grad(lambda q: operation(q).sum())(queries),
        lambda operation, queries: torch.func.jacrev(operation)(queries),
        lambda operation, queries: torch.func.vmap(torch.func.grad(lambda q: operation(q).sum()))(queries[None]),
        lambda operation, queries: torch.func.grad(lambda q: torch.func.vmap(operation)(q[None]).sum())(queries),
        lambda operation, queries: torch.func.jvp(operation, (queries,), (torch.ones_like(queries),)),
        lambda operation, queries: torch.func.jacfwd(operation)(queries),
        forward_mode,
    ],
    ids=["grad", "jacrev", "vmap of grad", "grad of vmap", "jvp", "jacfwd", "forward_ad"],
)
def test_other_ways_to_differentiate_are_refused(operation, differentiate) -> None:
    """In forward mode, torch would take the derivative of an operator without a rule to be 0."""
    with pytest.raises(RuntimeError, match="is differentiated by torch.autograd.grad and Tensor.backward only"):
        differentiate(operation, QUERIES)


def test_forward_mode_of_something_else_does_not_disturb(operation: Callable[[Tensor], Tensor]) -> None:
    expected = step(operation)(QUERIES.clone().requires_grad_())
    with forward_ad.dual_level():
        found = step(operation)(QUERIES.clone().requires_grad_())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_without_a_gradient(operation: Callable[[Tensor], Tensor]) -> None:
    several = torch.stack([QUERIES, QUERIES.flip(0), -QUERIES])
    expected = torch.stack([operation(queries) for queries in several])
    torch.testing.assert_close(torch.func.vmap(operation)(several), expected)
