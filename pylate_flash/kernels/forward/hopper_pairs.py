"""float32 embeddings in the Hopper kernel: split into pairs of float16 on their way to shared memory.

The float16 nearest to an element and the float16 nearest to the remainder together hold 22 of its 24 bits. Three
products of such halves take the tensor cores half the time of three TF32 products, and the fourth is as small as the
rounding errors. float16 has a small range of exponents: a row is first divided by a power of 2, by which its
similarities are multiplied. That power depends on the row alone, so a document scores the same whatever is beside it.

Where torch may compute products of float32 in TF32, upper halves are multiplied alone: they hold its 11 bits.

Half a tile is in registers while the other half is being loaded; shared memory has no bandwidth for staging, as
products take half of it. If no other program reads the same tokens, those of the next tile are prefetched to L2: 0.048
ms instead of 0.052 at 4 x 1024, 32 x 180; with 32 queries it would take 0.295 instead of 0.265. A warp owns its rows
and waits for no other warp, which is why stores are PTX here (`hopper_codes`): 0.265 ms there instead of 0.319.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon import next_slot
from ..reductions import larger
from .hopper_barriers import arrive, await_barrier, execute_ptx, has_lower, offsets, spans, store_word
from .hopper_codes import bits_of_thread
from .hopper_walk import SPAN, await_span, ended_of, of_tile, run_start_of

# Exponents of float32, as bits: the smallest and largest of the powers of 2 that rows are divided by; that of rows with
# an infinite element, whose other elements survive between 2**-31 and 2**7; infinity; and what largest elements become,
# so that the remainder of an element in float16 is not subnormal.
_SMALLEST, _LARGEST, _OF_INFINITE, _INFINITE, _UNIT = 14 << 23, 253 << 23, 133 << 23, 255 << 23, 13 << 23
# Warps that split documents, and rows of half a tile per warp.
_WARPS, _ROWS = 8, 4


@gluon.constexpr_function
def _exponent_ptx(bits: str) -> list[str]:
    """PTX that turns the bits of a row's largest element into those of the power of 2 that the row is divided by."""
    return [
        f"and.b32 {bits}, {bits}, {_INFINITE};",
        f"setp.eq.u32 infinite, {bits}, {_INFINITE};",
        f"max.u32 {bits}, {bits}, {_SMALLEST};",
        f"min.u32 {bits}, {bits}, {_LARGEST};",
        f"@infinite mov.b32 {bits}, {_OF_INFINITE};",
        f"sub.u32 {bits}, {bits}, {_UNIT};",
    ]


@gluon.constexpr_function
def _halves_ptx(elements: tuple[str, str], inverse: str, upper: str, lower: str | None) -> list[str]:
    """PTX that computes the upper and, if `lower` is given, the lower halves of two elements times `inverse`.

    Of an infinite element, only the lower half is infinite: the upper half meets finite elements' halves that may be 0.
    """
    first, second = elements
    scaled = [f"mul.f32 a, {first}, {inverse};", f"mul.f32 b, {second}, {inverse};"]
    if lower is None:
        return [*scaled, f"cvt.rn.f16x2.f32 {upper}, b, a;"]
    return [
        *scaled,
        f"cvt.rn.satfinite.f16x2.f32 {upper}, b, a;",
        f"mov.b32 {{of_a, of_b}}, {upper};",
        "cvt.f32.f16 rounded, of_a;",
        "sub.f32 a, a, rounded;",
        "cvt.f32.f16 rounded, of_b;",
        "sub.f32 b, b, rounded;",
        f"cvt.rn.f16x2.f32 {lower}, b, a;",
    ]


