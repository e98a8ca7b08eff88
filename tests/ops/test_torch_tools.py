"""The operations under torch's own tools: the default compiler, views, and the other ways to differentiate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

from pylate_flash import (
    maxsim,
    maxsim_cross_entropy,
    maxsim_from_hidden,
    maxsim_ragged,
    maxsim_ragged_pairwise,
    maxsim_sparse_queries,
    maxsim_varlen,
    quantize,
    soft_maxsim,
)
from pylate_flash.ops import blocked, products
from pylate_flash.ops.varlen import maxsim_varlen_reference
from tests.ops.cases import FLOAT32_SCORES
from tests.ops.operations import (
    OF_TENSORS,
    Operation,
    Operators,
    calls,
    check_changed_in_place,
    operations,
    value_and_gradients,
)  # fmt: skip
from tests.ops.test_hidden import limit_scratch

QUERIES, DOCUMENTS, WEIGHT = torch.randn(2, 3, 4), torch.randn(3, 5, 4), torch.randn(4, 4)
BOUNDS = torch.tensor([0, 3, 6]), torch.tensor([0, 5, 10, 15])
EVERY, CALLS = operations(), calls(masked=True)


def step(operation: Operation) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """A training step of an operation: scores and the gradient of the queries."""

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


@pytest.mark.parametrize("name", CALLS)
def test_only_the_needed_gradients(name: str) -> None:
    call = CALLS[name]
    _, *expected = value_and_gradients(call, call.tensors)
    for index, reference in enumerate(expected):
        leaves = [tensor.clone() for tensor in call.tensors]
        call(*leaves[:index], leaves[index].requires_grad_(), *leaves[index + 1 :]).square().sum().backward()
        torch.testing.assert_close(leaves[index].grad, reference)
        assert all(leaf.grad is None for leaf in leaves if leaf is not leaves[index])
    assert not call(*call.tensors).requires_grad


class NoGradient(torch.autograd.Function):
    """The identity, through which no gradient flows back."""

    @staticmethod
    def forward(ctx, scores: Tensor) -> Tensor:
        return scores.clone()

    @staticmethod
    def backward(ctx, grad_scores: Tensor) -> None:
        return None


@pytest.mark.parametrize("name", CALLS)
def test_a_result_through_which_no_gradient_flows_has_none(name: str) -> None:
    leaves = [tensor.clone().requires_grad_() for tensor in CALLS[name].tensors]
    NoGradient.apply(CALLS[name](*leaves)).sum().backward()
    assert all(leaf.grad is None for leaf in leaves)


@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_bitwise_reproducible(name: str) -> None:
    """Also where the forward runs a second time in the backward, as under activation checkpointing."""
    call = CALLS[name]
    first = value_and_gradients(call, call.tensors)

    def checkpointed(*tensors: Tensor, **options) -> Tensor:
        return torch.utils.checkpoint.checkpoint(call.function, *tensors, use_reentrant=False, **options)

    for function in (call.function, call.function, checkpointed):
        assert all(
            torch.equal(*pair) for pair in zip(value_and_gradients(call, call.tensors, function), first, strict=True)
        )


@pytest.mark.parametrize("name", CALLS)
def test_a_retained_graph_can_be_differentiated_again(name: str) -> None:
    """Also under a mode. The first gradients, those that a loss saved included, belong to the caller, who may have
    changed them.
    """
    leaves = [tensor.clone().requires_grad_() for tensor in CALLS[name].tensors]
    total = CALLS[name](*leaves).sum()
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    saved = [gradient.clone() for gradient in first]
    for gradient in first:
        gradient.zero_()
    again = [torch.autograd.grad(total, leaves, retain_graph=True)]
    with Operators():
        again.append(torch.autograd.grad(total, leaves, retain_graph=True))
    again.append(torch.autograd.grad(total, leaves))
    assert all(torch.equal(*pair) for result in again for pair in zip(result, saved, strict=True))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_can_be_batched(name: str) -> None:
    """As `torch.autograd.functional.jacobian` batches them with vectorize=True."""
    leaves = [tensor.clone().requires_grad_() for tensor in CALLS[name].tensors]
    results = CALLS[name](*leaves)
    outer = torch.stack([torch.ones_like(results), torch.full_like(results, -2.0)])
    batched = torch.autograd.grad(results, leaves, outer, retain_graph=True, is_grads_batched=True)
    for index, grad in enumerate(outer):
        expected = torch.autograd.grad(results, leaves, grad, retain_graph=True)
        torch.testing.assert_close(tuple(gradients[index] for gradients in batched), expected)


@pytest.mark.parametrize("name", CALLS)
def test_second_derivative_is_refused(name: str) -> None:
    leaves = [tensor.clone().requires_grad_() for tensor in CALLS[name].tensors]
    for leaf in leaves:
        scores = CALLS[name](*leaves)
        (gradient,) = torch.autograd.grad(scores.square().sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="(maxsim|chamfer|xtr_scores|a MaxSim loss).* has no second derivative"):
            gradient.sum().backward()


# Not Chamfer: squared distances of rounded points would be far off. Beta, which multiplies sums, is not rounded.
@pytest.mark.parametrize("name", [name for name in CALLS if "Chamfer" not in name])
def test_autocast_gives_the_autocast_type(name: str) -> None:
    call = CALLS[name]
    rounded = [tensor.bfloat16() if tensor.dim() else tensor for tensor in call.tensors]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = value_and_gradients(call, call.tensors)
    expected = value_and_gradients(call, rounded)
    assert {tensor.dtype for tensor in actual} == {torch.float32}
    assert all(torch.equal(a, b.float()) for a, b in zip(actual, expected, strict=True))
    assert not torch.equal(actual[0], call(*call.tensors))


@pytest.mark.parametrize("name", CALLS)
def test_strided_inputs_equal_contiguous_ones(name: str) -> None:
    call = CALLS[name]
    strided = [torch.stack([tensor, tensor], dim=-1)[..., 0].mT.contiguous().mT if tensor.dim() > 1 else tensor
               for tensor in call.tensors]  # fmt: skip
    assert not strided[0].is_contiguous()
    torch.testing.assert_close(value_and_gradients(call, strided), value_and_gradients(call, call.tensors))


@pytest.mark.parametrize("name", CALLS)
def test_blocks_do_not_change_the_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of a few similarities every loop boundary is crossed."""
    call, tensors = CALLS[name], [tensor.double() for tensor in CALLS[name].tensors]
    expected = value_and_gradients(call, tensors)
    for module, bound, value in ((products, "_BLOCK_CPU", 20), (blocked, "ARGMAX_AT_ONCE", 10)):
        monkeypatch.setattr(module, bound, value)
    for scratch in (1, 400):
        limit_scratch(monkeypatch, scratch)
        torch.testing.assert_close(value_and_gradients(call, tensors), expected, **FLOAT32_SCORES)


