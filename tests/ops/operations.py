"""A call of every operation and loss, on any device and by any implementation, for tests that cover all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

from pylate_flash import (
    chamfer,
    chamfer_varlen,
    maxsim,
    maxsim_cross_entropy,
    maxsim_from_hidden,
    maxsim_kl_divergence,
    maxsim_margin_mse,
    maxsim_pairwise,
    maxsim_ragged,
    maxsim_ragged_pairwise,
    maxsim_residual,
    maxsim_sparse_queries,
    maxsim_varlen,
    maxsim_varlen_pairwise,
    soft_maxsim,
    soft_maxsim_varlen,
    xtr_scores,
)
from tests.ops.residual_cases import residual_codes

Operation = Callable[[Tensor], Tensor]
# Calls whose arguments are tensors of fixed shapes; the others take lists, or lengths that are read.
OF_TENSORS = (
    "in-batch", "candidates", "pairs", "packed", "Chamfer", "XTR", "from hidden states", "sparse", "residual", "soft",
    "cross entropy", "divergence",
)  # fmt: skip


class Call(NamedTuple):
    """A function, the tensors that get gradients, the first of which are queries [2, 3, 4], and keyword options."""

    function: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    options: dict

    def __call__(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors, **self.options)


def flat(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a function of packed queries to take padded ones."""
    return lambda queries, *args, **options: function(queries.flatten(0, 1), *args, **options)


def _ragged(queries: Tensor, documents: Tensor, **options) -> Tensor:
    return maxsim_ragged(
        [query[: 3 - i] for i, query in enumerate(queries)], [documents[:3], documents[3:8]], **options
    )


def _ragged_pairs(queries: Tensor, documents: Tensor, **options) -> Tensor:
    return maxsim_ragged_pairwise([*queries], [documents[:3], documents[3:8]][: len(queries)], **options)


def _residual(queries: Tensor, **options) -> Tensor:
    return maxsim_residual(pad(queries, (0, 8 - queries.shape[-1])), **options)


