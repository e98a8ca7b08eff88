"""The kernels against the definitions in float64, on the same, already rounded, inputs that hypothesis draws."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings

from tests.gpu.tools import DTYPES, SIZES, on_gpu
from tests.ops.drawn import OPERATIONS, Call

pytestmark = pytest.mark.gpu

# Limits of drawn cases, by operation. Soft scores, codes and 8 bits have their own bounds and tests.
DRAWN = {
    "in-batch": {"max_batch": 7, "max_length": 200, "sizes": SIZES},
    "pairs": {"max_batch": 7, "max_length": 200, "sizes": SIZES},
    "packed": {"sizes": SIZES},
    "ragged": {"sizes": SIZES},
    "sparse": {"max_length": 90, "max_chosen": 100, "sizes": SIZES},
    "XTR": {"max_length": 100},
    "Chamfer": {"max_length": 200},
}
# Calls with lists have their candidates on the host.
KEPT = {"ragged": ("candidates_cu_seqlens",)}


@pytest.mark.parametrize("name", DRAWN)
def test_scores_and_gradients_equal_the_definition(name: str) -> None:
    @settings(max_examples=60)
    @given(call=OPERATIONS[name].draw(dtypes=DTYPES, **DRAWN[name]))
    def check(call: Call) -> None:
        OPERATIONS[name].check(call, partial(on_gpu, kept=KEPT.get(name, ())), implementation="triton")

    check()
