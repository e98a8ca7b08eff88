"""Later launches of a compiled kernel, by Triton's C function where it is known, equal launches by Triton."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pylate_flash import maxsim
from tests.gpu.tools import captured, equal

triton = pytest.importorskip("triton")
tl = triton.language
launch = pytest.importorskip("pylate_flash.kernels.launch")
launcher_is_known = pytest.importorskip("pylate_flash.kernels.versions").launcher_is_known
wait_for_previous_kernel = pytest.importorskip("pylate_flash.kernels.launch").wait_for_previous_kernel

pytestmark = pytest.mark.gpu


@triton.jit(do_not_specialize=["n", "step"])
def _scale_kernel(
    source_ptr, weights_ptr, target_ptr, n, step, stride, offset_stride, FACTOR: tl.constexpr, NAME: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """target[i] = FACTOR * source[stride * i] + step, + weights[i] if there are any."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = FACTOR * tl.load(source_ptr + offsets * stride + offset_stride - 1, mask=offsets < n) + step
    if weights_ptr is not None and NAME == "weighted":
        value += tl.load(weights_ptr + offsets, mask=offsets < n)
    tl.store(target_ptr + offsets, value, mask=offsets < n)


@triton.jit(do_not_specialize=["n", "steps"])
def _late_kernel(source_ptr, target_ptr, n, steps, BLOCK: tl.constexpr):
    """target[i] = source[i] + 1, written some time after the programs began."""
    wait_for_previous_kernel()
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source_ptr + offsets, mask=offsets < n)
    spent = value
    for _ in tl.range(0, steps):
        spent = tl.sqrt(spent * spent + 1.0)
    tl.store(target_ptr + offsets, value + tl.where(spent < 0.0, 2.0, 1.0), mask=offsets < n)


_SIZE = 100
# More than 32 bits, so that the signature has an integer of each width.
_STEP = (1 << 31) + 256


Tensors = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]


def scale(kernel: launch.Kernel, tensors: Tensors) -> None:
    # A stride of 1 and a name are constants to Triton, but its C function still takes them.
    name = "plain" if tensors[1] is None else "weighted"
    kernel((2, 1, 1), tensors, (_SIZE, _STEP), (16, 1), (3.0, name, 64), (1, 1, None))


def ways(kernel: launch.Kernel) -> list[str]:
    """How each compiled kernel is launched: `by_c` or `by_triton`."""
    return [code.__name__ for code, *_ in kernel._code.values()]


WAY = "by_c" if launcher_is_known() else "by_triton"


