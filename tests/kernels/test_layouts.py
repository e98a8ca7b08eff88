"""The layouts that docs/layouts.md derives are those of Gluon and of compiled kernels."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from PIL import Image
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import make_layouts
from pylate_flash.kernels.config import hopper_blocks
from pylate_flash.kernels.tables import HOPPER_LONG, HOPPER_MAX_SIZE
from pylate_flash.kernels.tiles import Blocks
from pylate_flash.kernels.versions import triton_version
from tests.kernels.test_hopper import NARROW, OF_96, OF_256, compiled, see, seen

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

PAGE = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text(encoding="utf-8")


@gluon.jit
def _shared_layout_kernel(TOKENS: gl.constexpr, SIZE: gl.constexpr):
    see(gl.to_linear_layout(gl.NVMMASharedLayout.get_default_for([TOKENS, SIZE], gl.bfloat16), [TOKENS, SIZE]))


@gluon.jit
def _product_layout_kernel(TOKENS: gl.constexpr):
    see(gl.to_linear_layout(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16]), [64, TOKENS]))


@gluon.jit
def _operand_layout_kernel(TOKENS: gl.constexpr):
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    see(gl.to_linear_layout(gl.DotOperandLayout(0, mma, 2), [64, 16]))


def at(bases: list[list[int]], index: int) -> tuple[int, int]:
    """Row and column at an index of a linear layout: the xor of the bases of the index's set bits."""
    row = column = 0
    for bit, (to_row, to_column) in enumerate(bases):
        if index >> bit & 1:
            row, column = row ^ to_row, column ^ to_column
    return row, column


# Tile sizes of the kernel, for first and second blocks.
TILES = sorted({block for size in range(8, HOPPER_MAX_SIZE + 1, 8) for block in hopper_blocks(size)[:2] if block})


@pytest.mark.parametrize("size", TILES)
def test_atoms_are_as_wide_as_gluons(size: int) -> None:
    layout = gl.NVMMASharedLayout.get_default_for([64, size], gl.bfloat16)
    assert layout.swizzle_byte_width == make_layouts.width_of(size)
    assert not layout.transposed


@pytest.mark.parametrize(("tokens", "size"), [(64, size) for size in TILES] + [(128, 256), (8, 64)])
def test_the_bases_are_those_of_the_arithmetic(tokens: int, size: int) -> None:
    """Every index of the tile holds the token and element whose offset it is."""
    width, bases = make_layouts.width_of(size), make_layouts.bases(tokens, size)
    for index in range(0, tokens * size, 7):
        token, element = at(bases, index)
        assert make_layouts.offset(token, 2 * element, width, tokens) == 2 * index


@pytest.mark.skipif(triton_version() < (3, 9), reason="before, Gluon takes only layouts of registers apart")
@pytest.mark.parametrize(("tokens", "size"), [(64, size) for size in TILES] + [(128, 256)])
def test_the_bases_are_those_of_gluons_layout(tokens: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Triton 3.6, `test_hopper.py` compares the instructions that store and load a tile."""
    layout = seen(_shared_layout_kernel, monkeypatch, TOKENS=tokens, SIZE=size)
    assert layout.offset_bases == make_layouts.bases(tokens, size)
    assert layout.alignment <= 1024


@pytest.mark.parametrize("width", make_layouts.MODES)
def test_eight_rows_of_a_unit_lie_in_all_banks(width: int) -> None:
    for byte in range(0, width, make_layouts.UNIT):
        banks = {make_layouts.offset(row, byte, width, 8) % 128 // 16 for row in range(8)}
        assert banks == set(range(8))


def descriptors(ptx: str) -> list[list[int]]:
    """Constant parts of the descriptors of consecutive products, for each group of products in a kernel.

    A descriptor is a start address, known only to be the result of a shift, plus constants.
    """
    defined = {name: (operation, operands) for operation, name, operands in re.findall(
        r"^\s*((?:add|or|cvt|bfe|shr)\.\S+)\s+(%\w+), (.*);$", ptx, flags=re.MULTILINE
    )}  # fmt: skip
    groups: list[list[int]] = []
    for line in ptx.splitlines():
        if "wgmma.mma_async" in line:
            name, total = re.findall(r"\}, (%rd\d+), ", line)[0], 0
            while defined[name][0].startswith(("add", "or", "cvt")):
                name, _, constant = defined[name][1].partition(", ")
                total += int(constant or 0)
            groups[-1].append(total % (1 << 64))
        elif "wgmma.fence" in line:
            groups.append([])
    return groups


@pytest.mark.parametrize(
    ("options", "tiles"),
    [
        ({}, [(64, 128)]),
        (OF_96, [(64, 64), (64, 32)]),
        ({"size": 72, "blocks": Blocks(64, 16, False)}, [(64, 64), (64, 16)]),
        ({"tile": HOPPER_LONG} | OF_256, [(64, 256)]),
        ({"tail": 16}, [(64, 128)]),
    ],
    ids=str,
)
def test_descriptors_of_the_kernel(options: dict, tiles: list[tuple[int, int]]) -> None:
    expected = []
    for tokens, size in tiles:
        width = make_layouts.width_of(size)
        expected.append([make_layouts.descriptor(start, width) for start in make_layouts.step_starts(tokens, size)])
    # Each of two parts of 64 rows has a product per step of the embedding, and the narrow product repeats them.
    actual = descriptors(compiled(**{"tile": NARROW} | options))
    assert actual == expected * (4 if "tail" in options else 2)


def test_lanes_share_rows_as_in_gluons_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The register operand shares elements the same way."""
    product = seen(_product_layout_kernel, monkeypatch, TOKENS=64)
    operand = seen(_operand_layout_kernel, monkeypatch, TOKENS=64)
    for layout, registers in ((product, 32), (operand, 8)):
        for lane in range(32):
            for register in range(registers):
                (row, column), (more_rows, more_columns) = at(layout.lane_bases, lane), at(layout.reg_bases, register)
                assert (row ^ more_rows, column ^ more_columns) == make_layouts.held_by(lane, register)
        assert layout.warp_bases == [[16, 0], [32, 0]]


def test_the_page_has_what_the_script_computes() -> None:
    assert make_layouts.table() in PAGE
    rows = {name: re.findall(rf"^\| {name} \|(.*)\|$", PAGE, flags=re.MULTILINE)[0] for name in ("token", "element")}
    results = [[int(cell) for cell in row.split("|")] for row in rows.values()]
    assert [list(basis) for basis in zip(*results, strict=True)] == make_layouts.bases(64, 128)
    units = [start // 16 for start in make_layouts.step_starts(64, 128)]
    assert f"{', '.join(map(str, units[:-1]))} and {units[-1]} units" in PAGE


@pytest.mark.parametrize("name", make_layouts.PICTURES)
def test_the_pictures_show_what_the_script_computes(name: str, tmp_path: Path) -> None:
    """To redraw them, run: python docs/benchmarks/make_layouts.py."""
    assert f"layouts/{name}.png" in PAGE
    contents = json.loads(json.dumps(make_layouts.PICTURES[name][1]()))
    for path in (make_layouts.FOLDER / f"{name}.png", make_layouts.draw(name, tmp_path)):
        with Image.open(path) as picture:
            assert json.loads(picture.info["Description"]) == contents


def test_a_tile_without_atoms_is_an_error() -> None:
    with pytest.raises(ValueError, match="size must be a multiple of 16, got 24"):
        make_layouts.width_of(24)
