"""The suite `launch`: host time of a call, and how often new shapes cause compilation.

On a small batch the GPU is done before the host has launched the next call, so the host time is what a user waits for.
Each row is a call as users make it (`calls`, and `steps` for training). It is compared with what any implementation is
built from, the launch of an empty Triton kernel and one torch operation, or for a step a sum and its gradient, and with
the same call replayed as a CUDA graph.
"""

from __future__ import annotations

import functools
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import torch

import pylate_flash
from pylate_flash.bench import calls, exact, forward, fresh, steps
from pylate_flash.bench import suite as suites
from pylate_flash.bench.calls import Call
from pylate_flash.bench.exact import Result
from pylate_flash.bench.peers import LIK
from pylate_flash.bench.protocol import CpuStopwatch, Sample
from pylate_flash.bench.rerank import Rerank, ids_of
from pylate_flash.bench.rows import Row
from pylate_flash.bench.suite import Candidate, Suite, System, Unavailable


class HostStopwatch(CpuStopwatch):
    """Times how long a call keeps the host busy, whatever the device takes for it.

    A batch of calls is made back to back, and only then synchronised: the device's queue holds a thousand launches, so
    a short batch never fills it and blocks the host. The result is the mean of the batch.
    """

    def __init__(self, device: torch.device, calls: int = 20) -> None:
        super().__init__(flush_bytes=0)
        self.device = device
        self.calls = calls
        self.clock = f"host clock, each the mean of {calls} in a row"

    def time(self, call: Callable[[], object]) -> Sample:
        """Make the calls, synchronise, and return the host time of one call."""
        started = time.perf_counter()
        for _ in range(self.calls):
            call()
        seconds = (time.perf_counter() - started) / self.calls
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return Sample(seconds, seconds)


class Pairwise(calls.Padded):
    """`maxsim_pairwise`: queries [N, Lq, d], and their documents as candidates [N, 1, Ld, d]."""

    def scored(self, score: Callable, queries_mask: str, documents_mask: str) -> list[Candidate]:
        """A call with documents [N, Ld, d], and the masks as keyword arguments of these names."""
        masks = {queries_mask: self.queries_mask}
        if self.documents_mask is not None:
            masks[documents_mask] = self.documents_mask.squeeze(1)
        return calls.only(score, self.queries, self.documents.squeeze(1), **masks)

    def ours(self) -> list[Candidate]:
        return self.scored(pylate_flash.maxsim_pairwise, "queries_mask", "documents_mask")

    def lik(self) -> list[Candidate]:
        return self.scored(LIK["maxsim_pairs"], "q_mask", "d_mask")


class Turn:
    """Calls that are cycled through, one at a time; the results of the first ``n_read`` are read."""

    def __init__(self, calls: Sequence[Callable[[], Any]], n_read: int) -> None:
        self.calls = calls
        self.n_read = n_read
        self.last = -1

    def __call__(self) -> Any:
        self.last = (self.last + 1) % len(self.calls)
        return self.calls[self.last]()

    def read(self, last: Any) -> Result:
        """Join the results of the calls that are read; ``last`` is the result of the last call made."""
        return joined([last if index == self.last else self.calls[index]() for index in range(self.n_read)])


def joined(results: Sequence[Any]) -> Result:
    """Stack the scores of several calls; for steps the losses, and the gradients as one vector per leaf."""
    if isinstance(results[0], torch.Tensor):
        return torch.stack(list(results))
    losses, _, *gradients = zip(*results, strict=True)
    return exact.Step(torch.stack(losses), None, *(torch.cat([part.flatten() for part in leaf]) for leaf in gradients))


@dataclass(frozen=True)
class InTurn(Call):
    """The same kind of call with different inputs every time; the results of the first ``n_read`` are compared."""

    calls: Sequence[Call]
    n_read: int

    replayable = False

    @property
    def device(self) -> torch.device:
        return self.calls[0].device

    @property
    def differentiated(self) -> bool:  # type: ignore[override]
        return self.calls[0].differentiated

    def reference(self) -> Result:
        return joined([call.reference() for call in self.calls[: self.n_read]])

    def accuracy(self, dtype: torch.dtype) -> float:
        return self.calls[0].accuracy(dtype)

    def candidates(self, system: str) -> list[Candidate]:
        """The candidates of a system, each of which cycles through the calls."""
        by_call = [getattr(call, system)() for call in self.calls]
        turns = [
            (variants[0].label, Turn([variant.call for variant in variants], self.n_read))
            for variants in zip(*by_call, strict=True)
        ]
        return [Candidate(label, turn, turn.read) for label, turn in turns]

    ours = partialmethod(candidates, "ours")
    lik = partialmethod(candidates, "lik")
    flash_maxsim = partialmethod(candidates, "flash_maxsim")
    torch = partialmethod(candidates, "torch")


