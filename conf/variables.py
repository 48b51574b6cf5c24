"""Names that the launching process and the processes of a cell must agree on; each stands here once. Standard library only."""

import shutil
from pathlib import Path

# Every process of a cell carries the cell's token in this variable: that is how those that outlive the cell are found.
TOKEN = "RINGSIDE_TOKEN"
NO_TOKEN = "0" * 32  # of an agent, which belongs to no cell; as long as a token, which takes its place
# Id of the process that started this one. A process whose parent ended before the kernel was told to kill it notices by it.
STARTER = "RINGSIDE_STARTER"
# Id of the launching process, where a profiler stands between it and the agent and may outlive it.
LAUNCHER = "RINGSIDE_LAUNCHER"
# Seconds by which the clock of a host may be off that of the launcher.
CLOCK_BOUND = "RINGSIDE_CLOCK_BOUND"
# Its umask in octal digits, which such a profiler does not hand on.
UMASK = "RINGSIDE_UMASK"
# NCCL reads these when it makes a communicator, or begins its log again; everything else once in a process.
READ_AT_EACH_COMMUNICATOR = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")
SHARED_MEMORY_FOLDER = Path("/dev/shm")
TOKEN_DIGITS = 16  # of the token in a file's name: 64 bits tell the cells of a machine apart


def shared_memory_prefix(token: str) -> str:
    """Return how the names of a cell's files in SHARED_MEMORY_FOLDER begin."""
    return f"ringside-{token[:TOKEN_DIGITS]}-"


def free_in(folder: Path) -> int:
    """Return how many bytes are free on the file system of a folder, such as SHARED_MEMORY_FOLDER; 0 where there is none."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