_REGISTERS = ".reg .pred infinite, first; .reg .b16 of_a, of_b; .reg .f32 a, b, rounded, inverse, scale;"
_EXPONENT = gl.constexpr("{\n" + "\n".join([_REGISTERS, "mov.b32 $0, $1;", *_exponent_ptx("$0")]) + "\n}")
_HALVES = gl.constexpr("{\n" + "\n".join([_REGISTERS, *_halves_ptx(("$2", "$3"), "$4", "$0", "$1")]) + "\n}")
_UPPER = gl.constexpr("{\n" + "\n".join([_REGISTERS, *_halves_ptx(("$1", "$2"), "$3", "$0", None)]) + "\n}")
# The bits of a power of 2 subtracted from this are those of its inverse.
_INVERSE = gl.constexpr(254 << 23)


@gluon.constexpr_function
def _store_ptx(elements: int, lower: int | None, normalize: bool) -> str:
    """PTX that stores a lane's part of half a tile: `elements` elements of each of the rows that its warp owns.

    Upper halves go to $at, lower halves, if any, `lower` bytes further on, and the factors of similarities to $scale.
    """
    count = _ROWS * elements
    at, scale, factor = 2 * count, 3 * count, 4 * count
    pairs = range(elements // 2)
    width = "v2.b32" if elements == 4 else "b32"
    registers = ".reg .b32 lane, bits, inverse_bits, upper<2>, lower<2>;"
    lines = [_REGISTERS, registers, "mov.u32 lane, %laneid;", "setp.eq.u32 first, lane, 0;"]
    for row in range(_ROWS):
        values = [f"${count + row * elements + element}" for element in range(elements)]
        lines.append(f"abs.f32 a, {values[0]};")
        for value in values[1:]:
            lines += [f"abs.f32 b, {value};", "max.NaN.f32 a, a, b;"]
        lines += ["mov.b32 bits, a;", "redux.sync.max.u32 bits, bits, -1;", *_exponent_ptx("bits")]
        lines += [f"sub.u32 inverse_bits, {_INVERSE.value}, bits;", "mov.b32 inverse, inverse_bits;"]
        for pair in pairs:
            elements_of_pair = values[2 * pair], values[2 * pair + 1]
            lines += _halves_ptx(elements_of_pair, "inverse", f"upper{pair}", None if lower is None else f"lower{pair}")
        for half, byte_offset in (("upper", 0), ("lower", lower)):
            if byte_offset is not None:
                stored = ", ".join(f"{half}{pair}" for pair in pairs)
                lines.append(f"st.shared.{width} [${at} + {128 * _WARPS * row + byte_offset}], {{{stored}}};")
        lines.append("mov.b32 scale, bits;")
        if normalize:
            lines.append(f"mul.f32 scale, scale, ${factor + row * elements};")
        lines.append(f"@first st.shared.f32 [${scale} + {4 * _WARPS * row}], scale;")
    # Outputs are written last: they may share registers with inputs.
    lines += [f"mov.b32 ${number}, 0;" for number in range(count)]
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def _elements(config):
    """Elements of a token per lane."""
    return config.blocks.first // 32


@gluon.constexpr_function
def _tile_bytes(config):
    return 2 * config.tile.columns * config.blocks.first


@gluon.constexpr_function
def _store_of(config):
    lower = config.tile.num_stages * _tile_bytes(config) if has_lower(config) else None
    return _store_ptx(_elements(config), lower, config.normalize)


@gluon.constexpr_function
def _store_operands(config):
    count = _ROWS * _elements(config)
    return ",".join(["=r"] * count + ["f"] * count + ["r"] * 2 * count + ["f"] * count * config.normalize)


@gluon.jit
def float16_pairs(rows, LOWER: gl.constexpr):
    """Divide rows [ROWS, dims], float32, by powers of 2, split them into two float16 blocks, and return all three.

    Without `LOWER`, the first block is the nearest float16, and the second is the same block.
    """
    largest = gl.reduce(gl.abs(rows), 1, larger).to(gl.int32, bitcast=True)
    bits = gl.inline_asm_elementwise(_EXPONENT, "=r,r", [largest], dtype=gl.int32, is_pure=True, pack=1)
    inverse, _ = gl.broadcast((_INVERSE - bits).to(gl.float32, bitcast=True)[:, None], rows)
    if LOWER:
        upper, lower = gl.inline_asm_elementwise(
            _HALVES, "=&r,=&r,f,f,f,f", [rows, inverse], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
        )
    else:
        upper = gl.inline_asm_elementwise(
            _UPPER, "=&r,f,f,f,f", [rows, inverse], dtype=gl.float16, is_pure=True, pack=2
        )
        lower = upper
    return upper, lower, bits.to(gl.float32, bitcast=True)


@gluon.jit
def scales_of_slot(memory, slot, LAYOUT: gl.constexpr, config: gl.constexpr):
    """The factors of similarities of the tokens in a slot."""
    AT: gl.constexpr = offsets(config)
    columns = gl.arange(0, config.tile.columns, layout=LAYOUT)
    addresses = memory + AT.scales_of_slots + 4 * (config.tile.columns * slot + columns)
    PTX: gl.constexpr = "ld.shared.v2.f32 {$0, $1}, [$2];"
    return gl.inline_asm_elementwise(PTX, "=f,=f,r,r", [addresses], dtype=gl.float32, is_pure=False, pack=2)


@gluon.jit
def _rows(documents, cursor, span_buffers, HALF: gl.constexpr, config: gl.constexpr):
    """The rows of half the tokens of the tile at the cursor; with `ahead`, prefetch them to L2."""
    base, step, _, positions, _, ahead = documents
    tokens, row_offsets = span_buffers
    span, _, index, _, _ = cursor
    # After the last tile, any rows will do.
    TILES: gl.constexpr = SPAN // config.tile.columns
    half = 2 * (TILES * span + gl.minimum(index, TILES - 1)) + HALF
    rows = of_tile(row_offsets if config.offset_unit > 0 else tokens, half, positions, config)
    NBYTES: gl.constexpr = 4 * _elements(config)
    if ahead and config.tile.parts < 4:
        lane_offset = gl.minimum(bits_of_thread(0, 5) * NBYTES, 4 * config.size - NBYTES)
        addresses = (base + rows * step).to(gl.int64) + lane_offset
        execute_ptx("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [addresses])
    return rows


@gluon.jit
def _load(documents, rows, config: gl.constexpr):
    """Load these tokens and, with `normalize`, the factors of their similarities."""
    base, step, scale_ptr, _, dims, _ = documents
    values = gl.load(base + (rows[:, None] * step + dims[None, :]), mask=(dims < config.size)[None, :], other=0.0)
    factors = values
    if config.normalize:
        factors, _ = gl.broadcast(gl.load(scale_ptr + rows)[:, None], values)
    return values, factors


@gluon.jit
def _store(loaded, address, scale_address, config: gl.constexpr):
    values, factors = loaded
    address = gl.full(values.shape, address, gl.int32, values.type.layout)
    scale_address = gl.full(values.shape, scale_address, gl.int32, values.type.layout)
    operands = [values, address, scale_address]
    if config.normalize:
        operands = [values, address, scale_address, factors]
    PACK: gl.constexpr = 4 * _elements(config)
    PTX: gl.constexpr = _store_of(config)
    OPERANDS: gl.constexpr = _store_operands(config)
    gl.inline_asm_elementwise(PTX, OPERANDS, operands, dtype=gl.int32, is_pure=False, pack=PACK)


@gluon.jit
def _next_place(cursor, memory, config: gl.constexpr):
    """Advance the cursor, of span, phase, tile in the span and words of the span, to the next tile, if there is one."""
    AT: gl.constexpr = offsets(config)
    span, phase, index, eights, span_end_bits = cursor
    index += 1
    if (index == SPAN // config.tile.columns) & (eights == SPAN // 8):
        arrive(memory, AT.empty_spans, span)
        span, phase = next_slot(span, phase, spans(config))
        eights, span_end_bits = await_span(memory, span, phase, config)
        index = 0
    return span, phase, index, eights, span_end_bits


@gluon.jit
def _ended(cursor, config: gl.constexpr):
    """After which eights of the tile at the cursor documents end, as bits; negative if there is no tile."""
    _, _, index, eights, span_end_bits = cursor
    clamped_index = gl.minimum(index, SPAN // config.tile.columns - 1)
    return gl.where(8 * eights > config.tile.columns * index, ended_of(span_end_bits, clamped_index, config), -1)


@gluon.jit
def pair_stream(arguments, tiles_address, ahead, span_buffers, config: gl.constexpr):
    """As `hopper_stream.copy_stream`, for float32 documents, by eight warps, which prefetch tokens with `ahead`."""
    AT: gl.constexpr = offsets(config)
    (
        documents_ptr, _, _, scale_ptr, _, cu_seqlens_ptr, _, _, _, _, _, memory, _, group, first, _, n_documents,
        document_length, _, _, stride_token,
    ) = arguments  # fmt: skip
    BLOCK: gl.constexpr = config.blocks.first
    COLUMNS: gl.constexpr = config.tile.columns
    ELEMENTS: gl.constexpr = _elements(config)
    layout: gl.constexpr = gl.BlockedLayout([1, ELEMENTS], [1, 32], [8, 1], [1, 0])
    gl.static_assert(COLUMNS // 2 == 8 * 4, "rows of half a tile are those of _store_ptx")
    positions = gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))
    run_start = run_start_of(cu_seqlens_ptr, group, first, n_documents, document_length, config)
    step = stride_token
    if config.offset_unit > 0:
        step = config.offset_unit
    else:
        documents_ptr += run_start.to(gl.int64) * stride_token
    if config.normalize:
        scale_ptr += run_start
    documents = documents_ptr, step, scale_ptr, positions, dims, ahead
    # Address of a lane's elements of the first row of its warp; tile rows are swizzled in units of 8 elements.
    lane, warp = bits_of_thread(0, 5), bits_of_thread(5, 3)
    unit = lane * ELEMENTS // 8
    lane_address = (
        tiles_address + unit // 8 * (128 * COLUMNS) + 128 * warp + 16 * (unit % 8 ^ warp) + 2 * (lane * ELEMENTS % 8)
    )
    warp_scale_address = memory + AT.scales_of_slots + 4 * warp
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    zero = gl.to_tensor(0)
    eights, span_end_bits = await_span(memory, zero, zero, config)
    cursor = zero, zero, zero, eights, span_end_bits
    end_bits = _ended(cursor, config)
    first_half = _load(documents, _rows(documents, cursor, span_buffers, 0, config), config)
    second_half = _load(documents, _rows(documents, cursor, span_buffers, 1, config), config)
    cursor = _next_place(cursor, memory, config)
    next_end_bits = _ended(cursor, config)
    first_rows = _rows(documents, cursor, span_buffers, 0, config)
    second_rows = _rows(documents, cursor, span_buffers, 1, config)
    while end_bits >= 0:
        cursor = _next_place(cursor, memory, config)
        await_barrier(memory, AT.empty_slots, slot, phase)
        store_word(memory, AT.ends_of_slots, slot, end_bits)
        address = lane_address + slot * _tile_bytes(config)
        scale_address = warp_scale_address + slot * (4 * COLUMNS)
        _store(first_half, address, scale_address, config)
        first_half = _load(documents, first_rows, config)
        first_rows = _rows(documents, cursor, span_buffers, 0, config)
        _store(second_half, address + 64 * COLUMNS, scale_address + 2 * COLUMNS, config)
        second_half = _load(documents, second_rows, config)
        second_rows = _rows(documents, cursor, span_buffers, 1, config)
        arrive(memory, AT.full_slots, slot)
        end_bits = next_end_bits
        next_end_bits = _ended(cursor, config)
        slot, phase = next_slot(slot, phase, config.tile.num_stages)
    await_barrier(memory, AT.empty_slots, slot, phase)
    store_word(memory, AT.ends_of_slots, slot, -1)
    arrive(memory, AT.full_slots, slot)
