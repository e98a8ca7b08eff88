"""Routes: functions that temporarily run other code, on an artificial host."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from unittest import mock

import pytest

from pylate_flash import _extras
from pylate_flash.hosts.host import Host
from pylate_flash.hosts.routes import Routes


class Model:
    """A class of the host, with a method that is routed."""

    factor = 2

    def scale(self, value, *, by=3):
        return value * by * self.factor


def add(a, b=10, *, c=100):
    return a + b + c


def inner(a):
    return a


def outer(a):
    return inner(a)


def our_add(a, b, c, unused=None):
    return ("ours", a, b, c)


def our_scale(self, value, by):
    return ("ours", self.factor, value, by)


@pytest.fixture
def host():
    module = types.ModuleType("host_of_routes")
    module.add, module.Model, module.our_add, module.our_scale = add, Model, our_add, our_scale
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def routes(**served):
    return Routes({f"host_of_routes:{theirs}": f"host_of_routes:{ours}" for theirs, ours in served.items()})


def test_arguments_defaults_and_identity(host):
    result, signature, code = routes(add="our_add"), inspect.signature(add), add.__code__
    result.hold()
    try:
        assert add(1) == ("ours", 1, 10, 100)
        assert add(1, 2, c=3) == ("ours", 1, 2, 3)
        assert add(b=5, a=4) == ("ours", 4, 5, 100)
        assert inspect.signature(add) == signature
        assert result.original("host_of_routes:add")(1, c=2) == 13
        with pytest.raises(TypeError, match="add"):
            add()
    finally:
        result.release()
    assert add.__code__ is code
    assert add(1) == 111
    assert result.original("host_of_routes:add") is add


def test_methods(host):
    result = Routes({"host_of_routes:Model.scale": "host_of_routes:our_scale"})
    model = Model()
    bound = model.scale
    result.hold()
    assert bound(5) == model.scale(5) == ("ours", 2, 5, 3)
    assert result.original("host_of_routes:Model.scale")(model, 5, by=1) == 10
    result.release()
    assert bound(5, by=1) == 10


def test_the_hosts_own_code_runs_where_somebody_watches_it(host, monkeypatch):
    host.outer, host.our_outer = outer, lambda a: ("ours", a)
    watched = types.FunctionType((lambda a: ("watched", a)).__code__, {"__name__": "elsewhere"})
    result = Routes({"host_of_routes:outer": "host_of_routes:our_outer"}, helpers={"host_of_routes:outer": "inner"})
    result.hold()
    try:
        assert outer(1) == ("ours", 1)
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[__name__], "inner", watched)
            assert outer(1) == ("watched", 1)
        assert outer(1) == ("ours", 1)
    finally:
        result.release()
    assert outer(1) == 1


def test_a_call_that_is_under_way_when_the_routes_are_released(host, monkeypatch):
    class Watched:
        """Releases the routes while the call checks whose helper this is, as another thread may do."""

        @property
        def __module__(self):
            result.release()
            return "elsewhere"

        __call__ = staticmethod(inner)

    host.outer, host.our_outer = outer, lambda a: ("ours", a)
    result = Routes({"host_of_routes:outer": "host_of_routes:our_outer"}, helpers={"host_of_routes:outer": "inner"})
    result.hold()
    monkeypatch.setattr(sys.modules[__name__], "inner", Watched())
    assert outer(1) == 1
    assert result.holders == 0


def test_what_ours_is_asked_for(host):
    host.asked, host.Ours = [True, False].pop, types.SimpleNamespace(add=our_add)
    result = Routes({"host_of_routes:add": "host_of_routes:Ours.add"}, asked="host_of_routes:asked")
    result.hold()
    try:
        assert add(1) == 111
        assert add(1) == ("ours", 1, 10, 100)
    finally:
        result.release()


def test_several_holders(host):
    result = routes(add="our_add")
    result.hold()
    result.hold()
    result.release()
    assert add(1)[0] == "ours"
    result.release()
    assert add(1) == 111


def add_in_its_place(a, b=10, *, c=100):
    return "in its place"


def test_what_is_given_back_is_what_was_routed(host):
    """Whatever its name is bound to by then, as in a block of `mock.patch`, or after a reload."""
    result, code, other = routes(add="our_add"), add.__code__, add_in_its_place.__code__
    result.hold()
    host.add = add_in_its_place
    result.release()
    assert (add.__code__, add_in_its_place.__code__) == (code, other)
    assert add(1) == 111


@pytest.mark.parametrize("kind", ["closure", "wrapped", "mock"])
def test_what_is_not_the_hosts_own_function_changes_nothing(host, kind):
    def closure(a, b=10, *, c=100):
        return own(a, b, c=c)

    own, scale = add, Model.scale.__code__
    host.add = {
        "closure": closure,
        "wrapped": functools.wraps(add)(lambda *arguments, **options: add(*arguments, **options)),
        "mock": mock.Mock(wraps=add),
    }[kind]
    code, result = add.__code__, routes(**{"Model.scale": "our_scale", "add": "our_add"})
    with pytest.raises(ImportError, match="host_of_routes.add must be the host's own function.* register before that"):
        result.hold()
    assert (add.__code__, Model.scale.__code__) == (code, scale)
    assert (result.holders, result.held) == (0, {})


def test_a_function_that_is_missing_changes_nothing(host):
    result = routes(add="our_add", subtract="our_add")
    with pytest.raises(ImportError, match="host_of_routes.subtract is not in the installed version"):
        result.hold()
    assert (add(1), result.holders, result.held) == (111, 0, {})


def test_a_parameter_that_ours_does_not_know_changes_nothing(host):
    host.fewer = lambda a, b: None
    with pytest.raises(ImportError, match="host_of_routes.add has the parameter 'c' .* does not know"):
        routes(add="fewer").hold()
    assert add(1) == 111


def test_a_parameter_that_ours_needs_and_the_host_has_not_changes_nothing(host):
    host.more = lambda a, b, c, d: None
    with pytest.raises(ImportError, match="host_of_routes.add has no parameter 'd' .* needs"):
        routes(add="more").hold()
    assert add(1) == 111


def host_of(package, monkeypatch):
    about = _extras.Host("A Host", "a-host", "an-extra", ">=1.0,<2")
    monkeypatch.setitem(_extras.HOSTS, package, about)
    return Host(about, package, "1.0", None)


def test_a_host_that_is_not_installed_names_the_extra(monkeypatch):
    missing = host_of("no_host_of_this_name", monkeypatch)
    assert not missing.is_there()
    message = r'^what asks needs A Host, which is not installed: pip install "pylate-flash\[an-extra\]"'
    with pytest.raises(ImportError, match=message):
        missing.check("what asks")


def test_a_mere_folder_is_no_host(tmp_path, monkeypatch):
    """Such as a clone in the working directory, which Python imports as an empty namespace package."""
    (tmp_path / "folder_of_this_name").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    result = host_of("folder_of_this_name", monkeypatch)
    assert not result.is_there()
    with pytest.raises(_extras.MissingExtraError, match=r"a folder without an __init__.py.*pylate-flash\[an-extra\]"):
        result.check("what asks")


@pytest.mark.parametrize(("version", "got"), [("unknown", "'unknown'"), (None, "without a version")])
def test_a_version_that_cannot_be_compared(version, got, host, monkeypatch):
    host.__version__, host.__spec__ = version, types.SimpleNamespace(origin="host.py")
    result = host_of("host_of_routes", monkeypatch)
    for call in (result.is_there, lambda: result.check("what asks"), result.version):
        with pytest.raises(ImportError, match=f"supports A Host >=1.0,<2, but A Host {got} is installed; install a"):
            call()


@pytest.mark.parametrize(
    ("version", "there", "strict", "loose"),
    [
        ("0.9", False, False, False),
        ("1.0", True, True, True),
        ("1.9.dev0", True, True, True),
        ("2.1", True, False, True),
    ],
)
def test_versions(version, there, strict, loose, host, monkeypatch):
    host.__version__ = version
    host.__spec__ = types.SimpleNamespace(origin="host.py")
    result = host_of("host_of_routes", monkeypatch)
    assert result.is_there() is there
    for accepted, is_strict in ((strict, True), (loose, False)):
        if accepted:
            result.check("what asks", is_strict)
        else:
            with pytest.raises(ImportError, match=f"supports A Host >=1.0,<2, but A Host {version} is installed"):
                result.check("what asks", is_strict)
