"""Loss classes for sentence-transformers, and the suite `hosts`, on a GPU, against the host's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pylate_flash.bench import suite
from pylate_flash.bench.protocol import Ceilings, Rounds
from pylate_flash.hosts import HOSTS
from suites import hosts
from tests.hosts.conftest import texts, tiny_encoder_path  # noqa: F401  (fixtures)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not HOSTS["sentence-transformers"].is_there(), reason="sentence-transformers 6 is not installed"
    ),
]

IN_BATCH = "MultiVectorMultipleNegativesRankingLoss"
KL, MARGINS = "MultiVectorDistillKLDivLoss", "MultiVectorMarginMSELoss"
CASES = {
    "in-batch": (IN_BATCH, {"scale": 0.5}, 2, 0),
    "in-batch, fused": (IN_BATCH, {"fuse_projection": True}, 2, 0),
    "cached": (f"Cached{IN_BATCH}", {"mini_batch_size": 4}, 2, 0),
    "cached, by tokens": (f"Cached{IN_BATCH}", {"mini_batch_num_tokens": 64}, 2, 0),
    "cached, fused": (f"Cached{IN_BATCH}", {"mini_batch_num_tokens": 64, "fuse_projection": True}, 2, 0),
    "distillation": (KL, {"temperature": 0.7}, 3, 3),
    "distillation, fused": (KL, {"fuse_projection": True}, 3, 3),
    "margins": (MARGINS, {}, 3, 2),
    "margins, fused": (MARGINS, {"fuse_projection": True}, 3, 3),
}
BEYOND = ("mini_batch_num_tokens", "fuse_projection")


@pytest.fixture
def encoder(tiny_encoder_path: str) -> Any:  # noqa: F811
    from sentence_transformers import MultiVectorEncoder

    return MultiVectorEncoder(tiny_encoder_path, device="cuda")


def batch(model: Any, texts: Any, count: int) -> list[dict[str, Any]]:  # noqa: F811
    columns = [model.preprocess(texts(10 * count + i, 11, 4 + 5 * i)) for i in range(count + 1)]
    return [{k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in column.items()} for column in columns]


def value_and_gradients(loss: Any, model: Any, columns: list, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    value = loss([dict(column) for column in columns], labels)
    value.backward()
    return value.detach().double(), torch.cat(
        [p.grad.double().flatten() for p in model.parameters() if p.grad is not None]
    )


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_the_hosts(case: str, encoder: Any, texts: Any) -> None:  # noqa: F811
    """Against the host's in float64; under autocast, half precision has the same direction."""
    from sentence_transformers.multi_vector_encoder import losses as host

    from pylate_flash.hosts.sentence_transformers import losses

    name, arguments, count, n_labels = CASES[case]
    labels = torch.randn(11, n_labels, generator=torch.Generator().manual_seed(0)).cuda() if n_labels else None
    columns = batch(encoder, texts, count)
    loss = getattr(losses, name)(encoder, **arguments)
    actual = value_and_gradients(loss, encoder, columns, labels)
    with torch.autocast("cuda", torch.bfloat16):
        rough = value_and_gradients(loss, encoder, columns, labels)
    encoder.double()
    own = {key: value for key, value in arguments.items() if key not in BEYOND}
    expected = value_and_gradients(getattr(host, name)(encoder, **own), encoder, columns, labels)
    assert (actual[0] - expected[0]).abs() <= 1e-5 * expected[0].abs()
    assert (actual[1] - expected[1]).norm() <= 5e-5 * expected[1].norm()
    assert (rough[0] - expected[0]).abs() <= 0.1 * expected[0].abs()
    assert torch.cosine_similarity(rough[1], expected[1], dim=0) > 0.9


def test_the_suite_tells_two_times() -> None:
    rows = [replace(row, Nq=min(row.Nq, 40), Nd=40, d=64) for row in hosts.ROWS]
    result = suite.run(
        replace(hosts.suite(), rows=rows),
        torch.device("cuda", torch.cuda.current_device()),
        torch.bfloat16,
        Rounds(warmup=1, repetitions=2),
        ceilings=Ceilings(1e15, 1e12),
        quick=True,
    )
    for row in result["rows"]:
        for name, state in row["systems"].items():
            assert state["status"] == "ok", (row["name"], name, state)
            assert state["device_ms"] > 0
