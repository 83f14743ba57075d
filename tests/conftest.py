"""Shared by every test: a fixed number of threads, and the tests' own helpers importable as `tiny`."""

import os
import sys
from pathlib import Path

os.environ.setdefault("KMP_BLOCKTIME", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
# The first call of a kernel warms caches, and shared machines pause: a deadline would test the machine.
settings.register_profile("opd", deadline=None, derandomize=True)
settings.load_profile("opd")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers (`pytest -n 2 --dist loadgroup`) a file's tests stay together, as their fixtures
    want, and all that needs the SGLang server is in one worker, so that there is one server."""
    for item in items:
        served = "sglang" in getattr(item, "fixturenames", ()) or item.path.name.startswith("test_sglang")
        item.add_marker(pytest.mark.xdist_group("sglang" if served else str(item.path)))
