"""The benchmark from a checkout: the same as ``fusedconv bench``."""

import sys

from fusedconv.cli import main

if __name__ == "__main__":
    main(["bench", *sys.argv[1:]])
