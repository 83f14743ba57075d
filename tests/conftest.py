"""Shared by every test: a fixed number of threads, and the tests' own helpers importable as `tiny`."""

import os
import sys
from pathlib import Path

os.environ.setdefault("KMP_BLOCKTIME", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch

torch.set_num_threads(1)
