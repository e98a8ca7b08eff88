"""A new shape costs no compilation, and a launch costs no more than calling what Triton exposes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.nvidia.driver import CudaLauncher
from triton.experimental.gluon import language as gl

from pylate_flash.kernels import forward, launch, recording, tables
from pylate_flash.kernels.forward import common, hopper, single, stacked
from pylate_flash.kernels.launch import Kernel, Scratch, TmaMatrix
from pylate_flash.problem import Options, Tensors, problem_of


class Compiled:
    """A compiled kernel that records its launches: by Triton's runner, or directly by Triton's C function."""

    function, packed_metadata = 70, (4, 1, 0)

    def __init__(self, scratch: int = 0, takes_tuple: bool = False) -> None:
        self.launches: list[tuple] = []
        self.metadata = SimpleNamespace(tensordesc_meta=None)
        self.run: Any = CudaLauncher.__new__(CudaLauncher)
        self.run.launch = lambda *arguments: self.launches.append(("C", *arguments))
        self.run.global_scratch_size, self.run.profile_scratch_size = scratch, 0
        self.run.launch_cooperative_grid, self.run.launch_pdl = False, True
        if takes_tuple:
            self.run.arg_annotations, self.run.kernel_signature = ["annotation"], b"signature"

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments, stream: self.launches.append(("Triton", grid, stream, *arguments))

    @property
    def ways(self) -> list[str]:
        return [arguments[0] for arguments in self.launches]

    @property
    def streams(self) -> list[int]:
        return [arguments[4] if arguments[0] == "C" else arguments[2] for arguments in self.launches]


class Function:
    """A stub of a Triton function, which records what it is compiled for."""

    def __init__(self, compiled: Compiled | None = None, interpreted: bool = False) -> None:
        self.result = None if interpreted else compiled or Compiled()
        self.compilations: list[tuple] = []
        self.options: dict = {}

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Compiled | None]:
        def compile(*arguments: object, **options: object) -> Compiled | None:
            self.compilations.append((grid, *arguments))
            self.options = options
            return self.result

        return compile


class Address(SimpleNamespace):
    """The part of a tensor's interface that a launch uses."""

    def __init__(self, address: int = 1 << 20, dtype: torch.dtype = torch.float32, device: int = 0) -> None:
        super().__init__(address=address, dtype=dtype, device=torch.device("cuda", device))

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return self.device.index


class Devices:
    """A stub of CUDA's current device."""

    def __init__(self) -> None:
        self.current = 0

    @contextmanager
    def made_current(self, device: int) -> Iterator[None]:
        before, self.current = self.current, device
        try:
            yield
        finally:
            self.current = before


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    """Stubs of devices and streams, which a CPU does not have."""
    devices = Devices()
    monkeypatch.setattr(recording, "current_stream", lambda device: 900 + device)
    monkeypatch.setattr(recording, "current_device", lambda: devices.current)
    monkeypatch.setattr(torch.cuda, "device", devices.made_current)
    return devices


def call(kernel: Kernel, *tensors: object, **changes: object) -> None:
    arguments = {
        "grid": (5, 6, 7), "numbers": (11, 0.5), "strides": (1, 16), "constants": ("constant", 64),
        "warps": (4, 1, None),
    } | changes  # fmt: skip
    kernel(tensors=tensors or (torch.zeros(4), None, torch.zeros(8)), **arguments)  # type: ignore[arg-type]


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Function]:
    """Stubs in place of the forward kernels, on a Hopper GPU."""
    monkeypatch.setattr(tables, "architecture", lambda device: (9, 132))
    stubs = {}
    for module, name in ((stacked, "_stacked"), (single, "_single"), (hopper, "_hopper"), (common, "_sums")):
        stubs[name] = Function()
        monkeypatch.setattr(module, f"{name}_kernel", Kernel(stubs[name]))
    return stubs


