"""Random calls of `maxsim_sparse_queries`, drawn by hypothesis, for every implementation's tests."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import strategies as st

from tests.ops.cases import SIZES, Case, cases


@st.composite
def sparse_cases(
    draw: st.DrawFn,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16, torch.float64),
    max_batch: int = 4,
    max_length: int = 20,
    max_chosen: int = 24,
    sizes: st.SearchStrategy[int] = SIZES,
) -> Case:
    """Draw `maxsim` cases, also packed, with positions that repeat or are none, shared by all queries or per query."""
    case = draw(cases(dtypes=dtypes, max_batch=max_batch, max_length=max_length, sizes=sizes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    n_queries, length, _ = case.queries.shape
    shape = [n_queries, case.documents.shape[-3], draw(st.integers(0, max_chosen))]
    in_batch = case.documents.dim() == 3
    if in_batch and draw(st.booleans()):
        shape = shape[1:]
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    case.options["query_tokens"] = torch.randint(-1, length, shape, generator=generator, dtype=dtype)
    if in_batch and draw(st.booleans()):
        n_documents, longest, size = case.documents.shape
        lengths = torch.randint(0, longest + 1, (n_documents,), generator=generator)
        case.options["documents_cu_seqlens"] = torch.cat([torch.zeros(1, dtype=dtype), lengths.cumsum(0).to(dtype)])
        case.options["max_document_length"] = draw(st.sampled_from([None, longest, longest + 3]))
        packed = case.documents.reshape(-1, size)[: int(lengths.sum())]
        case = replace(case, documents=packed, documents_mask=None)
    return case
