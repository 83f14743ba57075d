"""Make `python -m opd` do the same as `opd`."""

import sys

from opd.pipelines.cli import main

if __name__ == "__main__":
    sys.exit(main())
