"""Every kernel compiles to a cubin for compute capability 8.0, 9.0 and 10.0, with the arguments of a real launch.

No GPU is needed: the launch functions run up to the launch, which is recorded and compiled for the target instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.language import target_info

from pylate_flash.kernels import (
    backward,
    cuts,
    forward,
    fused,
    gradients,
    hopper,
    losses,
    masks,
    norms,
    scatter,
    winner_lists,
)
from pylate_flash.kernels.launch import Launcher, Sequence
from tests.kernels.backward_cases import dense, packed

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32",
    torch.int16: "*i16", torch.uint16: "*u16", torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1",
}  # fmt: skip
# Shared memory that one block may take, in bytes, by compute capability.
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}


class Recorder(Launcher):
    """Keeps what a kernel is launched with, and compiles that for a target instead."""

    def __init__(self, launcher: Launcher) -> None:
        super().__init__(launcher.kernel, launcher.follows)

    def bind(
        self,
        grid,
        integers,
        strides,
        constants,
        num_warps,
        num_stages,
        max_registers=None,
        described=(),
    ) -> Callable[..., None]:
        assert all(programs >= 1 for programs in grid)

        def launch(*tensors) -> None:
            self.arguments = (*tensors, *integers, *strides, *constants)
            self.described = described
            self.options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": max_registers}

        launch.direct = None
        return launch

    def compile(self, capability: int):
        signature, constants, attributes = {}, {}, {}
        for index, (parameter, value) in enumerate(zip(self.kernel.params, self.arguments, strict=True)):
            name = parameter.name
            if index < len(self.described):
                matrix = self.described[index]
                assert matrix.rows * matrix.columns == value.numel()
                signature[name] = f"tensordesc<{TYPES[value.dtype][1:]}{list(matrix.block)},{matrix.layout!r}>"
            elif isinstance(value, torch.Tensor):
                signature[name] = TYPES[value.dtype]
                attributes[(index,)] = [["tt.divisibility", 16]]
            elif parameter.is_constexpr or value is None:
                signature[name] = "constexpr"
                constants[name] = value
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                signature[name] = "i32"
                if not parameter.do_not_specialize and value % 16 == 0:
                    attributes[(index,)] = [["tt.divisibility", 16]]
        language = GluonASTSource if self.kernel.is_gluon() else ASTSource
        source = language(self.kernel, signature, constants, attributes)
        target = GPUTarget("cuda", capability, 32)
        overlaps = self.follows and capability >= 90
        with pytest.MonkeyPatch.context() as patch:

            def current_target() -> GPUTarget:
                return target

            current_target.__triton_builtin__ = True
            patch.setattr(target_info, "current_target", current_target)
            compiled = triton.compile(source, target=target, options=self.options | {"launch_pdl": overlaps})
        # Programs that start early wait for what they read; older devices know neither.
        assert ("griddepcontrol.wait" in compiled.asm["ptx"]) is overlaps
        return compiled


@pytest.fixture(params=[80, 90, 100])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(forward, "architecture", lambda device: (request.param // 10, 132))
    bound = (
        forward.bound_maxsim,
        forward._bound_stacked,
        forward._bound_single,
        norms._bound,
        masks.bound_active_tokens,
    )
    for function in bound:
        function.cache_clear()
    yield request.param
    for function in bound:
        function.cache_clear()


def check(module, name: str, launch: Callable[[], object], capability: int, monkeypatch: pytest.MonkeyPatch):
    if name == "_hopper":
        recorder = Recorder(hopper.hopper)
        monkeypatch.setattr(module, name, lambda: recorder)
    else:
        recorder = Recorder(getattr(module, name))
        monkeypatch.setattr(module, name, recorder)
    launch()
    compiled = recorder.compile(capability)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED_MEMORY[capability]
    return compiled


def inputs(dtype: torch.dtype, size: int, n_queries: int, query_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(n_queries, query_length, size, dtype=dtype), torch.empty(1, 40, 180, size, dtype=dtype)


def stacked(capability: int, dtype: torch.dtype, size: int) -> str:
    """The kernel that serves many query rows."""
    return "_hopper" if capability == 90 and dtype != torch.float32 and size <= 256 else "_stacked"


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.bfloat16, 48), (torch.bfloat16, 256), (torch.bfloat16, 512), (torch.float16, 16), (torch.float16, 128),
        (torch.float32, 128), (torch.float32, 512),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("name", "n_queries"), [("_stacked", 32), ("_single", 1)])
def test_forward(name: str, n_queries: int, size: int, dtype: torch.dtype, capability: int, monkeypatch) -> None:
    queries, documents = inputs(dtype, size, n_queries, 32)

    def launch() -> None:
        forward.maxsim_forward(queries, documents, None, None, False, False, False, "ieee")

    name = stacked(capability, dtype, size) if name == "_stacked" else name
    compiled = check(forward, name, launch, capability, monkeypatch)
    if dtype != torch.float32 and size == 128 and capability in (90, 100):
        assert {90: "wgmma", 100: "tcgen05"}[capability] in compiled.asm["ptx"]


@pytest.mark.parametrize(("name", "n_queries"), [("_stacked", 32), ("_single", 1)])
@pytest.mark.parametrize("zero_masked", [False, True])
def test_forward_with_everything(name: str, n_queries: int, zero_masked: bool, capability: int, monkeypatch) -> None:
    queries, documents = inputs(torch.bfloat16, 128, n_queries, 32)
    masks = [torch.ones(tensor.shape[:-1], dtype=torch.bool) for tensor in (queries, documents)]
    monkeypatch.setattr(forward, "inverse_norms", lambda embeddings: torch.ones(embeddings.shape[:-1]))
    monkeypatch.setattr(forward, "active_tokens", lambda mask: (mask.int(), torch.ones(*mask.shape[:-1], 2).int()))

    def launch() -> None:
        forward.maxsim_forward(queries, documents, *masks, True, zero_masked, True, "ieee")

    name = stacked(capability, torch.bfloat16, 128) if name == "_stacked" else name
    check(forward, name, launch, capability, monkeypatch)


@pytest.mark.parametrize(
    ("name", "n_queries", "candidates"),
    [
        ("_stacked", 32, None),
        ("_single", 1, None),
        ("_single", 2, torch.tensor([0, 3, 4])),
    ],
)
@pytest.mark.parametrize(
    ("longest", "normalize", "with_winners"),
    [(40, False, False), (40, True, True), (9000, False, False), (9000, True, True)],
)
def test_varlen(
    name: str,
    n_queries: int,
    candidates,
    longest: int,
    normalize: bool,
    with_winners: bool,
    capability: int,
    monkeypatch,
) -> None:
    queries = torch.empty(n_queries, 32, 128, dtype=torch.bfloat16)
    documents = torch.empty(9030, 128, dtype=torch.bfloat16)
    bounds = torch.tensor([0, 10, 20, 30, 9030], dtype=torch.int32)
    monkeypatch.setattr(forward, "inverse_norms", lambda embeddings: torch.ones(embeddings.shape[:-1]))
    merge = Recorder(cuts._merge)
    monkeypatch.setattr(cuts, "_merge", merge)

    def launch() -> None:
        forward.maxsim_varlen_forward(
            queries, None, documents, bounds, candidates, 3, longest, normalize, with_winners, "ieee"
        )

    if name == "_stacked" and longest == 40:
        name = stacked(capability, torch.bfloat16, 128)
    compiled = check(forward, name, launch, capability, monkeypatch)
    if capability == 90 and name != "_single":
        assert "wgmma" in compiled.asm["ptx"]
    assert hasattr(merge, "arguments") == (longest == 9000), "documents are cut where one may be long, and only there"
    if longest == 9000:
        assert merge.compile(capability).asm["cubin"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "d_model", "n_queries", "packed", "everything"),
    [
        (128, 768, 1, False, False), (128, 768, 4, True, False), (96, 1000, 3, False, True), (16, 8, 1, True, True),
        (128, 4096, 4, False, True),
    ],
)  # fmt: skip
def test_fused(
    size: int, d_model: int, n_queries: int, packed: bool, everything: bool, dtype: torch.dtype, monkeypatch
) -> None:
    """For Hopper alone: the second product takes its first operand from registers, and the copy engine copies."""
    queries, weight = torch.empty(n_queries, 32, size, dtype=dtype), torch.empty(size, d_model, dtype=dtype)
    hidden = torch.empty(40, 180, d_model, dtype=dtype)
    bounds = torch.arange(41, dtype=torch.int32) * 180 if packed else None
    masks = [None, None]
    if everything:
        masks = [torch.ones(n_queries, 32, dtype=torch.bool), None if packed else torch.ones(40, 180, dtype=torch.bool)]
    monkeypatch.setattr(fused, "architecture", lambda device: (9, 132))
    fused.bound_fused.cache_clear()
    finish = Recorder(fused._finish)
    monkeypatch.setattr(fused, "_finish", finish)

    def launch() -> None:
        bias = weight[:, 0].contiguous() if everything else None
        documents = hidden.flatten(0, 1) if packed else hidden
        score = fused.bound_fused(
            queries.shape, queries.stride(), dtype, queries.device, 40 * 180, 40, 0 if packed else 180, weight.shape,
            None if bounds is None else bounds.dtype, everything, everything, masks[1] is not None, True,
            everything and not packed,
        )  # fmt: skip
        assert score is not None
        score(queries, documents, weight, bias, *masks, bounds)

    compiled = check(fused, "_fused", launch, 90, monkeypatch)
    fused.bound_fused.cache_clear()
    products = re.findall(r"wgmma\.mma_async\S+ \{[^}]*\}, (\S)", compiled.asm["ptx"])
    assert {"%", "{"} == set(products), "states come from shared memory, embeddings from registers"
    assert compiled.asm["ptx"].count("cp.async.bulk.tensor.2d") == 3, "two parts and the weight"
    # It may start early, and waits for what it reads.
    assert "griddepcontrol.launch_dependents" in compiled.asm["ptx"]
    assert finish.follows
    finish.compile(90)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("size", "d_model"), [(128, 768), (96, 1000), (16, 8)])
def test_projection(size: int, d_model: int, normalize: bool, monkeypatch) -> None:
    hidden, weight = torch.empty(300, d_model).bfloat16(), torch.empty(size, d_model).bfloat16()
    monkeypatch.setattr(fused, "architecture", lambda device: (9, 132))
    fused.bound_projection.cache_clear()

    def launch() -> None:
        project = fused.bound_projection(300, weight.shape, weight.dtype, weight.device, True, normalize)
        assert project is not None
        project(hidden, weight, weight[:, 0].contiguous(), hidden[:, :size], torch.empty(300) if normalize else None)

    compiled = check(fused, "_projection", launch, 90, monkeypatch)
    fused.bound_projection.cache_clear()
    assert "wgmma" in compiled.asm["ptx"]
    stores = re.findall(r"st\.global\.(\S+)", compiled.asm["ptx"])
    assert set(stores) <= {"v4.b32", "b32"}, "embeddings leave by 16 bytes, norms by 4"


BACKWARD = {
    backward: ("_gather",),
    gradients: ("_finish",),
    winner_lists: ("_list", "_sort", "_scan", "_place", "_starts", "_sum", "_combine"),
    scatter: ("_onehot", "_atomic"),
}


def check_backward(run: Callable[[], object], names: set[str], capability: int, monkeypatch) -> None:
    """Compile what `run` launches, which must be the kernels of these names."""
    monkeypatch.setattr(backward, "architecture", lambda device: (capability // 10, 132))
    monkeypatch.setattr(backward, "inverse_norms", lambda embeddings: torch.ones(embeddings.shape[:-1]))
    recorders = {}
    for module, kernels in BACKWARD.items():
        for name in kernels:
            recorders[name] = Recorder(getattr(module, name))
            monkeypatch.setattr(module, name, recorders[name])
    bound = (backward.bound_backward, backward._bound_varlen_backward)
    for function in bound:
        function.cache_clear()
    try:
        run()
    finally:
        for function in bound:
            function.cache_clear()
    launched = {name: recorder for name, recorder in recorders.items() if hasattr(recorder, "arguments")}
    assert set(launched) == names
    for recorder in launched.values():
        compiled = recorder.compile(capability)
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared <= SHARED_MEMORY[capability]


@pytest.mark.parametrize(
    ("dtype", "size", "normalize"),
    [(torch.bfloat16, 48, False), (torch.float16, 128, True), (torch.float32, 512, False), (torch.float32, 4096, True)],
)
def test_backward(normalize: bool, size: int, dtype: torch.dtype, capability: int, monkeypatch) -> None:
    """Queries of 1024 rows have lists that are summed in parts; one of 32 rows shares its documents among programs."""
    few, many = dense((1, 32), (1, 64, 8), size, "none"), dense((32, 32), (1, 2, 180), size, "none")
    halves = [
        replace(problem, queries=problem.queries.to(dtype), documents=problem.documents.to(dtype), normalize=normalize)
        for problem in (few, many)
    ]
    finish = {"_finish"} if normalize or dtype != torch.float32 else set()
    for problem, way, needs, names in (
        (halves[0], "csr", (True, False), {"_gather", "_finish"}),
        (halves[0], "csr", (False, True), {"_list", "_sum"}),
        (halves[1], "csr", (False, True), {"_sort", "_scan", "_place", "_sum", "_combine"}),
        (halves[1], "onehot", (False, True), {"_onehot"}),
        (halves[0], "auto", (False, True), {"_onehot"}),
        (halves[1], "auto", (False, True), {"_sort", "_scan", "_place", "_sum", "_combine"}),
        (halves[1], "atomic", (False, True), {"_atomic"} | finish),
    ):
        check_backward(lambda p=problem, w=way, n=needs: p.run(w, *n), names, capability, monkeypatch)


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (200, 300), (512, 2047)])
def test_lists_by_one_program(rows: int, length: int, capability: int, monkeypatch) -> None:
    problem = dense((1, rows), (1, 2, length), 16, "none")
    check_backward(lambda: problem.run("csr", queries=False), {"_list", "_sum"}, capability, monkeypatch)


def test_backward_of_long_documents(capability: int, monkeypatch) -> None:
    problem = dense((32, 32), (1, 1, 3000), 16, "none")
    names = {"_sort", "_scan", "_place", "_starts", "_sum", "_combine"}
    check_backward(lambda: problem.run("csr", queries=False), names, capability, monkeypatch)


@pytest.mark.parametrize("candidates", [None, [0, 2, 3]])
def test_varlen_backward(candidates: list[int] | None, capability: int, monkeypatch) -> None:
    problem = packed((2, 600), [3, 0, 70], 128, "none", candidates, dtype=torch.bfloat16)
    for way, names in (
        ("csr", {"_gather", "_sort", "_scan", "_place", "_sum", "_combine"}),
        ("onehot", {"_gather", "_onehot"}),
        ("atomic", {"_gather", "_atomic", "_finish"}),
    ):
        check_backward(lambda w=way: problem.run(w), names, capability, monkeypatch)


@pytest.mark.parametrize("size", [48, 512])
def test_inverse_norms(size: int, capability: int, monkeypatch) -> None:
    embeddings = torch.empty(4, 32, size, dtype=torch.bfloat16)
    check(norms, "_inverse_norms", lambda: norms.inverse_norms(embeddings), capability, monkeypatch)


@pytest.mark.parametrize("length", [180, 3000])
def test_active_tokens(length: int, capability: int, monkeypatch) -> None:
    mask = torch.ones(4, length, dtype=torch.bool)
    check(masks, "_active_tokens", lambda: masks.active_tokens(mask), capability, monkeypatch)


def test_sums_of_long_queries(capability: int, monkeypatch) -> None:
    queries, documents = inputs(torch.bfloat16, 128, 3, 300)
    layout = (queries.shape, queries.stride(), queries.dtype, queries.device, documents.shape, documents.stride())
    scores, winners = torch.empty(3, 40), torch.empty(1, 40, 900, dtype=torch.int16)

    def run() -> None:
        sequence = Sequence(len(forward.Slots._fields))
        slots = forward.Slots(*range(len(forward.Slots._fields)))
        forward.add_maxsim(sequence, *layout, True, False, False, False, "ieee", slots)
        sequence(queries, documents, None, None, None, scores, winners)

    name = stacked(capability, torch.bfloat16, 128)
    with monkeypatch.context() as patch:
        if name == "_hopper":
            patch.setattr(forward, name, lambda: Recorder(hopper.hopper))
        else:
            patch.setattr(forward, name, Recorder(getattr(forward, name)))
        check(forward, "_add_sums", run, capability, patch)


@pytest.mark.parametrize("divergence", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_losses(reduction: str, divergence: bool, capability: int, monkeypatch) -> None:
    scores, grad_loss = torch.empty(40, 3000), torch.empty(40 if reduction == "none" else ())
    target = torch.empty(40, 3000) if divergence else torch.zeros(40, dtype=torch.int64)
    comparison = losses.Comparison(divergence, True, False, 0.1, reduction)

    def run(counts: torch.Tensor | None) -> None:
        losses.bound_loss.cache_clear()
        bound = losses.bound_loss((40, 3000), scores.device, comparison)
        _, statistics = bound.forward(scores, target)
        bound.gradient(grad_loss, scores, target, statistics, counts)

    for name in ("_losses", "_gradient") if reduction == "none" else ("_losses", "_gradient", "_total"):
        for counts in (None, torch.empty(40)):
            with monkeypatch.context() as patch:
                for other in {"_losses", "_gradient", "_total"} - {name}:
                    patch.setattr(losses, other, Recorder(getattr(losses, other)))
                check(losses, name, lambda counts=counts: run(counts), capability, patch)
    losses.bound_loss.cache_clear()


@pytest.mark.parametrize("sizes", [(70, 9), (70, 0), (0, 9)])
def test_rescale(sizes: tuple[int, int], capability: int, monkeypatch) -> None:
    monkeypatch.setattr(losses, "architecture", lambda device: (capability // 10, 132))
    tensors = [torch.empty(size, dtype=torch.bfloat16) if size else None for size in sizes]

    def run() -> None:
        losses.bound_rescale.cache_clear()
        losses.bound_rescale(*sizes, torch.device("cpu"))(torch.ones(()), *tensors)

    check(losses, "_rescale", run, capability, monkeypatch)
    losses.bound_rescale.cache_clear()
