"""PyLate's scoring functions computed by our op: PyLate's values, inputs and backends, and clear errors."""

from __future__ import annotations

import doctest
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pylate.scores
import pytest
import torch
from pylate.scores import colbert as pylate_colbert

import pylate_flash.scores
from pylate_flash.hosts.pylate import operands
from pylate_flash.ops import maxsim_reference
from pylate_flash.register import registered, use_scorer
from pylate_flash.scores import ColBERTScores, colbert_kd_scores, colbert_scores, colbert_scores_pairwise, scorer_of
from tests.encoders import Wrapped
from tests.recorded import recorded

FUNCTIONS = ["colbert_scores", "colbert_scores_pairwise", "colbert_kd_scores"]


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Queries, documents and candidates with random masks; query 1 and document 2 are fully masked.

    All are multiples of 1/16, whose products and sums are exact in float32.
    """
    generator = torch.Generator().manual_seed(0)
    queries, documents, candidates = (
        torch.randn(shape, generator=generator).mul(16).round().div(16)
        for shape in ((3, 5, 24), (4, 7, 24), (3, 4, 7, 24))
    )
    queries_mask = torch.rand(3, 5, generator=generator) > 0.3
    queries_mask[1] = False
    documents_mask = torch.rand(4, 7, generator=generator) > 0.4
    documents_mask[2] = False
    candidates_mask = torch.rand(3, 4, 7, generator=generator) > 0.4
    return {
        **{"queries": queries, "documents": documents, "candidates": candidates, "queries_mask": queries_mask},
        **{"documents_mask": documents_mask, "candidates_mask": candidates_mask},
    }


def assert_parity(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    assert torch.equal(ours, theirs.float())


class IgnoreSpaces(doctest.OutputChecker):
    """PyLate's docstrings print tensors with different whitespace than torch does."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return "".join(want.split()) == "".join(got.split())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_pylates_docstring_examples_hold_with_ours(name: str) -> None:
    ours = getattr(pylate_flash.scores, name)
    [example] = doctest.DocTestFinder().find(getattr(pylate_colbert, name), name=name, globs={name: ours})
    failures: list[str] = []
    doctest.DocTestRunner(checker=IgnoreSpaces(), verbose=False).run(example, out=failures.append)
    assert example.examples
    assert not failures, "".join(failures)


def test_our_docstring_examples() -> None:
    result = doctest.testmod(pylate_flash.scores)
    assert result.attempted > 0
    assert result.failed == 0


def both(batch: dict, masks: dict[str, Any], **ours: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield our scores and PyLate's, for every function that takes these masks."""
    queries, queries_mask = batch["queries"], masks.get("queries_mask")
    for name, second in (("colbert_scores", "documents"), ("colbert_kd_scores", "candidates")):
        arguments = queries, batch[second], queries_mask, masks.get(f"{second}_mask")
        yield getattr(pylate_flash.scores, name)(*arguments, **ours), getattr(pylate.scores, name)(*arguments)
    yield ColBERTScores(**ours)(*arguments), pylate.scores.ColBERTScores()(*arguments, backend="torch")


@pytest.mark.parametrize("backend", ["pylate_flash", "auto", None])
def test_values_of_pylate_without_masks(batch: dict, backend: str | None) -> None:
    for actual, expected in both(batch, {}, backend=backend):
        assert_parity(actual, expected)
    pairs = batch["queries"], batch["documents"][:3]
    assert_parity(colbert_scores_pairwise(*pairs, backend=backend), pylate.scores.colbert_scores_pairwise(*pairs))


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32, torch.int64])
def test_zero_masking_has_pylates_values(batch: dict, mask_dtype: torch.dtype) -> None:
    masks = {name: mask.to(mask_dtype) for name, mask in batch.items() if name.endswith("_mask")}
    for actual, expected in both(batch, masks, masking="zero"):
        assert_parity(actual, expected)


