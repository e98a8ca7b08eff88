"""Table look-ups, run with an emulation of their PTX instructions, which Triton's interpreter does not have."""

from __future__ import annotations

import random
import re

import pytest

from pylate_flash.kernels.forward import few_bits, hopper_codes

WORD = 0xFFFFFFFF


def permuted(low: int, high: int, selector: int) -> int:
    """`prmt`: one of eight bytes for each of four indices, or its sign where the index's highest bit is set."""
    result = 0
    for position in range(4):
        index = selector >> 4 * position & 15
        byte = (high << 32 | low) >> 8 * (index & 7) & 0xFF
        result |= ((0xFF if byte & 0x80 else 0) if index & 8 else byte) << 8 * position
    return result


def of_table(a: int, b: int, c: int, table: int) -> int:
    """`lop3`: look every bit up in a table, by the bits of a, b and c."""
    positions = ((bit, (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1) for bit in range(32))
    return sum((table >> index & 1) << bit for bit, index in positions)


INSTRUCTIONS = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "prmt": permuted,
    "lop3": of_table,
    "bfe": lambda a, first, count: a >> first & (1 << count) - 1,
    "mad": lambda a, b, c: a * b + c,
}


def run(ptx: str, operands: dict[str, int], memory: dict[int, int] | None = None) -> dict[str, int]:
    """Run PTX and return its registers and operands; loads read words from `memory` by address."""
    registers = dict(operands)
    instructions = {**INSTRUCTIONS, "ld": (memory or {}).__getitem__}
    for line in ptx.strip().strip("{}").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        instruction, rest = line.split(maxsplit=1)
        to, *arguments = [name.strip(" []") for name in rest.split(",")]
        values = [registers[name] if name in registers else int(name, 0) for name in arguments]
        registers[to] = instructions[instruction.split(".")[0]](*values) & WORD
    return registers


def words(values: list[int], bits: int) -> list[int]:
    count = 32 // bits
    parts = [values[first : first + count] for first in range(0, len(values), count)]
    return [sum(value << bits * position for position, value in enumerate(part)) for part in parts]


@pytest.mark.parametrize("seed", range(20))
def test_bytes_of_indices(seed: int) -> None:
    rng = random.Random(seed)
    table, indices = [rng.getrandbits(8) for _ in range(16)], rng.getrandbits(32)
    operands = dict(zip(("$3", "$4", "$5", "$6"), words(table, 8), strict=True))
    actual = run(few_bits._FOUR_BITS.value, {"$2": indices, **operands})
    expected = words([table[indices >> 4 * position & 15] for position in range(8)], 8)
    assert [actual["$0"], actual["$1"]] == expected
    actual = run(few_bits._TWO_BITS.value, {"$4": indices, "$5": words(table[:4], 8)[0]})
    for part, first in enumerate((0, 2, 16, 18)):
        expected = words([table[indices >> first + 4 * position & 3] for position in range(4)], 8)
        assert [actual[f"${part}"]] == expected


@pytest.mark.parametrize("nbits", [2, 4])
@pytest.mark.parametrize("seed", range(20))
def test_pairs_of_weights(seed: int, nbits: int) -> None:
    """A thread gets them in element order, from the column of its lane; other lanes have other columns."""
    rng, count = random.Random(seed), 1 << nbits
    weights, indices = [rng.getrandbits(16) for _ in range(count)], [rng.randrange(count) for _ in range(8)]
    table, lane = 128 * rng.randrange(1000), rng.randrange(32)
    memory = {
        table + 128 * (first * count + second) + 4 * lane: weights[second] << 16 | weights[first]
        for first in range(count)
        for second in range(count)
    }
    # The first index is in the highest bits of the first byte.
    per_byte = 8 // nbits
    stored = [indices[start : start + per_byte] for start in range(0, 8, per_byte)]
    stored_bytes = [sum(index << 8 - nbits * (position + 1) for position, index in enumerate(byte)) for byte in stored]
    arguments = {"indices0": words(stored_bytes + [0] * (4 - len(stored_bytes)), 8)[0], "$4": table + 4 * lane}
    result = run("".join(hopper_codes._looked_up(nbits, 0)), arguments, memory)
    assert [result[f"weights{pair}"] for pair in range(4)] == words([weights[index] for index in indices], 16)


def column_of(bases: list[list[int]], index: int) -> int:
    return sum(basis[0] for bit, basis in enumerate(bases) if index >> bit & 1)


def offsets(ptx: str, instruction: str) -> list[int]:
    """Address offsets of the instructions that match `instruction`, in order."""
    return [int(offset or 0) for offset in re.findall(rf"{instruction}.*\[\$\d(?: \+ (\d+))?\]", ptx)]


@pytest.mark.parametrize("nbits", [2, 4])
@pytest.mark.parametrize("units", [8, 16])
def test_a_warp_has_staged_what_its_lanes_decompress(units: int, nbits: int) -> None:
    """One lane decompresses each unit of a tile's 64 tokens, with the indices, scale and centroid of that token."""
    chunks, passes = units * nbits // 16, units // 2
    per_part = passes // 2
    by_chunk, by_number = (hopper_codes._columns_of(units, n_chunks) for n_chunks in (chunks, 0))
    centroids = hopper_codes._copy_centroids_ptx(units)
    decode = hopper_codes._decode_ptx(units, nbits, "f16", None)
    indices_of_pass, rows_of_pass = (
        offsets(decode, f"ld.shared.u{8 * nbits}"),
        offsets(decode, "ld.shared.v4.b32 {pair"),
    )
    assert rows_of_pass == offsets(decode, "st.shared") == offsets(centroids, "cp.async")[:per_part]
    assert offsets(centroids, "ld.shared") == [16 * four for four in range(passes // 4)]
    decompressed = set()
    for warp in range(4):
        warp_column = column_of(by_chunk.warp_bases, warp)
        assert warp_column == column_of(by_number.warp_bases, warp)
        # Contents of every 16 bytes of indices, and of every word of numbers, later of scales.
        indices, numbers = {}, {}
        for lane in range(32):
            for register in range(1 << len(by_chunk.reg_bases)):
                column = warp_column + column_of(by_chunk.lane_bases, lane) + column_of(by_chunk.reg_bases, register)
                slot = lane % (units * nbits) + 32 * register
                # With fewer than 16 bytes per lane, two lanes copy the same bytes.
                assert indices.setdefault(slot, (column, lane % chunks)) == (column, lane % chunks)
            numbers[lane] = warp_column + column_of(by_number.lane_bases, lane)
        assert [numbers[lane] for lane in range(16)] == [numbers[lane] for lane in range(16, 32)]
        for lane in range(32):
            for number in range(passes):
                part, token = divmod(number, per_part)
                # A tile row has 128 bytes, or is split into two such parts, far from each other.
                row = per_part * rows_of_pass[1] * part + rows_of_pass[token]
                column = row // 128 + warp_column + lane // units
                at = per_part * 32 * nbits * part + indices_of_pass[token] + nbits * lane
                assert indices[at // 16] == (column, lane % units * nbits // 16)
                assert at % 16 == lane % units * nbits % 16
                assert numbers[passes * (lane // units) + number] == column
                decompressed.add((column, lane % units))
    assert decompressed == {(column, unit) for column in range(64) for unit in range(units)}
