"""Compile kernels for a GPU that is not here, with the arguments of a real launch.

A launch function runs up to the launch, which is recorded, and compiled for the target instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.language import target_info

from pylate_flash.kernels.launch import Described, Kernel, Region, tensor_of

TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.bool: "*i1", torch.int8: "*i8", torch.uint8: "*u8", torch.int16: "*i16", torch.uint16: "*u16",
    torch.int32: "*i32", torch.int64: "*i64", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
# Shared memory that one block may take, in bytes, by compute capability.
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


class Recorder(Kernel):
    """Keeps what a kernel is launched with the last time, as `arguments`, and compiles that for a target instead."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel.function, kernel.follows)
        self.arguments: tuple | None = None
        self.launches = 0

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor | Region | None, ...],
        numbers: tuple[float, ...],
        strides: tuple[int, ...],
        constants: tuple,
        warps: tuple[int, int, int | None],
        described: tuple[Described, ...] = (),
    ) -> None:
        assert len(grid) == 3
        assert all(programs >= 1 for programs in grid)
        assert tensors[0] is not None
        assert numbers
        hash((constants, warps))
        self.arguments = (*map(tensor_of, tensors), *numbers, *strides, *constants)
        self.described = described
        self.options = dict(zip(("num_warps", "num_stages", "maxnreg"), warps, strict=True))
        self.launches += 1

    def compile(self, capability: int) -> Any:
        """The recorded launch compiled for a compute capability such as 90."""
        assert self.arguments is not None, "the kernel was not launched"
        signature, constants, attributes = {}, {}, {}
        for index, (parameter, value) in enumerate(zip(self.function.params, self.arguments, strict=True)):
            name = parameter.name
            if index < len(self.described):
                matrix = self.described[index]
                assert matrix.rows * matrix.columns == value.numel()
                signature[name] = f"tensordesc<{TYPES[value.dtype][1:]}{list(matrix.block)},{matrix.layout!r}>"
            elif isinstance(value, Tensor):
                signature[name] = TYPES[value.dtype]
                attributes[(index,)] = [["tt.divisibility", 16]]
            elif parameter.is_constexpr or value is None:
                signature[name] = "constexpr"
                constants[name] = value
            elif value == 1 and not parameter.do_not_specialize:
                signature[name] = "constexpr"
                constants[name] = 1
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                signature[name] = "i32"
                if not parameter.do_not_specialize and value % 16 == 0:
                    attributes[(index,)] = [["tt.divisibility", 16]]
        # As Triton writes them for those who hear of what is compiled.
        json.dumps([str(value) if type(value).__name__ == "dtype" else value for value in constants.values()])
        language = GluonASTSource if self.function.is_gluon() else ASTSource
        source = language(self.function, signature, constants, attributes)
        target = GPUTarget("cuda", capability, 32)
        overlaps = self.follows and capability >= 90
        with pytest.MonkeyPatch.context() as patch:

            def current_target() -> GPUTarget:
                return target

            current_target.__triton_builtin__ = True
            patch.setattr(target_info, "current_target", current_target)
            compiled = triton.compile(
                source, target=target, options=self.options | {"launch_pdl": overlaps, "enable_fp_fusion": True}
            )
        # Programs that start early wait for what they read; older devices know neither.
        assert ("griddepcontrol.wait" in compiled.asm["ptx"]) is overlaps
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared <= SHARED_MEMORY[capability]
        return compiled


def record(module: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Put a recorder in place of a module's kernel, which has this name and `_kernel`."""
    recorder = Recorder(getattr(module, f"{name}_kernel"))
    monkeypatch.setattr(module, f"{name}_kernel", recorder)
    return recorder


def check(
    module: ModuleType, name: str, launch: Callable[[], object], capability: int, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Compile the kernel of this name in `module` as `launch` launches it."""
    recorder = record(module, name, monkeypatch)
    launch()
    return recorder.compile(capability)


def check_launches(
    kernels: dict[ModuleType, tuple[str, ...]],
    launch: Callable[[], object],
    names: set[str],
    capability: int,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Any]:
    """Compile all that `launch` launches: of `kernels`, modules and names in them, those of `names` and no others.

    Returned is what was compiled, by name.
    """
    with monkeypatch.context() as patch:
        recorders = {name: record(module, name, patch) for module, found in kernels.items() for name in found}
        launch()
    launched = {name: recorder for name, recorder in recorders.items() if recorder.launches}
    assert set(launched) == names
    return {name: recorder.compile(capability) for name, recorder in launched.items()}
