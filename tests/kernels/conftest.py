"""The implementations of the kernels. The tests' helpers are importable by name."""

import pytest
from kl_problems import IMPLEMENTATIONS


@pytest.fixture(params=IMPLEMENTATIONS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OPD_KERNELS", request.param)
    return request.param
