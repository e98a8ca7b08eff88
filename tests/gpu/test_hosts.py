"""Scoring functions of hosts on a GPU, against the hosts' own; skipped if a host is not installed."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pylate_flash.hosts import HOSTS, colpali
from pylate_flash.hosts import sentence_transformers as ours
from pylate_flash.hosts.sentence_transformers import scoring
from pylate_flash.ops import maxsim_reference
from pylate_flash.ops.compute import kernels
from pylate_flash.ops.nonzero import nonzero_rows, nonzero_rows_of_both
from tests.gpu.tools import no_waiting

pytestmark = pytest.mark.gpu

QUERIES, DOCUMENTS, SIZE = 7, 30, 64


def ragged(seed: int, count: int, longest: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Unit embeddings of `count` texts, on the GPU."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [F.normalize(torch.randn(length, SIZE, generator=generator), dim=-1).to("cuda", dtype) for length in lengths]


def padded(sequences: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)


@pytest.fixture(scope="module")
def host() -> Any:
    """The module of sentence-transformers' own functions."""
    if not HOSTS["sentence-transformers"].is_there():
        pytest.skip("sentence-transformers 6 is not installed")
    from sentence_transformers.util import similarity

    return similarity


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["padded", "lists", "padded queries", "masked", "weighted"])
@pytest.mark.parametrize("mean", [False, True])
def test_scores_are_theirs(form: str, dtype: torch.dtype, mean: bool, host: Any) -> None:
    a, b = ragged(1, QUERIES, 20, dtype), ragged(2, DOCUMENTS, 90, dtype)
    b[1] = b[1][:0]
    a_mask = b_mask = None
    queries: Any = a if form == "lists" else padded(a)
    documents: Any = b if form in ("lists", "padded queries") else padded(b)
    generator = torch.Generator().manual_seed(3)
    if form in ("masked", "weighted"):
        a_mask = torch.rand(queries.shape[:2], generator=generator) * 2
        a_mask = a_mask if form == "weighted" else a_mask < 1.2
        # On the CPU: the mask is moved to the device of the embeddings.
        b_mask = torch.rand(documents.shape[:2], generator=generator) < 0.7
        b_mask[1] = False
    scores = ours.maxsim(queries, documents, a_mask, b_mask, length_normalize=mean)
    wide = [[t.double() for t in side] if isinstance(side, list) else side.double() for side in (queries, documents)]
    expected = host.maxsim(*wide, a_mask, b_mask, length_normalize=mean)
    assert (scores.dtype, scores.device) == (torch.float32, expected.device)
    assert torch.allclose(scores.double(), expected.double(), rtol=2e-6, atol=2e-5)
    assert (scores[:, 1] < -1e7).all()
    if form in ("padded", "lists"):
        pairs = ours.maxsim_pairwise(queries, documents[:QUERIES], length_normalize=mean)
        assert torch.allclose(pairs, scores.diagonal(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32, torch.bfloat16])
def test_a_documents_mask_of_any_type_is_what_is_not_zero(dtype: torch.dtype) -> None:
    """The kernel takes it as it is; the host's function compares it with 0."""
    queries, documents = padded(ragged(1, QUERIES, 20)), padded(ragged(2, DOCUMENTS, 90))
    values = torch.randint(0, 3, documents.shape[:2], generator=torch.Generator().manual_seed(3)).to("cuda", dtype)
    expected = ours.maxsim(queries, documents, b_mask=values != 0)
    assert torch.equal(ours.maxsim(queries, documents, b_mask=values), expected)
    if dtype.is_floating_point:
        # It gets no gradient, and may require one.
        assert torch.equal(ours.maxsim(queries, documents, b_mask=values.requires_grad_()), expected)


@pytest.mark.parametrize("name", ["maxsim", "maxsim_pairwise"])
def test_lists_are_read_where_they_lie(name: str) -> None:
    operation = "maxsim_ragged" if name == "maxsim" else "maxsim_ragged_pairwise"
    a, b = ragged(1, QUERIES, 20), ragged(2, QUERIES, 90)
    expected = getattr(ours, name)(padded(a), padded(b))
    with mock.patch.object(scoring, operation, wraps=getattr(scoring, operation)) as served:
        for queries in (a, padded(a)):
            assert torch.allclose(getattr(ours, name)(queries, b, device="cuda"), expected, rtol=1e-5, atol=1e-5)
    assert served.call_count == 2


@pytest.mark.parametrize("kind", ["tensors", "arrays"])
def test_documents_elsewhere_move_block_by_block(kind: str) -> None:
    a, b = ragged(1, QUERIES, 20), ragged(2, DOCUMENTS, 90)
    expected = ours.maxsim(a, b)
    documents: list[Any] = [tokens.cpu() for tokens in b]
    if kind == "arrays":
        documents = [tokens.numpy() for tokens in documents]
    for chunk_elements in (None, 50 * SIZE):
        scores = ours.maxsim(a, documents, chunk_elements=chunk_elements, device="cuda")
        # Arrays have no device, so scores are on that of the queries.
        assert scores.device.type == ("cpu" if kind == "tensors" else "cuda")
        assert torch.allclose(scores.cpu(), expected.cpu(), rtol=1e-5, atol=1e-5)
    if kind == "tensors":
        on_host = ours.maxsim(a, documents)
        assert on_host.device.type == "cpu"
        assert torch.allclose(on_host, expected.cpu(), rtol=1e-5, atol=1e-5)
    stacked = np.stack([np.ones((5, SIZE), dtype=np.float32)] * 3)
    assert ours.maxsim(padded(a), stacked).device.type == "cuda"


