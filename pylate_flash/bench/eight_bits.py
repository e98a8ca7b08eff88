"""How fast a GPU multiplies values of 8 bits: the ceiling of the products of quantized documents."""

from __future__ import annotations

import torch
from torch.nn import functional

from pylate_flash.bench.protocol import Rounds, make_stopwatch, measure


def measure_eight_bits(device: torch.device, size: int = 8192) -> float | None:
    """Return the operations per second of a large product of fp8 matrices, or None where torch or the GPU has none.

    Of 8-bit products, it is the one that torch makes fast: that of int8 took 1.7 times as long on an H200.
    """
    if not hasattr(functional, "scaled_mm"):
        return None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return None
    left = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)
    # The right one is wanted column by column.
    right = torch.randn(size, size, device=device).to(torch.float8_e4m3fn).t()
    scale, recipe = torch.ones((), device=device), functional.ScalingType.TensorWise

    def multiply() -> None:
        functional.scaled_mm(left, right, scale, recipe, scale, recipe, use_fast_accum=True)

    timings = measure({"product": multiply}, make_stopwatch(device, flush_bytes=0), Rounds(5, 20))
    return 2 * size**3 / (timings["product"].median_ms / 1e3)
