"""The Hopper kernel's operands lie where its instructions expect them."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language._core import builtin

import make_layouts
from pylate_flash.kernels import tables
from pylate_flash.kernels.config import config_of
from pylate_flash.kernels.forward import hopper, hopper_parts, hopper_reductions
from pylate_flash.kernels.tiles import Blocks
from pylate_flash.problem import kind_of

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

SEEN: list = []


@builtin
def see(layout, _semantic=None):
    SEEN.append(getattr(layout, "value", layout))


@gluon.jit
def _stored_kernel(values_ptr, LAYOUT: gl.constexpr, TOKENS: gl.constexpr, SIZE: gl.constexpr):
    """Store a tile as the kernel copies it, 16 bytes per thread, and read it back in pairs."""
    dtype: gl.constexpr = values_ptr.dtype.element_ty
    UNIT: gl.constexpr = 128 // dtype.primitive_bitwidth
    by_unit: gl.constexpr = gl.BlockedLayout([1, UNIT], [32 * UNIT // SIZE, SIZE // UNIT], [4, 1], [1, 0])
    by_pair: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(dtype, [TOKENS, SIZE], LAYOUT)
    rows = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, by_unit))[:, None]
    tile.store(gl.load(values_ptr + rows * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(0, by_unit))[None, :]))
    rows = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, by_pair))[:, None]
    columns = gl.arange(0, SIZE, layout=gl.SliceLayout(0, by_pair))[None, :]
    gl.store(values_ptr + rows * SIZE + columns, tile.load(by_pair))


@gluon.jit
def _register_layout_kernel(ROWS: gl.constexpr, TOKENS: gl.constexpr):
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    see(hopper_reductions.split_by_lane(gl.zeros([ROWS, TOKENS], gl.float32, mma), ROWS, TOKENS).type.layout)


def seen(kernel, monkeypatch: pytest.MonkeyPatch, **constants: int):
    """The layout that a kernel passes to `see`."""
    SEEN.clear()
    # A cached kernel would not call `see` again.
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    source = GluonASTSource(kernel, dict.fromkeys(constants, "constexpr"), constants)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return SEEN[0]


def instructions(layout, tokens: int, size: int, dtype: str = "*bf16") -> str:
    constants = {"LAYOUT": layout, "TOKENS": tokens, "SIZE": size}
    source = GluonASTSource(_stored_kernel, {"values_ptr": dtype} | dict.fromkeys(constants, "constexpr"), constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    return ptx[: ptx.index(".section")]


@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("tokens", [64, 128])
def test_tokens_lie_in_swizzle_atoms(tokens: int, size: int) -> None:
    """The same instructions store and load a tile in the kernel's layout, and in one built from docs/layouts.md."""
    layout = gl.NVMMASharedLayout.get_default_for([tokens, size], gl.bfloat16)
    bases = make_layouts.bases(tokens, size)
    expected = instructions(gl.SharedLinearLayout(bases, [], 1024), tokens, size)
    assert instructions(layout, tokens, size) == expected
    # Another order of the units must change the instructions, or the assertion above would be vacuous.
    bases[3], bases[-1] = bases[-1], bases[3]
    assert instructions(gl.SharedLinearLayout(bases, [], 1024), tokens, size) != expected


