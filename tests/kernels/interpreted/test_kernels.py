"""The kernels, run by Triton's interpreter on the CPU, against the definitions.

float16 and float32 only: the interpreter multiplies the raw bits of bfloat16.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings

from pylate_flash.kernels import forward, plan, rows, tables
from pylate_flash.kernels.forward.common import add_sums
from pylate_flash.ops import kernel_calls, maxsim, maxsim_operator, maxsim_reference, maxsim_varlen, pack, quantize
from pylate_flash.ops.compute import compute
from pylate_flash.ops.varlen import maxsim_varlen_reference
from pylate_flash.problem import Options, Tensors, problem_of
from tests.ops.cases import Case, cases, check_definition, gradients, relative_error
from tests.ops.test_varlen import gradients as varlen_gradients
from tests.ops.test_varlen import packed

HALF_AND_FLOAT = (torch.float16, torch.float32)


def kernel(*tensors: torch.Tensor, **options) -> torch.Tensor:
    return maxsim(*tensors, **options, implementation="triton")


def varlen_kernel(*tensors: torch.Tensor, **options) -> torch.Tensor:
    return maxsim_varlen(*tensors, **options, implementation="triton")


@settings(max_examples=25)
@given(case=cases(dtypes=HALF_AND_FLOAT, max_batch=3))
def test_scores_and_gradients(case: Case) -> None:
    check_definition(kernel, maxsim_reference, case.tensors, case.keywords)


@pytest.mark.parametrize(
    ("queries_shape", "documents_shape"),
    [
        ((1, 70, 24), (3, 130, 24)),  # one query of several column blocks of rows, several document tiles
        ((5, 48, 16), (2, 20, 16)),  # a query length that is no power of two: sums of 16 rows
        ((2, 130, 16), (2, 3, 70, 16)),  # candidates of long queries
        ((3, 17, 300), (2, 40, 300)),  # embeddings that are split into blocks
        ((1, 17, 300), (2, 70, 300)),
        ((3, 5, 1100), (2, 20, 1100)),  # more products than one sum takes
        ((40, 3, 8), (3, 5, 8)),  # many short queries in one block of rows
        ((5, 33, 8), (3, 70, 8)),  # rows that are not padded, each with a sum of its own
        ((5, 33, 8), (3, 20, 8)),  # sums of 8 rows
        ((1, 5, 8), (40, 3, 8)),  # a program that walks several documents
    ],
)
def test_tile_boundaries(queries_shape: tuple[int, ...], documents_shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    queries, documents = torch.randn(queries_shape), torch.randn(documents_shape)
    case = Case(queries, documents, torch.rand(queries_shape[:-1]) > 0.2, torch.rand(documents_shape[:-1]) > 0.2, {})
    expected = maxsim_reference(*case.doubled().tensors, **case.keywords)
    assert relative_error(kernel(*case.tensors, **case.keywords), expected) <= 2e-6
    for gradient, reference in zip(gradients(kernel, case), gradients(maxsim_reference, case.doubled()), strict=True):
        assert relative_error(gradient, reference) <= 1e-5


@pytest.mark.parametrize("size", [8, 20, 24, 72])
@pytest.mark.parametrize("n_queries", [1, 3])
def test_strides_that_differ(n_queries: int, size: int) -> None:
    """Queries and documents within wider tensors, so that each operand has strides of its own."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(n_queries, 9, size + 2, generator=generator)[..., :size]
    documents = torch.randn(3, 70, size + 8, generator=generator)[..., 8:]
    for pair in ((queries, documents), (queries.contiguous(), documents), (queries, documents.contiguous())):
        expected = maxsim_reference(*(tensor.double() for tensor in pair))
        assert relative_error(kernel(*pair), expected) <= 2e-6


