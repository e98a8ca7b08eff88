"""The scoring functions of hosts.sentence_transformers against sentence-transformers' own."""

from __future__ import annotations

import inspect
import logging
from unittest import mock

import numpy as np
import pytest
import sentence_transformers.multi_vector_encoder.scoring as their_scoring
import sentence_transformers.util.similarity as their_similarity
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_flash.hosts import sentence_transformers as ours
from pylate_flash.hosts.sentence_transformers import operands, scoring

from .forms import Form, forms, numbers

FUNCTIONS = {
    **dict.fromkeys(("maxsim", "maxsim_pairwise", "mean_maxsim", "mean_maxsim_pairwise"), their_similarity),
    **dict.fromkeys(("colbert_scores", "colbert_kd_scores", "colbert_scores_pairwise"), their_scoring),
    **{f"mean_{name}": their_scoring for name in ("colbert_scores", "colbert_kd_scores", "colbert_scores_pairwise")},
    **dict.fromkeys(("xtr_scores", "xtr_kd_scores", "xtr_scores_pairwise"), their_scoring),
}
MANY = settings(max_examples=250)
FEW = settings(max_examples=60)


def both(name, *arguments, **options):
    """Our scores, and theirs."""
    return getattr(ours, name)(*arguments, **options), getattr(FUNCTIONS[name], name)(*arguments, **options)


def test_arrays_lie_nowhere():
    """Scores of queries on a GPU against documents of arrays are computed there, and stay there."""
    tokens = np.ones((3, 4), dtype=np.float32)
    for arrays in (tokens, [tokens, tokens], [tokens], [tokens.tolist()], []):
        assert operands.side("b", arrays).device is None
    for tensors in (torch.ones(3, 4, device="meta"), [torch.ones(3, 4, device="meta")] * 2):
        assert operands.side("b", tensors).device == torch.device("meta")


def unit(seed, *shape):
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def assert_same(scores, expected):
    assert scores.dtype == torch.float32
    assert scores.shape == expected.shape
    assert torch.equal(scores, expected.float())


def test_every_function_is_there_with_its_signature():
    assert sorted(ours.__all__) == sorted(FUNCTIONS)
    for name, module in FUNCTIONS.items():
        theirs, mine = (inspect.signature(getattr(where, name)).parameters for where in (module, ours))
        assert [(p.name, p.default, p.kind) for p in theirs.values()] == [
            (p.name, p.default, p.kind) for p in mine.values()
        ]


@MANY
@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_maxsim_is_theirs_to_the_bit(data, n_queries, n_documents, size):
    a, b = data.draw(forms(n_queries, size, weights=True)), data.draw(forms(n_documents, size, weights=False))
    options = {"length_normalize": data.draw(st.booleans())}
    if not isinstance(a.embeddings, list) or a.mask is None:
        # A mask of a padded list covers padding that its chunks do not have.
        options["chunk_elements"] = data.draw(st.sampled_from([None, 1, 40])) if b.mask is None else None
    name = data.draw(st.sampled_from(["maxsim", "mean_maxsim"]))
    assert_same(*both(name, a.embeddings, b.embeddings, a.mask, b.mask, **options))


@MANY
@given(st.data(), st.integers(1, 4), st.integers(1, 5))
def test_pairs_are_theirs_to_the_bit(data, n_pairs, size):
    a, b = data.draw(forms(n_pairs, size, weights=True)), data.draw(forms(n_pairs, size, weights=False))
    options = {"length_normalize": data.draw(st.booleans())}
    if a.mask is None and b.mask is None:
        options["chunk_elements"] = data.draw(st.sampled_from([None, 1, 40]))
    name = data.draw(st.sampled_from(["maxsim_pairwise", "mean_maxsim_pairwise", "colbert_scores_pairwise"]))
    assert_same(*both(name, a.embeddings, b.embeddings, a.mask, b.mask, **options))


def _is_list_of_tensors(sequences):
    return isinstance(sequences, list) and len(sequences) > 0 and isinstance(sequences[0], torch.Tensor)


