"""The figures of docs/layouts.md: the shared memory layout of the Hopper kernel's operands, computed by formulas.

    python docs/benchmarks/make_layouts.py

`tests/kernels/test_layouts.py` compares the formulas with Gluon's layouts, and with the descriptors in compiled
kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from make_picture import save

# Bytes of the unit that a swizzle moves, and of all 32 banks, four bytes each.
UNIT = 16
BANKS = 128
# Rows of a swizzle atom, and elements along the embedding (K) per instruction.
ATOM_ROWS = 8
STEP = 16
# The swizzle mode (two bits of a descriptor), by the width of atoms in bytes.
MODES = {128: 1, 64: 2, 32: 3}

FOLDER = Path(__file__).resolve().parents[1] / "layouts"


def width_of(size: int) -> int:
    """Return the bytes per row of an atom, in a tile whose rows have `size` elements of two bytes.

    Raises
    ------
    ValueError
        If no atom fits: rows must be multiples of 32 bytes.
    """
    for width in MODES:
        if 2 * size % width == 0:
            return width
    raise ValueError(f"size must be a multiple of 16, got {size}")


def offset(token: int, byte: int, width: int, tokens: int) -> int:
    """Return the offset of a byte of a token's row in a tile.

    Parameters
    ----------
    token, byte
        The row, and the byte within it.
    width
        Bytes per row of an atom: 128, 64 or 32.
    tokens
        Rows of the tile.
    """
    column, inside = divmod(byte, width)
    plain = column * tokens * width + token * width + inside
    return swizzled(plain, width)


def swizzled(address: int, width: int) -> int:
    """Return the swizzled address: the unit number, from bit 4 on, xor the bits from 7 on."""
    return address ^ ((address >> 7) & (width // UNIT - 1)) << 4


def bases(tokens: int, size: int) -> list[list[int]]:
    """Return [token, element] at every power of two of a tile's elements, the bases of Gluon's linear layouts."""
    width = width_of(size)
    vectors = []
    for bit in range((tokens * size).bit_length() - 1):
        # A swizzle is its own inverse.
        column, inside = divmod(swizzled(2 << bit, width), tokens * width)
        vectors.append([inside // width, (column * width + inside % width) // 2])
    return vectors


def descriptor(start: int, width: int) -> int:
    """Return the 64-bit matrix descriptor of an operand in shared memory that begins at byte `start` (wgmma).

    Bits 0 to 13 hold the start, and bits 32 to 45 the distance between vertically adjacent atoms, in units of 16 bytes;
    bits 62 and 63 the swizzle mode. Bits 16 to 29, the distance between horizontally adjacent atoms, are unused if the
    embedding lies along the rows (K-major): an instruction covers one atom there.
    """
    return (start // UNIT & 0x3FFF) | (ATOM_ROWS * width // UNIT) << 32 | MODES[width] << 62


def blackwell_descriptor(start: int, width: int) -> int:
    """Return the descriptor for tcgen05 products, on Blackwell.

    A 1 in bits 46 to 48 marks this format; the swizzle mode is in bits 61 to 63, with another numbering.
    """
    return (start // UNIT & 0x3FFF) | (ATOM_ROWS * width // UNIT) << 32 | 1 << 46 | 2 * MODES[width] << 61


def step_starts(tokens: int, size: int) -> list[int]:
    """Return the start of each instruction's operand in a tile, in the order of the embedding."""
    width = width_of(size)
    per_atom = width // (2 * STEP)
    return [step // per_atom * tokens * width + step % per_atom * 2 * STEP for step in range(size // STEP)]


def held_by(lane: int, register: int) -> tuple[int, int]:
    """Return row and column of the element that a lane's register holds, in a product of 16 rows per warp."""
    return lane // 4 + 8 * (register // 2 % 2), 8 * (register // 4) + 2 * (lane % 4) + register % 2


def table() -> str:
    """The table of docs/layouts.md: atoms and descriptors, by the width of a tile's rows."""
    lines = [
        "| row of a tile | atom | xor | atoms below each other | mode | bits 32 to 63 of a descriptor |",
        "|---|---|---|---:|---:|---|",
    ]
    names = {128: "128 bytes or a multiple", 64: "64 bytes", 32: "32 bytes"}
    for width, mode in MODES.items():
        bits = width.bit_length() - UNIT.bit_length()
        to = f"bits 4 to {3 + bits} by 7 to {6 + bits}" if bits > 1 else "bit 4 by 7"
        lines.append(
            f"| {names[width]} | {ATOM_ROWS} x {width} bytes | {to} | {ATOM_ROWS * width} bytes | {mode} | "
            f"`{descriptor(0, width) >> 32:#010x}` |"
        )
    return "\n".join(lines)


def bank_pictures() -> dict[str, Any]:
    """Banks of the units of eight rows of 256 bytes: row-major, and in atoms."""
    row = 2 * BANKS
    plain = [[(token * row + unit * UNIT) % BANKS // UNIT for unit in range(row // UNIT)] for token in range(ATOM_ROWS)]
    atoms = [[offset(token, unit * UNIT, 128, 64) % BANKS // UNIT for unit in range(row // UNIT)] for token in range(8)]
    return {"row after row": plain, "in atoms": atoms}


def atom_pictures() -> dict[str, Any]:
    """For each atom width the memory in lines of 128 bytes: row and unit stored in each position."""
    by_width = {}
    for width in MODES:
        lines = [["" for _ in range(BANKS // UNIT)] for _ in range(ATOM_ROWS * width // BANKS)]
        for token in range(ATOM_ROWS):
            for unit in range(width // UNIT):
                line, slot = divmod(offset(token, unit * UNIT, width, ATOM_ROWS) // UNIT, BANKS // UNIT)
                lines[line][slot] = f"{token}.{unit}"
        by_width[str(width)] = lines
    return by_width


def tile_picture() -> dict[str, Any]:
    """A tile of 64 tokens of 128 elements: the start of each atom, and of each instruction's operand."""
    return {
        "atoms": [[offset(token, byte, 128, 64) for byte in (0, 128)] for token in range(0, 64, ATOM_ROWS)],
        "steps": step_starts(64, 128),
    }


def lanes_picture() -> dict[str, Any]:
    """The lane that holds each element of 16 rows and 16 columns of a product."""
    lanes = [[0] * 16 for _ in range(16)]
    for lane in range(32):
        for register in range(8):
            row, column = held_by(lane, register)
            lanes[row][column] = lane
    return {"lanes": lanes}


def _cells(axes: Any, values: list[list[Any]], labels: list[list[Any]], colours: str = "Pastel1") -> None:
    """Draw a grid of coloured, labelled cells."""
    axes.imshow(values, cmap=colours, aspect="auto")
    for row, line in enumerate(labels):
        for column, label in enumerate(line):
            axes.text(column, row, label, ha="center", va="center", fontsize=6)
    axes.set_xticks([])
    axes.set_yticks([])


def _draw_banks(figure: Any, contents: dict[str, Any]) -> None:
    for axes, (title, values) in zip(figure.subplots(1, 2), contents.items(), strict=True):
        _cells(axes, values, values, "tab10")
        axes.add_patch(_rectangle(-0.5, -0.5, 1, 8))
        axes.set_title(f"{title}: banks of each unit, in fours", loc="left", fontsize=8)
        axes.set_xlabel("units of 16 bytes of the rows of eight tokens", fontsize=7)


def _draw_atoms(figure: Any, contents: dict[str, Any]) -> None:
    for axes, (width, lines) in zip(figure.subplots(1, 3), contents.items(), strict=True):
        _cells(axes, [[int(cell.partition(".")[0]) for cell in line] for line in lines], lines)
        axes.set_title(f"an atom of {width} bytes: row.unit", loc="left", fontsize=8)
        axes.set_xlabel("a line: 128 bytes of shared memory", fontsize=7)


def _draw_tile(figure: Any, contents: dict[str, Any]) -> None:
    left, right = figure.subplots(1, 2)
    starts = contents["atoms"]
    _cells(left, starts, [[f"atom from byte {start}" for start in line] for line in starts], "Blues")
    left.images[0].set_alpha(0.5)
    left.set_title("64 tokens (down) of 128 elements (across)", loc="left", fontsize=8)
    steps = contents["steps"]
    labels = [[f"+{start}" for start in steps]]
    _cells(right, [[step // 4 for step in range(len(steps))]], labels, "Blues")
    right.images[0].set_alpha(0.5)
    right.set_title("where each of 8 instructions begins, in bytes", loc="left", fontsize=8)
    right.set_xlabel("elements of the embedding, 16 each", fontsize=7)


def _draw_lanes(figure: Any, contents: dict[str, Any]) -> None:
    axes = figure.subplots()
    _cells(axes, [[lane % 4 for lane in line] for line in contents["lanes"]], contents["lanes"])
    axes.set_title("which lane has each element; colour: of the four that share a row", loc="left", fontsize=8)
    axes.set_xlabel("document tokens: 16 of 64", fontsize=7)
    axes.set_ylabel("16 query tokens of a warp", fontsize=7)


def _rectangle(left: float, top: float, width: float, height: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((left, top), width, height, fill=False, edgecolor="black", linewidth=1.5)


# Name of each figure -> size in inches, function of its contents, drawing function.
PICTURES: dict[str, tuple[tuple[float, float], Callable[[], dict[str, Any]], Callable[[Any, dict[str, Any]], None]]] = {
    "banks": ((8, 2), bank_pictures, _draw_banks),
    "atoms": ((8, 2), atom_pictures, _draw_atoms),
    "tile": ((8, 2), tile_picture, _draw_tile),
    "lanes": ((4.5, 3), lanes_picture, _draw_lanes),
}


def draw(name: str, folder: Path = FOLDER) -> Path:
    """Draw a figure as a PNG, which embeds its contents as text, and return its path."""
    from matplotlib.figure import Figure

    size, contents_of, draw_into = PICTURES[name]
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    contents = contents_of()
    draw_into(figure, contents)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    save(figure, contents, path, colours=64)
    return path


def main() -> None:
    """Redraw all figures."""
    for name in PICTURES:
        print(f"{draw(name)}: drawn")


if __name__ == "__main__":
    main()
