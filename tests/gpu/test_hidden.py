"""`maxsim_from_hidden` on a GPU against its definition in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_flash.ops import hidden_blocks as module
from pylate_flash.ops import maxsim_from_hidden, maxsim_from_hidden_reference, maxsim_reference
from tests.gpu.calls import hidden_states
from tests.gpu.tools import CAPABILITY, HALF, allocated, captured, memory_of, on_gpu, random_mask
from tests.ops.cases import relative_error
from tests.ops.test_hidden import SCRATCHES, Problem, as_rounded, limit_scratch, problems

pytestmark = pytest.mark.gpu
kernel = partial(maxsim_from_hidden, implementation="triton")
# A kernel is compiled for each embedding size, so there are few of them.
SIZES = st.sampled_from([7, 24])


@settings(max_examples=25)
@given(problem=problems(sizes=SIZES), scratch=SCRATCHES)
def test_float32(problem: Problem, scratch: int) -> None:
    expected = problem.to(torch.float64)(maxsim_from_hidden_reference)
    gradients = problem.to(torch.float64).gradients(maxsim_from_hidden_reference)
    # Candidates are on the host, so that no call waits for them.
    on_device = on_gpu(problem, kept=("candidates_cu_seqlens",))
    with pytest.MonkeyPatch.context() as patch:
        limit_scratch(patch, scratch)
        scores, actual = on_device(kernel), on_device.gradients(kernel)
    torch.testing.assert_close(scores.cpu().double(), expected.double(), rtol=1e-5, atol=1e-5)
    noise = 1e-5 * max(1.0, *(gradient.norm().item() for gradient in gradients.values()))
    for name, gradient in actual.items():
        error = (gradient.cpu().double() - gradients[name]).norm().item()
        assert error <= 1e-5 * gradients[name].norm().item() + noise, name


def on_host(problem: Problem) -> Problem:
    """The same problem for the definition, on the host and without maximum lengths."""
    return Problem(
        {name: tensor.cpu() for name, tensor in problem.tensors.items()},
        {name: value.cpu() for name, value in problem.rest.items() if isinstance(value, torch.Tensor)},
    )


@pytest.mark.parametrize("scratch", [module.SCRATCH_BYTES, 1 << 19])
@pytest.mark.parametrize("layout", ["in-batch", "candidates", "packed"])
@pytest.mark.parametrize("dtype", [torch.float16, HALF])
def test_half(layout: str, dtype: torch.dtype, scratch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_scratch(monkeypatch, scratch)
    problem = hidden_states(layout, dtype)
    exact = on_host(problem).to(torch.float64)
    # Rounded to 8 bits a few times, a similarity moves by about 2^-8 of its size, and the sum of 25 of them by less.
    expected = exact(maxsim_from_hidden_reference)
    torch.testing.assert_close(problem(kernel).cpu().double(), expected, rtol=4e-3, atol=4e-3)
    gradients = exact.gradients(as_rounded(problem))
    for name, gradient in problem.gradients(kernel).items():
        assert gradient.dtype == dtype
        actual, reference = gradient.cpu().double().flatten(), gradients[name].flatten()
        assert torch.cosine_similarity(actual, reference, dim=0) >= 0.9999, name
        assert relative_error(actual, reference) <= 1e-2, name


def few_queries(
    sizes: tuple[int, int, int, int, int, int], dtype: torch.dtype, bias: bool, masked: bool, packed: bool
) -> Problem:
    """`sizes` are Nq, Lq, Nd, Ld, d, d_model; packed documents have 0 to Ld tokens."""
    n_queries, query_length, n_documents, length, size, d_model = sizes
    draw = partial(torch.randn, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    tensors = {"queries": draw(n_queries, query_length, size), "weight": draw(size, d_model) / d_model**0.5}
    if bias:
        tensors["bias"] = draw(size) / 4
    options: dict = {}
    if masked:
        options["queries_mask"] = random_mask((n_queries, query_length))
    if packed:
        lengths = torch.randint(0, length + 1, (n_documents,), generator=torch.Generator().manual_seed(0))
        tensors["hidden"] = draw(int(lengths.sum()), d_model)
        options |= {"documents_cu_seqlens": F.pad(lengths.cumsum(0), (1, 0)).cuda(), "max_document_length": length}
    else:
        tensors["hidden"] = draw(n_documents, length, d_model)
        if masked:
            options["documents_mask"] = random_mask((n_documents, length), 0.6, seed=3)
            options["documents_mask"][0] = False
    return Problem({name: tensor.to(dtype) for name, tensor in tensors.items()}, options)


@pytest.mark.skipif(CAPABILITY[0] not in (0, 9), reason="a kernel for Hopper")
@pytest.mark.parametrize("dtype", [torch.float16, HALF])
@pytest.mark.parametrize(
    ("sizes", "bias", "masked", "packed"),
    [
        ((1, 32, 100, 300, 128, 768), False, False, False),
        ((4, 32, 77, 180, 128, 768), True, True, False),
        ((2, 16, 50, 61, 96, 384), True, True, True),
        ((1, 20, 50, 61, 128, 1000), False, False, True),
        ((1, 32, 999, 3, 128, 768), False, True, False),
        ((1, 32, 3000, 9, 64, 72), False, False, True),
        ((3, 7, 2, 5000, 128, 768), False, True, False),
        ((1, 1, 1, 1, 8, 8), True, False, False),
    ],
)
def test_few_queries(
    sizes: tuple, bias: bool, masked: bool, packed: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel projects and scores; it equals projection to scratch with the `maxsim` kernels, and the definition."""
    problem = few_queries(sizes, dtype, bias, masked, packed)
    for options in ({}, {"normalize": False}, {} if packed else {"masking": "zero"}):
        call = partial(kernel, **options)
        fused = problem(call)
        assert torch.equal(problem(call), fused)
        with monkeypatch.context() as patch:
            patch.setattr(module, "_fused", lambda *call: None)
            unfused = problem(call)
        # Sums in another order are sometimes rounded differently.
        scale = max(1.0, unfused.abs().max().item())
        torch.testing.assert_close(fused, unfused, rtol=1e-3, atol=2e-4 * scale)
        assert (fused - unfused).abs().mean() <= 1e-4 * scale
        if not options:
            expected = on_host(problem).to(torch.float64)(as_rounded(problem))
            torch.testing.assert_close(fused.cpu().double(), expected, rtol=1e-3, atol=2e-4 * scale)


