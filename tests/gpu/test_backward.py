"""The backward on a GPU: every way, layout and kind of winners, and everything that calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from pylate_flash.kernels import tables
from pylate_flash.ops import maxsim, maxsim_pairwise, maxsim_reference
from tests.kernels.backward_cases import KINDS, WAYS, Case, choose, dense, packed, weighted
from tests.ops.cases import relative_error

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# (Nq, Lq), (G, K, Ld), d
SHAPES = [
    ((96, 32), (1, 70, 180), 128),  # lists of several chunks
    ((64, 32), (1, 70, 180), 128),  # as many rows as one program lists, and lists longer than a part
    ((32, 32), (1, 70, 180), 128),  # as many as are always summed by one
    ((16, 32), (1, 300, 180), 128),  # as many rows as one program lists of many documents
    ((3, 500), (1, 5, 1000), 128),  # long documents: other chunks
    ((1, 500), (1, 4, 2047), 128),  # as many tokens
    ((1, 32), (1, 3000, 20), 128),  # documents shared by several programs
    ((16, 32), (16, 8, 300), 128),  # candidates
    ((200, 7), (200, 1, 33), 96),  # pairs
    ((70, 1), (1, 9, 1), 48),
    ((8, 32), (1, 4, 40), 512),
    ((4, 32), (1, 3, 40), 4096),
    ((3, 40), (1, 3, 30), 770),
]


def unit(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return F.normalize(torch.randn(*shape, device="cuda", generator=generator), dim=-1).to(dtype)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("queries", "documents", "size"), SHAPES)
@pytest.mark.parametrize("normalize", [False, True])
def test_gradients(queries, documents, size: int, kind: str, way: str, normalize: bool) -> None:
    for dtype in DTYPES if kind == "skewed" else DTYPES[:1]:
        dense(queries, documents, size, kind, normalize, dtype, "cuda").check(way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalize", [False, True])
def test_packed_gradients(normalize: bool, dtype: torch.dtype, kind: str, way: str) -> None:
    lengths = torch.randint(1, 300, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    lengths[7] = lengths[59] = 0
    lengths[20] = 2500 if way == "lists" else 700
    packed((40, 30), lengths, 128, kind, dtype=dtype, device="cuda", normalize=normalize).check(way)
    packed((3, 40), lengths, 128, kind, [0, 25, 25, 60], dtype, "cuda", normalize).check(way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalize", [False, True])
def test_weights(normalize: bool, dtype: torch.dtype, way: str) -> None:
    lengths = torch.randint(0, 300, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    for case in (
        dense((64, 32), (1, 70, 180), 128, "skewed", normalize, dtype, "cuda"),
        dense((1, 32), (1, 3000, 20), 128, "skewed", normalize, dtype, "cuda"),
        dense((16, 32), (16, 8, 300), 96, "uniform", normalize, dtype, "cuda"),
        packed((40, 30), lengths, 128, "skewed", None, dtype, "cuda", normalize),
        packed((3, 40), lengths, 128, "skewed", [0, 25, 25, 60], dtype, "cuda", normalize),
    ):
        weighted(case).check(way)


@pytest.mark.parametrize("way", WAYS)
def test_a_masked_token_that_is_not_a_number_gets_no_gradient(way: str) -> None:
    """Nor does it change another one's: nobody chose it, or it chose nobody."""
    for case in (
        dense((40, 32), (1, 60, 50), 128, "uniform", True, device="cuda"),
        dense((1, 32), (1, 3000, 50), 128, "uniform", True, device="cuda"),
        packed((40, 32), [50] * 60, 128, "uniform", device="cuda", normalize=True),
        weighted(dense((16, 32), (16, 8, 50), 128, "uniform", True, device="cuda")),
    ):
        case.winners[case.winners == 2] = 3
        case.winners.view(-1, 32)[:, 1] = -1
        expected = case.run(way)
        tokens = case.documents.view(-1, 50, 128)
        case.queries[:, 1] = torch.nan
        tokens[:, 2] = torch.nan
        found = case.run(way)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert not found[0][:, 1].any()
        assert not found[1].view(tokens.shape)[:, 2].any()
        assert all(gradient.any() for gradient in found)


@pytest.mark.parametrize("length", [2048, 2049, 40_000])
def test_documents_of_two_passes(length: int) -> None:
    dense((20, 100), (1, 3, length), 32, "skewed", device="cuda").check("lists")


