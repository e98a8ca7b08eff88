"""Backward problems with an argmax of every kind, in every layout, and their gradients in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pylate_flash.kernels import plan_backward, tables_backward
from pylate_flash.kernels.backward import maxsim_backward
from pylate_flash.kernels.rows import Norms
from pylate_flash.ops.norms import inverse_norms
from pylate_flash.problem import Options, Problem, Tensors, problem_of
from tests.ops.cases import relative_error

# Argmax of the query rows: uniform; half of them on 5 % of the tokens; all on one token; or none at all.
KINDS = ("uniform", "skewed", "one token", "none")
# Kernels of the document gradient, each with the value of `FEW_ROWS` that selects it.
WAYS = {"lists": 0, "compare_argmax": 1 << 31}


@dataclass(frozen=True)
class Case:
    """Arguments of `maxsim_backward`: `documents` are [G, K, Ld, d], or packed [T, d] with `cu_seqlens`."""

    grad_scores: Tensor
    queries: Tensor
    documents: Tensor
    argmax: Tensor
    normalize: bool = False
    cu_seqlens: Tensor | None = None
    candidates: Tensor | None = None
    # Weights of query tokens; those of weight 0 have an argmax of -1.
    weights: Tensor | None = None

    @property
    def tensors(self) -> Tensors:
        documents = self.documents
        # Shared by all queries.
        if documents.dim() == 4 and documents.shape[0] == 1:
            documents = documents[0]
        return Tensors(self.queries, documents, self.weights, None, None, self.cu_seqlens, self.candidates)

    @property
    def problem(self) -> Problem:
        longest = 0 if self.cu_seqlens is None else int(self.cu_seqlens.diff().max())
        return problem_of(self.tensors, Options(max_document_length=longest, normalize=self.normalize))

    def run(
        self, way: str | None = None, queries: bool = True, documents: bool = True, normalized: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return both gradients; `way` is the kernel of the document gradient, None leaves the choice to the plan.

        With `normalized`, embeddings are normalised before, and their norms are passed.
        """
        tensors, norms = self.tensors, None
        if normalized:
            queries_norms, documents_norms = inverse_norms(tensors.queries), inverse_norms(tensors.documents)
            norms = Norms(queries_norms, documents_norms)
            tensors = tensors._replace(
                queries=(tensors.queries * queries_norms.unsqueeze(-1)).to(tensors.queries.dtype),
                documents=(tensors.documents * documents_norms.unsqueeze(-1)).to(tensors.documents.dtype),
            )
        with pytest.MonkeyPatch.context() as patch:
            if way is not None:
                patch.setattr(tables_backward, "FEW_ROWS", WAYS[way])
                assert plan_backward.backward_plan(self.problem).kernel == way
            grad_queries, grad_documents = maxsim_backward(
                self.problem, tensors, self.grad_scores, self.argmax, queries, documents, norms, normalized
            )
        for result, arguments in ((grad_queries, self.queries), (grad_documents, self.tensors.documents)):
            assert result is None or (
                result.is_contiguous() and result.shape == arguments.shape and result.dtype == arguments.dtype
            )
        return grad_queries, None if grad_documents is None else grad_documents.view(self.documents.shape)

    def expected(self) -> tuple[Tensor, Tensor]:
        """The gradients by autograd in float64, one document at a time."""
        queries, documents = (tensor.double().requires_grad_() for tensor in (self.queries, self.documents))
        unit_queries, unit_documents = queries, documents
        if self.normalize:
            unit_queries, unit_documents = F.normalize(queries, dim=-1), F.normalize(documents, dim=-1)
        if self.cu_seqlens is None:
            groups, count = documents.shape[:2]
            tokens = [unit_documents[group, index] for group in range(groups) for index in range(count)]
            owners = [group for group in range(groups) for _ in range(count)]
            columns = [index for _ in range(groups) for index in range(count)]
        else:
            tokens = unit_documents.split(self.cu_seqlens.diff().tolist())
            groups, owners, columns = 1, [0] * len(tokens), list(range(len(tokens)))
            if self.candidates is not None:
                groups = queries.shape[0]
                owners = torch.arange(groups).repeat_interleave(self.candidates.cpu().diff()).tolist()
        per_group = queries.shape[0] // groups
        total = queries.sum() * 0 + documents.sum() * 0
        for flat, argmax in enumerate(self.argmax.reshape(len(tokens), -1)):
            own = slice(owners[flat] * per_group, (owners[flat] + 1) * per_group)
            weight = self.grad_scores[flat] if self.candidates is not None else self.grad_scores[own, columns[flat]]
            row_weight = weight.double().reshape(-1, 1).expand(per_group, queries.shape[1]).reshape(-1, 1)
            if self.weights is not None:
                row_weight = row_weight * self.weights[own].double().reshape(-1, 1)
            won = argmax >= 0
            rows = (unit_queries[own].flatten(0, 1) * row_weight)[won]
            total = total + (rows * tokens[flat][argmax[won].long()]).sum()
        return torch.autograd.grad(total, (queries, documents))

    def check(self, way: str | None = None, tolerance: float | None = None, normalized: bool = False) -> None:
        for actual, expected in zip(self.run(way, normalized=normalized), self.expected(), strict=True):
            assert actual is not None
            assert actual.dtype == self.queries.dtype
            assert actual.shape == expected.shape
            half = actual.dtype != torch.float32
            assert relative_error(actual, expected) <= (tolerance or (1e-2 if half else 1e-5))
            if half and expected.norm() > 0:
                assert F.cosine_similarity(actual.double().flatten(), expected.flatten(), dim=0) >= 0.9999


