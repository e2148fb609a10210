"""The benchmark from a checkout: the same as ``fusedconv bench``."""

from fusedconv.cli import bench

if __name__ == "__main__":
    bench()