@MANY
@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_lists_that_are_read_in_place(data, n_queries, n_documents, size):
    """As on a GPU, where kernels read them; here the operation packs them itself."""
    a = data.draw(forms(n_queries, size, weights=True))
    b = data.draw(forms(n_documents, size, weights=False, kinds=("list", "integer list", "masked list", "arrays")))
    pairs = data.draw(forms(n_documents, size, weights=True))
    options = {"length_normalize": data.draw(st.booleans())}
    with mock.patch.object(scoring, "_lies_on_a_gpu", _is_list_of_tensors):
        assert_same(*both("maxsim", a.embeddings, b.embeddings, a.mask, b.mask, **options))
        assert_same(*both("maxsim_pairwise", pairs.embeddings, b.embeddings, pairs.mask, b.mask, **options))


@pytest.mark.parametrize("name", ["maxsim", "maxsim_pairwise"])
def test_the_operation_on_lists_serves_them(name):
    operation = "maxsim_ragged" if name == "maxsim" else "maxsim_ragged_pairwise"
    a, b = [numbers(1, 3, 4), numbers(2, 2, 4)], [numbers(3, 5, 4), numbers(4, 2, 4)]
    with (
        mock.patch.object(scoring, "_lies_on_a_gpu", _is_list_of_tensors),
        mock.patch.object(scoring, operation, wraps=getattr(scoring, operation)) as served,
    ):
        expected = getattr(their_similarity, name)(a, b)
        for queries in (a, torch.nn.utils.rnn.pad_sequence(a, batch_first=True)):
            assert_same(getattr(ours, name)(queries, b), expected)
        assert served.call_count == 2
        # A list of one is a list.
        assert_same(getattr(ours, name)(a[:1], b[:1]), getattr(their_similarity, name)(a[:1], b[:1]))
        assert served.call_count == 3
        # Lists with a mask or of mixed dtypes, or for another device, are packed; errors name the host's arguments.
        getattr(ours, name)(a, b, b_mask=torch.ones(2, 5))
        assert served.call_count == 3
        mixed = [b[0].half(), b[1]]
        assert_same(getattr(ours, name)(a, mixed), expected)
        with pytest.raises(ValueError, match=r"b\[1\] must have shape \[L, d\] with d = 4, got \[2, 3\]"):
            getattr(ours, name)(a, [b[0], torch.ones(2, 3)])


BATCHES = ("batch", "masked batch", "array", "integers")


@MANY
@given(st.data(), st.integers(2, 4), st.integers(1, 3), st.integers(1, 5))
def test_scores_of_losses_are_theirs_to_the_bit(data, n_queries, n_documents, size):
    queries = data.draw(forms(n_queries, size, True, BATCHES))
    name = data.draw(st.sampled_from(["colbert_scores", "colbert_kd_scores", "mean_colbert_scores"]))
    groups = n_queries if name == "colbert_kd_scores" else data.draw(st.integers(1, 3))
    flat = data.draw(forms(groups * n_documents, size, False, BATCHES))
    if groups * n_documents == 1 or (isinstance(queries.embeddings, np.ndarray) and name != "colbert_scores"):
        flat = Form(numbers(7, groups * n_documents, 3, size), None)
    shape = groups, n_documents, -1
    documents = flat.embeddings.reshape(*shape, size)
    mask = None if flat.mask is None else flat.mask.reshape(shape)
    options = {"length_normalize": data.draw(st.booleans())}
    assert_same(*both(name, queries.embeddings, documents, queries.mask, mask, **options))


@FEW
@given(
    st.integers(0, 2**20), st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]), st.booleans()
)
def test_scores_are_accurate(seed, dtype, ragged):
    """Compared with the host's own in float64, on the same rounded numbers."""
    a, b = unit(seed, 3, 9, 24).to(dtype), unit(seed + 1, 5, 17, 24).to(dtype)
    if ragged:
        a, b = [a[0], a[1, :4]], [b[0, :3], b[1], b[2, :1]]
    wide = [list(map(torch.Tensor.double, side)) if ragged else side.double() for side in (a, b)]
    scores, expected = ours.maxsim(a, b), their_similarity.maxsim(*wide)
    assert scores.dtype == their_similarity.maxsim(a, b).dtype
    # A score is a sum of 9 maxima of at most 1; of opposite signs, they cancel.
    assert (scores - expected).abs().max() <= 1e-6 * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("form", [torch.Tensor.clone, list])
def test_the_type_is_theirs(form, dtype):
    a, b = unit(0, 3, 4, 8).to(dtype), unit(1, 3, 5, 8).to(dtype)
    for name in ("maxsim", "maxsim_pairwise"):
        assert getattr(ours, name)(form(a), form(b)).dtype == getattr(their_similarity, name)(form(a), form(b)).dtype


