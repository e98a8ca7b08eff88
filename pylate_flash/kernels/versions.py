"""Differences between the versions of Triton that the kernels are tested with: 3.6 to 3.9."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

# The first version and the last one.
TESTED = (3, 6), (3, 9)


@functools.cache
def triton_version() -> tuple[int, int]:
    """Major and minor number of the installed Triton."""
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


@functools.cache
def has_gluon() -> bool:
    """Whether Gluon is available, in the form that the Hopper kernels use."""
    try:
        from triton.experimental.gluon.language.nvidia import hopper  # noqa: F401
    except ImportError:
        return False
    return triton_version() >= TESTED[0]


def copy_to_shared(module: ModuleType) -> Any:
    """The function of a Gluon copy module that copies from global to shared memory.

    Since 3.8 it is called `async_load`, and the previous name raises an error.
    """
    return getattr(module, "async_load", None) or module.async_copy_global_to_shared


def reinterpret(descriptor: type) -> Any:
    """The method of Gluon's shared memory descriptors that changes dtype, shape and layout; private before 3.9."""
    return getattr(descriptor, "reinterpret", None) or descriptor._reinterpret  # type: ignore[attr-defined]


def lanes_go_to_the_last() -> bool:
    """Whether, of dimensions that it does not know to be contiguous, Triton assigns a warp's lanes to the last one."""
    return triton_version() >= (3, 7)


def better_ptxas() -> tuple[str, str] | None:
    """Path and version of the ptxas that should compile for Hopper instead of the one that Triton chooses, if any.

    Triton copies the register operand of a wgmma before each since 3.7. ptxas 13, which 3.9 chooses, keeps many of the
    copies, and spills other registers; ptxas 12, which the wheel of 3.9 has too, removes all of them.
    """
    from triton import knobs

    if triton_version() < (3, 9):
        return None
    try:
        chosen, other = knobs.nvidia.ptxas_blackwell, knobs.nvidia.ptxas
    except (AttributeError, RuntimeError):
        # Triton means to remove the second one.
        return None
    chosen_major, other_major = (int(tool.version.split(".")[0]) for tool in (chosen, other))
    return (other.path, other.version) if other_major < 13 <= chosen_major else None


def launcher_is_known() -> bool:
    """Whether the arguments of Triton's C function that launches a compiled kernel, which is private, are known."""
    return TESTED[0] <= triton_version() <= TESTED[1]