def choose(kind: str, shape: tuple[int, ...], length: int, generator: torch.Generator) -> Tensor:
    """Argmax of `shape`; except for "none", about 5 % of the rows have none."""
    device = generator.device
    if kind == "none" or length == 0:
        return torch.full(shape, -1, dtype=torch.int32, device=device)
    argmax = torch.randint(0, length, shape, generator=generator, device=device, dtype=torch.int32)
    if kind == "skewed":
        hot = torch.randint(0, max(1, length // 20), shape, generator=generator, device=device, dtype=torch.int32)
        argmax = torch.where(torch.rand(shape, generator=generator, device=device) < 0.5, hot, argmax)
    if kind == "one token":
        argmax = torch.full_like(argmax, length // 2)
    return argmax.masked_fill_(torch.rand(shape, generator=generator, device=device) < 0.05, -1)


def dense(
    queries: tuple[int, int],
    documents: tuple[int, int, int],
    size: int,
    kind: str,
    normalize: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Case:
    """`queries` are (Nq, Lq) and `documents` (G, K, Ld)."""
    generator = torch.Generator(device).manual_seed(0)
    (n_queries, query_length), (groups, count, length) = queries, documents

    def unit(*shape: int) -> Tensor:
        return F.normalize(torch.randn(*shape, generator=generator, device=device), dim=-1).to(dtype)

    argmax = choose(kind, (groups, count, n_queries // groups * query_length), length, generator)
    return Case(
        torch.randn(n_queries, count, generator=generator, device=device),
        unit(n_queries, query_length, size),
        unit(groups, count, length, size),
        argmax.to(torch.int16 if length <= 32767 else torch.int32),
        normalize,
    )


def packed(
    queries: tuple[int, int],
    lengths: list[int],
    size: int,
    kind: str,
    candidates: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    normalize: bool = False,
) -> Case:
    """`queries` are (Nq, Lq), `lengths` the document lengths, `candidates` the cu_seqlens of documents per query."""
    generator = torch.Generator(device).manual_seed(0)
    n_queries, query_length = queries
    rows = query_length if candidates is not None else n_queries * query_length
    shape = (len(lengths),) if candidates is not None else (n_queries, len(lengths))
    return Case(
        torch.randn(shape, generator=generator, device=device),
        torch.randn(n_queries, query_length, size, generator=generator, device=device).to(dtype),
        torch.randn(sum(lengths), size, generator=generator, device=device).to(dtype),
        torch.stack([choose(kind, (rows,), length, generator) for length in lengths]).to(torch.int16),
        normalize,
        torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32),
        None if candidates is None else torch.tensor(candidates, device=device),
    )


def weighted(case: Case) -> Case:
    """The case with query token weights from 0 to 3, about a tenth of them 0."""
    generator = torch.Generator(case.queries.device).manual_seed(1)
    weights = 3 * torch.rand(case.queries.shape[:2], generator=generator, device=case.queries.device)
    weights[torch.rand(weights.shape, generator=generator, device=weights.device) < 0.1] = 0
    n_documents = case.argmax.numel() // max(1, case.problem.rows)
    rows = (weights == 0).view(-1, case.problem.rows)
    if case.candidates is not None:
        rows = rows.repeat_interleave(case.candidates.diff().cpu().to(rows.device), dim=0)
    else:
        rows = rows.repeat_interleave(n_documents // rows.shape[0], dim=0)
    argmax = case.argmax.masked_fill(rows.view(case.argmax.shape), -1)
    return replace(case, argmax=argmax, weights=weights)
