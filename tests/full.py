"""Whether a run of the tests tries everything (`--full`), for helpers and child processes, too."""

import os

FULL = "OPD_FULL_TESTS" in os.environ
