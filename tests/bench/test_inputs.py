"""The inputs of rows, and the ways in which each package is called with them."""

from __future__ import annotations

import inspect
import math
import os
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from pylate_flash.bench import exact, forward, loss_steps, losses, suite, training, varlen
from pylate_flash.bench.calls import chunk_sizes, lengths_of, prefixes
from pylate_flash.bench.peers import SENTENCE_TRANSFORMERS
from pylate_flash.bench.protocol import Rounds
from pylate_flash.bench.rerank import scores_by_id
from pylate_flash.bench.rows import Row
from pylate_flash.bench.suite import Unavailable
from pylate_flash.bench.varlen import Arrays
from pylate_flash.hosts import HOSTS
from pylate_flash.hosts import SENTENCE_TRANSFORMERS as ROUTES
from suites import cpu, hosts, quantized, residual, soft, sparse
from tests.bench import stand_ins
from tests.ops.residual_cases import residual_codes

CPU = torch.device("cpu")
SEVERAL = Row("several", 3, 70, 5, 11, d=16, shortest=3)
RERANK = Arrays("rerank", 3, 4, 5, 11, d=16, shortest=3)
STEP = Row("small", 40, 40, 4, 6, d=16, step=True)
GIVEN = replace(STEP, name="given", kind=losses.GIVEN)


def labels(candidates: Any) -> list[str]:
    return [candidate.label for candidate in candidates]


# Scores


def test_embeddings_are_unit_vectors_and_differ() -> None:
    inputs = forward.make_inputs(Row("row", 2, 3, 4, 5, d=16), CPU, torch.float32)
    assert inputs.queries.shape == (2, 4, 16)
    assert inputs.lengths().tolist() == [5, 5, 5]
    torch.testing.assert_close(inputs.documents.norm(dim=-1), torch.ones(3, 5))
    assert not torch.equal(inputs.queries[0], inputs.queries[1])


def test_masks_are_prefixes_of_many_lengths() -> None:
    mask = prefixes(50, 9, generator=torch.Generator().manual_seed(0))
    lengths = lengths_of(mask)
    assert lengths.dtype == torch.int32
    assert set(lengths.tolist()) == {5, 6, 7, 8, 9}
    assert torch.equal(mask, torch.arange(9) < lengths.unsqueeze(1))


def test_chunks_are_the_largest_that_fit() -> None:
    inputs = forward.make_inputs(Row("row", 1, 100, 4, 7, d=16), CPU, torch.float32)
    assert chunk_sizes(inputs.queries, inputs.documents) == [4, 16, 64, 100]
    # 1 GiB holds the similarities of 256 x 1024 x 1024 float32, one query against 256 documents.
    assert chunk_sizes(torch.empty(1, 1024, 16), torch.empty(300, 1024, 16)) == [4, 16, 64, 256]
    # 64 x 64 x 32 x n similarities of two bytes, six times: 1.5 MiB * n, and there are 2048 MiB.
    queries = torch.empty(64, 32, 8, dtype=torch.bfloat16, device="meta")
    largest = [chunk_sizes(queries, torch.empty(64, n, 8, device="meta"), held=6.0)[-1] for n in (1000, 1500, 6000)]
    assert largest == [64, 16, 4]


LIK, FM = ["maxsim", "maxsim_forward"], ["flash_maxsim", "flash_maxsim_persistent"]


