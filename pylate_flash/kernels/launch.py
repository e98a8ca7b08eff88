"""Launch a Triton kernel with less host time than Triton itself takes.

Triton looks a kernel up by a string of everything that it was specialised on, built anew at every launch: tens of
microseconds for a kernel of many arguments, as long as the kernel itself runs on a small problem. What the
specialisation depends on is known here, so a tuple of it finds the compiled kernel.

What Triton then does before it calls its C function, which takes the addresses, is to look for scratch memory and hooks
that are rarely there. Where a kernel needs no such memory and no hook is set, the C function is called at once.

The copy engine of Hopper reads blocks of a matrix that is described to it, which Triton does anew at every launch. Here
a description is made once for an address; a tensor at the address of an earlier one, as allocators give them out, costs
a look-up.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs

from .overlap import starts_early

_INT32_MAX = 2**31 - 1
# Regions of a scratch begin at multiples of as many bytes.
_REGION = 256
# The arguments of the C function, and their order, are those of this version of Triton.
_KNOWN_TRITON = triton.__version__.startswith("3.6.")


def region_at(byte: int) -> int:
    """Return where a region may begin, at this byte or after it."""
    return -(-byte // _REGION) * _REGION


class Described(NamedTuple):
    """A contiguous matrix [rows, columns] of which a kernel copies blocks, to where `layout` (of Gluon) puts them."""

    rows: int
    columns: int
    block: tuple[int, int]
    layout: Any

    def of(self, tensor: Tensor) -> Any:
        """The tensor as Triton takes it."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor(tensor, [self.rows, self.columns], [self.columns, 1], list(self.block), self.layout)


def _describer(matrix: Described, meta: dict[str, Any]) -> Callable[[int], tuple]:
    """What makes of an address the arguments of Triton's C function for such a matrix: it, its sizes and its strides.

    `meta` is what the compiled kernel says of it.
    """
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    fixed = (
        meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], tuple(meta["block_size"]),
        (matrix.rows, matrix.columns), (matrix.columns, 1), 0,
    )  # fmt: skip
    fill = triton.runtime.driver.active.utils.fill_tma_descriptor

    @functools.lru_cache(maxsize=256)
    def describe(address: int) -> tuple:
        return fill(address, *fixed), matrix.rows, matrix.columns, matrix.columns, 1

    return describe


class _Direct(NamedTuple):
    """Triton's C function for a compiled kernel, and its arguments before the stream, and from there to the pointers.

    In place of the first pointers it takes what these functions make of them. After the pointers come the kernel's
    other arguments.
    """

    launch: Callable[..., None]
    grid: tuple[int, int, int]
    fixed: tuple
    rest: tuple
    device: int
    describers: tuple[Callable[[int], tuple], ...]


def _direct(
    compiled: Any, grid: tuple[int, int, int], rest: tuple, device: int, described: tuple[Described, ...]
) -> _Direct | None:
    """The C function of a compiled kernel, or None where Triton must launch it."""
    if not _KNOWN_TRITON or device < 0:
        return None
    from triton.backends.nvidia.driver import CudaLauncher

    run = getattr(compiled, "run", None)
    if not isinstance(run, CudaLauncher) or run.global_scratch_size > 0 or run.profile_scratch_size > 0:
        return None
    launch, describers = run.launch, []
    if described:
        # What Triton has around its C function describes anew at every launch.
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
        for matrix, meta in zip(described, compiled.metadata.tensordesc_meta, strict=True):
            describers.append(_describer(matrix, meta))
    # Scratches for all programs and for a profiler; then what describes the launch to hooks, and two hooks.
    fixed = (
        compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata,
        None, None, None,
    )  # fmt: skip
    return _Direct(launch, grid, fixed, rest, device, tuple(describers))


