"""Stores and additions of few elements of a product, from the registers that tensor cores leave it in.

Triton's own bring their operands into a layout that suits memory, through shared memory, which takes longer than the
product where nearly all is masked. Its interpreter knows no PTX, and gets Triton's own.
"""

from __future__ import annotations

import triton
import triton.language as tl

_AT = "{ .reg .pred on; .reg .b64 at; setp.ne.s32 on, $3, 0; mad.wide.s32 at, $2, 4, $1; "
_STORE = tl.constexpr(_AT + "@on st.global.b32 [at], $4; mov.b32 $0, 0; }")
_COUNT = tl.constexpr(_AT + "@on red.global.add.s32 [at], 1; mov.b32 $0, 0; }")


@triton.jit
def scatter(pointer, offsets, values, mask, PTX: tl.constexpr):
    """Store int32 values at int32 offsets from a pointer, where the mask says so."""
    if PTX:
        operands = [pointer.to(tl.int64), offsets, mask.to(tl.int32), values]
        tl.inline_asm_elementwise(_STORE, "=r,l,r,r,r", operands, tl.int32, is_pure=False, pack=1)
    else:
        tl.store(pointer + offsets, values, mask=mask)


@triton.jit
def count(pointer, offsets, mask, PTX: tl.constexpr):
    """Add 1 to int32 counts at int32 offsets from a pointer, where the mask says so."""
    if PTX:
        operands = [pointer.to(tl.int64), offsets, mask.to(tl.int32)]
        tl.inline_asm_elementwise(_COUNT, "=r,l,r,r", operands, tl.int32, is_pure=False, pack=1)
    else:
        tl.atomic_add(pointer + offsets, 1, mask=mask, sem="relaxed")
