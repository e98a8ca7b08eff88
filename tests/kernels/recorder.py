"""Compile kernels for a GPU that is not present, with the arguments of a real launch.

A launch function runs up to the launch, which is recorded and compiled for the target instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.language import target_info

from pylate_flash.kernels.launch import Kernel, Region, TmaMatrix, tensor_of

TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.bool: "*i1", torch.int8: "*i8", torch.uint8: "*u8", torch.int16: "*i16", torch.uint16: "*u16",
    torch.int32: "*i32", torch.int64: "*i64", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
# Maximum shared memory per thread block in bytes, by compute capability; of 8.x the least, which 8.6 and 8.9 have.
SHARED_MEMORY = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


class Launch:
    """The arguments of one kernel launch, and its compilation for a target."""

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor | Region | None, ...],
        numbers: tuple[float, ...],
        strides: tuple[int, ...],
        constants: tuple,
        warps: tuple[int, int, int | None],
        matrices: tuple[TmaMatrix, ...] = (),
    ) -> None:
        assert len(grid) == 3
        assert all(programs >= 1 for programs in grid)
        assert tensors[0] is not None
        assert numbers
        hash((constants, warps))
        self.kernel, self.matrices = kernel, matrices
        self.arguments = (*map(tensor_of, tensors), *numbers, *strides, *kernel.one_constant(constants))
        self.options = dict(zip(("num_warps", "num_stages", "maxnreg"), warps, strict=True))

    def specialization(self) -> tuple[dict, dict, dict]:
        """What Triton specializes the kernel on: argument types, constants, and attributes of integers and pointers."""
        signature, constants, attributes = {}, {}, {}
        for index, (parameter, value) in enumerate(zip(self.kernel.function.params, self.arguments, strict=True)):
            name = parameter.name
            if index < len(self.matrices):
                matrix = self.matrices[index]
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
        return signature, constants, attributes

    def compile(self, capability: int) -> Any:
        """Compile for a compute capability such as 90."""
        signature, constants, attributes = self.specialization()
        function = self.kernel.function
        # Triton serializes constants like this for its compilation listeners.
        json.dumps([str(value) if type(value).__name__ == "dtype" else value for value in constants.values()])
        language = GluonASTSource if function.is_gluon() else ASTSource
        source = language(function, signature, constants, attributes)
        target = GPUTarget("cuda", capability, 32)
        overlaps = self.kernel.follows and capability >= 90
        with pytest.MonkeyPatch.context() as patch:

            def current_target() -> GPUTarget:
                return target

            current_target.__triton_builtin__ = True
            patch.setattr(target_info, "current_target", current_target)
            compiled = triton.compile(
                source, target=target, options=self.options | {"launch_pdl": overlaps, "enable_fp_fusion": True}
            )
        # Kernels launched with PDL wait before they read their inputs; older devices support neither.
        assert ("griddepcontrol.wait" in compiled.asm["ptx"]) is overlaps
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared <= SHARED_MEMORY[capability]
        return compiled


@contextmanager
def recorded() -> Iterator[dict[str, list[Launch]]]:
    """Record launches instead of running them, by kernel name: "stacked" for `_stacked_kernel`."""
    if triton.knobs.runtime.interpret:
        pytest.skip("the interpreter compiles nothing")
    launches: dict[str, list[Launch]] = {}

    def record(kernel: Kernel, *arguments: Any) -> None:
        name = kernel.function.fn.__name__.strip("_").removesuffix("_kernel")
        launches.setdefault(name, []).append(Launch(kernel, *arguments))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kernel, "__call__", record)
        yield launches


def compiled(call: Callable[[], object], names: str, capability: int) -> dict[str, Any]:
    """Compile the last launch of each kernel in `call`, and check that it launches exactly the kernels `names`.

    The kernel that adds up partial sums of scores is launched as well, where there are several of these.
    """
    with recorded() as launches:
        call()
    assert set(launches) - {"sums"} == set(names.split())
    assert all(launch.arguments[2] > 1 for launch in launches.get("sums", []))
    return {name: kernel_launches[-1].compile(capability) for name, kernel_launches in launches.items()}