def _hooked() -> bool:
    """Whether somebody, such as a profiler, wants to hear of launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    # Unset, a hook is an empty chain of hooks.
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


# The stream that is current on a device, as an integer. A PyTorch without CUDA has no such function, and no need of it.
_current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)


class Launch:
    """A launch of which only the tensors are open: a callable that takes them, and `Launcher.bind` makes.

    The first tensor is on the current device; none is on another, or of another type, from call to call. Launches on
    the current stream. Compiles what was never compiled.
    """

    def __init__(
        self,
        launcher: Launcher,
        grid: tuple[int, int, int],
        rest: tuple,
        key: tuple,
        options: dict[str, Any],
        described: tuple[Described, ...],
    ) -> None:
        self._launcher = launcher
        self._grid = grid
        self._rest = rest
        self._key = key
        self._options = options
        self._described = described
        self._runners: dict[tuple, Callable[..., None]] = {}
        # For tensors that begin at multiples of 16 bytes, once such tensors came.
        self.direct: _Direct | None = None

    def __call__(self, *tensors: Tensor | None) -> None:
        # An address needs no look-up of its memory, as a tensor does. No address and no tensor look the same to Triton.
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        direct = self.direct
        if direct is None or functools.reduce(operator.or_, pointers) & 15 or _hooked():
            self._by_triton(tensors, pointers)
            return
        if direct.describers:
            described: list = []
            for describe, pointer in zip(direct.describers, pointers, strict=False):
                described += describe(pointer)
            pointers = described + pointers[len(direct.describers) :]
        direct.launch(*direct.grid, _current_stream(direct.device), *direct.fixed, *pointers, *direct.rest)

    def _by_triton(self, tensors: tuple[Tensor | None, ...], pointers: list[int]) -> None:
        aligned = tuple([pointer % 16 == 0 for pointer in pointers])
        runner = self._runners.get(aligned)
        first: list = [matrix.of(tensor) for matrix, tensor in zip(self._described, tensors, strict=False)]  # type: ignore[arg-type]
        pointers = first + pointers[len(first) :]
        if runner is not None:
            runner(*pointers, *self._rest)
            return
        types = tuple([None if tensor is None else tensor.dtype for tensor in tensors])
        key = (tensors[0].device, types, aligned, *self._key)  # type: ignore[union-attr]
        compiled = self._launcher._compiled.get(key)
        if compiled is None:
            options = self._options
            if self._launcher.follows and starts_early(tensors[0].device):  # type: ignore[union-attr]
                options = options | {"launch_pdl": True}
            # None under Triton's interpreter, which compiles nothing.
            compiled = self._launcher.kernel[self._grid](*first, *tensors[len(first) :], *self._rest, **options)
            self._launcher._compiled[key] = compiled
        else:
            compiled[self._grid](*pointers, *self._rest)
        if compiled is not None:
            self._runners[aligned] = compiled[self._grid]
            if all(aligned):
                device = tensors[0].get_device()  # type: ignore[union-attr]
                self.direct = _direct(compiled, self._grid, self._rest, device, self._described)


class Launcher:
    """A Triton kernel whose arguments come in this order: tensors (or None), numbers, strides, constants.

    Parameters
    ----------
    kernel
        The function under `triton.jit`. Its numbers must be in `do_not_specialize`; its strides are specialised.
    follows
        Whether its programs are started before the kernel launched before them has ended, where the device can. Then
        they must `wait_for_previous_kernel` before all else.
    """

    def __init__(self, kernel: Any, follows: bool = False) -> None:
        self.kernel = kernel
        self.follows = follows
        self._compiled: dict[tuple, Any] = {}

    def bind(
        self,
        grid: tuple[int, int, int],
        numbers: tuple[float, ...],
        strides: tuple[int, ...],
        constants: tuple,
        num_warps: int,
        num_stages: int,
        max_registers: int | None = None,
        described: tuple[Described, ...] = (),
    ) -> Launch:
        """A launch of which only the tensors are open. Keep it: what it costs beyond Triton's launcher it costs once.

        Parameters
        ----------
        grid
            Programs along the three axes, each at least 1.
        numbers, strides, constants
            The arguments after the tensors, in the kernel's order. A number is an int or a float.
        num_warps, num_stages, max_registers
            Triton's launch options; the last is per thread.
        described
            What the first tensors are to the kernel, which takes descriptions of them (compute capability 9.0). They
            begin at multiples of 16 bytes.
        """
        # Triton tells apart 1, multiples of 16, and what needs 64 bits.
        specialised = (
            tuple([stride if stride == 1 else (stride % 16 == 0, stride > _INT32_MAX) for stride in strides]),
            tuple([number > _INT32_MAX for number in numbers]),
        )
        return Launch(
            self,
            grid,
            (*numbers, *strides, *constants),
            (specialised, constants, num_warps, num_stages, max_registers),
            {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": max_registers},
            described,
        )


class Sequence:
    """Launches one after the other, whose tensors are slots of one table: those of a call, and then regions of scratch.

    A call allocates the scratch, and lets go of it. It passes addresses, and makes no tensor of a region, once all its
    kernels were launched.

    Parameters
    ----------
    given
        How many tensors (or None) a call takes: the slots from 0. None changes its type, or whether it is None, from
        call to call.
    first
        A slot of which the tensor is never None, and on the current device.
    allocate
        What returns the last of these tensors, which the first launch does not take: a call leaves them out, gets them
        while the first kernel runs already, and returns them.
    """

    def __init__(
        self, given: int, first: int = 0, allocate: Callable[[], tuple[Tensor | None, ...]] | None = None
    ) -> None:
        self._given = given
        self._first = first
        self._allocate = allocate
        self._kept = 0
        self._bytes = 0
        # Of each the tensor that it is in the memory of (None: the scratch), and there its offset, size and type.
        self._regions: list[tuple[int | None, int, int, torch.dtype]] = []
        # Slots of those in the memory of a tensor, with its slot and the offset; and slots that share another's tensor.
        self._lent: list[tuple[int, int, int]] = []
        self._placed: list[tuple[int, int]] = []
        self._steps: list[tuple[Launch, tuple[int, ...]]] = []
        self._direct: list[tuple[_Direct, Callable[[list[int]], tuple[int, ...]]]] = []

    def region(self, count: int, dtype: torch.dtype, at: int | None = None, of: int | None = None) -> int:
        """Return the slot of a region of scratch for `count` elements, after all others, or `at` a byte among them.

        Bytes count from the end of what is kept (`keep`). With `of` it lies in the memory of the contiguous tensor in
        that slot, which is given for a later launch to fill, at a byte that is a multiple of 16.
        """
        if of is None:
            at = region_at(self._bytes) if at is None else self._kept + at
            self._bytes = max(self._bytes, at + count * dtype.itemsize)
        slot = self._given + len(self._regions)
        self._regions.append((of, at or 0, count, dtype))
        if of is not None:
            self._lent.append((slot, of, at or 0))
        return slot

    def keep(self, slot: int, count: int, dtype: torch.dtype) -> None:
        """Put a region in this slot, for which calls give None then; `at` counts from its end. Before other regions."""
        self.same(slot, self.region(count, dtype))
        self._kept = region_at(self._bytes)

    def same(self, slot: int, other: int) -> None:
        """Put what is in another slot in this one too, for which calls give None then."""
        self._placed.append((slot, other))

    def add(self, launch: Launch, *slots: int) -> None:
        """Launch after all others, on the tensors in these slots."""
        self._steps.append((launch, slots))

    def __call__(self, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        scratch = torch.empty(self._bytes, dtype=torch.uint8, device=tensors[self._first].device)  # type: ignore[union-attr]
        allocated: tuple[Tensor | None, ...] = ()
        if not self._direct or functools.reduce(operator.or_, pointers) & 15 or _hooked():
            if self._allocate is not None:
                allocated = self._allocate()
            self._by_tensors((*tensors, *allocated), scratch)
            return allocated
        base = scratch.data_ptr()
        n_given = len(pointers)
        pointers += [0] * (self._given - n_given)
        pointers += [base + offset if of is None else 0 for of, offset, _, _ in self._regions]
        for slot, other in self._placed:
            pointers[slot] = pointers[other]
        stream = _current_stream(self._direct[0][0].device)
        steps = iter(self._direct)
        if self._allocate is not None:
            (launch, grid, fixed, rest, *_), of_slots = next(steps)
            launch(*grid, stream, *fixed, *of_slots(pointers), *rest)
            allocated = self._allocate()
            pointers[n_given : self._given] = [0 if tensor is None else tensor.data_ptr() for tensor in allocated]
            for slot, other in self._placed:
                pointers[slot] = pointers[other]
        for slot, of, offset in self._lent:
            pointers[slot] = pointers[of] + offset
        for (launch, grid, fixed, rest, *_), of_slots in steps:
            launch(*grid, stream, *fixed, *of_slots(pointers), *rest)
        return allocated

    def _by_tensors(self, tensors: tuple[Tensor | None, ...], scratch: Tensor) -> None:
        table = [*tensors, *[None] * len(self._regions)]
        for slot, other in self._placed:
            table[slot] = table[other]
        for slot, (of, offset, count, dtype) in enumerate(self._regions, self._given):
            memory = scratch if of is None else table[of].view(-1).view(torch.uint8)  # type: ignore[union-attr]
            table[slot] = memory[offset : offset + count * dtype.itemsize].view(dtype)
        for slot, other in self._placed:
            table[slot] = table[other]
        for launch, slots in self._steps:
            launch(*[table[slot] for slot in slots])
        direct: list[tuple[_Direct, Callable[[list[int]], tuple[int, ...]]]] = []
        for launch, slots in self._steps:
            if launch.direct is None:
                return
            # Every kernel has more than one tensor, so that a getter returns a tuple.
            direct.append((launch.direct, operator.itemgetter(*slots)))
        self._direct = direct


class on_device:
    """Make the device of a tensor the current one, as a launch needs; free where it is already."""

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.get_device()
        self._before = -1

    def __enter__(self) -> None:
        if self._device >= 0 and torch.cuda.current_device() != self._device:
            self._before = torch.cuda.current_device()
            torch.cuda.set_device(self._device)

    def __exit__(self, *_: object) -> None:
        if self._before >= 0:
            torch.cuda.set_device(self._before)
