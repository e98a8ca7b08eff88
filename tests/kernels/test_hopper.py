"""The Hopper kernel's operands lie where its instructions expect them, and its choice is the one that was measured."""

from __future__ import annotations

import os
import re

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language._core import builtin

from pylate_flash.kernels import hopper
from pylate_flash.kernels.tiles import copied_by_16_bytes, fused_tile, hopper_tile

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

SEEN: list = []


@builtin
def see(layout, _semantic=None):
    SEEN.append(getattr(layout, "value", layout))


@gluon.jit
def _stored_kernel(values_ptr, LAYOUT: gl.constexpr, TOKENS: gl.constexpr, SIZE: gl.constexpr):
    """A tile as the kernel copies it, 16 bytes per thread, and read back in pairs."""
    by_unit: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SIZE, SIZE // 8], [4, 1], [1, 0])
    by_pair: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(gl.bfloat16, [TOKENS, SIZE], LAYOUT)
    rows = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, by_unit))[:, None]
    tile.store(gl.load(values_ptr + rows * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(0, by_unit))[None, :]))
    rows = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, by_pair))[:, None]
    columns = gl.arange(0, SIZE, layout=gl.SliceLayout(0, by_pair))[None, :]
    gl.store(values_ptr + rows * SIZE + columns, tile.load(by_pair))


@gluon.jit
def _register_layout_kernel(ROWS: gl.constexpr, TOKENS: gl.constexpr):
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    see(hopper._by_lane(gl.zeros([ROWS, TOKENS], gl.float32, mma), ROWS, TOKENS).type.layout)


def layout_of(kernel, monkeypatch: pytest.MonkeyPatch, **constants: int):
    SEEN.clear()
    # A kernel out of the cache is not looked at again.
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    source = GluonASTSource(kernel, dict.fromkeys(constants, "constexpr"), constants)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return SEEN[0]