def test_many_arrays_go_through_pinned_memory() -> None:
    generator = np.random.default_rng(0)
    documents = [generator.standard_normal((length, 128), dtype=np.float32) for length in [100, 300] * 400]
    queries = torch.randn(2, 8, 128, device="cuda")
    expected = ours.maxsim(queries, [torch.from_numpy(document).cuda() for document in documents])
    assert torch.allclose(ours.maxsim(queries, documents), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["maxsim", "maxsim_pairwise"])
@pytest.mark.parametrize("form", ["padded", "lists"])
def test_gradients_are_theirs(name: str, form: str, host: Any) -> None:
    a, b = ragged(1, QUERIES, 20), ragged(2, QUERIES, 90)

    def gradients(function: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        sides = [[t.to(dtype, copy=True).requires_grad_() for t in side] for side in (a, b)]
        scores = function(*(side if form == "lists" else padded(side) for side in sides))
        weights = torch.randn(scores.shape, generator=torch.Generator().manual_seed(5)).to("cuda")
        (scores * weights).sum().backward()
        return [leaf.grad.double() for side in sides for leaf in side]

    actual, expected = gradients(getattr(ours, name), torch.float32), gradients(getattr(host, name), torch.float64)
    for mine, theirs in zip(actual, expected, strict=True):
        assert (mine - theirs).norm() <= 1e-5 * max(theirs.norm().item(), 1e-3)


def test_scores_of_losses_under_autocast() -> None:
    queries, documents = padded(ragged(1, 6, 20)), padded(ragged(2, 12, 50)).unflatten(0, (6, 2))
    with torch.autocast("cuda", torch.bfloat16):
        scores = ours.colbert_scores(queries, documents)
        candidates = ours.colbert_kd_scores(queries, documents)
    masks = {"queries_mask": queries.any(dim=-1), "documents_mask": documents.flatten(0, 1).any(dim=-1)}
    expected = maxsim_reference(queries.bfloat16(), documents.flatten(0, 1).bfloat16(), **masks)
    assert torch.allclose(scores, expected, rtol=1e-5, atol=1e-5)
    own = expected.view(6, 6, 2).diagonal(dim1=0, dim2=1).T
    assert torch.allclose(candidates, own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32])
@pytest.mark.parametrize("shape", [(1000, 130), (7, 300, 128), (3, 4, 50, 128), (2, 2, 2, 5, 16), (4, 0, 8)])
def test_tokens_of_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    embeddings = torch.randint(-1, 2, shape, device="cuda", generator=generator).to(dtype)
    embeddings[torch.rand(shape[:-1], device="cuda", generator=generator) < 0.3] = 0
    if dtype.is_floating_point:
        embeddings[torch.rand(shape[:-1], device="cuda", generator=generator) < 0.1] *= -1
        embeddings[torch.rand(shape, device="cuda", generator=generator) < 1e-3] = torch.nan
    for arguments in (
        embeddings,
        embeddings[..., 1:],
        embeddings[..., ::2],
        embeddings[:, :3],
        embeddings.transpose(0, 1),
    ):
        assert torch.equal(nonzero_rows(arguments), arguments.any(dim=-1))
    for queries in (embeddings[:1], embeddings[..., 1:], embeddings.flatten()):
        both = nonzero_rows_of_both(embeddings, queries)
        assert torch.equal(both[0], embeddings.any(dim=-1))
        assert torch.equal(both[1], queries.any(dim=-1))


@pytest.mark.parametrize("pairs", [False, True])
def test_zeros_of_queries_and_documents_are_found_by_one_launch(pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []
    original = kernels().nonzero_rows
    monkeypatch.setattr(
        kernels(), "nonzero_rows", lambda *arguments: launches.append(len(arguments)) or original(*arguments)
    )
    queries, documents = padded(ragged(1, 4, 20)), padded(ragged(2, 4, 50))
    function = scoring.maxsim_pairwise if pairs else scoring.maxsim
    result = function(queries, documents)
    assert launches == [2]
    masks = {"a_mask": queries.any(dim=-1), "b_mask": documents.any(dim=-1)}
    assert torch.equal(result, function(queries, documents, **masks))
    assert launches == [2]
    # If one side has a mask, the other has a launch of its own.
    assert torch.equal(result, function(queries, documents, a_mask=masks["a_mask"]))
    assert launches == [2, 1]


def test_zeros_of_colpali_compete() -> None:
    queries, documents = -padded(ragged(1, 4, 20)).abs(), padded(ragged(2, 6, 50)).abs()
    scores = colpali.maxsim_inbatch(queries, documents)
    assert torch.allclose(scores, maxsim_reference(queries, documents), rtol=1e-5, atol=1e-5)
    assert (scores == 0).any()


def test_nothing_waits_for_the_gpu_that_need_not() -> None:
    """List lengths are known on the host, and masks of batches are computed and used on the GPU."""
    queries, documents = padded(ragged(1, QUERIES, 20)), ragged(2, DOCUMENTS, 90)
    for arguments in (documents, padded(documents)):
        ours.maxsim(queries, arguments)
        with no_waiting():
            ours.maxsim(queries, arguments)
