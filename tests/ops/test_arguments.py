"""Wrong arguments raise one error that names the argument; right arguments are not refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from pylate_flash import (
    QuantizedEmbeddings,
    ResidualCodec,
    chamfer,
    chamfer_varlen,
    explain,
    maxsim,
    maxsim_cross_entropy,
    maxsim_kl_divergence,
    maxsim_margin_mse,
    maxsim_pairwise,
    maxsim_ragged,
    maxsim_ragged_pairwise,
    maxsim_sparse_queries,
    maxsim_varlen,
    pack,
    quantize,
    soft_maxsim,
    train_residual_codec,
    xtr_scores,
)
from tests.ops.cases import mistakes, wrong
from tests.ops.operations import calls
from tests.ops.residual_cases import residual_codes

QUERIES, DOCUMENTS, PAIRS = torch.ones(1, 2, 8), torch.ones(2, 3, 8), torch.ones(1, 3, 8)
TOKENS, BOUNDS = torch.ones(5, 8), torch.tensor([0, 2, 5])
LIST = [torch.ones(2, 8), torch.ones(3, 8)]
CODES = residual_codes([5, 0, 3], 8, 4)
CHOSEN = torch.zeros(2, 1, dtype=torch.int64)
TEACHER = torch.ones(1, 2)
CUTOFFS, WEIGHTS = torch.tensor([-0.1, 0.0, 0.1]), torch.tensor([-0.2, 0.0, 0.0, 0.2])
HUGE = 10**30


def packed(operation: Callable[..., Tensor], **options) -> Tensor:
    return operation(TOKENS, TOKENS, BOUNDS, BOUNDS, **options)


# Every operation, as a call that is valid otherwise.
OPERATIONS = {name: partial(call.function, *call.tensors, **call.options) for name, call in calls().items()}
OPERATIONS["quantized"] = partial(maxsim, QUERIES, quantize(DOCUMENTS))


@pytest.fixture(params=OPERATIONS)
def operation(request) -> Callable[..., Tensor]:
    return OPERATIONS[request.param]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (None, TypeError, "empty_score must be a number, got NoneType"),
        ("x", TypeError, "empty_score must be a number, got str"),
        (1j, TypeError, "empty_score must be a number, got complex"),
        (torch.ones(2), TypeError, "empty_score must be a number, got Tensor"),
        (
            10**5000,
            ValueError,
            "empty_score must be infinite, or a number that float32 .*, got an integer of 16610 bits",
        ),
        (-1e39, ValueError, "empty_score must be infinite, or a number that float32 can hold, got -1e\\+39"),
    ],
    ids=["None", "str", "complex", "tensor", "huge", "float64"],
)
def test_the_empty_score_is_a_number(operation, value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        operation(empty_score=value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU serves them")
def test_an_implementation_asked_for_by_name_is_never_replaced(operation) -> None:
    with pytest.raises(ValueError, match=r'implementation="triton" cannot serve this input: .*CUDA'):
        operation(implementation="triton")


SEVERAL = torch.tensor([True, False]), np.array([True, False])
WITH_MASKING = (
    "in-batch", "quantized", "pairs", "soft", "sparse", "from hidden states", "cross entropy", "divergence",
)  # fmt: skip
WITHOUT_NORMALIZE = ("XTR", "residual", "Chamfer", "packed Chamfer")
FLAGS = [
    *(("normalize", call) for name, call in OPERATIONS.items() if name not in WITHOUT_NORMALIZE),
    ("normalize", lambda **options: maxsim_margin_mse(QUERIES, DOCUMENTS, TEACHER, **options)),
    ("normalize", lambda **options: explain(QUERIES, DOCUMENTS, **options)),
    ("soft", lambda **options: explain(QUERIES, DOCUMENTS, **options)),
    ("symmetric", OPERATIONS["cross entropy"]),
    ("with_statistics", OPERATIONS["cross entropy"]),
    ("normalize_scores", OPERATIONS["divergence"]),
    *(("quantize_queries", OPERATIONS[name]) for name in ("quantized", "in-batch", "packed")),
    ("quantize_queries", lambda **options: explain(QUERIES, quantize(DOCUMENTS), **options)),
]


@pytest.mark.parametrize("value", [*SEVERAL, torch.tensor(True), 1, "no", None], ids=repr)
@pytest.mark.parametrize(("flag", "call"), FLAGS)
def test_flags_are_true_or_false(flag: str, call: Callable[..., object], value: object) -> None:
    with pytest.raises(TypeError, match=f"{flag} must be True or False, got {type(value).__name__}"):
        call(**{flag: value})


@pytest.mark.parametrize(("flag", "call"), FLAGS)
def test_flags_may_be_numpys(flag: str, call: Callable[..., object]) -> None:
    call(**{flag: np.False_})


@pytest.mark.parametrize("value", [*SEVERAL, ["sum"], "fast", None], ids=repr)
@pytest.mark.parametrize(
    ("choice", "call"),
    [
        *(("implementation", call) for call in OPERATIONS.values()),
        *(("reduction", call) for name, call in OPERATIONS.items() if name != "XTR"),
        *(("masking", OPERATIONS[name]) for name in WITH_MASKING),
        ("metric", OPERATIONS["Chamfer"]),
        ("normalizer", OPERATIONS["XTR"]),
        ("loss_reduction", OPERATIONS["cross entropy"]),
        ("precision", lambda precision: quantize(DOCUMENTS, precision)),
    ],
)
def test_choices_are_names(choice: str, call: Callable[..., object], value: object) -> None:
    with pytest.raises(ValueError, match=f"{choice} must be one of '"):
        call(**{choice: value})


@pytest.mark.parametrize("value", [2, 2**70, np.float32(2.0), np.int64(2), True], ids=repr)
def test_any_real_number_is_an_empty_score(value: object) -> None:
    expected = torch.full((1, 2), float(value))
    assert torch.equal(maxsim(QUERIES, DOCUMENTS, documents_mask=torch.zeros(2, 3), empty_score=value), expected)
    masked = {"documents_mask": torch.zeros(2, 3), "empty_score": value}
    for reduction in ("sum", "mean"):
        assert torch.equal(maxsim_sparse_queries(QUERIES, DOCUMENTS, CHOSEN, **masked, reduction=reduction), expected)
    ragged = maxsim_ragged_pairwise([torch.ones(2, 8)], [torch.ones(0, 8)], empty_score=value)
    assert torch.equal(ragged, expected[0, :1])


def lengths(name: str, value: object) -> Callable[[], Tensor]:
    operation = chamfer_varlen if name in ("max_x_length", "max_y_length") else maxsim_varlen
    return lambda: packed(operation, **{name: value})


def ragged_pairs(of_queries: object, of_documents: object) -> Callable[[], Tensor]:
    return lambda: maxsim_ragged_pairwise([of_queries], [of_documents])


ROWS = np.ones((2, 8), dtype=np.float32)
ROWS_TURNED, ROWS_BIG = ROWS[::-1], ROWS.astype(">f4")
EMPTY = torch.ones(2, 0)


test_what_is_wrong_is_named = mistakes(
    # Padded embeddings.
    wrong(ValueError, "embedding size of at least 1", maxsim, QUERIES[..., :0], DOCUMENTS[..., :0]),
    wrong(ValueError, "one row of candidates per query", maxsim, DOCUMENTS, DOCUMENTS.unsqueeze(0)),
    wrong(ValueError, "one document per query, 1, got 2", maxsim_pairwise, QUERIES, DOCUMENTS),
    # Lists of pairs.
    (ragged_pairs(EMPTY, EMPTY), ValueError, "documents must have an embedding size of at least 1"),
    wrong(ValueError, r"queries must have shape \[N, Lq, d\], got \[\]",
          maxsim_ragged_pairwise, torch.tensor(1.0), LIST),
    # None for a required tensor, where other tensors may be None.
    *(
        wrong(TypeError, f"{name} must be a torch.Tensor, got NoneType", loss, *tensors, *teacher)
        for name, tensors in (("queries", (None, DOCUMENTS)), ("documents", (QUERIES, None)))
        for loss, *teacher in ((maxsim_cross_entropy,), (maxsim_kl_divergence, TEACHER), (maxsim_margin_mse, TEACHER))
    ),
    # Lengths.
    *(
        (lengths(name, value), error, f"{name} must be {expected}, got {got}")
        for name in ("max_query_length", "max_document_length", "max_x_length", "max_y_length")
        for value, error, expected, got in (
            ("5", TypeError, "an integer", "str"),
            (5.0, TypeError, "an integer", "float"),
            (True, TypeError, "an integer", "bool"),
            (-1, ValueError, "at least 0", "-1"),
            (2**63, ValueError, r"less than 2\*\*63", str(2**63)),
        )
    ),
    # Scratch.
    *(wrong(error, f"max_scratch_bytes must be {expected}, got {got}",
            maxsim_cross_entropy, QUERIES, DOCUMENTS, max_scratch_bytes=value)
      for value, error, expected, got in (
          ("x", TypeError, "an integer", "str"),
          (1.5, TypeError, "an integer", "float"),
          (HUGE, ValueError, r"less than 2\*\*63", str(HUGE)),
      )),
    # Beta, which is rounded.
    *(wrong(ValueError, rf"beta must be above 0 and finite, got {re.escape(got)}.* \(it is .* in float32\)",
            soft_maxsim, QUERIES, DOCUMENTS, beta)
      for beta, got in (
          (1e39, "1e+39"),
          (1e-46, "1e-46"),
          (2.0**-150, "7.0"),
          (10**400, "1000"),
          (torch.tensor(1e39, dtype=torch.float64), "1e+39"),
          (torch.tensor(1e-46, dtype=torch.float64), "1e-46"),
      )),
    (lambda: soft_maxsim(QUERIES, DOCUMENTS, torch.nested.nested_tensor([torch.ones(2)])), TypeError,
     "beta must be a dense torch.Tensor"),
    # Codes and codecs.
    wrong(ValueError, re.escape("centroids must be at least one, got shape [0, 8]"),
          ResidualCodec, torch.ones(0, 8), CUTOFFS, WEIGHTS),
    wrong(TypeError, "num_centroids must be an integer, got str", train_residual_codec, TOKENS, "x"),
    wrong(TypeError, "num_centroids must be an integer, got float", train_residual_codec, TOKENS, 2.5),
    wrong(TypeError, "nbits must be an integer, got float", train_residual_codec, TOKENS, 2, 4.0),
    wrong(TypeError, "dtype must be torch.float16, .*, got", train_residual_codec, TOKENS, 2, 4, dtype=np.ones(2)),
    # Lists to pack.
    wrong(TypeError, r"sequences\[0\] must be a torch.Tensor or a numpy.ndarray, got None", pack, [None]),
    wrong(TypeError, "sequences must be a list of tensors or arrays .*, got str", pack, "abc"),
    wrong(TypeError, "sequences must be a list of tensors or arrays .*, got int", pack, 5),
    wrong(TypeError, "sequences must be a list of tensors .*, got generator", pack, (x for x in LIST)),
    *(wrong(error, r"sequences\[1\] must be an array that torch can", pack, [ROWS, rows])
      for rows, error in ((ROWS_TURNED, ValueError), (ROWS_BIG, ValueError), (np.array([["a"]]), TypeError))),
    *(wrong(ValueError, re.escape("documents[1] must be an array that torch can take as it is: "),
            maxsim_ragged, LIST, [ROWS, rows])
      for rows in (ROWS_TURNED, ROWS_BIG)),
    # Boundaries that are stored with quantized embeddings.
    *(wrong(ValueError, f"cu_seqlens must rise from 0 to the number of values, 5, got {got}",
            quantize, TOKENS, cu_seqlens=torch.tensor(bounds))
      for bounds, got in (([0, 99, -3], "0 to -3, falling"), ([0, 4], "0 to 4"), ([1, 5], "1 to 5"))),
    wrong(ValueError, "cu_seqlens must be on the device of values, meta, got cpu",
          QuantizedEmbeddings, TOKENS.to("meta", torch.int8), TOKENS[:, 0].to("meta"), None, BOUNDS),
    # Indices of nothing, and the mask of sets without queries.
    wrong(ValueError, "query_tokens must be -1, as there are no positions, got 0 to 0",
          maxsim_sparse_queries, QUERIES[:, :0], DOCUMENTS, torch.zeros(len(QUERIES), len(DOCUMENTS), 1).long()),
    wrong(ValueError, "y_mask must hold only 0 .* got 0.5: a mask is not added to similarities$",
          chamfer, PAIRS, PAIRS, y_mask=torch.full(PAIRS.shape[:2], 0.5)),
    wrong(TypeError, "documents must be a torch.Tensor, QuantizedEmbeddings, or a list of .*, got NoneType",
          explain, QUERIES, None),
    # Arguments of packed documents only.
    *(wrong(ValueError, f"{name} must be None where (queries|documents) are padded.*, got {got}",
            explain, QUERIES, DOCUMENTS, **kwargs)
      for kwargs, name, got in (
          ({"queries_cu_seqlens": BOUNDS}, "queries_cu_seqlens", "Tensor"),
          ({"candidates_cu_seqlens": BOUNDS}, "candidates_cu_seqlens", "Tensor"),
          ({"max_query_length": 3}, "max_query_length", "int"),
          ({"max_document_length": -3}, "max_document_length", "int"),
      )),
    wrong(ValueError, "max_document_length must be None where documents are padded",
          explain, QUERIES, quantize(DOCUMENTS), max_document_length=3),
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("queries", maxsim),
        ("queries", maxsim_pairwise),
        ("queries", lambda x, y: soft_maxsim(x, y, 1.0)),
        ("documents", lambda x, y: maxsim_ragged([x[0]], [y[0]])),
        ("queries", maxsim_cross_entropy),
        ("x", lambda x, y: chamfer(x, y, metric="inner_product")),
    ],
)
def test_autocast_makes_no_embeddings_of_other_types(name: str, call: Callable, dtype: torch.dtype) -> None:
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(TypeError, match=f"{name} must be float16, bfloat16, float32 or float64, got {dtype}"),
    ):
        call(PAIRS.to(dtype), PAIRS.to(dtype))


@pytest.mark.parametrize("beta", [2.0**-149, torch.finfo(torch.float32).max])
def test_a_beta_that_float32_holds_is_taken(beta: float) -> None:
    soft_maxsim(QUERIES, DOCUMENTS, beta)
    # float64 holds what float32 does not.
    soft_maxsim(QUERIES.double(), DOCUMENTS.double(), 1e39)


@pytest.mark.parametrize("k", [2**63, HUGE])
def test_more_retrieved_than_an_operator_can_be_told_are_all(k: int) -> None:
    queries, documents = torch.randn(2, 3, 8), torch.randn(4, 5, 8)
    assert torch.equal(xtr_scores(queries, documents, k=k), xtr_scores(queries, documents, k=20))


def test_pairs_of_lists_are_scored_on_their_device_whatever_the_default_one() -> None:
    documents = [torch.ones(0, 8), torch.ones(3, 8)]
    with torch.device("meta"):
        result = maxsim_ragged_pairwise(LIST, documents, empty_score=-1.0)
        again = maxsim_ragged_pairwise(LIST, documents, empty_score=-1.0, normalize=True)
    assert result.tolist() == [-1.0, 24.0]
    torch.testing.assert_close(again, torch.tensor([-1.0, 3.0]))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_codes_are_decompressed_to_8_bits_too(dtype: torch.dtype) -> None:
    assert torch.equal(CODES.decompress(dtype).float(), CODES.decompress().to(dtype).float())


@pytest.mark.parametrize("loss_reduction", ["mean", "none"])
def test_no_tangent_of_a_temperature_is_dropped(loss_reduction: str) -> None:
    with torch.autograd.forward_ad.dual_level():
        temperature = torch.autograd.forward_ad.make_dual(torch.tensor(1.0), torch.tensor(1.0))
        for loss in (
            lambda **options: maxsim_cross_entropy(QUERIES, DOCUMENTS, **options),
            lambda **options: maxsim_kl_divergence(QUERIES, DOCUMENTS, TEACHER, **options),
        ):
            with pytest.raises(RuntimeError, match="takes no part in torch.func.grad"):
                loss(temperature=temperature, loss_reduction=loss_reduction)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("learned", ["queries", "queries and documents"])
@pytest.mark.filterwarnings("ignore")
def test_the_gradient_of_a_vmap_over_chosen_query_tokens(compiled: bool, learned: str) -> None:
    several = torch.randn(3, 1, 2, 4, requires_grad=True)
    documents = torch.randn(2, 3, 4, requires_grad=learned != "queries")
    inputs = several, *[documents] * documents.requires_grad
    chosen = torch.tensor([[0, 1], [1, -1]])

    def score(queries: Tensor) -> Tensor:
        return maxsim_sparse_queries(queries, documents, chosen)

    scores = torch.func.vmap(score)
    scores = torch.compile(scores, backend="aot_eager") if compiled else scores
    weights = torch.randn(3, 1, 2)
    actual = torch.autograd.grad((scores(several) * weights).sum(), inputs)
    one_by_one = torch.stack(list(map(score, several)))
    expected = torch.autograd.grad((one_by_one * weights).sum(), inputs)
    torch.testing.assert_close(actual, expected)


def test_boundaries_that_do_not_fit_are_not_loaded(tmp_path) -> None:
    quantized = quantize(TOKENS, cu_seqlens=BOUNDS)
    quantized.cu_seqlens[-1] = 4
    quantized.save(tmp_path / "file")
    with pytest.raises(ValueError, match="file holds no quantized embeddings: cu_seqlens must rise from 0 to .* 5"):
        QuantizedEmbeddings.load(tmp_path / "file")


def test_fields_that_share_memory_are_saved(tmp_path) -> None:
    numbers = torch.arange(10.0)
    values = torch.randint(0, 255, (5, 8), dtype=torch.uint8)
    for offsets in (numbers[:5], numbers[5:]):
        QuantizedEmbeddings(values, numbers[:5], offsets).save(tmp_path / "file")
        loaded = QuantizedEmbeddings.load(tmp_path / "file")
        assert torch.equal(loaded.scales, numbers[:5])
        assert torch.equal(loaded.offsets, offsets)