def expected(source: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    actual = 3.0 * source[::16] + float(_STEP)
    return actual if weights is None else actual + weights


@pytest.fixture
def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.arange(16 * _SIZE, device="cuda", dtype=torch.float32) * 4096
    return source, torch.full((_SIZE,), 4096.0, device="cuda"), torch.zeros(_SIZE, device="cuda")


@pytest.mark.parametrize("weighted", [False, True])
def test_equals_a_launch_by_triton(weighted: bool, tensors) -> None:
    source, weights, target = tensors
    weights = weights if weighted else None
    kernel = launch.Kernel(_scale_kernel)
    scale(kernel, (source, weights, target))
    by_triton = target.clone()
    assert torch.equal(by_triton, expected(source, weights))
    assert ways(kernel) == [WAY]
    scale(kernel, (source, weights, target.zero_()))
    assert torch.equal(target, by_triton)
    # For an address that is no multiple of 16, another kernel is compiled.
    shifted = torch.empty(source.numel() + 1, device="cuda")[1:].copy_(source)
    for _ in range(2):
        scale(kernel, (shifted, weights, target.zero_()))
        assert torch.equal(target, by_triton)
    assert ways(kernel) == [WAY] * 2


def test_another_grid_and_size_is_the_same_code(tensors) -> None:
    source, _, target = tensors
    kernel = launch.Kernel(_scale_kernel)
    for size in (_SIZE, 3, 64, 90):
        target.zero_()
        grid = (triton.cdiv(size, 64), 1, 1)
        kernel(grid, (source, None, target), (size, _STEP), (16, 1), (3.0, "plain", 64), (1, 1, None))
        assert torch.equal(target[:size], expected(source, None)[:size])
        assert not target[size:].any()
    assert len(ways(kernel)) == 1


def test_scratch_in_the_memory_of_a_tensor(tensors) -> None:
    source, weights, target = tensors
    memory = torch.empty(source.numel() + 40, device="cuda")
    copy, kernel = launch.Kernel(_scale_kernel), launch.Kernel(_scale_kernel)
    for _ in range(3):
        scratch = launch.Scratch(memory)
        scratch.empty(7, torch.uint8, source.device)
        region = scratch.empty(source.numel(), torch.float32, source.device)
        beyond = scratch.empty(source.numel(), torch.float32, source.device)
        assert region.data_ptr() == memory.data_ptr() + 16
        memory_end = memory.data_ptr() + memory.nbytes
        assert not memory.data_ptr() <= beyond.data_ptr() < memory_end, "there is no room left"
        copy((25, 1, 1), (source, None, region), (source.numel(), 0), (1, 1), (1.0, "plain", 64), (1, 1, None))
        scale(kernel, (region, weights, target.zero_()))
        assert torch.equal(target, expected(source, weights))


@pytest.mark.parametrize("in_a_graph", [False, True])
def test_what_starts_early_reads_what_the_kernel_before_it_wrote(in_a_graph: bool) -> None:
    """Short kernels follow long ones, all with few programs, so that they have room to start at once."""
    size, n_launches = 4096, 6
    late = launch.Kernel(_late_kernel, follows=True)
    source, *regions, target = torch.zeros(n_launches + 1, size, device="cuda")

    def call() -> None:
        for index, pair in enumerate(zip([source, *regions], [*regions, target], strict=True)):
            steps = 0 if index % 2 else 20_000
            late((16, 1, 1), pair, (size, steps), (), (256,), (1, 1, None))

    call()
    assert ways(late) == [WAY]
    _, replay = captured(call) if in_a_graph else (None, call)
    for value in range(1, 20):
        # The regions still have the values of the call before.
        source.fill_(value)
        replay()
        assert torch.equal(target, source + n_launches)


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """Kernel names that Triton passes to a hook before a launch, as it does to a profiler."""
    names: list[str] = []

    def hook(metadata) -> None:
        names.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(hook)
    yield names
    triton.knobs.runtime.launch_enter_hook.remove(hook)


def test_hooks_are_heard(tensors, request: pytest.FixtureRequest) -> None:
    kernel = launch.Kernel(_scale_kernel)
    scale(kernel, tensors)
    queries = torch.randn(8, 32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    # Warm: from here on, launches that do not call hooks would go to the C function.
    for _ in range(2):
        maxsim(queries, queries).sum().backward()
    names = request.getfixturevalue("heard")
    scale(kernel, tensors)
    assert names == ["_scale_kernel"]
    maxsim(queries, queries).sum().backward()
    assert any("gather" in name for name in names)
    assert len(names) >= 4


def test_launches_on_the_current_stream(tensors) -> None:
    source, weights, target = tensors
    warm, new = launch.Kernel(_scale_kernel), launch.Kernel(_scale_kernel)
    scale(warm, tensors)
    stream = torch.cuda.Stream()
    for kernel in (warm, new):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            # A launch on another stream would not wait for the source to change.
            torch.cuda._sleep(20_000_000)
            source.add_(4096)
            scale(kernel, tensors)
        stream.synchronize()
        assert torch.equal(target, expected(source, weights))


def test_in_a_cuda_graph(tensors) -> None:
    source, weights, target = tensors
    kernel = launch.Kernel(_scale_kernel)
    region = torch.empty(_SIZE, device="cuda")

    def call() -> None:
        scale(kernel, (source, weights, region))
        scale(kernel, (source, weights, target))

    call()
    _, replay = captured(call)
    source.mul_(2)
    target.zero_()
    region.zero_()
    replay()
    assert torch.equal(target, expected(source, weights))
    assert torch.equal(region, target)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_device_has_its_own_function() -> None:
    queries, documents = torch.randn(8, 32, 64), torch.randn(9, 40, 64)
    for _ in range(3):
        for device in ("cuda:0", "cuda:1"):
            leaves = [tensor.to(device, torch.bfloat16).requires_grad_() for tensor in (queries, documents)]
            with torch.cuda.device(device):
                scores = maxsim(*leaves)
            result = torch.autograd.grad(scores.square().sum(), leaves)
            # With another current device.
            gradients = torch.autograd.grad(maxsim(*leaves).square().sum(), leaves)
            assert equal(result, gradients)