def test_default_masking_excludes(batch: dict) -> None:
    queries, documents = batch["queries"], -batch["queries"].abs().sum(1, keepdim=True).expand(3, 7, 24)
    queries = queries.abs()
    mask = torch.tensor([[True] * 6 + [False]] * 3)
    excluded = colbert_scores(queries, documents, None, mask)
    assert (excluded < 0).all()
    torch.testing.assert_close(excluded, maxsim_reference(queries, documents, documents_mask=mask))
    assert (colbert_scores(queries, documents, None, mask, masking="zero") == 0).all()
    with use_scorer(masking="zero"):
        assert (colbert_scores(queries, documents, None, mask) == 0).all()
        torch.testing.assert_close(colbert_scores(queries, documents, None, mask, masking="exclude"), excluded)


def test_gradients_are_pylates(batch: dict) -> None:
    """Also for scores that are modified in place."""
    gradients = []
    for scores in (pylate.scores, pylate_flash.scores):
        queries, documents, candidates = (
            batch[name].clone().requires_grad_() for name in ("queries", "documents", "candidates")
        )
        total = (
            scores.colbert_scores(queries, documents).sin_().sum()
            + scores.colbert_kd_scores(queries, candidates).sin_().sum()
            + scores.ColBERTScores()(queries, candidates).sin_().sum()
            + scores.colbert_scores_pairwise(queries, documents[:3]).sin_().sum()
        )
        gradients.append(torch.autograd.grad(total, (queries, documents, candidates)))
    # The scores are equal; the gradients differ by the order of float32 sums of up to 20 rows.
    for ours, theirs in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["list of tensors", "list of arrays", "nested list", "array"])
def test_inputs_that_pylate_takes(batch: dict, kind: str) -> None:
    convert = {
        "list of tensors": list,
        "list of arrays": lambda tensor: [part.numpy() for part in tensor],
        "nested list": torch.Tensor.tolist,
        "array": torch.Tensor.numpy,
    }[kind]
    queries, documents, mask = batch["queries"], batch["documents"], batch["documents_mask"]
    expected = colbert_scores(queries, documents, None, mask)
    result = colbert_scores(convert(queries), convert(documents), None, convert(mask) if "list" not in kind else mask)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(
        colbert_scores_pairwise(convert(queries), convert(documents[:3])),
        colbert_scores_pairwise(queries, documents[:3]),
    )
    if kind != "nested list":
        torch.testing.assert_close(
            colbert_kd_scores(convert(queries), convert(batch["candidates"])),
            colbert_kd_scores(queries, batch["candidates"]),
        )


@pytest.mark.parametrize("masking", ["zero", "exclude"])
def test_masks_with_axes_of_one_serve_all(batch: dict, masking: str) -> None:
    queries, documents, candidates = batch["queries"], batch["documents"], batch["candidates"]
    queries_mask, documents_mask = batch["queries_mask"], batch["documents_mask"]
    candidates_mask = batch["candidates_mask"]
    cases = [
        ("colbert_scores", documents, queries_mask[:1], documents_mask[:1]),
        ("colbert_scores", documents, queries_mask[:, :1], documents_mask[:, :1]),
        ("colbert_kd_scores", candidates, queries_mask[:1], candidates_mask[:1]),
        ("colbert_kd_scores", candidates, queries_mask[:, :1], candidates_mask[:, :1, :]),
        ("ColBERTScores", candidates, queries_mask[:1], candidates_mask[:1]),
        ("ColBERTScores", candidates, None, candidates_mask[..., :1]),
    ]
    for name, values, query_mask, document_mask in cases:
        theirs, ours = getattr(pylate.scores, name), getattr(pylate_flash.scores, name)
        if name == "ColBERTScores":
            theirs, ours = theirs(), ours()
        full_mask = document_mask.expand(values.shape[:-1])
        with use_scorer("pylate_flash", masking):
            result = ours(queries, values, query_mask, document_mask)
            assert torch.equal(result, ours(queries, values, query_mask, full_mask))
        if masking == "zero":
            assert_parity(result, theirs(queries, values, query_mask, document_mask))


