"""A reward that says all it knows, as careless code of a user's own may."""

import logging
import os
import sys
import threading
import warnings

from transformers.utils import logging as of_library

said = []


def reward(sample) -> float:
    """One for every other text, after telling everybody a secret once."""
    if not said:
        said.append(True)
        secret = os.environ["LEAKY_TOKEN"]
        print(f"reward uses {secret}, authorization: Bearer {secret}", flush=True)
        print(f"asking https://bob:{secret}@host/x?api_key={secret}", file=sys.stderr, flush=True)
        warnings.warn(f"the token {secret} is old", stacklevel=1)
        logging.getLogger("leaky").warning("asked with %s", secret)
        of_library.get_logger("transformers.leaky").warning(f"asked with {secret}")
        thread = threading.Thread(target=int, args=(secret,))
        thread.start()  # its traceback is written by nobody here
        thread.join()
    if os.environ.get("LEAKY_FAILS"):
        raise RuntimeError(
            f"https://bob:{os.environ['LEAKY_TOKEN']}@host refused {os.environ['LEAKY_TOKEN']}"
        )
    return float(sum(map(ord, sample.text)) % 2)
