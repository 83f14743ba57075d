"""Many tiny tensors: more threads only wait for one another. The tests' helpers are importable by name."""

import pytest
import torch
from kl_problems import IMPLEMENTATIONS


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=IMPLEMENTATIONS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OPD_KERNELS", request.param)
    return request.param