@pytest.mark.parametrize("n_queries", [1, 20])
@pytest.mark.parametrize("name", ["hidden", "weight", "bias", "queries"])
def test_strided_and_shifted_tensors(name: str, n_queries: int) -> None:
    """Tensors that copies of 16 bytes cannot read take another path to the same scores."""
    problem = few_queries((n_queries, 32, 30, 50, 128, 256), HALF, True, False, False)
    expected = problem(kernel)
    tensor = problem.tensors[name]
    strided = tensor.repeat_interleave(2, dim=-1)[..., ::2]
    shifted = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")[1:].view(tensor.shape).copy_(tensor)
    for other in (strided, shifted):
        scores = Problem(problem.tensors | {name: other}, problem.rest)(kernel)
        torch.testing.assert_close(scores, expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("packed", [False, True])
def test_few_queries_keep_nan_to_its_document(packed: bool) -> None:
    problem = few_queries((1, 32, 40, 50, 128, 256), HALF, False, False, packed)
    hidden = problem.tensors["hidden"]
    bounds = problem.rest["documents_cu_seqlens"] if packed else torch.arange(41) * 50
    document = int(bounds.diff().nonzero()[5])
    hidden.view(-1, 256)[int(bounds[document]), 3] = torch.nan
    assert torch.equal(problem(kernel).isnan().nonzero().cpu(), torch.tensor([[0, document]]))
    if not packed:
        mask = torch.ones(40, 50, dtype=torch.bool, device="cuda")
        mask[document, 0] = False
        assert not Problem(problem.tensors, {"documents_mask": mask})(kernel).isnan().any()


def test_memory_beyond_inputs_and_scores_is_the_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """16384 documents of 180 tokens project to 720 MiB; the call holds less than 64 MiB at any time."""
    hidden = torch.randn(16384, 180, 64, device="cuda", dtype=HALF)
    queries, weight = torch.randn(8, 32, 128, device="cuda").bfloat16(), torch.randn(128, 64, device="cuda").bfloat16()
    scores = maxsim_from_hidden(queries, hidden, weight)
    assert memory_of(lambda: maxsim_from_hidden(queries, hidden, weight))[0] < module.SCRATCH_BYTES + (4 << 20)
    for start in (0, 8000, 16320):
        part = slice(start, start + 64)
        units, documents = (
            F.normalize(x.double(), dim=-1).bfloat16() for x in (queries, F.linear(hidden[part], weight))
        )
        expected = maxsim_reference(units.double(), documents.double())
        torch.testing.assert_close(scores[:, part].double(), expected, rtol=1e-5, atol=1e-3)


def test_masked_query_tokens_do_not_meet_the_tokens_of_packed_documents() -> None:
    problem = hidden_states("packed", HALF)
    problem.tensors["hidden"][3, 0] = torch.nan
    problem.rest["queries_mask"] = problem.rest["queries_mask"].clone()
    problem.rest["queries_mask"][5] = False
    scores = problem(kernel).cpu()
    assert (scores[5] == 0).all()
    assert scores[:5, 0].isnan().all()
    assert scores[:, 1:].isfinite().all()


@pytest.mark.parametrize("scratch", [module.SCRATCH_BYTES, 1 << 19])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layout", ["in-batch", "candidates"])
def test_a_mask_of_all_query_tokens_is_none(
    layout: str, masked: bool, scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager, in a CUDA graph, and of any dtype."""
    limit_scratch(monkeypatch, scratch)
    problem = hidden_states(layout, HALF)
    rest = {name: mask for name, mask in problem.rest.items() if masked and name == "documents_mask"}
    without = Problem(problem.tensors, rest)
    scores, gradients = without(kernel), without.gradients(kernel)
    for dtype in (torch.bool, torch.int64, torch.float32):
        rest["queries_mask"] = torch.ones(16, 32, dtype=dtype, device="cuda")
        if masked:
            rest["documents_mask"] = rest["documents_mask"].to(dtype)
        full = Problem(problem.tensors, dict(rest))
        torch.testing.assert_close(full(kernel), scores, rtol=1e-6, atol=1e-6)
        for name, result in full.gradients(kernel).items():
            assert relative_error(result, gradients[name]) <= 1e-2, name
    result, replay = captured(lambda: without(kernel))
    result.zero_()
    replay()
    torch.testing.assert_close(result, scores, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n_queries", [2, 16])
@pytest.mark.parametrize("packed", [False, True])
def test_weights_of_query_tokens(packed: bool, n_queries: int) -> None:
    """With few query rows, one kernel projects and scores; with more, one kernel does each."""
    problem = few_queries((n_queries, 32, 50, 61, 128, 768), HALF, True, True, packed)
    problem.rest["queries_mask"] = problem.rest["queries_mask"] * torch.rand(n_queries, 32, device="cuda")
    for reduction in ("sum", "mean"):
        problem.rest["reduction"], problem.rest["empty_score"] = reduction, -5.0
        exact = on_host(problem).to(torch.float64)
        exact.rest.update(reduction=reduction, empty_score=-5.0)
        scores, expected = problem(kernel).cpu().double(), exact(as_rounded(problem))
        assert packed or (expected[:, 0] == -5.0).all()
        torch.testing.assert_close(scores, expected.double(), rtol=1e-3, atol=2e-4 * expected.abs().max().item())
        gradients = exact.gradients(as_rounded(problem))
        for name, actual in problem.gradients(kernel).items():
            # The gradient of a bias is a sum of rounded rows, which cancel.
            bound = 2e-2 if name == "bias" else 1e-2
            assert relative_error(actual.cpu().double(), gradients[name]) <= bound, name


def test_the_projection_is_let_go_before_the_gradient_of_the_hidden_states() -> None:
    """Of the backward's allocations, only that gradient is larger than the projection saved by the forward."""
    hidden = torch.randn(512, 180, 768, device="cuda", dtype=HALF, requires_grad=True)
    queries, weight = torch.randn(8, 32, 128, device="cuda").bfloat16(), torch.randn(128, 768, device="cuda").bfloat16()

    def step() -> int:
        scores = maxsim_from_hidden(queries, hidden, weight)
        before = allocated()
        torch.cuda.reset_peak_memory_stats()
        (gradient,) = torch.autograd.grad(scores.sum(), hidden)
        return torch.cuda.max_memory_allocated() - before - gradient.nbytes

    step()
    # The projected embeddings take 22.5 MiB, and so does their gradient, which reuses their memory. The second step is
    # recorded, and the others are replayed.
    for _ in range(4):
        assert step() < 8 << 20
