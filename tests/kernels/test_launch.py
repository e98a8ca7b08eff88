"""A shape that was never seen costs no compilation, and a launch costs no more than Triton's C function."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from triton.backends.nvidia.driver import CudaLauncher
from triton.experimental.gluon import language as gl

from pylate_flash.kernels import forward, launch, overlap
from pylate_flash.kernels.launch import Launcher


class Compiled(dict):
    """A compiled kernel, by grid."""

    def __missing__(self, grid):
        return lambda *pointers: None


class Kernel:
    """Stands for a Triton function: what it is launched as, a `Launcher` compiles."""

    compiled: object = None
    arguments: tuple = ()
    options: dict = {}

    def __getitem__(self, grid):
        def compile(*arguments, **options):
            self.arguments, self.options = arguments, options
            return Compiled() if self.compiled is None else self.compiled

        return compile


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(forward, "architecture", lambda device: (9, 132))
    made = {name: Launcher(Kernel()) for name in ("_stacked", "_single", "_hopper")}
    monkeypatch.setattr(forward, "_stacked", made["_stacked"])
    monkeypatch.setattr(forward, "_single", made["_single"])
    monkeypatch.setattr(forward, "_hopper", lambda: made["_hopper"])
    forward.bound_maxsim.cache_clear()
    forward._bound_stacked.cache_clear()
    forward._bound_single.cache_clear()
    yield made
    forward.bound_maxsim.cache_clear()
    forward._bound_stacked.cache_clear()
    forward._bound_single.cache_clear()


def score(shape: tuple[int, int, int, int]) -> None:
    n_queries, n_documents, query_length, document_length = shape
    queries = torch.empty(n_queries, query_length, 128, dtype=torch.bfloat16)
    documents = torch.empty(1, n_documents, document_length, 128, dtype=torch.bfloat16)
    forward.maxsim_forward(queries, documents, None, None, False, False, False, "ieee")


def test_fifty_random_shapes_take_few_compilations(launchers) -> None:
    drawn = random.Random(0)
    for _ in range(50):
        score((drawn.randint(1, 64), drawn.randint(1, 40), drawn.randint(1, 300), drawn.randint(1, 100)))
    counts = {name: len(launcher._compiled) for name, launcher in launchers.items()}
    # The groups of `_padded_query_length`; those with the two tiles for few rows; the three tiles for one query.
    assert counts["_hopper"] <= 6
    assert counts["_stacked"] <= 12
    assert counts["_single"] <= 3
    assert sum(counts.values()) <= 10


def test_a_new_batch_or_document_length_takes_none(launchers) -> None:
    score((16, 10, 32, 180))
    before = {name: len(launcher._compiled) for name, launcher in launchers.items()}
    for shape in ((17, 10, 32, 180), (16, 33, 32, 180), (16, 10, 32, 7), (40, 1, 31, 1000), (16, 10, 17, 180)):
        score(shape)
    assert {name: len(launcher._compiled) for name, launcher in launchers.items()} == before


class Launched:
    """A compiled kernel that notes what launches it, and with what: Triton's runner, or at once Triton's C function."""

    function, packed_metadata = 70, (4, 1, 0)

    def __init__(self, scratch: int = 0) -> None:
        self.launches: list[tuple] = []
        self.run = CudaLauncher.__new__(CudaLauncher)
        self.run.launch = lambda *arguments: self.launches.append(("C", *arguments))
        self.run.global_scratch_size, self.run.profile_scratch_size = scratch, 0
        self.run.launch_cooperative_grid, self.run.launch_pdl = False, True

    def __getitem__(self, grid):
        return lambda *arguments: self.launches.append(("Triton", *arguments))

    def bind(self, **options) -> launch.Launch:
        self.kernel = Kernel()
        self.kernel.compiled = self
        return Launcher(self.kernel).bind(
            (5, 6, 7), (11,), (1, 16), ("constant",), num_warps=4, num_stages=1, **options
        )

    @property
    def ways(self) -> list[str]:
        return [arguments[0] for arguments in self.launches]


@pytest.mark.parametrize(("major", "follows", "early"), [(8, True, False), (9, True, True), (9, False, False)])
def test_a_kernel_that_waits_starts_early_where_the_device_can(
    major: int, follows: bool, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "architecture", lambda device: (major, 132))
    kernel = Kernel()
    Launcher(kernel, follows).bind((1, 1, 1), (), (), (), num_warps=1, num_stages=1)(torch.zeros(4))
    assert kernel.options.get("launch_pdl", False) is early


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU count as those of device 3."""
    direct = launch._direct
    monkeypatch.setattr(launch, "_current_stream", lambda device: 900 + device)
    monkeypatch.setattr(
        launch, "_direct", lambda compiled, grid, rest, _, *more: direct(compiled, grid, rest, 3, *more)
    )


