"""A call's allocations, operators of torch and launches, recorded once and repeated on other tensors.

Checks, plans and launch keys follow from what tensors say of themselves (shapes, strides, types, alignment), not from
their values. For tensors that say the same as those of an earlier call, what is left to do is to allocate and to
launch: a `Recorder` notes both while a call computes as ever, and its `Recording` does them again. Memory that only
launches see is one scratch allocation, in which what was freed is used again.

What cannot be repeated so (a value is read, a tensor comes from elsewhere) is refused, and computes as ever.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode
from torch.utils.weak import WeakTensorKeyDictionary

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_UNREPEATABLE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
# A piece of scratch begins at a multiple of so many bytes, more than any kernel or descriptor asks for.
_ALIGNMENT = 128
# Steps at most: the host time of a call that takes more is hidden behind the GPU.
_MOST_STEPS = 512


class _Local(threading.local):
    recorder: Recorder | None = None


# The recorder at work in this thread.
local = _Local()
# The stream that is current on a device, as an integer, and the current device. A PyTorch without CUDA has no such
# functions, and no need of them.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)


class _Value(NamedTuple):
    """A tensor among the arguments of an operator: an input, or a result of an earlier step."""

    number: int


class _Location(NamedTuple):
    """Where an argument of a launch lies: so many bytes after the beginning of a value."""

    number: int
    offset: int
    dtype: torch.dtype


class _Memory:
    """A storage: the value that it came with, the step at which it is gone, and all values that lie in it."""

    __slots__ = ("died", "index", "is_shared", "nbytes", "reference", "start", "values")

    def __init__(self, index: int, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.index = index
        self.died: int | None = None
        self.start, self.nbytes, self.reference = tensor.data_ptr(), storage.nbytes(), StorageWeakRef(storage)
        self.values = [index]
        # Among inputs: of what lies there it is not known which one it belongs to.
        self.is_shared = False


class _Operator(NamedTuple):
    function: Any
    # Its arguments by place and by name, `_Value`s in place of tensors, in lists too.
    args: list[Any]
    by_name: dict[str, Any]
    has_effects: bool
    results: tuple[int, ...]
    # Of an allocation: shape, strides where they are not dense, type and device.
    allocates: tuple | None = None

    def values(self) -> set[int]:
        """The values among its arguments."""
        arguments = [*self.args, *self.by_name.values()]
        flat = [x for argument in arguments for x in (argument if isinstance(argument, list) else [argument])]
        return {x.number for x in flat if isinstance(x, _Value)}


class _Launch(NamedTuple):
    launch: Callable[..., None]
    grid: tuple[int, int, int]
    locations: list[_Location | None]
    rest: tuple
    described: tuple
    # How many of the first arguments it takes as tensors.
    n_tensors: int


class Recorder(TorchDispatchMode):
    """Notes what a call does while it is entered.

    Parameters
    ----------
    inputs
        The tensors of the call, or None, in whose place those of another one come.
    """

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.n_inputs = self.n_values = len(inputs)
        self.steps: list[_Operator | _Launch] = []
        self.memory: dict[int, _Memory] = {}
        self.refused: str | None = None
        self._values = WeakTensorKeyDictionary()
        # What is brought elsewhere is about to be read.
        self._device = next(tensor.device for tensor in inputs if tensor is not None)
        for index, tensor in enumerate(inputs):
            if tensor is None:
                continue
            if tensor in self._values:
                self.refuse("two inputs are one tensor")
            self._values[tensor] = index
            storage = tensor.untyped_storage()._cdata
            if storage in self.memory:
                self.memory[storage].is_shared = True
                self.memory[storage].values.append(index)
            else:
                self.memory[storage] = _Memory(index, tensor)

    # Not those of `TorchDispatchMode`, which also set flags of the whole process, and set them back to what they found:
    # of two threads that record at once, the last one to leave would leave them set, and Dynamo, which compiles nothing
    # in a mode, would compile nothing any more.
    def __enter__(self) -> Recorder:
        local.recorder = self
        _push_mode(self)
        return self

    def __exit__(self, *error: Any) -> None:
        local.recorder = None
        _pop_mode()

    def refuse(self, reason: str) -> None:
        """Say why what is done cannot be repeated; the first reason counts."""
        self.refused = self.refused or reason

    def value(self, tensor: Tensor) -> int:
        """The index of a tensor; one of unknown origin is a reason to refuse."""
        index = self._values.get(tensor)
        if index is None:
            self.refuse("a tensor comes from elsewhere")
            return -1
        return index

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        try:
            result = function(*args, **(kwargs or {}))
        except torch.OutOfMemoryError:
            self.refuse("memory ran out")
            raise
        if self._may_step():
            for memory in self.memory.values():
                if memory.died is None and memory.reference.expired():
                    memory.died = len(self.steps)
            self._note(function, args, kwargs or {}, result)
        return result

    def _may_step(self) -> bool:
        if len(self.steps) == _MOST_STEPS:
            self.refuse(f"there are more than {_MOST_STEPS} steps")
        return self.refused is None

    def _note(self, function: Any, args: tuple, kwargs: dict, result: Any) -> None:
        if function in _ALLOCATIONS:
            if result.device != self._device:
                return self.refuse(f"{function} allocates elsewhere")
            stride = None if result.is_contiguous() else result.stride()
            made = tuple(result.shape), stride, result.dtype, result.device
            self.steps.append(_Operator(function, [], {}, False, (self._add(result),), made))
            return None
        results = result if isinstance(result, tuple | list) else (result,)
        if function.namespace != "aten" or _UNREPEATABLE.intersection(function.tags):
            return self.refuse(f"{function} cannot be repeated")
        if not all(isinstance(tensor, Tensor) and tensor.device == self._device for tensor in results):
            return self.refuse(f"{function} returns other than tensors, or tensors elsewhere")
        given, by_name = [self._valued(x) for x in args], {name: self._valued(x) for name, x in kwargs.items()}
        indices = tuple([self._add(tensor) for tensor in results])
        has_effects = function._schema.is_mutable
        if function is _aten._to_copy.default and set(by_name) == {"dtype"}:
            # Half of the operator's host time, which has many options to read.
            function, given, by_name = Tensor.to, [*given, by_name["dtype"]], {}
        self.steps.append(_Operator(function, given, by_name, has_effects, indices))
        return None

    def _valued(self, argument: Any) -> Any:
        """An argument of an operator, with `_Value`s in place of tensors."""
        if isinstance(argument, tuple | list):
            return [self._valued(x) for x in argument]
        return _Value(self.value(argument)) if isinstance(argument, Tensor) else argument

    def _add(self, tensor: Tensor) -> int:
        if tensor in self._values:
            # What an operator works on in place.
            return self._values[tensor]
        index = self._values[tensor] = self.n_values
        self.n_values += 1
        storage = tensor.untyped_storage()._cdata
        if storage in self.memory:
            self.memory[storage].values.append(index)
        else:
            self.memory[storage] = _Memory(index, tensor)
        return index

    def note_launch(
        self,
        launch: Callable[..., None],
        grid: tuple[int, int, int],
        arguments: Sequence[Any],
        rest: tuple,
        described: tuple,
        n_tensors: int,
    ) -> None:
        """Note a launch on `arguments`: tensors, `Region`s of them, or None."""
        if self._may_step():
            locations = [None if argument is None else self._located(argument) for argument in arguments]
            self.steps.append(_Launch(launch, grid, locations, rest, described, n_tensors))

    def _located(self, argument: Any) -> _Location | None:
        tensor = getattr(argument, "memory", argument)
        memory, index = self.memory.get(tensor.untyped_storage()._cdata), self._values.get(tensor)
        if index is not None and index < self.n_inputs:
            return _Location(index, argument.data_ptr() - tensor.data_ptr(), argument.dtype)
        if memory is None or memory.is_shared:
            self.refuse("a kernel takes memory that comes from elsewhere")
            return None
        return _Location(memory.index, argument.data_ptr() - memory.start, argument.dtype)


@functools.cache
def _element(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty((), dtype=dtype, device=device)


def _allocation(shape: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype, device: torch.device) -> Any:
    """What allocates such a tensor, of dense strides where they are None.

    `empty_like` of one element in that shape takes the host a fifth of what `empty` takes, which has options to read.
    """
    if stride is None:
        like = _element(dtype, device).expand(shape)
        return functools.partial(torch.empty_like, like, memory_format=torch.contiguous_format)
    return functools.partial(torch.empty_strided, shape, stride, dtype=dtype, device=device)


class Recording:
    """What a call did, to be done again on other tensors.

    It is written out as a Python function without loops or branches, which takes the host 1.2 us of a plain call where
    going through the steps took 2.0. Calls that differ in numbers alone share its code.

    Parameters
    ----------
    recorder
        What has noted it, and refused nothing.
    outputs
        What the call returned: tensors that it made or was given, or None.
    device
        The GPU, by its number; -1: none.
    """

    def __init__(self, recorder: Recorder, outputs: Sequence[Tensor | None], device: int) -> None:
        self._device = device
        self._recorder = recorder
        self._lines: list[str] = []
        self._constants: list[Any] = []
        results = [None if tensor is None else recorder.value(tensor) for tensor in outputs]
        memory_of = {index: memory for memory in recorder.memory.values() for index in memory.values}
        needed, steps = self._needed({index for index in results if index is not None}, memory_of)
        made = {memory.index for memory in recorder.memory.values() if needed.intersection(memory.values)}
        self._scratch_bytes, self._offsets = _lay(steps, memory_of, made)
        launches = [step for step in steps if isinstance(step, _Launch)]
        # The values whose addresses launches take.
        self._addressed = {location.number for step in launches for location in step.locations if location is not None}
        self._lines.append(f"{', '.join(f'v{index}' for index in range(recorder.n_inputs))}, = inputs")
        for index in range(recorder.n_inputs):
            self._address(index)
        if self._scratch_bytes:
            where = torch.device("cuda", device) if device >= 0 else torch.device("cpu")
            self._lines.append(
                f"scratch = {self._constant(_allocation((self._scratch_bytes,), None, torch.uint8, where))}()"
            )
            self._lines.append("start = scratch.data_ptr()")
        for number, step in enumerate(steps):
            for memory in recorder.memory.values():
                if memory.died == number and memory.index in made:
                    self._lines.append(" = ".join(f"v{index}" for index in memory.values) + " = None")
            if step is not None:
                self._step(step, made)
        self._lines.append(f"return [{', '.join('None' if index is None else f'v{index}' for index in results)}]")
        del self._recorder
        self._repeat = _function(tuple(self._lines), len(self._constants))(*self._constants)

    def _needed(self, needed: set[int], memory_of: dict[int, _Memory]) -> tuple[set[int], list]:
        """The values that have to be tensors, and the steps, None in place of those whose results nothing needs."""
        launched: set[int] = set()
        steps: list[_Operator | _Launch | None] = list(self._recorder.steps)
        for number, step in reversed(list(enumerate(self._recorder.steps))):
            if isinstance(step, _Launch):
                launched.update(location.number for location in step.locations if location is not None)
                needed.update(location.number for location in step.locations[: step.n_tensors] if location is not None)
            elif step.allocates is None:
                if step.has_effects or not (needed | launched).isdisjoint(step.results):
                    needed.update(step.results, step.values())
                else:
                    steps[number] = None
            elif not any(index in launched or index in needed for index in memory_of[step.results[0]].values):
                steps[number] = None
        # A value lies where the first of its storage does.
        return needed | {memory_of[index].index for index in needed}, steps

    def _constant(self, value: Any) -> str:
        """The name of a value that the function is made with."""
        self._constants.append(value)
        return f"c{len(self._constants) - 1}"

    def _address(self, index: int) -> None:
        if index in self._addressed:
            self._lines.append(f"a{index} = v{index}.data_ptr()")

    def _step(self, step: _Operator | _Launch, made: set[int]) -> None:
        if isinstance(step, _Launch):
            first = "".join(map(self._tensor_at, step.locations[: step.n_tensors]))
            launch, grid, rest, described = map(self._constant, (step.launch, step.grid, step.rest, step.described))
            pointers = ", ".join(map(self._pointer, step.locations))
            self._lines.append(f"{launch}({grid}, stream, ({first}), [{pointers}], {rest}, {described})")
            return
        if step.allocates is not None:
            if step.results[0] not in made:
                return
            self._lines.append(f"v{step.results[0]} = {self._constant(_allocation(*step.allocates))}()")
        else:
            arguments = [self._argument(x) for x in step.args]
            arguments += [f"{name}={self._argument(x)}" for name, x in step.by_name.items()]
            results = ", ".join(f"v{index}" for index in step.results)
            self._lines.append(f"{results} = {self._constant(step.function)}({', '.join(arguments)})")
        for index in step.results:
            self._address(index)

    def _argument(self, argument: Any) -> str:
        if isinstance(argument, list):
            return f"[{', '.join(map(self._argument, argument))}]"
        return f"v{argument.number}" if isinstance(argument, _Value) else self._constant(argument)

    def _pointer(self, location: _Location | None) -> str:
        if location is None:
            return "0"
        if location.number in self._offsets:
            return f"start + {self._constant(self._offsets[location.number] + location.offset)}"
        return f"a{location.number} + {self._constant(location.offset)}" if location.offset else f"a{location.number}"

    def _tensor_at(self, location: _Location | None) -> str:
        if location is None:
            return "None, "
        tensor_at, offset, dtype = map(self._constant, (_tensor_at, location.offset, location.dtype))
        return f"{tensor_at}(v{location.number}, {offset}, {dtype}), "

    def __call__(self, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The outputs for these inputs, of the same signature."""
        device = self._device
        if device < 0:
            return self._repeat(inputs, 0)
        if current_device() != device:
            with torch.cuda.device(device):
                return self(inputs)
        return self._repeat(inputs, current_stream(device))


