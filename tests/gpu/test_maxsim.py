"""The kernels on a GPU against the definition in float64, on the same, already rounded, inputs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_flash.kernels import maxsim_forward
from pylate_flash.ops import (
    maxsim,
    maxsim_from_hidden,
    maxsim_pairs,
    maxsim_reference,
    maxsim_varlen,
    maxsim_varlen_pairs,
    pack,
)
from pylate_flash.ops.varlen import maxsim_varlen_reference
from tests.ops.cases import Case, cases, gradients, relative_error
from tests.ops.test_varlen import gradients as varlen_gradients
from tests.ops.test_varlen import packed

pytestmark = pytest.mark.gpu
OPTIONS = {"deadline": None, "derandomize": True}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# A kernel is compiled for each embedding size, so there are few of them.
SIZES = st.sampled_from([7, 48, 128])


def kernel(*tensors: torch.Tensor, **options) -> torch.Tensor:
    return maxsim(*tensors, **options, implementation="triton")


def unit(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return F.normalize(torch.randn(*shape, device="cuda", generator=generator), dim=-1).to(dtype)


@settings(max_examples=40, **OPTIONS)
@given(case=cases(dtypes=DTYPES, max_batch=7, max_length=200, sizes=SIZES))
def test_scores(case: Case) -> None:
    case = case.to("cuda")
    with torch.no_grad():
        scores = kernel(*case.tensors, **case.options)
    expected = maxsim_reference(*case.doubled().tensors, **case.options)
    torch.testing.assert_close(scores.double(), expected, rtol=2e-6, atol=2e-6)


@settings(max_examples=40, **OPTIONS)
@given(case=cases(dtypes=DTYPES, max_batch=7, max_length=200, sizes=SIZES))
def test_gradients(case: Case) -> None:
    case = case.to("cuda")
    expected = gradients(maxsim_reference, case.doubled())
    for gradient, reference in zip(gradients(kernel, case), expected, strict=True):
        assert gradient.dtype == case.queries.dtype
        assert relative_error(gradient, reference) <= (1e-5 if gradient.dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("queries_shape", "documents_shape"),
    [
        ((1, 32, 128), (100, 300, 128)),
        ((1, 128, 128), (50, 1024, 128)),
        ((1, 512, 128), (20, 1024, 128)),
        ((1, 1024, 128), (20, 1000, 128)),
        ((32, 32, 128), (64, 180, 128)),
        ((130, 33, 128), (70, 45, 128)),
        ((1, 32, 48), (100, 512, 48)),
        ((16, 32, 96), (16, 70, 96)),
        ((9, 20, 16), (8, 70, 16)),
        ((5, 70, 40), (9, 129, 40)),
        ((16, 32, 256), (16, 70, 256)),
        ((1, 256, 200), (7, 600, 200)),
        ((16, 32, 512), (16, 70, 512)),
        ((16, 32, 1000), (16, 150, 1000)),
        ((1, 32, 768), (50, 150, 768)),
        ((2, 200, 4096), (3, 150, 4096)),
        ((8, 32, 128), (8, 16, 300, 128)),
        ((4, 100, 128), (4, 5, 300, 128)),
        ((64, 1, 128), (64, 1, 128)),
    ],
)
def test_shapes_in_use(queries_shape, documents_shape, dtype: torch.dtype) -> None:
    case = Case(unit(*queries_shape, dtype=dtype), unit(*documents_shape, dtype=dtype, seed=1), None, None, {})
    expected = maxsim_reference(*case.doubled().tensors)
    assert relative_error(kernel(*case.tensors), expected) <= 2e-6
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for gradient, reference in zip(gradients(kernel, case), gradients(maxsim_reference, case.doubled()), strict=True):
        assert relative_error(gradient, reference) <= tolerance
        assert F.cosine_similarity(gradient.double().flatten(), reference.flatten(), dim=0) >= 0.9999


def on_gpu(case: tuple) -> tuple:
    arguments, options = case
    candidates = options["candidates_cu_seqlens"]
    candidates = None if candidates is None else candidates.cuda()
    return tuple(tensor.cuda() for tensor in arguments), options | {"candidates_cu_seqlens": candidates}


def varlen_kernel(*tensors: torch.Tensor, **options) -> torch.Tensor:
    return maxsim_varlen(*tensors, **options, implementation="triton")


@settings(max_examples=40, **OPTIONS)
@given(case=packed(dtypes=DTYPES, sizes=SIZES))
def test_varlen(case: tuple) -> None:
    (queries, documents, *bounds), options = case
    arguments, options_on_gpu = on_gpu(case)
    with torch.no_grad():
        scores = varlen_kernel(*arguments, **options_on_gpu)
    expected = maxsim_varlen_reference(queries.double(), documents.double(), *bounds, **options)
    torch.testing.assert_close(scores.cpu().double(), expected, rtol=2e-6, atol=2e-6)


@settings(max_examples=40, **OPTIONS)
@given(case=packed(dtypes=DTYPES, sizes=SIZES))
def test_varlen_gradients(case: tuple) -> None:
    found = varlen_gradients(varlen_kernel, on_gpu(case))
    expected = varlen_gradients(maxsim_varlen_reference, case, torch.float64)
    for gradient, reference in zip(found, expected, strict=True):
        assert gradient.dtype == case[0][0].dtype
        assert relative_error(gradient.cpu(), reference) <= (1e-5 if gradient.dtype == torch.float32 else 1e-2)


LONG = [70, 9000, 0, 300, 40_000, 1] + [180] * 200


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("query_lengths", "candidates"),
    [([32], None), ([32, 7, 0, 20], None), ([300], None), ([32] * 40, None), ([32, 100], [0, 2, 206])],
)
@pytest.mark.parametrize("normalize", [False, True])
def test_varlen_with_long_documents(query_lengths, candidates, normalize: bool, dtype: torch.dtype) -> None:
    """A document of 40000 tokens is cut into pieces, more of them than one processor sees."""
    arguments = _packed(
        [unit(length, 64, dtype=dtype, seed=i) for i, length in enumerate(query_lengths)],
        [unit(length, 64, dtype=dtype, seed=i) for i, length in enumerate(LONG)],
    )
    options = {
        "normalize": normalize,
        "candidates_cu_seqlens": None if candidates is None else torch.tensor(candidates),
    }
    found = varlen_gradients(varlen_kernel, (arguments, options))
    expected = varlen_gradients(partial(maxsim_varlen, implementation="blocked"), (arguments, options), torch.float64)
    for gradient, reference in zip(found, expected, strict=True):
        assert relative_error(gradient, reference) <= (1e-5 if dtype == torch.float32 else 1e-2)
    scores, double = varlen_kernel(*arguments, **options), [tokens.double() for tokens in arguments[:2]]
    torch.testing.assert_close(
        scores.double(), maxsim_varlen(*double, *arguments[2:], **options).double(), rtol=2e-6, atol=2e-6
    )
    assert torch.equal(
        scores, varlen_kernel(*arguments, **options, max_query_length=max(query_lengths), max_document_length=40_000)
    )


def test_varlen_ties_and_nan_across_pieces() -> None:
    documents = [unit(1, 64, seed=1).repeat(20_000, 1), unit(50, 64), unit(9000, 64, seed=2)]
    documents[2][8765, 3] = torch.nan
    for query_lengths in ([20], [20, 30]):
        arguments = _packed([unit(length, 64, seed=length) for length in query_lengths], documents)
        tokens = arguments[1].requires_grad_()
        scores = varlen_kernel(*arguments)
        assert scores[:, 2].isnan().all()
        assert scores[:, :2].isfinite().all()
        (gradient,) = torch.autograd.grad(scores[:, 0].sum(), tokens, retain_graph=True)
        assert (gradient != 0).any(dim=1).nonzero().flatten().tolist() == [0]
        (gradient,) = torch.autograd.grad(scores[:, 2].sum(), tokens)
        assert (gradient != 0).any(dim=1).nonzero().flatten().tolist() == [20_050 + 8765]


@pytest.mark.parametrize("lengths", [[90] * 40, [3, 30_000, 90]])
def test_varlen_bitwise_reproducible(lengths: list[int]) -> None:
    documents = [unit(length, 64, dtype=torch.bfloat16, seed=i) for i, length in enumerate(lengths)]
    case = _packed([unit(n, 64, dtype=torch.bfloat16, seed=n) for n in (32, 20)], documents), {}
    first = varlen_gradients(varlen_kernel, case)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(varlen_gradients(varlen_kernel, case), first, strict=True))


def test_varlen_of_many_documents_equals_padded_ones() -> None:
    lengths = torch.randint(1, 400, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    documents = [unit(length, 128, dtype=torch.bfloat16, seed=i) for i, length in enumerate(lengths)]
    padded = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    mask = torch.arange(padded.shape[1], device="cuda") < torch.tensor(lengths, device="cuda").unsqueeze(1)
    queries = unit(7, 30, 128, dtype=torch.bfloat16, seed=1)
    found = maxsim_varlen(*_packed(list(queries), documents))
    torch.testing.assert_close(found, maxsim(queries, padded, documents_mask=mask), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("lengths", [(32, 32, 32), (7, 32, 0)])
@pytest.mark.parametrize("function", [maxsim_varlen, maxsim_varlen_pairs])
def test_varlen_waits_for_nothing(function, lengths: tuple[int, ...]) -> None:
    arguments = _packed(
        [unit(length, 64, seed=length) for length in lengths], [unit(n, 64, seed=n) for n in (40, 3, 9)]
    )
    options = {"reduction": "mean", "empty_score": -1.0}
    expected, expected_gradients = function(*arguments, **options), varlen_gradients(function, (arguments, options))
    torch.cuda.set_sync_debug_mode("error")
    try:
        options |= {"max_query_length": 32, "max_document_length": 40}
        found, found_gradients = function(*arguments, **options), varlen_gradients(function, (arguments, options))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(found_gradients, expected_gradients, strict=True))


def test_varlen_new_lengths_compile_nothing() -> None:
    from triton import knobs

    def call(*lengths: int) -> None:
        arguments = _packed(
            [unit(32, 128, dtype=torch.bfloat16)] * 8, [unit(n, 128, dtype=torch.bfloat16) for n in lengths]
        )
        arguments[1].requires_grad_()
        maxsim_varlen(*arguments).sum().backward()

    compilations: list[object] = []
    call(20, 300)
    knobs.runtime.jit_post_compile_hook = lambda **kwargs: compilations.append(kwargs) and None
    try:
        for lengths in [(31, 5, 260), (300,), (1, 1, 1), (700, 2, 0, 90)]:
            call(*lengths)
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert not compilations


def test_varlen_in_a_cuda_graph() -> None:
    arguments = _packed([unit(n, 64, seed=n) for n in (32, 20)], [unit(n, 64, seed=n) for n in (40, 3, 9000)])
    queries, documents = arguments[0].requires_grad_(), arguments[1].requires_grad_()
    call = partial(maxsim_varlen, *arguments, max_query_length=32, max_document_length=9000)
    call().sum().backward()
    torch.cuda.synchronize()
    queries.grad = documents.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores = call()
        scores.sum().backward()
    with torch.no_grad():
        documents.mul_(-1.0)
    graph.replay()
    expected = call()
    assert torch.equal(scores, expected)
    assert torch.equal(documents.grad, torch.autograd.grad(expected.sum(), documents)[0])


def _packed(queries: list[torch.Tensor], documents: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    (queries_values, queries_bounds), (documents_values, documents_bounds) = pack(queries), pack(documents)
    return queries_values, documents_values, queries_bounds, documents_bounds


@pytest.mark.parametrize("n_queries", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity(n_queries: int, dtype: torch.dtype) -> None:
    queries, documents = unit(n_queries, 20, 32, dtype=dtype), unit(4, 90, 32, dtype=dtype, seed=1)
    documents[0, 75, 1] = torch.nan
    documents[1, 2, 0] = torch.inf
    queries.requires_grad_()
    scores = kernel(queries, documents)
    expected = maxsim_reference(queries.detach(), documents)
    torch.testing.assert_close(scores.detach(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert scores[:, 0].isnan().all()
    assert scores[:, 1].isinf().all()
    (gradient,) = torch.autograd.grad(kernel(queries, documents[[0, 3]])[:, 0].sum(), queries)
    assert gradient[..., 1].isnan().all()
    assert gradient[..., 0].isfinite().all()


@pytest.mark.parametrize("n_queries", [1, 4])
def test_ties_go_to_the_lowest_index(n_queries: int) -> None:
    queries = unit(n_queries, 20, 32, dtype=torch.bfloat16)
    documents = unit(3, 1, 32, dtype=torch.bfloat16, seed=1).repeat(1, 150, 1).requires_grad_()
    (gradient,) = torch.autograd.grad(kernel(queries, documents).sum(), documents)
    assert (gradient[:, 1:] == 0).all()
    assert (gradient[:, 0] != 0).any()


@pytest.mark.parametrize("lowest", [-3, -9], ids=["mixed", "negative"])
@pytest.mark.parametrize("n_queries", [1, 40], ids=["single", "stacked"])
@pytest.mark.parametrize("size", [16, 128, 256])
def test_winners_are_the_first_of_the_best_tokens(size: int, n_queries: int, lowest: int) -> None:
    """Small integers, whose products are exact: most maxima are reached more than once, and every column wins."""
    generator = torch.Generator("cuda").manual_seed(size)
    queries = torch.randint(0, 3, (n_queries, 32, size), device="cuda", generator=generator)
    documents = torch.randint(lowest, lowest + 7, (30, 150, size), device="cuda", generator=generator)
    # Documents that differ in their first elements only, so that similarities are few.
    documents[:, :, 2:] = lowest + 3
    similarities = torch.einsum("qsd,ntd->nqst", queries.double(), documents.double())
    scores, winners = maxsim_forward(
        queries.bfloat16(), documents.bfloat16()[None], None, None, False, False, True, "ieee"
    )
    assert winners is not None
    # The first of equals: argmax of the GPU may return any.
    first = (similarities == similarities.amax(-1, keepdim=True)).cpu().int().argmax(-1)
    assert torch.equal(winners[0].cpu().long(), first.flatten(1))
    torch.testing.assert_close(scores.double(), similarities.amax(-1).sum(-1).T, rtol=2e-6, atol=0)
    assert len(first.unique()) > 20


def test_masked_nan_does_not_leak() -> None:
    queries, documents = unit(4, 20, 32), unit(4, 90, 32, seed=1)
    documents[:, 50:] = torch.nan
    mask = torch.arange(90, device="cuda").expand(4, 90) < 50
    queries.requires_grad_()
    documents.requires_grad_()
    scores = kernel(queries, documents, None, mask)
    torch.testing.assert_close(scores, kernel(queries, documents[:, :50].contiguous()))
    assert all(g.isfinite().all() for g in torch.autograd.grad(scores.sum(), (queries, documents)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bitwise_reproducible(dtype: torch.dtype) -> None:
    case = Case(unit(64, 32, 128, dtype=dtype), unit(64, 180, 128, dtype=dtype, seed=1), None, None, {})
    runs = [(kernel(*case.tensors), *gradients(kernel, case)) for _ in range(20)]
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))


def test_float32_follows_the_matmul_precision() -> None:
    queries, documents = unit(16, 32, 128), unit(16, 180, 128, seed=1)
    expected = maxsim_reference(queries.double(), documents.double())
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        error = relative_error(kernel(queries, documents), expected)
        assert 2e-6 < error <= 1e-3
    finally:
        torch.set_float32_matmul_precision(before)
    assert relative_error(kernel(queries, documents), expected) <= 2e-6


def test_autocast_and_grad_scaler() -> None:
    queries, documents = unit(8, 32, 128).requires_grad_(), unit(8, 180, 128, seed=1).requires_grad_()
    with torch.autocast("cuda", dtype=torch.float16):
        scores = maxsim(queries, documents)
    assert torch.equal(scores, maxsim(queries.half(), documents.half()))
    optimizer = torch.optim.SGD([queries], lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale((scores * torch.nan).sum()).backward()
    before = queries.detach().clone()
    scaler.step(optimizer)
    assert torch.equal(queries, before), "a step with NaN gradients must be skipped"


@pytest.mark.parametrize("n_queries", [1, 8])
def test_cuda_graph(n_queries: int) -> None:
    queries = unit(n_queries, 32, 128, dtype=torch.bfloat16)
    documents = unit(50, 180, 128, dtype=torch.bfloat16, seed=1)
    queries.requires_grad_()
    documents.requires_grad_()
    mask = torch.rand(50, 180, device="cuda") > 0.2
    maxsim(queries, documents, documents_mask=mask).sum().backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    queries.grad = documents.grad = None
    with torch.cuda.graph(graph):
        scores = maxsim(queries, documents, documents_mask=mask)
        scores.sum().backward()
    with torch.no_grad():
        documents.copy_(unit(50, 180, 128, dtype=torch.bfloat16, seed=2))
    graph.replay()
    fresh_queries, fresh_documents = (t.detach().clone().requires_grad_() for t in (queries, documents))
    expected = maxsim(fresh_queries, fresh_documents, documents_mask=mask)
    found = torch.autograd.grad(expected.sum(), (fresh_queries, fresh_documents))
    assert torch.equal(scores, expected)
    assert torch.equal(queries.grad, found[0])
    assert torch.equal(documents.grad, found[1])


def test_compiles_into_one_graph() -> None:
    def loss(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(maxsim(queries, documents) / 0.02, torch.arange(queries.shape[0], device="cuda"))

    queries, documents = unit(16, 32, 128).requires_grad_(), unit(16, 180, 128, seed=1).requires_grad_()
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True)(queries, documents), (queries, documents))
    for gradient, reference in zip(
        found, torch.autograd.grad(loss(queries, documents), (queries, documents)), strict=True
    ):
        torch.testing.assert_close(gradient, reference)


def test_opcheck() -> None:
    queries, documents = unit(4, 8, 16).requires_grad_(), unit(1, 4, 20, 16, seed=1).requires_grad_()
    torch.library.opcheck(
        torch.ops.pylate_flash.maxsim.default, (queries, documents, None, None, False, False, True, "triton", "auto")
    )


def test_memory_does_not_grow_with_the_similarity_tensor() -> None:
    """256 x 256 x 32 x 180 similarities are 720 MiB in bfloat16."""
    queries, documents = unit(256, 32, 128, dtype=torch.bfloat16), unit(256, 180, 128, dtype=torch.bfloat16, seed=1)
    queries.requires_grad_()
    documents.requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    maxsim(queries, documents).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 160 << 20


def test_strides_pairs_and_no_synchronisation() -> None:
    queries = unit(64, 32, 2, 128, dtype=torch.bfloat16)[:, :, 1]
    documents = unit(180, 64, 128, dtype=torch.bfloat16, seed=1).transpose(0, 1)
    maxsim(queries, documents)
    torch.cuda.set_sync_debug_mode("error")
    try:
        scores, pairs = maxsim(queries, documents), maxsim_pairs(queries, documents)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(scores, maxsim(queries.contiguous(), documents.contiguous()))
    torch.testing.assert_close(pairs, scores.diagonal(), rtol=2e-6, atol=2e-6)


def test_more_pairs_than_a_grid_axis_holds() -> None:
    queries, documents = unit(70_000, 2, 16), unit(70_000, 3, 16, seed=1)
    queries.requires_grad_()
    found = maxsim_pairs(queries, documents)
    expected = (queries.double() @ documents.double().transpose(1, 2)).amax(dim=-1).sum(dim=-1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(found.sum(), queries)
    (reference,) = torch.autograd.grad(expected.sum(), queries)
    assert relative_error(gradient, reference) <= 1e-5


@pytest.mark.parametrize("n_queries", [1, 4])
def test_more_elements_than_32_bits_address(n_queries: int) -> None:
    """2.2e9 elements of documents; the last ones are looked at."""
    documents = torch.zeros(17_000, 1024, 128, dtype=torch.bfloat16, device="cuda")
    documents[-3:] = unit(3, 1024, 128, dtype=torch.bfloat16)
    queries = unit(n_queries, 32, 128, dtype=torch.bfloat16, seed=1)
    expected = maxsim_reference(queries.double(), documents[-3:].double())
    scores = maxsim(queries, documents)
    torch.testing.assert_close(scores[:, -3:].double(), expected, rtol=2e-6, atol=2e-6)
    assert (scores[:, :-3] == 0).all()


def test_deterministic_algorithms_are_no_hindrance() -> None:
    queries, documents = unit(8, 32, 64).requires_grad_(), unit(8, 50, 64, seed=1).requires_grad_()
    expected = torch.autograd.grad(maxsim(queries, documents).sum(), (queries, documents))
    torch.use_deterministic_algorithms(True)
    try:
        found = torch.autograd.grad(maxsim(queries, documents).sum(), (queries, documents))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_new_length_compiles_nothing() -> None:
    from triton import knobs

    def call(n_queries: int, n_documents: int, query_length: int, document_length: int) -> None:
        queries = unit(n_queries, query_length, 128, dtype=torch.bfloat16).requires_grad_()
        documents = unit(n_documents, document_length, 128, dtype=torch.bfloat16, seed=1).requires_grad_()
        maxsim(queries, documents).sum().backward()

    compilations: list[object] = []
    # Many documents are shared by programs, some are taken several at a time, one alone.
    for n_documents in (100, 33, 1):
        call(64, n_documents, 32, 180)
    knobs.runtime.jit_post_compile_hook = lambda **kwargs: compilations.append(kwargs) and None
    try:
        for lengths in [(64, 101, 32, 181), (70, 33, 32, 77), (65, 1, 32, 300), (128, 20, 32, 1)]:
            call(*lengths)
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert not compilations


def test_double_precision_falls_back_and_is_refused_by_name() -> None:
    queries, documents = unit(2, 3, 8).double(), unit(3, 5, 8, seed=1).double()
    torch.testing.assert_close(maxsim(queries, documents).double(), maxsim_reference(queries, documents))
    with pytest.raises(ValueError, match="float64"):
        kernel(queries, documents)


@pytest.mark.parametrize("n_queries", [1, 3, 32])
def test_packed_calls_with_everything_known_equal_the_longer_way(n_queries: int) -> None:
    queries = [unit(32, 128, dtype=torch.bfloat16, seed=i) for i in range(n_queries)]
    documents = [unit(length, 128, dtype=torch.bfloat16, seed=length) for length in (5, 64, 200, 65, 1)]
    arguments = _packed(queries, documents)
    with torch.no_grad():
        known = maxsim_varlen(*arguments, max_query_length=32, max_document_length=200)
        again = maxsim_varlen(*arguments, max_query_length=32, max_document_length=200)
        longer = maxsim_varlen(*arguments)
    assert torch.equal(known, again)
    torch.testing.assert_close(known, longer, rtol=1e-6, atol=1e-6)
    tensors, bounds = arguments[:2], arguments[2:]
    graded = maxsim_varlen(tensors[0].clone().requires_grad_(), tensors[1], *bounds, max_query_length=32)
    torch.testing.assert_close(known, graded.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["masking", "implementation"])
@pytest.mark.parametrize("value", ["other", ["exclude"], None])
def test_bad_choices_of_plain_calls_name_the_argument(name: str, value) -> None:
    """A plain call is looked up by its options before they are checked."""
    queries, documents = unit(2, 4, 16, dtype=torch.bfloat16), unit(3, 5, 16, dtype=torch.bfloat16)
    weight = torch.eye(16, device="cuda", dtype=torch.bfloat16)
    for call in (partial(maxsim, queries, documents), partial(maxsim_from_hidden, queries, documents, weight)):
        with pytest.raises(ValueError, match=name):
            call(**{name: value})
