"""`explain` reports what runs, as decided by the same functions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pylate_flash import explain, pack, quantize
from pylate_flash.kernels import choice, tables


def test_on_a_cpu() -> None:
    explanation = explain(torch.zeros(2, 3, 8), torch.zeros(4, 5, 8))
    assert explanation.implementation == "blocked"
    assert "need a CUDA device" in str(explanation)
    assert explanation.forward is explanation.backward is None
    named = explain(torch.zeros(2, 3, 8), torch.zeros(4, 5, 8), implementation="blocked")
    assert str(named) == "blocked: asked for by name"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan as on a Hopper GPU."""
    monkeypatch.setattr(choice, "_kernels_take", lambda *kind: None)
    monkeypatch.setattr(tables, "architecture", lambda device: (9, 132))
    for module in ("explanation", "ragged"):
        monkeypatch.setattr(f"pylate_flash.ops.{module}.choose", lambda *kind: "triton")

    def padded(origin, bounds, length, offsets, unit):
        shape = bounds.shape[0] - 1, length
        return origin.new_zeros(*shape, origin.shape[1]), torch.zeros(shape, dtype=torch.bool)

    monkeypatch.setattr("pylate_flash.ops.ragged.kernels", lambda: SimpleNamespace(pad=padded))


@pytest.mark.parametrize(
    ("queries", "documents", "kernel", "backward"),
    [
        ((1, 32, 128), (100, 180, 128), "single", "compare_argmax"),
        ((10, 32, 128), (10, 100, 180, 128), "single", "compare_argmax"),
        ((64, 32, 128), (64, 180, 128), "hopper", "lists"),
        ((2, 20, 128), (64, 180, 128), "hopper", "compare_argmax"),
        ((2, 20, 400), (64, 180, 400), "hopper", "compare_argmax"),
        ((2, 20, 404), (64, 180, 404), "stacked", "compare_argmax"),
    ],
)
def test_of_kernels(queries: tuple, documents: tuple, kernel: str, backward: str, kernels: None) -> None:
    tensors = [torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in (queries, documents)]
    explanation = explain(*tensors)
    assert explanation.forward is not None
    assert explanation.backward is not None
    assert explanation.forward.kernel == kernel
    assert explanation.backward.kernel == backward
    for word in (f"the {kernel} kernel", "tile: rows", f"documents: {backward}", "triton: cpu tensors"):
        assert word in str(explanation)
    assert explain(*(tensor.detach() for tensor in tensors)).backward is None


@pytest.mark.parametrize(
    ("n_queries", "dtype", "kernel", "reason"),
    [
        (64, torch.bfloat16, "hopper", "at least 64 query tokens"),
        (64, torch.float32, "stacked", "the Hopper kernel needs such a GPU, half precision"),
        (1, torch.bfloat16, "stacked", "fewer than 64 query tokens"),
    ],
)
def test_of_soft_scores(n_queries: int, dtype: torch.dtype, kernel: str, reason: str, kernels: None) -> None:
    tensors = [torch.zeros(n, 32, 128, dtype=dtype, requires_grad=True) for n in (n_queries, 6)]
    explanation = explain(*tensors, soft=True)
    assert explanation.backward is None
    for words in (f"forward: the {kernel} kernel, because {reason}", "tile: rows", "gradients: probabilities computed"):
        assert words in str(explanation)
    assert explain(*(tensor.detach() for tensor in tensors), soft=True).gradients is None
    large = torch.zeros(4096, 32, 128, dtype=dtype, requires_grad=True)
    assert "probabilities computed by each of both" in str(explain(large, large, soft=True))
    with pytest.raises(TypeError, match="documents must be a torch.Tensor where soft is True, got list"):
        explain(tensors[0], [tensors[1]], soft=True)


def test_of_packed_tokens(kernels: None) -> None:
    documents, bounds = pack([torch.zeros(5000, 128).bfloat16(), torch.zeros(3, 128).bfloat16()])
    queries, queries_bounds = pack([torch.zeros(32, 128).bfloat16()] * 40)
    boundaries = {"queries_cu_seqlens": queries_bounds, "documents_cu_seqlens": bounds}
    explanation = explain(queries, documents, **boundaries)
    assert explanation.forward is not None
    assert explanation.forward.in_segments
    assert "in segments" in str(explanation)
    candidates = torch.tensor([0, *[2] * 40])
    explanation = explain(queries, documents, **boundaries, candidates_cu_seqlens=candidates)
    assert explanation.forward is not None
    assert explanation.forward.kernel == "single"


