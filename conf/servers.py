"""Place a strategy's server processes on GPUs, and refuse options of servers that do not fit the subset."""

from collections.abc import Mapping
from typing import Any

from conf.options import Refused


def placed(
    strategy: Mapping[str, Any], gpus: tuple[int, ...], device: str, everyone: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the GPU of each server; empty for a strategy without GPU servers, and on CPU workers.

    `server_gpus=free` takes GPUs outside the subset, in order. If there are too few of them, servers share the subset's own.

    Raises:
        Refused: more GPU servers than GPUs, an unknown GPU, or a bound on staleness that no order of updates can keep.
    """
    bound, workers = strategy.get("max_staleness"), len(gpus)
    if bound is not None and bound < workers - 1:
        raise Refused(
            f"strategy.max_staleness={bound}: accepted is at least {workers - 1}: where {workers} workers push in turn, "
            f"each sees {workers - 1} updates of the others"
        )
    wanted = strategy.get("server_gpus")
    if wanted is None or device != "cuda":
        return ()
    servers = int(strategy["servers"])
    if servers > len(everyone):
        raise Refused(
            f"strategy.servers={servers}: accepted on GPUs is at most {len(everyone)}, the GPUs of this machine"
        )
    if wanted == "free":
        free = tuple(gpu for gpu in everyone if gpu not in gpus)
        return free[:servers] if len(free) >= servers else tuple(gpus[n % workers] for n in range(servers))
    named = [str(gpu) for gpu in wanted] if isinstance(wanted, list | tuple) else str(wanted).split("+")
    if len(named) != servers or any(not name.isdecimal() or int(name) not in everyone for name in named):
        raise Refused(
            f"strategy.server_gpus={'+'.join(named)}: accepted are auto, or {servers} of "
            f"{', '.join(map(str, everyone))} joined by +, one for each of strategy.servers={servers}"
        )
    return tuple(int(name) for name in named)
