"""The backward on a GPU: every kernel, layout and kind of argmax, and all callers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pylate_flash.kernels import tables_backward
from pylate_flash.ops import maxsim, maxsim_reference
from tests.gpu.calls import CALLS, STEPS, padded
from tests.gpu.tools import DTYPES, HALF, captured, equal, memory_of, no_waiting, unit
from tests.kernels.backward_cases import KINDS, WAYS, Case, choose, dense, packed, weighted
from tests.ops.cases import relative_error

pytestmark = pytest.mark.gpu

# (Nq, Lq), (G, K, Ld), d
SHAPES = [
    ((96, 32), (1, 70, 180), 128),  # lists of several chunks
    ((64, 32), (1, 70, 180), 128),  # as many rows as one program lists, and lists longer than a part
    ((32, 32), (1, 70, 180), 128),  # as many rows as one program always sums
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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("queries", "documents", "size"), SHAPES)
@pytest.mark.parametrize("normalize", [False, True])
def test_gradients(queries, documents, size: int, kind: str, way: str, normalize: bool) -> None:
    for dtype in DTYPES if kind == "skewed" else DTYPES[-1:]:
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
        if normalize:
            weighted(replace(case, documents=3 * case.documents)).check(way, normalized=True)


@pytest.mark.parametrize("way", WAYS)
def test_a_masked_token_that_is_not_a_number_gets_no_gradient(way: str) -> None:
    """Nor does it change another token's: it is in no argmax, or has none."""
    for case in (
        dense((40, 32), (1, 60, 50), 128, "uniform", True, device="cuda"),
        dense((1, 32), (1, 3000, 50), 128, "uniform", True, device="cuda"),
        packed((40, 32), [50] * 60, 128, "uniform", device="cuda", normalize=True),
        weighted(dense((16, 32), (16, 8, 50), 128, "uniform", True, device="cuda")),
    ):
        case.argmax[case.argmax == 2] = 3
        case.argmax.view(-1, 32)[:, 1] = -1
        expected = case.run(way)
        tokens = case.documents.view(-1, 50, 128)
        case.queries[:, 1] = torch.nan
        tokens[:, 2] = torch.nan
        actual = case.run(way)
        assert equal(actual, expected)
        assert not actual[0][:, 1].any()
        assert not actual[1].view(tokens.shape)[:, 2].any()
        assert all(gradient.any() for gradient in actual)


@pytest.mark.parametrize("length", [2048, 2049, 40_000])
def test_documents_of_two_passes(length: int) -> None:
    dense((20, 100), (1, 3, length), 32, "skewed", device="cuda").check("lists")


def test_more_rows_than_16_bits_count() -> None:
    dense((70, 1000), (1, 2, 300), 64, "skewed", dtype=HALF, device="cuda").check("lists")


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
        assert all(equal(problem.run(way), first) for _ in range(19))


@pytest.mark.parametrize("way", WAYS)
def test_not_a_number_stays_where_it_belongs(way: str) -> None:
    problem = dense((8, 32), (1, 4, 100), 128, "uniform", device="cuda")
    problem.argmax[:] = torch.arange(256, device="cuda") % 90
    problem.queries[0, 1, 2] = torch.nan
    problem.queries[2, 3, 0] = torch.inf
    problem.documents[0, 1, 3, 4] = torch.nan
    problem.grad_scores[1, 0] = torch.nan
    for actual, expected in zip(problem.run(way), problem.expected(), strict=True):
        torch.testing.assert_close(actual.double(), expected, equal_nan=True, rtol=1e-5, atol=1e-6)
        assert expected.isfinite().any()


@pytest.mark.parametrize("way", WAYS)
def test_strides_change_nothing(way: str) -> None:
    problem = dense((40, 30), (1, 12, 50), 128, "skewed", device="cuda")
    strided = Case(
        problem.grad_scores.t().contiguous().t(),
        problem.queries.transpose(0, 1).contiguous().transpose(0, 1),
        problem.documents.transpose(1, 2).contiguous().transpose(1, 2),
        problem.argmax,
    )
    assert equal(strided.run(way), problem.run(way))


