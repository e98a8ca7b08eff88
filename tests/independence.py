"""Isolation: no test depends on those that ran before it, in its process or in another.

Shared state (module constants of test files, fixtures of wider than function scope, the namespaces of the package's
modules, process settings) must not change: a test that changes it fails, and the state is restored for the tests after
it. Random generators are seeded by the name of the file, fixture or test that draws from them.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch


def seed(name: str) -> None:
    """Seed all random generators from this name."""
    number = zlib.crc32(name.encode())
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


class Held(NamedTuple):
    """A tensor or array shared by tests, and a copy of its original memory."""

    name: str
    value: Tensor | np.ndarray
    memory: Tensor | np.ndarray

    def is_changed(self) -> bool:
        """Return whether the value has changed, and restore it."""
        memory = _memory(self.value)
        if isinstance(memory, Tensor):
            changed = not torch.equal(memory, self.memory)
        else:
            changed = memory.tobytes() != self.memory.tobytes()
        if changed:
            memory[...] = self.memory
        return changed


def _memory(value: Tensor | np.ndarray) -> Tensor | np.ndarray:
    """The bytes of a tensor, whatever its type and strides."""
    if isinstance(value, np.ndarray):
        return value
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())


def _held(name: str, value: Any, within: tuple[Any, ...] = ()) -> Iterator[Held]:
    """Yield the tensors and arrays in a value, skipping values that contain themselves (`within` are its parents)."""
    if any(value is outer for outer in within):
        return
    named: dict[str, Any] = {}
    if isinstance(value, np.ndarray) or (isinstance(value, Tensor) and value.layout == torch.strided):
        if isinstance(value, np.ndarray) or not value.is_meta:
            yield Held(name, value, _memory(value).copy() if isinstance(value, np.ndarray) else _memory(value).clone())
    elif isinstance(value, dict):
        named = {f"{name}[{key!r}]": item for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        named = {f"{name}[{index}]": item for index, item in enumerate(value)}
    elif isinstance(value, nn.Module):
        named = {f"{name}.{key}": item for key, item in [*value.named_parameters(), *value.named_buffers()]}
    elif is_dataclass(value) and not isinstance(value, type):
        named = {f"{name}.{field.name}": getattr(value, field.name, None) for field in fields(value)}
    for key, item in named.items():
        yield from _held(key, item, (*within, value))


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def _set_environment(values: dict[str, str]) -> None:
    current = _environment()
    for name in current.keys() - values.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in values.items() if current.get(name) != value})


_PRODUCTS: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


def _float32_precision() -> list[str]:
    """Matmul precision; `torch.get_float32_matmul_precision` raises if newer settings were used. "none" is "ieee"."""
    return [backend.fp32_precision.replace("none", "ieee") for backend in _PRODUCTS]


def _set_float32_precision(precisions: list[str]) -> None:
    # Reset the older setting, which is stored separately from these.
    torch.set_float32_matmul_precision("highest")
    for backend, precision in zip(_PRODUCTS, precisions, strict=True):
        backend.fp32_precision = precision


# Process settings: a getter and a setter for each.
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "torch's default type": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (torch.get_default_device, torch.set_default_device),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's float32 precision": (_float32_precision, _set_float32_precision),
    "torch's determinism": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "torch's gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    # Dynamo compiles nothing while these are set.
    "torch's flags of dispatch modes": (
        lambda: {name: value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")},
        vars(_python_dispatch).update,
    ),
    "numpy's treatment of errors": (np.geterr, lambda kinds: np.seterr(**kinds)),
    "the working folder": (os.getcwd, os.chdir),
    "what an interrupt does": (
        lambda: signal.getsignal(signal.SIGINT), lambda handler: signal.signal(signal.SIGINT, handler),
    ),
}  # fmt: skip
# State that commands and libraries change for the rest of their process, which here is the next test.
TAKEN_BACK: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (_environment, _set_environment),
    (lambda: [*sys.path], lambda path: sys.path.__setitem__(slice(None), path)),
)


def _names() -> dict[str, dict[str, Any]]:
    """Snapshot of the namespaces of the package's modules."""
    modules = [(name, module) for name, module in sys.modules.items() if name.partition(".")[0] == "pylate_flash"]
    return {name: dict(vars(module)) for name, module in modules}


def _renamed(before: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the module names that were rebound since the snapshot, and restore them."""
    for module, names in before.items():
        current = vars(sys.modules[module])
        for name, value in names.items():
            # A missing name is fine: compilers add temporary ones.
            if current.get(name, value) is not value:
                current[name] = value
                yield f"{module}.{name}"


def _forget_compiled() -> None:
    """Reset Dynamo: a function that hit the recompile limit for shapes would run uncompiled from then on."""
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    if convert_frame is not None and convert_frame.input_codes.seen:
        torch._dynamo.reset()


_of_modules: dict[str, list[Held]] = {}
_of_fixtures: dict[pytest.FixtureDef, list[Held]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef) -> Iterator[None]:
    seed(fixturedef.argname)
    value = yield
    if fixturedef.scope != "function":
        _of_fixtures[fixturedef] = [*_held(f"the fixture {fixturedef.argname}", value)]
    return value


def pytest_fixture_post_finalizer(fixturedef: pytest.FixtureDef) -> None:
    _of_fixtures.pop(fixturedef, None)


@pytest.fixture(autouse=True)
def unchanged(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that changes state which other tests read."""
    name = request.module.__name__
    if name not in _of_modules:
        constants = {key: value for key, value in vars(request.module).items() if not key.startswith("__")}
        _of_modules[name] = [held for key, value in constants.items() for held in _held(key, value)]
    names = _names()
    settings, restored = {name: read() for name, (read, _) in SETTINGS.items()}, [read() for read, _ in TAKEN_BACK]
    yield
    changed = [*_renamed(names)]
    for setting, (read, write) in SETTINGS.items():
        if read() != settings[setting]:
            write(settings[setting])
            changed.append(setting)
    for (_, write), value in zip(TAKEN_BACK, restored, strict=True):
        write(value)
    _forget_compiled()
    changed += [held.name for some in (_of_modules[name], *_of_fixtures.values()) for held in some if held.is_changed()]
    if changed:
        pytest.fail(f"the test has changed {', '.join(changed)}, which other tests read", pytrace=False)