NONE, NO_BOUNDS = torch.zeros(3, 0, 4), torch.zeros(3, dtype=torch.int64)
OF_NOTHING = {
    "in-batch of nothing": lambda: maxsim(QUERIES, NONE),
    "packed of nothing": lambda: maxsim_varlen(QUERIES.flatten(0, 1), NONE.flatten(0, 1), BOUNDS[0], NO_BOUNDS),
    "its definition": lambda: maxsim_varlen_reference(QUERIES[0], NONE.flatten(0, 1), BOUNDS[0][:2], NO_BOUNDS[:1]),
    "soft of nothing": lambda: soft_maxsim(QUERIES, NONE, 2.0),
    "sparse of nothing": lambda: maxsim_sparse_queries(QUERIES, NONE, torch.zeros(3, 1, dtype=torch.int64)),
    "cross entropy of nothing": lambda: maxsim_cross_entropy(QUERIES, NONE),
    "quantized": lambda: maxsim(QUERIES, quantize(DOCUMENTS)),
}


@pytest.fixture
def set_default() -> Iterator[Callable[[torch.dtype], None]]:
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", [*CALLS, *OF_NOTHING])
def test_results_do_not_depend_on_the_default_type(name: str, set_default: Callable[[torch.dtype], None]) -> None:
    call = OF_NOTHING[name] if name in OF_NOTHING else partial(CALLS[name], *CALLS[name].tensors)
    expected = call()
    assert expected.dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float64):
        set_default(dtype)
        actual = call()
        assert actual.dtype == torch.float32
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", CALLS)
def test_modes_meet_the_operator(name: str) -> None:
    """Dispatch modes, such as a compiler's, see the operator and not the operations inside it."""
    call = CALLS[name]
    expected = value_and_gradients(call, call.tensors)
    with Operators() as operators:
        assert torch.equal(call(*call.tensors), expected[0])
        (operator,) = operators.names
        assert all(torch.equal(*pair) for pair in zip(value_and_gradients(call, call.tensors), expected, strict=True))
    forward = "_gradients" if operator == "maxsim_loss" else "_forward"
    assert operators.names == [operator, operator + forward, operator + "_backward"]


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    call = CALLS[name]
    with Operators() as operators:
        value_and_gradients(call, call.tensors)
        call(*call.tensors)
    (forward, saved), (operator, arguments) = operators.calls[0], operators.calls[-1]
    torch.library.opcheck(forward, saved, test_utils=("test_schema", "test_faketensor"))
    leaves = {tensor.data_ptr() for tensor in call.tensors}
    arguments = [
        arg.detach().requires_grad_() if isinstance(arg, Tensor) and arg.data_ptr() in leaves else arg
        for arg in arguments
    ]
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("name", [name for name in CALLS if "ragged" not in name])
def test_compiles_for_other_lengths_too(name: str) -> None:
    """In one graph; ragged lists have a test of their own."""
    compiled = torch.compile(CALLS[name].function, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (5, 9):
        call = calls(length=length, masked=True)[name]
        if "documents_cu_seqlens" in call.options:
            call = call._replace(options=call.options | {"max_document_length": 3 * length})
        torch.testing.assert_close(
            value_and_gradients(call, call.tensors, compiled), value_and_gradients(call, call.tensors)
        )


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        (maxsim, (QUERIES, DOCUMENTS)),
        (maxsim_from_hidden, (QUERIES, DOCUMENTS, WEIGHT)),
    ],
)
def test_compiles_by_default(operation: Callable[..., Tensor], arguments: tuple[Tensor, ...]) -> None:
    """With inductor, which relies on the strides that the operators declare."""
    leaves = [tensor.clone().requires_grad_() for tensor in arguments]
    actual, expected = torch.compile(operation, fullgraph=True)(*leaves), operation(*leaves)
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(scores.sum(), leaves) for scores in (actual, expected)]
    torch.testing.assert_close(*gradients)


