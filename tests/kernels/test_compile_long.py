"""Long embeddings in the Hopper kernel, which processes them in blocks, compiled without a GPU."""

from __future__ import annotations

import re
from functools import partial
from itertools import product

import pytest
import torch
from triton.tools.disasm import get_sass

from pylate_flash.kernels import forward
from pylate_flash.problem import DocumentOffsets, Options, problem_of
from tests.kernels.recorder import compiled
from tests.kernels.test_compile import inputs

# Whole blocks, with and without normalize and argmax; and sizes whose last block is partial.
CASES = [*product((1024, 4096), (False, True), (False, True)), *product((392, 1032), (True,), (False, True))]


@pytest.mark.parametrize("capability", [90], indirect=True)
@pytest.mark.parametrize("layout", ["padded", "whole", "exclude", "zero", "packed", "lists"])
@pytest.mark.parametrize("n_queries", [2, 6])
@pytest.mark.parametrize(("size", "normalize", "with_argmax"), CASES)
def test_products_of_blocks_follow_each_other(
    size: int, layout: str, n_queries: int, normalize: bool, with_argmax: bool, capability: int
) -> None:
    """Both operands come from shared memory, copied 16 bytes at a time except scales; a block is four products."""
    masks = None, torch.bool if layout in ("exclude", "zero") else None
    packed, offsets = layout in ("packed", "lists"), None
    # Without an argmax, documents of whole tiles are a stream only if they meet few rows.
    streamed = not with_argmax and (layout != "whole" or n_queries == 2)
    length = 512 if layout == "whole" else 300
    tensors = inputs((n_queries, 32, size), (400, size) if packed else (4, length, size), masks=masks)
    if packed:
        tensors = tensors._replace(documents_cu_seqlens=torch.arange(5) * 100)
    if layout == "lists":
        offsets = DocumentOffsets(torch.arange(4) * 200 * size // 8, 8, 400)
    options = Options(max_document_length=100, normalize=normalize, masking="zero" if layout == "zero" else "exclude")
    names = "hopper" + " rows" * normalize + " active_tokens" * (masks[1] is not None)
    problem, starts = problem_of(tensors, options, with_argmax, offsets), None if offsets is None else offsets.starts
    call = partial(forward.maxsim_forward, problem, tensors, starts)
    code = compiled(call, names, capability)["hopper"]
    products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\w+?)k\S+ \{[^}]*\}, (\S)", code.asm["ptx"])
    # Products of a stream have half a tile, and so does the last one of 300, or of an unknown number of, tokens.
    expected = {"m64n128"} if streamed or layout != "whole" else set()
    expected |= set() if streamed else {"m64n256"}
    assert set(products) == {(product, "%") for product in expected}
    copies = set(re.findall(r"cp\.async\.\w+\.shared\.global \[[^]]*\], \[[^]]*\], (0x\w+)", code.asm["ptx"]))
    assert copies == ({"0x10", "0x4"} if normalize else {"0x10"})
    lines = [line for line in get_sass(code.asm["cubin"]).splitlines() if ";" in line]
    at = [index for index, line in enumerate(lines) if "HGMMA" in line]
    assert at
    assert len(at) % 4 == 0
    for first, last in zip(at[::4], at[3::4], strict=True):
        block = "\n".join(lines[first : last + 1])
        assert last - first < 40, "products wait for each other"
        assert not re.search(r"LD[LS]|STL|SYNCS|BAR", block)
