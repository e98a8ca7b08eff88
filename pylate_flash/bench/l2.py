"""Read bandwidth of the L2 cache: the ceiling of gathers from tensors that fit it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pylate_flash.bench.protocol import Rounds, make_stopwatch, measure

# int32 values that a program reads at a time (16 KiB), and its number of reads.
TILE = 4096
READS = 256


@triton.jit
def _read(source, sums, tiles, reads, TILE: tl.constexpr):
    """Each program sums tiles of the buffer, `num_programs` apart, bypassing the L1 cache (.cg)."""
    program = tl.program_id(0)
    step = tl.num_programs(0)
    offsets = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.int32)
    for read in range(reads):
        tile = (program + read * step) % tiles
        total += tl.load(source + tile * TILE + offsets, cache_modifier=".cg")
    tl.store(sums + program, tl.sum(total))


def measure_l2(device: torch.device) -> float:
    """Return the bytes per second at which the whole GPU repeatedly reads a buffer of a quarter of its L2 cache.

    The cache is not flushed: the buffer stays in it after the first call.
    """
    properties = torch.cuda.get_device_properties(device)
    # An odd number of tiles, so that a program reads other tiles as it wraps around.
    tiles = (properties.L2_cache_size // 4 // (4 * TILE)) | 1
    programs = 8 * properties.multi_processor_count
    source = torch.randint(0, 100, (tiles * TILE,), dtype=torch.int32, device=device)
    sums = torch.empty(programs, dtype=torch.int32, device=device)

    def read() -> None:
        _read[(programs,)](source, sums, tiles, READS, TILE=TILE, num_warps=8)

    timing = measure({"read": read}, make_stopwatch(device, flush_bytes=0), Rounds(warmup=5, repetitions=20))["read"]
    return 4 * TILE * READS * programs / (timing.median_ms / 1e3)
