"""Record the allocations, torch operators and launches of a call once, and replay them on other tensors.

Checks, plans and launch keys depend on the metadata of tensors (shapes, strides, dtypes, alignment), not on their
values. For tensors with the metadata of an earlier call, only allocations and launches remain: a `Recorder` notes both
while a call computes as usual, and its `Recording` replays them. Memory that only launches access is one scratch
allocation, in which freed memory is reused.

Calls that cannot be replayed (they read a value, or a tensor comes from elsewhere) are refused, and compute as usual.
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
# Alignment of a piece of scratch in bytes, larger than any kernel or descriptor requires.
_ALIGNMENT = 128
# Maximum number of steps: the host time of a longer call is hidden behind the GPU.
_MOST_STEPS = 512


class _Local(threading.local):
    recorder: Recorder | None = None


# The active recorder of this thread.
local = _Local()
# The current stream of a device, as an integer, and the current device. A PyTorch build without CUDA lacks these
# functions, and does not need them.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)


class _Value(NamedTuple):
    """A tensor among the arguments of an operator: an input, or a result of an earlier step."""

    number: int


class _Location(NamedTuple):
    """The memory that an argument of a launch points to: a byte offset from the beginning of a value."""

    number: int
    offset: int
    dtype: torch.dtype


class _Memory:
    """A storage: its first value, the step at which it is freed, and all values that share it."""

    __slots__ = ("died", "index", "is_shared", "nbytes", "reference", "start", "values")

    def __init__(self, index: int, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.index = index
        self.died: int | None = None
        self.start, self.nbytes, self.reference = tensor.data_ptr(), storage.nbytes(), StorageWeakRef(storage)
        self.values = [index]
        # Shared by several inputs: an address in it cannot be attributed to one of them.
        self.is_shared = False


class _Operator(NamedTuple):
    function: Any
    # Positional and keyword arguments, with `_Value`s in place of tensors, also inside lists.
    args: list[Any]
    by_name: dict[str, Any]
    has_effects: bool
    results: tuple[int, ...]
    # For an allocation: shape, strides (None if contiguous), dtype and device.
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
    matrices: tuple
    # How many of the leading arguments must be passed as tensors.
    n_tensors: int


class Recorder(TorchDispatchMode):
    """Records what a call does while it is the active dispatch mode.

    Parameters
    ----------
    inputs
        The tensors (or None) of the call, which those of a later call replace.
    """

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.n_inputs = self.n_values = len(inputs)
        self.steps: list[_Operator | _Launch] = []
        self.memory: dict[int, _Memory] = {}
        self.refused: str | None = None
        self._values = WeakTensorKeyDictionary()
        # A result on another device is about to be read.
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

    # Not the methods of `TorchDispatchMode`, which also set process-wide flags and restore their previous values: of
    # two threads that record at once, the last one to leave would leave them set, and Dynamo, which compiles nothing
    # inside a mode, would compile nothing any more.
    def __enter__(self) -> Recorder:
        local.recorder = self
        _push_mode(self)
        return self

    def __exit__(self, *error: Any) -> None:
        local.recorder = None
        _pop_mode()

    def refuse(self, reason: str) -> None:
        """Note why the call cannot be replayed; only the first reason is kept."""
        self.refused = self.refused or reason

    def value(self, tensor: Tensor) -> int:
        """The index of a tensor; a tensor of unknown origin makes the call refused."""
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
            allocation = tuple(result.shape), stride, result.dtype, result.device
            self.steps.append(_Operator(function, [], {}, False, (self._add(result),), allocation))
            return None
        results = result if isinstance(result, tuple | list) else (result,)
        if function.namespace != "aten" or _UNREPEATABLE.intersection(function.tags):
            return self.refuse(f"{function} cannot be repeated")
        if not all(isinstance(tensor, Tensor) and tensor.device == self._device for tensor in results):
            return self.refuse(f"{function} returns other than tensors, or tensors elsewhere")
        positional, by_name = [self._valued(x) for x in args], {name: self._valued(x) for name, x in kwargs.items()}
        indices = tuple([self._add(tensor) for tensor in results])
        has_effects = function._schema.is_mutable
        if function is _aten._to_copy.default and set(by_name) == {"dtype"}:
            # Takes half of the operator's host time, which parses many options.
            function, positional, by_name = Tensor.to, [*positional, by_name["dtype"]], {}
        self.steps.append(_Operator(function, positional, by_name, has_effects, indices))
        return None

    def _valued(self, argument: Any) -> Any:
        """An argument of an operator, with `_Value`s in place of tensors."""
        if isinstance(argument, tuple | list):
            return [self._valued(x) for x in argument]
        return _Value(self.value(argument)) if isinstance(argument, Tensor) else argument

    def _add(self, tensor: Tensor) -> int:
        if tensor in self._values:
            # An operator worked in place.
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
        matrices: tuple,
        n_tensors: int,
    ) -> None:
        """Note a launch on `arguments`: tensors, `Region`s of them, or None."""
        if self._may_step():
            locations = [None if argument is None else self._located(argument) for argument in arguments]
            self.steps.append(_Launch(launch, grid, locations, rest, matrices, n_tensors))

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
    """A callable that allocates such a tensor; strides of None are contiguous.

    `empty_like` of an expanded element takes a fifth of the host time of `empty`, which parses options.
    """
    if stride is None:
        like = _element(dtype, device).expand(shape)
        return functools.partial(torch.empty_like, like, memory_format=torch.contiguous_format)
    return functools.partial(torch.empty_strided, shape, stride, dtype=dtype, device=device)


class Recording:
    """The steps of a recorded call, to be replayed on other tensors.

    They are compiled to a Python function without loops or branches, which takes the host 1.2 us for a plain call where
    looping over the steps took 2.0. Calls that differ only in numbers share its code.

    Parameters
    ----------
    recorder
        The recorder of the call, which has refused nothing.
    outputs
        What the call returned: tensors that it created or received, or None.
    device
        The index of the GPU; -1: none.
    n_kept
        How many inputs the call left in its list, or None for all; the others are removed from the list of each replay
        too, and freed where the call freed them.
    """

    def __init__(
        self, recorder: Recorder, outputs: Sequence[Tensor | None], device: int, n_kept: int | None = None
    ) -> None:
        self._device = device
        self._recorder = recorder
        self._lines: list[str] = []
        self._constants: list[Any] = []
        results = [None if tensor is None else recorder.value(tensor) for tensor in outputs]
        memory_of = {index: memory for memory in recorder.memory.values() for index in memory.values}
        needed, steps = self._needed({index for index in results if index is not None}, memory_of)
        materialized = {memory.index for memory in recorder.memory.values() if needed.intersection(memory.values)}
        self._scratch_bytes, self._offsets = _lay(steps, memory_of, materialized)
        launches = [step for step in steps if isinstance(step, _Launch)]
        # The values whose addresses are passed to launches.
        self._addressed = {location.number for step in launches for location in step.locations if location is not None}
        self._lines.append(f"{', '.join(f'v{index}' for index in range(recorder.n_inputs))}, = inputs")
        if n_kept is not None and n_kept < recorder.n_inputs:
            self._lines.append(f"del inputs[{n_kept}:]")
        for index in range(recorder.n_inputs):
            self._address(index)
        if self._scratch_bytes:
            memory_device = torch.device("cuda", device) if device >= 0 else torch.device("cpu")
            self._lines.append(
                f"scratch = {self._constant(_allocation((self._scratch_bytes,), None, torch.uint8, memory_device))}()"
            )
            self._lines.append("start = scratch.data_ptr()")
        scratch_used = [number for number, step in enumerate(steps) if self._uses_scratch(step)]
        for number, step in enumerate(steps):
            if isinstance(step, _Operator) and scratch_used and number > scratch_used[-1]:
                # What follows may need much memory.
                self._lines.append("scratch = None")
                scratch_used = []
            for memory in recorder.memory.values():
                if memory.died == number and (memory.index in materialized or memory.index < recorder.n_inputs):
                    self._lines.append(" = ".join(f"v{index}" for index in memory.values) + " = None")
            if step is not None:
                self._step(step, materialized)
        self._lines.append(f"return [{', '.join('None' if index is None else f'v{index}' for index in results)}]")
        del self._recorder
        self._repeat = _function(tuple(self._lines), len(self._constants))(*self._constants)

    def _needed(self, needed: set[int], memory_of: dict[int, _Memory]) -> tuple[set[int], list]:
        """The values that must be tensors, and the steps, with None in place of those whose results are unused."""
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
        # The first value of a storage stands for its memory.
        return needed | {memory_of[index].index for index in needed}, steps

    def _uses_scratch(self, step: _Operator | _Launch | None) -> bool:
        return isinstance(step, _Launch) and any(
            location is not None and location.number in self._offsets for location in step.locations
        )

    def _constant(self, value: Any) -> str:
        """Add a constant of the generated function and return its name."""
        self._constants.append(value)
        return f"c{len(self._constants) - 1}"

    def _address(self, index: int) -> None:
        if index in self._addressed:
            self._lines.append(f"a{index} = v{index}.data_ptr()")

    def _step(self, step: _Operator | _Launch, materialized: set[int]) -> None:
        if isinstance(step, _Launch):
            first = "".join(map(self._tensor_at, step.locations[: step.n_tensors]))
            launch, grid, rest, matrices = map(self._constant, (step.launch, step.grid, step.rest, step.matrices))
            pointers = ", ".join(map(self._pointer, step.locations))
            self._lines.append(f"{launch}({grid}, stream, ({first}), [{pointers}], {rest}, {matrices})")
            return
        if step.allocates is not None:
            if step.results[0] not in materialized:
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
        """The outputs for inputs with the same signature."""
        device = self._device
        if device < 0:
            return self._repeat(inputs, 0)
        if current_device() != device:
            with torch.cuda.device(device):
                return self(inputs)
        return self._repeat(inputs, current_stream(device))


@functools.lru_cache(maxsize=1024)
def _function(lines: tuple[str, ...], n_constants: int) -> Callable[..., Callable[..., list[Tensor | None]]]:
    """A factory that takes the constants and returns the function of these lines, of `inputs` and the stream."""
    constants = ", ".join(f"c{index}" for index in range(n_constants))
    body = "\n".join(f"        {line}" for line in lines)
    namespace: dict[str, Any] = {}
    exec(f"def make({constants}):\n    def repeat(inputs, stream):\n{body}\n    return repeat", namespace)
    return namespace["make"]


def _tensor_at(tensor: Tensor, offset: int, dtype: torch.dtype) -> Tensor:
    """A 1-D view of a tensor's memory from a byte offset on, as Triton's interpreter takes no addresses."""
    storage = tensor.untyped_storage()
    first = (tensor.data_ptr() - storage.data_ptr() + offset) // dtype.itemsize
    view = torch.empty(0, dtype=dtype, device=tensor.device)
    return view.set_(storage, first, (storage.nbytes() // dtype.itemsize - first,), (1,))


def _lay(steps: Sequence[Any], memory_of: dict[int, _Memory], materialized: set[int]) -> tuple[int, dict[int, int]]:
    """Bytes of scratch for the allocations that are not materialized as tensors, and the offset of each in it.

    First fit, in allocation order: each goes to the first gap between those that are live at that step.
    """
    total, offsets = 0, {}
    live: list[tuple[int, int, float]] = []
    for number, step in enumerate(steps):
        if not isinstance(step, _Operator) or step.allocates is None or step.results[0] in materialized:
            continue
        memory = memory_of[step.results[0]]
        live = sorted(piece for piece in live if piece[2] > number)
        begin = 0
        for start, end, _ in live:
            if begin + memory.nbytes <= start:
                break
            begin = max(begin, -(-end // _ALIGNMENT) * _ALIGNMENT)
        died = float("inf") if memory.died is None else memory.died
        live.append((begin, begin + memory.nbytes, died))
        offsets[memory.index] = begin
        total = max(total, begin + memory.nbytes)
    return total, offsets
