"""Launch Triton kernels with less host time than Triton's own launcher.

Triton looks a kernel up by a string of everything that it was specialised on, built anew at every launch: tens of
microseconds for a kernel of many arguments, as long as the kernel itself runs on a small problem. Here the key is a
tuple of what the compiled code depends on: dtypes, constants, and whether strides and addresses are multiples of 16.
Sizes and grids are passed per launch, and a new one costs nothing.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl  # noqa: F401 (the interpreter looks for it beside a kernel)
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton import knobs
from triton.language.extra.cuda import gdc_wait
from triton.language.target_info import cuda_capability_geq

from . import recording, tables
from .versions import launcher_is_known

_INT32_MAX = 2**31 - 1
# Maximum number of programs along each axis of a grid.
MOST_PROGRAMS = _INT32_MAX, 65535, 65535
_or = functools.partial(functools.reduce, operator.or_)


class TmaMatrix(NamedTuple):
    """A contiguous matrix [rows, columns] that a kernel copies by TMA in blocks, to Gluon's shared memory `layout`."""

    rows: int
    columns: int
    block: tuple[int, int]
    layout: Any

    def of(self, tensor: Any) -> Any:
        """TMA descriptor of a tensor, or of any object with its address and dtype."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor(tensor, [self.rows, self.columns], [self.columns, 1], list(self.block), self.layout)


def check_grid(grid: tuple[int, int, int]) -> None:
    """Raise ValueError for a grid too large to launch, which the driver would report as an invalid argument."""
    for programs, most in zip(grid, MOST_PROGRAMS, strict=True):
        if programs > most:
            raise ValueError(
                f"queries and documents (of chamfer, x and y) must take at most {most} programs of a kernel, got "
                f"{programs}: there are too many of them for one call, or they are too long"
            )


class Constants(str):
    """The named constants that a kernel is specialized on: its last argument, `config`.

    It is a string because Triton serializes constants as JSON for its compile hooks.
    """

    def __new__(cls, **values: Any) -> Constants:
        constants = super().__new__(cls, values)
        if not knobs.runtime.interpret:
            values = {name: tl.constexpr(value) for name, value in values.items()}
        vars(constants).update(values)
        return constants


class Kernel:
    """A Triton kernel whose arguments come in this order: tensors (or None), numbers, strides, constants.

    Parameters
    ----------
    function
        The function under `triton.jit`. Its numbers must be in `do_not_specialize`; its strides are specialised.
    follows
        Whether to launch with programmatic dependent launch (PDL) where the device supports it: programs start before
        the previous kernel has ended, and must first call `wait_for_previous_kernel`.
    config
        The names of its constants, passed as a single `Constants` object; "": they are passed one by one.
    """

    def __init__(self, function: Any, follows: bool = False, config: str = "") -> None:
        self.function = function
        self.follows = follows
        self._names = config.split()
        self._configs: dict[tuple, tuple[Constants]] = {}
        # The launcher, and how many tensors it needs.
        self._code: dict[tuple, tuple[Callable[..., None], int]] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor | Region | None, ...],
        numbers: tuple[float, ...],
        strides: tuple[int, ...],
        constants: tuple,
        warps: tuple[int, int, int | None],
        matrices: tuple[TmaMatrix, ...] = (),
    ) -> None:
        """Launch on the current stream of the first tensor's device, whichever device is current.

        Parameters
        ----------
        grid
            Programs along the three axes, each at least 1. Raises ValueError if they are too many to launch.
        tensors, numbers, strides, constants
            The kernel's arguments. A number is an int or a float.
        warps
            Triton's num_warps, num_stages and maxnreg (registers per thread).
        matrices
            Matrices of the first tensors, which the kernel takes as TMA descriptors (compute capability 9.0). They are
            16-byte aligned; their columns and blocks follow from the constants.
        """
        if max(grid) > MOST_PROGRAMS[1]:
            check_grid(grid)
        if self._names:
            constants = self._configs.get(constants) or self.one_constant(constants)
        device = tensors[0].get_device()  # type: ignore[union-attr]
        if device >= 0 and recording.current_device() != device:
            # Triton compiles for, and launches on, the current device.
            with torch.cuda.device(device):
                self(grid, tensors, numbers, strides, constants, warps, matrices)
            return
        # Raw addresses spare Triton the pointer lookup that a tensor costs. Address 0 and None look the same to Triton.
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        integers = (*numbers, *strides)
        key: tuple = device, constants, warps, *[None if tensor is None else tensor.dtype for tensor in tensors]
        # Triton specializes on addresses divisible by 16, strides of 1 or divisible by 16, and 64-bit integers. Usually
        # all are divisible by 16 and none needs 64 bits.
        if (unaligned := _or(pointers) & 15) or _or(strides, 0) & 15 or max(integers) > _INT32_MAX:
            key += (
                tuple([pointer % 16 == 0 for pointer in pointers]) if unaligned else None,
                tuple([2 if stride == 1 else stride % 16 == 0 for stride in strides]),
                tuple([value > _INT32_MAX for value in integers]) if max(integers) > _INT32_MAX else None,
            )
        code, n_tensors = self._code.get(key, (None, 0))
        if code is not None:
            stream = recording.current_stream(device) if device >= 0 else 0
            code(grid, stream, tensors, pointers, integers + constants, matrices)
        else:
            code, n_tensors = self._compile(grid, tensors, integers, constants, warps, matrices)
            self._code[key] = code, n_tensors
        if (recorder := recording.local.recorder) is not None:
            recorder.note_launch(code, grid, tensors, integers + constants, matrices, n_tensors)

    def one_constant(self, constants: tuple) -> tuple:
        """The constants as the kernel takes them: one `Constants` object per distinct set."""
        if not self._names or isinstance(constants[0], Constants):
            return constants
        config = (Constants(**dict(zip(self._names, constants, strict=True))),)
        return self._configs.setdefault(constants, config)

    def _compile(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor | Region | None, ...],
        integers: tuple[float, ...],
        constants: tuple,
        warps: tuple[int, int, int | None],
        matrices: tuple[TmaMatrix, ...],
    ) -> tuple[Callable[..., None], int]:
        """Compile and launch with Triton. Return the launcher of later calls, and how many tensor objects it needs."""
        options: dict[str, Any] = {"num_warps": warps[0], "num_stages": warps[1], "maxnreg": warps[2]}
        # Explicit, as Triton is about to change the default.
        options["enable_fp_fusion"] = True

        def by_interpreter(
            grid: tuple[int, int, int], _: int, tensors: Sequence, __: list, rest: tuple, ___: tuple
        ) -> None:
            with _disable_current_modes():
                self.function[grid](*[tensor_of(tensor) for tensor in tensors], *rest, **options)

        # What Triton does with the tensors is not part of the call, so dispatch modes must not see it.
        with _disable_current_modes():
            args: list[Any] = [tensor_of(tensor) for tensor in tensors]
            if self.follows and tables.architecture(args[0].device)[0] >= 9:
                options["launch_pdl"] = True
            args[: len(matrices)] = [matrix.of(tensor) for matrix, tensor in zip(matrices, args, strict=False)]
            compiled = self.function[grid](*args, *integers, *constants, **options)
        # Triton's interpreter does not compile.
        if compiled is None:
            return by_interpreter, len(tensors)
        return _code(compiled, [tensor.dtype for tensor in tensors[: len(matrices)]]), 0  # type: ignore[union-attr]


@triton.jit
def wait_for_previous_kernel():
    """Wait until the previous kernel has ended and its writes are visible.

    For programs started early by programmatic dependent launch (PDL), which hides the time from the end of one kernel
    to the start of the next. At 512 x 512 (32 x 180 tokens), where a training step is 25 launches, it takes 1.505 ms on
    an H200 instead of 1.541. Started even earlier (`gdc_launch_dependents`), while programs of the previous kernel
    still wait for an SM, they take the place of those: 1.528.
    """
    if cuda_capability_geq(9, 0):
        gdc_wait()


def kernel(
    function: Callable[..., None] | None = None,
    *,
    follows: bool = False,
    config: str = "",
    jit: Callable[..., Any] = triton.jit,
) -> Any:
    """The `Kernel` of a function under `jit`, specialized on its constants and strides, and on no other number.

    Tensors are named `..._ptr` and strides `stride_...`: divisibility by 16 decides how wide loads are. Specializing on
    any other number would recompile for new values of it.
    """
    if function is None:
        return functools.partial(kernel, follows=follows, config=config, jit=jit)
    numbers = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if not (parameter.name.endswith("_ptr") or parameter.name.startswith("stride_"))
        and "constexpr" not in str(parameter.annotation)
    ]
    return Kernel(jit(do_not_specialize=numbers)(function), follows, config)


def _code(compiled: Any, dtypes: list[torch.dtype]) -> Callable[..., None]:
    """Launcher of a compiled kernel: takes the grid, stream, tensors, addresses, other arguments, and `TmaMatrix`.

    It needs no tensors, only the `dtypes` of those that are described.

    It calls Triton's C launcher directly if the signature of that is known. Triton's Python wrapper looks for scratch
    memory and hooks, which are rare, and encodes TMA descriptors at every launch; here, they are cached, and allocators
    often return the address of an earlier tensor.
    """

    def by_triton(
        grid: tuple[int, int, int], stream: int, tensors: Sequence, pointers: list[int], rest: tuple, matrices: tuple
    ) -> None:
        inputs = zip(matrices, pointers, dtypes, strict=False)
        descriptors = [matrix.of(_At(pointer, dtype)) for matrix, pointer, dtype in inputs]
        compiled[grid](*descriptors, *pointers[len(descriptors) :], *rest, stream=stream)

    if (c_function := c_function_of(compiled)) is None:
        return by_triton
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    launch, fixed_args, takes_tuple = c_function
    metas = getattr(compiled.metadata, "tensordesc_meta", None) or ()
    hooks = knobs.runtime

    @functools.lru_cache(maxsize=256)
    def describe(index: int, address: int, rows: int, columns: int) -> tuple:
        utils = triton.runtime.driver.active.utils
        fill = utils.fill_tma_descriptor_tiled if takes_tuple else utils.fill_tma_descriptor
        meta, dtype = metas[index], TMA_DTYPE_DEVICE_TO_HOST[metas[index]["elem_type"]]
        block = tuple(meta["block_size"])
        description = fill(address, meta["swizzle"], meta["elem_size"], dtype, block, (rows, columns), (columns, 1), 0)
        return description, rows, columns, columns, 1

    def by_c(
        grid: tuple[int, int, int], stream: int, tensors: Sequence, pointers: list[int], rest: tuple, matrices: tuple
    ) -> None:
        # An unset hook is an empty chain of hooks.
        enter_hook, exit_hook = hooks.launch_enter_hook, hooks.launch_exit_hook
        if getattr(enter_hook, "calls", enter_hook) or getattr(exit_hook, "calls", exit_hook):
            by_triton(grid, stream, tensors, pointers, rest, matrices)
            return
        if matrices:
            descriptors = [describe(i, pointers[i], m.rows, m.columns) for i, m in enumerate(matrices)]
            pointers = [value for descriptor in descriptors for value in descriptor] + pointers[len(matrices) :]
        if takes_tuple:
            launch(*grid, stream, *fixed_args, (*pointers, *rest))
        else:
            launch(*grid, stream, *fixed_args, *pointers, *rest)

    return by_c


def c_function_of(compiled: Any) -> tuple[Callable[..., None], tuple, bool] | None:
    """Triton's C function that launches a compiled kernel, with what it takes, or None if only Triton can launch it.

    That is its arguments between the stream and those of the kernel, and whether it takes the latter as a tuple.
    """
    if not launcher_is_known():
        return None
    from triton.backends.nvidia.driver import CudaLauncher

    run = compiled.run
    if not isinstance(run, CudaLauncher) or run.global_scratch_size > 0 or run.profile_scratch_size > 0:
        return None
    # Triton's wrapper of its C function encodes TMA descriptors anew at every launch.
    has_descriptors = getattr(compiled.metadata, "tensordesc_meta", None)
    launch = inspect.getclosurevars(run.launch).nonlocals["launcher"] if has_descriptors else run.launch
    # Global and profiler scratch; the launch metadata for hooks, and the two hooks.
    no_scratch, no_hooks = (None, None), (None, None, None)
    function_and_flags = compiled.function, run.launch_cooperative_grid, run.launch_pdl
    if not hasattr(run, "kernel_signature"):
        return launch, (*function_and_flags, *no_scratch, compiled.packed_metadata, *no_hooks), False
    if getattr(run, "gsan_enabled", False):
        return None
    # Since 3.7 one C function launches all kernels, by a description of their arguments.
    described = run.arg_annotations, run.kernel_signature
    return launch, (*function_and_flags, compiled.packed_metadata, *no_hooks, *no_scratch, *described), True


class _At(NamedTuple):
    """The interface that Triton requires of a tensor to describe it."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


