"""A call of every operation, at a size that kernels serve, for tests of properties that all calls have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pylate_flash import (
    chamfer,
    maxsim,
    maxsim_cross_entropy,
    maxsim_from_hidden,
    maxsim_kl_divergence,
    maxsim_margin_mse,
    maxsim_pairwise,
    maxsim_residual,
    maxsim_sparse_queries,
    maxsim_varlen,
    maxsim_varlen_pairwise,
    pack,
    quantize,
    soft_maxsim,
    soft_maxsim_varlen,
    xtr_scores,
)
from tests.gpu.tools import DTYPES, FLOAT, HALF, PRECISIONS, packed_of, random_mask, unit
from tests.ops.residual_cases import residual_codes
from tests.ops.test_hidden import Problem

# Options of padded calls.
EVERYTHING = {"normalize": True, "masking": "zero", "reduction": "mean", "empty_score": -1.0}
PACKED = {"normalize": True, "reduction": "mean", "empty_score": -1.0}


class Call:
    """A call of an operation: its embeddings, and its other arguments, which may be changed in place."""

    def __init__(
        self, function: Callable[..., Tensor], leaves: Any, *others: Any, learning: bool = True, **options: Any
    ) -> None:
        self.function = function
        self.leaves = [leaf.detach().requires_grad_(learning) for leaf in leaves]
        self.others = others
        self.options = options
        self.learning = learning

    def __call__(self, *leaves: Tensor) -> Tensor:
        return self.function(*(leaves or self.leaves), *self.others, **self.options)

    def to(self, device: str) -> Call:
        """The same call with its CUDA tensors on `device`; host tensors stay where they are."""

        def moved(value: Any) -> Any:
            on_gpu = getattr(value, "device", None) is not None and value.device.type == "cuda"
            return value.to(device) if on_gpu else value

        options = {name: moved(value) for name, value in self.options.items()}
        leaves, others = map(moved, self.leaves), map(moved, self.others)
        return Call(self.function, leaves, *others, learning=self.learning, **options)

    def gradients(
        self, result: Tensor, leaves: list[Tensor] | None = None, create_graph: bool = False
    ) -> tuple[Tensor, ...]:
        """Gradients of these leaves, or of all, for a fixed, uneven weighting of the result."""
        weight = torch.arange(1, 1 + result.numel(), device=result.device, dtype=result.dtype).cos().view(result.shape)
        return torch.autograd.grad((result * weight).sum(), leaves or self.leaves, create_graph=create_graph)

    def step(self) -> tuple[Tensor, ...]:
        """The result without and with a gradient, and the gradients."""
        with torch.no_grad():
            alone = self()
        if not self.learning:
            return (alone,)
        result = self()
        return alone, result.detach(), *self.gradients(result)

    def change(self) -> None:
        """Change embeddings, masks and positions in place; boundaries and labels stay."""
        with torch.no_grad():
            for leaf in self.leaves:
                leaf.copy_(leaf.roll(1, 0).roll(3, -1) if leaf.numel() > 1 else leaf * 0.3)
            for name in ("queries_mask", "documents_mask", "y_mask", "query_tokens", "candidates"):
                if self.options.get(name) is not None:
                    self.options[name].copy_(self.options[name].roll((1, 1), (-1, -2)))


def padded(
    function: Callable[..., Tensor], queries: tuple[int, ...], documents: tuple[int, ...], masks: str = "", **options
) -> Call:
    """A padded call with query and document masks of the types in `masks`; "weights" are of queries."""
    dtype = options.pop("dtype", HALF)
    generator = torch.Generator("cuda").manual_seed(5)
    query_values, document_values = (
        torch.rand(shape[:-1], device="cuda", generator=generator) for shape in (queries, documents)
    )
    if masks:
        documents_mask = document_values > 0.3
        documents_mask[..., 1, :] = False
        options["queries_mask"] = (query_values > 0.3) * query_values if "weights" in masks else query_values > 0.3
        options["documents_mask"] = documents_mask.long() if "int64" in masks else documents_mask
    target: tuple = ()
    if function in (maxsim_kl_divergence, maxsim_margin_mse):
        target = (torch.randn(queries[0], documents[-3], device="cuda", generator=generator),)
    return Call(function, (unit(*queries, dtype=dtype), unit(*documents, dtype=dtype, seed=1)), *target, **options)


def packed(
    function: Callable[..., Tensor], query_lengths: list[int], lengths: list[int], size: int = 64, **options
) -> Call:
    queries, documents, *bounds = packed_of(
        [unit(n, size, dtype=HALF, seed=i) for i, n in enumerate(query_lengths)],
        [unit(n, size, dtype=HALF, seed=99 + i) for i, n in enumerate(lengths)],
    )
    options = {"max_query_length": max(query_lengths), "max_document_length": max(lengths)} | options
    return Call(function, (queries, documents), *bounds, **options)


def of_packed_documents(function: Callable[..., Tensor], lengths: list[int], **options) -> Call:
    """A call with padded queries and packed documents."""
    call = packed(maxsim_varlen, [32] * 6, lengths)
    queries, documents = call.leaves
    options |= {"documents_cu_seqlens": call.others[1], "max_document_length": max(lengths)}
    return Call(function, (queries.view(6, 32, -1), documents), **options)


def soft(queries: Tensor, documents: Tensor, *bounds: Tensor, **options) -> Tensor:
    """Soft MaxSim of padded tokens, or of packed ones if there are boundaries."""
    return (soft_maxsim_varlen if bounds else soft_maxsim)(queries, documents, 10.0, *bounds, **options)


def with_beta(queries: tuple[int, ...], documents: tuple[int, ...], dtype: torch.dtype = FLOAT, **options) -> Call:
    """Soft MaxSim with a learned beta."""
    embeddings = unit(*queries, dtype=dtype), unit(*documents, dtype=dtype, seed=1)
    return Call(soft_maxsim, (*embeddings, torch.tensor([10.0], device="cuda")), **options)


def chosen(*shape: int, length: int = 32) -> Tensor:
    """Random positions of the first `length` query tokens, or -1 for none."""
    return torch.randint(-1, length, shape, device="cuda", generator=torch.Generator("cuda").manual_seed(6))


def points(length: int, size: int, dtype: torch.dtype = FLOAT, n: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(n, length, size, device="cuda", generator=generator).to(dtype)


def hidden_states(layout: str, dtype: torch.dtype) -> Problem:
    """64 documents of 180 states, 768 to 128 dimensions, with a bias and masked tokens (packed: shorter documents)."""
    generator = torch.Generator("cuda").manual_seed(0)
    draw = partial(torch.randn, device="cuda", generator=generator)
    tensors = {
        "queries": F.normalize(draw(16, 32, 128), dim=-1),
        "hidden": draw(16, 4, 180, 768) if layout == "candidates" else draw(64, 180, 768),
        "weight": draw(128, 768) / 768**0.5,
        "bias": draw(128) / 4,
    }
    options: dict = {"queries_mask": torch.arange(32, device="cuda").repeat(16, 1) < 25}
    if layout == "packed":
        lengths = torch.randint(20, 181, (64,), generator=torch.Generator().manual_seed(0)).tolist()
        tensors["hidden"], bounds = pack([document[:n] for document, n in zip(tensors["hidden"], lengths, strict=True)])
        options |= {"documents_cu_seqlens": bounds, "max_document_length": 180}
    else:
        options["documents_mask"] = torch.rand(tensors["hidden"].shape[:-1], device="cuda", generator=generator) > 0.2
    return Problem({name: tensor.to(dtype) for name, tensor in tensors.items()}, options)


def from_hidden(layout: str, dtype: torch.dtype = HALF) -> Call:
    problem = hidden_states(layout, dtype)
    names = list(problem.tensors)

    def scores(*leaves: Tensor, **rest: Any) -> Tensor:
        return maxsim_from_hidden(**dict(zip(names, leaves, strict=True)), **rest, implementation="triton")

    return Call(scores, problem.tensors.values(), **problem.rest)


def of_codes(**options: Any) -> Call:
    documents = residual_codes([180, 0, 40] * 20, 128, 4).to("cuda")
    # Compiled calls may need a gradient, which rules out 8-bit products.
    return Call(maxsim_residual, (unit(4, 32, 128, dtype=HALF),), documents, precision="full", **options)


def of_8_bits(precision: str) -> Call:
    documents = quantize(unit(50, 180, 128, seed=1), precision)
    return Call(maxsim, (unit(3, 32, 128, dtype=HALF),), documents, learning=False)


IN_BATCH, CANDIDATES = ((16, 32, 128), (20, 70, 128)), ((6, 32, 64), (6, 5, 70, 64))
LONG_QUERIES = ((3, 300, 64), (5, 70, 64))
SOME = torch.tensor([0, 2, 2, 5])
LABELS = [3, 0, 1, 2, 4, 4]
CALLS = {
    "one query": lambda: padded(maxsim, (1, 32, 128), (50, 70, 128), "bool"),
    "stacked": lambda: padded(maxsim, (3, 32, 128), (50, 70, 128), "weights int64", **EVERYTHING),
    "in-batch": lambda: padded(maxsim, *IN_BATCH, "weights int64", **EVERYTHING),
    "in-batch without masks": lambda: padded(maxsim, *IN_BATCH, **EVERYTHING),
    "candidates": lambda: padded(maxsim, *CANDIDATES, "weights", **EVERYTHING),
    "long queries": lambda: padded(maxsim, *LONG_QUERIES, "bool", **EVERYTHING),
    "float32": lambda: padded(maxsim, *IN_BATCH, "weights", dtype=FLOAT, **EVERYTHING),
    "plain": lambda: padded(maxsim, (16, 32, 64), (16, 50, 64), dtype=FLOAT),
    "pairs": lambda: padded(maxsim_pairwise, (50, 32, 64), (50, 70, 64), reduction="mean", empty_score=-1.0),
    "packed": lambda: packed(maxsim_varlen, [32, 7, 0, 20], [40, 3, 0, 90], **PACKED),
    "packed queries of one length": lambda: packed(maxsim_varlen, [32] * 8, [40, 3, 0, 90], **PACKED),
    "packed in segments": lambda: packed(maxsim_varlen, [32, 7], [40, 9000, 0, 90], **PACKED),
    "packed pairs": lambda: packed(maxsim_varlen_pairwise, [32, 7, 9], [40, 0, 90], **PACKED),
    "packed pairs of one length": lambda: packed(maxsim_varlen_pairwise, [32] * 3, [40, 3, 9], **PACKED),
    "packed candidates": lambda: packed(
        maxsim_varlen, [32, 7, 9], [40, 3, 0, 90, 7], candidates_cu_seqlens=SOME, **PACKED
    ),
    "soft": lambda: padded(soft, *IN_BATCH, "weights int64", **EVERYTHING),
    "soft, candidates": lambda: padded(soft, *CANDIDATES, "weights", **EVERYTHING),
    "soft, packed": lambda: packed(soft, [32, 7, 0, 20], [40, 3, 0, 90], **PACKED),
    "soft, packed candidates": lambda: packed(
        soft, [32, 7, 9], [40, 3, 0, 90, 7], candidates_cu_seqlens=SOME, **PACKED
    ),
    "soft, learned beta": lambda: with_beta((8, 40, 64), (9, 40, 64)),
    "chosen query tokens": lambda: padded(
        maxsim_sparse_queries, *IN_BATCH, "weights int64", query_tokens=chosen(20, 9), **EVERYTHING
    ),
    "chosen query tokens, candidates": lambda: padded(
        maxsim_sparse_queries, *CANDIDATES, "weights", query_tokens=chosen(6, 5, 9), **EVERYTHING
    ),
    "chosen query tokens, packed": lambda: of_packed_documents(
        maxsim_sparse_queries, [40, 3, 0, 90], query_tokens=chosen(4, 9), **PACKED
    ),
    "XTR": lambda: padded(xtr_scores, (6, 20, 64), (40, 50, 64), "bool", k=30),
    "Chamfer": lambda: Call(
        chamfer, (points(500, 64, HALF, 4), points(700, 64, HALF, 4, seed=1)), y_mask=random_mask((4, 700))
    ),
    "hidden states": lambda: from_hidden("in-batch"),
    "hidden states, candidates": lambda: from_hidden("candidates"),
    "hidden states, packed": lambda: from_hidden("packed"),
    "residual codes": of_codes,
    "residual codes, candidates": lambda: of_codes(
        candidates=chosen(4, 20, length=60), reduction="mean", empty_score=-1.0
    ),
    **{precision: partial(of_8_bits, precision) for precision in PRECISIONS},
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
    "cross entropy of packed documents": lambda: of_packed_documents(
        maxsim_cross_entropy, [40, 3, 0, 90] * 5, max_scratch_bytes=10_000
    ),
    "margin MSE": lambda: padded(maxsim_margin_mse, *CANDIDATES, "weights int64", **EVERYTHING),
    "margin MSE in chunks": lambda: padded(maxsim_margin_mse, *CANDIDATES, "bool", max_scratch_bytes=1),
    "divergence of normalized scores": lambda: padded(
        maxsim_kl_divergence, *CANDIDATES, normalize_scores=True, temperature=0.1, max_scratch_bytes=1
    ),
    "divergence": lambda: padded(maxsim_kl_divergence, *CANDIDATES, "weights int64", temperature=0.1, **EVERYTHING),
    "divergence in-batch": lambda: padded(maxsim_kl_divergence, *IN_BATCH, "bool", loss_reduction="sum"),
    "divergence in float32": lambda: padded(maxsim_kl_divergence, *IN_BATCH, temperature=0.1, dtype=FLOAT),
}  # fmt: skip

# Steps that sum the document gradient in different ways.
STEPS = [
    ((40, 32, 128), (70, 300, 128)),
    ((200, 32, 128), (70, 300, 128)),
    ((3, 32, 128), (70, 300, 128)),
    ((16, 32, 128), (16, 4, 180, 128)),
    ((16, 160, 128), (16, 4, 180, 128)),
]
CALLS["step, documents of two passes"] = partial(padded, maxsim, (40, 100, 32), (3, 3000, 32))
CALLS |= {
    f"step {shapes}, {normalize}": partial(padded, maxsim, *shapes, normalize=normalize)
    for shapes in STEPS
    for normalize in (False, True)
}

# Larger calls, with many programs that may finish in any order.
MANY = ((64, 32, 128), (64, 180, 128))
MANY_LOSSES = {"in-batch": ((128, 32, 128), (128, 180, 128)), "candidates": ((16, 32, 128), (16, 8, 300, 128))}
LARGE_CALLS = {
    **{f"large, {dtype}": partial(padded, maxsim, *MANY, dtype=dtype) for dtype in DTYPES},
    **{f"large soft, {dtype}": partial(with_beta, (24, 32, 128), (40, 180, 128), dtype) for dtype in DTYPES},
    "large packed": lambda: packed(maxsim_varlen, [32, 20], [90] * 40),
    "large packed in segments": lambda: packed(maxsim_varlen, [32, 20], [3, 30_000, 90]),
    "large chosen query tokens": lambda: padded(
        maxsim_sparse_queries, (4, 32, 128), (200, 180, 128), query_tokens=chosen(4, 200, 16)
    ),
    "large XTR": lambda: padded(xtr_scores, (16, 32, 128), (64, 180, 128), k=100),
    **{
        f"large Chamfer, {size}, {dtype}": partial(
            lambda *args: Call(chamfer, (points(2000, *args), points(1700, *args, seed=1))), size, dtype
        )
        for size, dtype in ((3, FLOAT), (64, HALF), (64, FLOAT))
    },
    **{f"hidden states, {dtype}": partial(from_hidden, "in-batch", dtype) for dtype in DTYPES},
    **{
        f"large {name}, {layout}": partial(padded, function, *shapes, temperature=0.1, **options)
        for layout, shapes in MANY_LOSSES.items()
        for name, function, options in (
            ("cross entropy", maxsim_cross_entropy, {}),
            ("divergence", maxsim_kl_divergence, {}),
        )
    },
    **{
        f"large labels, {layout}": lambda shapes=shapes: padded(
            maxsim_cross_entropy, *shapes, temperature=0.1, labels=chosen(shapes[0][0], length=8).clamp(min=0)
        )
        for layout, shapes in MANY_LOSSES.items()
    },
}
