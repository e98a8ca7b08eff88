"""The suite `chamfer`: Chamfer distances between sets of points, and training steps with them.

Points are uniform in a cube: with 3 coordinates, as in point clouds, and with 64, as embeddings. A step also computes
both gradients of the sum of all distances.

The floor counts the products of all points, and the bytes; with few coordinates, the two maxima of every product take
longer than that.
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
        """The shape for display."""
        return f"{self.N} pairs, {self.L} x {self.L}, d = {self.d}, {'step' if self.step else 'distances'}"

    def work(self, dtype: torch.dtype) -> Work:
        """The products of all pairs of points; points read once, and in a step their gradients written once."""
        points = 2 * self.N * self.L * self.d * dtype.itemsize
        return Work(flops=2.0 * self.N * self.L**2 * self.d, bytes=float(points * (2 if self.step else 1) + 4 * self.N))

    def within(self, flops: float) -> Sets:
        """The same row with fewer pairs, or one pair of fewer points, taking at most ``flops``."""
        most = flops / (2.0 * self.L**2 * self.d)
        if most >= 1:
            return replace(self, N=min(self.N, int(most)))
        return replace(self, N=1, L=max(1, int(math.sqrt(flops / (2.0 * self.d)))))


SHAPES = (Sets("points-3", 16, 4096, 3), Sets("points-64", 16, 4096, 64))
ROWS = (*SHAPES, *(replace(shape, name=f"{shape.name}-step", step=True) for shape in SHAPES))


def exact_distances(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Distances of each pair, from the differences of nearest points."""
    distances = []
    for points, other_points in zip(x, y, strict=True):
        with torch.no_grad():
            pair_distances = torch.cdist(points, other_points, compute_mode="donot_use_mm_for_euclid_dist")
            nearest, nearest_of_others = pair_distances.argmin(dim=1), pair_distances.argmin(dim=0)
        distances.append(
            (points - other_points[nearest]).square().sum(1).mean()
            + (other_points - points[nearest_of_others]).square().sum(1).mean()
        )
    return torch.stack(distances)


def cdist_distances(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Plain Chamfer distances: all distances of all pairs, in float32."""
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
        """The candidate that times ``distances``, or a step with them."""
        if self.is_step:
            return Candidate(label, partial(self.stepped, distances))
        return Candidate(label, partial(distances, self.x, self.y))

    def reference(self) -> exact.Result:
        """Distances, or a step, of the (already rounded) inputs in float64, one pair at a time."""
        x, y = (points.detach().double().requires_grad_() for points in (self.x, self.y))
        result = replace(self, x=x, y=y).stepped(exact_distances)
        if self.is_step:
            return result
        assert result.scores is not None
        return result.scores

    def accuracy(self, dtype: torch.dtype) -> float:
        """The relative error that pylate_flash stays within, of distances or of a step's gradients.

        If two points are equally near up to rounding, either may win; a few among 131072 change a gradient by this
        much.
        """
        return 1e-2 if self.is_step else exact.accuracy(dtype)

    def ours(self) -> list[Candidate]:
        """The public `chamfer`, as a user calls it."""
        from pylate_flash import chamfer

        return [self.candidate("chamfer", chamfer)]

    def flash_maxsim(self) -> list[Candidate]:
        """flash-maxsim, one pair at a time; with gradients, either of its backwards."""
        from flash_maxsim import flash_chamfer, flash_chamfer_invgrid_train, flash_chamfer_train

        def of_pairs(function: Callable, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.stack([function(*pair) for pair in zip(x, y, strict=True)])

        functions = (flash_chamfer_train, flash_chamfer_invgrid_train) if self.is_step else (flash_chamfer,)
        return [self.candidate(function.__name__, partial(of_pairs, function)) for function in functions]

    def torch(self) -> list[Candidate]:
        """`torch.cdist`, the plain way."""
        return [self.candidate("cdist", cdist_distances)]


def make_inputs(row: Sets, device: torch.device, dtype: torch.dtype) -> Pairs:
    """Draw points from a cube, reproducible per row and device type."""
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
