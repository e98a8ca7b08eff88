"""Residual codes that the Hopper kernel's copying warps decompress on their way to shared memory.

A tile takes three steps, interleaved with those of other tiles so that no step waits for memory: the codes, residuals
and scales of its tokens are copied to shared memory; their centroids are copied to the slot of the embeddings; and
there bucket weights are added, and the sum times its scale replaces the centroid. Two workers of four warps each take
turns with the tiles: a step is one chain of dependent instructions, and while one worker waits for its end, the other
proceeds. With one worker, whatever it has in flight, 32 queries and 10000 documents of 300 tokens took 1.75 ms on an
H100, and 1.50 with two.

A warp owns 16 tokens of a tile and waits for no other warp: a lane decompresses the units of eight elements that it has
copied itself. Triton would synchronize all warps of a partition between uses of shared memory (2.72 ms instead of 2.63
at 32 x 80000, 24 to 112 tokens, on an H200), so these are PTX here, at addresses that differ between threads: a scalar
in Gluon need not be the same for all threads. Staged data lies behind the tiles.

Weights are looked up in pairs, by a byte of indices (with 2 bits, half a byte), in a table in shared memory. With byte
permutes, as in `few_bits`, a thread took 184 ALU instructions for 64 elements, where now it takes 32, and maxima need
the ALU, too: 1.33 ms with 4 bits instead of 1.40; 0.0946 instead of 0.1010 with 1024 documents of 180.

Embeddings are rounded to the dtype of the queries where scores must be those of decompressed documents. Otherwise, with
float16 centroids, sums are multiplied in float16, by a scale rounded to it, and query rows are converted to it, too
(`scaled_rows`), as bfloat16 has fewer bits: 1.43 ms instead of 1.50, with lookups by permutes. The relative error of
scores is then at most 1.6e-4, and 5e-4 with embeddings rounded to bfloat16. Similarities multiplied by their scales in
float32, after the product, would be exact, but the multiplying warps have no time for it: 1.60 ms.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon import next_slot
from ..reductions import larger
from .hopper_barriers import arrive, await_barrier, execute_ptx, offsets, spans, store_word
from .hopper_walk import SPAN, await_span, ended_of, of_tile, run_start_of

# Groups of four warps that take turns with the tiles, and staged tiles of each: one in each of the three steps.
_WORKERS = gl.constexpr(2)
_STAGED = gl.constexpr(3)
# Tokens of a tile that a warp decompresses.
_TOKENS = gl.constexpr(16)
_NAMES = {gl.bfloat16: "bf16", gl.float16: "f16"}
# Bit offsets of the pairs of indices, two of 4 bits or two of 2, of which the first one is in the upper bits.
_PAIRS = {4: (0, 8, 16, 24), 2: (4, 0, 12, 8)}
# The table holds every pair of weights once for each bank of shared memory, so that lookups have no bank conflicts.
_LANES = gl.constexpr(32)
# Units of eight elements per embedding: a lane has one unit of each of its tokens.
_UNITS = 8, 16


@gluon.constexpr_function
def _passes(units):
    """Tokens of a tile per lane, which has one unit of each."""
    return _TOKENS.value * units // 32


@gluon.constexpr_function
def _together(units):
    """Tokens that a lane decompresses at once: there are no registers for all of them."""
    return _passes(units) // 2


@gluon.constexpr_function
def _columns_apart(units):
    """Columns from one token of a lane to its next: those of four warps."""
    return 4 * 32 // units


@gluon.constexpr_function
def _bytes_apart(units):
    """The same in bytes of a tile: a row has 128, or consists of two such rows, far apart."""
    return 128 * _columns_apart(units)


def _columns_of(units: int, chunks: int) -> gl.DistributedLinearLayout:
    """The layout of the columns of a tile over the lanes that copy their data.

    Neighbouring lanes copy the `chunks` of 16 bytes of a token's indices; or, with 0 chunks, half the lanes copy the
    numbers of centroids, and the others scales.
    """
    pass_bases = [[_columns_apart(units) << bit] for bit in range(_passes(units).bit_length() - 1)]
    neighbour_bases = [[1 << bit] for bit in range((32 // units).bit_length() - 1)]
    bases = [[0]] * (chunks.bit_length() - 1) + neighbour_bases + pass_bases if chunks else pass_bases + neighbour_bases
    bases += [[0]] * (5 - len(bases))
    # Both workers have the same columns, of different tiles.
    warp_bases = [[32 // units], [64 // units], [0]]
    return gl.DistributedLinearLayout(bases[5:], bases[:5], warp_bases, [], [4 * _TOKENS.value])


def _ptx(lines: list[str]) -> str:
    return "{\n" + "\n".join([*lines, "mov.b32 $0, 0;"]) + "\n}"


def _copy_centroids_ptx(units: int) -> str:
    """PTX that copies a lane's units of centroids, at base $3 with the numbers at $1, to a tile at $2."""
    passes = _passes(units)
    lines = [f".reg .b32 number<{passes}>;", ".reg .b64 at;"]
    for first in range(0, passes, 4):
        four = ", ".join(f"number{number}" for number in range(first, first + 4))
        lines.append(f"ld.shared.v4.b32 {{{four}}}, [$1 + {4 * first}];")
    for number in range(passes):
        lines += [
            f"mad.wide.u32 at, number{number}, {16 * units}, $3;",
            f"cp.async.cg.shared.global [$2 + {_bytes_apart(units) * number}], [at], 16;",
        ]
    return _ptx(lines)


