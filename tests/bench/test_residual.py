from __future__ import annotations

import pytest
import torch

from suites import residual
from tests.ops.residual_cases import residual_codes

CPU = torch.device("cpu")


@pytest.mark.parametrize("nbits", [2, 4])
def test_indices_in_the_other_order_are_those_from_the_lowest_bits(nbits):
    documents = residual_codes([9], 8, nbits)
    found = residual.in_other_order(documents.residuals, nbits)
    assert found.dtype == torch.uint8
    lowest_first = torch.stack([found >> place & (1 << nbits) - 1 for place in range(0, 8, nbits)], dim=-1).flatten(1)
    sums = documents.centroids[documents.codes] + documents.bucket_weights[lowest_first.long()]
    expected = torch.nn.functional.normalize(sums.float(), dim=-1)
    torch.testing.assert_close(documents.decompress(), expected)
    assert torch.equal(residual.in_other_order(found, nbits), documents.residuals)