def test_more_elements_than_32_bits_address() -> None:
    """2.2e9 elements of documents, and as many of their gradient; the last documents are checked."""
    documents = torch.zeros(1, 17_000, 1024, 128, dtype=HALF, device="cuda")
    documents[0, -3:] = unit(3, 1024, 128, dtype=HALF)
    queries = unit(4, 32, 128, dtype=HALF, seed=1)
    generator = torch.Generator("cuda").manual_seed(0)
    argmax = choose("skewed", (1, 17_000, 128), 1024, generator).to(torch.int16)
    argmax[0, :-3] = -1
    grad_scores = torch.randn(4, 17_000, generator=generator, device="cuda")
    last = Case(grad_scores[:, -3:], queries, documents[:, -3:], argmax[:, -3:].contiguous())
    expected_queries, expected_documents = last.expected()
    for way in WAYS:
        grad_queries, grad_documents = Case(grad_scores, queries, documents, argmax).run(way)
        assert relative_error(grad_queries, expected_queries) <= 1e-2
        assert relative_error(grad_documents[:, -3:], expected_documents) <= 1e-2
        assert not grad_documents[:, :-3].any()
        del grad_queries, grad_documents


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
    """1024 x 1024 pairs of 32 x 180 tokens; the argmax takes 64 MiB and its lists may take half of that."""
    problem = dense((1024, 32), (1, 1024, 180), 128, "skewed", dtype=HALF, device="cuda")
    peak, gradient_bytes = memory_of(lambda: problem.run("lists"))
    assert peak - gradient_bytes <= 40 << 20


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make all callers compute the document gradient with this kernel."""
    monkeypatch.setattr(tables_backward, "FEW_ROWS", WAYS[request.param])
    return request.param


IN_EVERY_WAY = pytest.mark.parametrize("way", WAYS, indirect=True)


@IN_EVERY_WAY
def test_deterministic_algorithms_are_no_hindrance(way: str) -> None:
    call = CALLS["plain"]()
    expected = call.step()
    torch.use_deterministic_algorithms(True)
    try:
        assert equal(call.step(), expected)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("normalize", [False, True])
def test_the_same_tensor_twice(normalize: bool) -> None:
    tokens = unit(16, 40, 64).requires_grad_()
    doubled = tokens.detach().double().requires_grad_()
    (actual,) = torch.autograd.grad(maxsim(tokens, tokens, normalize=normalize).sum(), tokens)
    (expected,) = torch.autograd.grad(maxsim_reference(doubled, doubled, normalize=normalize).sum(), doubled)
    assert relative_error(actual, expected) <= 1e-5


@IN_EVERY_WAY
def test_compiles_into_one_graph(way: str) -> None:
    def loss(queries: Tensor, documents: Tensor) -> Tensor:
        return F.cross_entropy(maxsim(queries, documents) / 0.02, torch.arange(16, device="cuda"))

    def scores(queries: Tensor, documents: Tensor) -> Tensor:
        return F.log_softmax(maxsim(queries, documents, normalize=True) / 0.1, dim=-1)

    call = CALLS["plain"]()
    for function, tolerance in ((loss, {}), (scores, {"rtol": 1e-4, "atol": 1e-5})):
        compiled = torch.compile(function, fullgraph=True)
        actual, expected = (call.gradients(step(*call.leaves)) for step in (compiled, function))
        torch.testing.assert_close(actual, expected, **tolerance)


@pytest.mark.parametrize("documents", [(70, 180, 128), (64, 4, 180, 128)])
@IN_EVERY_WAY
def test_a_step_in_a_cuda_graph(way: str, documents: tuple[int, ...]) -> None:
    call = padded(maxsim, (64, 32, 128), documents)
    call.step()
    result, replay = captured(call.step)
    call.change()
    replay()
    assert equal(result, call.step())


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_autocast_and_grad_scaler(dtype: torch.dtype) -> None:
    """Gradients arrive in float32, scaled, and one that is not finite makes the scaler skip the step."""
    call = CALLS["plain"]()
    queries, documents = call.leaves
    scaler = torch.amp.GradScaler("cuda", init_scale=64.0)
    with torch.autocast("cuda", dtype=dtype):
        scores = call()
    rounded = queries.to(dtype), documents.to(dtype)
    assert torch.equal(scores, maxsim(*rounded))
    with torch.autocast("cuda", dtype=dtype), torch.no_grad():
        assert torch.equal(call(), maxsim(*rounded))
    scaler.scale(scores.mean()).backward()
    expected = torch.autograd.grad(
        maxsim_reference(*(leaf.double() for leaf in rounded)).mean() * 64, (queries, documents)
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
@pytest.mark.parametrize("shapes", STEPS)
def test_gradients_of_scores_may_lie_at_one_place(shapes: tuple, normalize: bool) -> None:
    call = padded(maxsim, *shapes, normalize=normalize)
    scores = call()
    (ones,) = torch.autograd.grad(scores.sum(), call.leaves[1], retain_graph=True)
    assert equal(torch.autograd.grad(scores, call.leaves[1], torch.ones_like(scores)), [ones])