@pytest.mark.parametrize(("n_queries", "kernel"), [(1, "single"), (40, "hopper")])
def test_of_lists(n_queries: int, kernel: str, kernels: None) -> None:
    """The plan is that of packed documents, and reports where they are read."""
    queries = [torch.zeros(32, 128).bfloat16()] * n_queries
    documents = [torch.zeros(length, 128).bfloat16() for length in (180, 0, 7)]
    explanation = explain(queries, documents)
    (q, q_bounds), (d, d_bounds) = pack(queries), pack(documents)
    packed = explain(q, d, queries_cu_seqlens=q_bounds, documents_cu_seqlens=d_bounds)
    assert explanation.forward is not None
    assert packed.forward is not None
    assert explanation.forward.kernel == kernel
    for field in ("tile", "splits", "in_segments", "row_blocks", "n_runs"):
        assert getattr(explanation.forward, field) == getattr(packed.forward, field)
    assert "list of documents: read where they lie" in str(explanation)
    assert "list of documents" not in str(packed)
    # The compiled kernel counts addresses in units of 16 bytes.
    assert explanation.forward.config.offset_unit == 8
    assert packed.forward.config.offset_unit == 0


def test_of_lists_that_are_packed(kernels: None) -> None:
    queries, documents = torch.zeros(3, 32, 128), [torch.zeros(length, 128) for length in (180, 7)]
    assert "list of documents: packed, because the norms" in str(explain(queries, documents, normalize=True))
    learned = explain(queries.requires_grad_(), documents)
    assert "list of documents: packed, because a gradient is asked for" in str(learned)
    assert learned.backward is not None
    with torch.no_grad():
        assert explain(queries, documents).lists == "read where they lie"
        with torch.autocast("cpu", torch.bfloat16):
            assert explain(queries, documents).lists == "packed, because autocast casts them"


def test_of_lists_on_a_cpu() -> None:
    explanation = explain([torch.zeros(2, 8)], [torch.zeros(3, 8), torch.zeros(1, 8)])
    assert explanation.implementation == "blocked"
    assert explanation.lists == "packed, because no kernel serves the call"
    candidates = torch.tensor([0, 2])
    assert explain([torch.zeros(2, 8)], [torch.zeros(3, 8)] * 2, candidates_cu_seqlens=candidates).forward is None
    with pytest.raises(ValueError, match="documents_mask must be None where documents are a list, got Tensor"):
        explain(torch.zeros(1, 2, 8), [torch.zeros(3, 8)], documents_mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match="max_query_length must be None where documents are a list, got int"):
        explain(torch.zeros(1, 2, 8), [torch.zeros(3, 8)], max_query_length=5)


def test_of_quantized_documents(kernels: None) -> None:
    queries, documents = torch.zeros(64, 32, 128).bfloat16(), torch.zeros(40, 180, 128)
    for precision in ("int8", "uint8", "fp8"):
        for quantize_queries in (True, False):
            explanation = explain(queries, quantize(documents, precision), quantize_queries=quantize_queries)
            expected = "hopper kernel, because documents are quantized, on a Hopper GPU; tile: rows 256, columns 128"
            if not quantize_queries:
                expected = "stacked kernel, because documents are quantized; the Hopper kernel multiplies 8 bits by 8"
            assert expected in str(explanation)
            assert explanation.backward is None
    with pytest.raises(RuntimeError, match="explain of quantized documents has no gradient"):
        explain(queries.requires_grad_(), quantize(documents))


def test_fp8_needs_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    documents, queries = quantize(torch.zeros(2, 3, 8), "fp8"), torch.zeros(2, 3, 8)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    reason = tables.kernels_run_on.__wrapped__(torch.device("cuda"), documents.values.dtype)
    assert reason == "the Triton kernels need compute capability 8.9 for fp8, and cuda has 8.6"
    assert tables.kernels_run_on.__wrapped__(torch.device("cuda"), torch.int8) is None
    with pytest.raises(ValueError, match='implementation="triton" cannot serve this input'):
        explain(queries.double(), documents, implementation="triton")


def test_bad_input_is_refused_as_by_the_call() -> None:
    with pytest.raises(ValueError, match="embedding size of queries, 8, got 7"):
        explain(torch.zeros(2, 3, 8), torch.zeros(4, 5, 7))
    with pytest.raises(TypeError, match=r"queries must be a torch.Tensor"):
        explain([1.0], torch.zeros(4, 5, 7))


def test_what_no_call_is_differentiated_by_is_refused() -> None:
    """The explained call refuses it, too."""
    with pytest.raises(RuntimeError, match="explain is differentiated by torch.autograd.grad and Tensor.backward only"):
        torch.func.grad(lambda queries: explain(queries, torch.ones(2, 3, 4)) and queries.sum())(torch.ones(1, 2, 4))