def score(shape: tuple[int, int, int, int]) -> None:
    n_queries, n_documents, query_length, document_length = shape
    queries = torch.empty(n_queries, query_length, 128, dtype=torch.bfloat16)
    documents = torch.empty(n_documents, document_length, 128, dtype=torch.bfloat16)
    tensors = Tensors(queries, documents)
    forward.maxsim_forward(problem_of(tensors, Options()), tensors)


def counts_of(functions: dict[str, Function]) -> dict[str, int]:
    return {name: len(function.compilations) for name, function in functions.items()}


def test_fifty_random_shapes_take_few_compilations(functions) -> None:
    rng = random.Random(0)
    for _ in range(50):
        score((rng.randint(1, 64), rng.randint(1, 40), rng.randint(1, 300), rng.randint(1, 100)))
    counts = counts_of(functions)
    # The groups of `padded_query_length`, with the three widths of a document's last product, or with the two tiles for
    # few rows; the three tiles for one query.
    assert counts["_hopper"] <= 18
    assert counts["_stacked"] <= 12
    assert counts["_single"] <= 3
    assert counts["_sums"] == 1
    assert sum(counts.values()) <= 21


@pytest.mark.parametrize(
    ("n", "length", "another", "longest"), [(10, 180, 114, 1000), (10, 50, 36, 64), (2000, 180, 40, 500)]
)
def test_a_new_batch_or_document_length_takes_none(functions, n: int, length: int, another: int, longest: int) -> None:
    """Few documents are scored one by one, and many as a stream."""
    score((16, n, 32, length))
    before = counts_of(functions)
    for shape in ((17, n, 32, length), (16, 3 * n, 32, length), (40, n // 2, 31, longest), (16, n, 28, length)):
        score(shape)
    score((16, n, 32, another))
    assert counts_of(functions) == before
    assert sum(before.values()) == 1


def packed_score(n_queries: int, lengths: list[int]) -> None:
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    queries = torch.empty(n_queries, 32, 128, dtype=torch.bfloat16)
    documents = torch.empty(sum(lengths), 128, dtype=torch.bfloat16)
    tensors = Tensors(queries, documents, documents_cu_seqlens=bounds)
    forward.maxsim_forward(problem_of(tensors, Options(max_document_length=max(lengths))), tensors)


@pytest.mark.parametrize(
    ("lengths", "others"),
    [
        ([20, 300], ([65], [300] * 100, [31, 5, 0, 260], [65] * 5000)),
        ([20, 70], ([1], [60] * 100, [31, 5, 0, 160], [1] * 5000)),
    ],
)
def test_new_numbers_of_packed_tokens_take_none(functions, lengths: list[int], others: tuple[list[int], ...]) -> None:
    """Documents that are short on average are served by a kernel of their own."""
    packed_score(16, lengths)
    before = counts_of(functions)
    for n_queries, some in zip((16, 17, 100, 16), others, strict=True):
        packed_score(n_queries, some)
    assert counts_of(functions) == before
    assert sum(before.values()) == 1


@pytest.mark.parametrize("grid", [(2**31 - 1, 1, 1), (2**31 - 1, 65535, 65535)])
def test_a_launch_of_the_most_programs(grid: tuple[int, int, int]) -> None:
    function = Function()
    call(Kernel(function), grid=grid)
    assert [compilation[0] for compilation in function.compilations] == [grid]


@pytest.mark.parametrize("grid", [(2**31, 1, 1), (1, 65536, 1), (1, 1, 65536)])
def test_more_programs_are_an_error_before_anything_is_compiled(grid: tuple[int, int, int]) -> None:
    function = Function()
    with pytest.raises(ValueError, match=f"queries and documents .* at most {min(2**31 - 1, max(grid) - 1)} programs"):
        call(Kernel(function), grid=grid)
    assert not function.compilations


def two(first: Address | None = None, second: Address | None = None) -> dict[str, tuple]:
    return {"tensors": (first or Address(), second or Address())}


BASE = 1 << 20
# Calls, and how often a kernel is compiled for them.
CALLS: dict[str, tuple[list[dict], int]] = {
    "grids": ([{}, {"grid": (1, 2, 3)}], 1),
    "numbers": ([{}, {"numbers": (12, -3.5)}, {"numbers": (1, 16.0)}, {"numbers": (2**31 - 1, 0.5)}], 1),
    "multiples of 16": ([{}, {"strides": (1, 2**31 - 16)}, {"strides": (1, 0)}], 1),
    "strides that are none": ([{"strides": (stride, 16)} for stride in (17, 24, 2, 1000, 2**31 - 1)], 1),
    "a stride that is not 1": ([{}, {"strides": (2, 16)}], 2),
    "a stride that is 1": ([{}, {"strides": (1, 1)}], 2),
    "a stride that is no multiple of 16": ([{}, {"strides": (1, 24)}], 2),
    "a stride that is 1 more than a multiple of 16": ([{}, {"strides": (17, 16)}], 2),
    "a stride of 64 bits": ([{}, {"strides": (1, 2**31)}], 2),
    "numbers of 64 bits": (
        [{"numbers": numbers} for numbers in ((2**31, 1), (1, 2**31), (2**31, 2**31), (2**40, 7), (1, 7))], 4
    ),
    "constants": ([{}, {"constants": ("constant", 128)}, {"constants": ("other", 64)}], 3),
    "warps": ([{}, *({"warps": warps} for warps in ((8, 1, None), (4, 2, None), (4, 1, 128)))], 4),
    "addresses": ([two(Address(address), Address(address)) for address in (BASE, 2 * BASE, BASE + 16)], 1),
    "which tensor is not aligned": (
        [two(Address(BASE + first), Address(BASE + second)) for first, second in ((0, 8), (8, 0), (8, 8), (24, 40))], 3
    ),
    "types": (
        [two(Address(dtype=dtype)) for dtype in (torch.float32, torch.int32, torch.bool)]
        + [two(None, Address(dtype=torch.int32))],
        4,
    ),
    "no tensor": ([two(), {"tensors": (Address(), None)}], 2),
    "devices": ([two(*[Address(device=device)] * 2) for device in (0, 1)], 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_code_depends_on(name: str) -> None:
    calls, count = CALLS[name]
    function = Function()
    kernel = Kernel(function)
    for _ in range(2):
        for changes in calls:
            call(kernel, *changes.get("tensors", ()), **{key: changes[key] for key in changes.keys() - {"tensors"}})
    assert len(function.compilations) == count
    assert function.result is not None
    if name == "devices":
        assert function.result.streams == [900, 901], "the stream is that of the device"


def test_code_does_not_depend_on_the_size_of_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its block does matter; the kernel gets it as constants."""
    monkeypatch.setattr(launch, "launcher_is_known", lambda: False)
    function = Function()
    kernel = Kernel(function)
    matrix = torch.zeros(300, 768, dtype=torch.bfloat16)

    def described(rows: int, columns: int, block: tuple[int, int]) -> None:
        layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
        call(
            kernel, matrix, torch.zeros(8), constants=block, matrices=(TmaMatrix(rows, columns, block, layout),)
        )  # fmt: skip

    for _ in range(2):
        described(300, 768, (128, 64))
        described(100, 768, (128, 64))
        described(300, 512, (128, 64))
    assert len(function.compilations) == 1
    described(300, 768, (64, 64))
    assert len(function.compilations) == 2


def test_constants_are_one_argument() -> None:
    """Equal constants are the same object; for other constants, other code is compiled."""
    function = Function()
    kernel = Kernel(function, config="name size")
    for _ in range(2):
        call(kernel)
        call(kernel, constants=("constant", 128))
    (*_, first), (*_, second) = function.compilations
    assert (first.name.value, first.size.value, second.size.value) == ("constant", 64, 128)
    assert (first, second) == ("{'name': 'constant', 'size': 64}", "{'name': 'constant', 'size': 128}")
    with pytest.raises(ValueError, match="zip"):
        call(kernel, constants=("constant",))


def test_the_interpreter_compiles_nothing() -> None:
    function = Function(interpreted=True)
    kernel = Kernel(function)
    for _ in range(2):
        call(kernel)
    assert len(function.compilations) == 2, "each of them was a launch"


@pytest.mark.parametrize(("major", "follows", "early"), [(8, True, False), (9, True, True), (9, False, False)])
def test_a_kernel_that_waits_starts_early_where_the_device_can(
    major: int, follows: bool, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "architecture", lambda device: (major, 132))
    function = Function()
    call(Kernel(function, follows), warps=(8, 3, 128))
    assert function.options.get("launch_pdl", False) is early
    assert {name: function.options[name] for name in ("num_warps", "num_stages", "maxnreg")} == {
        "num_warps": 8, "num_stages": 3, "maxnreg": 128,
    }  # fmt: skip


@pytest.mark.parametrize("device", [0, 1])
def test_a_kernel_runs_on_the_device_of_its_tensors(device: int, devices: Devices) -> None:
    current_devices = []

    class Noting(Function):
        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Compiled | None]:
            current_devices.append(devices.current)
            return super().__getitem__(grid)

    compiled = Compiled()
    compiled.run.launch = lambda *arguments: current_devices.append(devices.current)
    kernel = Kernel(Noting(compiled))
    for current in (1, 0, 1):
        devices.current = current
        call(kernel, Address(device=device))
        assert devices.current == current, "as it was"
    assert current_devices == [device] * 3


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make tensors on the CPU report device 3."""
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 3)


both_c_functions = pytest.mark.parametrize("takes_tuple", [False, True], ids=["3.6", "3.7"])


def c_launch(takes_tuple: bool, grid: tuple[int, int, int], *kernel_arguments: object) -> tuple:
    """A launch by Triton's C function, as `Compiled` records it.

    Between the grid and the kernel's arguments are the stream, the function and two flags, and then, in 3.6, two
    scratch buffers, metadata of the kernel and the launch and two hooks. Since 3.7 scratch buffers come after hooks,
    and after them the description of the kernel's arguments.
    """
    if not takes_tuple:
        return "C", *grid, 903, 70, False, True, None, None, (4, 1, 0), None, None, None, *kernel_arguments
    described = ["annotation"], b"signature", kernel_arguments
    return "C", *grid, 903, 70, False, True, (4, 1, 0), None, None, None, None, None, *described


@both_c_functions
def test_a_kernel_that_was_launched_is_launched_by_the_c_function(takes_tuple: bool, on_a_gpu: None) -> None:
    compiled, tensors = Compiled(takes_tuple=takes_tuple), (torch.zeros(4), None, torch.zeros(8))
    function = Function(compiled)
    kernel = Kernel(function)
    call(kernel, *tensors)
    rest = 11, 0.5, 1, 16, "constant", 64
    ((grid, *arguments),) = function.compilations
    assert grid == (5, 6, 7)
    assert all(result is inputs for result, inputs in zip(arguments, tensors, strict=False))
    assert tuple(arguments[3:]) == rest
    assert compiled.launches == [], "the first launch is the compiler's"
    call(kernel, *tensors)
    pointers = (tensors[0].data_ptr(), 0, tensors[2].data_ptr())
    assert compiled.launches == [c_launch(takes_tuple, (5, 6, 7), *pointers, *rest)]
    # No argument of an earlier launch is used again.
    new_tensors = torch.zeros(4), None, torch.zeros(8)
    call(kernel, *new_tensors, grid=(2, 1, 1), numbers=(12, 0.25), strides=(1, 32))
    pointers = (new_tensors[0].data_ptr(), 0, new_tensors[2].data_ptr())
    assert compiled.launches[1:] == [c_launch(takes_tuple, (2, 1, 1), *pointers, 12, 0.25, 1, 32, "constant", 64)]
    # Triton specializes on addresses that are multiples of 16.
    call(kernel, torch.zeros(5)[1:], *tensors[1:])
    assert len(function.compilations) == 2
    call(kernel, torch.zeros(5)[1:], *tensors[1:])
    call(kernel, *tensors)
    assert compiled.ways == ["C"] * 4


@both_c_functions
def test_a_matrix_is_described_once_for_an_address(
    takes_tuple: bool, on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's compiler gets a TensorDescriptor, and the C function what Triton makes of it."""
    compiled, filled = Compiled(takes_tuple=takes_tuple), []
    function = Function(compiled)
    kernel = Kernel(function)
    launcher = compiled.run.launch
    compiled.run.launch = lambda *arguments: launcher(*arguments)
    meta = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [128, 64]}
    compiled.metadata = SimpleNamespace(tensordesc_meta=[meta])
    name = "fill_tma_descriptor_tiled" if takes_tuple else "fill_tma_descriptor"
    utils = SimpleNamespace(**{name: lambda *arguments: filled.append(arguments) or f"map {len(filled)}"})
    monkeypatch.setattr(launch.triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
    layout = gl.NVMMASharedLayout.get_default_for([128, 64], gl.bfloat16)
    tensors = [torch.zeros(300, 768, dtype=torch.bfloat16) for _ in range(2)]
    other = torch.zeros(8)
    for tensor, rows in ((tensors[0], 300), (tensors[0], 300), (tensors[1], 300), (tensors[0], 300), (tensors[0], 200)):
        call(kernel, tensor, other, matrices=(TmaMatrix(rows, 768, (128, 64), layout),))
    first = function.compilations[0][1]
    assert (first.base is tensors[0], first.shape, first.strides, first.layout) == (True, [300, 768], [768, 1], layout)
    assert [arguments[0] for arguments in filled] == [tensors[i].data_ptr() for i in (0, 1, 0)]
    for arguments, rows in zip(filled, (300, 300, 200), strict=True):
        assert arguments[1:3] + arguments[4:] == (3, 2, (128, 64), (rows, 768), (768, 1), 0)
    rest = (768, 768, 1, other.data_ptr(), 11, 0.5, 1, 16, "constant", 64)
    expected = [("map 1", 300), ("map 2", 300), ("map 1", 300), ("map 3", 200)]
    assert compiled.launches == [c_launch(takes_tuple, (5, 6, 7), *described, *rest) for described in expected]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_heard(hook: str, on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With hooks, Triton's own launcher runs, with the same arguments."""
    from triton.knobs import HookChain

    compiled, tensors, chain = Compiled(), (torch.zeros(4), torch.zeros(4)), HookChain()
    kernel = Kernel(Function(compiled))
    for _ in range(3):
        call(kernel, *tensors)
    assert compiled.ways == ["C"] * 2
    monkeypatch.setattr(launch.knobs.runtime, hook, chain)
    call(kernel, *tensors)
    chain.add(print)
    call(kernel, *tensors)
    assert compiled.ways[2:] == ["C", "Triton"]
    pointers = [tensor.data_ptr() for tensor in tensors]
    assert compiled.launches[3] == ("Triton", (5, 6, 7), 903, *pointers, 11, 0.5, 1, 16, "constant", 64)
    chain.remove(print)
    call(kernel, *tensors)
    monkeypatch.setattr(launch.knobs.runtime, hook, print)
    call(kernel, *tensors)
    monkeypatch.setattr(launch.knobs.runtime, hook, None)
    call(kernel, *tensors)
    assert compiled.ways[4:] == ["C", "Triton", "C"]


def test_hooks_hear_of_matrices(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Compiled()
    monkeypatch.setattr(launch, "launcher_is_known", lambda: False)
    kernel = Kernel(Function(compiled))
    matrix, other = torch.zeros(300, 768, dtype=torch.bfloat16), torch.zeros(8)
    layout = gl.NVMMASharedLayout.get_default_for([128, 64], gl.bfloat16)
    for _ in range(2):
        call(kernel, matrix, other, matrices=(TmaMatrix(300, 768, (128, 64), layout),))
    ((way, _, stream, first, *rest),) = compiled.launches
    assert (way, stream, first.base.data_ptr(), first.shape) == ("Triton", 903, matrix.data_ptr(), [300, 768])
    assert rest == [other.data_ptr(), 11, 0.5, 1, 16, "constant", 64]


def test_without_its_c_function_triton_launches_by_addresses(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address saves looking up a tensor's memory; None is passed as address 0."""
    monkeypatch.setattr(launch, "launcher_is_known", lambda: False)
    compiled = Compiled()
    kernel, tensors = Kernel(Function(compiled)), (torch.zeros(4), None, torch.zeros(8))
    for _ in range(2):
        call(kernel, *tensors)
    pointers = (tensors[0].data_ptr(), 0, tensors[2].data_ptr())  # type: ignore[union-attr]
    assert compiled.launches == [("Triton", (5, 6, 7), 903, *pointers, 11, 0.5, 1, 16, "constant", 64)]


@pytest.mark.parametrize("why", ["scratch", "profile", "version", "backend", "sanitizer"])
def test_what_only_triton_can_launch_it_launches(why: str, on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Compiled(scratch=128 if why == "scratch" else 0, takes_tuple=why == "sanitizer")
    tensors = torch.zeros(4), torch.zeros(4)
    if why == "sanitizer":
        compiled.run.gsan_enabled = True
    if why == "profile":
        compiled.run.profile_scratch_size = 8
    if why == "version":
        monkeypatch.setattr(launch, "launcher_is_known", lambda: False)
    if why == "backend":
        compiled.run = compiled.run.launch
    kernel = Kernel(Function(compiled))
    for _ in range(4):
        call(kernel, *tensors)
    assert compiled.ways == ["Triton"] * 3


CPU = torch.device("cpu")


def test_scratch_lies_in_memory_as_far_as_it_reaches() -> None:
    """Its regions begin at multiples of 16 bytes."""
    memory = torch.zeros(101, dtype=torch.bfloat16)[1:]
    scratch, begin = Scratch(memory), memory.data_ptr() + 14
    requests = (3, torch.uint8), (5, torch.int64), (28, torch.float32)
    regions = [scratch.empty(count, dtype, CPU) for count, dtype in requests]
    tensors = [region.tensor() for region in regions]
    for group in (regions, tensors):
        assert [t.data_ptr() - begin for t in group] == [0, 16, 64]
        assert [t.dtype for t in group] == [dtype for _, dtype in requests]
    assert [len(t) for t in tensors] == [count for count, _ in requests]
    # 10 of the 200 bytes are left.
    beyond = scratch.empty(3, torch.float32, CPU)
    assert not begin <= beyond.data_ptr() < begin + 200
    assert scratch.empty(2, torch.float32, CPU).data_ptr() - begin == 176
    for tensor in (*tensors, beyond.tensor()):
        tensor.fill_(1)
    assert memory.view(torch.uint8)[14:17].tolist() == [1, 1, 1]
    halves = regions[2].view(torch.float16).tensor()
    assert (halves.data_ptr(), len(halves), halves.dtype) == (regions[2].data_ptr(), 56, torch.float16)


def test_scratch_lies_in_a_part_of_a_tensor_and_gives_it_out_twice() -> None:
    memory = torch.zeros(100, dtype=torch.int32)
    scratch = Scratch(memory, 40, 100)
    first, fork = scratch.empty(1, torch.int32, CPU), scratch.fork()
    assert [s.empty(4, torch.int32, CPU).data_ptr() - memory.data_ptr() for s in (scratch, fork)] == [64, 64]
    assert first.data_ptr() - memory.data_ptr() == 48
    assert scratch.empty(15, torch.int32, CPU).data_ptr() - memory.data_ptr() == 80
    assert not 0 <= fork.empty(16, torch.int32, CPU).data_ptr() - memory.data_ptr() < 400


def test_scratch_without_memory_is_of_its_own() -> None:
    scratch = Scratch(None)
    first, second = scratch.empty(3, torch.int16, CPU), scratch.empty(0, torch.float32, CPU)
    assert (first.tensor().shape, first.dtype) == ((3,), torch.int16)
    assert (second.tensor().shape, second.dtype) == ((0,), torch.float32)
