"""Sequences are copied to a GPU in blocks, in order, each block large enough to be worth a thread."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pylate_flash.ops import staging
from pylate_flash.ops.staging import concatenate

COPIED = staging._COPY_BYTES


@settings(max_examples=300)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 3000, 70_000, 200_000]), min_size=1, max_size=40),
    row_bytes=st.sampled_from([0, 2, 96, 512]),
)
def test_blocks(lengths: list[int], row_bytes: int) -> None:
    ends = np.cumsum(lengths)
    stops = staging._stops(ends, row_bytes)
    assert stops == sorted(set(stops))
    assert stops[-1] == len(lengths)
    if ends[-1] * row_bytes <= 2 * COPIED:
        assert len(stops) == 1
        return
    # Every block but the last is large enough to be worth copying, and holds no sequence more than that takes.
    copied = [0, *(int(ends[stop - 1]) * row_bytes for stop in stops)]
    longest = max(lengths) * row_bytes
    assert max(np.diff(copied)) <= COPIED + longest
    assert len(stops) <= ends[-1] * row_bytes // COPIED + 1


def test_what_stays_on_the_host_is_concatenated() -> None:
    sequences = [torch.ones(2, 3), torch.zeros(0, 3), torch.full((1, 3), 2.0)]
    for device in (None, "cpu", torch.device("cpu")):
        assert torch.equal(concatenate(tuple(sequences), device), torch.cat(sequences))
    sequences[0].requires_grad_()
    assert concatenate(sequences).requires_grad
    mixed = concatenate([sequences[0].half(), sequences[2]])
    assert mixed.dtype == torch.float32


def test_what_may_be_copied_as_it_is() -> None:
    data, learned = torch.ones(2, 3), torch.ones(2, 3, requires_grad=True)
    assert staging._are_data([data, data])
    assert not staging._are_data([data, data.half()])
    assert not staging._are_data([data, learned])
    with torch.no_grad():
        assert staging._are_data([data, learned])
