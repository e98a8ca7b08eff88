"""Calls repeated from recordings of earlier calls with the same signature, on a GPU: streams, graphs, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from pylate_flash import maxsim, maxsim_cross_entropy, maxsim_varlen
from pylate_flash.ops import operator
from pylate_flash.ops.operator import repeated
from tests.gpu.tools import captured, equal, on_another_stream, unit
from tests.ops.operations import operations

pytestmark = pytest.mark.gpu


def anew(call: Callable[[], Any]) -> Any:
    repeated.forget()
    return call()


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("with_gradient", [False, True], ids=["", "with gradient"])
@pytest.mark.parametrize("name", operations())
def test_every_operation(name: str, with_gradient: bool, autocast: bool) -> None:
    operation = operations("cuda")[name]

    def results(queries: Tensor) -> list[Tensor | None]:
        queries.grad = None
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            result = operation(queries)
        if with_gradient:
            (result * 3).sum().backward()
        return [result.detach(), queries.grad]

    repeated.forget()
    arguments = [torch.randn(2, 3, 4, device="cuda", requires_grad=with_gradient) for _ in range(4)]
    output = [results(queries) for queries in arguments]
    for queries, actual in zip(arguments, output, strict=True):
        assert equal(actual, anew(lambda queries=queries: results(queries)))


def embeddings() -> tuple[Tensor, Tensor, Tensor]:
    queries, documents = (unit(*shape, dtype=torch.bfloat16) for shape in ((8, 32, 128), (40, 180, 128)))
    return queries, documents, unit(40, 180, seed=3) > 0


def test_other_streams() -> None:
    """Repeated calls run on the current stream, and their allocations belong to that stream."""
    queries, documents, mask = embeddings()
    expected = anew(lambda: maxsim(queries, documents, documents_mask=mask))
    for _ in range(3):
        maxsim(queries, documents, documents_mask=mask)

    def later() -> Tensor:
        torch.cuda._sleep(10_000_000)
        return maxsim(queries * 2, documents, documents_mask=mask)

    assert torch.equal(on_another_stream(later), expected * 2)


def test_a_graph_of_repeated_calls_and_of_a_step() -> None:
    queries, documents, mask = embeddings()
    queries.requires_grad_()
    documents.requires_grad_()

    def step() -> tuple[Tensor, ...]:
        loss = maxsim_cross_entropy(queries, documents, documents_mask=mask, temperature=0.05)
        with torch.no_grad():
            scores = maxsim(queries, documents, documents_mask=mask)
        return loss.detach(), scores, *torch.autograd.grad(loss, (queries, documents))

    on_another_stream(lambda: [step() for _ in range(4)])
    result, replay = captured(step)
    with torch.no_grad():
        queries.copy_(unit(8, 32, 128, dtype=torch.bfloat16, seed=2))
    replay()
    assert equal(result, anew(step))


def test_threads() -> None:
    failures: list[object] = []
    queries, documents, mask = embeddings()
    expected = anew(lambda: maxsim(queries, documents, documents_mask=mask))

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for factor in (1, 2, 4, 8) * 5:
                    if not torch.equal(maxsim(queries * factor, documents, documents_mask=mask), expected * factor):
                        failures.append(factor)
        except BaseException as error:
            failures.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("implementation", ["triton", "blocked"])
def test_boundaries_are_looked_at_anew(implementation: str) -> None:
    """Plain torch reads them on the host, so its calls cannot be repeated."""
    queries, documents = unit(2 * 8, 16), unit(60, 16, seed=1)
    bounds = torch.tensor([0, 8, 16], dtype=torch.int32, device="cuda")
    for cut in (5, 30, 10, 40, 20):
        offsets = torch.tensor([0, cut, 60], dtype=torch.int32, device="cuda")
        actual = maxsim_varlen(
            queries, documents, bounds, offsets, max_query_length=8, max_document_length=60,
            implementation=implementation,
        )  # fmt: skip
        similarities = queries.view(2, 8, 16) @ documents.T
        expected = torch.stack([similarities[..., :cut].amax(-1).sum(-1), similarities[..., cut:].amax(-1).sum(-1)], 1)
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


def repeats() -> int:
    return sum(type(entry) is tuple for entry in [*repeated._newer.values(), *repeated._older.values()])


def test_boundaries_on_the_host_are_looked_at_and_the_call_is_repeated() -> None:
    """Different lengths each time, with the same number of documents and of tokens in total."""
    queries, documents = unit(4 * 32, 128, dtype=torch.bfloat16), unit(1600, 128, dtype=torch.bfloat16, seed=1)
    bounds, candidates = torch.arange(5, dtype=torch.int32) * 32, torch.tensor([0, 4, 9, 9, 16], dtype=torch.int32)
    repeated.forget()
    with torch.no_grad():
        for seed in range(4):
            # The maximum lengths have the same plan.
            longest, generator = 600 - seed, torch.Generator().manual_seed(seed)
            cuts = torch.randint(longest, 1500, (13,), generator=generator).sort().values.tolist()
            offsets = torch.tensor([0, longest, *cuts, 1500, 1600], dtype=torch.int32)
            options = {"candidates_cu_seqlens": candidates, "empty_score": -7.0}
            actual = maxsim_varlen(queries, documents, bounds, offsets, **options)
            padded = [document.float() for document in documents.cpu().split(offsets.diff().tolist())]
            owner = torch.arange(4).repeat_interleave(candidates.diff())
            expected = [
                (queries.cpu().float().view(4, 32, 128)[query] @ document.T).amax(-1).sum() if len(document) else -7.0
                for query, document in zip(owner.tolist(), padded, strict=True)
            ]
            torch.testing.assert_close(actual.cpu(), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert repeats() == 1
    with pytest.raises(ValueError, match="documents_cu_seqlens must rise"):
        maxsim_varlen(queries, documents, bounds, offsets.flip(0), candidates_cu_seqlens=candidates)


# Every kernel for packed documents: Hopper, single and `short`; float32 as pairs, and split into parts.
TOTALS = {
    "many queries": (8, 128, torch.bfloat16, (60, 180), 250),
    "long embeddings": (8, 768, torch.bfloat16, (60, 180), 250),
    "one query": (1, 128, torch.bfloat16, (60, 180), 250),
    "short documents": (1, 128, torch.bfloat16, (8, 32), 8000),
    "float32": (8, 128, torch.float32, (60, 180), 250),
    "long float32": (8, 256, torch.float32, (60, 180), 250),
    "one of float32": (1, 256, torch.float32, (60, 180), 250),
}


@pytest.mark.parametrize("case", TOTALS)
def test_packed_totals_share_what_is_repeated(case: str) -> None:
    """Totals with the same plan, with different lengths each time."""
    n_queries, size, dtype, (shortest, longest), number = TOTALS[case]
    queries = unit(n_queries * 32, size, dtype=dtype)
    bounds = torch.arange(n_queries + 1, device="cuda") * 32
    memory = unit(number * longest, size, dtype=dtype, seed=1)
    repeated.forget()
    for seed in range(12):
        lengths = torch.randint(shortest, longest + 1, (number,), generator=torch.Generator().manual_seed(seed))
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().cuda()
        documents = memory[: int(lengths.sum())]

        def call(documents: Tensor = documents, offsets: Tensor = offsets, **lengths: int) -> Tensor:
            return maxsim_varlen(queries, documents, bounds, offsets, **lengths)

        with torch.no_grad():
            actual = call(max_query_length=32, max_document_length=longest)
            with mock.patch.object(operator, "repeated", operator._Repeated(0)):
                expected = call(max_query_length=32, max_document_length=longest)
        assert torch.equal(actual, expected)
    assert repeats()
