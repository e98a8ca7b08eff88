"""Residual codes that the Hopper kernel's copying warps decompress on their way to shared memory.

A tile takes three steps, and others are begun between them, so that no step waits for memory: what is stored of its
tokens is copied to shared memory; the centroids of these are, to where the embeddings are to be; and there bucket
weights are added, and the sum times its scale replaces the centroid. Two workers of four warps each take turns with the
tiles: a step is one chain of instructions, of which one worker waits for the last while the other goes on. With one
worker, whatever it has under way, 32 queries and 10000 documents of 300 tokens took 1.75 ms on an H100, and 1.50 with
two.

A warp has 16 tokens of a tile, and waits for no other: a lane decompresses the units of eight elements that it has
copied itself. Triton would have all warps of a partition wait between uses of shared memory (2.72 ms in place of 2.63
at 32 x 80000, 24 to 112 tokens, on an H200), so that these are PTX here, at addresses that are each thread's own: what
is no tensor to Gluon need not be the same for all threads. What is staged lies behind the tiles.

Weights are looked up two at a time, by a byte of indices (of 2 bits, half a byte), in a table in shared memory. By
permutes of bytes, as in `few_bits`, it took a thread 184 instructions of the ALU for 64 elements, where now it is 32,
and maxima need the ALU too: 1.33 ms with 4 bits in place of 1.40; 0.0946 in place of 0.1010 with 1024 documents of 180.

Embeddings are rounded to the type of the queries where scores are to be those of decompressed documents. Where they may
differ, and centroids are float16, sums are multiplied in float16, by a scale rounded to it, and query rows take that
type too (`scaled_rows`), of which bfloat16 has fewer bits: 1.43 ms in place of 1.50, looked up by permutes. Scores are
off by 1.6e-4 of them at most then, and by 5e-4 with embeddings rounded to bfloat16. Multiplied by its scale in float32,
after the product, a similarity would be exact, but the warps that multiply have no time for it: 1.60 ms.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon import next_slot
from ..reductions import larger
from .hopper_barriers import arrive, await_barrier, execute_ptx, offsets, spans, store_word
from .hopper_walk import SPAN, await_span, ended_of, of_tile, run_start_of

# Groups of four warps that take turns with the tiles, and tiles that each has staged: one in each of the three steps.
_WORKERS = gl.constexpr(2)
_STAGED = gl.constexpr(3)
# Tokens of a tile that a warp decompresses.
_TOKENS = gl.constexpr(16)
_NAMES = {gl.bfloat16: "bf16", gl.float16: "f16"}
# Bits before the indices of each pair, two of 4 bits or two of 2, of which the first one is the upper one.
_PAIRS = {4: (0, 8, 16, 24), 2: (4, 0, 12, 8)}
# Every pair of weights stands in the table once for each bank of shared memory, so that no lane waits for another.
_LANES = gl.constexpr(32)
# Units of an embedding, of eight elements: a lane has one of every token of its own.
_UNITS = 8, 16


@gluon.constexpr_function
def _passes(units):
    """Tokens of a tile of which a lane has a unit."""
    return _TOKENS.value * units // 32


@gluon.constexpr_function
def _together(units):
    """How many of these it decompresses at a time: for all of them there are no registers."""
    return _passes(units) // 2


@gluon.constexpr_function
def _columns_apart(units):
    """Columns of a tile between these tokens: what four warps have in between."""
    return 4 * 32 // units


@gluon.constexpr_function
def _bytes_apart(units):
    """Bytes of a tile between them: a row has 128, or is two of these, far from each other."""
    return 128 * _columns_apart(units)


def _columns_of(units: int, chunks: int) -> gl.DistributedLinearLayout:
    """The layout in which a lane has the columns of a tile of which it copies something.

    That is `chunks` of 16 bytes of a token's indices, to neighbouring lanes; or (0) numbers, by half the lanes, and
    scales by the others.
    """
    of_passes = [[_columns_apart(units) << bit] for bit in range(_passes(units).bit_length() - 1)]
    of_neighbours = [[1 << bit] for bit in range((32 // units).bit_length() - 1)]
    bases = [[0]] * (chunks.bit_length() - 1) + of_neighbours + of_passes if chunks else of_passes + of_neighbours
    bases += [[0]] * (5 - len(bases))
    # Both workers have the same columns, of tiles of their own.
    of_warps = [[32 // units], [64 // units], [0]]
    return gl.DistributedLinearLayout(bases[5:], bases[:5], of_warps, [], [4 * _TOKENS.value])


def _ptx(lines: list[str]) -> str:
    return "{\n" + "\n".join([*lines, "mov.b32 $0, 0;"]) + "\n}"


def _copy_centroids_ptx(units: int) -> str:
    """PTX that copies a lane's units of the centroids at $3, whose numbers are at $1, into a tile, at $2."""
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
    """PTX that looks up the weights of the indices of a unit, pair by pair, in the column that begins at $4."""
    lines = []
    for pair, first in enumerate(_PAIRS[nbits], 4 * unit):
        lines += [
            f"bfe.u32 at, indices{unit}, {first}, {2 * nbits};",
            f"mad.lo.u32 at, at, {4 * _LANES.value}, $4;",
            f"ld.shared.b32 weights{pair}, [at];",
        ]
    return lines


