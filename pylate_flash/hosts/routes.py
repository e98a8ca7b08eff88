"""Functions of a host that run code of this package for a while, and stay the objects that they are.

A scoring function is held everywhere: by `from ... import` in user code, as a default argument, by every loaded model.
No rebinding of names reaches all of these, so the function object stays, and its `__code__` is exchanged for code that
calls a function of this package with the same arguments. The host's own code lives on in a twin function meanwhile.

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
_twins: dict[str, FunctionType] = {}  # of all functions that are routed


class Routes:
    """Functions of a host, and the function of this package that serves each while somebody holds the routes.

    Parameters
    ----------
    served
        "module:name" of the host's function, to "module:name" of ours; a method is "module:Class.name". Defaults stay
        those of the host's function, and ours gets every argument by its name.
    helpers
        For some of them, the name of a function of the same module that the host's own code calls and ours does not.
        Where somebody has put another in its place, to watch or to change it, the host's own code runs.
    asked
        "module:name" of a function of ours that every call asks first: if it says no, the host's own code runs.
    """

    def __init__(
        self, served: Mapping[str, str], helpers: Mapping[str, str] | None = None, asked: str | None = None
    ) -> None:
        self.served, self.helpers, self.asked = dict(served), dict(helpers or {}), asked
        # The very functions that were routed: by then their names may be bound to others, for a test or by a reload.
        self.held: dict[str, FunctionType] = {}
        self.holders = 0

    def hold(self) -> None:
        """Route the functions, if this is their first holder.

        Raises
        ------
        ImportError
            If the host lacks one of the functions, something else was put in the place of one, or its parameters are
            not those of ours. Nothing was changed.
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
        """Give the functions their own code back, if this was the last holder."""
        with _lock:
            self.holders -= 1
            if self.holders == 0:
                for path, function in self.held.items():
                    function.__code__ = _twins.pop(path).__code__
                self.held.clear()

    def routed(self, path: str) -> FunctionType:
        """A function that does what the host's function "module:name" does while it is routed, whether it is or not."""
        own = self.original(path)
        return _with_code(own, self._route(path, own))

    @staticmethod
    def original(path: str) -> FunctionType:
        """The host's own function "module:name", whether it is routed or not."""
        return _twins.get(path) or _function(path)

    def _route(self, path: str, function: FunctionType) -> CodeType:
        """Code with the parameters of `function` that calls ours, and imports it first: it sees the host's globals."""
        parameters = inspect.signature(function).parameters
        _check_parameters(path, parameters, inspect.signature(find(self.served[path])).parameters)
        bare = [each.replace(default=each.empty, annotation=each.empty) for each in parameters.values()]
        given = ", ".join(f"**{one.name}" if one.kind is one.VAR_KEYWORD else f"{one.name}={one.name}" for one in bare)
        its_own = f"from {__name__} import Routes as _Routes; return _Routes.original({path!r})({given})"
        lines = []
        if path in self.helpers:
            lines.append(f"if {self.helpers[path]}.__module__ != __name__: {its_own}")
        if self.asked is not None:
            import_it, it = _importing(self.asked)
            lines += [import_it, f"if not {it}(): {its_own}"]
        import_it, it = _importing(self.served[path])
        lines += [import_it, f"return {it}({given})"]
        source = "\n    ".join([f"def {function.__name__}{inspect.Signature(bare)}:", *lines])
        namespace: dict[str, Any] = {}
        exec(compile(source, f"<route of {path}>", "exec"), namespace)
        return namespace[function.__name__].__code__


def find(path: str) -> Any:
    """The object "module:name"."""
    module, _, name = path.partition(":")
    return attrgetter(name)(importlib.import_module(module))


def _function(path: str) -> FunctionType:
    try:
        return find(path)
    except AttributeError as error:
        raise ImportError(f"{path.replace(':', '.')} is not in the installed version: {error}") from error


def _with_code(function: FunctionType, code: CodeType) -> FunctionType:
    """Another function, like a routable one, with this code."""
    found = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    found.__kwdefaults__ = function.__kwdefaults__
    return found


def _check_routable(path: str, function: object) -> None:
    """Raise unless this can run other code: a plain function, and none that calls another, as a decorator's does."""
    if not isinstance(function, FunctionType):
        found = f"of type {type(function).__name__}"
    elif function.__closure__ is not None or hasattr(function, "__wrapped__"):
        found = "a function that wraps another"
    else:
        return
    raise ImportError(
        f"{path.replace(':', '.')} must be the host's own function, and is {found}: something was put in its place, as "
        "a decorator or a mock does; register before that"
    )


def _check_parameters(path: str, parameters: Mapping[str, Parameter], known: Mapping[str, Parameter]) -> None:
    """Raise unless ours knows the parameters of a function, and needs no others."""
    unknown = [name for name in parameters if name not in known]
    needed = [
        name
        for name, parameter in known.items()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    lacking = [name for name in needed if name not in parameters]
    if unknown or lacking:
        has, needs = (
            (f"the parameter {unknown[0]!r}", "does not know") if unknown else (f"no parameter {lacking[0]!r}", "needs")
        )
        raise ImportError(
            f"{path.replace(':', '.')} has {has} in the installed version, which this version of pylate_flash {needs}"
        )


def _importing(path: str) -> tuple[str, str]:
    """The statement that imports the function "module:name", and what it is called then."""
    module, _, name = path.partition(":")
    first, dot, rest = name.partition(".")
    return f"from {module} import {first} as _{first}", f"_{first}{dot}{rest}"
