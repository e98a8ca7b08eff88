"""Fixtures shared by the benchmark tests: a suite of tiny rows, and a handwritten result."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pylate_flash.bench import forward
from pylate_flash.bench.protocol import Ceilings
from pylate_flash.bench.rows import Row

TINY = (Row("one", 1, 5, 4, 7, d=16), Row("several", 3, 6, 2, 9, d=16))


@pytest.fixture
def tiny_suite():
    """Make the forward suite on two tiny rows, with the systems given or its own."""

    def make(*systems):
        own = forward.suite()
        return replace(own, rows=TINY, systems=systems or own.systems)

    return make


@pytest.fixture
def ceilings():
    """Fixed ceilings, so that no test has to measure them."""
    return Ceilings(flops_per_second=1e12, bytes_per_second=1e10)


@pytest.fixture
def result():
    """A complete result of the forward suite, written by hand: every status appears."""
    timed = {"variant": "maxsim", "error": 1e-7, "iqr_ms": 0.001, "host_ms": 0.02, "repetitions": 50}
    return {
        "schema": 1,
        "suite": "forward",
        "date": "2026-03-01T12:00:00+00:00",
        "complete": True,
        "quick": False,
        "machine": {
            "device": "cuda",
            "name": "NVIDIA Test Card",
            "compute_capability": "9.0",
            "memory_bytes": 10**11,
            "driver": "580.1",
            "cuda": "13.0",
        },
        "versions": {
            "python": "3.12.3",
            "torch": "2.11.0",
            "triton": "3.6.0",
            "pylate_flash": "0.1.0",
            "late-interaction-kernels": "0.4.5",
            "flash-maxsim": None,
        },
        "protocol": {
            "dtype": "bfloat16",
            "float32_matmul_precision": "highest",
            "clock": "CUDA events",
            "warmup": 10,
            "repetitions": 50,
            "flush_bytes": 134217728,
            "retuned": True,
            "reduced": False,
        },
        "ceilings": {"flops_per_second": 790e12, "bytes_per_second": 4.3e12},
        "rows": [
            {
                "name": "textual",
                "shape": "1 x 1000, 32 x 300",
                "flops": 2.4576e9,
                "bytes": 76.8e6,
                "floor_ms": 0.018,
                "bound": "memory",
                "systems": {
                    "pylate_flash": {"status": "ok", **timed, "median_ms": 0.03, "over_floor": 1.67},
                    "lik": {"status": "ok", **timed, "median_ms": 0.12, "over_floor": 6.67},
                    "flash_maxsim": {"status": "absent", "reason": "not installed"},
                    "torch": {"status": "wrong", "reason": "einsum: relative error 5.0e-02", "error": 0.05},
                },
                "best_peer": "lik",
                "best_peer_over_ours": 4.0,
            },
            {
                "name": "batch-512",
                "shape": "512 x 512, 32 x 180",
                "flops": 3.86e11,
                "bytes": 29e6,
                "floor_ms": 0.489,
                "bound": "compute",
                "systems": {
                    "pylate_flash": {
                        "status": "inaccurate",
                        **timed,
                        "error": 3e-4,
                        "median_ms": 12.345,
                        "over_floor": 25.2,
                    },
                    "lik": {"status": "failed", "reason": "OutOfMemoryError: tried to allocate 3 GiB"},
                    "flash_maxsim": {"status": "absent", "reason": "not installed"},
                    "torch": {"status": "ok", **timed, "median_ms": 123.4, "over_floor": 252.0},
                },
                "best_peer": "torch",
                "best_peer_over_ours": 10.0,
            },
        ],
    }
