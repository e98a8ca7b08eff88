"""A call of every operation and loss, on any device and by any implementation, for the tests that concern all."""

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
# Those whose arguments are tensors of fixed shapes; the others are lists, or lengths that are read.
OF_TENSORS = (
    "in-batch", "candidates", "pairs", "packed", "Chamfer", "XTR", "from hidden states", "sparse", "residual", "soft",
    "cross entropy", "divergence",
)  # fmt: skip


class Call(NamedTuple):
    """A call of a function: tensors that gradients flow to, of which the first are queries [2, 3, 4]; and the rest."""

    function: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    options: dict

    def __call__(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors, **self.options)


def flat(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function of packed queries, for padded ones."""
    return lambda queries, *others, **options: function(queries.flatten(0, 1), *others, **options)


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
    """Calls in float32 with documents of that length on that device, with masks where that can be.

    `one`: of one query and one document of one token of one element, where the shortest ways lead.
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
    bounds = [torch.arange(len(each) + 1, device=device) * each.shape[1] for each in both]
    longest = {"max_query_length": 3, "max_document_length": length}
    if masked:
        # Of several lengths, and one that has no token.
        bounds[0][1], bounds[1][1] = 1, 0
        longest = {"max_query_length": 5, "max_document_length": 2 * length}
    packed = dict(zip(("queries_cu_seqlens", "documents_cu_seqlens"), bounds, strict=True))
    pairs = packed | {"documents_cu_seqlens": bounds[1][: n + 1]}
    sets = {"x_cu_seqlens": bounds[0], "y_cu_seqlens": bounds[1][: n + 1]}
    owned = {"candidates_cu_seqlens": torch.tensor([0, 1] if one else [0, 1, 3], device=device)}
    kwargs = {"query_tokens": torch.tensor([[0], [1], [0]], device=device)[:n_documents]}
    compared, by = {"teacher_scores": teacher}, {"implementation": implementation}
    of_queries = {"queries_mask": queries[..., 0].abs()} if masked else {}
    masks = of_queries | ({"documents_mask": mask[0, :, :length] > -0.5} if masked else {})
    own = of_queries | ({"documents_mask": mask > -0.5} if masked else {})
    of_sets = {"y_mask": mask[0, :2] > -0.5} if masked else {}
    codes = {"documents": residual_codes([5, 0, 3], 8, 4).to(device)}
    own_codes = {"candidates": torch.tensor([[1, -1, 0], [0, 1, 1]], device=device), "reduction": "mean"}
    results = {
        "in-batch": Call(maxsim, both, masks),
        "candidates": Call(maxsim, (queries, candidates), {"normalize": True, **own}),
        "pairs": Call(maxsim_pairwise, (queries, documents[:n]), of_queries),
        "packed": Call(flat(maxsim_varlen), (queries, rows), packed | longest),
        "packed candidates": Call(flat(maxsim_varlen), (queries, rows), packed | owned),
        "packed pairs": Call(flat(maxsim_varlen_pairwise), (queries, rows[: n * length]), pairs),
        "ragged": Call(_ragged, (queries, rows), {}),
        "ragged pairs": Call(_ragged_pairs, (queries, rows), {}),
        "Chamfer": Call(chamfer, (queries, documents[:n]), of_sets),
        "packed Chamfer": Call(flat(chamfer_varlen), (queries, rows[: n * length]), sets),
        "XTR": Call(xtr_scores, both, {"k": 4, **masks}),
        "from hidden states": Call(maxsim_from_hidden, (*both, weight), masks),
        "packed from hidden states": Call(
            maxsim_from_hidden, (queries, rows, weight), {"documents_cu_seqlens": bounds[1], **owned}
        ),
        "sparse": Call(maxsim_sparse_queries, both, kwargs | masks),
        "packed sparse": Call(
            maxsim_sparse_queries, (queries, rows), {"documents_cu_seqlens": bounds[1], "reduction": "mean", **kwargs}
        ),
        "residual": Call(_residual, (queries,), codes | of_queries),
        "soft": Call(soft_maxsim, (*both, beta), masks),
        "soft candidates": Call(soft_maxsim, (queries, candidates, beta), own),
        "packed soft": Call(flat(soft_maxsim_varlen), (queries, rows, beta), packed),
        "cross entropy": Call(maxsim_cross_entropy, both, masks),
        "cross entropies": Call(maxsim_cross_entropy, both, {"loss_reduction": "none"}),
        "divergence": Call(maxsim_kl_divergence, (queries, candidates), compared | own),
        "margin MSE": Call(maxsim_margin_mse, (queries, candidates), compared | own),
    }
    if one:
        # There is no negative.
        del results["margin MSE"]
    if masked:
        results["residual candidates"] = Call(_residual, (queries,), codes | own_codes | {"empty_score": -1.0})
    return {name: call._replace(options=call.options | by) for name, call in results.items()}


def operations(device: str = "cpu", implementation: str = "auto") -> dict[str, Operation]:
    """Functions of queries [2, 3, 4], float32, on that device, which all need a gradient or none."""

    def of_queries(call: Call) -> Operation:
        return lambda queries: call(queries, *call.tensors[1:])

    return {name: of_queries(call) for name, call in calls(device, implementation).items()}


def value_and_gradients(
    call: Call, tensors: Sequence[Tensor], function: Callable[..., Tensor] | None = None
) -> list[Tensor]:
    """The result, and the gradients of all tensors, by the function of a call, or another."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    scores = (function or call.function)(*leaves, **call.options)
    return [scores.detach(), *torch.autograd.grad(scores.square().sum(), leaves)]


class Operators(TorchDispatchMode):
    """The operators of this package that are called, with their arguments."""

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