def test_embeddings_of_one_element_may_have_any_stride() -> None:
    queries, documents = torch.randn(1, 5).T.unsqueeze(1), torch.randn(1, 7).T.unsqueeze(1)
    assert queries.is_contiguous()
    assert queries.stride() == (1, 5, 5)
    torch.testing.assert_close(kernel(queries, documents), maxsim_reference(queries, documents))


def test_tokens_farther_apart_than_32_bits_count_are_brought_together() -> None:
    """Within a query; from one query to the next, kernels use 64-bit strides."""
    queries = torch.empty_strided((3, 4, 8), (8, 1 << 30, 1), device="meta")
    tensors = Tensors(queries, torch.empty(2, 5, 8, device="meta"))
    problem, result = kernel_calls.for_kernels(problem_of(tensors, Options()), tensors)
    assert result.queries.stride() == (32, 8, 1)
    assert problem.query_strides == (32, 8)
    tensors = tensors._replace(queries=torch.empty_strided((3, 4, 8), (1 << 40, 8, 1), device="meta"))
    assert kernel_calls.for_kernels(problem_of(tensors, Options()), tensors)[1].queries is tensors.queries


@pytest.mark.parametrize("size", [8, 130, 300])
@pytest.mark.parametrize("n_queries", [1, 3])
@pytest.mark.parametrize("masking", ["exclude", "zero"])
def test_norms_that_float32_holds_squared(masking: str, n_queries: int, size: int) -> None:
    """Other norms, and infinite ones, give NaN and never 0, whichever token wins."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(n_queries, 9, size, generator=generator)
    documents = torch.randn(4, 11, size, generator=generator)
    mask = torch.arange(44).view(4, 11) % 5 != 1
    options = {"documents_mask": mask, "masking": masking, "normalize": True}
    huge = queries * 2.0**57, documents * 2.0**57
    expected = maxsim_reference(queries.double(), documents.double(), **options)
    assert relative_error(kernel(*huge, **options), expected) <= 2e-6
    huge[1][1, 2] *= 2.0**10
    assert torch.equal(kernel(*huge, **options).isnan(), torch.tensor([False, True, False, False]).expand(n_queries, 4))
    for value in (2.0**66, torch.inf):
        huge[0][0, 3], huge[1][..., 0] = value, -huge[1][..., 0].abs()
        actual = kernel(*huge, **options)
        assert actual[0].isnan().all()
        assert not actual[1:, 0].isnan().any()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("n_queries", [1, 3])
@pytest.mark.parametrize(("size", "first", "second"), [(72, 64, 16), (96, 64, 32), (300, 256, 64), (320, 256, 64)])
def test_embeddings_in_two(
    size: int, first: int, second: int, n_queries: int, normalize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute capability 10 has enough shared memory for the longer ones."""
    monkeypatch.setattr(tables, "architecture", lambda device: (10, 1))
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(n_queries, 9, size, generator=generator).half()
    documents = torch.randn(3, 70, size, generator=generator).half()
    chosen = plan.forward_plan(problem_of(Tensors(queries, documents), Options()))
    assert chosen.config.blocks == (first, second, False)
    expected = maxsim_reference(queries.double(), documents.double(), normalize=normalize)
    assert relative_error(kernel(queries, documents, normalize=normalize), expected) <= 2e-6


@pytest.mark.parametrize("queries_shape", [(1, 3, 4), (4, 20, 4)])
def test_nan_infinity_and_ties(queries_shape: tuple[int, ...]) -> None:
    """One query goes through the single kernel, several through the stacked one."""
    torch.manual_seed(0)
    # Small integers: a tie is exact whatever the order in which numpy sums a product.
    queries = torch.randint(1, 9, queries_shape).float().requires_grad_()
    documents = torch.randint(-9, 9, (4, 40, 4)).float()
    documents[0, 35, 1] = torch.nan
    documents[1, 2, 0] = torch.inf
    documents[2] = documents[2, 0]
    documents.requires_grad_()
    scores = kernel(queries, documents)
    torch.testing.assert_close(scores, maxsim_reference(queries, documents), equal_nan=True)
    assert scores[:, 0].isnan().all()
    (grad_documents,) = torch.autograd.grad(scores[:, 2].sum(), documents)
    assert (grad_documents[2, 1:] == 0).all()
    assert (grad_documents[2, 0] != 0).any()
    (grad_queries,) = torch.autograd.grad(kernel(queries, documents[[0, 3]])[:, 0].sum(), queries)
    assert grad_queries[..., 1].isnan().all()
    assert grad_queries[..., 0].isfinite().all()


