"""hosts.colpali against colpali-engine's own MaxSim; tests that need it are skipped where it cannot be imported."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F

from pylate_flash import registered
from pylate_flash.hosts import COLPALI, HOSTS
from pylate_flash.hosts import colpali as ours
from pylate_flash.ops import maxsim, maxsim_reference, soft_maxsim

HOST = "colpali-engine"


def without_padding(gradient, embeddings):
    """The gradient with padded tokens zeroed.

    All similarities of a padded token tie. Its gradient, which theirs splits among the ties and ours gives to the
    first, ends at the model's mask.
    """
    return gradient.masked_fill(~embeddings.any(dim=-1, keepdim=True), 0.0)


def batch(seed, *shape):
    """Unit embeddings, some of them padded with zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = F.normalize(torch.randn(*shape, generator=generator), dim=-1)
    lengths = torch.randint(1, shape[-2] + 1, shape[:-2], generator=generator)
    return values * (torch.arange(shape[-2]) < lengths.unsqueeze(-1)).unsqueeze(-1)


QUERIES, DOCUMENTS, CANDIDATES = batch(1, 4, 5, 16), batch(2, 6, 9, 16), batch(3, 4, 3, 9, 16)


@pytest.fixture(scope="module")
def host():
    """The host, with the modules that are used here."""
    if not HOSTS[HOST].is_there():
        pytest.skip("colpali-engine is not installed, or too old to have utils.maxsim")
    import colpali_engine.loss.late_interaction_losses
    import colpali_engine.utils.maxsim
    import colpali_engine.utils.processing_utils

    return colpali_engine


@pytest.fixture(autouse=True)
def routes_are_released(monkeypatch):
    monkeypatch.delenv("COLPALI_SCORES_BACKEND", raising=False)
    yield
    assert (COLPALI.holders, COLPALI.held) == (0, {})


@pytest.mark.parametrize(("name", "documents"), [("maxsim_inbatch", DOCUMENTS), ("maxsim_kd", CANDIDATES)])
def test_padded_tokens_compete_at_0(name, documents):
    """As in the definition without masks, and not in the one that masks zeros."""
    queries, documents = -QUERIES.abs(), documents.abs()
    scores = getattr(ours, name)(queries, documents)
    expected = maxsim_reference(queries.double(), documents.double())
    assert torch.allclose(scores.double(), expected, rtol=1e-6, atol=1e-6)
    left_out = maxsim_reference(queries, documents, documents_mask=documents.any(dim=-1))
    assert (scores == 0).any()
    assert (left_out < 0).all()


@pytest.mark.parametrize(("name", "documents"), [("maxsim_inbatch", DOCUMENTS), ("maxsim_kd", CANDIDATES)])
def test_scores_and_gradients_are_theirs(name, documents, host):
    results = []
    for function, dtype in ((getattr(ours, name), torch.float32), (getattr(host.utils.maxsim, name), torch.float64)):
        query, doc = (values.clone().to(dtype).requires_grad_() for values in (QUERIES, documents))
        scores = function(query, doc)
        (scores * torch.arange(scores.numel(), dtype=dtype).view_as(scores)).sum().backward()
        gradients = [without_padding(side.grad, side.detach()) for side in (query, doc)]
        results.append([value.detach().double() for value in (scores, *gradients)])
    for actual, expected in zip(*results, strict=True):
        assert (actual - expected).norm() <= 1e-6 * expected.norm()


def test_routed_where_they_were_imported_before(host):
    functions = [host.loss.late_interaction_losses.maxsim_inbatch, host.utils.processing_utils.maxsim_inbatch]
    halves = QUERIES.bfloat16(), DOCUMENTS.bfloat16()
    for function in functions:
        signature = inspect.signature(function)
        assert function(*halves).dtype == torch.bfloat16
        with registered(HOST):
            assert torch.equal(function(*halves), maxsim(*halves).bfloat16())
            assert inspect.signature(function) == signature
        assert function(*halves).dtype == torch.bfloat16
    with registered(HOST):
        assert host.loss.late_interaction_losses.maxsim_kd(halves[0], CANDIDATES.bfloat16()).dtype == torch.bfloat16


LOSSES = (
    "ColbertLoss", "ColbertNegativeCELoss", "ColbertPairwiseCELoss", "ColbertPairwiseNegativeCELoss",
    "ColbertSigmoidLoss",
)  # fmt: skip


