"""Lets `python -m opd` do what `opd` does."""

import sys

from opd.pipelines.cli import main

if __name__ == "__main__":
    sys.exit(main())
