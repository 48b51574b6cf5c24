"""Change what the kernel shows as the environment of this process: /proc/PID/environ has it as it was when the program began.

Processes of a cell are found by their environment (benchmarks.host.processes). One that was forked shows that of the agent
until its own copy of the text is changed in place; what is forked from it shows the same, and what it starts inherits the
variable as always.
"""

import ctypes
import re
from pathlib import Path


def show_in_environ(name: str, value: str) -> None:
    """Replace the value of a variable in /proc/self/environ by one of the same length. os.environ is not touched.

    Raises:
        ValueError: this process did not begin with such a variable, or its value had another length.
    """
    text = Path("/proc/self/environ").read_bytes()
    found = re.search(rb"(?:^|\0)" + re.escape(name.encode()) + rb"=([^\0]*)", text)
    if not found or len(found[1]) != len(value.encode()):
        raise ValueError(f"{name}: this process did not begin with {len(value.encode())} characters in it")
    # env_start, the 50th field of proc(5)'s stat; the name of the program, the 2nd, may hold spaces.
    start = int(Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[47])
    ctypes.memmove(start + found.start(1), value.encode(), len(value.encode()))