def _looked_up(nbits: int, unit: int) -> list[str]:
    """PTX that looks up the weights of a unit's indices, pair by pair, in the table column at $4."""
    lines = []
    for pair, first in enumerate(_PAIRS[nbits], 4 * unit):
        lines += [
            f"bfe.u32 at, indices{unit}, {first}, {2 * nbits};",
            f"mad.lo.u32 at, at, {4 * _LANES.value}, $4;",
            f"ld.shared.b32 weights{pair}, [at];",
        ]
    return lines


def _decompressed(unit: int, centroid: str, embedding: str | None) -> list[str]:
    """PTX that turns a unit of a centroid into a unit of an embedding."""
    lines = []
    if embedding is None:
        # Clamp to the largest float16: a sum of a norm below 2**-16 is not normalised.
        lines += [f"mov.b32 a, scale{unit};", "min.f32 a, a, 0f477FE000;"]
        lines.append(f"cvt.rn.{centroid}x2.f32 scale{unit}, a, a;")
    for pair in range(4 * unit, 4 * unit + 4):
        lines.append(f"add.rn.{centroid}x2 sum, pair{pair}, weights{pair};")
        if embedding is None:
            lines.append(f"mul.rn.{centroid}x2 pair{pair}, sum, scale{unit};")
            continue
        lines += [
            "mov.b32 {lower, upper}, sum;",
            f"cvt.f32.{centroid} a, lower;",
            f"cvt.f32.{centroid} b, upper;",
            f"mul.f32 a, a, scale{unit};",
            f"mul.f32 b, b, scale{unit};",
            f"cvt.rn.{embedding}x2.f32 pair{pair}, b, a;",
        ]
    return lines


def _decode_ptx(units: int, nbits: int, centroid: str, embedding: str | None) -> str:
    """PTX that replaces a lane's units of centroids by those of embeddings in a tile at $1, for its next few tokens.

    Their indices are at $2, scales at $3, and the lane's column of the table at $4. Embeddings have the dtype of the
    centroids if `embedding` is None.
    """
    numbers, byte_stride = range(_together(units)), _bytes_apart(units)
    pairs = [", ".join(f"pair{pair}" for pair in range(4 * unit, 4 * unit + 4)) for unit in numbers]
    scales = ", ".join(f"scale{unit}" for unit in numbers)
    word = "u32" if nbits == 4 else "u16"
    return _ptx(
        [
            ".reg .b32 indices<4>, scale<4>, pair<16>, weights<16>, at, sum;",
            ".reg .b16 lower, upper;",
            ".reg .f32 a, b;",
            f"ld.shared.v{len(numbers)}.b32 {{{scales}}}, [$3];",
            *(f"ld.shared.{word} indices{unit}, [$2 + {32 * nbits * unit}];" for unit in numbers),
            *(f"ld.shared.v4.b32 {{{pairs[unit]}}}, [$1 + {byte_stride * unit}];" for unit in numbers),
            *(line for unit in numbers for line in _looked_up(nbits, unit)),
            *(line for unit in numbers for line in _decompressed(unit, centroid, embedding)),
            *(f"st.shared.v4.b32 [$1 + {byte_stride * unit}], {{{pairs[unit]}}};" for unit in numbers),
        ]
    )


