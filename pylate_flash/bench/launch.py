"""The suite `launch`: how long a call keeps the host, and how often a new shape makes it compile.

On a small batch the GPU is done before the host has launched the next call, and the host's time is what a user waits
for. It is shown beside the two things that any implementation is built of, the launch of an empty Triton kernel and one
operation of torch, and beside the same call replayed as a CUDA graph.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pylate_flash.bench import forward, fresh, varlen
from pylate_flash.bench.peers import FLASH_MAXSIM, LIK
from pylate_flash.bench.protocol import HostStopwatch
from pylate_flash.bench.suite import OURS, Candidate, Suite, System, Unavailable

ROWS = (
    forward.Shape("query", 1, 100, 32, 100),
    forward.Shape("in-batch", 32, 32, 32, 180),
    varlen.Ragged("packed", 1, 100, 32, 40, 180),
)

Inputs = forward.Inputs | varlen.Inputs


def make_inputs(row: forward.Shape | varlen.Ragged, device: torch.device, dtype: torch.dtype) -> Any:
    """As the row's own suite."""
    module = forward if isinstance(row, forward.Shape) else varlen
    return module.make_inputs(row, device, dtype)


def reference(inputs: Inputs) -> torch.Tensor:
    """As the inputs' own suite."""
    return forward.reference(inputs) if isinstance(inputs, forward.Inputs) else varlen.reference(inputs)


def either(
    padded: Callable[[Any], Sequence[Candidate]], packed: Callable[[Any], Sequence[Candidate]]
) -> Callable[[Inputs], Sequence[Candidate]]:
    """Return the candidates of the one for padded inputs, and of the other for packed ones."""
    return lambda inputs: (padded if isinstance(inputs, forward.Inputs) else packed)(inputs)


ours = either(forward.ours, varlen.ours)


def replayed(inputs: Inputs) -> list[Candidate]:
    """Our call, with everything on the device, captured into a CUDA graph."""
    if not inputs.queries.is_cuda:
        raise Unavailable("a CUDA graph needs a CUDA GPU")
    candidate = ours(inputs)[0]
    if _waits(candidate):
        raise Unavailable("the call waits for the device, which a CUDA graph cannot hold")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores = candidate.call()
    # What a replay does not write is not found right.
    scores.fill_(torch.nan)

    def replay() -> torch.Tensor:
        graph.replay()
        return scores

    return [Candidate(f"{candidate.label}, replayed", replay)]


def _waits(candidate: Candidate) -> bool:
    """Make the call twice (the first one compiles), and return whether the host waited for the device in the second.

    Asked before a capture, because one that fails leaves torch's random generator in disorder.
    """
    candidate.call()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        candidate.call()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


def empty_kernel(inputs: Inputs) -> list[Candidate]:
    """The launch of a Triton kernel that does nothing, as `triton.jit` launches it."""
    if not inputs.queries.is_cuda:
        raise Unavailable("a Triton kernel needs a CUDA GPU")
    import triton

    @triton.jit
    def nothing(pointer):
        pass

    tensor = torch.zeros(1, device=inputs.queries.device)
    return [Candidate("empty kernel", lambda: nothing[(1,)](tensor))]


def torch_operation(inputs: Inputs) -> list[Candidate]:
    """One operation of torch on one element."""
    tensor = torch.zeros(1, device=inputs.queries.device)
    return [Candidate("add_", lambda: tensor.add_(1.0))]


# How many shapes `compilations` draws.
SHAPES = 50


def compilations(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Count what `maxsim` compiles over `SHAPES` shapes, in a process that has compiled nothing yet."""
    if device.type != "cuda":
        return {}
    name = f"compilations of maxsim over {SHAPES} random shapes (Nq, Nd, Lq, Ld)"
    try:
        return {name: int(fresh.run("pylate_flash.bench.launch", str(device), str(dtype).removeprefix("torch.")))}
    except RuntimeError as error:
        return {name: f"not counted: {error}"}


def random_shapes() -> list[forward.Shape]:
    """Draw the shapes, always the same: a single query in every other one."""
    draw = random.Random(0)
    return [
        forward.Shape(
            name=str(index),
            Nq=1 if index % 2 else draw.randint(2, 64),
            Nd=draw.randint(1, 256),
            Lq=draw.randint(1, 128),
            Ld=draw.randint(1, 512),
        )
        for index in range(SHAPES)
    ]


def count_here(device: torch.device, dtype: torch.dtype) -> int:
    """Call `maxsim` with every shape; return how often Triton compiled, a binary found on disk included."""
    from triton import knobs

    compiled: list[str] = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **about: compiled.append(about["repr"])
    try:
        with torch.no_grad():
            for shape in random_shapes():
                for candidate in forward.ours(forward.make_inputs(shape, device, dtype)):
                    candidate.call()
    finally:
        knobs.runtime.jit_post_compile_hook = before
    return len(compiled)


def suite() -> Suite:
    """Return the suite."""
    return Suite(
        name="launch",
        title="Host time of a call",
        rows=ROWS,
        systems=(
            System(OURS, "pylate_flash", ours),
            System(f"{OURS}_graph", "replayed", replayed, about="the same call as a CUDA graph"),
            System("lik", "LIK", either(forward.lik, varlen.lik), peer=LIK, about="late-interaction-kernels"),
            System(
                "flash_maxsim",
                "FM",
                either(forward.flash_maxsim, varlen.flash_maxsim),
                peer=FLASH_MAXSIM,
                about="flash-maxsim",
            ),
            System("torch", "torch", either(forward.torch_eager, varlen.torch_eager), about="an einsum"),
            System("triton_launch", "empty kernel", empty_kernel, about="a bare launch by Triton", yardstick=True),
            System("torch_operation", "torch op", torch_operation, about="add_ to one element", yardstick=True),
        ),
        compiled=(),
        make_inputs=make_inputs,
        reference=reference,
        accuracy=forward.accuracy,
        unit="us",
        stopwatch=lambda device, flush_bytes: HostStopwatch(device),
        facts=compilations,
    )


if __name__ == "__main__":
    print(count_here(torch.device(sys.argv[1]), getattr(torch, sys.argv[2])))