def _decompressed(unit: int, centroid: str, embedding: str | None) -> list[str]:
    """PTX that makes a unit of an embedding, in place of that of a centroid."""
    lines = []
    if embedding is None:
        # The largest number of float16: a sum of a norm below 2**-16 is not normalised.
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
    """PTX that replaces units of centroids in a tile, at $1, by those of embeddings: of the next few tokens of a lane.

    Their indices are at $2, scales at $3, and the lane's column of the table at $4. Embeddings are of the type of the
    centroids if `embedding` is None.
    """
    numbers, apart = range(_together(units)), _bytes_apart(units)
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
            *(f"ld.shared.v4.b32 {{{pairs[unit]}}}, [$1 + {apart * unit}];" for unit in numbers),
            *(line for unit in numbers for line in _looked_up(nbits, unit)),
            *(line for unit in numbers for line in _decompressed(unit, centroid, embedding)),
            *(f"st.shared.v4.b32 [$1 + {apart * unit}], {{{pairs[unit]}}};" for unit in numbers),
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
# Every step commits copies twice, empty ones where it has none: so many groups since those that are awaited. Of what is
# staged, a lane reads what others of its warp have copied; of centroids, what it has copied itself.
_COMMIT = gl.constexpr("cp.async.commit_group; mov.b32 $0, 0;")
_AWAIT_STAGED = gl.constexpr("cp.async.wait_group 2; bar.warp.sync -1; mov.b32 $0, 0;")
_AWAIT_CENTROIDS = gl.constexpr("cp.async.wait_group 2; mov.b32 $0, 0;")
# A word of a table for each lane and pair.
_ALLOCATE = gl.constexpr(
    {nbits: f"{{ .shared .align 128 .b32 pairs[{_LANES.value << 2 * nbits}]; mov.u32 $0, pairs; }}" for nbits in _PAIRS}
)


@gluon.constexpr_function
def _decode_of(units, nbits, centroid, embedding):
    return _DECODE.value[units, nbits, str(centroid), str(embedding)]


