"""The kernels of Chamfer distances: which point of the other set is nearest, both ways at once, and their gradient.

`meet` computes every product, or squared difference, of the points of two sets once, and takes from a tile the maxima
of its rows and those of its columns. `settle` computes how near a winner is from the two points themselves. The
gradient of a set is summed by programs that own its points (`gradient`), of the points listed by whom they chose.
"""

from __future__ import annotations

from ..plan_operations import meeting_plan
from .gradient import chamfer_gradient
from .inputs import Side
from .meet import meet
from .settle import settle

__all__ = ["Side", "chamfer_gradient", "meet", "meeting_plan", "settle"]