def test_a_loss_compiles_by_default() -> None:
    with torch.no_grad():
        result = torch.compile(maxsim_cross_entropy, fullgraph=True)(QUERIES, DOCUMENTS)
    torch.testing.assert_close(result, maxsim_cross_entropy(QUERIES, DOCUMENTS))


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
    """The first is specialized to the lengths it met, the second is dynamic."""
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
    """As the operators declare, whatever implementation computes them, and as `view` needs."""
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
    """In forward mode, torch would take the derivative of an operator without a formula to be 0."""
    with pytest.raises(RuntimeError, match="is differentiated by torch.autograd.grad and Tensor.backward only"):
        differentiate(operation, QUERIES)


@pytest.mark.parametrize(
    ("name", "called"),
    [
        ("in-batch", "maxsim"), ("pairs", "maxsim_pairwise"), ("packed", "maxsim_varlen"), ("ragged", "maxsim_ragged"),
        ("packed soft", "soft_maxsim_varlen"), ("cross entropy", "maxsim_cross_entropy"),
        ("cross entropies", "maxsim_cross_entropy"), ("divergence", "maxsim_kl_divergence"),
        ("margin MSE", "maxsim_margin_mse"),
    ],
)  # fmt: skip
def test_what_refuses_to_be_differentiated_has_the_name_of_what_was_called(name: str, called: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{called} is differentiated by"):
        torch.func.grad(lambda queries: EVERY[name](queries).sum())(QUERIES)


def test_forward_mode_of_something_else_does_not_disturb(operation: Operation) -> None:
    expected = step(operation)(QUERIES.clone().requires_grad_())
    with forward_ad.dual_level():
        actual = step(operation)(QUERIES.clone().requires_grad_())
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_without_a_gradient(operation: Operation) -> None:
    several = torch.stack([QUERIES, QUERIES.flip(0), -QUERIES])
    expected = torch.stack([operation(queries) for queries in several])
    torch.testing.assert_close(torch.func.vmap(operation)(several), expected)