def test_a_kernel_that_was_launched_is_launched_by_the_c_function(on_a_gpu: None) -> None:
    compiled, tensors = Launched(), (torch.zeros(4), None, torch.zeros(8))
    launched = compiled.bind()
    launched(*tensors)
    assert compiled.launches == [], "the first launch is the compiler's"
    launched(*tensors)
    pointers = (tensors[0].data_ptr(), 0, tensors[2].data_ptr())
    # Triton 3.6: grid, stream, function, two flags, two scratches, metadata of the kernel and the launch, two hooks.
    fixed = (5, 6, 7, 903, 70, False, True, None, None, (4, 1, 0), None, None, None)
    assert compiled.launches == [("C", *fixed, *pointers, 11, 1, 16, "constant")]
    # Triton specialises on addresses that are multiples of 16.
    launched(torch.zeros(5)[1:], *tensors[1:])
    launched(torch.zeros(5)[1:], *tensors[1:])
    assert compiled.ways == ["C", "Triton"], "the compiler, and then a runner, launch for other addresses"
    launched(*tensors)
    assert compiled.ways == ["C", "Triton", "C"]


def test_a_matrix_is_described_once_for_an_address(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """To Triton it goes as Triton's own kind of argument, and to the C function as what Triton makes of that."""
    compiled, made = Launched(), []
    launcher = compiled.run.launch
    compiled.run.launch = lambda *arguments: launcher(*arguments)
    meta = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [128, 64]}
    compiled.metadata = SimpleNamespace(tensordesc_meta=[meta])
    utils = SimpleNamespace(fill_tma_descriptor=lambda *arguments: made.append(arguments) or f"map {len(made)}")
    monkeypatch.setattr(launch.triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
    layout = gl.NVMMASharedLayout.get_default_for([128, 64], gl.bfloat16)
    launched = compiled.bind(described=(launch.Described(300, 768, (128, 64), layout),))
    tensors = [torch.zeros(300, 768, dtype=torch.bfloat16) for _ in range(2)]
    other = torch.zeros(8)
    for tensor in (tensors[0], tensors[0], tensors[1], tensors[0]):
        launched(tensor, other)
    first = compiled.kernel.arguments[0]
    assert (first.base is tensors[0], first.shape, first.strides, first.layout) == (True, [300, 768], [768, 1], layout)
    assert [arguments[0] for arguments in made] == [tensors[0].data_ptr(), tensors[1].data_ptr()]
    assert made[0][1:3] + made[0][4:] == (3, 2, (128, 64), (300, 768), (768, 1), 0)
    sizes = (300, 768, 768, 1, other.data_ptr(), 11, 1, 16, "constant")
    assert [call[14:] for call in compiled.launches] == [(f"map {i}", *sizes) for i in (1, 2, 1)]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_are_heard(hook: str, on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.knobs import HookChain

    compiled, tensors, chain = Launched(), (torch.zeros(4), torch.zeros(4)), HookChain()
    launched, sequence = compiled.bind(), launch.Sequence(2)
    sequence.add(launched, 0, 1)
    for call in (launched, launched, sequence, sequence):
        call(*tensors)
    assert compiled.ways == ["C"] * 3
    monkeypatch.setattr(launch.knobs.runtime, hook, chain)
    chain.add(print)
    launched(*tensors)
    sequence(*tensors)
    assert compiled.ways[3:] == ["Triton", "Triton"]
    chain.remove(print)
    launched(*tensors)
    sequence(*tensors)
    assert compiled.ways[5:] == ["C", "C"]
    monkeypatch.setattr(launch.knobs.runtime, hook, print)
    launched(*tensors)
    monkeypatch.setattr(launch.knobs.runtime, hook, None)
    launched(*tensors)
    assert compiled.ways[7:] == ["Triton", "C"]


@pytest.mark.parametrize("why", ["scratch", "version", "backend"])
def test_what_only_triton_can_launch_it_launches(why: str, on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, tensors = Launched(scratch=128 if why == "scratch" else 0), (torch.zeros(4), torch.zeros(4))
    if why == "version":
        monkeypatch.setattr(launch, "_KNOWN_TRITON", False)
    if why == "backend":
        compiled.run = compiled.run.launch
    launched, sequence = compiled.bind(), launch.Sequence(2)
    sequence.add(launched, 0, 1)
    for call in (launched, launched, sequence, sequence):
        call(*tensors)
    assert compiled.ways == ["Triton"] * 3


def test_a_sequence_has_one_scratch(on_a_gpu: None) -> None:
    """The launches find the same regions, of it and of a tensor, as tensors at first and then as addresses."""
    compiled = Launched(), Launched()
    sequence = launch.Sequence(2)
    first = sequence.region(3, torch.int32)
    second = sequence.region(300, torch.uint16)
    shared = sequence.region(8, torch.float32, at=512)
    lent = sequence.region(2, torch.int16, at=256, of=0)
    # A kernel is known by the types of its tensors.
    sequence.add(compiled[0].bind(), 0, first, second)
    sequence.add(compiled[1].bind(), second, 1, shared, lent)
    tensor = torch.zeros(90)
    for _ in range(3):
        sequence(tensor, None)
    assert [kernel.ways for kernel in compiled] == [["C", "C"]] * 2
    for before, after in zip(compiled[0].launches, compiled[1].launches, strict=True):
        scratch = before[15]
        assert before[14:17] == (tensor.data_ptr(), scratch, scratch + 256)
        assert after[14:18] == (scratch + 256, 0, scratch + 512, tensor.data_ptr() + 256)


def test_a_sequence_keeps_regions_in_place_of_tensors(on_a_gpu: None) -> None:
    compiled = Launched(), Launched()
    sequence = launch.Sequence(4, first=1)
    sequence.keep(0, 3, torch.int32)
    sequence.same(3, 0)
    sequence.keep(2, 100, torch.int32)
    other = sequence.region(300, torch.uint16)
    again = sequence.region(8, torch.float32, at=256)
    sequence.add(compiled[0].bind(), 0, 1, 2)
    sequence.add(compiled[1].bind(), 3, other, again)
    tensor = torch.zeros(90)
    for _ in range(3):
        sequence(None, tensor, None, None)
    assert [kernel.ways for kernel in compiled] == [["C", "C"]] * 2
    for before, after in zip(compiled[0].launches, compiled[1].launches, strict=True):
        kept = before[14]
        assert before[15:17] == (tensor.data_ptr(), kept + 256)
        assert after[14:17] == (kept, kept + 768, kept + 1024)


@pytest.mark.parametrize("lent_by", [2, 4])
def test_a_sequence_allocates_while_its_first_kernel_runs(lent_by: int, on_a_gpu: None) -> None:
    """What is allocated may share a slot, and may lend its memory, by either name."""
    compiled, made = (Launched(), Launched()), []

    def allocate() -> tuple[torch.Tensor | None, ...]:
        made.append((torch.zeros(70), None, [len(kernel.launches) for kernel in compiled]))
        return made[-1][:2]

    sequence = launch.Sequence(6, first=1, allocate=allocate)
    sequence.same(2, 4)
    sequence.same(3, 5)
    lent = sequence.region(8, torch.float32, at=128, of=lent_by)
    scratch = sequence.region(8, torch.float32)
    sequence.add(compiled[0].bind(), 1, scratch)
    sequence.add(compiled[1].bind(), scratch, 2, 3, 4, lent)
    tensor = torch.zeros(90)
    for _ in range(3):
        returned = sequence(None, tensor, None, None)
        assert returned[0] is made[-1][0]
        assert returned[1] is None
    assert [kernel.ways for kernel in compiled] == [["C", "C"]] * 2
    assert [launches for _, _, launches in made] == [[0, 0], [1, 0], [2, 1]]
    for (allocated, _, _), first, second in zip(made[1:], *(kernel.launches for kernel in compiled), strict=True):
        address = allocated.data_ptr()
        assert first[14:16] == (tensor.data_ptr(), second[14])
        assert second[15:19] == (address, 0, address, address + 128)