@settings(max_examples=25)
@given(case=packed(dtypes=HALF_AND_FLOAT))
def test_varlen(case: tuple) -> None:
    (queries, documents, *bounds), options = case
    with torch.no_grad():
        scores = varlen_kernel(queries, documents, *bounds, **options)
    expected = maxsim_varlen_reference(queries.double(), documents.double(), *bounds, **options)
    torch.testing.assert_close(scores.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("size", [16, 48, 96, 128])
def test_many_short_packed_documents(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One query walks them as one row: several end in one step, and some are empty; with several programs."""
    monkeypatch.setattr(tables, "architecture", lambda device: (9, 1))
    monkeypatch.setattr(tables, "SHORT_PER_SM", 2)
    monkeypatch.setattr(tables, "SHORT_MEAN_LENGTHS", ((40, 0),))
    monkeypatch.setattr(tables, "SMALLEST_SPLIT", 64)
    monkeypatch.delitem(forward._PLAIN, "single")
    torch.manual_seed(0)
    lengths = torch.tensor([0, 5, 40, 0, 33, 64, 1, 20, 0])
    bounds, query_bounds = torch.tensor([0, *lengths.cumsum(0)]), torch.tensor([0, 11])
    queries, documents = torch.randn(11, size).half(), torch.randn(int(bounds[-1]), size).half()
    documents[int(bounds[6]), 3] = torch.nan
    actual = varlen_kernel(queries, documents, query_bounds, bounds, empty_score=-3.0)
    expected = maxsim_varlen_reference(queries.double(), documents.double(), query_bounds, bounds, empty_score=-3.0)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=2e-5, equal_nan=True)
    assert actual.isnan().tolist() == [[document == 6 for document in range(9)]]


def test_a_long_document_among_short_ones_that_nobody_tells_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not split, as only the total number of tokens bounds its length."""
    monkeypatch.setattr(tables, "SHORT_MEAN_LENGTHS", ((1000, 0),))
    monkeypatch.setattr(tables, "SMALLEST_SPLIT", 64)
    monkeypatch.delitem(forward._PLAIN, "single")
    torch.manual_seed(0)
    lengths = torch.tensor([0, 5, 33, 2100, 0, 64, 1, 20, 0])
    bounds, query_bounds = torch.tensor([0, *lengths.cumsum(0)]), torch.tensor([0, 11])
    queries, documents = torch.randn(11, 32).half(), torch.randn(int(bounds[-1]), 32).half()
    tensors = Tensors(queries, documents, None, None, query_bounds, bounds)
    options = Options(11, len(documents), empty_score=-3.0, implementation="triton")
    actual, _ = compute(tensors, options, False)
    expected = maxsim_varlen_reference(queries.double(), documents.double(), query_bounds, bounds, empty_score=-3.0)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=2e-5)


@settings(max_examples=15)
@given(case=packed(dtypes=(torch.float32,)))
def test_varlen_gradients(case: tuple) -> None:
    expected = varlen_gradients(maxsim_varlen_reference, case, torch.float64)
    for gradient, reference in zip(varlen_gradients(varlen_kernel, case), expected, strict=True):
        assert relative_error(gradient, reference) <= 1e-5


@pytest.mark.parametrize(
    ("query_lengths", "candidates", "normalize"),
    [
        ([5], None, False),
        ([5], None, True),
        ([3, 0, 20], None, True),
        ([70], None, False),
        ([3, 70], [0, 4, 7], False),
        ([2, 0, 1], [0, 2, 3, 7], True),
    ],
)
def test_long_documents_in_segments(query_lengths, candidates, normalize: bool, small_splits: None) -> None:
    """Documents of one, two and many segments, and empty ones between them."""
    torch.manual_seed(0)
    lengths = [71, 0, 30, 220, 0, 6, 141]
    # Small integers: a tie is exact whatever the order in which numpy sums a product.
    queries, queries_bounds = pack([torch.randint(-3, 4, (n, 4)).float() for n in query_lengths])
    documents, documents_bounds = pack([torch.randint(-3, 4, (n, 4)).float() for n in lengths])
    documents[150, 1] = torch.nan
    if candidates is not None:
        candidates = torch.tensor(candidates)
    longest = max(query_lengths), 220
    tensors = Tensors(queries, documents, None, None, queries_bounds, documents_bounds, candidates)
    options = Options(*longest, 4, normalize, empty_score=-5.0)
    scores, argmax = compute(tensors, options._replace(implementation="triton"), True)
    expected, expected_argmax = compute(tensors, options._replace(implementation="blocked"), True)
    torch.testing.assert_close(scores, expected, equal_nan=True)
    assert scores.isnan().any()
    if not normalize:
        assert torch.equal(argmax, expected_argmax)
    without_argmax, _ = compute(tensors, options._replace(implementation="triton"), False)
    assert torch.equal(without_argmax.nan_to_num(), scores.nan_to_num())


@pytest.mark.parametrize("n_documents", [1, 256, 257])
def test_programs_walk_each_document_once(n_documents: int, small_splits: None) -> None:
    """For any number of entries in the search, and any number of empty documents."""
    lengths = torch.randint(0, 3, (n_documents,), generator=torch.Generator().manual_seed(0))
    lengths[n_documents // 2 :] = 0
    lengths[0] = 1
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    queries, queries_bounds = pack([torch.ones(1, 2)] * 2)
    scores = varlen_kernel(queries, torch.ones(int(lengths.sum()), 2), queries_bounds, bounds, empty_score=-1.0)
    assert torch.equal(scores[0], torch.where(lengths > 0, 2.0, -1.0))
    assert torch.equal(scores[0], scores[1])


@pytest.mark.parametrize(
    ("shapes", "normalize"),
    [
        (((4, 9, 48), (3, 21, 48)), True),
        (((2, 5, 48), (2, 3, 12, 48)), False),
        (((2, 70, 48), (2, 2, 12, 48)), True),
    ],
)
def test_what_autograd_asks_of_a_node(shapes: tuple, normalize: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    queries, documents = (torch.randn(shape, generator=generator).half().requires_grad_() for shape in shapes)
    grad_scores = torch.randn(maxsim(queries, documents).shape, generator=generator)

    def step(weights: torch.Tensor, **options) -> tuple[torch.Tensor, ...]:
        scores = kernel(queries, documents, normalize=normalize)
        return scores, *torch.autograd.grad(scores, (queries, documents), weights, **options)

    expected = step(grad_scores)
    # A gradient of any layout, and the same one again.
    for weights in (grad_scores.t().contiguous().t(), grad_scores):
        assert all(torch.equal(a, b) for a, b in zip(step(weights), expected, strict=True))
    documents.requires_grad_(False)
    scores = kernel(queries, documents, normalize=normalize)
    assert torch.equal(torch.autograd.grad(scores, queries, grad_scores)[0], expected[1])
    documents.requires_grad_()
    _, *gradients = step(grad_scores, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected[1:], strict=True))
    with pytest.raises(RuntimeError, match="maxsim has no second derivative"):
        gradients[1].sum().backward()
    scores = kernel(queries, documents, normalize=normalize)
    with torch.no_grad():
        documents.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scores.sum().backward()


def test_autocast_takes_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no gradient flows through the casts; they equal those of torch, also for NaN, infinities and overflow."""
    queries, documents = torch.randn(3, 5, 8), torch.randn(4, 7, 8)
    queries.view(-1)[:6] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e5, 1e-9])
    launched: list[int] = []
    cast = rows._cast_kernel

    def noted(*arguments) -> None:
        launched.append(1)
        cast(*arguments)

    monkeypatch.setattr(rows, "_cast_kernel", noted)
    with torch.autocast("cpu", torch.float16):
        scores = kernel(queries, documents)
        assert len(launched) == 1
        # These documents are not contiguous.
        strided = kernel(queries, documents.transpose(0, 1).contiguous().transpose(0, 1))
    assert len(launched) == 1
    expected = kernel(queries.half(), documents.half())
    torch.testing.assert_close(scores, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(strided, expected, rtol=0, atol=0, equal_nan=True)
    for source, dtype in ((queries, torch.float16), (queries.half(), torch.float32)):
        for actual, original in zip(rows.cast_both(source, source[1:], dtype), (source, source[1:]), strict=True):
            torch.testing.assert_close(actual, original.to(dtype), rtol=0, atol=0, equal_nan=True)
    leaf = documents.clone().requires_grad_()
    with torch.autocast("cpu", torch.float16):
        kernel(documents, leaf).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == torch.float32


@pytest.mark.parametrize("guess", [1, 3, 40])
@pytest.mark.parametrize("quantized", [False, True], ids=["", "quantized"])
def test_how_many_candidates_a_query_has_is_a_guess(
    quantized: bool, guess: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, their cu_seqlens is not read on the host; no candidate is left out or scored twice."""
    lengths = torch.randint(0, 9, (23,), generator=torch.Generator().manual_seed(0)).tolist()
    queries, documents = [torch.randn(5, 16) for _ in range(4)], [torch.randn(length, 16) for length in lengths]
    (values, bounds), (packed_documents, documents_bounds) = pack(queries), pack(documents)
    embeddings = quantize(packed_documents, "int8") if quantized else packed_documents
    call = partial(
        varlen_kernel, values, embeddings, bounds, documents_bounds,
        candidates_cu_seqlens=torch.tensor([0, 1, 1, 21, 23]), empty_score=-3.0,
    )  # fmt: skip
    expected, original = call(), maxsim_operator.longest

    def guessed(name: str, *arguments) -> int:
        return guess if name.startswith("candidates") else original(name, *arguments)

    monkeypatch.setattr(maxsim_operator, "longest", guessed)
    assert torch.equal(call(), expected)


@pytest.mark.parametrize("n_sums", [2, 8, 9, 33])
@pytest.mark.parametrize("kernel_name", ["single", "stacked"])
def test_sums_are_added_in_an_order_that_no_size_changes(kernel_name: str, n_sums: int) -> None:
    drawn = torch.randn(n_sums, 3, 300)

    def added(sums: torch.Tensor) -> torch.Tensor:
        """Scores [Nq, Nd] of partial sums [n_sums, Nq, Nd], which are laid out as by the kernel of that name."""
        shape = tuple(sums.shape[1:])
        served = SimpleNamespace(scores_shape=shape, n_documents=shape[1])
        partial_sums = sums if kernel_name == "single" else sums.transpose(0, 1)
        return add_sums(served, SimpleNamespace(kernel=kernel_name, n_sums=n_sums), partial_sums.contiguous())

    result = added(drawn)
    torch.testing.assert_close(result.double(), drawn.double().sum(dim=0), rtol=0.0, atol=n_sums * 2.0**-20)
    for queries, documents in ((slice(3), slice(1)), (slice(1, 2), slice(100, 300)), (slice(2, 3), slice(7, 9))):
        assert torch.equal(added(drawn[:, queries, documents]), result[queries, documents])
