"""Calls repeated from recordings of earlier calls with the same signature, against the same calls computed anew."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import pylate_flash
from pylate_flash import maxsim, maxsim_cross_entropy, maxsim_from_hidden, maxsim_varlen
from pylate_flash.kernels import recording, rows, tables
from pylate_flash.ops import operator
from pylate_flash.ops.operator import repeated
from tests.ops.operations import operations

OPERATIONS = operations(implementation="triton")
# Lists are inspected in every call.
UNREPEATED = {"ragged", "ragged pairs"}


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[recording.Recording]]:
    """Repeat calls in the interpreter too, and record every repetition."""
    hits: list[recording.Recording] = []
    call = recording.Recording.__call__
    monkeypatch.setattr(operator, "repeated_devices", -1)
    monkeypatch.setattr(recording.Recording, "__call__", lambda self, inputs: hits.append(self) or call(self, inputs))
    repeated.forget()
    yield hits
    repeated.forget()


def anew(call: Callable[[], list[Tensor | None]]) -> list[Tensor | None]:
    """Run the call without recordings of earlier calls, which are left as they are."""
    with mock.patch.object(operator, "repeated", operator._Repeated(0)):
        return call()


def equal(actual: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    return all(
        (a is None) == (b is None)
        and (a is None or (a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)))
        for a, b in zip(actual, expected, strict=True)
    )


@pytest.mark.parametrize("with_gradient", [False, True], ids=["", "with gradient"])
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_third_calls_are_repeated(name: str, with_gradient: bool, repeats: list) -> None:
    operation = OPERATIONS[name]
    for _ in range(4):
        queries = torch.randn(2, 3, 4, requires_grad=with_gradient)

        def call(queries: Tensor = queries) -> list[Tensor | None]:
            queries.grad = None
            result = operation(queries)
            if with_gradient:
                (result * 3).sum().backward()
            return [result.detach(), queries.grad]

        before = len(repeats)
        results = call()
        times = len(repeats) - before
        assert equal(results, anew(call))
    # The backward too.
    assert times > with_gradient or name in UNREPEATED


LENGTHS = {"queries": (3, 4), "documents": (5, 6)}


@st.composite
def embeddings(draw: st.DrawFn, side: str) -> Tensor:
    """[2, L, 4] in one of the layouts that a signature distinguishes."""
    length, dtype = draw(st.sampled_from(LENGTHS[side])), draw(st.sampled_from([torch.float16, torch.float32]))
    offset, layout = draw(st.sampled_from([0, 8])), draw(st.sampled_from(["plain", "transposed", "strided"]))
    memory = torch.randn(2 * length * 4 * 2 + offset).to(dtype)[offset:]
    if layout == "plain":
        tensor = memory[: 2 * length * 4].view(2, length, 4)
    elif layout == "transposed":
        tensor = memory[: 2 * length * 4].view(2, 4, length).transpose(1, 2)
    else:
        tensor = memory.view(2, length, 8)[..., :4]
    return tensor.detach().requires_grad_(draw(st.booleans()))


@st.composite
def calls(draw: st.DrawFn) -> Callable[[], list[Tensor | None]]:
    queries = draw(embeddings("queries"))
    documents = draw(embeddings("documents")).detach().to(queries.dtype).requires_grad_(draw(st.booleans()))
    masks = [
        draw(st.sampled_from([None, torch.ones])) and (torch.rand(tensor.shape[:2]) > 0.3)
        for tensor in (queries, documents)
    ]
    options = {
        "normalize": draw(st.booleans()), "reduction": draw(st.sampled_from(["sum", "mean"])),
        "empty_score": draw(st.sampled_from([0.0, -1.0, 1])), "masking": draw(st.sampled_from(["exclude", "zero"])),
    }  # fmt: skip
    with_gradients = draw(st.booleans())
    precision = draw(st.sampled_from(["highest", "high"]))

    def call() -> list[Tensor | None]:
        queries.grad = documents.grad = None
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(precision)
        try:
            with torch.set_grad_enabled(with_gradients):
                scores = maxsim(
                    queries, documents, queries_mask=masks[0], documents_mask=masks[1], **options,
                    implementation="triton",
                )  # fmt: skip
            if scores.requires_grad:
                scores.square().sum().backward()
        finally:
            torch.set_float32_matmul_precision(before)
        return [scores.detach(), queries.grad, documents.grad]

    return call


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_changes_between_calls_is_seen(repeats: list, data: st.DataObject) -> None:
    """Run each of a few calls several times, in turn, with some property changed between them."""
    repeated.forget()
    some = data.draw(st.lists(calls(), min_size=2, max_size=3))
    expected = [anew(call) for call in some]
    for _ in range(4):
        for call, values in zip(some, expected, strict=True):
            assert equal(call(), values)


def test_a_masked_call_enters_at_most_twelve_functions(repeats: list) -> None:
    """Functions of the package, from the one that is called to those that launch."""
    embeddings, masks = (torch.randn(2, 3, 4), torch.randn(2, 5, 4)), (torch.rand(2, 3) > 0.3, torch.rand(2, 5) > 0.3)
    call = partial(maxsim, *embeddings, queries_mask=masks[0], documents_mask=masks[1], implementation="triton")
    package = str(Path(pylate_flash.__file__).parent)
    entered: list[str] = []
    launching: list[FrameType] = []

    def watch(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if launching:
            # A kernel, in the interpreter.
            launching[:] = [] if event == "return" and frame is launching[0] else launching
        elif event == "call" and (code.co_filename.startswith(package) or code.co_name == "repeat"):
            entered.append(code.co_name)
            launching[:] = [frame] if code.co_name == "by_interpreter" else []

    for _ in range(3):
        call()
    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(before)
    assert "by_interpreter" in entered[-1]
    # A compiled kernel takes addresses.
    entered = [name for name in entered if name != "_tensor_at"]
    assert len(entered) <= 12, entered


def test_tensors_may_go_and_others_take_their_addresses(repeats: list) -> None:
    for _ in range(8):
        queries, documents = torch.randn(2, 3, 4), torch.randn(2, 5, 4)

        def call(queries: Tensor = queries, documents: Tensor = documents) -> list[Tensor | None]:
            return [maxsim(queries, documents, implementation="triton")]

        assert equal(call(), anew(call))
        del queries, documents
    assert repeats


def test_a_retained_graph_and_a_second_backward(repeats: list) -> None:
    for _ in range(4):
        queries, documents = (torch.randn(2, length, 4, requires_grad=True) for length in (3, 5))
        loss = maxsim_cross_entropy(queries, documents, implementation="triton")
        first = torch.autograd.grad(loss, (queries, documents), retain_graph=True)
        second = torch.autograd.grad(loss, (queries, documents))
        assert equal(list(first), list(second))
    assert repeats


def test_a_backward_that_runs_out_of_memory_is_computed_anew(repeats: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what the forward lent it, which its recording has let go."""
    queries, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(4, 8)
    replay, failed = recording.Recording.__call__, []

    def fail(self: recording.Recording, inputs: list) -> list[Tensor | None]:
        before, results = len(inputs), replay(self, inputs)
        if len(inputs) < before:
            failed.append(before - len(inputs))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return results

    def step() -> list[Tensor | None]:
        scores = maxsim_from_hidden(queries, hidden, weight, implementation="triton")
        return [*torch.autograd.grad(scores.square().sum(), (queries, hidden))]

    monkeypatch.setattr(recording.Recording, "__call__", fail)
    for _ in range(3):
        assert len(failed) == 0
        hidden = torch.randn(5, 6, 8, requires_grad=True)
        actual = step()
    # The queries' and documents' normalised embeddings, each with norms.
    assert failed == [4]
    assert equal(actual, anew(step))