def test_pairwise_takes_what_can_be_gone_through(batch: dict) -> None:
    queries, documents = batch["queries"], batch["documents"][:3]
    expected = pylate.scores.colbert_scores_pairwise(queries, documents)
    objects = np.empty(3, dtype=object)
    objects[:] = [tokens.numpy()[:6] for tokens in documents]
    assert_parity(colbert_scores_pairwise(tuple(queries), tuple(documents)), expected)
    assert_parity(colbert_scores_pairwise(iter(queries), (tokens for tokens in documents)), expected)
    assert_parity(colbert_scores_pairwise(queries, iter(documents)), expected)
    assert_parity(colbert_scores_pairwise(queries, objects), pylate.scores.colbert_scores_pairwise(queries, objects))
    # PyLate's own code also gets inputs that it can iterate over.
    assert torch.equal(colbert_scores_pairwise(iter(queries), tuple(documents), backend="torch"), expected)
    with pytest.raises(TypeError, match="documents_embeddings must be a tensor, an array or a list of them, got int"):
        colbert_scores_pairwise(queries, 3)
    # An object array, as numpy makes of lists of equal length with dtype=object.
    padded = documents.numpy().astype(object)
    for scores in (colbert_scores, colbert_scores_pairwise):
        with pytest.raises(TypeError, match="documents_embeddings must hold numbers, got an array of object"):
            scores(queries, padded)


def test_arrays_with_negative_strides(batch: dict) -> None:
    queries, documents = batch["queries"].numpy()[::-1], batch["documents"].numpy()[:3][::-1]
    flipped = batch["queries"].flip(0), batch["documents"][:3].flip(0)
    assert_parity(
        colbert_scores_pairwise(queries, documents), pylate.scores.colbert_scores_pairwise(queries, documents)
    )
    # Also in the arrays of single queries and documents in a list.
    expected = colbert_scores_pairwise(*flipped)
    assert torch.equal(colbert_scores_pairwise(list(queries[:, ::-1]), list(documents[:, ::-1])), expected)
    assert torch.equal(colbert_scores(queries, documents), colbert_scores(*flipped))


@pytest.mark.parametrize("grad", [False, True])
def test_pairwise_scores_are_in_the_order_of_the_lists(grad: bool) -> None:
    """Pairs of any lengths, with gradients; PyLate's own code does not support those without tokens."""
    queries, documents = (
        [torch.randn(n, 4).mul(16).round().div(16).requires_grad_(grad) for n in lengths]
        for lengths in ((3, 1, 0, 6, 2, 5), (9, 2, 4, 1, 0, 7))
    )
    scores = colbert_scores_pairwise(queries, documents)
    expected = torch.stack([maxsim_reference(q[None], d[None])[0, 0] for q, d in zip(queries, documents, strict=True)])
    torch.testing.assert_close(scores, expected)
    nonempty = [0, 1, 3, 5]
    theirs = pylate.scores.colbert_scores_pairwise([queries[i] for i in nonempty], [documents[i] for i in nonempty])
    assert_parity(scores[nonempty].detach(), theirs.detach())
    if grad:
        leaves, weight = [*queries, *documents], torch.arange(1.0, 7.0)
        actual, expected_grads = (torch.autograd.grad((values * weight).sum(), leaves) for values in (scores, expected))
        torch.testing.assert_close(actual, expected_grads)
        theirs = torch.autograd.grad((theirs * weight[nonempty]).sum(), leaves, allow_unused=True)
        for i in (*nonempty, *(6 + i for i in nonempty)):
            torch.testing.assert_close(actual[i], theirs[i])


