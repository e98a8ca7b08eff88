"""No call waits for the GPU, every call goes into a CUDA graph, and a new size compiles nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from pylate_flash import (
    maxsim,
    maxsim_cross_entropy,
    maxsim_kl_divergence,
    maxsim_margin_mse,
    maxsim_pairwise,
    maxsim_sparse_queries,
    maxsim_varlen,
    maxsim_varlen_pairwise,
    soft_maxsim,
    soft_maxsim_varlen,
)
from tests.gpu.embeddings import packed_of, unit

pytestmark = pytest.mark.gpu

# Of calls that are padded.
EVERYTHING = {"normalize": True, "masking": "zero", "reduction": "mean", "empty_score": -1.0}


class Call:
    """A call of an operation: its embeddings, and what else it takes, which may be changed in place."""

    def __init__(self, function: Callable[..., Tensor], leaves: tuple[Tensor, ...], *others, **options) -> None:
        self.function = function
        self.leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        self.others = others
        self.options = options

    def step(self) -> tuple[Tensor, ...]:
        """The result without and with a gradient, and the gradients."""
        with torch.no_grad():
            alone = self.function(*self.leaves, *self.others, **self.options)
        found = self.function(*self.leaves, *self.others, **self.options)
        weight = torch.arange(1, 1 + found.numel(), device="cuda", dtype=found.dtype).cos().view(found.shape)
        return alone, found.detach(), *torch.autograd.grad((found * weight).sum(), self.leaves)

    def change(self) -> None:
        """Other embeddings and masks, in place; boundaries and labels stay."""
        with torch.no_grad():
            for leaf in self.leaves:
                leaf.copy_(leaf.roll(1, 0).roll(3, -1))
            for name in ("queries_mask", "documents_mask"):
                if self.options.get(name) is not None:
                    self.options[name].copy_(self.options[name].roll(1, -1))


def padded(
    function: Callable[..., Tensor], queries: tuple[int, ...], documents: tuple[int, ...], masks: str = "", **options
) -> Call:
    """With `masks` of these types, of queries and of documents; "weights" are of queries."""
    dtype = options.pop("dtype", torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(5)
    of_queries, of_documents = (
        torch.rand(shape[:-1], device="cuda", generator=generator) for shape in (queries, documents)
    )
    if masks:
        documents_mask = of_documents > 0.3
        documents_mask[..., 1, :] = False
        options["queries_mask"] = (of_queries > 0.3) * of_queries if "weights" in masks else of_queries > 0.3
        options["documents_mask"] = documents_mask
        if "int64" in masks:
            options["documents_mask"] = documents_mask.long()
    target: tuple = ()
    if function in (maxsim_kl_divergence, maxsim_margin_mse):
        target = (torch.randn(queries[0], documents[-3], device="cuda", generator=generator),)
    return Call(function, (unit(*queries, dtype=dtype), unit(*documents, dtype=dtype, seed=1)), *target, **options)


def packed(function: Callable[..., Tensor], query_lengths: list[int], lengths: list[int], **options) -> Call:
    queries, documents, *bounds = packed_of(
        [unit(n, 64, dtype=torch.bfloat16, seed=i) for i, n in enumerate(query_lengths)],
        [unit(n, 64, dtype=torch.bfloat16, seed=99 + i) for i, n in enumerate(lengths)],
    )
    options = {"max_query_length": max(query_lengths), "max_document_length": max(lengths)} | options
    return Call(function, (queries, documents), *bounds, **options)


def packed_documents(lengths: list[int]) -> Call:
    """A loss of padded queries over packed documents, in chunks."""
    call = packed(maxsim_varlen, [32] * 6, lengths)
    queries, documents = call.leaves
    return Call(
        maxsim_cross_entropy, (queries.view(6, 32, -1), documents), documents_cu_seqlens=call.others[1],
        max_document_length=max(lengths), max_scratch_bytes=10_000,
    )  # fmt: skip


def soft(queries: Tensor, documents: Tensor, *bounds: Tensor, **options) -> Tensor:
    """Of padded tokens, or with boundaries of packed ones."""
    return (soft_maxsim_varlen if bounds else soft_maxsim)(queries, documents, 10.0, *bounds, **options)


def chosen_of_packed(lengths: list[int]) -> Call:
    call = packed(maxsim_varlen, [32] * 6, lengths)
    queries, documents = call.leaves
    return Call(
        maxsim_sparse_queries, (queries.view(6, 32, -1), documents), chosen(len(lengths), 9),
        documents_cu_seqlens=call.others[1], max_document_length=max(lengths), **PACKED_OPTIONS,
    )  # fmt: skip


def chosen(*shape: int) -> Tensor:
    """Positions of the first 32 query tokens, and of none."""
    return torch.randint(-1, 32, shape, device="cuda", generator=torch.Generator("cuda").manual_seed(6))


IN_BATCH, CANDIDATES = ((16, 32, 128), (20, 70, 128)), ((6, 32, 64), (6, 5, 70, 64))
LONG_QUERIES = ((3, 300, 64), (5, 70, 64))
PACKED_OPTIONS = {"normalize": True, "reduction": "mean", "empty_score": -1.0}
LABELS = [3, 0, 1, 2, 4, 4]
CALLS = {
    "one query": lambda: padded(maxsim, (1, 32, 128), (50, 70, 128), "bool"),
    "stacked": lambda: padded(maxsim, (3, 32, 128), (50, 70, 128), "weights int64", **EVERYTHING),
    "in-batch": lambda: padded(maxsim, *IN_BATCH, "weights int64", **EVERYTHING),
    "in-batch without masks": lambda: padded(maxsim, *IN_BATCH, **EVERYTHING),
    "candidates": lambda: padded(maxsim, *CANDIDATES, "weights", **EVERYTHING),
    "long queries": lambda: padded(maxsim, *LONG_QUERIES, "bool", **EVERYTHING),
    "float32": lambda: padded(maxsim, *IN_BATCH, "weights", dtype=torch.float32, **EVERYTHING),
    "pairs": lambda: padded(maxsim_pairwise, (50, 32, 64), (50, 70, 64), reduction="mean", empty_score=-1.0),
    "packed": lambda: packed(maxsim_varlen, [32, 7, 0, 20], [40, 3, 0, 90], **PACKED_OPTIONS),
    "packed queries of one length": lambda: packed(maxsim_varlen, [32] * 8, [40, 3, 0, 90], **PACKED_OPTIONS),
    "packed in pieces": lambda: packed(maxsim_varlen, [32, 7], [40, 9000, 0, 90], **PACKED_OPTIONS),
    "packed pairs": lambda: packed(maxsim_varlen_pairwise, [32, 7, 9], [40, 0, 90], **PACKED_OPTIONS),
    "packed candidates": lambda: packed(
        maxsim_varlen, [32, 7, 9], [40, 3, 0, 90, 7], candidates_cu_seqlens=torch.tensor([0, 2, 2, 5]), **PACKED_OPTIONS
    ),
    "soft": lambda: padded(soft, *IN_BATCH, "weights int64", **EVERYTHING),
    "soft, probabilities once": lambda: padded(soft, *IN_BATCH, "bool", max_scratch_bytes=1 << 30, **EVERYTHING),
    "soft, candidates": lambda: padded(soft, *CANDIDATES, "weights", **EVERYTHING),
    "soft, packed": lambda: packed(soft, [32, 7, 0, 20], [40, 3, 0, 90], **PACKED_OPTIONS),
    "soft, packed candidates": lambda: packed(
        soft, [32, 7, 9], [40, 3, 0, 90, 7], candidates_cu_seqlens=torch.tensor([0, 2, 2, 5]), **PACKED_OPTIONS
    ),
    "chosen query tokens": lambda: padded(
        maxsim_sparse_queries, *IN_BATCH, "weights int64", query_tokens=chosen(20, 9), **EVERYTHING
    ),
    "chosen query tokens, candidates": lambda: padded(
        maxsim_sparse_queries, *CANDIDATES, "weights", query_tokens=chosen(6, 5, 9), **EVERYTHING
    ),
    "chosen query tokens, packed": lambda: chosen_of_packed([40, 3, 0, 90]),
    "cross entropy": lambda: padded(maxsim_cross_entropy, *IN_BATCH, temperature=0.1),
    "cross entropy with masks": lambda: padded(
        maxsim_cross_entropy, *IN_BATCH, "weights int64", temperature=0.1, **EVERYTHING
    ),
    "cross entropy of candidates": lambda: padded(
        maxsim_cross_entropy, *CANDIDATES, "bool", temperature=0.1, labels=torch.tensor(LABELS, device="cuda"),
        **EVERYTHING,
    ),
    "cross entropy of each query": lambda: padded(
        maxsim_cross_entropy, *IN_BATCH, "bool", loss_reduction="none", **EVERYTHING
    ),
    "cross entropy in float16": lambda: padded(
        maxsim_cross_entropy, *IN_BATCH, "weights", dtype=torch.float16, **EVERYTHING
    ),
    "cross entropy in chunks": lambda: padded(
        maxsim_cross_entropy, *IN_BATCH, "weights int64", temperature=0.1, max_scratch_bytes=20_000, **EVERYTHING
    ),
    "cross entropy of all kinds": lambda: padded(
        maxsim_cross_entropy, *IN_BATCH, "bool", temperature=torch.tensor(0.1, device="cuda"), symmetric=True,
        margin=0.01, exclude=torch.eye(16, 20, dtype=torch.bool, device="cuda").roll(3, 1), max_scratch_bytes=20_000,
        labels=torch.arange(1, 17, device="cuda"),
    ),
    "cross entropy of packed documents": lambda: packed_documents([40, 3, 0, 90] * 5),
    "margin MSE": lambda: padded(maxsim_margin_mse, *CANDIDATES, "weights int64", **EVERYTHING),
    "margin MSE in chunks": lambda: padded(maxsim_margin_mse, *CANDIDATES, "bool", max_scratch_bytes=1),
    "divergence of normalized scores": lambda: padded(
        maxsim_kl_divergence, *CANDIDATES, normalize_scores=True, temperature=0.1, max_scratch_bytes=1
    ),
    "divergence": lambda: padded(maxsim_kl_divergence, *CANDIDATES, "weights int64", temperature=0.1, **EVERYTHING),
    "divergence in-batch": lambda: padded(maxsim_kl_divergence, *IN_BATCH, "bool", loss_reduction="sum"),
}  # fmt: skip
# Their candidates are on the host.
NOT_IN_A_GRAPH = {"packed candidates", "soft, packed candidates"}


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_waiting_is_noticed() -> None:
    with no_waiting(), pytest.raises(RuntimeError, match="synchronizing"):
        torch.ones(1, device="cuda").item()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_waits_for_nothing(name: str) -> None:
    call = CALLS[name]()
    expected = call.step()
    with no_waiting():
        found = call.step()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", [name for name in CALLS if name not in NOT_IN_A_GRAPH])
def test_in_a_cuda_graph(name: str) -> None:
    call = CALLS[name]()
    before = call.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call.step()
    for tensor in found:
        tensor.fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, before, strict=True))
    call.change()
    graph.replay()
    expected = call.step()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.equal(found[0], before[0])


@contextmanager
def counted() -> Iterator[list[str]]:
    """What Triton compiles, a binary found on disk included."""
    from triton import knobs

    compiled: list[str] = []
    knobs.runtime.jit_post_compile_hook = lambda **about: compiled.append(about["repr"]) and None
    try:
        yield compiled
    finally:
        knobs.runtime.jit_post_compile_hook = None


def test_new_sizes_compile_nothing() -> None:
    """Masks and all, of one kernel: other numbers of queries and documents, and other lengths.

    What lists the active tokens takes a block for each power of two of them. Few tokens that are left after whole tiles
    take a product of their own, and queries that would leave too many rows empty are summed by other groups of rows,
    which these lengths do not need.
    """

    def call(n_queries: int, n_documents: int, query_length: int, document_length: int) -> None:
        # A size that no other test has, and compiles for.
        shapes = (n_queries, query_length, 112), (n_documents, document_length, 112)
        with torch.no_grad():
            call = padded(maxsim, *shapes, "weights", **EVERYTHING)
            call.function(*call.leaves, **call.options)

    with counted() as compiled:
        call(16, 10, 32, 180)
        assert compiled, "what is not noticed would not be counted"
        for one, *others in (
            [(16, 10, 32, 180), (17, 10, 31, 180), (40, 33, 29, 185), (100, 2, 32, 256)],
            [(1, 10, 32, 180), (1, 1000, 20, 150)],
            [(3, 10, 32, 180), (4, 100, 29, 190)],
        ):
            call(*one)
            before = list(compiled)
            for shape in others:
                call(*shape)
            assert compiled == before


@pytest.mark.parametrize("candidates", [False, True])
def test_new_packed_sizes_compile_nothing(candidates: bool) -> None:
    """Other numbers of tokens, documents and queries; with gradients."""

    def call(n_queries: int, lengths: list[int]) -> None:
        options: dict = {"max_document_length": 1000}
        if candidates:
            cuts = torch.linspace(0, len(lengths), n_queries + 1).long()
            options["candidates_cu_seqlens"] = cuts
        packed(maxsim_varlen, [32] * n_queries, lengths, **options).step()

    # Many documents are shared by programs, some are taken several at a time, one alone.
    for lengths in ([20, 300], [300], [90] * 100):
        call(40, lengths)
    with counted() as compiled:
        for n_queries, lengths in [(40, [31, 5, 260]), (41, [999]), (50, [1, 1, 1]), (64, [700, 2, 0, 90] * 30)]:
            call(n_queries, lengths)
    assert not compiled