@pytest.mark.parametrize(
    ("row", "lik", "flash_maxsim"),
    [
        (Row("short", 1, 4, 32, 8), LIK, FM),
        (Row("long", 1, 4, 1024, 8), LIK[:1], FM),
        (Row("long, of long documents", 1, 4, 512, 512, d=16), LIK, [*FM, "splitk", "flash_maxsim_qreuse"]),
        (Row("odd", 1, 3, 512, 512, d=16), LIK, [*FM, "splitk"]),
        (Row("several", 2, 4, 32, 8), LIK, ["flash_maxsim_batched", "flash_maxsim_persistent"]),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_other_packages_take_every_way_that_they_have(row, lik, flash_maxsim, monkeypatch) -> None:
    stand_ins.put_in_place(monkeypatch)
    inputs = forward.make_inputs(row, CPU, torch.float32)
    assert labels(inputs.lik()) == lik
    assert labels(inputs.flash_maxsim()) == flash_maxsim
    for candidate in (*inputs.lik(), *inputs.flash_maxsim()):
        assert exact.relative_error(candidate.call(), inputs.reference()) < 1e-5


def test_the_peers_as_installed_take_these_arguments() -> None:
    lik, flash_maxsim = pytest.importorskip("late_interaction_kernels"), pytest.importorskip("flash_maxsim")
    inspect.signature(lik.maxsim).bind(None, None, backward="lowmem")
    inspect.signature(flash_maxsim.flash_maxsim_batched_train).bind(None, None, shared_docs=True, doc_lengths=None)


def test_chosen_positions_differ() -> None:
    chosen = sparse.make_inputs(sparse.Pruned("tiny", 1, 1100, 6, 9, d=16, k=3), CPU, torch.float32).positions
    assert chosen.shape == (1100, 3)
    assert (chosen.diff(dim=1) > 0).all()
    assert chosen.unique().tolist() == list(range(6))


@pytest.mark.parametrize("nbits", [2, 4])
def test_indices_in_the_other_order_are_those_from_the_lowest_bits(nbits: int) -> None:
    documents = residual_codes([9], 8, nbits)
    result = residual.in_other_order(documents.residuals, nbits)
    assert result.dtype == torch.uint8
    lowest_first = torch.stack([result >> shift & (1 << nbits) - 1 for shift in range(0, 8, nbits)], dim=-1).flatten(1)
    sums = documents.centroids[documents.codes] + documents.bucket_weights[lowest_first.long()]
    torch.testing.assert_close(documents.decompress(), F.normalize(sums.float(), dim=-1))
    assert torch.equal(residual.in_other_order(result, nbits), documents.residuals)


@pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="this torch has no product of fp8 matrices")
def test_the_ceiling_of_8_bits_is_a_rate() -> None:
    try:
        rate = quantized.measure_eight_bits(CPU, size=64)
    except NotImplementedError:
        pytest.skip("this torch multiplies no fp8 on a CPU")
    assert 0 < rate < math.inf


# Packed documents, and reranking


def test_inputs_are_the_same_packed_and_padded() -> None:
    inputs = varlen.make_inputs(SEVERAL, CPU, torch.float32)
    queries, documents, *bounds = inputs.packed()
    assert {b.dtype for b in bounds} == {torch.int32}
    batch = inputs.padded()
    lengths = bounds[1].diff().tolist()
    assert lengths == SEVERAL.lengths().tolist() == batch.lengths().tolist()
    assert torch.equal(queries.unflatten(0, (3, 5)), batch.queries)
    for document, padded, active in zip(documents.split(lengths), batch.documents, batch.documents_mask, strict=True):
        assert torch.equal(document, padded[active])
        assert not padded[~active].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_packages_are_given_packed_and_padded(dtype: torch.dtype, monkeypatch) -> None:
    stand_ins.put_in_place(monkeypatch)
    inputs = varlen.make_inputs(SEVERAL, CPU, dtype)
    packed, with_lengths = "maxsim_varlen", "maxsim_varlen, longest lengths given"
    assert labels(inputs.lik()) == [packed, with_lengths, "maxsim, padded", "maxsim_forward, padded"]
    result = labels(inputs.flash_maxsim())
    assert result[0] == "flash_maxsim_packed"
    assert ("flash_maxsim_packed, from float16" in result) == (dtype != torch.float16)


def test_a_request_is_what_a_model_returns() -> None:
    request = varlen.make_inputs(RERANK, CPU, torch.bfloat16)
    assert request.ids == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    documents = [document for candidates in request.documents for document in candidates]
    assert [len(document) for document in documents] == RERANK.lengths().tolist()
    assert all(array.dtype == np.float32 for array in [*request.queries, *documents])
    assert all(document.base is None for document in documents)


@pytest.mark.parametrize("before", [None, "torch"])
@pytest.mark.parametrize(("system", "backend"), [("lik", "lik"), ("flash_maxsim", "flash")])
def test_pylate_gets_the_backend_of_the_system(monkeypatch, system: str, backend: str, before: str | None) -> None:
    rank = pytest.importorskip("pylate.rank")
    monkeypatch.delenv("PYLATE_SCORES_BACKEND", raising=False)
    if before is not None:
        monkeypatch.setenv("PYLATE_SCORES_BACKEND", before)
    request = varlen.make_inputs(RERANK, CPU, torch.float32)
    seen = []

    def watch(*arguments, **options):
        seen.append((os.environ["PYLATE_SCORES_BACKEND"], *arguments, options))
        raise RuntimeError("no GPU here")

    monkeypatch.setattr(rank, "rerank", watch)
    (candidate,) = getattr(request, system)()
    with pytest.raises(RuntimeError, match="no GPU here"):
        candidate.call()
    assert seen == [(backend, request.ids, request.queries, request.documents, {"device": CPU})]
    assert os.environ.get("PYLATE_SCORES_BACKEND") == before


@pytest.mark.parametrize("system", ["ours", "lik", "flash_maxsim", "torch"])
def test_without_pylate_there_is_no_rerank(monkeypatch, system: str) -> None:
    monkeypatch.setitem(sys.modules, "pylate.rank", None)
    with pytest.raises(Unavailable, match="needs PyLate"):
        getattr(varlen.make_inputs(RERANK, CPU, torch.float32), system)()


@pytest.mark.parametrize(
    ("rankings", "scores"),
    [
        ([[{"id": 1, "score": 2.0}, {"id": 0, "score": 1.0}], [{"id": 2, "score": 3.0}]], [1.0, 2.0, 3.0]),
        ([[{"id": 1, "score": 1.0}, {"id": 0, "score": 2.0}], [{"id": 2, "score": 3.0}]], [np.nan, np.nan, 3.0]),
        ([[{"id": 1, "score": 2.0}], [{"id": 2, "score": 3.0}]], [np.nan, 2.0, 3.0]),
    ],
    ids=["sorted", "unsorted", "missing"],
)
def test_rankings_are_read_by_id_and_must_be_sorted_and_complete(rankings: list, scores: list[float]) -> None:
    np.testing.assert_array_equal(scores_by_id(rankings, 3).numpy(), scores)


# On a CPU


def test_maxsim_cpu_takes_as_many_threads_as_torch_and_float32_only(monkeypatch) -> None:
    stand_ins.put_in_place(monkeypatch)
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    cpu.maxsim_cpu(forward.make_inputs(Row("one", 1, 5, 4, 7, d=16), CPU, torch.float32))
    assert int(os.environ["RAYON_NUM_THREADS"]) == torch.get_num_threads()
    with pytest.raises(Unavailable, match="float32 only, not torch.bfloat16"):
        cpu.maxsim_cpu(forward.make_inputs(Row("one", 1, 5, 4, 7, d=16), CPU, torch.bfloat16))


def test_maxsim_cpu_as_installed_is_right() -> None:
    pytest.importorskip("maxsim_cpu")
    inputs = forward.make_inputs(Row("several", 3, 6, 2, 9, d=16), CPU, torch.float32)
    (candidate,) = cpu.maxsim_cpu(inputs)
    assert exact.relative_error(candidate.read(candidate.call()), inputs.reference()) < 1e-5


@pytest.mark.parametrize("n_queries", [1, 3])
def test_the_products_have_every_similarity(n_queries: int, monkeypatch) -> None:
    """Every candidate computes all of them, block by block, in any order of rows and columns."""
    inputs = forward.make_inputs(Row("row", n_queries, 6, 2, 9, d=16), CPU, torch.float32)
    actual = []
    monkeypatch.setattr(cpu, "BLOCK", 3 * inputs.queries.shape[0] * inputs.queries.shape[1])
    monkeypatch.setattr(cpu, "_each", lambda product, blocks: actual.append([product(*block) for block in blocks]))
    expected = inputs.queries.flatten(0, 1) @ inputs.documents.flatten(0, 1).T
    for candidate in cpu.products(inputs):
        candidate.call()
    queries_first, documents_first, convolution = actual
    torch.testing.assert_close(torch.cat(queries_first, dim=1), expected)
    torch.testing.assert_close(torch.cat(documents_first, dim=0).T, expected)
    torch.testing.assert_close(torch.cat([part.reshape(len(expected), -1) for part in convolution], dim=1), expected)


def test_of_a_distillation_a_masked_zero_is_the_best_for_some() -> None:
    step = cpu.make_inputs(Row("few", 5, 3, 4, 8, own=True, step=True, d=16), CPU, torch.float32)
    similarities = torch.einsum("qsd,qktd->qkst", step.queries, step.documents)
    assert (similarities.masked_fill(~step.documents_mask.unsqueeze(2), -torch.inf).amax(dim=-1) < 0).any()


# Steps


@pytest.mark.parametrize("own", [False, True])
def test_half_of_the_wins_are_on_one_token_in_twenty(own: bool) -> None:
    row = training.Batch("skewed", *((8, 6) if own else (12, 12)), 16, 40, kind="skewed", own=own)
    inputs = training.make_inputs(row, CPU, torch.float32)
    assert inputs.hot == 2
    for embeddings in (inputs.queries, inputs.documents):
        torch.testing.assert_close(embeddings.norm(dim=-1), torch.ones(embeddings.shape[:-1]))
    equation = "qsd,qntd->qnst" if own else "qsd,ntd->qnst"
    argmax = torch.einsum(equation, inputs.queries, inputs.documents).argmax(-1)
    assert (argmax < inputs.hot).float().mean().item() == pytest.approx(0.5, abs=training.HOT_TOLERANCE)
    # The reference checks it too.
    with pytest.raises(RuntimeError, match="of the wins are on the hot tokens, expected 50%"):
        replace(inputs, hot=15).reference()


def test_lik_is_tried_with_each_of_its_backwards(monkeypatch) -> None:
    stand_ins.put_in_place(monkeypatch)
    inputs = training.make_inputs(STEP, CPU, torch.float32)
    systems = {system.name: system for system in training.suite().systems}
    results = [labels(systems[name].candidates(inputs)) for name in ("lik", "lik_lowmem")]
    assert results == [["maxsim, auto", "maxsim, unified"], ["maxsim, lowmem"]]


def test_which_einsum_of_soft_scores_is_timed() -> None:
    """A step with scores that were summed in bfloat16 is wrong at every size in use; with float32 sums it is right."""
    long = soft.SoftBatch("step", 8, 8, 200, 200, d=128, step=True)
    inputs = soft.make_inputs(long, CPU, torch.bfloat16)
    expected = inputs.reference()
    plain, widened = (exact.error(candidate.call(), expected) for candidate in inputs.torch())
    assert plain > soft.ROUNDED > widened
    assert labels(soft.make_inputs(long, CPU, torch.float32).torch()) == ["einsum"]


@pytest.mark.parametrize("pieces", [False, True])
def test_the_sample_of_a_large_step_is_that_of_the_whole_reference(pieces: bool, monkeypatch) -> None:
    if pieces:
        monkeypatch.setattr(exact, "REFERENCE_BYTES", 1)
        monkeypatch.setattr(losses, "REFERENCE_QUERIES", 16)
    inputs = losses.make_inputs(STEP, CPU, torch.bfloat16)
    full = losses.sample_of(inputs.reference())
    reference = losses.reference(inputs)
    assert reference.scores is full.scores is None
    for actual, expected in zip(reference[::2] + reference[3:], full[::2] + full[3:], strict=True):
        assert actual.dtype == torch.float64
        # A logit is a float32 sum over the temperature, 0.02.
        assert (actual - expected).norm() <= 1e-5 * expected.norm()
    assert len(full.grad_queries) == losses.SAMPLED
    assert losses.sampled(40)[[0, -1]].tolist() == [0, 39]


def test_the_reference_of_a_large_step_is_the_same_whatever_float32_products_are_set_to() -> None:
    inputs = losses.make_inputs(STEP, CPU, torch.float32)
    expected = losses.reference(inputs)
    with exact.float32_products("tf32", "bf16"):
        assert exact.error(losses.reference(inputs), expected) == 0


def test_given_embeddings_are_not_normalised_and_masked_and_their_reference_is_the_definition() -> None:
    arguments = losses.make_inputs(GIVEN, CPU, torch.float32)
    assert arguments.queries.dtype == torch.bfloat16
    norms = arguments.documents.float().norm(dim=-1)
    assert norms.min() < 0.7
    assert norms.max() > 1.3
    for mask, length in ((arguments.queries_mask, 4), (arguments.documents_mask, 6)):
        assert length // 2 <= mask.sum(dim=1).min() < mask.sum(dim=1).max() == length
    leaves = [e.detach().double().requires_grad_() for e in (arguments.queries, arguments.documents)]
    # Rounded as by the operation, with a straight-through gradient.
    normalized = [F.normalize(leaf, dim=-1) for leaf in leaves]
    rounded = [unit + (unit.to(torch.bfloat16).double() - unit).detach() for unit in normalized]
    similarities = torch.einsum("qsd,ntd->qnst", *rounded)
    best = similarities.masked_fill(~arguments.documents_mask[None, :, None], -torch.inf).amax(dim=-1)
    scores = (best * arguments.queries_mask[:, None]).sum(dim=-1)
    loss = F.cross_entropy(scores / training.TEMPERATURE, torch.arange(40))
    expected = losses.sample_of(exact.Step(loss.detach(), None, *torch.autograd.grad(loss, leaves)))
    assert exact.error(losses.reference(arguments), expected) <= 1e-4


@pytest.mark.parametrize("name", ["contrastive", "cached"])
def test_a_loss_of_given_embeddings_is_the_bare_operation(name: str, pylate) -> None:
    """So their times measure the same work."""
    arguments = losses.make_inputs(GIVEN, CPU, torch.float32)
    (bare,), (loss,) = arguments.ours(), getattr(arguments, name)()
    actual, expected = (losses.sample_of(candidate.read(candidate.call())) for candidate in (loss, bare))
    assert exact.error(actual, exact.Step(*(part if part is None else part.double() for part in expected))) <= 2e-3


@pytest.mark.parametrize(("row", "expected"), [(1, 3), (2, 1), (3, 1), (4, 0)], ids=lambda value: str(value))
def test_what_would_take_minutes_is_not_offered(row: int, expected: int) -> None:
    shape = losses.ROWS[row]
    queries, documents = (torch.empty(shape.Nq, length, 128, device="meta") for length in (32, 180))
    inputs = loss_steps.LargeStep(queries, documents)
    for offered in (lambda: inputs.chunks(100 * loss_steps.LONG), inputs.loop):
        if not expected:
            with pytest.raises(Unavailable, match="a minute or more"):
                offered()
        else:
            assert len(offered()) in (1, expected)
    assert len(inputs.ours()) == 1


# sentence-transformers

needs_host = pytest.mark.skipif(
    not HOSTS["sentence-transformers"].is_there(), reason="sentence-transformers 6 is not installed"
)


def small(row: Row) -> Row:
    shortest = None if row.shortest is None else 3
    return replace(row, Nq=min(row.Nq, 5), Nd=5 if row.step else 9, Lq=4, Ld=11, shortest=shortest, d=16)


@pytest.mark.parametrize("row", hosts.ROWS, ids=lambda row: row.name)
def test_rows_of_a_host_hold_what_their_names_say(row: Row, monkeypatch) -> None:
    monkeypatch.setattr(hosts, "MINI_BATCH", 3)
    inputs = hosts.make_inputs(small(row), CPU, torch.float32)
    if row.step:
        assert [len(part) for part in inputs.columns()[1]] == [3, 2]
        return
    arguments, lengths = inputs.arguments, inputs.lengths()
    assert (len(set(lengths.tolist())) > 1) == (row.shortest is not None)
    if row.kind == "lists":
        assert [len(document) for document in arguments["b"]] == lengths.tolist()
        assert len({document.data_ptr() for document in arguments["b"]}) == len(arguments["b"])
        assert all(document.untyped_storage().nbytes() == document.nbytes for document in arguments["b"])
    assert ("b_mask" in arguments) == (row.kind == "masked")


@needs_host
def test_what_is_measured_of_this_package_is_what_registering_makes_of_the_host() -> None:
    from pylate_flash import registered
    from pylate_flash.hosts.routes import find

    for path in (hosts._MAXSIM, hosts._CALCULATE):
        own, routed = ROUTES.original(path), ROUTES.routed(path)
        assert own.__code__ != routed.__code__
        assert (own.__defaults__, own.__kwdefaults__) == (routed.__defaults__, routed.__kwdefaults__)
        with registered("sentence-transformers"):
            assert find(path).__code__.co_code == routed.__code__.co_code == ROUTES.routed(path).__code__.co_code
            assert find(path).__code__.co_names == routed.__code__.co_names


def test_without_the_host_the_operation_alone_is_measured(ceilings, monkeypatch) -> None:
    monkeypatch.setattr(type(SENTENCE_TRANSFORMERS), "version", lambda peer: "5.3.0")
    tiny = replace(hosts.suite(), rows=[small(hosts.ROWS[0])])
    (row,) = suite.run(tiny, CPU, torch.float32, Rounds(0, 2, 0), ceilings=ceilings)["rows"]
    reason = "version 5.3.0 is installed, expected 6.0 or later"
    states = row["systems"]
    assert states["pylate_flash"] == {"status": "absent", "reason": f"sentence-transformers: {reason}"}
    assert states["sentence_transformers"] == {"status": "absent", "reason": reason}
    assert states["pylate_flash_operation"]["status"] == "ok"