def test_a_changed_table_is_seen_after_forgetting(repeats: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a test changes one: MonkeyPatch makes calls be computed anew (tests/conftest.py)."""
    queries, documents = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    for _ in range(3):
        maxsim(queries, documents, implementation="triton")
    before = len(repeats)
    assert before == 1
    monkeypatch.setattr("pylate_flash.kernels.launch.Kernel.__call__", None)
    with pytest.raises(TypeError, match="NoneType"):
        maxsim(queries, documents, implementation="triton")
    assert len(repeats) == before


def test_casts_of_autocast_are_repeated_as_one_launch(repeats: list, monkeypatch: pytest.MonkeyPatch) -> None:
    casts, cast = [], rows._cast_kernel
    monkeypatch.setattr(rows, "_cast_kernel", lambda *arguments: casts.append(1) or cast(*arguments))
    embeddings = torch.randn(2, 3, 4), torch.randn(5, 6, 4)
    with torch.autocast("cpu", torch.float16):
        scores = [maxsim(*embeddings, implementation="triton") for _ in range(4)]
    assert len(repeats) == 2
    # The first call, and the one that is recorded.
    assert len(casts) == 2
    assert all(torch.equal(result, scores[0]) for result in scores[1:])


@pytest.mark.parametrize("served", ["single", "short", "stacked", "decomposed"])
def test_packed_totals_share_what_is_repeated(served: str, repeats: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Totals with the same plan; what is read depends on cu_seqlens, not on the total that was recorded."""
    monkeypatch.setattr(tables, "architecture", lambda device: (9 if served == "short" else 8, 1))
    monkeypatch.setattr(tables, "SHORT_MEAN_LENGTHS", ((40, 0),) if served == "short" else ())
    dtype, length = (torch.float32, 70) if served == "decomposed" else (torch.half, 11)
    n_queries = 2 if served == "stacked" else 1
    queries, bounds = torch.randn(n_queries * length, 16).to(dtype), torch.arange(n_queries + 1) * length
    for total in (129, 131, 132, 130, 129, 132):
        arguments = queries, torch.randn(total, 16).to(dtype), bounds, torch.tensor([0, 40, 70, 110, total])
        lengths = {"max_query_length": length, "max_document_length": 40}
        plan = pylate_flash.explain(
            *arguments[:2],
            queries_cu_seqlens=bounds,
            documents_cu_seqlens=arguments[3],
            **lengths,
            implementation="triton",
        ).forward
        assert served == ("decomposed" if plan.decomposed else plan.kernel)

        def call(arguments: tuple = arguments, lengths: dict = lengths) -> list[Tensor | None]:
            return [maxsim_varlen(*arguments, **lengths, implementation="triton")]

        before = len(repeats)
        result = call()
        times = len(repeats) - before
        assert equal(result, anew(call))
    assert times
