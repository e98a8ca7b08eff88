"""The Hopper kernel's operands lie where its instructions expect them, and its choice is the one that was measured."""

from __future__ import annotations

import os
import re
from dataclasses import replace

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
from pylate_flash.kernels.config import config_of, copied_by_16_bytes, hopper_tail, hopper_tile
from pylate_flash.kernels.forward import hopper, maxima, maxsim_forward, stacked
from pylate_flash.kernels.plan import forward_plan
from pylate_flash.kernels.plan_operations import fused_tile
from pylate_flash.kernels.tables import Blocks
from pylate_flash.problem import Options, Problem, Tensors, kind_of, problem_of
from tests.kernels.recorder import record

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

SEEN: list = []


@builtin
def see(layout, _semantic=None):
    SEEN.append(getattr(layout, "value", layout))


@gluon.jit
def _stored_kernel(values_ptr, LAYOUT: gl.constexpr, TOKENS: gl.constexpr, SIZE: gl.constexpr):
    """A tile as the kernel copies it, 16 bytes per thread, and read back in pairs."""
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
    see(maxima.split_by_lane(gl.zeros([ROWS, TOKENS], gl.float32, mma), ROWS, TOKENS).type.layout)


def layout_of(kernel, monkeypatch: pytest.MonkeyPatch, **constants: int):
    SEEN.clear()
    # A kernel out of the cache is not looked at again.
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
    """The same instructions store and load a tile in the kernel's layout, and in one made from docs/layouts.md."""
    layout = gl.NVMMASharedLayout.get_default_for([tokens, size], gl.bfloat16)
    bases = make_layouts.bases(tokens, size)
    expected = instructions(gl.SharedLinearLayout(bases, [], 1024), tokens, size)
    assert instructions(layout, tokens, size) == expected
    # Another order of the units must make a difference, or the claim above would be empty.
    bases[3], bases[-1] = bases[-1], bases[3]
    assert instructions(gl.SharedLinearLayout(bases, [], 1024), tokens, size) != expected


