"""A reward that says all it knows, as careless code of a user's own may."""

from __future__ import annotations

import os
import sys
import warnings

said = []


def reward(sample) -> float:
    """One for every other text, after telling everybody a secret once."""
    if not said:
        said.append(True)
        secret = os.environ["LEAKY_TOKEN"]
        print(f"reward uses {secret}, authorization: Bearer {secret}", flush=True)
        print(f"asking https://bob:{secret}@host/x?api_key={secret}", file=sys.stderr, flush=True)
        warnings.warn(f"the token {secret} is old", stacklevel=1)
    if os.environ.get("LEAKY_FAILS"):
        raise RuntimeError(
            f"https://bob:{os.environ['LEAKY_TOKEN']}@host refused {os.environ['LEAKY_TOKEN']}"
        )
    return float(sum(map(ord, sample.text)) % 2)
