"""How fast a GPU computes exponentials: the ceiling of a softmax, beside that of its products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pylate_flash.bench.protocol import Rounds, make_stopwatch, measure

# Values of a program of eight warps, and how often it takes the exponentials of all.
TILE = 4096
REPEATS = 1024


@triton.jit
def _exponentials(sums, repeats, TILE: tl.constexpr):
    """Each program takes powers of 2 of its own values, again and again, all in registers."""
    values = tl.arange(0, TILE).to(tl.float32) / TILE
    for _ in range(repeats):
        # Which goes to the one value that is its own: never to 0, infinity or a subnormal number.
        values = tl.exp2(-values)
    tl.store(sums + tl.program_id(0), tl.sum(values))


def measure_exponentials(device: torch.device) -> float:
    """Return the powers of 2 per second, float32, that all of a GPU computes."""
    programs = 8 * torch.cuda.get_device_properties(device).multi_processor_count
    sums = torch.empty(programs, device=device)

    def compute() -> None:
        _exponentials[(programs,)](sums, REPEATS, TILE=TILE, num_warps=8)

    timings = measure({"exponentials": compute}, make_stopwatch(device, flush_bytes=0), Rounds(5, 20))
    return TILE * REPEATS * programs / (timings["exponentials"].median_ms / 1e3)
