"""The KL over one sequence of a million tokens: memory by the chunk, values as in float64."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from long_kl_worker import VOCABULARY, WIDTH

WORKER = Path(__file__).with_name("long_kl_worker.py")
MIB = 1 << 20
NUMBERS_PER_TOKEN = 12
"""Vectors `[T]` of four bytes that may live at once: weights, values, what arrives from above, and what the
backward compares them by."""
SLACK = 16 * MIB

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="reads the peak from Linux"
)


def measured(tokens: int, chunk: int) -> dict:
    result = subprocess.run(
        [sys.executable, str(WORKER), str(tokens), str(chunk)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OPD_KERNELS": "chunked", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("tokens", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_memory_of_many_tokens_is_set_by_the_chunk(tokens: int) -> None:
    """Upper bounds alone: what the matrix library needs beside a chunk's logits differs by processor. Of at
    most three processes the first that keeps to them: how memory was laid out at the start moves a peak by
    some MiB.
    """
    per_token = tokens * 4 * (WIDTH + NUMBERS_PER_TOKEN)
    for chunk in (1024, 16384) if tokens > 100_000 else (1024,):
        most = min(per_token + 2 * chunk * VOCABULARY * 4 + SLACK, tokens * VOCABULARY * 4 / 10)
        peaks: list[int] = []
        while len(peaks) < 3 and (not peaks or peaks[-1] >= most):
            numbers = measured(tokens, chunk)
            assert max(numbers["errors"]) < 1e-5
            peaks.append(numbers["peak"])
        assert peaks[-1] < most, peaks
        assert peaks[-1] > tokens * 4 * WIDTH / 2  # the gradient alone: it was the peak that was read