@pytest.mark.parametrize("tau", [None, 0.1, 0.7])
@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, filters, normalizes, tau, host, monkeypatch):
    """All options, against the host in float64; the filter of negatives writes into the scores.

    In a smooth maximum, with a `tau`, padded document tokens are terms of the sum, and padded query tokens count.
    """
    smooth = {} if tau is None else {"use_smooth_max": True, "tau": tau}
    options = {"normalize_scores": normalizes, "pos_aware_negative_filtering": filters}
    # A logit, of up to 40, is rounded by less than 1e-5 of its temperature.
    loss = getattr(host.loss.late_interaction_losses, name)(**options, **smooth, temperature=5.0)
    sides = [QUERIES, DOCUMENTS[:4], *([CANDIDATES] if "Negative" in name else [])]
    calls = []
    for operation in (maxsim, soft_maxsim):
        served = lambda *tensors, operation=operation: calls.append(operation) or operation(*tensors)  # noqa: E731
        monkeypatch.setattr(ours, operation.__name__, served)

    def value_and_gradients(dtype):
        leaves = [side.clone().to(dtype).detach().requires_grad_() for side in sides]
        value = loss(*leaves)
        value.backward()
        gradients = [leaf.grad for leaf in leaves]
        if tau is None:
            gradients = [without_padding(*pair) for pair in zip(gradients, sides, strict=True)]
        return [value.detach(), *gradients]

    expected = value_and_gradients(torch.float64)
    assert not calls
    with registered(HOST):
        actual = value_and_gradients(torch.float32)
    # The smooth maximum over the negatives of each query runs the host's code.
    assert calls == ([maxsim] if tau is None and "Negative" in name else []) + [soft_maxsim if tau else maxsim]
    for mine, theirs in zip(actual, expected, strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()


def test_another_backend_keeps_their_smooth_maximum(host, monkeypatch):
    loss, halves = host.loss.ColbertLoss(use_smooth_max=True), (QUERIES.bfloat16(), DOCUMENTS.bfloat16())
    theirs, mine = loss._inbatch_scores(*halves), soft_maxsim(*halves, 1.0 / loss.tau).bfloat16()
    assert not torch.equal(theirs, mine), "they round every similarity"
    with registered(HOST):
        assert torch.equal(loss._inbatch_scores(*halves), mine)
        monkeypatch.setenv("COLPALI_SCORES_BACKEND", "torch")
        assert torch.equal(loss._inbatch_scores(*halves), theirs)
    assert torch.equal(loss._inbatch_scores(*halves), theirs)


def test_score_multi_vector_of_ragged_lists(host):
    score = host.utils.processing_utils.BaseVisualRetrieverProcessor.score_multi_vector
    queries, documents = [q[: i + 1] for i, q in enumerate(QUERIES)], [d[: 3 + i] for i, d in enumerate(DOCUMENTS)]
    expected = score(queries, documents, batch_size=3, device="cpu")
    with registered(HOST):
        assert torch.allclose(score(queries, documents, batch_size=3, device="cpu"), expected, rtol=1e-6)


def test_the_environment_names_another_backend(host, monkeypatch):
    halves = QUERIES.bfloat16(), DOCUMENTS.bfloat16()
    function = host.utils.maxsim.maxsim_inbatch
    calls: list[str] = []
    with registered(HOST):
        monkeypatch.setattr(ours, "maxsim", lambda *arguments: calls.append(backend) or maxsim(*arguments))
        for backend in ("torch", "AUTO", "pylate_flash"):
            monkeypatch.setenv("COLPALI_SCORES_BACKEND", backend)
            assert function(*halves).dtype == torch.bfloat16
        assert calls == ["AUTO", "pylate_flash"]
        monkeypatch.setenv("COLPALI_SCORES_BACKEND", "fast")
        with pytest.raises(ValueError, match="COLPALI_SCORES_BACKEND"):
            function(*halves)


@pytest.mark.parametrize("tau", [0.0, -0.1, float("nan")])
def test_a_wrong_tau_is_named(tau, host):
    loss = host.loss.ColbertLoss(use_smooth_max=True, tau=tau)
    with registered(HOST), pytest.raises(ValueError, match=f"tau must be above 0 and finite, got {tau}"):
        loss(QUERIES, DOCUMENTS)


def test_bad_arguments_have_the_hosts_names():
    for function, doc in ((ours.maxsim_inbatch, DOCUMENTS), (ours.maxsim_kd, CANDIDATES)):
        with pytest.raises(TypeError, match=r"doc must have the dtype of query, torch.float32, got torch.float16"):
            function(QUERIES, doc.half())
        with pytest.raises(ValueError, match=r"doc must have the embedding size of query, 16, got 8"):
            function(QUERIES, doc[..., :8])
        with pytest.raises(TypeError, match=r"query must be float16, .*, got torch.int64"):
            function(QUERIES.long(), doc)
    with pytest.raises(ValueError, match=r"doc must have one row of candidates per query, 4, got 2 rows"):
        ours.maxsim_kd(QUERIES, CANDIDATES[:2])


def test_bad_shapes():
    with pytest.raises(ValueError, match=r"doc must have shape \[Nd, Ld, d\], got \[4, 3, 9, 16\]"):
        ours.maxsim_inbatch(QUERIES, CANDIDATES)
    with pytest.raises(ValueError, match=r"doc must have shape \[Nq, K, Ld, d\], got \[6, 9, 16\]"):
        ours.maxsim_kd(QUERIES, DOCUMENTS)
    with pytest.raises(TypeError, match="query must be a torch.Tensor, got list"):
        ours.maxsim_kd([], CANDIDATES)