@pytest.mark.parametrize("size", [32, 64, 128, 256])
def test_tokens_of_8_bits_lie_in_the_same_atoms(size: int) -> None:
    """Two of them where one in half precision lies."""
    layout = gl.NVMMASharedLayout.get_default_for([128, size], gl.int8)
    bases = [[0, 1], *([row, 2 * column] for row, column in make_layouts.bases(128, size // 2))]
    expected = instructions(gl.SharedLinearLayout(bases, [], 1024), 128, size, "*i8")
    assert instructions(layout, 128, size, "*i8") == expected


@pytest.mark.parametrize(("rows", "tokens"), [(128, 64), (64, 64), (64, 128), (128, 128)])
def test_a_maximum_over_a_lanes_columns_stays_in_the_lane(rows: int, tokens: int, monkeypatch) -> None:
    layout = layout_of(_register_layout_kernel, monkeypatch, ROWS=rows, TOKENS=tokens)
    elsewhere = layout.lane_bases + layout.warp_bases + layout.block_bases
    assert all(basis[2] == 0 for basis in elsewhere)
    columns = [basis[2] for basis in layout.reg_bases if basis[2]]
    assert columns == sorted(columns)
    assert sum(columns) == tokens // 4 - 1
    # Two columns of a row, the same of the row eight below, and so on, as `_first_maxima_ptx` expects.
    assert layout.reg_bases[:5] == [[0, 0, 1], [8, 0, 0], [0, 0, 2], [0, 0, 4], [0, 0, 8]]


# That of bfloat16 embeddings of 128 elements, and tiles and blocks of others.
KIND = kind_of(
    torch.bfloat16, torch.device("cpu"), 128, None, None, None, None, False, "exclude", "highest", with_winners=False
)
CONFIG = config_of("hopper", KIND, tables.HOPPER, Blocks(128, 0, False), (1, 1), group=32)
ARGMAX = {"with_winners": True, "tile": tables.HOPPER_WINNERS}
NARROW, LONG = tables.HOPPER_NARROW, tables.HOPPER_LONG._replace(num_stages=6)
OF_48 = {"size": 48, "blocks": Blocks(64, 0, False)}
OF_96 = {"size": 96, "blocks": Blocks(64, 32, False)}
OF_256 = {"size": 256, "blocks": Blocks(256, 0, False)}
OF_320 = {"size": 320, "blocks": Blocks(256, 64, False)}


def compiled(**options) -> str:
    config = replace(CONFIG, **options)
    pointers = {"queries_ptr": "*bf16", "documents_ptr": "*bf16", "sums_ptr": "*fp32"}
    if config.with_winners:
        pointers["winners_ptr"] = "*i16"
    if config.normalize:
        pointers |= {"queries_scale_ptr": "*fp32", "documents_scale_ptr": "*fp32"}
    if config.has_documents_mask:
        pointers |= {"active_ptr": "*i32", "bounds_ptr": "*i32"}
    constants, signature, attributes = {"config": config}, {}, {}
    function = hopper._hopper_kernel.function
    for index, parameter in enumerate(function.params):
        name = parameter.name
        if name.endswith("_ptr") and name not in pointers:
            constants[name] = None
        of_number = "fp32" if name == "empty_score" else "i32"
        signature[name] = "constexpr" if name in constants else pointers.get(name, of_number)
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
        {"tile": tables.HOPPER_LONG_WIDE} | OF_256,
    ],
    ids=str,
)
def test_inverse_norms_come_with_the_tokens(options: dict) -> None:
    """While a product is under way, the parts that multiply load nothing from global memory."""
    ptx = compiled(normalize=True, has_documents_mask=True, **options)
    copies = re.findall(r"cp\.async\.(\w+)\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)
    assert set(copies) == {("cg", "0x10"), ("ca", "0x4")}
    under_way = re.findall(r"wgmma\.commit_group.*?wgmma\.wait_group", ptx, re.DOTALL)
    assert under_way
    assert not any("ld.global" in part for part in under_way)
    assert all("ld.shared" in part for part in under_way)


@pytest.mark.parametrize("tail", [16, 32])
@pytest.mark.parametrize("blocks", [(64, 0), (128, 0), (64, 32)])
def test_a_narrow_product_reads_what_a_wide_one_would(tail: int, blocks: tuple[int, int]) -> None:
    """The blocks of an embedding are as far from each other, by what is added to where a tile begins."""
    ptx = compiled(size=sum(blocks), blocks=Blocks(*blocks, False), tail=tail)
    added = dict(re.findall(r"(?:add\.s64|or\.b64)\s+(%rd\d+), %rd\d+, (-?\d+);", ptx))
    offsets = []
    for columns in (64, tail):
        products = re.findall(rf"wgmma\.mma_async\S+m64n{columns}k16\S+ \{{[^}}]*\}}, \{{[^}}]*\}}, (%rd\d+)", ptx)
        offsets.append([added[descriptor] for descriptor in products])
    assert offsets[0]
    assert offsets[0] == offsets[1]


def test_where_the_last_tile_is_narrower() -> None:
    tile = hopper_tile(9, 128, 2, False, False, False)
    tails = {7: 16, 30: 32, 64: 0, 77: 16, 96: 32, 97: 0, 180: 0, 256: 0, 333: 16, 350: 0, 400: 0}
    assert {length: hopper_tail(tile, length) for length in tails} == tails
    assert hopper_tail(hopper_tile(9, 256, 2, False, False, False), 77) == 0


def test_the_choice_of_the_kernel() -> None:
    assert hopper_tile(9, 128, 2, False, False, False) is not None
    assert hopper_tile(9, 128, 4, False, False, False) is None, "float32 has no such product"
    assert hopper_tile(9, 512, 2, False, False, False) is None, "rows do not fit registers"
    assert hopper_tile(8, 128, 2, False, False, False) is None
    assert hopper_tile(10, 128, 2, False, False, False) is None
    assert copied_by_16_bytes(40, (480, 48, 48))
    assert copied_by_16_bytes(40, (400, 40, 40))
    assert not copied_by_16_bytes(40, (8 << 30, 40, 40)), "a stride of more than 32 bits is not multiplied"
    assert copied_by_16_bytes(48, (16 << 30, 48, 48))
    assert not copied_by_16_bytes(44, (480, 48, 48))
    assert not copied_by_16_bytes(40, (440, 44, 44))
    assert copied_by_16_bytes(48, (960, 48, 48), 1)
    assert not copied_by_16_bytes(40, (480, 48, 48), 1)
    assert not copied_by_16_bytes(48, (1120, 56, 56), 1)


def problem(
    queries: tuple[int, ...], documents: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, winners: bool = False
) -> Problem:
    return problem_of(
        Tensors(torch.empty(queries, dtype=dtype), torch.empty(documents, dtype=dtype)), Options(), winners
    )


def packed(n_queries: int, longest: int, normalize: bool = False) -> Problem:
    queries, documents = torch.empty(n_queries, 32, 128).bfloat16(), torch.empty(longest + 30, 128).bfloat16()
    bounds = torch.tensor([0, 10, 20, 30, longest + 30])
    options = Options(max_document_length=longest, normalize=normalize)
    return problem_of(Tensors(queries, documents, documents_cu_seqlens=bounds), options)


@pytest.mark.parametrize("n_queries", [4, 16])
def test_winners_are_found_in_whole_tiles(n_queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "architecture", lambda device: (9, 132))
    plans = [forward_plan(problem((n_queries, 32, 128), (40, 77, 128), winners=winners)) for winners in (False, True)]
    assert [plan.config.tail for plan in plans] == [16, 0]


def test_what_the_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "architecture", lambda device: (9, 132))
    for served in (
        problem((16, 32, 128), (40, 180, 128)),
        problem((16, 32, 128), (40, 180, 128), torch.float16, winners=True),
        problem((2, 8, 128), (40, 180, 128), winners=True),
        problem((5, 32, 48), (40, 7, 48)),
        problem((16, 32, 40), (40, 7, 40)),
        problem((1, 300, 256), (40, 180, 256)),
        problem((5, 32, 320), (40, 64, 320), winners=True),
        problem((4, 150, 128), (4, 5, 180, 128)),
        packed(16, 40),
        packed(16, 2048, normalize=True),
    ):
        plan = forward_plan(served)
        assert plan.kernel == "hopper", plan.reason
        assert not plan.in_pieces
        group = plan.padded // plan.n_sums
        assert plan.config.group == group
        assert group <= plan.tile.rows // plan.tile.parts, "a sum lies within one part"
    for not_served, reason in (
        (problem((16, 32, 128), (40, 180, 128), torch.float32), "half precision"),
        (problem((16, 32, 512), (40, 180, 512)), "at most 384 dimensions"),
        (problem((16, 32, 44), (40, 7, 44)), "copied 16 bytes at a time"),
        (packed(16, 9000), "in pieces"),
    ):
        plan = forward_plan(not_served)
        assert plan.kernel == "stacked"
        assert reason in plan.reason
    assert forward_plan(problem((1, 32, 128), (40, 180, 128))).kernel == "single"
    assert forward_plan(problem((16, 32, 128), (16, 5, 180, 128))).kernel == "single"
    for major in (8, 10):
        monkeypatch.setattr(tables, "architecture", lambda device, major=major: (major, 132))
        assert forward_plan(problem((16, 32, 128), (40, 180, 128))).kernel == "stacked"


@pytest.mark.parametrize(
    ("query_length", "padded", "group"),
    [(1, 1, 1), (2, 2, 1), (7, 8, 8), (12, 12, 1), (24, 24, 8), (32, 32, 32), (33, 33, 1), (36, 40, 8), (77, 80, 16)],
)
def test_few_rows_are_padding(query_length: int, padded: int, group: int) -> None:
    plan = forward_plan(problem((96, query_length, 128), (40, 180, 128)))
    assert (plan.padded, plan.n_sums) == (padded, padded // group)


def test_where_storing_every_row_would_cost_more_than_padding() -> None:
    """Short documents, by their mean length where they are packed, and sums that take much memory."""
    bounds = torch.tensor([0, 10, 20, 30, 10000])
    queries, tokens = torch.empty(96, 33, 16), torch.empty(10000, 16)
    for n_documents, padded in ((3, 40), (4, 33)):
        tensors = Tensors(queries, tokens[: 30 * n_documents], documents_cu_seqlens=bounds[: n_documents + 1])
        if n_documents == 4:
            tensors = tensors._replace(documents=tokens)
        assert forward_plan(problem_of(tensors, Options(max_document_length=9970))).padded == padded
    assert forward_plan(problem((96, 33, 16), (40, 63, 16))).padded == 40
    assert forward_plan(problem((96, 33, 16), (40, 64, 16))).padded == 33
    many = torch.empty(1, 64, 16).expand(21300, 64, 16)
    for n_documents, padded in ((21000, 33), (21300, 40)):
        assert forward_plan(problem_of(Tensors(queries, many[:n_documents]), Options())).padded == padded


def test_a_tensor_that_is_not_aligned_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of 16 bytes need addresses that are multiples of 16: other tensors go to the plain kernel."""
    monkeypatch.setattr(tables, "architecture", lambda device: (9, 132))
    recorders = record(hopper, "_hopper", monkeypatch), record(stacked, "_stacked", monkeypatch)
    queries = torch.empty(8, 32, 128, dtype=torch.float16)
    storage = torch.empty(4 * 50 * 128 + 1, dtype=torch.float16)
    for start, launches in ((0, [1, 0]), (1, [1, 1])):
        tensors = Tensors(queries, storage[start : start + 4 * 50 * 128].view(4, 50, 128))
        maxsim_forward(problem_of(tensors, Options()), tensors)
        assert [recorder.launches for recorder in recorders] == launches


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
