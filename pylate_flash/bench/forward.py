"""The suite `forward`: all-pairs scores of padded batches, without gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from pylate_flash.bench.calls import Padded, chunk_sizes, chunked_scores, unit_vectors
from pylate_flash.bench.exact import einsum_scores
from pylate_flash.bench.rows import Row
from pylate_flash.bench.suite import FLASH_MAXSIM_SYSTEM, LIK_SYSTEM, OUR_SYSTEM, TORCH_SYSTEM, Candidate, Suite, System

# Beside the common shapes: sizes and lengths that are not powers of 2, and numbers of queries that do not fill a tile.
# Such shapes have been slow.
ODD = (
    Row("odd-5-d320", 5, 3000, 32, 64, d=320),
    Row("odd-7-d72", 7, 1000, 77, 77, d=72),
    Row("odd-3-d96", 3, 2000, 32, 333, d=96),
    Row("odd-2", 2, 4000, 512, 77),
    Row("odd-96", 96, 512, 33, 333),
    Row("odd-256-d96", 256, 2048, 32, 333, d=96),
)

# The first five are those of the Flash-MaxSim paper; then a wide rerank, a served batch, an in-batch training step, a
# small embedding size as in edge models, and the few candidates of a search, where latency is a single call.
ROWS = (
    Row("textual", 1, 1000, 32, 300),
    Row("long-doc", 1, 1000, 32, 1024),
    Row("medium", 1, 1000, 128, 1024),
    Row("visual", 1, 1000, 512, 1024),
    Row("colpali", 1, 1000, 1024, 1024),
    Row("rerank-10k", 1, 10000, 32, 300),
    Row("serve-32", 32, 1024, 32, 180),
    Row("batch-512", 512, 512, 32, 180),
    Row("edge-48", 1, 16000, 32, 512, d=48),
    *ODD,
    Row("rerank-100", 1, 100, 32, 180),
)


def make_inputs(row: Row, device: torch.device, dtype: torch.dtype) -> Padded:
    """Draw random unit vectors, reproducible per row and device type."""
    draw = partial(unit_vectors, generator=torch.Generator(device).manual_seed(0), dtype=dtype)
    return Padded(draw(row.Nq, row.Lq, row.d), draw(row.Nd, row.Ld, row.d))


def compiled(inputs: Padded) -> list[Candidate]:
    """torch.compile of the einsum over the largest chunks that fit, in the mode that the paper found fastest here."""
    torch._dynamo.reset()
    score = torch.compile(einsum_scores, mode="max-autotune-no-cudagraphs", dynamic=False)
    chunk = chunk_sizes(inputs.queries, inputs.documents)[-1]
    return [inputs.candidate(f"compiled einsum, chunks of {chunk}", partial(chunked_scores, chunk=chunk, score=score))]


def suite() -> Suite:
    """Return the suite."""
    return Suite(
        name="forward",
        title="MaxSim forward",
        rows=ROWS,
        systems=(
            OUR_SYSTEM,
            LIK_SYSTEM,
            FLASH_MAXSIM_SYSTEM,
            replace(TORCH_SYSTEM, about="an einsum over chunks of documents, at the best chunk size"),
        ),
        compiled=(System("torch_compile", "torch.compile", compiled),),
        make_inputs=make_inputs,
    )