_COLUMNS = gl.constexpr(
    {(units, chunks): _columns_of(units, chunks) for units in _UNITS for chunks in (0, units // 8, units // 4)}
)
_COPY_CENTROIDS = gl.constexpr({units: _copy_centroids_ptx(units) for units in _UNITS})
_DECODE = gl.constexpr(
    {
        (units, nbits, str(centroid), str(embedding)): _decode_ptx(
            units, nbits, _NAMES[centroid], _NAMES.get(embedding)
        )
        for units in _UNITS
        for nbits in _PAIRS
        for centroid in _NAMES
        for embedding in (*_NAMES, None)
        if embedding is not None or centroid is gl.float16
    }
)
_COPY = gl.constexpr(
    {
        16: "cp.async.cg.shared.global [$1], [$2], 16; mov.b32 $0, 0;",
        4: "cp.async.ca.shared.global [$1], [$2], 4; mov.b32 $0, 0;",
    }
)
# Every step commits two groups of copies, empty if there are none, so 2 groups follow the awaited one. A lane reads
# staged data that other lanes of its warp copied, but only centroids that it copied itself.
_COMMIT = gl.constexpr("cp.async.commit_group; mov.b32 $0, 0;")
_AWAIT_STAGED = gl.constexpr("cp.async.wait_group 2; bar.warp.sync -1; mov.b32 $0, 0;")
_AWAIT_CENTROIDS = gl.constexpr("cp.async.wait_group 2; mov.b32 $0, 0;")
# A word of the table for each pair and lane.
_ALLOCATE = gl.constexpr(
    {nbits: f"{{ .shared .align 128 .b32 pairs[{_LANES.value << 2 * nbits}]; mov.u32 $0, pairs; }}" for nbits in _PAIRS}
)


@gluon.constexpr_function
def _decode_of(units, nbits, centroid, embedding):
    return _DECODE.value[units, nbits, str(centroid), str(embedding)]


@gluon.constexpr_function
def _staged_bytes(config):
    """Bytes that a warp stages of a tile: indices of its tokens, then numbers of centroids, and scales."""
    return _TOKENS.value * (config.size // 8 * config.nbits + 8)


@gluon.constexpr_function
def staging_bytes(config):
    """Bytes that all warps stage, behind the tiles."""
    return 4 * _WORKERS.value * _STAGED.value * _staged_bytes(config) if config.nbits > 0 else 0


@gluon.jit
def pair_table(weights_ptr, NBITS: gl.constexpr):
    """Allocate and fill a table [pairs, lanes] of two bucket weights each; return its address in shared memory.

    It is allocated in PTX, as Gluon does not expose addresses, so it comes on top of what Triton counts.
    """
    PAIRS: gl.constexpr = 1 << 2 * NBITS
    WARPS: gl.constexpr = gl.num_warps()
    by_pair: gl.constexpr = gl.BlockedLayout([PAIRS // WARPS, 1], [1, _LANES], [WARPS, 1], [1, 0])
    indices = gl.arange(0, PAIRS, layout=gl.SliceLayout(1, by_pair))
    lanes = gl.arange(0, _LANES, layout=gl.SliceLayout(0, by_pair))
    pointers = weights_ptr.to(gl.pointer_type(gl.int16), bitcast=True)
    first = gl.load(pointers + (indices >> NBITS)).to(gl.int32) & 0xFFFF
    second = gl.load(pointers + (indices & (1 << NBITS) - 1)).to(gl.int32) << 16
    table = gl.inline_asm_elementwise(
        _ALLOCATE[NBITS], "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )
    addresses = table + 4 * (indices[:, None] * _LANES + lanes[None, :])
    pairs, _ = gl.broadcast((first | second)[:, None], addresses)
    gl.inline_asm_elementwise(
        "st.shared.b32 [$1], $2; mov.b32 $0, $1;", "=r,r,r", [addresses, pairs], dtype=gl.int32, is_pure=False, pack=1
    )
    return table


@gluon.jit
def scaled_rows(rows, dtype: gl.constexpr):
    """Convert rows to another 16-bit dtype, divided by powers of 2, which maxima are to be multiplied by; return both.

    Largest elements become 1 to 2 (if they are infinite, or nearly so, the others come out smaller), and an element is
    rounded to float16 only where it is below 2**-14.
    """
    largest = gl.reduce(gl.maximum(rows, -rows), 1, larger).to(gl.float32)
    bits = largest.to(gl.int32, bitcast=True) & 0x7F800000
    bits = gl.minimum(gl.maximum(bits, 1 << 23), 253 << 23)
    inverse = ((254 << 23) - bits).to(gl.float32, bitcast=True)
    return (rows.to(gl.float32) * inverse[:, None]).to(dtype), bits.to(gl.float32, bitcast=True)


@gluon.jit
def bits_of_thread(FIRST: gl.constexpr, NUMBER: gl.constexpr):
    """NUMBER bits of the thread index, from bit FIRST on: an integer that differs between threads."""
    PTX: gl.constexpr = "{ .reg .b32 thread; mov.u32 thread, %tid.x; bfe.u32 $0, thread, $1, $2; }"
    return execute_ptx(PTX, "=r,r,r", [gl.to_tensor(FIRST), gl.to_tensor(NUMBER)])


@gluon.jit
def _copy(destination, source, NBYTES: gl.constexpr):
    """Copy NBYTES bytes from global to shared memory, asynchronously."""
    PTX: gl.constexpr = _COPY[NBYTES]
    execute_ptx(PTX, "=r,r,l", [destination, source])


@gluon.jit
def decode_stream(arguments, codec, span_buffers, config: gl.constexpr):
    """As `hopper_stream.copy_stream`, for documents that are residual codes."""
    AT: gl.constexpr = offsets(config)
    codes_ptr, centroids_ptr, table, tiles_address = codec
    (
        residuals_ptr, _, _, scale_ptr, _, cu_seqlens_ptr, _, tiles, _, _, _, memory, _, group, first, _, n_documents,
        document_length, _, _, _,
    ) = arguments  # fmt: skip
    UNITS: gl.constexpr = config.size // 8
    # Slots of this worker, every other one.
    gl.static_assert(config.tile.num_stages % _WORKERS == 0)
    SLOTS: gl.constexpr = config.tile.num_stages // _WORKERS
    COLUMNS: gl.constexpr = config.tile.columns
    TILES: gl.constexpr = SPAN // COLUMNS
    SPANS: gl.constexpr = spans(config)
    gl.static_assert(COLUMNS == 4 * _TOKENS and TILES % _WORKERS == 0)
    TILE_BYTES: gl.constexpr = 2 * config.size * COLUMNS
    # Tokens per lane; bytes of the indices of a token, and chunks of 16 bytes of these.
    PASSES: gl.constexpr = _passes(UNITS)
    TOKEN_BYTES: gl.constexpr = UNITS * config.nbits
    CHUNKS: gl.constexpr = TOKEN_BYTES // 16
    INDICES_BYTES: gl.constexpr = _TOKENS * TOKEN_BYTES
    STAGED_BYTES: gl.constexpr = _staged_bytes(config)
    BY_CHUNK: gl.constexpr = _COLUMNS[UNITS, CHUNKS]
    BY_NUMBER: gl.constexpr = _COLUMNS[UNITS, 0]
    TOGETHER: gl.constexpr = _together(UNITS)
    COPY_CENTROIDS: gl.constexpr = _COPY_CENTROIDS[UNITS]
    EMBEDDING: gl.constexpr = None if config.scale_rows else tiles.dtype
    DECODE: gl.constexpr = _decode_of(UNITS, config.nbits, centroids_ptr.dtype.element_ty, EMBEDDING)

    lane = bits_of_thread(0, 5)
    warp = bits_of_thread(5, 2)
    worker = bits_of_thread(7, 1)
    # The unit of a lane, and the token of a pass that it belongs to; tile rows are swizzled.
    unit = lane % UNITS
    neighbour = lane // UNITS
    row = warp * (32 // UNITS) + neighbour
    unit_address = tiles_address + unit // 8 * (128 * COLUMNS) + 128 * row + 16 * (unit % 8 ^ row % 8)
    staging = tiles_address + config.tile.num_stages * TILE_BYTES + _STAGED * STAGED_BYTES * (4 * worker + warp)
    table_column = table + 4 * lane
    by_chunk = gl.arange(0, COLUMNS, layout=BY_CHUNK)
    by_number = gl.arange(0, COLUMNS, layout=BY_NUMBER)
    # Of 1024 bytes, a lane copies two chunks; of 256, two lanes copy the same one.
    chunk = 16 * (lane % (INDICES_BYTES // 16)) + by_chunk // (COLUMNS // 2) * (512 if INDICES_BYTES > 512 else 0)
    run_start = run_start_of(cu_seqlens_ptr, group, first, n_documents, document_length, config)
    indices_ptr = (residuals_ptr + run_start.to(gl.int64) * TOKEN_BYTES).to(gl.int64) + 16 * (lane % CHUNKS)
    number_ptr = gl.where(lane < _TOKENS, (codes_ptr + run_start).to(gl.int64), (scale_ptr + run_start).to(gl.int64))
    centroid_ptr = centroids_ptr.to(gl.int64) + 16 * unit

    # Steps so far; the stage of the tile begun in a step; whether the last step began a tile, and the one before it.
    step = gl.to_tensor(0)
    stage = gl.to_tensor(0)
    first_step = gl.to_tensor(False)
    second_step = gl.to_tensor(False)
    first_end_bits = gl.to_tensor(0)
    column_tokens, _row_offsets = span_buffers
    span = gl.to_tensor(0)
    span_phase = gl.to_tensor(0)
    index = worker
    # After the last tile, the tiles in flight are finished.
    in_progress = gl.to_tensor(True)
    while in_progress:
        eights, span_end_bits = await_span(memory, span, span_phase, config)
        exists = 8 * eights > COLUMNS * index
        end_bits = gl.to_tensor(0)
        if exists:
            end_bits = ended_of(span_end_bits, index, config)
            destination = staging + STAGED_BYTES * stage
            tokens = of_tile(column_tokens, TILES * span + index, by_chunk, config)
            _copy(destination + chunk, indices_ptr + tokens.to(gl.int64) * TOKEN_BYTES, 16)
            tokens = of_tile(column_tokens, TILES * span + index, by_number, config)
            _copy(destination + INDICES_BYTES + 4 * lane, number_ptr + tokens.to(gl.int64) * 4, 4)
            index += _WORKERS
            if (index >= TILES) & (eights == SPAN // 8):
                arrive(memory, AT.empty_spans, span)
                span, span_phase = next_slot(span, span_phase, SPANS)
                index = worker
        execute_ptx(_COMMIT, "=r,r", [gl.to_tensor(0)])
        if first_step:
            execute_ptx(_AWAIT_STAGED, "=r,r", [gl.to_tensor(0)])
            slot = _WORKERS * ((step - 1) % SLOTS) + worker
            await_barrier(memory, AT.empty_slots, slot, (step - 1) // SLOTS & 1 ^ 1)
            store_word(memory, AT.ends_of_slots, slot, first_end_bits)
            numbers = staging + STAGED_BYTES * gl.where(stage == 0, _STAGED - 1, stage - 1) + INDICES_BYTES
            numbers += 4 * PASSES * neighbour
            execute_ptx(COPY_CENTROIDS, "=r,r,r,l", [numbers, unit_address + slot * TILE_BYTES, centroid_ptr])
        execute_ptx(_COMMIT, "=r,r", [gl.to_tensor(0)])
        stage, _phase = next_slot(stage, stage, _STAGED)
        if second_step:
            execute_ptx(_AWAIT_CENTROIDS, "=r,r", [gl.to_tensor(0)])
            slot = _WORKERS * ((step - 2) % SLOTS) + worker
            tile_address = unit_address + slot * TILE_BYTES
            indices = staging + STAGED_BYTES * stage + config.nbits * lane
            scales = staging + STAGED_BYTES * stage + INDICES_BYTES + 4 * (_TOKENS + PASSES * neighbour)
            # (As a loop, half as many instructions: 2.54 ms instead of 2.56.)
            for _part in range(PASSES // TOGETHER):
                execute_ptx(DECODE, "=r,r,r,r,r", [tile_address, indices, scales, table_column])
                tile_address += TOGETHER * _bytes_apart(UNITS)
                indices += TOGETHER * (32 * config.nbits)
                scales += TOGETHER * 4
            # Lanes wait for each other in `arrive`, before the next step overwrites the staged data.
            arrive(memory, AT.full_slots, slot)
        step += 1
        second_step = first_step
        first_step = exists
        first_end_bits = end_bits
        in_progress = first_step | second_step
    eights, _end_bits = await_span(memory, span, span_phase, config)
    if index == gl.cdiv(8 * eights, COLUMNS):
        # The multiplying partition waits for one more tile, which would be this worker's.
        step = gl.maximum(step - 2, 0)
        slot = _WORKERS * (step % SLOTS) + worker
        await_barrier(memory, AT.empty_slots, slot, step // SLOTS & 1 ^ 1)
        store_word(memory, AT.ends_of_slots, slot, -1)
        arrive(memory, AT.full_slots, slot)
