"""Every kernel compiles to a cubin for compute capability 8.0, 9.0 and 10.0, with the arguments of a real launch.

No GPU is needed: the launch functions run up to the launch, which is recorded and compiled for the target instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pylate_flash.kernels import backward, cuts, forward, masks, norms
from pylate_flash.kernels.launch import Launcher

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32",
    torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1",
}  # fmt: skip
# Shared memory that one block may take, in bytes, by compute capability.
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}


class Recorder(Launcher):
    """Keeps what a kernel is launched with, and compiles that for a target instead."""

    def bind(
        self, grid, integers, strides, constants, num_warps, num_stages, max_registers=None
    ) -> Callable[..., None]:
        assert all(programs >= 1 for programs in grid)

        def launch(*tensors) -> None:
            self.arguments = (*tensors, *integers, *strides, *constants)
            self.options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": max_registers}

        return launch

    def compile(self, capability: int):
        signature, constants, attributes = {}, {}, {}
        for index, (parameter, value) in enumerate(zip(self.kernel.params, self.arguments, strict=True)):
            name = parameter.name
            if isinstance(value, torch.Tensor):
                signature[name] = TYPES[value.dtype]
                attributes[(index,)] = [["tt.divisibility", 16]]
            elif parameter.is_constexpr or value is None:
                signature[name] = "constexpr"
                constants[name] = value
            else:
                signature[name] = "i32"
                if not parameter.do_not_specialize and value % 16 == 0:
                    attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=self.options)


@pytest.fixture(params=[80, 90, 100])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(forward, "architecture", lambda device: (request.param // 10, 132))
    bound = (forward._bound_stacked, forward._bound_single)
    for function in bound:
        function.cache_clear()
    yield request.param
    for function in bound:
        function.cache_clear()


def check(module, name: str, launch: Callable[[], object], capability: int, monkeypatch: pytest.MonkeyPatch):
    recorder = Recorder(getattr(module, name).kernel)
    monkeypatch.setattr(module, name, recorder)
    launch()
    compiled = recorder.compile(capability)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED_MEMORY[capability]
    return compiled


def inputs(dtype: torch.dtype, size: int, n_queries: int, query_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(n_queries, query_length, size, dtype=dtype), torch.empty(1, 40, 180, size, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.bfloat16, 48), (torch.bfloat16, 512), (torch.float16, 128), (torch.float32, 128), (torch.float32, 512)],
)
@pytest.mark.parametrize(("name", "n_queries"), [("_stacked", 32), ("_single", 1)])
def test_forward(name: str, n_queries: int, size: int, dtype: torch.dtype, capability: int, monkeypatch) -> None:
    queries, documents = inputs(dtype, size, n_queries, 32)

    def launch() -> None:
        forward.maxsim_forward(queries, documents, None, None, False, False, False, "ieee")

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
    merge = Recorder(cuts._merge_kernel)
    monkeypatch.setattr(cuts, "_merge", merge)

    def launch() -> None:
        forward.maxsim_varlen_forward(
            queries, None, documents, bounds, candidates, 3, longest, normalize, with_winners, "ieee"
        )

    compiled = check(forward, name, launch, capability, monkeypatch)
    if capability == 90:
        assert "wgmma" in compiled.asm["ptx"]
    assert hasattr(merge, "arguments") == (longest == 9000), "documents are cut where one may be long, and only there"
    if longest == 9000:
        assert merge.compile(capability).asm["cubin"]


@pytest.mark.parametrize(
    ("dtype", "size", "normalize"),
    [(torch.bfloat16, 48, False), (torch.bfloat16, 128, True), (torch.float32, 512, False)],
)
def test_backward(normalize: bool, size: int, dtype: torch.dtype, capability: int, monkeypatch) -> None:
    queries, documents = inputs(dtype, size, 4, 32)
    scales = [torch.ones(tensor.shape[:-1]) if normalize else None for tensor in (queries, documents)]
    winners = torch.zeros(1, 40, 128, dtype=torch.int16)
    grad = torch.ones(4, 40)
    for name, needs in (("_gather", (True, False)), ("_collect", (False, True))):
        check(
            backward, name,
            lambda needs=needs: backward.maxsim_backward(grad, queries, documents, winners, *scales, *needs),
            capability, monkeypatch,
        )  # fmt: skip


@pytest.mark.parametrize("size", [48, 512])
def test_inverse_norms(size: int, capability: int, monkeypatch) -> None:
    embeddings = torch.empty(4, 32, size, dtype=torch.bfloat16)
    check(norms, "_inverse_norms", lambda: norms.inverse_norms(embeddings), capability, monkeypatch)


@pytest.mark.parametrize("length", [180, 3000])
def test_active_tokens(length: int, capability: int, monkeypatch) -> None:
    mask = torch.ones(4, length, dtype=torch.bool)
    check(masks, "_active_tokens", lambda: masks.active_tokens(mask), capability, monkeypatch)
