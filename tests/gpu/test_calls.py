"""Every call: it does not synchronize, can be captured in a CUDA graph, is bitwise reproducible, and compiles once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from pylate_flash import maxsim, maxsim_varlen
from tests.gpu.calls import CALLS, EVERYTHING, LARGE_CALLS, STEPS, packed, padded
from tests.gpu.tools import PRECISIONS, captured, compilations, equal, no_waiting, on_another_stream
from tests.ops.cases import relative_error
from tests.ops.operations import check_changed_in_place, operations

pytestmark = pytest.mark.gpu

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

# Their candidates are on the host.
NOT_IN_A_GRAPH = {"packed candidates", "soft, packed candidates"}


def test_waiting_is_noticed() -> None:
    with pytest.raises(RuntimeError, match="synchronizing"), no_waiting():
        torch.ones(1, device="cuda").item()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_waits_for_nothing(name: str) -> None:
    call = CALLS[name]()
    expected = call.step()
    with no_waiting():
        actual = call.step()
    assert equal(actual, expected)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in NOT_IN_A_GRAPH])
def test_on_another_stream_and_in_a_cuda_graph(name: str) -> None:
    call = CALLS[name]()
    before = call.step()
    assert equal(on_another_stream(call.step), before)
    result, replay = captured(call.step)
    for tensor in result:
        tensor.fill_(torch.nan)
    replay()
    assert equal(result, before)
    call.change()
    replay()
    assert equal(result, call.step())
    assert not torch.equal(result[0], before[0])


@pytest.mark.parametrize("name", [*CALLS, *LARGE_CALLS])
def test_the_same_bits_every_time(name: str) -> None:
    call = (CALLS | LARGE_CALLS)[name]()
    first = call.step()
    assert all(equal(call.step(), first) for _ in range(20))


@two_gpus
@pytest.mark.parametrize("name", CALLS)
def test_on_another_device_than_the_current_one(name: str) -> None:
    on_first = CALLS[name]().to("cuda:0")
    on_second, expected = on_first.to("cuda:1"), on_first.step()
    # The call is computed at first, and repeated from a recording later.
    for _ in range(4):
        actual = on_second.step()
        assert {tensor.get_device() for tensor in actual} == {1}
        assert equal([tensor.to("cuda:0") for tensor in actual], expected)
        assert equal(on_first.step(), expected)


@two_gpus
def test_threads_call_on_two_devices() -> None:
    tasks = [
        CALLS[name]().to(device) for name in ("stacked", "packed", "cross entropy") for device in ("cuda:0", "cuda:1")
    ]
    expected = [call.step() for call in tasks]

    def calls(index: int) -> bool:
        return all(equal(tasks[index].step(), expected[index]) for _ in range(20))

    with ThreadPoolExecutor(len(tasks)) as threads:
        assert all(threads.map(calls, range(len(tasks))))


@pytest.mark.parametrize("implementation", ["triton", "blocked"])
@pytest.mark.parametrize("name", operations())
def test_results_can_be_changed_in_place(name: str, implementation: str) -> None:
    queries = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)).cuda()
    check_changed_in_place(operations("cuda", implementation)[name], queries)


@pytest.mark.parametrize("name", ["residual codes", *PRECISIONS, "divergence in float32"])
def test_compiles_into_one_graph(name: str) -> None:
    call = CALLS[name]()
    compiled = partial(torch.compile(call.function, fullgraph=True), *call.leaves, *call.others, **call.options)
    with torch.no_grad():
        assert torch.equal(compiled(), call())
    if name == "divergence in float32":
        torch.testing.assert_close(call.gradients(compiled()), call.gradients(call()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "cross entropy"])
def test_under_activation_checkpointing(name: str) -> None:
    call = CALLS[name]()
    expected = call.step()[1:]
    actual = torch.utils.checkpoint.checkpoint(call, *call.leaves, use_reentrant=False)
    assert equal((actual.detach(), *call.gradients(actual)), expected)


@pytest.mark.parametrize("name", CALLS)
def test_a_second_backward(name: str) -> None:
    """The caller owns the gradients of the first backward, and may have changed them."""
    call = CALLS[name]()
    if not call.learning:
        pytest.skip("there is no gradient")
    total = call().sum()
    first = torch.autograd.grad(total, call.leaves, retain_graph=True)
    saved = [gradient.clone() for gradient in first]
    for gradient in first:
        gradient.zero_()
    assert equal(torch.autograd.grad(total, call.leaves, retain_graph=True), saved)
    for actual, expected in zip(torch.autograd.grad(-2 * total, call.leaves, retain_graph=True), saved, strict=True):
        assert relative_error(actual, -2 * expected) <= 1e-2
    (grad_last,) = torch.autograd.grad(total, call.leaves[-1])
    assert relative_error(grad_last, saved[-1]) <= 1e-2
    with pytest.raises(RuntimeError, match="a second time"):
        total.backward()


@pytest.mark.parametrize("name", ["plain", "cross entropy"])
def test_second_derivative_is_refused(name: str) -> None:
    call = CALLS[name]()
    expected = call.step()[2]
    (gradient,) = call.gradients(call(), call.leaves[:1], create_graph=True)
    assert relative_error(gradient, expected) <= 1e-2
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("name", ["plain", "cross entropy"])
def test_frozen_documents_and_frozen_queries(name: str) -> None:
    call = CALLS[name]()
    queries, documents = call.leaves
    both = call.step()[2:]
    for _ in range(3):
        assert equal(call.gradients(call(queries, documents.detach()), [queries]), both[:1])
        assert equal(call.gradients(call(queries.detach(), documents), [documents]), both[1:])
    with torch.no_grad():
        assert not call().requires_grad


# Calls of one kernel, with masks and all options: other numbers of queries and documents, and other lengths. The kernel
# that lists active tokens has a block size per power of two. Few tokens after full tiles have a product of their own,
# and queries that would leave too many rows empty are summed by other groups of rows, which these lengths do not need.
FORWARD = [
    [(16, 10, 32, 180), (17, 10, 31, 180), (40, 33, 29, 185), (100, 2, 32, 256)],
    [(1, 10, 32, 180), (1, 1000, 20, 150)],
    [(3, 10, 32, 180), (4, 100, 29, 190)],
]
# With gradients: up to 2048 rows, whose argmax one program lists, and more; many documents are split among programs,
# some are processed several at a time, one alone. Long lists of few documents are summed in shorter segments.
KNOWN = [(n_queries, n_documents, 32, 180) for n_queries in (64, 72) for n_documents in (100, 33, 1)]
KNOWN += [(64, 20, 32, 2)]
NEW = [(64, 101, 32, 181), (70, 33, 32, 77), (65, 1, 32, 300), (128, 20, 32, 1)]


def forward(n_queries: int, n_documents: int, query_length: int, document_length: int) -> None:
    # A size that no other test uses, so that nothing has been compiled for it.
    call = padded(maxsim, (n_queries, query_length, 112), (n_documents, document_length, 112), "weights", **EVERYTHING)
    with torch.no_grad():
        call()


def test_new_sizes_compile_nothing() -> None:
    with compilations() as compiled:
        forward(16, 10, 32, 180)
        assert compiled, "what is not noticed would not be counted"
        for first, *rest in FORWARD:
            forward(*first)
            before = list(compiled)
            for shape in rest:
                forward(*shape)
            assert compiled == before
        for shapes in (KNOWN, NEW):
            before = list(compiled)
            for n_queries, n_documents, query_length, document_length in shapes:
                call = padded(maxsim, (n_queries, query_length, 128), (n_documents, document_length, 128))
                call.gradients(call())
        assert compiled == before


@pytest.mark.parametrize("candidates", [False, True])
def test_new_packed_sizes_compile_nothing(candidates: bool) -> None:
    """Other numbers of tokens, documents and queries; with gradients."""

    def step(n_queries: int, lengths: list[int]) -> None:
        options: dict = {"max_document_length": 1000}
        if candidates:
            options["candidates_cu_seqlens"] = torch.linspace(0, len(lengths), n_queries + 1).long()
        packed(maxsim_varlen, [32] * n_queries, lengths, **options).step()

    # Many documents are split among programs, some are processed several at a time, one alone; short ones have their
    # own tiles.
    for lengths in ([20, 300], [300], [90] * 100, [20, 5]):
        step(40, lengths)
    with compilations() as compiled:
        for n_queries, lengths in [(40, [31, 5, 260]), (41, [999]), (50, [1, 1, 1]), (64, [700, 2, 0, 90] * 30)]:
            step(n_queries, lengths)
    assert not compiled


def test_new_packed_sizes_compile_nothing_where_lengths_are_not_given() -> None:
    def step(*lengths: int) -> None:
        call = packed(maxsim_varlen, [32] * 8, [*lengths], 128, max_query_length=None, max_document_length=None)
        queries, documents = call.leaves
        call.gradients(call(queries.detach(), documents), [documents])

    step(20, 300)
    with compilations() as compiled:
        for lengths in [(31, 5, 260), (300,), (1, 1, 1), (700, 2, 0, 90)]:
            step(*lengths)
    assert not compiled


def transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def wide(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor], dim=-1)[..., : tensor.shape[-1]]


def turned(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT


def shifted(tensor: Tensor) -> Tensor:
    """At an address that is no multiple of 16, which takes other kernels, with another order of summation."""
    memory = torch.empty(tensor.numel() + 1, device="cuda", dtype=tensor.dtype)[1:]
    return memory.view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize(
    ("name", "views"),
    [
        (f"step {STEPS[0]}, False", (wide, transposed)),
        ("chosen query tokens", (transposed, wide)),
        ("XTR", (transposed, wide)),
        ("Chamfer", (transposed, wide)),
    ],
)
def test_strides_change_nothing(name: str, views: tuple) -> None:
    call = CALLS[name]()
    with torch.no_grad():
        expected = call()
        call.options = {
            key: turned(value) if isinstance(value, Tensor) else value for key, value in call.options.items()
        }
        viewed = [view(leaf) for view, leaf in zip(views, call.leaves, strict=True)]
        assert torch.equal(call(*viewed), expected)
        with no_waiting():
            again = call(*viewed)
        assert torch.equal(again, expected)
        if name == "Chamfer":
            assert torch.equal(call(*map(turned, call.leaves)), expected)
        if name == "chosen query tokens":
            call.options["query_tokens"] = call.options["query_tokens"].int()
            assert torch.equal(call(), expected)


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in CALLS if name.startswith("step")),
        "cross entropy",
        "cross entropy of candidates",
        "divergence",
    ],
)
def test_any_stride_and_address(name: str) -> None:
    call = CALLS[name]()
    expected, (queries, documents) = call.step(), call.leaves
    for view_queries, view_documents in ((Tensor.clone, shifted), (wide, Tensor.clone), (wide, shifted)):
        views = view_queries(queries.detach()), view_documents(documents.detach())
        call.leaves = [view.requires_grad_() for view in views]
        for _ in range(3):
            for actual, reference in zip(call.step(), expected, strict=True):
                assert relative_error(actual, reference) <= 1e-2