def padded(
    row: Row,
    generator: torch.Generator,
    dtype: torch.dtype,
    *,
    kind: type[calls.Padded] = calls.Padded,
    masks: str = "",
    mask_type: torch.dtype = torch.bool,
    autocast: bool = False,
) -> calls.Padded:
    """Unit vectors, in float32 if the call casts them, and masks of ``"documents"`` or ``"both"``."""
    stored = dtype
    if autocast:
        # A model's linear layers return the autocast dtype already.
        stored = calls.autocast_type(dtype) if kind is steps.Contrastive else torch.float32
    documents = (row.Nq, row.Nd) if row.own else (row.Nd,)
    mask = partial(calls.prefixes, generator=generator, dtype=mask_type)
    draw = partial(calls.unit_vectors, generator=generator, dtype=stored)
    call = kind(
        draw(row.Nq, row.Lq, row.d),
        draw(*documents, row.Ld, row.d),
        mask(row.Nq, row.Lq) if masks == "both" else None,
        mask(*documents, row.Ld) if masks else None,
        calls.autocast_type(dtype) if autocast else None,
    )
    for embeddings in (call.queries, call.documents):
        embeddings.requires_grad_(issubclass(kind, steps.Step))
    return call


def new_lengths(row: Row, generator: torch.Generator, dtype: torch.dtype, **options: Any) -> InTurn:
    """The call of `padded` with documents of another length every time, so that caches per size do not help.

    Every batch is a prefix of one allocation.
    """
    longest = padded(row, generator, dtype, **options)
    tokens = longest.documents.detach().flatten(0, 1)
    lengths = list(range(row.shortest or row.Ld, row.Ld + 1))
    random.Random(0).shuffle(lengths)
    batches = []
    for length in lengths:
        documents = tokens[: row.Nd * length].view(row.Nd, length, row.d)
        mask = longest.documents_mask
        if mask is not None:
            mask = calls.prefixes(row.Nd, length, generator=generator, dtype=mask.dtype)
        documents.requires_grad_(longest.documents.requires_grad)
        batches.append(replace(longest, documents=documents, documents_mask=mask))
    return InTurn(batches, min(READ, len(batches)))


def packed(row: Row, generator: torch.Generator, dtype: torch.dtype, *, changing: bool = False) -> Call:
    """Packed documents of many lengths; if ``changing``, `IN_TURN` batches with different numbers of tokens.

    With candidates, every 17th has no tokens.
    """
    draw = partial(calls.unit_vectors, generator=generator, dtype=dtype)
    queries, documents = draw(row.Nq, row.Lq, row.d), draw(row.documents * row.Ld, row.d)
    drawn = torch.Generator().manual_seed(0)
    lengths_by_total: dict[int, torch.Tensor] = {}
    n_batches = IN_TURN if changing else 1
    # Bounded, as very few documents do not have that many different totals.
    for _ in range(100 * n_batches):
        if len(lengths_by_total) == n_batches:
            break
        lengths = torch.randint(row.shortest or row.Ld, row.Ld + 1, (row.documents,), generator=drawn)
        if row.own:
            lengths[1::17] = 0
        lengths_by_total[int(lengths.sum())] = lengths
    batches = [
        calls.Varlen(queries, documents[:tokens], lengths, row.own) for tokens, lengths in lengths_by_total.items()
    ]
    return InTurn(batches, len(batches)) if changing else batches[0]


def from_hidden(row: Row, generator: torch.Generator, dtype: torch.dtype, *, masks: str = "") -> calls.FromHidden:
    """Hidden states of a small encoder, and masks as in `padded`."""
    draw = partial(torch.randn, generator=generator, device=generator.device)
    mask = partial(calls.prefixes, generator=generator)
    return calls.FromHidden(
        calls.unit_vectors(row.Nq, row.Lq, row.d, generator=generator, dtype=dtype),
        draw(row.Nd, row.Ld, HIDDEN_SIZE).to(dtype),
        (draw(row.d, HIDDEN_SIZE) / math.sqrt(HIDDEN_SIZE)).to(dtype),
        mask(row.Nq, row.Lq) if masks == "both" else None,
        mask(row.Nd, row.Ld) if masks else None,
    )


def candidates(row: Row, generator: torch.Generator, dtype: torch.dtype) -> Rerank:
    """Queries and their candidates, each as a separate tensor, as a model returns them."""
    draw = partial(calls.unit_vectors, generator=generator, dtype=dtype)
    queries = [draw(row.Lq, row.d) for _ in range(row.Nq)]
    lengths = row.lengths().view(row.Nq, row.Nd).tolist()
    documents = [[draw(length, row.d) for length in of_query] for of_query in lengths]
    return Rerank(ids_of(row), queries, documents, generator.device)


