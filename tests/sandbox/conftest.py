from __future__ import annotations

import pytest

from opd.environments.sandbox.protocol import SandboxError
from opd.environments.sandbox.substrates import KINDS, Substrate, find_substrate


@pytest.fixture(params=KINDS)
def substrate(request: pytest.FixtureRequest) -> Substrate:
    """Each that works here."""
    try:
        return find_substrate(request.param)
    except SandboxError as error:
        pytest.skip(str(error))