@gluon.constexpr_function
def _staged_bytes(config):
    """What a warp has staged of a tile: indices of its tokens, and then numbers of centroids, and scales."""
    return _TOKENS.value * (config.size // 8 * config.nbits + 8)


@gluon.constexpr_function
def staging_bytes(config):
    """What all warps have staged, behind the tiles."""
    return 4 * _WORKERS.value * _STAGED.value * _staged_bytes(config) if config.nbits > 0 else 0


@gluon.jit
def pair_table(weights_ptr, NBITS: gl.constexpr):
    """The address in shared memory of a table [pairs, lanes] of two bucket weights each, which it fills.

    It is allocated in PTX, as Gluon tells no address of what it allocates, and so comes on top of what Triton counts.
    """
    PAIRS: gl.constexpr = 1 << 2 * NBITS
    WARPS: gl.constexpr = gl.num_warps()
    by_pair: gl.constexpr = gl.BlockedLayout([PAIRS // WARPS, 1], [1, _LANES], [WARPS, 1], [1, 0])
    indices = gl.arange(0, PAIRS, layout=gl.SliceLayout(1, by_pair))
    lanes = gl.arange(0, _LANES, layout=gl.SliceLayout(0, by_pair))
    at = weights_ptr.to(gl.pointer_type(gl.int16), bitcast=True)
    first = gl.load(at + (indices >> NBITS)).to(gl.int32) & 0xFFFF
    second = gl.load(at + (indices & (1 << NBITS) - 1)).to(gl.int32) << 16
    table = gl.inline_asm_elementwise(
        _ALLOCATE[NBITS], "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )
    places = table + 4 * (indices[:, None] * _LANES + lanes[None, :])
    pairs, _ = gl.broadcast((first | second)[:, None], places)
    gl.inline_asm_elementwise(
        "st.shared.b32 [$1], $2; mov.b32 $0, $1;", "=r,r,r", [places, pairs], dtype=gl.int32, is_pure=False, pack=1
    )
    return table


@gluon.jit
def scaled_rows(rows, dtype: gl.constexpr):
    """Rows in another type of 16 bits, and what their maxima are to be multiplied by, a power of 2 for each row.

    Largest elements become 1 to 2 (of infinite ones, or nearly so, the others come out smaller), and an element is
    rounded to float16 only where it is below 2**-14.
    """
    largest = gl.reduce(gl.maximum(rows, -rows), 1, larger).to(gl.float32)
    bits = largest.to(gl.int32, bitcast=True) & 0x7F800000
    bits = gl.minimum(gl.maximum(bits, 1 << 23), 253 << 23)
    inverse = ((254 << 23) - bits).to(gl.float32, bitcast=True)
    return (rows.to(gl.float32) * inverse[:, None]).to(dtype), bits.to(gl.float32, bitcast=True)


@gluon.jit
def bits_of_thread(FIRST: gl.constexpr, NUMBER: gl.constexpr):
    """So many bits of a thread's number, from one on: an integer that is each thread's own."""
    PTX: gl.constexpr = "{ .reg .b32 thread; mov.u32 thread, %tid.x; bfe.u32 $0, thread, $1, $2; }"
    return execute_ptx(PTX, "=r,r,r", [gl.to_tensor(FIRST), gl.to_tensor(NUMBER)])


@gluon.jit
def _copy(to, at, NBYTES: gl.constexpr):
    """Copy bytes from an address to one in shared memory, asynchronously."""
    PTX: gl.constexpr = _COPY[NBYTES]
    execute_ptx(PTX, "=r,r,l", [to, at])


@gluon.jit
def decode_stream(arguments, coded, walked, config: gl.constexpr):
    """As `hopper_stream.copy_stream`, of documents that are residual codes."""
    AT: gl.constexpr = offsets(config)
    codes_ptr, centroids_ptr, table, tiles_at = coded
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
    # Tokens of a lane; of what is stored of one, the bytes of its indices, and 16 of these at a time.
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
    # A lane's unit, and which of the tokens of a pass it is of; rows of tiles are swizzled.
    unit = lane % UNITS
    neighbour = lane // UNITS
    row = warp * (32 // UNITS) + neighbour
    unit_at = tiles_at + unit // 8 * (128 * COLUMNS) + 128 * row + 16 * (unit % 8 ^ row % 8)
    staged = tiles_at + config.tile.num_stages * TILE_BYTES + _STAGED * STAGED_BYTES * (4 * worker + warp)
    column = table + 4 * lane
    by_chunk = gl.arange(0, COLUMNS, layout=BY_CHUNK)
    by_number = gl.arange(0, COLUMNS, layout=BY_NUMBER)
    # Of 1024 bytes, a lane has two chunks; of 256, two lanes have the same.
    chunk = 16 * (lane % (INDICES_BYTES // 16)) + by_chunk // (COLUMNS // 2) * (512 if INDICES_BYTES > 512 else 0)
    run_start = run_start_of(cu_seqlens_ptr, group, first, n_documents, document_length, config)
    indices_ptr = (residuals_ptr + run_start.to(gl.int64) * TOKEN_BYTES).to(gl.int64) + 16 * (lane % CHUNKS)
    number_ptr = gl.where(lane < _TOKENS, (codes_ptr + run_start).to(gl.int64), (scale_ptr + run_start).to(gl.int64))
    centroid_ptr = centroids_ptr.to(gl.int64) + 16 * unit

    # Steps taken; where the tile begun in one is staged; whether one was begun in the step before, and in that before.
    step = gl.to_tensor(0)
    place = gl.to_tensor(0)
    first_step = gl.to_tensor(False)
    second_step = gl.to_tensor(False)
    first_ended = gl.to_tensor(0)
    of_columns, _places = walked
    span = gl.to_tensor(0)
    span_phase = gl.to_tensor(0)
    number = worker
    # After the last tile, what is under way is finished.
    more = gl.to_tensor(True)
    while more:
        eights, ended_in_span = await_span(memory, span, span_phase, config)
        exists = 8 * eights > COLUMNS * number
        ended = gl.to_tensor(0)
        if exists:
            ended = ended_of(ended_in_span, number, config)
            to = staged + STAGED_BYTES * place
            tokens = of_tile(of_columns, TILES * span + number, by_chunk, config)
            _copy(to + chunk, indices_ptr + tokens.to(gl.int64) * TOKEN_BYTES, 16)
            tokens = of_tile(of_columns, TILES * span + number, by_number, config)
            _copy(to + INDICES_BYTES + 4 * lane, number_ptr + tokens.to(gl.int64) * 4, 4)
            number += _WORKERS
            if (number >= TILES) & (eights == SPAN // 8):
                arrive(memory, AT.empty_spans, span)
                span, span_phase = next_slot(span, span_phase, SPANS)
                number = worker
        execute_ptx(_COMMIT, "=r,r", [gl.to_tensor(0)])
        if first_step:
            execute_ptx(_AWAIT_STAGED, "=r,r", [gl.to_tensor(0)])
            slot = _WORKERS * ((step - 1) % SLOTS) + worker
            await_barrier(memory, AT.empty_slots, slot, (step - 1) // SLOTS & 1 ^ 1)
            store_word(memory, AT.ends_of_slots, slot, first_ended)
            numbers = staged + STAGED_BYTES * gl.where(place == 0, _STAGED - 1, place - 1) + INDICES_BYTES
            numbers += 4 * PASSES * neighbour
            execute_ptx(COPY_CENTROIDS, "=r,r,r,l", [numbers, unit_at + slot * TILE_BYTES, centroid_ptr])
        execute_ptx(_COMMIT, "=r,r", [gl.to_tensor(0)])
        place, _phase = next_slot(place, place, _STAGED)
        if second_step:
            execute_ptx(_AWAIT_CENTROIDS, "=r,r", [gl.to_tensor(0)])
            slot = _WORKERS * ((step - 2) % SLOTS) + worker
            at = unit_at + slot * TILE_BYTES
            indices = staged + STAGED_BYTES * place + config.nbits * lane
            scales = staged + STAGED_BYTES * place + INDICES_BYTES + 4 * (_TOKENS + PASSES * neighbour)
            # (A loop, of half as many instructions: 2.54 ms in place of 2.56.)
            for _part in range(PASSES // TOGETHER):
                execute_ptx(DECODE, "=r,r,r,r,r", [at, indices, scales, column])
                at += TOGETHER * _bytes_apart(UNITS)
                indices += TOGETHER * (32 * config.nbits)
                scales += TOGETHER * 4
            # Lanes await each other there, before the next step overwrites what was staged.
            arrive(memory, AT.full_slots, slot)
        step += 1
        second_step = first_step
        first_step = exists
        first_ended = ended
        more = first_step | second_step
    eights, _ended = await_span(memory, span, span_phase, config)
    if number == gl.cdiv(8 * eights, COLUMNS):
        # What multiplies looks ahead to one tile more, which would be this worker's.
        step = gl.maximum(step - 2, 0)
        slot = _WORKERS * (step % SLOTS) + worker
        await_barrier(memory, AT.empty_slots, slot, step // SLOTS & 1 ^ 1)
        store_word(memory, AT.ends_of_slots, slot, -1)
        arrive(memory, AT.full_slots, slot)
