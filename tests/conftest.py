"""Shared by every test: a fixed number of threads, and the tests' own helpers importable as `tiny`."""

import os
import sys
from pathlib import Path

os.environ.setdefault("KMP_BLOCKTIME", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from hypothesis import settings

torch.set_num_threads(1)
# The first call of a kernel warms caches, and shared machines pause: a deadline would test the machine.
settings.register_profile("opd", deadline=None, derandomize=True)
settings.load_profile("opd")
