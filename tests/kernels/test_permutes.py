"""What is looked up by permutes of bytes, run as PTX defines its instructions: Triton's interpreter knows no PTX."""

from __future__ import annotations

import random

import pytest

from pylate_flash.kernels.forward import few_bits

WORD = 0xFFFFFFFF


def permuted(low: int, high: int, selector: int) -> int:
    """`prmt`: a byte of the eight for each of four indices, or its sign where the index' highest bit is set."""
    found = 0
    for place in range(4):
        index = selector >> 4 * place & 15
        byte = (high << 32 | low) >> 8 * (index & 7) & 0xFF
        found |= ((0xFF if byte & 0x80 else 0) if index & 8 else byte) << 8 * place
    return found


def of_table(a: int, b: int, c: int, table: int) -> int:
    """`lop3`: every bit is looked up by those of a, b and c."""
    places = ((bit, (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1) for bit in range(32))
    return sum((table >> index & 1) << bit for bit, index in places)


INSTRUCTIONS = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "prmt": permuted,
    "lop3": of_table,
}


def run(ptx: str, operands: dict[str, int]) -> dict[str, int]:
    """The registers and operands after these instructions."""
    registers = dict(operands)
    for line in ptx.strip().strip("{}").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        instruction, rest = line.split(maxsplit=1)
        to, *given = [name.strip() for name in rest.split(",")]
        values = [registers[name] if name in registers else int(name, 0) for name in given]
        registers[to] = INSTRUCTIONS[instruction.split(".")[0]](*values) & WORD
    return registers


def words(values: list[int], bits: int) -> list[int]:
    count = 32 // bits
    parts = [values[first : first + count] for first in range(0, len(values), count)]
    return [sum(value << bits * place for place, value in enumerate(part)) for part in parts]


@pytest.mark.parametrize("seed", range(20))
def test_bytes_of_indices(seed: int) -> None:
    drawn = random.Random(seed)
    table, indices = [drawn.getrandbits(8) for _ in range(16)], drawn.getrandbits(32)
    operands = dict(zip(("$3", "$4", "$5", "$6"), words(table, 8), strict=True))
    found = run(few_bits._FOUR_BITS.value, {"$2": indices, **operands})
    expected = words([table[indices >> 4 * place & 15] for place in range(8)], 8)
    assert [found["$0"], found["$1"]] == expected
    found = run(few_bits._TWO_BITS.value, {"$4": indices, "$5": words(table[:4], 8)[0]})
    for part, first in enumerate((0, 2, 16, 18)):
        expected = words([table[indices >> first + 4 * place & 3] for place in range(4)], 8)
        assert [found[f"${part}"]] == expected
