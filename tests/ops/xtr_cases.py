"""Random calls of `xtr_scores`, drawn by hypothesis, for every implementation's tests.

Embeddings are multiples of 1/4 of at most 1, of few elements: every product and every sum is exact in any floating
type that accumulates in float32, so rounding never decides what is retrieved, and ties are frequent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

from pylate_flash.ops import xtr_scores_reference
from tests.ops.cases import Case, check_definition, drawn_mask

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@st.composite
def xtr_cases(
    draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES, max_batch: int = 5, max_length: int = 12
) -> Case:
    """Draw masks, weights, empty queries and documents, and k up to more than the number of tokens."""
    n_queries, n_documents = draw(st.integers(1, max_batch)), draw(st.integers(1, max_batch))
    query_length, length, size = (
        draw(st.integers(1, max_length)),
        draw(st.integers(1, max_length)),
        draw(st.integers(1, 9)),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(dtypes))

    def numbers(*shape: int) -> Tensor:
        # All similarities may be negative, where PyLate's imputation and ours differ.
        low = draw(st.sampled_from([-4, -4, 0, 1]))
        return torch.randint(low, 5, shape, generator=generator).div(4).to(dtype)

    queries, documents = numbers(n_queries, query_length, size), -numbers(n_documents, length, size)
    if draw(st.booleans()):
        documents = -documents
    options = {
        "k": draw(st.integers(1, n_documents * length + 2)),
        "normalizer": draw(st.sampled_from(["positive", "retrieved"])),
        "empty_score": draw(st.sampled_from([0.0, -100.0])),
    }
    masks = drawn_mask(draw, queries, generator, weights=True), drawn_mask(draw, documents, generator)
    return Case(queries, documents, *masks, options)


def check_scores_and_gradients(function: Callable[..., Tensor], case: Case) -> None:
    check_definition(function, xtr_scores_reference, case.tensors, case.keywords, atol=1e-7)
