"""``python -m fusedconv`` is the command ``fusedconv``."""

from fusedconv.cli import main

if __name__ == "__main__":
    main(prog_name="fusedconv")
