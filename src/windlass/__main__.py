"""`python -m windlass`: the same as the `windlass` command."""

import sys

from windlass.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
