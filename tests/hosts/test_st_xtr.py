"""XTR's scores of hosts.sentence_transformers against sentence-transformers' own."""

from __future__ import annotations

import pytest
import sentence_transformers.multi_vector_encoder.scoring as theirs
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_flash import registered
from pylate_flash.hosts import sentence_transformers as ours

NAMES = ("xtr_scores", "xtr_kd_scores", "xtr_scores_pairwise")


def unit(seed, *shape):
    """Unit vectors, with tokens of zeros among them, which are padding."""
    generator = torch.Generator().manual_seed(seed)
    values = F.normalize(torch.randn(*shape, generator=generator), dim=-1)
    return values.masked_fill(torch.rand(*shape[:-1], 1, generator=generator) < 0.2, 0.0)


@settings(max_examples=60)
@given(
    st.sampled_from(NAMES), st.integers(0, 2**20), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4),
    st.integers(1, 6), st.integers(1, 80), st.sampled_from(["none", "bool", "weights", "negative"]),
)  # fmt: skip
def test_values_and_gradients_are_theirs(name, seed, groups, per_group, query_length, length, top_k, kind):
    per_group = 1 if name == "xtr_scores_pairwise" else per_group
    queries, documents = unit(seed, groups, query_length, 5), unit(seed + 1, groups, per_group, length, 5)
    masks = {}
    if kind == "negative":
        queries, documents = queries.abs(), -documents.abs()
    elif kind != "none":
        generator = torch.Generator().manual_seed(seed)
        # Tokens of zeros, to which all others are equally similar, are masked.
        on = torch.rand(groups, query_length, generator=generator) * queries.any(-1)
        masks = {
            "queries_mask": on if kind == "weights" else on > 0.3,
            # A document without tokens may be among them.
            "documents_mask": (torch.rand(groups, per_group, length, generator=generator) > 0.3) & documents.any(-1),
        }
    leaves = queries.requires_grad_(), documents.requires_grad_()
    mine, right = (getattr(module, name)(*leaves, **masks, top_k=top_k) for module in (ours, theirs))
    assert mine.dtype == torch.float32
    torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)
    weights = torch.cos(torch.arange(mine.numel())).view(mine.shape)
    gradients = [torch.autograd.grad((scores * weights).sum(), leaves) for scores in (mine, right)]
    for gradient, expected in zip(*gradients, strict=True):
        assert (gradient - expected).norm() <= 1e-5 * max(1.0, expected.norm())


def test_all_of_its_functions_and_classes_follow():
    """Half-precision embeddings tell which code scores: the host's own rounds their similarities."""
    queries, documents = unit(0, 6, 3, 8).half(), unit(1, 6, 2, 9, 8).half()
    calls = {
        **{name: (getattr(theirs, name), getattr(ours, name)) for name in NAMES[:2]},
        "XTRScores": (theirs.XTRScores(7), ours.xtr_scores),
        "XTRKDScores": (theirs.XTRKDScores(7), ours.xtr_kd_scores),
    }
    for name, (function, mine) in calls.items():
        options = {"top_k": 7} if name in NAMES else {}
        expected = mine(queries, documents, top_k=7)
        before = function(queries, documents, **options)
        assert not torch.equal(before, expected)
        with registered("sentence-transformers"):
            assert torch.equal(function(queries, documents, **options), expected)
        assert torch.equal(function(queries, documents, **options), before)


def test_what_else_it_takes():
    queries, documents = unit(2, 3, 4, 5), unit(3, 3, 2, 6, 5)
    expected = theirs.xtr_scores(queries, documents, top_k=5)
    for q, d in ((queries.numpy(), documents.numpy()), (list(queries), list(documents))):
        actual = ours.xtr_scores(q, d, top_k=5, chunk_elements=10)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    integers = (queries * 50).to(torch.int8), (documents * 50).to(torch.int8)
    torch.testing.assert_close(ours.xtr_scores(*integers, top_k=10**4), theirs.xtr_scores(*integers, top_k=10**4))
    # Without queries.
    for name in NAMES:
        nothing = queries[:0], documents[:0, :1] if name == "xtr_scores_pairwise" else documents[:0]
        actual, right = (getattr(module, name)(*nothing, top_k=5) for module in (ours, theirs))
        assert actual.shape == right.shape
    # Learned weights are left to the host's code, which has a gradient for them.
    weights = torch.rand(3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(ours.xtr_scores(queries, documents, weights, top_k=5).sum(), weights)
    assert gradient.any()


@pytest.mark.parametrize("top_k", [0, -1, True])
def test_errors(top_k):
    call = unit(2, 3, 4, 5), unit(3, 3, 2, 6, 5)
    for function in (ours.xtr_scores, theirs.xtr_scores):
        with pytest.raises(ValueError, match="top_k must be a positive integer, got"):
            function(*call, top_k=top_k)
    with pytest.raises(ValueError, match=r"documents_mask must have shape \[3, 2, 6\], got \[3, 2\]"):
        ours.xtr_scores(*call, documents_mask=torch.ones(3, 2))


@pytest.mark.parametrize("name", NAMES[1:])
def test_candidates_of_other_queries_are_refused(name):
    with pytest.raises(ValueError, match=r"as many groups of candidates as there are queries, 2, got shape \[3, "):
        getattr(ours, name)(unit(0, 2, 3, 8), unit(1, 3, 1, 4, 8))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_type_is_theirs(name, dtype):
    arguments = unit(0, 2, 3, 5).to(dtype), unit(1, 2, 1, 4, 5).to(dtype)
    assert getattr(ours, name)(*arguments).dtype == getattr(theirs, name)(*arguments).dtype