@pytest.mark.parametrize("name", ["maxsim", "maxsim_pairwise", "mean_maxsim", "colbert_scores", "colbert_kd_scores"])
@pytest.mark.parametrize("form", ["padded", "masked", "list"])
def test_gradients(name, form):
    a, b = unit(1, 4, 6, 16), unit(2, 4, 9, 16)
    a_mask = b_mask = None
    if name.startswith("colbert"):
        b = unit(3, 4, 2, 9, 16)
    if form == "masked":
        a_mask = torch.rand(a.shape[:-1], generator=torch.Generator().manual_seed(3)).mul(2)
        b_mask = torch.rand(b.shape[:-1], generator=torch.Generator().manual_seed(4)) < 0.6
        # A document without tokens.
        b_mask[0] = False
    if form == "list":
        if name.startswith("colbert"):
            pytest.skip("the losses' scores take no ragged lists")
        a, b = [tokens[: 6 - i] for i, tokens in enumerate(a)], [tokens[i:] for i, tokens in enumerate(b)]

    def gradients(function, dtype):
        def leaf(tokens):
            return tokens.detach().clone().to(dtype).requires_grad_()

        sides = [[leaf(tokens) for tokens in side] if isinstance(side, list) else leaf(side) for side in (a, b)]
        scores = function(*sides, a_mask, b_mask)
        weights = torch.randn(scores.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        # In place, as losses may.
        scores.mul_(weights).sum().backward()
        return [tensor.grad.double() for side in sides for tensor in (side if isinstance(side, list) else [side])]

    actual = gradients(getattr(ours, name), torch.float32)
    expected = gradients(getattr(FUNCTIONS[name], name), torch.float64)
    for gradient, reference in zip(actual, expected, strict=True):
        assert (gradient - reference).norm() <= 1e-6 * max(reference.norm().item(), 1e-3)


def test_documents_without_tokens_score_minus_1e9(caplog):
    query, documents = torch.ones(1, 2, 3), torch.ones(2, 4, 3)
    documents[1] = 0
    # transformers' logging, which logs each message once.
    logging.Logger.warning_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert ours.maxsim(query, documents)[0].tolist() == [6.0, -1e9]
    assert "a document has no token" in caplog.text
    assert ours.maxsim([torch.ones(2, 3)], [torch.ones(1, 3), torch.ones(0, 3)])[0].tolist() == [6.0, -1e9]
    # Divided by the number of query tokens, like all scores.
    assert ours.mean_maxsim(query, documents)[0].tolist() == [3.0, -5e8]
    assert ours.maxsim_pairwise([torch.ones(2, 3)], [torch.ones(0, 3)]).tolist() == [-1e9]
    assert ours.colbert_kd_scores(query, documents.unsqueeze(0))[0].tolist() == [6.0, -1e9]


@pytest.mark.parametrize("empty", [[], torch.zeros(0, 4, 8), torch.zeros(0, 0, 8), np.zeros((0, 4, 8))])
def test_no_items(empty):
    queries = [torch.ones(3, 8), torch.ones(2, 8)]
    for arguments in ((queries, empty), (empty, queries), (empty, empty)):
        assert_same(*both("maxsim", *arguments))
    assert_same(*both("maxsim_pairwise", empty, empty))


def test_masks_of_one_row_serve_all():
    a, b = numbers(1, 3, 4, 5), numbers(2, 2, 6, 5)
    for a_mask in (torch.tensor([[1.0, 0.0, 2.0, 1.0]]), torch.tensor([1.0, 0.0, 2.0, 1.0])):
        assert_same(*both("maxsim", a, b, a_mask, torch.tensor([[True, False, True, True, True, False]])))


@pytest.mark.parametrize("name", ["colbert_scores", "colbert_kd_scores", "mean_colbert_scores"])
def test_a_mask_of_one_group_serves_all(name):
    queries, documents = numbers(1, 3, 2, 4), numbers(2, 3, 2, 5, 4)
    mask = torch.tensor([[[1, 0, 1, 1, 0], [0, 1, 1, 0, 0]]])
    scores, expected = both(name, queries, documents, None, mask)
    assert_same(scores, expected)
    assert torch.equal(scores, getattr(ours, name)(queries, documents, None, mask.expand(3, 2, 5)))


def test_top_k_of_numpy_and_its_errors():
    queries, documents = unit(1, 3, 2, 4), unit(2, 3, 2, 5, 4)
    expected = their_scoring.xtr_scores(queries, documents, top_k=3)
    torch.testing.assert_close(ours.xtr_scores(queries, documents, top_k=np.int64(3)), expected)
    for top_k in (2.0, np.float32(2), "2"):
        with pytest.raises(TypeError, match=f"top_k must be a positive integer, got {type(top_k).__name__}"):
            ours.xtr_scores(queries, documents, top_k=top_k)
    # XTR's scores do not broadcast the mask of one group, neither there nor here.
    with pytest.raises(ValueError, match=r"documents_mask must have shape \[3, 2, 5\], got \[1, 2, 5\]"):
        ours.xtr_scores(queries, documents, documents_mask=torch.ones(1, 2, 5))


def test_means_do_not_depend_on_chunks():
    """A mask of a padded list may count padding, also beyond the longest item of a chunk."""
    a, b = [numbers(seed, length, 4) for seed, length in enumerate((4, 1, 2))], [numbers(9, 3, 4)] * 3
    mask = torch.ones(3, 4)
    for options in ({}, {"chunk_elements": 1}):
        assert_same(*both("mean_maxsim_pairwise", a, b, mask, **options))


def test_what_is_copied_at_once_is_bounded():
    documents = [torch.ones(length, 4) for length in (5, 1, 2, 9, 1, 1)]
    side = operands.side("b", documents)
    assert operands.blocks([side], torch.device("cpu"), None) == [(0, 6)]
    result = operands.blocks([side], torch.device("cpu"), 16)
    assert [start for start, _ in result[1:]] == [stop for _, stop in result[:-1]]
    assert (result[0][0], result[-1][1]) == (0, 6)
    for start, stop in result:
        assert stop == start + 1 or sum(map(len, documents[start:stop])) * 4 <= 16
    # Tensors on the device that scores them are not copied, and take one call.
    assert operands.blocks([operands.side("b", torch.ones(6, 5, 4))], torch.device("cpu"), 1) == [(0, 6)]


def test_device_moves_the_arithmetic_only():
    a, b = [numbers(1, 3, 4)], [numbers(2, 5, 4), numbers(3, 2, 4)]
    assert_same(*both("maxsim", a, b, device="cpu"))


def test_types_are_promoted():
    a, b = numbers(1, 2, 3, 4), numbers(2, 2, 5, 4)
    assert torch.equal(ours.maxsim(a.half(), b), ours.maxsim(a, b))
    assert torch.equal(ours.maxsim(list(a.half()), list(b.bfloat16())), ours.maxsim(list(a), list(b)))


def test_arrays_are_left_as_they_are():
    values = numbers(1, 2, 3, 4).numpy()
    values.flags.writeable = False
    assert_same(*both("maxsim", values, list(values)))


def test_weights_that_learn_are_left_to_the_host(caplog):
    a, b = unit(1, 2, 3, 8), unit(2, 2, 5, 8)
    gradients = []
    for function in (ours.maxsim, their_similarity.maxsim):
        weights = torch.ones(2, 3, requires_grad=True)
        with caplog.at_level(logging.WARNING):
            function(a, b, weights).sum().backward()
        gradients.append(weights.grad)
    assert torch.equal(*gradients)
    with torch.no_grad():
        weights = torch.full((2, 3), 0.5, requires_grad=True)
        assert torch.allclose(*both("maxsim", a, b, weights))


ITEMS = {"a": torch.ones(2, 3, 4), "b": torch.ones(2, 5, 4)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"b_mask": torch.ones(2, 4)}, "b_mask covers 4 tokens, expected 5 as in b"),
        ({"a_mask": torch.ones(5, 3)}, r"a_mask must have shape \[2, 3\], got \[5, 3\]"),
        ({"b": torch.ones(2, 5, 6)}, "b must have the embedding size of a, 4, got 6"),
        ({"a": torch.ones(4)}, r"a must have shape \[N, L, d\] or \[L, d\], got \[4\]"),
        ({"b": [torch.ones(3, 4), torch.ones(3, 5)]}, r"b\[1\] must have shape \[L, d\] with d = 4, got \[3, 5\]"),
        ({"b": [torch.ones(3, 4), torch.ones(3)]}, r"b\[1\] must have shape \[L, d\] with d = 4, got \[3\]"),
        ({"b": [torch.ones(3, 4), torch.tensor(1.0)]}, r"b\[1\] must have shape \[L, d\], got a single number"),
        ({"a_mask": -torch.ones(2, 3)}, "^a_mask must .* positive weights, got -1"),
        ({"a_mask": [[1, 1, 1], [[1]]]}, r"a_mask\[1\] must have shape \[L\], got \[1, 1\]"),
        ({"a": [[[1.0, 2.0], [1.0]]]}, r"a\[0\] must be a tensor, .* of one shape"),
    ],
)
def test_bad_input_is_one_clear_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        ours.maxsim(**ITEMS | arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"a": None}, "^a must be a tensor, .* got NoneType"),
        ({"b": "text"}, "^b must be a tensor, .* got str"),
        ({"b": [torch.ones(3, 4), None]}, r"^b\[1\] must be a tensor, .* got NoneType"),
        ({"b": np.array([["text"]])}, "^b must be a tensor, .* of one shape"),
        ({"b": torch.ones(2, 3, 4).to_sparse()}, "^b must be a dense"),
        ({"a_mask": ["text", "text"]}, r"^a_mask\[0\] must be a tensor, .* got str"),
    ],
)
def test_bad_types_are_one_clear_error(arguments, message):
    with pytest.raises(TypeError, match=message):
        ours.maxsim(**ITEMS | arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "error", "message"),
    [
        ("colbert_scores", {"documents_embeddings": None}, TypeError, "^documents_embeddings must be a tensor"),
        ("colbert_scores", {"queries_mask": "text"}, TypeError, "^queries_mask must be a tensor"),
        ("colbert_scores", {"queries_mask": torch.ones(2, 4)}, ValueError, "^queries_mask covers 4 tokens"),
        (
            "colbert_kd_scores",
            {"documents_embeddings": torch.ones(2, 1, 3, 5)},
            ValueError,
            "^documents_embeddings must have the embedding size of queries_embeddings, 4, got 5",
        ),
        ("colbert_kd_scores", {"documents_embeddings": torch.ones(3, 1, 3, 4)}, ValueError, "as many groups .* 2, got"),
        ("colbert_scores_pairwise", {"queries_mask": -torch.ones(2, 3)}, ValueError, "^queries_mask must hold"),
        (
            "colbert_scores_pairwise",
            {"documents_mask": torch.ones(2, 4)},
            ValueError,
            "^documents_mask covers 4 tokens",
        ),
    ],
)
def test_errors_of_the_scores_of_losses_name_their_arguments(name, arguments, error, message):
    documents = torch.ones(2, 3, 4) if name == "colbert_scores_pairwise" else torch.ones(2, 1, 3, 4)
    with pytest.raises(error, match=message):
        getattr(ours, name)(**{"queries_embeddings": ITEMS["a"], "documents_embeddings": documents} | arguments)


