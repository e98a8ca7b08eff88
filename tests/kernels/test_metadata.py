"""Signatures of calls, in C and in Python, differ where a property that they inspect differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from pylate_flash.ops import operator
from pylate_flash.problem import rounded_total
from tests.ops.test_lists import compiles

WAYS = [pytest.param("C", marks=compiles), "Python"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Describe tensors this way, on the CPU too."""
    use(monkeypatch, request.param)
    return request.param


def use(patch: pytest.MonkeyPatch, way: str) -> None:
    patch.setattr(operator, "repeated_devices", -1)
    if way == "Python":
        patch.setattr(operator, "describer", lambda: None)
    else:
        assert operator.describer() is not None


def plain() -> Tensor:
    return torch.randn(2, 3, 16)


def signed(*tensors: Tensor | None, packed: int = -1) -> operator.Signature:
    return operator.signature("f", tensors, (), packed)


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.randn(2, 4, 16),
        lambda: torch.randn(2, 16, 3).transpose(1, 2),
        lambda: plain().half(),
        lambda: plain().requires_grad_(),
        lambda: torch.randn(2 * 3 * 16 + 1)[1:].view(2, 3, 16),
        lambda: plain()[0],
        lambda: None,
    ],
    ids=["shape", "strides", "type", "gradient", "alignment", "dimensions", "none"],
)
def test_the_signature_of_a_tensor(other: Callable[[], Tensor | None], way: str) -> None:
    x = plain()
    assert signed(x, plain()) == signed(x, plain())
    assert signed(x, plain()) != signed(x, other())
    assert signed(x, plain(), None) != signed(x, None, plain())


DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.bool


@st.composite
def tensors(draw: st.DrawFn) -> Tensor | None:
    shape = draw(st.lists(st.integers(1, 2), max_size=3))
    if draw(st.integers(0, 4)) == 0:
        return None
    dtype, offset = draw(st.sampled_from(DTYPES[: draw(st.integers(1, len(DTYPES)))])), draw(st.sampled_from([0, 0, 1]))
    memory = torch.zeros(offset + 4 ** len(shape), dtype=dtype)
    # Stride 2 along some dimensions, and dimensions in any order.
    strides = [4**i * draw(st.sampled_from([1, 1, 2])) for i in range(len(shape))]
    result = memory.as_strided(shape, draw(st.permutations(strides)), offset)
    return result.requires_grad_(dtype.is_floating_point and draw(st.booleans()))


@compiles
@settings(max_examples=400)
@given(calls=st.lists(st.lists(tensors(), max_size=2), min_size=2, max_size=2), recorded=st.booleans())
@example(calls=[[torch.zeros(1, 16)], [torch.zeros(16, 1).t()]], recorded=True)
def test_calls_are_alike_in_c_where_they_are_in_python(calls: list, recorded: bool) -> None:
    results = []
    for way in ("C", "Python"):
        with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(recorded):
            use(patch, way)
            results.append([signed(None, plain(), *call) for call in calls])
    assert (results[0][0] == results[0][1]) == (results[1][0] == results[1][1])
    # In C, a tensor is described by bytes.
    assert [isinstance(signature[-1], bytes) for signature in (*results[0], *results[1])] == [True] * 2 + [False] * 2


@pytest.mark.parametrize("needed", [False, True])
def test_totals_are_told_as_they_are_planned_for(needed: bool, way: str) -> None:
    """Totals are rounded, unless one of the tensors needs a gradient."""
    query = torch.randn(4, 16, requires_grad=needed)
    totals = range(120, 140)
    results = {total: signed(query, torch.randn(total, 16), packed=1) for total in totals}
    planned_total = (lambda total: total) if needed else rounded_total
    for total in totals:
        same = {other for other in totals if planned_total(other) == planned_total(total)}
        assert {other for other in totals if results[other] == results[total]} == same
    with torch.no_grad():
        assert signed(query, torch.randn(130, 16), packed=1) == signed(query, torch.randn(131, 16), packed=1)
    assert signed(query, None, packed=1) == signed(query, None, packed=1)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_signature_of_what_is_in_force(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = plain()
    result = {operator.signature("f", (x,), (1.0, "sum"))}
    result |= {operator.signature("f", (x,), options) for options in ((True, "sum"), (1, "sum"), (1.0, "mean"))}
    with torch.no_grad():
        result.add(operator.signature("f", (x,), (1.0, "sum")))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        result.add(operator.signature("f", (x,), (1.0, "sum")))
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(result) == 6
    assert signed(x.to_sparse()) is signed(x, x.to_sparse()) is operator.UNREPEATED
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert signed(nested) is signed(x, nested) is operator.UNREPEATED
    assert signed(x, torch.ones(2).as_subclass(type("Own", (Tensor,), {}))) is operator.NOT_PLAIN
    with FakeTensorMode():
        assert signed(x) is operator.NOT_PLAIN
    monkeypatch.setattr(operator, "repeated_devices", 0)
    assert signed(x) is operator.UNREPEATED
    assert signed(x, torch.empty(1, device="meta")) is operator.NOT_PLAIN


@compiles
def test_more_than_c_has_room_for_is_described_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "C")
    many = [torch.randn(1)] * 400
    assert isinstance(signed(*many[:300])[-1], bytes)
    assert not isinstance(signed(*many)[-1], bytes)
    assert signed(*many) == signed(*many)
    assert not isinstance(signed(*[plain(), *[None] * 2000])[-1], bytes)


@pytest.fixture
def anew() -> Iterator[None]:
    """Clear the cached describer, before the test and after it."""
    operator.describer.cache_clear()
    yield
    operator.describer.cache_clear()


@compiles
def test_what_describes_tensors_is_found_whatever_the_default_device(anew: None) -> None:
    with torch.device("meta"):
        assert operator.describer() is not None


ERRORS = [AttributeError("no such type"), OSError("no cache"), RuntimeError("no compiler")]


@pytest.mark.parametrize("error", [*ERRORS, None], ids=repr)
def test_without_a_compiler_tensors_are_described_in_python(error: Exception | None, anew, monkeypatch, caplog) -> None:
    """Or with another version of DLPack (None); the reason is logged, once."""
    metadata = pytest.importorskip("pylate_flash.kernels.metadata")
    if error is None and not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("an older torch")

    def compiled() -> SimpleNamespace:
        if error is not None:
            raise error
        return SimpleNamespace(describe=lambda *arguments: None)

    monkeypatch.setattr(metadata, "_compiled", compiled)
    monkeypatch.setattr(operator, "repeated_devices", -1)
    with caplog.at_level("INFO", logger=operator.__name__):
        x = plain()
        assert signed(x, plain()) == signed(x, plain()) != signed(plain(), x.half())
    (record,) = caplog.records
    assert record.getMessage().endswith("another version of DLPack" if error is None else str(error))
