"""Helpers of the GPU tests: embeddings, checks of a call, and comparisons with a definition."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from pylate_flash.ops import pack
from pylate_flash.ops.tensor_files import TensorContainer
from tests.ops.cases import Case, gradient_tolerance, gradients, relative_error
from tests.ops.test_quantized import PRECISIONS as EVERY_PRECISION

HALF, FLOAT = torch.bfloat16, torch.float32
DTYPES = (torch.float16, HALF, FLOAT)

# A kernel is compiled for each embedding size, so there are few of them.
SIZES = st.sampled_from([7, 48, 128])

# Without a GPU, these tests are skipped.
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
PRECISIONS = EVERY_PRECISION if CAPABILITY >= (8, 9) else EVERY_PRECISION[:2]


def unit(*shape: int, dtype: torch.dtype = FLOAT, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return F.normalize(torch.randn(*shape, device="cuda", generator=generator), dim=-1).to(dtype)


def exact(*shape: int, dtype: torch.dtype, seed: int = 0, parts: int = 4, most: int = 3) -> Tensor:
    """Multiples of 1 / parts, whose products and sums are exact in every dtype: rounding never chooses a winner."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randint(-most, most + 1, shape, generator=generator, device="cuda") / parts).to(dtype)


def random_mask(shape: tuple[int, ...], share: float = 0.7, seed: int = 2) -> Tensor:
    return torch.rand(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)) < share


def packed_of(queries: list[Tensor], documents: list[Tensor]) -> tuple[Tensor, ...]:
    """The packed tokens of both, and the boundaries of both."""
    (queries_values, queries_bounds), (documents_values, documents_bounds) = pack(queries), pack(documents)
    return queries_values, documents_values, queries_bounds, documents_bounds


def on_gpu(value: Any, kept: tuple[str, ...] = ()) -> Any:
    """Move a case to the GPU, with all its tensors except those named in `kept`."""
    if isinstance(value, (Tensor, TensorContainer)):
        return value.to("cuda")
    if isinstance(value, (tuple, list)):
        return type(value)(on_gpu(item, kept) for item in value)
    if isinstance(value, dict):
        return {name: item if name in kept else on_gpu(item, kept) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: on_gpu(getattr(value, field.name), kept) for field in fields(value)})
    return value


def equal(actual: Any, expected: Any) -> bool:
    """Whether tensors, or None, are bitwise equal."""
    return all(a is b is None or torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def check_large(function: Callable[..., Tensor], definition: Callable[..., Tensor], case: Case) -> None:
    """Like `check_definition`, but scores are compared as a whole, and gradients by their direction too."""
    with torch.no_grad():
        scores = function(*case.tensors, **case.keywords)
        assert relative_error(scores, definition(*case.doubled().tensors, **case.keywords)) <= 2e-6
    for gradient, reference in zip(gradients(function, case), gradients(definition, case.doubled()), strict=True):
        assert gradient.dtype == case.queries.dtype
        assert relative_error(gradient, reference) <= gradient_tolerance(gradient.dtype)
        assert F.cosine_similarity(gradient.double().flatten(), reference.flatten(), dim=0) >= 0.9999


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make any synchronization with the GPU an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of what Triton compiles, including binaries found on disk."""
    from triton import knobs

    compiled: list[str] = []
    knobs.runtime.jit_post_compile_hook = lambda **about: compiled.append(about["repr"]) and None
    try:
        yield compiled
    finally:
        knobs.runtime.jit_post_compile_hook = None


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Set the precision of float32 matrix products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def on_another_stream(step: Callable[[], Any]) -> Any:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = step()
    stream.synchronize()
    return result


def captured(step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Capture a step that has run in a CUDA graph; returns its result and the function that replays it."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return result, graph.replay


def allocated() -> int:
    """Bytes that tensors take, without garbage of earlier tests."""
    gc.collect()
    return torch.cuda.memory_allocated()


def memory_of(step: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that a step takes at its peak when it runs again, and bytes of the tensors that it returns."""
    step()
    torch.cuda.synchronize()
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    result = step()
    peak = torch.cuda.max_memory_allocated() - before
    return peak, sum(tensor.nbytes for tensor in (result if isinstance(result, tuple) else (result,)))


@contextmanager
def memory_limit(nbytes: int) -> Iterator[None]:
    """Limit this process to `nbytes` beyond what it holds."""
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + nbytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def of_scale(scale: str, size: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """8 queries of 32 tokens and 300 documents of 70 in float32: "large", "small", or "of each token" or "element"."""
    queries, documents = torch.randn(8, 32, size, device="cuda"), torch.randn(300, 70, size, device="cuda")
    if scale == "large":
        # Squares, which norms are computed from, stay in float32's range.
        return queries * 1e4, documents * (1e15 if normalize else 1e30)
    if scale == "small":
        return queries * 1e-6, documents * 1e-30
    shape = (300, 70, 1) if scale == "of each token" else (300, 70, size)
    documents *= torch.exp2((6 if normalize else 20) * torch.randn(shape, device="cuda"))
    documents[:, 3] = 0.0
    return queries, documents


def with_infinities(infinite: str, size: int) -> tuple[Tensor, Tensor]:
    """As many, with infinite elements in "queries", "documents" or "both"; some meet a 0, or each other."""
    queries, documents = torch.randn(8, 32, size, device="cuda"), torch.randn(300, 70, size, device="cuda")
    if infinite != "documents":
        queries[2, 3, 7], queries[4, 1, 2] = torch.inf, -torch.inf
    if infinite != "queries":
        documents[::3, 5, 7], documents[1::5, 9, 3] = torch.inf, -torch.inf
        documents[::7, 11, 7], documents[::7, 11, 9] = torch.inf, -torch.inf
        queries[5, 5, 7] = 0.0
    return queries, documents
