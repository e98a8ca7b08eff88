"""The suite `chamfer`: Chamfer distances between sets of points, and training steps with them.

Points are uniform in a cube: of 3 coordinates, as in clouds of points, and of 64, as of embeddings. In a step, both
gradients of the sum of all distances are computed too.

The floor has the products of all points, and the bytes; finding the two maxima of every product takes longer than that
where points have few coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller

import torch

from pylate_flash.bench import exact
from pylate_flash.bench.exact import Score, Step
from pylate_flash.bench.protocol import Work
from pylate_flash.bench.suite import FLASH_MAXSIM_SYSTEM, OUR_SYSTEM, Candidate, Suite, System


@dataclass(frozen=True)
class Sets:
    """``N`` pairs of sets of ``L`` points each, of ``d`` coordinates: distances, or a training step (``step``)."""

    name: str
    N: int
    L: int
    d: int
    step: bool = False

    @property
    def shape(self) -> str:
        """The shape, for people."""
        return f"{self.N} pairs, {self.L} x {self.L}, d = {self.d}, {'step' if self.step else 'distances'}"

    def work(self, dtype: torch.dtype) -> Work:
        """The products of all pairs of points; points read, and gradients of them written, once."""
        points = 2 * self.N * self.L * self.d * dtype.itemsize
        return Work(flops=2.0 * self.N * self.L**2 * self.d, bytes=float(points * (2 if self.step else 1) + 4 * self.N))

    def within(self, flops: float) -> Sets:
        """The same row with fewer pairs, or one pair of fewer points, costing no more than ``flops``."""
        most = flops / (2.0 * self.L**2 * self.d)
        if most >= 1:
            return replace(self, N=min(self.N, int(most)))
        return replace(self, N=1, L=max(1, int(math.sqrt(flops / (2.0 * self.d)))))


SHAPES = (Sets("points-3", 16, 4096, 3), Sets("points-64", 16, 4096, 64))
ROWS = (*SHAPES, *(replace(shape, name=f"{shape.name}-step", step=True) for shape in SHAPES))


def exact_distances(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Distances from differences, of the nearest points of each pair."""
    found = []
    for points, others in zip(x, y, strict=True):
        with torch.no_grad():
            between = torch.cdist(points, others, compute_mode="donot_use_mm_for_euclid_dist")
            nearest, chosen = between.argmin(dim=1), between.argmin(dim=0)
        found.append(
            (points - others[nearest]).square().sum(1).mean() + (others - points[chosen]).square().sum(1).mean()
        )
    return torch.stack(found)


def cdist_distances(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The plain way: all distances of all pairs, in float32."""
    between = torch.cdist(x.float(), y.float())
    return between.amin(dim=2).square().mean(dim=1) + between.amin(dim=1).square().mean(dim=1)


@dataclass(frozen=True)
class Pairs:
    """Both sets of every pair [N, L, d], which require gradients, and whether it is a step."""

    x: torch.Tensor
    y: torch.Tensor
    is_step: bool

    def stepped(self, distances: Score) -> Step:
        """Take all distances, and differentiate their sum for both sets."""
        with torch.enable_grad():
            scores = distances(self.x, self.y)
            loss = scores.sum()
        return Step(loss.detach(), scores.detach(), *torch.autograd.grad(loss, (self.x, self.y)))

    def candidate(self, label: str, distances: Score) -> Candidate:
        """The call of a system that computes distances so."""
        if self.is_step:
            return Candidate(label, partial(self.stepped, distances))
        return Candidate(label, partial(distances, self.x, self.y))

    def reference(self) -> exact.Result:
        """Distances, or a step, in float64, of the (already rounded) inputs, a pair at a time."""
        x, y = (points.detach().double().requires_grad_() for points in (self.x, self.y))
        found = replace(self, x=x, y=y).stepped(exact_distances)
        if self.is_step:
            return found
        assert found.scores is not None
        return found.scores

    def accuracy(self, dtype: torch.dtype) -> float:
        """The relative error that pylate_flash stays within, of distances or of a step's gradients.

        Of two points that are equally near but for rounding either may win, and a few among 131072 move a gradient so
        far.
        """
        return 1e-2 if self.is_step else exact.accuracy(dtype)

    def ours(self) -> list[Candidate]:
        """The public `chamfer`, as a user calls it."""
        from pylate_flash import chamfer

        return [self.candidate("chamfer", chamfer)]

    def flash_maxsim(self) -> list[Candidate]:
        """flash-maxsim, which takes one pair at a time; with gradients, by either of its backwards."""
        from flash_maxsim import flash_chamfer, flash_chamfer_invgrid_train, flash_chamfer_train

        def of_pairs(function: Callable, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.stack([function(*pair) for pair in zip(x, y, strict=True)])

        functions = (flash_chamfer_train, flash_chamfer_invgrid_train) if self.is_step else (flash_chamfer,)
        return [self.candidate(function.__name__, partial(of_pairs, function)) for function in functions]

    def torch(self) -> list[Candidate]:
        """The plain way."""
        return [self.candidate("cdist", cdist_distances)]


def make_inputs(row: Sets, device: torch.device, dtype: torch.dtype) -> Pairs:
    """Draw points from a cube, the same ones for the same row on the same kind of device."""
    generator = torch.Generator(device).manual_seed(0)
    x, y = (
        torch.rand(row.N, row.L, row.d, device=device, generator=generator).mul_(2).sub_(1).to(dtype).requires_grad_()
        for _ in range(2)
    )
    return Pairs(x, y, row.step)


def suite() -> Suite:
    """Return the suite."""
    return Suite(
        name="chamfer",
        title="Chamfer distances, and training steps",
        rows=ROWS,
        systems=(
            replace(OUR_SYSTEM, about="`chamfer`"),
            replace(
                FLASH_MAXSIM_SYSTEM,
                about="flash-maxsim's `flash_chamfer`, a pair at a time, and in steps the faster of its backwards; it "
                "rounds coordinates to float16, so that other points are nearest",
                tolerance=0.5,
            ),
            System(
                "torch",
                "cdist",
                methodcaller("torch"),
                about="`torch.cdist` of all points, and the minima of either side",
                tolerance=0.5,
            ),
        ),
        make_inputs=make_inputs,
    )
