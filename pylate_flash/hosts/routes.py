"""Routing: functions of a host temporarily run code of this package, and remain the same objects.

References to a scoring function exist everywhere: from `from ... import` in user code, as a default argument, in every
loaded model. Rebinding names cannot reach all of them, so the function object stays, and its `__code__` is replaced by
code that calls a function of this package with the same arguments. A twin function keeps the host's own code meanwhile.

Importing this module imports neither torch nor a host.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Mapping
from inspect import Parameter
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any

_lock = threading.RLock()
_twins: dict[str, FunctionType] = {}  # path of each routed function to a copy with the host's own code


class Routes:
    """Functions of a host, and the function of this package that serves each while the routes are held.

    Parameters
    ----------
    served
        "module:name" of the host's function, to "module:name" of ours; a method is "module:Class.name". The defaults of
        the host's function apply, and ours receives every argument by keyword.
    helpers
        For some of them, the name of a function in the same module that the host's own code calls and ours does not. If
        it has been replaced, to observe or change it, the host's own code runs.
    asked
        "module:name" of a predicate of ours that every call evaluates first: if false, the host's own code runs.
    """

    def __init__(
        self, served: Mapping[str, str], helpers: Mapping[str, str] | None = None, asked: str | None = None
    ) -> None:
        self.served, self.helpers, self.asked = dict(served), dict(helpers or {}), asked
        # The routed function objects: on release their names may be bound to others, by a test or a reload.
        self.held: dict[str, FunctionType] = {}
        self.holders = 0

    def hold(self) -> None:
        """Route the functions if this is their first holder.

        Raises
        ------
        ImportError
            If the host lacks one of the functions, one has been replaced, or its parameters do not match those of
            ours. Nothing is changed then.
        """
        with _lock:
            if self.holders == 0:
                functions = {path: _function(path) for path in self.served}
                for path, function in functions.items():
                    _check_routable(path, function)
                routes = {path: self._route(path, function) for path, function in functions.items()}
                for path, function in functions.items():
                    _twins[path] = _with_code(function, function.__code__)
                    self.held[path] = function
                    function.__code__ = routes[path]
            self.holders += 1

    def release(self) -> None:
        """Restore the functions' own code if this was the last holder."""
        with _lock:
            self.holders -= 1
            if self.holders == 0:
                for path, function in self.held.items():
                    function.__code__ = _twins.pop(path).__code__
                self.held.clear()

    def routed(self, path: str) -> FunctionType:
        """Return a function that behaves like the host's function "module:name" while routed, whether it is or not."""
        original = self.original(path)
        return _with_code(original, self._route(path, original))

    @staticmethod
    def original(path: str) -> FunctionType:
        """Return the host's own function "module:name", whether it is routed or not."""
        return _twins.get(path) or _function(path)

    def _route(self, path: str, function: FunctionType) -> CodeType:
        """Compile code with the signature of `function` that imports and calls ours; its globals are the host's."""
        parameters = inspect.signature(function).parameters
        _check_parameters(path, parameters, inspect.signature(find(self.served[path])).parameters)
        bare = [param.replace(default=param.empty, annotation=param.empty) for param in parameters.values()]
        args = ", ".join(f"**{arg.name}" if arg.kind is arg.VAR_KEYWORD else f"{arg.name}={arg.name}" for arg in bare)
        call_original = f"from {__name__} import Routes as _Routes; return _Routes.original({path!r})({args})"
        lines = []
        if path in self.helpers:
            lines.append(f"if {self.helpers[path]}.__module__ != __name__: {call_original}")
        if self.asked is not None:
            statement, target = _importing(self.asked)
            lines += [statement, f"if not {target}(): {call_original}"]
        statement, target = _importing(self.served[path])
        lines += [statement, f"return {target}({args})"]
        source = "\n    ".join([f"def {function.__name__}{inspect.Signature(bare)}:", *lines])
        namespace: dict[str, Any] = {}
        exec(compile(source, f"<route of {path}>", "exec"), namespace)
        return namespace[function.__name__].__code__


def find(path: str) -> Any:
    """Import the object "module:name"."""
    module, _, name = path.partition(":")
    return attrgetter(name)(importlib.import_module(module))


def _function(path: str) -> FunctionType:
    try:
        return find(path)
    except AttributeError as error:
        raise ImportError(f"{path.replace(':', '.')} is not in the installed version: {error}") from error


def _with_code(function: FunctionType, code: CodeType) -> FunctionType:
    """Copy a routable function, with other code."""
    result = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    result.__kwdefaults__ = function.__kwdefaults__
    return result


def _check_routable(path: str, function: object) -> None:
    """Raise unless this can run other code: a plain function, not a wrapper such as a decorator returns."""
    if not isinstance(function, FunctionType):
        got = f"an object of type {type(function).__name__}"
    elif function.__closure__ is not None or hasattr(function, "__wrapped__"):
        got = "a function that wraps another"
    else:
        return
    raise ImportError(
        f"{path.replace(':', '.')} must be the host's own function, got {got}: something replaced it, such as a "
        "decorator or a mock; register before that"
    )


def _check_parameters(path: str, parameters: Mapping[str, Parameter], our_parameters: Mapping[str, Parameter]) -> None:
    """Raise unless ours accepts all parameters of the host's function and requires no others."""
    unknown = [name for name in parameters if name not in our_parameters]
    required = [
        name
        for name, parameter in our_parameters.items()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    missing = [name for name in required if name not in parameters]
    if unknown or missing:
        has, needs = (
            (f"the parameter {unknown[0]!r}", "does not know") if unknown else (f"no parameter {missing[0]!r}", "needs")
        )
        raise ImportError(
            f"{path.replace(':', '.')} has {has} in the installed version, which this version of pylate_flash {needs}"
        )


def _importing(path: str) -> tuple[str, str]:
    """Return the statement that imports the function "module:name", and the expression that refers to it then."""
    module, _, name = path.partition(":")
    first, dot, rest = name.partition(".")
    return f"from {module} import {first} as _{first}", f"_{first}{dot}{rest}"
