"""The suite `forward`: scores of padded batches, every query against every document, without gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from pylate_flash.bench.peers import FLASH_MAXSIM, LIK
from pylate_flash.bench.protocol import MIB, Work
from pylate_flash.bench.suite import OURS, Candidate, Suite, System


@dataclass(frozen=True)
class Shape:
    """``Nq`` queries of ``Lq`` tokens against ``Nd`` documents of ``Ld`` tokens, embeddings of size ``d``."""

    name: str
    Nq: int
    Nd: int
    Lq: int
    Ld: int
    d: int = 128

    @property
    def shape(self) -> str:
        """The shape, for people; the embedding size is named where it is not 128."""
        text = f"{self.Nq} x {self.Nd}, {self.Lq} x {self.Ld}"
        return text if self.d == 128 else f"{text}, d = {self.d}"

    def work(self, dtype: torch.dtype) -> Work:
        """One multiplication and one addition per product; queries and documents read once, float32 scores written."""
        return Work(
            flops=2.0 * self.Nq * self.Nd * self.Lq * self.Ld * self.d,
            bytes=float(dtype.itemsize * self.d * (self.Nq * self.Lq + self.Nd * self.Ld) + 4 * self.Nq * self.Nd),
        )

    def within(self, flops: float) -> Shape:
        """The same row with fewer documents (and queries, where there are several), costing no more than ``flops``."""
        share = min(1.0, flops / self.work(torch.float32).flops)
        Nq = max(1, int(self.Nq * math.sqrt(share)))
        # Where that leaves too many of few queries, the documents are cut the more.
        part = min(math.sqrt(share), self.Nq * share / Nq)
        return replace(self, Nq=Nq, Nd=max(1, int(self.Nd * part)))


# Beside the common shapes: sizes and lengths that are no powers of 2, numbers of queries that fill no tile. Such ones
# have been slow.
ODD = (
    Shape("odd-5-d320", 5, 3000, 32, 64, d=320),
    Shape("odd-7-d72", 7, 1000, 77, 77, d=72),
    Shape("odd-3-d96", 3, 2000, 32, 333, d=96),
    Shape("odd-2", 2, 4000, 512, 77),
    Shape("odd-96", 96, 512, 33, 333),
    Shape("odd-256-d96", 256, 2048, 32, 333, d=96),
)

# The first five are those of the Flash-MaxSim paper; then a wide rerank, a served batch, an in-batch training step, and
# a small embedding as in models for the edge; and a search's few candidates, where a call is all that a user waits for.
ROWS = (
    Shape("textual", 1, 1000, 32, 300),
    Shape("long-doc", 1, 1000, 32, 1024),
    Shape("medium", 1, 1000, 128, 1024),
    Shape("visual", 1, 1000, 512, 1024),
    Shape("colpali", 1, 1000, 1024, 1024),
    Shape("rerank-10k", 1, 10000, 32, 300),
    Shape("serve-32", 32, 1024, 32, 180),
    Shape("batch-512", 512, 512, 32, 180),
    Shape("edge-48", 1, 16000, 32, 512, d=48),
    *ODD,
    Shape("rerank-100", 1, 100, 32, 180),
)


@dataclass(frozen=True)
class Inputs:
    """A row's tensors: ``queries`` [Nq, Lq, d], ``documents`` [Nd, Ld, d], ``lengths`` [Nd] (int32, all Ld)."""

    queries: torch.Tensor
    documents: torch.Tensor
    lengths: torch.Tensor