def test_other_bad_input():
    with pytest.raises(ValueError, match="same number of items, to be paired, got 2 and 3"):
        ours.maxsim_pairwise(torch.ones(2, 1, 4), torch.ones(3, 1, 4))
    with pytest.raises(TypeError, match="a_mask must be a tensor, .* got int"):
        ours.maxsim(torch.ones(2, 1, 4), torch.ones(3, 1, 4), 1)
    with pytest.raises(ValueError, match=r"documents_embeddings must have shape \[G, N, Ld, d\], got \[2, 3, 4\]"):
        ours.colbert_scores(torch.ones(2, 3, 4), torch.ones(2, 3, 4))
    with pytest.raises(ValueError, match=r"documents_mask must have shape \[2, 1, 3\], got \[2, 3\]"):
        ours.colbert_kd_scores(torch.ones(2, 3, 4), torch.ones(2, 1, 3, 4), None, torch.ones(2, 3))
    with pytest.raises(ValueError, match="queries_embeddings must be a tensor, .* of one shape"):
        ours.colbert_scores([torch.ones(2, 4), torch.ones(3, 4)], torch.ones(2, 1, 3, 4))


def test_compiles_into_one_graph():
    a, b = unit(1, 2, 3, 8), unit(2, 4, 5, 8)
    b_mask = torch.ones(4, 5, dtype=torch.bool)
    b_mask[1] = False
    compiled = torch.compile(ours.maxsim, fullgraph=True, backend="eager")
    assert torch.equal(compiled(a, b, b_mask=b_mask), ours.maxsim(a, b, b_mask=b_mask))
    assert torch.equal(compiled(a, b), ours.maxsim(a, b))
