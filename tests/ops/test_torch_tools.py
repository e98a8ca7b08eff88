"""The operations under torch's own tools: the default compiler, views, and the other ways to differentiate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

from pylate_flash import (
    maxsim,
    maxsim_cross_entropy,
    maxsim_from_hidden,
    maxsim_ragged,
    maxsim_ragged_pairwise,
    maxsim_varlen,
)
from tests.ops.operations import OF_TENSORS, Operation, check_changed_in_place, operations

QUERIES, DOCUMENTS, WEIGHT = torch.randn(2, 3, 4), torch.randn(3, 5, 4), torch.randn(4, 4)
BOUNDS = torch.tensor([0, 3, 6]), torch.tensor([0, 5, 10, 15])
EVERY = operations()


def step(operation: Operation) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """What training does with an operation."""

    def run(queries: Tensor) -> tuple[Tensor, Tensor]:
        scores = operation(queries)
        return scores.detach(), torch.autograd.grad(scores.square().sum(), queries)[0]

    return run


@pytest.fixture(params=OF_TENSORS)
def operation(request) -> Operation:
    return EVERY[request.param]


@pytest.mark.parametrize("name", EVERY)
def test_results_can_be_changed_in_place(name: str) -> None:
    check_changed_in_place(EVERY[name], QUERIES)


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


OWNED = torch.tensor([0, 2, 3])
LISTS = {
    "all pairs": lambda query, *documents: maxsim_ragged([query, QUERIES[0]], documents),
    "candidates": lambda query, *documents: maxsim_ragged(
        [query, QUERIES[0]], documents, candidates_cu_seqlens=OWNED, reduction="mean"
    ),
    "padded queries": lambda query, *documents: maxsim_ragged(QUERIES + query.sum(), documents),
    "pairs": lambda query, *documents: maxsim_ragged_pairwise([*QUERIES, query], documents),
}


@pytest.mark.parametrize("lists", LISTS)
def test_lists_of_all_lengths_are_two_graphs(lists: str) -> None:
    """The first is for the lengths that it met, the second for all."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(LISTS[lists], fullgraph=True, backend=counter)
    for lengths in ((2, 3, 4, 5), (5, 2, 9, 4), (3, 8, 6, 7)):
        leaves = [torch.randn(length, 4, requires_grad=True) for length in lengths]
        results = []
        for function in (compiled, LISTS[lists]):
            scores = function(*leaves)
            results.append([scores, *torch.autograd.grad(scores.sum(), leaves)])
        torch.testing.assert_close(*results)
    assert counter.frame_count <= 2


def test_candidates_are_counted_when_the_graph_runs() -> None:
    def scores(queries: Tensor, owned: Tensor) -> Tensor:
        tokens = queries.flatten(0, 1), DOCUMENTS.flatten(0, 1)
        lengths = {"max_query_length": 3, "max_document_length": 5}
        return maxsim_varlen(*tokens, *BOUNDS, candidates_cu_seqlens=owned, **lengths)

    compiled = torch.compile(scores, fullgraph=True, backend="aot_eager")
    for owned in (OWNED, torch.tensor([0, 0, 3])):
        torch.testing.assert_close(compiled(QUERIES, owned), scores(QUERIES, owned))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_losses_of_queries_are_exported_for_any_batch(packed: bool, symmetric: bool) -> None:
    class Loss(torch.nn.Module):
        def forward(self, queries: Tensor, documents: Tensor, bounds: Tensor) -> Tensor:
            packing = {"documents_cu_seqlens": bounds, "max_document_length": 5} if packed else {}
            return maxsim_cross_entropy(queries, documents, symmetric=symmetric, loss_reduction="none", **packing)

    def batch(n_queries: int, n_documents: int) -> tuple[Tensor, ...]:
        documents = torch.randn(n_documents, 5, 4)
        bounds = torch.arange(n_documents + 1) * 5
        return torch.randn(n_queries, 3, 4), documents.flatten(0, 1) if packed else documents, bounds

    first = batch(4, 6)
    sizes = tuple(dict.fromkeys(range(tensor.dim()), torch.export.Dim.AUTO) for tensor in first)
    exported = torch.export.export(Loss(), first, dynamic_shapes=sizes).module()
    for other in (first, batch(3, 7)):
        torch.testing.assert_close(exported(*other), Loss()(*other))


def test_a_label_out_of_range_is_not_a_number_where_no_value_can_be_looked_at() -> None:
    compiled = torch.compile(maxsim_cross_entropy, fullgraph=True, backend="aot_eager")
    losses = compiled(QUERIES, DOCUMENTS, labels=torch.tensor([3, 2]), loss_reduction="none")
    assert losses.isnan().tolist() == [True, False]


def test_results_are_contiguous(operation: Operation) -> None:
    """As the operators say of them, whatever computes them, and as `view` needs."""
    scores = operation(QUERIES)
    assert torch.equal(scores.view(-1), scores.reshape(-1))
    assert torch.equal(EVERY["in-batch"](QUERIES.transpose(0, 1).contiguous().transpose(0, 1)).view(-1),
                       EVERY["in-batch"](QUERIES).view(-1))  # fmt: skip
    _, gradient = step(operation)(QUERIES.permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_())
    torch.testing.assert_close(gradient, step(operation)(QUERIES.clone().requires_grad_())[1])


def forward_mode(operation: Operation, queries: Tensor) -> Tensor:
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


def test_forward_mode_of_something_else_does_not_disturb(operation: Operation) -> None:
    expected = step(operation)(QUERIES.clone().requires_grad_())
    with forward_ad.dual_level():
        found = step(operation)(QUERIES.clone().requires_grad_())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_without_a_gradient(operation: Operation) -> None:
    several = torch.stack([QUERIES, QUERIES.flip(0), -QUERIES])
    expected = torch.stack([operation(queries) for queries in several])
    torch.testing.assert_close(torch.func.vmap(operation)(several), expected)