@functools.lru_cache(maxsize=1024)
def _function(lines: tuple[str, ...], n_constants: int) -> Callable[..., Callable[..., list[Tensor | None]]]:
    """What makes, of constants, the function of these lines, of `inputs` and the current stream."""
    constants = ", ".join(f"c{index}" for index in range(n_constants))
    body = "\n".join(f"        {line}" for line in lines)
    found: dict[str, Any] = {}
    exec(f"def make({constants}):\n    def repeat(inputs, stream):\n{body}\n    return repeat", found)
    return found["make"]


def _tensor_at(tensor: Tensor, offset: int, dtype: torch.dtype) -> Tensor:
    """What lies so many bytes after the beginning of a tensor; Triton's interpreter takes no addresses."""
    storage = tensor.untyped_storage()
    first = (tensor.data_ptr() - storage.data_ptr() + offset) // dtype.itemsize
    whole = torch.empty(0, dtype=dtype, device=tensor.device)
    return whole.set_(storage, first, (storage.nbytes() // dtype.itemsize - first,), (1,))


def _lay(steps: Sequence[Any], memory_of: dict[int, _Memory], made: set[int]) -> tuple[int, dict[int, int]]:
    """Bytes of scratch for the allocations that are no tensors of their own, and where in it each begins.

    In their order, each at the first gap between those that live at that time.
    """
    total, laid = 0, {}
    living: list[tuple[int, int, float]] = []
    for number, step in enumerate(steps):
        if not isinstance(step, _Operator) or step.allocates is None or step.results[0] in made:
            continue
        memory = memory_of[step.results[0]]
        living = sorted(piece for piece in living if piece[2] > number)
        begin = 0
        for start, end, _ in living:
            if begin + memory.nbytes <= start:
                break
            begin = max(begin, -(-end // _ALIGNMENT) * _ALIGNMENT)
        died = float("inf") if memory.died is None else memory.died
        living.append((begin, begin + memory.nbytes, died))
        laid[memory.index] = begin
        total = max(total, begin + memory.nbytes)
    return total, laid