class Region:
    """Uninitialised memory that kernels accept like a contiguous tensor; a tensor takes the host far longer to create.

    Parameters
    ----------
    memory
        The contiguous tensor that it lies in, and keeps alive.
    address
        Address of its first byte.
    count, dtype
        Number and dtype of its elements.
    """

    __slots__ = ("_address", "_count", "data_ptr", "dtype", "memory")

    def __init__(self, memory: Tensor, address: int, count: int, dtype: torch.dtype) -> None:
        self.memory = memory
        self._address = address
        self._count = count
        self.dtype = dtype
        # A C method, as fast as that of a tensor.
        self.data_ptr = address.__int__

    def get_device(self) -> int:
        return self.memory.get_device()

    def view(self, dtype: torch.dtype) -> Region:
        """The same memory as elements of another dtype."""
        return Region(self.memory, self._address, self._count * self.dtype.itemsize // dtype.itemsize, dtype)

    def tensor(self) -> Tensor:
        """The same memory as a tensor, for code that reads it."""
        start = self._address - self.memory.data_ptr()
        memory = self.memory.view(-1).view(torch.uint8)
        return memory[start : start + self._count * self.dtype.itemsize].view(self.dtype)


def tensor_of(value: Tensor | Region | None) -> Tensor | None:
    return value.tensor() if isinstance(value, Region) else value


class Scratch:
    """Allocate regions in memory that nobody reads until a later launch fills it, or else in memory of their own.

    Parameters
    ----------
    memory
        A contiguous tensor to place them in, one after the other, while it has room; None: each is allocated.
    start, size
        The bytes of it that may be used; None: all from `start` on.
    """

    __slots__ = ("_end", "memory", "_next")

    def __init__(self, memory: Tensor | None, start: int = 0, size: int | None = None) -> None:
        self.memory = memory
        if memory is None:
            self._next, self._end = 0, -1
        else:
            begin = memory.data_ptr() + start
            # Regions are 16-byte aligned, as launches prefer.
            self._next = begin + 15 & -16
            self._end = begin + (memory.nbytes - start if size is None else size)

    def fork(self) -> Scratch:
        """A scratch over the same free memory, for regions that are dead before this one reuses it."""
        fork = Scratch(None)
        fork.memory, fork._next, fork._end = self.memory, self._next, self._end
        return fork

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> Region:
        """An uninitialised region of `count` elements."""
        address = self._next
        end = address + count * dtype.itemsize
        if end > self._end:
            memory = torch.empty(count, dtype=dtype, device=device)
            return Region(memory, memory.data_ptr(), count, dtype)
        self._next = end + 15 & -16
        return Region(self.memory, address, count, dtype)  # type: ignore[arg-type]
