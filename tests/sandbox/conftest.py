from collections.abc import Iterator

import images
import pytest

from opd.sandbox.protocol import SandboxError
from opd.sandbox.substrates import KINDS, Substrate, find_substrate


@pytest.fixture(scope="session")
def podman() -> Iterator[None]:
    """Real containers, with the images of `images.py`; skipped with a reason where there are none."""
    with images.podman_or_reason() as reason:
        if reason is not None:
            pytest.skip(reason)
        yield


@pytest.fixture(params=KINDS)
def substrate(request: pytest.FixtureRequest) -> Substrate:
    """Each that works here."""
    if request.param == "container":
        request.getfixturevalue("podman")
        return find_substrate("container", images.PYTHON)
    try:
        return find_substrate(request.param)
    except SandboxError as error:
        pytest.skip(str(error))