@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_tokens_of_8_bits_lie_in_the_same_atoms(size: int) -> None:
    """Two elements of 8 bits take the place of one in half precision."""
    layout = gl.NVMMASharedLayout.get_default_for([128, size], gl.int8)
    bases = [[0, 1], *([row, 2 * column] for row, column in make_layouts.bases(128, size // 2))]
    expected = instructions(gl.SharedLinearLayout(bases, [], 1024), 128, size, "*i8")
    assert instructions(layout, 128, size, "*i8") == expected


@pytest.mark.parametrize(("rows", "tokens"), [(128, 64), (64, 64), (64, 128), (128, 128)])
def test_a_maximum_over_a_lanes_columns_stays_in_the_lane(rows: int, tokens: int, monkeypatch) -> None:
    layout = seen(_register_layout_kernel, monkeypatch, ROWS=rows, TOKENS=tokens)
    elsewhere = layout.lane_bases + layout.warp_bases + layout.block_bases
    assert all(basis[2] == 0 for basis in elsewhere)
    columns = [basis[2] for basis in layout.reg_bases if basis[2]]
    assert columns == sorted(columns)
    assert sum(columns) == tokens // 4 - 1
    # Two columns of a row, the same columns eight rows below, and so on, as `_first_maxima_ptx` expects.
    assert layout.reg_bases[:5] == [[0, 0, 1], [8, 0, 0], [0, 0, 2], [0, 0, 4], [0, 0, 8]]


# The kind of bfloat16 embeddings of 128 elements; tiles and blocks of other cases.
KIND = kind_of(
    torch.bfloat16, torch.device("cpu"), 128, None, None, None, None, False, "exclude", "ieee", with_argmax=False
)
CONFIG = config_of("hopper", KIND, tables.HOPPER, Blocks(128, 0, False), (1, 1), group=32)
ARGMAX = {"with_argmax": True, "tile": tables.HOPPER_ARGMAX}
NARROW, LONG = tables.HOPPER_NARROW, tables.HOPPER_LONG._replace(num_stages=6)
SHORT = {"tile": tables.HOPPER._replace(columns=32, num_stages=8), "starts_early": True}
LATE = {"starts_early": False}
STREAM = {"packed": True, "stream": True}
OF_48 = {"size": 48, "blocks": Blocks(64, 0, False)}
OF_96 = {"size": 96, "blocks": Blocks(64, 32, False)}
OF_256 = {"size": 256, "blocks": Blocks(256, 0, False)}
OF_320 = {"size": 320, "blocks": Blocks(256, 64, False)}


def compiled(**options) -> str:
    config = replace(CONFIG, **options)
    pointers = {"queries_ptr": "*bf16", "documents_ptr": "*bf16", "sums_ptr": "*fp32"}
    if config.with_argmax:
        pointers["argmax_ptr"] = "*i16"
    if config.normalize:
        pointers |= {"queries_scale_ptr": "*fp32", "documents_scale_ptr": "*fp32"}
    if config.packed:
        pointers["cu_seqlens_ptr"] = "*i32"
    if config.has_documents_mask:
        pointers |= {"active_ptr": "*i32", "bounds_ptr": "*i32"}
    constants, signature, attributes = {"config": config}, {}, {}
    function = hopper._hopper_kernel.function
    for index, parameter in enumerate(function.params):
        name = parameter.name
        if name.endswith("_ptr") and name not in pointers:
            constants[name] = None
        number_type = "fp32" if name == "empty_score" else "i32"
        signature[name] = "constexpr" if name in constants else pointers.get(name, number_type)
        if name in pointers or name.startswith("stride"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        ARGMAX,
        OF_48,
        OF_96,
        {"tail": 16},
        {"tail": 16, "tile": NARROW} | OF_96,
        {"tail": 32} | OF_96,
        {"tail": 32, "packed": True},
        {"tail": 32, "packed": True, "tile": NARROW} | OF_48,
        SHORT | {"packed": True},
        SHORT | {"packed": True, "tail": 16} | OF_96,
        STREAM,
        STREAM | {"tile": NARROW} | OF_48,
        STREAM | OF_96,
        STREAM | {"tile": LONG} | OF_256,
        STREAM | {"tile": tables.HOPPER_LONGEST} | OF_320,
        {"size": 72, "blocks": Blocks(64, 16, False)} | ARGMAX,
        {"tile": LONG} | OF_256,
        {"tile": tables.HOPPER_LONGEST} | OF_320,
    ],
    ids=str,
)
def test_products_take_queries_from_registers_and_tokens_by_16_bytes(options: dict) -> None:
    ptx = compiled(**options)
    products = re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, (\S)", ptx)
    assert set(products) == {"{"}, "the first operand must be a list of registers"
    copies = re.findall(r"cp\.async\.(\w+)\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)
    assert set(copies) == {("cg", "0x10")}


@pytest.mark.parametrize(
    "options",
    [
        ARGMAX,
        {"tail": 32},
        {"tile": LONG} | OF_256,
    ],
    ids=str,
)
def test_inverse_norms_come_with_the_tokens(options: dict) -> None:
    """While a product is in flight, the parts that multiply load nothing from global memory."""
    ptx = compiled(normalize=True, has_documents_mask=True, **options)
    copies = re.findall(r"cp\.async\.(\w+)\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)
    assert set(copies) == {("cg", "0x10"), ("ca", "0x4")}
    in_flight = re.findall(r"wgmma\.commit_group.*?wgmma\.wait_group", ptx, re.DOTALL)
    assert in_flight
    assert not any("ld.global" in part for part in in_flight)
    assert all("ld.shared" in part for part in in_flight)


@pytest.mark.parametrize("options", [{}, {"packed": True}, {"packed": True, "normalize": True}, OF_96], ids=str)
def test_sums_are_stored_while_the_next_product_is_under_way(options: dict) -> None:
    in_flight = r"wgmma\.commit_group(?:(?!wgmma\.wait_group).)*?st\.global"
    early, late = (re.findall(in_flight, compiled(**SHORT | options | start), re.DOTALL) for start in ({}, LATE))
    assert (len(early), len(late)) == (tables.HOPPER.parts, 0)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("options", [{}, OF_96, {"tile": NARROW}, {"normalize": True}, {"group": 128}], ids=str)
def test_what_multiplies_a_stream_waits_for_nobody_else(options: dict, parts: int) -> None:
    """One partition multiplies; from its first product on, it neither shuffles, nor stores, nor waits at a barrier.

    So its warp groups do not wait for each other; other warps, which load document boundaries, compute the sums.
    """
    tile = options.get("tile", tables.HOPPER)
    ptx = compiled(**STREAM | options | {"tile": tile._replace(parts=parts if tile.rows == 256 else 2)})
    partitions = re.split(r"setmaxnreg\.", ptx)
    (multiplies,) = [part for part in partitions if "wgmma.mma_async" in part]
    product_loop = multiplies[multiplies.index("wgmma.mma_async") : multiplies.rindex("barrier.sync")]
    assert not re.search(r"shfl|[sl][td]\.global|bar\.sync|ld\.local", product_loop)
    assert sum("st.global" in part for part in partitions) == 2


@pytest.mark.parametrize("tail", [16, 32])
@pytest.mark.parametrize("blocks", [(64, 0), (128, 0), (64, 32)])
def test_a_narrow_product_reads_what_a_wide_one_would(tail: int, blocks: tuple[int, int]) -> None:
    """The blocks of an embedding are at the same offsets from the start of a tile."""
    ptx = compiled(size=sum(blocks), blocks=Blocks(*blocks, False), tail=tail)
    added = dict(re.findall(r"(?:add\.s64|or\.b64)\s+(%rd\d+), %rd\d+, (-?\d+);", ptx))
    offsets = []
    for columns in (64, tail):
        products = re.findall(rf"wgmma\.mma_async\S+m64n{columns}k16\S+ \{{[^}}]*\}}, \{{[^}}]*\}}, (%rd\d+)", ptx)
        offsets.append([added[descriptor] for descriptor in products])
    assert offsets[0]
    assert offsets[0] == offsets[1]


def test_a_multiply_add_makes_of_an_integers_bits_what_a_conversion_and_a_product_make() -> None:
    """The arithmetic of `hopper_parts.scaled` and `unscaled`, with the kernel's constants, rounded to the same bits."""
    generator = np.random.default_rng(0)
    largest = 128 * 127 * 512
    integers = np.concatenate([np.arange(-1000, 1001), generator.integers(-largest, largest + 1, 200_000), [-largest]])
    scales = np.exp2(generator.uniform(-60, 60, len(integers))).astype(np.float32)
    floats = (integers + hopper_parts._BITS_OF_ONE.value).astype(np.int32).view(np.float32)
    # The product has 48 bits and float64 holds 53, so it is rounded once, by the cast to float32.
    scaled = (floats.astype(np.float64) * scales - scales).astype(np.float32)
    unit = np.float32(hopper_parts._INTEGER_UNIT.value)
    assert np.array_equal(scaled * np.where(scaled < 0, 2 * unit, unit), integers.astype(np.float32) * scales)
    # Halving keeps negative values below all others.
    assert np.array_equal(scaled < 0, integers < 0)