def unit_vectors(*size: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Draw random unit vectors, along the last dimension, on the generator's device."""
    drawn = torch.randn(*size, device=generator.device, generator=generator)
    return torch.nn.functional.normalize(drawn, dim=-1).to(dtype)


def make_inputs(row: Shape, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Draw random unit vectors, the same ones for the same row on the same kind of device."""
    generator = torch.Generator(device).manual_seed(0)
    return Inputs(
        queries=unit_vectors(row.Nq, row.Lq, row.d, generator=generator, dtype=dtype),
        documents=unit_vectors(row.Nd, row.Ld, row.d, generator=generator, dtype=dtype),
        lengths=torch.full((row.Nd,), row.Ld, dtype=torch.int32, device=device),
    )


# The similarities that the reference holds at a time.
REFERENCE_BYTES = 1024 * MIB


def reference(inputs: Inputs, active: torch.Tensor | None = None) -> torch.Tensor:
    """Return the scores [Nq, Nd] in float64, from products of the (already rounded) inputs in float64.

    ``active`` [Nd, Ld] is False where a document's token is padding; None: there is none.
    """
    Nq, Lq, d = inputs.queries.shape
    Nd, Ld, _ = inputs.documents.shape
    queries = inputs.queries.reshape(Nq * Lq, d).to(torch.float64)
    step = max(1, REFERENCE_BYTES // (8 * Nq * Lq * Ld))
    scores = []
    for start in range(0, Nd, step):
        documents = inputs.documents[start : start + step]
        similarities = queries @ documents.reshape(-1, d).to(torch.float64).T
        similarities = similarities.view(Nq, Lq, len(documents), Ld)
        if active is not None:
            similarities.masked_fill_(~active[start : start + step], -torch.inf)
        scores.append(similarities.amax(dim=3).sum(dim=1))
    return torch.cat(scores, dim=1)


def accuracy(dtype: torch.dtype) -> float:
    """Return the relative error that pylate_flash's scores stay within: only tf32 products may have a larger one."""
    return 1e-3 if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" else 2e-6


def ours(inputs: Inputs) -> list[Candidate]:
    """The public `pylate_flash.maxsim`, as a user calls it."""
    from pylate_flash import maxsim

    return [Candidate("maxsim", lambda: maxsim(inputs.queries, inputs.documents))]


def lik(inputs: Inputs) -> list[Candidate]:
    """late-interaction-kernels: `maxsim`, and the inference function below it, which spares some work on the host."""
    from late_interaction_kernels import maxsim
    from late_interaction_kernels.forward import maxsim_forward

    candidates = [Candidate("maxsim", lambda: maxsim(inputs.queries, inputs.documents))]
    # Longer queries are cut into pieces by `maxsim` alone, which is faster and compiles far sooner.
    if inputs.queries.shape[1] <= 512:
        candidates.append(Candidate("maxsim_forward", lambda: maxsim_forward(inputs.queries, inputs.documents)[0]))
    return candidates


def flash_maxsim(inputs: Inputs) -> list[Candidate]:
    """flash-maxsim: the function for one query or for several, its persistent kernel, and its long-query variants."""
    import flash_maxsim as package

    # Given, the lengths spare it a kernel that would fill them in on every call.
    documents, lengths = inputs.documents, inputs.lengths
    Nq, Lq, _ = inputs.queries.shape
    Nd, Ld, _ = documents.shape
    if Nq > 1:
        queries = inputs.queries
        return [
            Candidate("flash_maxsim_batched", lambda: package.flash_maxsim_batched(queries, documents, lengths)),
            Candidate("flash_maxsim_persistent", lambda: package.flash_maxsim_persistent(queries, documents, lengths)),
        ]
    query = inputs.queries[0]
    candidates = [
        Candidate("flash_maxsim", lambda: package.flash_maxsim(query, documents, lengths)),
        Candidate("flash_maxsim_persistent", lambda: package.flash_maxsim_persistent(query, documents, lengths)),
    ]
    if Lq >= 512 and Ld >= 512:
        candidates.append(Candidate("splitk", lambda: package.flash_maxsim(query, documents, lengths, splitk=True)))
        # Its kernel reads documents in groups of four, past the end where they do not divide.
        if Nd % 4 == 0:
            candidates.append(
                Candidate("flash_maxsim_qreuse", lambda: package.flash_maxsim_qreuse(query, documents, lengths))
            )
    return candidates


def einsum_scores(queries: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """The plain way: the whole similarity tensor in the input's type, its maximum, and a float32 sum."""
    return torch.einsum("qsd,ntd->qnst", queries, documents).amax(dim=-1).sum(dim=-1, dtype=torch.float32)


def chunked_scores(
    score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], inputs: Inputs, chunk: int
) -> torch.Tensor:
    """The same over ``chunk`` documents at a time."""
    if chunk >= len(inputs.documents):
        return score(inputs.queries, inputs.documents)
    return torch.cat([score(inputs.queries, part) for part in inputs.documents.split(chunk)], dim=1)


def chunk_sizes(inputs: Inputs) -> list[int]:
    """Return the four largest of 1, 4, 16, ..., Nd whose similarity tensor fits in half of the free memory."""
    Nq, Lq, _ = inputs.queries.shape
    Nd, Ld, _ = inputs.documents.shape
    device = inputs.queries.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 2048 * MIB
    sizes = [size for size in (1, 4, 16, 64, 256, 1024, 4096, 16384) if size < Nd] + [Nd]
    fitting = [size for size in sizes if Nq * size * Lq * Ld * inputs.queries.element_size() <= free / 2]
    return fitting[-4:] or [1]


def torch_eager(inputs: Inputs) -> list[Candidate]:
    """torch: an einsum over chunks of documents, the chunk size swept."""
    return [
        Candidate(f"einsum, chunks of {chunk}", partial(chunked_scores, einsum_scores, inputs, chunk))
        for chunk in chunk_sizes(inputs)
    ]


def torch_compiled(inputs: Inputs) -> list[Candidate]:
    """torch.compile of the same, as much at once as fits, in the mode that the paper found fastest at these shapes."""
    torch._dynamo.reset()
    score = torch.compile(einsum_scores, mode="max-autotune-no-cudagraphs", dynamic=False)
    chunk = chunk_sizes(inputs)[-1]
    return [Candidate(f"compiled einsum, chunks of {chunk}", lambda: chunked_scores(score, inputs, chunk))]


def suite() -> Suite:
    """Return the suite."""
    return Suite(
        name="forward",
        title="MaxSim forward",
        rows=ROWS,
        systems=(
            System(OURS, "pylate_flash", ours),
            System("lik", "LIK", lik, peer=LIK, about="late-interaction-kernels"),
            System("flash_maxsim", "FM", flash_maxsim, peer=FLASH_MAXSIM, about="flash-maxsim"),
            System("torch", "torch", torch_eager, about="an einsum over chunks of documents, at the best chunk size"),
        ),
        compiled=(System("torch_compile", "torch.compile", torch_compiled),),
        make_inputs=make_inputs,
        reference=reference,
        accuracy=accuracy,
    )
