from __future__ import annotations

import pytest

from pylate_flash.kernels import tables


@pytest.fixture(params=[80, 90, 100, 120])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A compute capability, reported to the choice of kernels and tiles as that of the device."""
    monkeypatch.setattr(tables, "architecture", lambda device: (request.param // 10, 132))
    return request.param
