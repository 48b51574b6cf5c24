"""Names of variables and files on which the launcher and the processes of a cell must agree."""

from pathlib import Path

# Every process of a cell carries the cell's token in this variable: so those that outlive it are
# found.
TOKEN = "RINGSIDE_TOKEN"
# Of an agent, which belongs to no cell; as long as a token, which takes its place.
NO_TOKEN = "0" * 32
# Id of the process that started this one: so a process notices that its parent ended before it
# could ask the kernel to be killed with it.
STARTER = "RINGSIDE_STARTER"
# Id of the launching process, where a profiler stands between it and the agent and may outlive it.
LAUNCHER = "RINGSIDE_LAUNCHER"
# Seconds by which the clock of a host may be off that of the launcher.
CLOCK_BOUND = "RINGSIDE_CLOCK_BOUND"
# Its umask in octal digits, which such a profiler does not hand on.
UMASK = "RINGSIDE_UMASK"
SHARED_MEMORY_FOLDER = Path("/dev/shm")
TOKEN_DIGITS = 16  # of the token in a file's name: 64 bits tell the cells of a machine apart


def shared_memory_prefix(token: str) -> str:
    """Return how the names of a cell's files in SHARED_MEMORY_FOLDER begin."""
    return f"ringside-{token[:TOKEN_DIGITS]}-"