@dataclass(frozen=True)
class Made(Row):
    """A row whose call is created by ``make``."""

    make: Callable[[Row, torch.Generator, torch.dtype], Call] = padded


def made(name: str, make: Callable[..., Call], Nq: int = 32, Nd: int = 32, Ld: int = 180, **shape: Any) -> Made:
    """A row with queries of 32 tokens, and short documents."""
    return Made(name, Nq, Nd, 32, Ld, **shape, make=make)


# The number of inputs that rows with a changing number of tokens cycle through, the number of new lengths whose results
# are compared, and the size of the hidden states.
IN_TURN = 64
READ = 3
HIDDEN_SIZE = 768

under_autocast = partial(padded, masks="both", autocast=True)
changing = partial(packed, changing=True)
in_turn = f"{IN_TURN} in turn"
projected = f"{HIDDEN_SIZE} to 128"
# More lengths than a row has calls: 600, and some to choose between candidates.
another_length = partial(made, Ld=760, shortest=61, kind="another length every time")
ROWS = (
    made("maxsim-query", padded, Nq=1, Nd=100),
    made("maxsim-rerank", padded, Nq=1, Nd=1000, Ld=300),
    made("maxsim-batch", padded),
    another_length("maxsim-new-lengths", new_lengths),
    made("maxsim-documents-mask", partial(padded, masks="documents")),
    made("maxsim-masks", partial(padded, masks="both")),
    made("maxsim-int64-masks", partial(padded, masks="both", mask_type=torch.int64)),
    made("maxsim-autocast", under_autocast),
    made("maxsim-candidates", partial(padded, masks="documents"), Nd=8, own=True),
    made("maxsim-pairwise", partial(padded, kind=Pairwise, masks="both"), Nd=1, own=True),
    made("varlen", packed, Nq=1, Nd=100, shortest=40),
    made("varlen-changing", changing, Nq=1, Nd=100, shortest=40, kind=in_turn),
    made("varlen-candidates", changing, Nd=8, own=True, shortest=40, kind=in_turn),
    made("hidden", from_hidden, Nq=2, kind=projected),
    made("hidden-documents-mask", partial(from_hidden, masks="documents"), Nq=2, kind=projected),
    made("hidden-masks", partial(from_hidden, masks="both"), Nq=2, kind=projected),
    made("step-cross-entropy-masks", partial(padded, masks="both", kind=steps.FusedStep)),
    made("step-cross-entropy", partial(under_autocast, kind=steps.FusedStep), kind="autocast"),
    another_length("step-new-lengths", partial(new_lengths, masks="both", kind=steps.FusedStep)),
    made("step-maxsim-masks", partial(padded, masks="both", kind=steps.Step)),
    made("step-maxsim", partial(under_autocast, kind=steps.Step), kind="autocast"),
    made("step-contrastive", partial(under_autocast, kind=steps.Contrastive)),
    # Long enough that PyLate's padding, which `rerank` there does not mask, is never the argmax.
    made("rerank", candidates, Nq=10, Nd=100, own=True, shortest=40),
)


def make_inputs(row: Made, device: torch.device, dtype: torch.dtype) -> Call:
    """Draw a row's inputs, reproducible per row and device type."""
    return row.make(row, torch.Generator(device).manual_seed(0), dtype)


def replayed(inputs: Call) -> list[Candidate]:
    """Our call, captured in a CUDA graph and replayed."""
    if inputs.device.type != "cuda":
        raise Unavailable("a CUDA graph needs a CUDA GPU")
    if not inputs.replayable:
        raise Unavailable("only a call without gradients, of the same inputs every time, is captured here")
    candidate = inputs.ours()[0]
    if _waits(candidate):
        raise Unavailable("the call waits for the device, which a CUDA graph cannot hold")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores = candidate.call()
    # Elements that a replay does not write must not pass the check.
    scores.fill_(torch.nan)

    def replay() -> torch.Tensor:
        graph.replay()
        return scores

    # A graph does not keep the inputs that it reads, and nothing else may.
    replay.inputs = candidate.call  # type: ignore[attr-defined]
    return [Candidate(f"{candidate.label}, replayed", replay)]


def _waits(candidate: Candidate) -> bool:
    """Make the call twice (the first one compiles), and return whether the second one synchronises with the device.

    Checked before a capture, because a failed one leaves torch's random generator in a broken state.
    """
    candidate.call()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        candidate.call()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


def empty_kernel(inputs: Call) -> list[Candidate]:
    """The launch of an empty Triton kernel by `triton.jit`."""
    kernel, tensor = _nothing(inputs.device)
    return [Candidate("empty kernel", lambda: kernel[(1,)](tensor))]