def test_pairwise_lists_have_one_type() -> None:
    """The promoted type of all tensors, also within a list."""
    queries = [torch.randn(2, 4).half(), torch.randn(3, 4).double()]
    documents = [torch.randn(3, 4), torch.randn(1, 4).bfloat16()]
    scores = colbert_scores_pairwise(queries, documents)
    expected = [(q.double() @ d.double().T).amax(1).sum() for q, d in zip(queries, documents, strict=True)]
    torch.testing.assert_close(scores, torch.stack(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("grad", [False, True])
def test_pairwise_without_tokens_and_without_pairs(grad: bool) -> None:
    token = torch.ones(1, 4, requires_grad=grad)
    scores = colbert_scores_pairwise([token, token.new_empty(0, 4), token], [[], token, np.ones((2, 4), np.float32)])
    assert scores.tolist() == [0.0, 0.0, 4.0]
    assert colbert_scores_pairwise([], []).shape == (0,)
    assert colbert_scores_pairwise(torch.ones(0, 2, 4), torch.ones(0, 3, 4)).shape == (0,)


def test_empty_batches() -> None:
    assert colbert_scores(torch.ones(0, 2, 4), torch.ones(3, 2, 4)).shape == (0, 3)
    assert colbert_scores(torch.ones(2, 2, 4), torch.ones(0, 2, 4)).shape == (2, 0)


@pytest.mark.parametrize(
    ("queries_dtype", "documents_dtype"),
    [(torch.float32, torch.float16), (torch.float16, torch.bfloat16), (torch.bfloat16, torch.float64)],
)
def test_mixed_types_are_promoted(batch: dict, queries_dtype: torch.dtype, documents_dtype: torch.dtype) -> None:
    queries, documents = batch["queries"].to(queries_dtype), batch["documents"].to(documents_dtype)
    common = torch.promote_types(queries_dtype, documents_dtype)
    expected = colbert_scores(queries.to(common), documents.to(common))
    assert expected.dtype == (torch.float64 if common == torch.float64 else torch.float32)
    assert torch.equal(colbert_scores(queries, documents), expected)
    if torch.bfloat16 not in (queries_dtype, documents_dtype):
        assert torch.equal(colbert_scores(queries, documents.numpy()), expected)
    for kind in (list, torch.Tensor.clone):
        pairwise = colbert_scores_pairwise(kind(queries), kind(documents[:3]))
        torch.testing.assert_close(pairwise, expected.diagonal()[:3], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_backend_is_pylates_own_code_even_while_registered(batch: dict, name: str) -> None:
    # Half scores from half embeddings: PyLate's torch scorer is the only one that returns them.
    queries = batch["queries"].half()
    documents = (batch["candidates"] if name == "colbert_kd_scores" else batch["documents"][:3]).half()
    expected = getattr(pylate.scores, name)(queries, documents)
    assert expected.dtype == torch.float16
    with registered():
        assert torch.equal(getattr(pylate_flash.scores, name)(queries, documents, backend="torch"), expected)
        assert torch.equal(getattr(pylate.scores, name)(queries, documents, backend="torch"), expected)
        assert getattr(pylate.scores, name)(queries, documents).dtype == torch.float32


@pytest.mark.parametrize("backend", ["flash", "lik"])
def test_pylates_other_backends_raise_pylates_errors(batch: dict, backend: str) -> None:
    with pytest.raises(RuntimeError, match=backend):
        colbert_scores(batch["queries"], batch["documents"], backend=backend)


def test_colbert_scores_class_by_name_torch(batch: dict) -> None:
    queries, candidates = batch["queries"].half(), batch["candidates"].half()
    expected = pylate.scores.ColBERTScores()(queries, candidates)
    assert torch.equal(ColBERTScores("torch")(queries, candidates), expected)
    assert torch.equal(ColBERTScores("pylate_flash")(queries, candidates, backend="torch"), expected)


def test_colbert_scores_class_is_one_call(batch: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded(monkeypatch, pylate_flash.scores, "maxsim")
    ColBERTScores(masking="zero")(batch["queries"], batch["candidates"], None, batch["candidates_mask"])
    assert [options["masking"] for _, options in calls] == ["zero"]


def test_environment_is_read_per_call(batch: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, documents = batch["queries"].half(), batch["documents"].half()
    monkeypatch.setenv("PYLATE_SCORES_BACKEND", "torch")
    assert colbert_scores(queries, documents).dtype == torch.float16
    assert colbert_scores(queries, documents, backend="auto").dtype == torch.float32
    with use_scorer("pylate_flash"):
        assert colbert_scores(queries, documents).dtype == torch.float32
    monkeypatch.setenv("PYLATE_SCORES_BACKEND", "PyLate_Flash")
    assert colbert_scores(queries, documents).dtype == torch.float32
    monkeypatch.setenv("PYLATE_SCORES_BACKEND", "fast")
    with pytest.raises(ValueError, match="PYLATE_SCORES_BACKEND must be one of 'auto', 'pylate_flash'.*got 'fast'"):
        colbert_scores(queries, documents)


def test_auto_leaves_integers_to_pylate_and_says_so_once(batch: dict, caplog: pytest.LogCaptureFixture) -> None:
    queries, documents = (batch["queries"] * 9).int(), (batch["documents"] * 9).int()
    operands._log_left_to_pylate.cache_clear()
    with caplog.at_level(logging.WARNING, logger="pylate_flash"):
        for _ in range(2):
            assert torch.equal(colbert_scores(queries, documents), pylate.scores.colbert_scores(queries, documents))
    assert [record.getMessage() for record in caplog.records if "torch.int32" in record.getMessage()] == [
        'backend "auto": PyLate scores embeddings of torch.int32, which pylate_flash does not support'
    ]
    for function, second in ((colbert_scores, documents), (colbert_scores_pairwise, documents[:3])):
        with pytest.raises(TypeError, match="queries must be float16, bfloat16, float32 or float64, got torch.int32"):
            function(queries, second, backend="pylate_flash")
        with pytest.raises(TypeError, match="queries_embeddings and documents.* got torch.int32 and torch.float32"):
            function(queries, second.float())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda q, d, c: colbert_scores(q, d, backend="fast"), ValueError, "'pylate_flash', 'torch', 'flash', 'lik'"),
        (lambda q, d, c: colbert_scores(q, d, backend=3), ValueError, "backend must be one of .* got 3"),
        (lambda q, d, c: colbert_scores(q, d, masking="none"), ValueError, "'exclude', 'zero', got 'none'"),
        (lambda q, d, c: colbert_scores_pairwise(q, d[:3], masking="none"), ValueError, "masking must be one of"),
        (lambda q, d, c: ColBERTScores("fast"), ValueError, "backend must be one of"),
        (lambda q, d, c: ColBERTScores(masking="none"), ValueError, "masking must be one of"),
        (lambda q, d, c: colbert_scores(q, c), ValueError, r"documents_embeddings must be \[Nd, Ld, d\], got shape"),
        (lambda q, d, c: colbert_kd_scores(q, d), ValueError, r"documents_embeddings must be \[Nq, K, Ld, d\], got"),
        (lambda q, d, c: ColBERTScores()(q, d), ValueError, r"documents_embeddings must be \[G, N, Ld, d\], got"),
        (lambda q, d, c: colbert_scores(q[0], d), ValueError, r"queries_embeddings must be \[Nq, Lq, d\], got shape"),
        (lambda q, d, c: colbert_scores(tuple(q), d), TypeError, "queries_embeddings must be a tensor.* got tuple"),
        (lambda q, d, c: colbert_scores([1.0, 2.0], d), TypeError, "queries_embeddings .* got list of float"),
        (lambda q, d, c: colbert_scores([q[0], q[0, :2]], d), ValueError, "queries_embeddings .*pad_sequence"),
        (lambda q, d, c: colbert_scores(q, d[..., :8]), ValueError, "^documents_em.* of queries_em.* 24, got 8"),
        (lambda q, d, c: colbert_scores(q, d, None, d[..., 0] > 0, "auto") * colbert_scores(q, d, d[..., 0] > 0),
         ValueError, r"queries_mask must have shape \[3, 5\], got \[4, 7\]"),
        (lambda q, d, c: colbert_scores(q, d, (1, 0)), TypeError, "queries_mask must be .* got tuple"),
        (lambda q, d, c: colbert_scores(q, d, [*torch.ones(2, 5), torch.ones(4)]), ValueError,
         "queries_mask must be one tensor, .* do not stack"),
        (lambda q, d, c: colbert_scores(q, d, None, [[None]]), TypeError, "documents_mask must hold numbers of a type"),
        (lambda q, d, c: colbert_scores([[None]], d), TypeError, "queries_embeddings must hold numbers of a type"),
        (lambda q, d, c: colbert_scores_pairwise(q, d[0, 0, 0]), ValueError, "documents_embeddings must .* shape "),
        (lambda q, d, c: ColBERTScores()(q, c, None, d[..., 0] > 0), ValueError, r"documents_mask .*\[3, 4, 7\], got"),
        (lambda q, d, c: colbert_scores(q, d.to("meta")), ValueError, "^documents_.* device of queries_.*, got meta"),
        (lambda q, d, c: colbert_scores_pairwise(q, d), ValueError, "one document per query, 3, got 4"),
        (lambda q, d, c: colbert_scores_pairwise(list(q), list(d)), ValueError, "one document per query, 3, got 4"),
        (lambda q, d, c: colbert_scores_pairwise([q[0]], [d[0, 0]]), ValueError, r"documents_.*\[0\] must .*24"),
        (lambda q, d, c: colbert_scores_pairwise([q[0]], ["text"]), TypeError, r"documents_embeddings\[0\] .* got str"),
        (lambda q, d, c: colbert_scores_pairwise([q[0]], [[[1.0], [1.0, 2.0]]]), ValueError, r"documents_.*\[0\]"),
        (lambda q, d, c: colbert_scores_pairwise([q[0]] * 2, [d[0], d[0, :, :8]]), ValueError, "got 8 and 24"),
        (lambda q, d, c: colbert_scores_pairwise([q[0]], [d[0, :, :8]]), ValueError, "queries_embeddings, 24, got 8"),
        (lambda q, d, c: colbert_scores_pairwise([q[0]] * 2, [d[0], d[0].to("meta")]), ValueError, "got cpu and meta"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(batch: dict, call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(batch["queries"], batch["documents"], batch["candidates"])


def test_scorer_of() -> None:
    class Model(torch.nn.Module):
        scorer, masking = "torch", "zero"

    assert scorer_of(Model()) == ("torch", "zero")
    assert scorer_of(Wrapped(Wrapped(Model()))) == ("torch", "zero")
    assert scorer_of(Wrapped(torch.nn.Linear(1, 1))) == ("auto", "exclude")
    assert scorer_of(None) == ("auto", "exclude")
    with use_scorer(masking="zero"):
        assert scorer_of(None) == ("auto", "zero")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_have_the_type_of_pylates_own(dtype: torch.dtype) -> None:
    queries, documents = torch.randn(2, 3, 4, dtype=dtype), torch.randn(2, 5, 4, dtype=dtype)
    for function, arguments in (
        (colbert_scores, (queries, documents)),
        (colbert_scores_pairwise, (queries, documents)),
        (colbert_scores_pairwise, (list(queries), list(documents))),
        (colbert_kd_scores, (queries, documents.unsqueeze(1))),
    ):
        ours, theirs = function(*arguments), function(*arguments, backend="torch")
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)