def atoms(tokens: int, size: int) -> list[list[int]]:
    """Token and element at every power of two of a K-major operand, from the arithmetic of its swizzle atoms.

    An atom is 8 rows of `width` bytes, stored in one piece; atoms follow each other along the rows first, then along
    the embedding. Within 1024 bytes, the 16-byte unit is exchanged by the bits of the address above it.
    """
    width = min(128, 2 * size)
    bases = []
    for bit in range((tokens * size).bit_length() - 1):
        stored = 2 << bit
        plain = stored ^ ((stored >> 7) & (width // 16 - 1)) << 4
        block, inside = divmod(plain, tokens * width)
        bases.append([inside // width, (block * width + inside % width) // 2])
    return bases


def instructions(layout, tokens: int, size: int) -> str:
    constants = {"LAYOUT": layout, "TOKENS": tokens, "SIZE": size}
    source = GluonASTSource(_stored_kernel, {"values_ptr": "*bf16"} | dict.fromkeys(constants, "constexpr"), constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    return ptx[: ptx.index(".section")]


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("tokens", [64, 128])
def test_tokens_lie_in_swizzle_atoms(tokens: int, size: int) -> None:
    """The same instructions store and load a tile in the kernel's layout, and in one made from the arithmetic."""
    layout = gl.NVMMASharedLayout.get_default_for([tokens, size], gl.bfloat16)
    bases = atoms(tokens, size)
    expected = instructions(gl.SharedLinearLayout(bases, [], 1024), tokens, size)
    assert instructions(layout, tokens, size) == expected
    # Another order of the units must make a difference, or the claim above would be empty.
    bases[3], bases[-1] = bases[-1], bases[3]
    assert instructions(gl.SharedLinearLayout(bases, [], 1024), tokens, size) != expected


@pytest.mark.parametrize(("rows", "tokens"), [(128, 64), (64, 64), (64, 128)])
def test_a_maximum_over_a_lanes_columns_stays_in_the_lane(rows: int, tokens: int, monkeypatch) -> None:
    layout = layout_of(_register_layout_kernel, monkeypatch, ROWS=rows, TOKENS=tokens)
    elsewhere = layout.lane_bases + layout.warp_bases + layout.block_bases
    assert all(basis[2] == 0 for basis in elsewhere)
    columns = [basis[2] for basis in layout.reg_bases if basis[2]]
    assert columns == sorted(columns)
    assert sum(columns) == tokens // 4 - 1
    # Two columns of a row, the same of the row eight below, and so on, as `_first_maxima_ptx` expects.
    assert layout.reg_bases[:5] == [[0, 0, 1], [8, 0, 0], [0, 0, 2], [0, 0, 4], [0, 0, 8]]


def compiled(**options) -> str:
    constants = {
        "EMBEDDING": 128, "BLOCK_EMBEDDING": 128, "BLOCK_ROWS": 256, "BLOCK_TOKENS": 64, "GROUP": 32, "STAGES": 6,
        "PARTS": 2, "PACKED": False, "HAS_QUERIES_MASK": False, "HAS_DOCUMENTS_MASK": False, "ZERO_MASKED": False,
        "NORMALIZE": False, "WITH_WINNERS": False,
    } | options  # fmt: skip
    pointers = {"queries_ptr": "*bf16", "documents_ptr": "*bf16", "sums_ptr": "*fp32"}
    if constants["WITH_WINNERS"]:
        pointers["winners_ptr"] = "*i16"
    signature, attributes = {}, {}
    for index, parameter in enumerate(hopper.hopper.kernel.params):
        name = parameter.name
        if name.endswith("_ptr") and name not in pointers:
            constants[name] = None
        signature[name] = "constexpr" if name in constants else pointers.get(name, "i32")
        if name in pointers or name.startswith("stride"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(hopper.hopper.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"WITH_WINNERS": True, "PARTS": 4},
        {"EMBEDDING": 48, "BLOCK_EMBEDDING": 64},
        {"EMBEDDING": 256, "BLOCK_EMBEDDING": 256, "BLOCK_ROWS": 128},
    ],
    ids=str,
)
def test_products_take_queries_from_registers_and_tokens_by_16_bytes(options: dict) -> None:
    ptx = compiled(**options)
    products = re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, (\S)", ptx)
    assert set(products) == {"{"}, "the first operand must be a list of registers"
    copies = re.findall(r"cp\.async\.(\w+)\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)
    assert set(copies) == {("cg", "0x10")}


def test_the_choice_of_the_kernel() -> None:
    assert hopper_tile(9, 128, 2, 1024, 180, False) is not None
    assert hopper_tile(9, 128, 2, 128, 180, False) is None, "few rows are bound by memory"
    assert hopper_tile(9, 128, 4, 1024, 180, False) is None, "float32 has no such product"
    assert hopper_tile(9, 512, 2, 1024, 180, False) is None, "rows do not fit registers"
    assert hopper_tile(8, 128, 2, 1024, 180, False) is None
    assert hopper_tile(10, 128, 2, 1024, 180, False) is None
    assert copied_by_16_bytes(40, (480, 48, 48))
    assert not copied_by_16_bytes(40, (400, 40, 40))
    assert not copied_by_16_bytes(44, (480, 48, 48))


def test_a_tensor_that_is_not_aligned_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of 16 bytes need addresses that are multiples of 16: other tensors go to the plain kernel."""
    from pylate_flash.kernels import forward

    served = []
    monkeypatch.setattr(forward, "architecture", lambda device: (9, 132))
    for name in ("_stacked", "_hopper"):
        launcher = type("Fake", (), {"bind": lambda self, *_, name=name, **__: lambda *tensors: served.append(name)})()
        monkeypatch.setattr(forward, name, launcher if name == "_stacked" else lambda launcher=launcher: launcher)
    forward.bound_maxsim.cache_clear()
    forward._bound_stacked.cache_clear()
    queries = torch.empty(8, 32, 128, dtype=torch.float16)
    storage = torch.empty(4 * 50 * 128 + 1, dtype=torch.float16)
    for start in (0, 1):
        documents = storage[start : start + 4 * 50 * 128].view(1, 4, 50, 128)
        forward.maxsim_forward(queries, documents, None, None, False, False, False, "ieee")
    forward.bound_maxsim.cache_clear()
    forward._bound_stacked.cache_clear()
    assert served == ["_hopper", "_stacked"]


def test_the_fused_projection_serves_few_query_rows_on_hopper() -> None:
    assert fused_tile(9, 32, 128, 768, 2) is not None
    for arguments in [(9, 129, 128, 768, 2), (8, 32, 128, 768, 2), (10, 32, 128, 768, 2), (9, 32, 128, 768, 4)]:
        assert fused_tile(*arguments) is None
    for arguments in [(9, 32, 136, 768, 2), (9, 32, 100, 768, 2), (9, 32, 128, 770, 2)]:
        assert fused_tile(*arguments) is None


@pytest.mark.parametrize("rows", [1, 32, 100, 128])
@pytest.mark.parametrize("size", [8, 48, 128])
def test_the_fused_projection_has_loads_in_flight(rows: int, size: int) -> None:
    tile = fused_tile(9, rows, size, 768, 2)
    assert tile is not None
    assert tile.num_stages >= 3
    assert tile.blocks * tile.columns >= rows