def bare_launch(inputs: Call) -> list[Candidate]:
    """The same launch by Triton's C function, with all arguments prepared."""
    kernel, tensor = _nothing(inputs.device)
    from pylate_flash.kernels.launch import c_function_of

    if (c_function := c_function_of(kernel[(1,)](tensor))) is None:
        raise Unavailable("the arguments of this Triton's C function are not known")
    launch, fixed_args, takes_tuple = c_function
    # The kernel never dereferences the pointer.
    pointer = tensor.data_ptr()
    stream = torch.cuda.current_stream(inputs.device).cuda_stream
    call = partial(launch, 1, 1, 1, stream, *fixed_args, (pointer,) if takes_tuple else pointer)
    return [Candidate("bare launch", call)]


@functools.cache
def _nothing(device: torch.device) -> tuple[Any, torch.Tensor]:
    """An empty Triton kernel, and the tensor that it takes.

    Cached, because Triton unloads the code of a kernel that is no longer referenced.
    """
    if device.type != "cuda":
        raise Unavailable("a Triton kernel needs a CUDA GPU")
    import triton

    @triton.jit
    def nothing(pointer):
        pass

    return nothing, torch.zeros(1, device=device)


def torch_operation(inputs: Call) -> list[Candidate]:
    """One torch operation on one element."""
    tensor = torch.zeros(1, device=inputs.device)
    return [Candidate("add_", lambda: tensor.add_(1.0))]


def torch_gradient(inputs: Call) -> list[Candidate]:
    """The least work of an autograd step: the sum of a matrix, and its gradient."""
    if not inputs.differentiated:
        raise Unavailable("the rows of steps measure it")
    leaf = torch.zeros(32, 32, device=inputs.device, requires_grad=True)

    def gradient() -> torch.Tensor:
        with torch.enable_grad():
            total = leaf.sum()
        return torch.autograd.grad(total, leaf)[0]

    return [Candidate("x.sum() and its gradient", gradient)]


# The number of shapes that `compilations` draws.
SHAPES = 50


def compilations(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Count what `maxsim` compiles over `SHAPES` shapes, in a process that has compiled nothing yet."""
    if device.type != "cuda":
        return {}
    name = f"compilations of maxsim over {SHAPES} random shapes (Nq, Nd, Lq, Ld)"
    try:
        (count,) = fresh.run(Path(__file__), [str(device), str(dtype).removeprefix("torch.")])
        return {name: int(count)}
    except RuntimeError as error:
        return {name: f"not counted: {error}"}


def random_shapes() -> list[Row]:
    """Draw the shapes with a fixed seed: every other one has a single query."""
    draw = random.Random(0).randint
    return [
        Row(str(i), 1 if i % 2 else draw(2, 64), Nd=draw(1, 256), Lq=draw(1, 128), Ld=draw(1, 512))
        for i in range(SHAPES)
    ]


def count_here(device: torch.device, dtype: torch.dtype) -> int:
    """Call `maxsim` with every shape; return the number of Triton compilations, disk cache hits included."""
    from triton import knobs

    compiled: list[str] = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **about: compiled.append(about["repr"])
    try:
        with torch.no_grad():
            for shape in random_shapes():
                for candidate in forward.make_inputs(shape, device, dtype).ours():
                    candidate.call()
    finally:
        knobs.runtime.jit_post_compile_hook = before
    return len(compiled)


# Calls between synchronisations: a training step in torch has some 70 launches, so more would fill the device's queue.
CALLS = 10


def suite() -> Suite:
    """Return the suite."""
    peers = suites.LIK_SYSTEM, suites.FLASH_MAXSIM_SYSTEM, replace(suites.TORCH_SYSTEM, about="an einsum")
    yardstick = partial(System, yardstick=True)
    return Suite(
        name="launch",
        title="Host time of a call",
        rows=ROWS,
        systems=(
            suites.OUR_SYSTEM,
            suites.another_way("graph", "replayed", candidates=replayed, about="the same call as a CUDA graph"),
            *(replace(system, tolerance=exact.ROUNDED) for system in peers),
            yardstick("bare_launch", "C launch", bare_launch, about="an empty kernel, by Triton's C function"),
            yardstick(
                "triton_launch", "Triton launch", empty_kernel, about="an empty kernel, by `triton.jit`", counted=True
            ),
            yardstick("torch_operation", "torch op", torch_operation, about="add_ to one element"),
            yardstick("torch_gradient", "sum", torch_gradient, about="`x.sum()` and its gradient", counted=True),
        ),
        make_inputs=make_inputs,
        # The tolerance is for gradients.
        error=partial(exact.error, wrong=suites.WRONG),
        unit="us",
        stopwatch=lambda device, flush_bytes: HostStopwatch(device, CALLS),
        facts=compilations,
        # Host time does not depend on tile sizes.
        retunes=False,
    )


if __name__ == "__main__":
    print(count_here(torch.device(sys.argv[1]), getattr(torch, sys.argv[2])))
