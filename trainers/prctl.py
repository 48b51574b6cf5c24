"""What a process asks of Linux for itself (prctl(2), which Python's library does not have)."""

import ctypes
import signal

# <linux/prctl.h>
PR_SET_PDEATHSIG = 1
PR_SET_TIMERSLACK = 29
TIMER_SLACK_NS = 1000  # the default is 50,000: longer than the pauses of those who poll flags


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however it ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def sleep_precisely() -> None:
    """Have this thread's sleeps end within a microsecond of their time."""
    _prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
