"""Helpers of the Gluon kernels. Not every Triton has Gluon: import this only if `versions.has_gluon()`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait

from . import versions

# cp.async, where every thread copies some bytes; and TMA, which copies a block of a matrix.
copy_to_shared = versions.copy_to_shared(async_copy)
copy_block_to_shared = versions.copy_to_shared(tma)
reinterpret = versions.reinterpret(gl.shared_memory_descriptor)


@builtin
def wait_for_product(product, _semantic=None):
    """Wait for a warpgroup's product, which is in flight; its warps do not wait for other warpgroups of a partition.

    Since Triton 3.9, all warps of a partition otherwise meet at a barrier afterwards.
    """
    product = warpgroup_mma_wait(0, deps=[product], _semantic=_semantic)
    if versions.triton_version() >= (3, 9):
        product.handle.set_attr("warpGroupLocal", _semantic.builder.get_unit_attr())
    return product


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def larger_of(a, b):
    return gl.maximum(a, b)


@gluon.jit
def execute(INSTRUCTION: gl.constexpr, WARPS: gl.constexpr = 4):
    """Execute a PTX instruction without tensor operands, in each of the WARPS warps of a part."""
    threads = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    gl.inline_asm_elementwise(
        INSTRUCTION + " mov.b32 $0, $1;", "=r,r", [threads], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def find_document(cu_seqlens_ptr, n_documents, position, COST: gl.constexpr):
    """The first document that begins at `position` or later, where each costs its tokens plus COST.

    As `splits.lower_bound`, for one target.
    """
    WARPS: gl.constexpr = gl.num_warps()
    probes = gl.arange(0, 256, layout=gl.BlockedLayout([8 // WARPS], [32], [WARPS], [0]))
    low = gl.to_tensor(0)
    remaining = gl.to_tensor(n_documents)
    while remaining > 0:
        step = gl.cdiv(remaining, 256)
        entries = low + (probes + 1) * step - 1
        exists = entries < low + remaining
        values = gl.load(cu_seqlens_ptr + entries, mask=exists, other=0).to(gl.int64)
        below = exists & (values + entries.to(gl.int64) * COST < position)
        skipped = gl.reduce(below.to(gl.int32), 0, add) * step
        remaining = gl.minimum(gl.maximum(step - 1, 0), remaining - skipped)
        low += skipped
    return low


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)
