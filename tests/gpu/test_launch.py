"""A launch by Triton's C function does what a launch by Triton does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pylate_flash import maxsim

triton = pytest.importorskip("triton")
tl = triton.language
launch = pytest.importorskip("pylate_flash.kernels.launch")
wait_for_previous_kernel = pytest.importorskip("pylate_flash.kernels.overlap").wait_for_previous_kernel

pytestmark = pytest.mark.gpu


@triton.jit(do_not_specialize=["n", "step"])
def _scale_kernel(
    source_ptr, weights_ptr, target_ptr, n, step, stride, offset_stride, FACTOR: tl.constexpr, NAME: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """target[i] = FACTOR * source[stride * i] + step, + weights[i] if there are any."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = FACTOR * tl.load(source_ptr + at * stride + offset_stride - 1, mask=at < n) + step
    if weights_ptr is not None and NAME == "weighted":
        value += tl.load(weights_ptr + at, mask=at < n)
    tl.store(target_ptr + at, value, mask=at < n)


@triton.jit(do_not_specialize=["n", "steps"])
def _late_kernel(source_ptr, target_ptr, n, steps, BLOCK: tl.constexpr):
    """target[i] = source[i] + 1, written some time after the programs began."""
    wait_for_previous_kernel()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source_ptr + at, mask=at < n)
    spent = value
    for _ in tl.range(0, steps):
        spent = tl.sqrt(spent * spent + 1.0)
    tl.store(target_ptr + at, value + tl.where(spent < 0.0, 2.0, 1.0), mask=at < n)


_SIZE = 100
# More than 32 bits, so that the signature has an integer of each width.
_STEP = (1 << 31) + 256


def bind(name: str = "weighted", kernel=_scale_kernel) -> launch.Launch:
    # A stride of 1 and a name are constants to Triton, which its C function is given nevertheless.
    return launch.Launcher(kernel).bind((2, 1, 1), (_SIZE, _STEP), (16, 1), (3.0, name, 64), num_warps=1, num_stages=1)


def expected(source: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    found = 3.0 * source[::16] + float(_STEP)
    return found if weights is None else found + weights


@pytest.fixture
def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.arange(16 * _SIZE, device="cuda", dtype=torch.float32) * 4096
    return source, torch.full((_SIZE,), 4096.0, device="cuda"), torch.zeros(_SIZE, device="cuda")


@pytest.mark.parametrize("weighted", [False, True])
def test_equals_a_launch_by_triton(weighted: bool, tensors) -> None:
    source, weights, target = tensors
    weights = weights if weighted else None
    launched = bind("weighted" if weighted else "plain")
    launched(source, weights, target)
    by_triton = target.clone()
    assert torch.equal(by_triton, expected(source, weights))
    assert launched.direct is not None, "Triton 3.6 is what its C function is known of"
    launched(source, weights, target.zero_())
    assert torch.equal(target, by_triton)
    # An address that is no multiple of 16, which another kernel is compiled for.
    shifted = torch.empty(source.numel() + 1, device="cuda")[1:].copy_(source)
    for _ in range(2):
        launched(shifted, weights, target.zero_())
        assert torch.equal(target, by_triton)


def test_a_sequence_equals_its_launches(tensors) -> None:
    source, weights, target = tensors
    sequence = launch.Sequence(3)
    unused, region = sequence.region(7, torch.uint8), sequence.region(16 * _SIZE, torch.float32)
    copy = launch.Launcher(_scale_kernel).bind(
        (25, 1, 1), (16 * _SIZE, 0), (1, 1), (1.0, "plain", 64), num_warps=1, num_stages=1
    )
    assert unused == 3
    sequence.add(copy, 0, 1, region)
    sequence.add(bind(), region, 1, 2)
    for _ in range(3):
        sequence(source, weights, target.zero_())
        assert torch.equal(target, expected(source, weights))


@pytest.mark.parametrize("in_a_graph", [False, True])
def test_what_starts_early_reads_what_the_kernel_before_it_wrote(in_a_graph: bool) -> None:
    """Each is a short kernel behind a long one, both of few programs, so that it has room to start at once."""
    size, n_launches = 4096, 6
    late = launch.Launcher(_late_kernel, follows=True)
    long, short = (late.bind((16, 1, 1), (size, steps), (), (256,), num_warps=1, num_stages=1) for steps in (20_000, 0))
    sequence = launch.Sequence(2)
    regions = [sequence.region(size, torch.float32) for _ in range(n_launches - 1)]
    for index, (source, target) in enumerate(zip([0, *regions], [*regions, 1], strict=True)):
        sequence.add(short if index % 2 else long, source, target)
    source, target = torch.zeros(size, device="cuda"), torch.zeros(size, device="cuda")
    sequence(source, target)
    assert short.direct is not None
    graph = torch.cuda.CUDAGraph()
    if in_a_graph:
        with torch.cuda.graph(graph):
            sequence(source, target)
    for value in range(1, 20):
        # The scratch still has the values of the call before.
        source.fill_(value)
        graph.replay() if in_a_graph else sequence(source, target)
        assert torch.equal(target, source + n_launches)


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """What Triton tells a hook before it launches, as it tells a profiler."""
    names: list[str] = []

    def hook(metadata) -> None:
        names.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(hook)
    yield names
    triton.knobs.runtime.launch_enter_hook.remove(hook)


def test_hooks_are_heard(tensors, request: pytest.FixtureRequest) -> None:
    launched = bind()
    launched(*tensors)
    queries = torch.randn(8, 32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    # Warm: from here on, what is not told would be launched directly.
    for _ in range(2):
        maxsim(queries, queries).sum().backward()
    names = request.getfixturevalue("heard")
    launched(*tensors)
    assert names == ["_scale_kernel"]
    maxsim(queries, queries).sum().backward()
    assert any("gather" in name for name in names)
    assert len(names) >= 4


def test_launches_on_the_current_stream(tensors) -> None:
    source, weights, target = tensors
    launched, sequence = bind(), launch.Sequence(3)
    sequence.add(launched, 0, 1, 2)
    for _ in range(2):
        launched(*tensors)
        sequence(*tensors)
    stream = torch.cuda.Stream()
    for call in (launched, sequence):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            # A launch on another stream would not wait for the source to change.
            torch.cuda._sleep(20_000_000)
            source.add_(4096)
            call(source, weights, target)
        stream.synchronize()
        assert torch.equal(target, expected(source, weights))


def test_in_a_cuda_graph(tensors) -> None:
    source, weights, target = tensors
    launched, sequence = bind(), launch.Sequence(3)
    region = sequence.region(_SIZE, torch.float32)
    sequence.add(launched, 0, 1, region)
    sequence.add(launched, 0, 1, 2)
    for _ in range(2):
        sequence(source, weights, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sequence(source, weights, target)
    source.mul_(2)
    target.zero_()
    graph.replay()
    assert torch.equal(target, expected(source, weights))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_device_has_its_own_function() -> None:
    queries, documents = torch.randn(8, 32, 64), torch.randn(9, 40, 64)
    for _ in range(3):
        for device in ("cuda:0", "cuda:1"):
            leaves = [tensor.to(device, torch.bfloat16).requires_grad_() for tensor in (queries, documents)]
            with torch.cuda.device(device):
                scores = maxsim(*leaves)
            found = torch.autograd.grad(scores.square().sum(), leaves)
            # While another device is the current one.
            others = torch.autograd.grad(maxsim(*leaves).square().sum(), leaves)
            assert all(torch.equal(a, b) for a, b in zip(found, others, strict=True))
