"""Every tensor argument must be dense and fit the other arguments; otherwise one error names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pylate_flash import (
    QuantizedEmbeddings,
    ResidualCodec,
    ResidualCodes,
    chamfer,
    chamfer_varlen,
    explain,
    maxsim,
    maxsim_cross_entropy,
    maxsim_from_hidden,
    maxsim_kl_divergence,
    maxsim_margin_mse,
    maxsim_pairwise,
    maxsim_ragged,
    maxsim_ragged_pairwise,
    maxsim_residual,
    maxsim_sparse_queries,
    maxsim_varlen,
    maxsim_varlen_pairwise,
    pack,
    quantize,
    soft_maxsim,
    soft_maxsim_varlen,
    train_residual_codec,
    unpack,
    xtr_scores,
)
from tests.ops.operations import operations
from tests.ops.residual_cases import residual_codes

Q, D, WEIGHT, BIAS, TWO = torch.ones(2, 3, 8), torch.ones(3, 5, 8), torch.ones(8, 8), torch.ones(8), torch.tensor(2.0)
ROWS, OTHERS = Q.flatten(0, 1), D.flatten(0, 1)
PADDED = {"queries": Q, "documents": D, "queries_mask": torch.ones(2, 3), "documents_mask": torch.ones(3, 5)}
BOUNDS = {"queries_cu_seqlens": torch.tensor([0, 3, 6]), "documents_cu_seqlens": torch.tensor([0, 5, 15])}
PACKED = {"queries": ROWS, "documents": OTHERS, **BOUNDS}
LAYER = {"weight": WEIGHT, "bias": BIAS}
OWNED = {"candidates_cu_seqlens": torch.tensor([0, 1, 2])}
CODES = residual_codes([5, 0, 3], 8, 4)
FIELDS = {name: getattr(CODES, name) for name in ("codes", "residuals", "centroids", "bucket_weights", "cu_seqlens")}
CODEC = {"centroids": torch.eye(8), "bucket_cutoffs": torch.zeros(3), "bucket_weights": torch.zeros(4)}
TEACHER = {"teacher_scores": torch.ones(2, 3)}
QUANTIZED = quantize(D, "uint8")
VALUES = {name: getattr(QUANTIZED, name) for name in ("values", "scales", "offsets")}

# A function, and all tensors that it takes, by argument name.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Tensor]]] = {
    "maxsim": (maxsim, PADDED),
    "pairs": (maxsim_pairwise, {**PADDED, "queries": D, "queries_mask": torch.ones(3, 5)}),
    "varlen": (maxsim_varlen, {**PACKED, **OWNED}),
    "varlen pairs": (maxsim_varlen_pairwise, PACKED),
    "ragged": (
        lambda queries, documents, **kwargs: maxsim_ragged([Q[0], queries], [D[0], documents], **kwargs),
        {"queries": Q[1], "documents": D[1], **OWNED},
    ),
    "ragged pairs": (
        lambda queries, documents: maxsim_ragged_pairwise([queries, Q[0]], [documents, D[0]]),
        {"queries": Q[1], "documents": D[1]},
    ),
    "soft": (soft_maxsim, {**PADDED, "beta": TWO}),
    "soft varlen": (soft_maxsim_varlen, {**PACKED, **OWNED, "beta": TWO}),
    "sparse": (maxsim_sparse_queries, {**PADDED, "query_tokens": torch.zeros(3, 1, dtype=torch.int64)}),
    "XTR": (xtr_scores, PADDED),
    "hidden": (
        lambda documents, **kwargs: maxsim_from_hidden(hidden=documents, **kwargs),
        {**PADDED, **LAYER, "queries_weight": WEIGHT, "queries_bias": BIAS},
    ),
    "packed hidden": (
        lambda documents, **kwargs: maxsim_from_hidden(hidden=documents, **kwargs),
        {**PACKED, **OWNED, **LAYER},
    ),
    "residual": (
        lambda **kwargs: maxsim_residual(documents=CODES, **kwargs),
        {"queries": Q, "queries_mask": torch.ones(2, 3), "candidates": torch.zeros(2, 1, dtype=torch.int64)},
    ),
    "cross entropy": (
        maxsim_cross_entropy,
        {**PADDED, "labels": torch.tensor([0, 1]), "exclude": torch.zeros(2, 3, dtype=torch.bool), "temperature": TWO},
    ),
    "packed cross entropy": (
        maxsim_cross_entropy,
        {"queries": Q, "documents": OTHERS, "documents_cu_seqlens": BOUNDS["documents_cu_seqlens"]},
    ),
    "divergence": (maxsim_kl_divergence, {**PADDED, **TEACHER, "temperature": TWO}),
    "margin MSE": (maxsim_margin_mse, {**PADDED, **TEACHER}),
    "Chamfer": (chamfer, {"x": D, "y": D, "x_mask": torch.ones(3, 5), "y_mask": torch.ones(3, 5)}),
    "Chamfer varlen": (
        chamfer_varlen,
        {"x": ROWS, "y": OTHERS, **{f"{a}_cu_seqlens": b for a, b in zip("xy", BOUNDS.values(), strict=True)}},
    ),
    "explain": (explain, PADDED),
    "pack": (lambda sequences: pack([sequences, OTHERS]), {"sequences": ROWS}),
    "unpack": (unpack, {"values": ROWS, "cu_seqlens": BOUNDS["queries_cu_seqlens"]}),
    "quantize": (quantize, {"embeddings": ROWS, "cu_seqlens": BOUNDS["queries_cu_seqlens"]}),
    "quantized": (QuantizedEmbeddings, VALUES),
    "codes": (ResidualCodes, FIELDS),
    "codec": (ResidualCodec, CODEC),
    "compress": (ResidualCodec(**CODEC).compress, {"embeddings": ROWS, "cu_seqlens": BOUNDS["queries_cu_seqlens"]}),
    "training of a codec": (train_residual_codec, {"embeddings": ROWS}),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": Tensor.to_sparse,
    "CSR": lambda tensor: tensor.flatten(0, -2).to_sparse_csr(),
    "nested": lambda tensor: torch.nested.nested_tensor(list(tensor)),
    "jagged": lambda tensor: torch.nested.nested_tensor(list(tensor), layout=torch.jagged),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested tensors")
def test_tensors_are_dense(call: str, layout: str) -> None:
    function, tensors = CALLS[call]
    for name, tensor in tensors.items():
        if tensor.dim() < {"CSR": 2, "nested": 1, "jagged": 2}.get(layout, 0):
            continue
        named = "hidden" if "hidden" in call and name == "documents" else name
        with pytest.raises(TypeError, match=rf"{named}(\[\d\])? must be a dense torch.Tensor.*, got (one of|a nested)"):
            function(**{**tensors, name: LAYOUTS[layout](tensor)})


# A change of a tensor, and its error, which names that tensor, or another one that does not fit it.
ITSELF, ANY = r"{name}(\[\d\])? ", "(^| )[a-z_]+ "
CHANGES: dict[str, tuple[Callable[[Tensor], object], type[Exception], str]] = {
    "no tensor": (lambda tensor: [1.0], TypeError, ITSELF + "must be (a|a number or a floating) .*, got list"),
    "more dimensions": (lambda tensor: tensor[None], ValueError, ITSELF + r"(must have|of) shape .*, got \[1, "),
    "8 bits": (lambda tensor: tensor.to(torch.float8_e4m3fn), TypeError, ITSELF + "must (be|have) .*float8_e4m3fn"),
    "uint32": (lambda tensor: tensor.to(torch.uint32), TypeError, ITSELF + "must (be|have) .*uint32"),
    "complex": (lambda tensor: tensor.to(torch.complex64), TypeError, ITSELF + "must (be|have) .*complex64"),
    "half": (Tensor.half, TypeError, ANY + "must have (one|the) dtype.*float16"),
    "shorter": (lambda tensor: tensor[..., :-1], ValueError, ANY + "must (have .*(shape|size|entries)|rise from 0 to)"),
    "elsewhere": (lambda tensor: tensor.to("meta"), ValueError, ANY + "must (.* on|hold values, .* on) .*(meta|cpu)"),
}
EMBEDDINGS = {"queries", "documents", "weight", "bias", "queries_weight", "queries_bias", "x", "y"}
# Tensors that determine what the others must be, and tensors that may be anything.
FREE = {
    ("packed hidden", "queries"), ("explain", "documents"), ("unpack", "values"), ("quantize", "embeddings"),
    ("quantized", "values"), ("codec", "centroids"),
}  # fmt: skip


def is_wrong(change: str, call: str, name: str, tensor: Tensor) -> bool:
    if change == "half":
        return name in EMBEDDINGS and call != "residual"
    if change == "shorter" and name in ("query_tokens", "candidates"):
        return False
    return tensor.dim() > 0 or change not in ("more dimensions", "shorter")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("call", CALLS)
def test_one_tensor_that_is_wrong_is_one_error(call: str, change: str) -> None:
    (function, tensors), (changed, error, message) = CALLS[call], CHANGES[change]
    for name, tensor in tensors.items():
        if (call, name) not in FREE and is_wrong(change, call, name, tensor):
            named = "hidden" if "hidden" in call and name == "documents" else name
            with pytest.raises(error, match=message.replace("{name}", named)):
                function(**{**tensors, name: changed(tensor)})


@pytest.mark.parametrize("name", operations())
def test_meta_tensors_give_shapes(name: str) -> None:
    results = []
    for device in ("meta", "cpu"):
        queries = torch.ones(2, 3, 4, device=device, requires_grad=True)
        scores = operations(device)[name](queries)
        scores.sum().backward()
        assert scores.device.type == queries.grad.device.type == device
        results.append((scores.shape, scores.dtype, queries.grad.shape))
    assert results[0] == results[1]
