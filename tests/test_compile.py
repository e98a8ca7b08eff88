"""PyLate's losses under `torch.compile` with the default backend."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config

from pylate_flash import losses
from tests.encoders import WordVectors


@pytest.mark.filterwarnings("ignore")
def test_contrastive_compiles_by_default() -> None:
    torch.manual_seed(0)
    model = WordVectors(torch.randn(20, 8).tolist()).float()
    model.do_query_expansion = False
    loss = losses.Contrastive(model)
    # No repeated word in a text: which of two equal tokens wins the max depends on the last bit of a product.
    columns = [
        {"input_ids": torch.rand(3, 20).argsort(dim=1)[:, :length], "attention_mask": torch.ones(3, length).long()}
        for length in (4, 6, 6)
    ]
    columns[1]["attention_mask"][:, 4:] = 0
    values, gradients = [], []
    # Scalar code: probing the compiler's vector instruction sets takes Inductor longer than everything else.
    with torch._inductor.config.patch({"cpp.vec_isa_ok": False}):
        for function in (loss, torch.compile(loss)):
            value = function(columns)
            values.append(value.detach())
            gradients.append(torch.autograd.grad(value, loss.model.vectors))
    # Sums of 8, 4 and 6 terms, in different orders.
    torch.testing.assert_close(*values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
