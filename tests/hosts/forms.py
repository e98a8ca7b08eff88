"""Every form in which sentence-transformers' scoring functions take queries and documents, drawn by hypothesis.

Numbers are multiples of 1/8, small enough that float32 holds every product and every sum exactly: any implementation,
summing in any order, gets bitwise the same score.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

KINDS = (
    "batch", "masked batch", "array", "masked array", "integers", "list", "masked list", "arrays", "integer list",
    "nested lists",
)  # fmt: skip


class Form(NamedTuple):
    """One side of a call: the embeddings passed as `a` or `b`, and their mask."""

    embeddings: Any
    mask: Any


def numbers(seed, *shape):
    """Multiples of 1/8 from -2 to 2, with rows of zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-16, 17, shape, generator=generator) / 8
    rows = torch.rand(shape[:-1], generator=generator) < 0.2
    return values.masked_fill(rows.unsqueeze(-1), 0.0)


@st.composite
def forms(draw, n_items, size, weights, kinds=KINDS):
    """Draw a form of `n_items` items; with `weights`, as for queries, masks may hold weights."""
    kind, seed = draw(st.sampled_from(kinds)), draw(st.integers(0, 2**20))
    lengths = draw(
        st.lists(st.integers(0 if "list" in kind or kind == "arrays" else 1, 5), min_size=n_items, max_size=n_items)
    )
    longest = max(lengths)
    padded = numbers(seed, n_items, longest, size)
    if kind == "integers":
        return Form((padded * 8).to(torch.int8), None)
    items: list = [padded[i, :length] for i, length in enumerate(lengths)]
    if "list" in kind or kind == "arrays":
        if kind == "masked list":
            choices = [0, 1, 0.5, 2] if weights else [0, 1]
            masks = [
                torch.tensor(draw(st.lists(st.sampled_from(choices), min_size=longest, max_size=longest)))
            ] * n_items
            mask = torch.stack(masks).view(n_items, longest)
            return Form(items, draw(st.sampled_from([mask, mask.float(), list(mask), mask.numpy()])))
        if kind == "arrays":
            return Form([item.numpy() for item in items], None)
        if kind == "integer list":
            return Form([(item * 8).to(torch.int8) for item in items], None)
        if kind == "nested lists":
            return Form([numbers(seed, max(1, length), size).tolist() for length in lengths], None)
        return Form(items, None)
    mask = None
    if "masked" in kind:
        generator = torch.Generator().manual_seed(seed + 1)
        mask = torch.rand(n_items, longest, generator=generator) < 0.7
        dtype = draw(st.sampled_from([torch.bool, torch.int64, torch.float32, torch.float16]))
        mask = mask.to(dtype)
        if weights and dtype.is_floating_point:
            mask = mask * draw(st.sampled_from([1.0, 0.5, 2.0]))
    if n_items == 1 and draw(st.booleans()):
        padded, mask = padded[0], None if mask is None else mask[0]
    if "array" in kind:
        return Form(padded.numpy(), None if mask is None else mask.numpy())
    return Form(padded, mask)