def test_more_rows_than_16_bits_count() -> None:
    dense((70, 1000), (1, 2, 300), 64, "skewed", dtype=torch.bfloat16, device="cuda").check("lists")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bitwise_reproducible(dtype: torch.dtype, kind: str, way: str) -> None:
    for problem in (
        dense((128, 32), (1, 128, 180), 128, kind, dtype=dtype, device="cuda"),
        dense((16, 32), (1, 128, 180), 128, kind, dtype=dtype, device="cuda"),
        dense((1, 32), (1, 2000, 50), 128, kind, dtype=dtype, device="cuda"),
        dense((16, 32), (16, 8, 300), 128, kind, True, dtype, "cuda"),
        packed((40, 30), [5, 0, 300, 41] * 8, 128, kind, dtype=dtype, device="cuda"),
    ):
        first = problem.run(way)
        assert all(torch.equal(a, b) for _ in range(19) for a, b in zip(problem.run(way), first, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_not_a_number_stays_where_it_belongs(way: str) -> None:
    problem = dense((8, 32), (1, 4, 100), 128, "uniform", device="cuda")
    problem.winners[:] = torch.arange(256, device="cuda") % 90
    problem.queries[0, 1, 2] = torch.nan
    problem.queries[2, 3, 0] = torch.inf
    problem.documents[0, 1, 3, 4] = torch.nan
    problem.grad_scores[1, 0] = torch.nan
    for found, expected in zip(problem.run(way), problem.expected(), strict=True):
        torch.testing.assert_close(found.double(), expected, equal_nan=True, rtol=1e-5, atol=1e-6)
        assert expected.isfinite().any()


@pytest.mark.parametrize("way", WAYS)
def test_strides_change_nothing(way: str) -> None:
    problem = dense((40, 30), (1, 12, 50), 128, "skewed", device="cuda")
    strided = Case(
        problem.grad_scores.t().contiguous().t(),
        problem.queries.transpose(0, 1).contiguous().transpose(0, 1),
        problem.documents.transpose(1, 2).contiguous().transpose(1, 2),
        problem.winners,
    )
    for found, expected in zip(strided.run(way), problem.run(way), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_more_elements_than_32_bits_address() -> None:
    """2.2e9 elements of documents, and as many of their gradient; the last documents are looked at."""
    documents = torch.zeros(1, 17_000, 1024, 128, dtype=torch.bfloat16, device="cuda")
    documents[0, -3:] = unit(3, 1024, 128, dtype=torch.bfloat16)
    queries = unit(4, 32, 128, dtype=torch.bfloat16, seed=1)
    generator = torch.Generator("cuda").manual_seed(0)
    winners = choose("skewed", (1, 17_000, 128), 1024, generator).to(torch.int16)
    winners[0, :-3] = -1
    grad_scores = torch.randn(4, 17_000, generator=generator, device="cuda")
    last = Case(grad_scores[:, -3:], queries, documents[:, -3:], winners[:, -3:].contiguous())
    expected_queries, expected_documents = last.expected()
    for way in WAYS:
        grad_queries, grad_documents = Case(grad_scores, queries, documents, winners).run(way)
        assert relative_error(grad_queries, expected_queries) <= 1e-2
        assert relative_error(grad_documents[:, -3:], expected_documents) <= 1e-2
        assert not grad_documents[:, :-3].any()
        del grad_queries, grad_documents


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("way", WAYS)
def test_waits_for_nothing(way: str) -> None:
    for problem in (
        dense((64, 32), (1, 70, 180), 128, "skewed", True, device="cuda"),
        dense((4, 32), (1, 3, 3000), 32, "skewed", device="cuda"),
    ):
        problem.run(way)
        with no_waiting():
            problem.run(way)


def test_memory_beyond_the_gradients_is_bounded() -> None:
    """1024 x 1024 pairs of 32 x 180 tokens; the winners take 64 MiB and their lists may take half of that."""
    problem = dense((1024, 32), (1, 1024, 180), 128, "skewed", dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = problem.run("lists")
    kept = sum(gradient.numel() * gradient.element_size() for gradient in gradients)
    assert torch.cuda.max_memory_allocated() - before - kept <= 40 << 20


def _leaves(n_queries: int = 16, **options) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        unit(n_queries, 32, 64, **options).requires_grad_(),
        unit(n_queries, 50, 64, seed=1, **options).requires_grad_(),
    )


def _gradients(function: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scores = function(*leaves)
    return torch.autograd.grad(
        (scores * torch.cos(torch.arange(scores.numel(), device="cuda")).view_as(scores)).sum(), leaves
    )


@contextmanager
def forced(way: str) -> Iterator[None]:
    """What is called here computes the gradient of the documents in this way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "FEW_ROWS", WAYS[way])
        yield


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("function", [maxsim, maxsim_pairwise])
def test_every_way(function: Callable[..., torch.Tensor], way: str) -> None:
    leaves = _leaves()
    expected = _gradients(function, *leaves)
    with forced(way):
        found = _gradients(function, *leaves)
    for gradient, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_results_repeat_where_they_must(way: str) -> None:
    leaves = _leaves()
    torch.use_deterministic_algorithms(True)
    try:
        with forced(way):
            _gradients(maxsim, *leaves)
    finally:
        torch.use_deterministic_algorithms(False)


def test_second_derivative_is_refused() -> None:
    leaves = _leaves()
    (gradient,) = torch.autograd.grad(maxsim(*leaves).sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


def test_activation_checkpointing() -> None:
    leaves = _leaves()
    found = _gradients(lambda *t: torch.utils.checkpoint.checkpoint(maxsim, *t, use_reentrant=False), *leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, _gradients(maxsim, *leaves), strict=True))


@pytest.mark.parametrize("normalize", [False, True])
def test_the_same_tensor_twice(normalize: bool) -> None:
    tokens = unit(16, 40, 64).requires_grad_()
    other = tokens.detach().double().requires_grad_()
    (found,) = torch.autograd.grad(maxsim(tokens, tokens, normalize=normalize).sum(), tokens)
    (expected,) = torch.autograd.grad(maxsim_reference(other, other, normalize=normalize).sum(), other)
    assert relative_error(found, expected) <= 1e-5


def test_frozen_documents_and_frozen_queries() -> None:
    queries, documents = _leaves()
    both = _gradients(maxsim, queries, documents)
    (of_queries,) = _gradients(lambda q: maxsim(q, documents.detach()), queries)
    (of_documents,) = _gradients(lambda d: maxsim(queries.detach(), d), documents)
    assert torch.equal(of_queries, both[0])
    assert torch.equal(of_documents, both[1])


@pytest.mark.parametrize("way", WAYS)
def test_compiles_into_one_graph(way: str) -> None:
    def scores(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(maxsim(queries, documents, normalize=True) / 0.1, dim=-1)

    leaves = _leaves()
    compiled = torch.compile(scores, fullgraph=True)
    with forced(way):
        for found, expected in zip(_gradients(compiled, *leaves), _gradients(scores, *leaves), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("candidates", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_cuda_graph_of_a_step(way: str, candidates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "FEW_ROWS", WAYS[way])
    queries = unit(64, 32, 128, dtype=torch.bfloat16).requires_grad_()
    shape = (64, 4, 180, 128) if candidates else (70, 180, 128)
    documents = unit(*shape, dtype=torch.bfloat16, seed=1).requires_grad_()

    def step() -> tuple[torch.Tensor, ...]:
        return _gradients(maxsim, queries, documents)

    step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        documents.copy_(unit(*shape, dtype=torch.bfloat16, seed=2))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, step(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_and_grad_scaler(dtype: torch.dtype) -> None:
    """Gradients arrive in float32, scaled, and one that is not finite skips the step."""
    queries, documents = _leaves()
    scaler = torch.amp.GradScaler("cuda", init_scale=64.0)
    with torch.autocast("cuda", dtype=dtype):
        scores = maxsim(queries, documents)
    scaler.scale(scores.mean()).backward()
    expected = torch.autograd.grad(
        maxsim_reference(queries.to(dtype).double(), documents.to(dtype).double()).mean() * 64, (queries, documents)
    )
    for leaf, reference in zip((queries, documents), expected, strict=True):
        assert leaf.grad.dtype == torch.float32
        assert relative_error(leaf.grad, reference) <= 1e-2
    optimizer = torch.optim.SGD([queries, documents], lr=0.1)
    documents.grad[0, 0, 0] = torch.inf
    before = queries.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(queries, before)
    assert scaler.get_scale() == 32.0


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    "shapes",
    [
        ((40, 32, 128), (70, 300, 128)),
        ((200, 32, 128), (70, 300, 128)),
        ((3, 32, 128), (70, 300, 128)),
        ((16, 32, 128), (16, 4, 180, 128)),
        ((16, 160, 128), (16, 4, 180, 128)),
    ],
)
def test_a_step_repeats(shapes: tuple, normalize: bool) -> None:
    """Compiled kernels, launched by Triton's C function, give what the first launches gave, wherever they run."""
    queries, documents = (
        unit(*shape, dtype=torch.bfloat16, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)
    )
    storage = torch.empty(documents.numel() + 1, device="cuda", dtype=torch.bfloat16)
    shifted = storage[1:].view(documents.shape).copy_(documents.detach()).requires_grad_()

    def step(documents: torch.Tensor = documents) -> tuple[torch.Tensor, ...]:
        return _gradients(lambda *t: maxsim(*t, normalize=normalize), queries, documents)

    expected = step()
    leaves = [tensor.detach().double().requires_grad_() for tensor in (queries, documents)]
    exact = _gradients(lambda *t: maxsim_reference(*t, normalize=normalize), *leaves)
    for found, reference in zip(expected, exact, strict=True):
        assert relative_error(found, reference) <= 1e-2
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))
    # Addresses that are no multiples of 16 are other kernels', which may sum in another order.
    for _ in range(2):
        for found, reference in zip(step(shifted), expected, strict=True):
            assert relative_error(found, reference) <= 1e-2
    with no_waiting():
        step()
    # Scores whose gradients lie in another order, or at one place.
    scores = maxsim(queries, documents, normalize=normalize)
    (ones,) = torch.autograd.grad(scores.sum(), documents, retain_graph=True)
    (other,) = torch.autograd.grad(scores, documents, torch.ones_like(scores))
    assert torch.equal(ones, other)
    # Its nodes would tie a captured stream to the one that they were made on.
    del scores
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = step()
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for gradient in found:
        gradient.zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
