"""`python -m enginewatch`: the same command line without the installed script."""

import sys

from enginewatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
