"""Load GPU 0 by a tenth while a cell is timed, from its first timed step on: `stranger.py STUDY`.

It watches the study's folder until it is stopped. It is a program that the cell does not know: it
begins after the cell's check of who else is there.
"""

import os
import sys
import time
from pathlib import Path

import torch

TIMED, AFTER = '"phase": "timed"', '"phase": "compare"'
SHARE = 0.1


def load(lines: Path) -> None:
    """Multiply matrices for a tenth of the time, as long as the cell is timed."""
    square = torch.rand(8192, 8192, device="cuda:0", dtype=torch.bfloat16)
    while AFTER not in lines.read_text():
        began = time.monotonic()
        square @ square
        torch.cuda.synchronize()
        time.sleep((time.monotonic() - began) * (1 / SHARE - 1))


def main(study: Path) -> None:
    """Start a process for each cell that comes to its timed steps."""
    met = set()
    while True:
        for lines in study.glob("*/ranks/0.jsonl"):
            if lines in met or TIMED not in lines.read_text():
                continue
            met.add(lines)
            if os.fork() == 0:  # torch is imported, CUDA is not: its context is made in time
                load(lines)
                os._exit(0)
        time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
