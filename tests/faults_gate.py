"""A gate inside a process of a planted sweep: it waits there until a test has done something to its surroundings.

`place.Place` copies this beside faults_planted.py. Standard library only.
"""

import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def wait(pid):
    """Say who is here, wait for the file `go`, and do what the file `do` says."""
    (HERE / "arriving").write_text(str(pid))
    (HERE / "arriving").rename(HERE / "arrived")
    while not (HERE / "go").exists():
        time.sleep(0.02)
    if (HERE / "do").exists():
        exec((HERE / "do").read_text())


def step_clock(who):
    """Have the time of day be that of the file `clock`, in hours from now: in the launcher alone, or in everyone."""
    if who == "launcher" and "launch.py" not in " ".join(sys.orig_argv):
        return
    real = time.time

    def stepped():
        try:
            return real() + 3600 * float((HERE / "clock").read_text())
        except (OSError, ValueError):
            return real()

    time.time = stepped
