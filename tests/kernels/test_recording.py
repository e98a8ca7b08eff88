"""Recording a call and repeating it on other tensors: allocations, operators of torch, launches."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pylate_flash.kernels.launch import Kernel, Region, Scratch
from pylate_flash.kernels.recording import Recorder, Recording
from pylate_flash.ops import operator

Call = Callable[..., Sequence[Tensor | None]]


class Times(Kernel):
    """A stub of a compiled kernel that takes addresses: target[:number] = source[:number] * factor."""

    def __init__(self) -> None:
        super().__init__(None)

    def _compile(self, grid, tensors, integers, constants, warps, matrices):
        def launch(grid, stream, tensors, pointers: list[int], rest: tuple, matrices) -> None:
            number, factor = rest
            source, target = ((ctypes.c_float * number).from_address(pointer) for pointer in pointers)
            target[:] = [value * factor for value in source]

        launch(grid, 0, (), [tensor.data_ptr() for tensor in tensors], (*integers, *constants), ())
        return launch, 0


_times = Times()


def times(source: Tensor | Region, target: Tensor | Region, number: int, factor: float) -> None:
    _times((1, 1, 1), (source, target), (number,), (), (factor,), (4, 1, None))


def record(call: Call, *inputs: Tensor | None) -> tuple[Recorder, Sequence[Tensor | None]]:
    with Recorder(inputs) as recorder:
        return recorder, call(*inputs)


def check(call: Call, *shapes: tuple[int, ...], steps: int | None = None) -> Recording:
    """Check that the recording of one call gives for other tensors what the call gives."""
    first, second = ([torch.randn(shape) for shape in shapes] for _ in range(2))
    recorder, outputs = record(call, *first)
    assert recorder.refused is None
    recording = Recording(recorder, outputs, -1)
    copies = [tensor.clone() for tensor in second]
    for actual, expected in zip(recording(second), call(*copies), strict=True):
        assert (actual is None) == (expected is None)
        assert actual is None or (torch.equal(actual, expected) and actual.stride() == expected.stride())
    if steps is not None:
        # Without the first line, which names the inputs, and the last, which returns.
        assert len(recording._lines) == steps + 2
    return recording


def test_launches_on_inputs_scratch_and_outputs() -> None:
    def call(x: Tensor, y: Tensor) -> Sequence[Tensor | None]:
        scratch, result = torch.empty(6), x.new_empty(2, 3)
        times(x, scratch, 6, 2.0)
        times(scratch, result.view(-1), 6, 3.0)
        times(y[1:], result.view(-1), 2, 5.0)
        return result, None

    check(call, (2, 3), (4,))


def test_operators_of_torch_views_and_what_is_changed_in_place() -> None:
    def call(x: Tensor) -> Sequence[Tensor | None]:
        half = x.to(torch.float16).float()
        total = torch.zeros(3)
        total[1:] += half[:, 1:].sum(dim=0)
        parts = torch.cat([total, half.flatten()]).chunk(3)
        return parts[0] * 2, torch.empty_strided((3, 2), (1, 3)).copy_(half.T)

    check(call, (2, 3))


def test_what_nothing_needs_is_not_repeated() -> None:
    def call(x: Tensor) -> Sequence[Tensor | None]:
        _ = (x * 2).sum()
        torch.empty(100)
        return (x + 1,)

    check(call, (3,), steps=1)


def test_regions_of_scratch() -> None:
    def call(x: Tensor) -> Sequence[Tensor | None]:
        result = torch.empty(8)
        scratch = Scratch(torch.empty(64))
        first, second = (scratch.empty(8, torch.float32, x.device) for _ in range(2))
        times(x, first, 8, 2.0)
        times(first, second, 8, 2.0)
        times(second, result, 8, 2.0)
        return (result,)

    check(call, (8,))


def test_inputs_may_share_a_storage() -> None:
    """As slices of one batch of embeddings do: inputs can be told apart, tensors derived from one of them cannot."""

    def call(x: Tensor, y: Tensor) -> Sequence[Tensor | None]:
        result = torch.empty(3)
        times(y, result, 3, 2.0)
        return (result,)

    storage = torch.arange(6.0)
    recorder, outputs = record(call, storage[:3], storage[3:])
    assert recorder.refused is None
    x, y = torch.randn(3), torch.randn(3)
    assert torch.equal(Recording(recorder, outputs, -1)([x, y])[0], 2 * y)

    def derived(x: Tensor, y: Tensor) -> Sequence[Tensor | None]:
        return call(x, y[1:].view(-1)[:0].as_strided((3,), (1,), 3))

    assert record(derived, storage[:3], storage[3:])[0].refused == "a kernel takes memory that comes from elsewhere"


def test_inputs_and_scratch_are_freed_where_the_call_freed_them() -> None:
    """Of inputs that a call removes from its list, a replay removes its references too."""
    references: list[StorageWeakRef] = []
    freed: list[list[bool]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            freed.append([reference.expired() for reference in references])
            return function(*args, **(kwargs or {}))

    def call(inputs: list[Tensor]) -> Sequence[Tensor | None]:
        x, lent = inputs
        del inputs[1:]
        scratch, result = torch.empty(8), torch.empty(8)
        times(lent, scratch, 8, 2.0)
        times(scratch, result, 8, 3.0)
        del lent, scratch
        return (result + x,)

    for replay in (False, True):
        inputs = [torch.randn(8), torch.randn(8)]
        expected = inputs[0] + 6.0 * inputs[1]
        references[:] = [StorageWeakRef(inputs[1].untyped_storage())]
        if not replay:
            with Recorder(inputs) as recorder:
                outputs = call(inputs)
            recording = Recording(recorder, outputs, -1, n_kept=len(inputs))
            continue
        with Watch():
            (result,) = recording(inputs)
        assert len(inputs) == 1
        assert torch.equal(result, expected)
        # At the addition, the last operator.
        assert freed[-1] == [True]
    assert recording._lines.index("scratch = None") < len(recording._lines) - 2


ELSEWHERE = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda x: (x * x.sum().item(),), "_local_scalar_dense"),
        (lambda x: (x[x > 0],), "cannot be repeated"),
        (lambda x: (x + 1, x.to("meta"))[:1], "tensors elsewhere"),
        (lambda x: (x + 1, torch.empty(3, device="meta"))[:1], "allocates elsewhere"),
        (lambda x: (x + torch.rand(3),), "rand"),
        (lambda x: (x + ELSEWHERE,), "comes from elsewhere"),
        (lambda x: (times(ELSEWHERE, x, 3, 1.0), x)[1:], "comes from elsewhere"),
        (lambda x: [x := x + 1 for _ in range(513)][-1:], "more than 512 steps"),
    ],
    ids=["value", "sizes", "copy", "allocation", "random", "tensor", "memory", "steps"],
)
def test_what_is_refused(call: Call, reason: str) -> None:
    recorder, _ = record(call, torch.randn(3))
    assert reason in (recorder.refused or "")


def test_a_tensor_given_twice_is_refused() -> None:
    """It would be ambiguous which of the two a launch uses."""
    x = torch.randn(3)
    assert record(lambda x, y: (x + y,), x, x)[0].refused == "two inputs are one tensor"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 4)), min_size=1, max_size=8))
def test_scratch_is_used_again_and_never_twice_at_a_time(segments: list[tuple[int, int]]) -> None:
    """Each segment lives until `age` later ones are filled; its content is read when it is freed."""

    def call(x: Tensor) -> Sequence[Tensor | None]:
        alive: list[tuple[int, Tensor]] = []
        results = []
        for number, (size, age) in enumerate(segments):
            segment = torch.empty(size)
            times(x[number:], segment, 1, 1.0)
            alive.append((number + age, segment))
            del segment
            for until, old in alive:
                if until == number:
                    results.append(torch.empty(1))
                    times(old, results[-1], 1, 10.0)
            alive = [item for item in alive if item[0] > number]
            old = None
        return results

    recording = check(call, (len(segments) + 1,))
    live, peak, ends = 0, 0, dict.fromkeys(range(len(segments)), 0)
    for number, (size, age) in enumerate(segments):
        live += -(-4 * size // 128) * 128
        peak = max(peak, live)
        ends[min(number + age, len(segments) - 1)] += -(-4 * size // 128) * 128
        live -= ends[number]
    scratch = recording._scratch_bytes
    assert scratch <= sum(-(-4 * size // 128) * 128 for size, _ in segments)
    # Without gaps that are too small for reuse, scratch is the peak of live bytes.
    if len({size for size, _ in segments}) == 1:
        assert scratch <= peak


def test_threads_that_record_and_repeat_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "repeated_devices", -1)
    monkeypatch.setattr(operator, "repeated", operator._Repeated(3))
    wrong: list[object] = []

    def compute(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], None]:
        scratch, result = torch.empty_like(tensors[0]), torch.empty_like(tensors[0])
        times(tensors[0], scratch, tensors[0].numel(), 2.0)
        times(scratch, result, tensors[0].numel(), 3.0)
        return (result,), None

    def work() -> None:
        try:
            for number in range(200):
                x = torch.randn(4 + number % 5)
                results = operator.repeat(operator.signature("times", (x,), ()), compute, (x,))[0][0]
                if not torch.equal(results, x * 2 * 3):
                    wrong.append((results, x))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_threads_that_record_do_not_keep_others_from_compiling() -> None:
    """Dynamo silently runs functions without compiling where it believes a torch mode is active."""
    entered, to_leave = threading.Event(), threading.Event()
    graphs = CompileCounterWithBackend("eager")

    def work() -> None:
        with Recorder([torch.ones(2)]):
            entered.set()
            to_leave.wait()

    thread = threading.Thread(target=work, daemon=True)
    with Recorder([torch.ones(2)]):
        thread.start()
        assert entered.wait(60)
    torch.compile(lambda x: x + 1, backend=graphs)(torch.ones(2))
    to_leave.set()
    thread.join()
    assert graphs.frame_count == 1
    torch.compile(lambda x: x + 2, backend=graphs)(torch.ones(2))
    assert graphs.frame_count == 2


def test_signatures_used_least_lately_are_forgotten() -> None:
    cache = operator._Repeated(2)
    for key in (("a",), ("b",)):
        cache.set(key, key)
    cache.get(("a",))
    cache.set(("c",), 3)
    assert [cache.get((name,)) for name in "abc"] == [("a",), None, 3]
    assert cache.get(([],)) is None
    cache.forget()
    assert cache.get(("a",)) is None
