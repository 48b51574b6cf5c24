"""`python -m tests.coverage [--studies N] [PART …]`: how often intervals hold the truth and verdicts are right, by simulation.

Prints every table, or those of the named parts. Seeded: the same command prints the same numbers.
"""

import argparse
import importlib
import sys
from pathlib import Path

HERE = Path(__file__).parent
PARTS = ("within", "faults", "between", "across", "floor", "wires")


def main(arguments=None):
    """Print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.coverage", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--studies", type=int, help="simulated studies of each row; default: as each table says"
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"which tables: {', '.join(PARTS)}; default: all"
    )
    asked = parser.parse_args(arguments)
    if unknown := set(asked.parts) - set(PARTS):
        parser.error(f"PART={', '.join(sorted(unknown))}: accepted are {', '.join(PARTS)}")
    if asked.studies is not None and asked.studies < 2:
        parser.error(f"--studies={asked.studies}: at least 2")
    for part in asked.parts or PARTS:
        module = importlib.import_module(f"coverage_{part}")
        for line in module.tables(**({} if asked.studies is None else {"studies": asked.studies})):
            print(line, flush=True)


if __name__ == "__main__":
    sys.path[:0] = [
        str(HERE.parent),
        str(HERE),
    ]  # the helpers beside this file import each other by name, as tests do
    main()