def calls(
    device: str = "cpu", implementation: str = "auto", length: int = 5, masked: bool = False, one: bool = False
) -> dict[str, Call]:
    """Float32 calls with documents of that length on that device, masked where the function takes masks.

    `one`: one query and one document of one token of one element, which take the shortest code paths.
    """
    generator = torch.Generator().manual_seed(0)
    n, n_documents, length, size = (1, 1, 1, 1) if one else (2, 3, length, 4)
    queries, documents, candidates, weight, teacher, mask = (
        torch.randn(shape, generator=generator).to(device)
        for shape in (
            (n, 1 if one else 3, size), (n_documents, length, size), (n, n_documents, length, size), (size, size),
            (n, n_documents), (n, n_documents, length),
        )
    )  # fmt: skip
    rows, beta = documents.flatten(0, 1), torch.tensor(2.0, device=device)
    both = queries, documents
    bounds = [torch.arange(len(embeddings) + 1, device=device) * embeddings.shape[1] for embeddings in both]
    longest = {"max_query_length": 3, "max_document_length": length}
    if masked:
        # Several lengths, and a document without tokens.
        bounds[0][1], bounds[1][1] = 1, 0
        longest = {"max_query_length": 5, "max_document_length": 2 * length}
    packed = dict(zip(("queries_cu_seqlens", "documents_cu_seqlens"), bounds, strict=True))
    pairs = packed | {"documents_cu_seqlens": bounds[1][: n + 1]}
    sets = {"x_cu_seqlens": bounds[0], "y_cu_seqlens": bounds[1][: n + 1]}
    owned = {"candidates_cu_seqlens": torch.tensor([0, 1] if one else [0, 1, 3], device=device)}
    kwargs = {"query_tokens": torch.tensor([[0], [1], [0]], device=device)[:n_documents]}
    distillation, forced = {"teacher_scores": teacher}, {"implementation": implementation}
    queries_masks = {"queries_mask": queries[..., 0].abs()} if masked else {}
    batch_masks = queries_masks | ({"documents_mask": mask[0, :, :length] > -0.5} if masked else {})
    candidates_masks = queries_masks | ({"documents_mask": mask > -0.5} if masked else {})
    sets_masks = {"y_mask": mask[0, :2] > -0.5} if masked else {}
    codes = {"documents": residual_codes([5, 0, 3], 8, 4).to(device)}
    codes_options = {"candidates": torch.tensor([[1, -1, 0], [0, 1, 1]], device=device), "reduction": "mean"}
    results = {
        "in-batch": Call(maxsim, both, batch_masks),
        "candidates": Call(maxsim, (queries, candidates), {"normalize": True, **candidates_masks}),
        "pairs": Call(maxsim_pairwise, (queries, documents[:n]), queries_masks),
        "packed": Call(flat(maxsim_varlen), (queries, rows), packed | longest),
        "packed candidates": Call(flat(maxsim_varlen), (queries, rows), packed | owned),
        "packed pairs": Call(flat(maxsim_varlen_pairwise), (queries, rows[: n * length]), pairs),
        "ragged": Call(_ragged, (queries, rows), {}),
        "ragged pairs": Call(_ragged_pairs, (queries, rows), {}),
        "Chamfer": Call(chamfer, (queries, documents[:n]), sets_masks),
        "packed Chamfer": Call(flat(chamfer_varlen), (queries, rows[: n * length]), sets),
        "XTR": Call(xtr_scores, both, {"k": 4, **batch_masks}),
        "from hidden states": Call(maxsim_from_hidden, (*both, weight), batch_masks),
        "packed from hidden states": Call(
            maxsim_from_hidden, (queries, rows, weight), {"documents_cu_seqlens": bounds[1], **owned}
        ),
        "sparse": Call(maxsim_sparse_queries, both, kwargs | batch_masks),
        "packed sparse": Call(
            maxsim_sparse_queries, (queries, rows), {"documents_cu_seqlens": bounds[1], "reduction": "mean", **kwargs}
        ),
        "residual": Call(_residual, (queries,), codes | queries_masks),
        "soft": Call(soft_maxsim, (*both, beta), batch_masks),
        "soft candidates": Call(soft_maxsim, (queries, candidates, beta), candidates_masks),
        "packed soft": Call(flat(soft_maxsim_varlen), (queries, rows, beta), packed),
        "cross entropy": Call(maxsim_cross_entropy, both, batch_masks),
        "cross entropies": Call(maxsim_cross_entropy, both, {"loss_reduction": "none"}),
        "divergence": Call(maxsim_kl_divergence, (queries, candidates), distillation | candidates_masks),
        "margin MSE": Call(maxsim_margin_mse, (queries, candidates), distillation | candidates_masks),
    }
    if one:
        # A single document leaves no negative.
        del results["margin MSE"]
    if masked:
        results["residual candidates"] = Call(_residual, (queries,), codes | codes_options | {"empty_score": -1.0})
    return {name: call._replace(options=call.options | forced) for name, call in results.items()}


def operations(device: str = "cpu", implementation: str = "auto") -> dict[str, Operation]:
    """Functions of queries [2, 3, 4], float32, on that device; either all queries need a gradient or none."""

    def of_queries(call: Call) -> Operation:
        return lambda queries: call(queries, *call.tensors[1:])

    return {name: of_queries(call) for name, call in calls(device, implementation).items()}


def value_and_gradients(
    call: Call, tensors: Sequence[Tensor], function: Callable[..., Tensor] | None = None
) -> list[Tensor]:
    """The result, and the gradients of all tensors, of the call's function or another one."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    scores = (function or call.function)(*leaves, **call.options)
    return [scores.detach(), *torch.autograd.grad(scores.square().sum(), leaves)]


class Operators(TorchDispatchMode):
    """Records calls of this package's operators, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch._ops.OpOverload, tuple]] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.namespace == "pylate_flash":
            self.calls.append((function, arguments))
        return function(*arguments, **(options or {}))

    @property
    def names(self) -> list[str]:
        return [function.name().removeprefix("pylate_flash::") for function, _ in self.calls]


def check_changed_in_place(operation: Operation, queries: Tensor) -> None:
    """A result that is multiplied in place has the gradient of one that is multiplied out of place."""
    expected, actual = (queries.clone().requires_grad_() for _ in range(2))
    (operation(expected) * 2).square().sum().backward()
    scores = operation(actual)
    scores.mul_(2)
    scores.square().sum().backward()
    assert torch.equal(actual.grad, expected.grad)
