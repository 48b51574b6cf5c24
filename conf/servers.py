"""Where the parameter servers of a cell are: their hosts (`strategy.server_nodes`) and GPUs (`strategy.server_gpus`)."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from conf.groups import SERVER_NODES
from conf.nodes import is_name
from conf.options import Refused


def server_hosts(
    strategy: Mapping[str, Any], hosts: Sequence[str], known: Sequence[str]
) -> tuple[str, ...]:
    """Return the host of each server of a cell on `hosts`; empty for a strategy without servers.

    `server_nodes=auto` takes the cell's hosts in turn, as MXNet's launch.py does; named hosts are taken in turn too, and may have
    servers only. `known` are all hosts that the sweep may use.

    Raises:
        Refused: text that names no hosts, an unknown host, or more hosts than servers.
    """
    servers, asked = int(strategy.get("servers", 0)), strategy.get(SERVER_NODES, "auto")
    chosen = list(hosts) if asked == "auto" else named_hosts(asked)
    typed = f"strategy.{SERVER_NODES}={'+'.join(chosen)}"
    if unknown := next((name for name in chosen if name not in known), None):
        raise Refused(
            f"{typed}: host {unknown} is not known; accepted are auto and hosts of {', '.join(known[:8])}"
        )
    if asked != "auto" and len(chosen) > servers:
        raise Refused(
            f"{typed}: names {len(chosen)} hosts; accepted with strategy.servers={servers} are at most {servers}"
        )
    return tuple(itertools.islice(itertools.cycle(chosen), servers))


def named_hosts(asked: Any) -> list[str]:
    """Return the hosts that `server_nodes` names, joined by + or as a list; none for auto. Raises Refused."""
    if asked == "auto":
        return []
    names = (
        [str(one) for one in asked] if isinstance(asked, list | tuple) else str(asked).split("+")
    )
    if not names or not all(map(is_name, names)):
        raise Refused(
            f"strategy.{SERVER_NODES}={asked}: accepted are auto, or names of hosts joined by +"
        )
    return names


def server_gpus(
    strategy: Mapping[str, Any],
    gpus: tuple[int, ...],
    device: str,
    everyone: Mapping[str, tuple[int, ...]],
    hosts: Sequence[str] = (),
    on: Sequence[str] = (),
) -> tuple[int, ...]:
    """Return the GPU of each server; empty for a strategy without GPU servers, and on CPU workers.

    `everyone` are the ids of all GPUs of each host ('' is this machine), `hosts` the hosts of the ranks, `on` the host of each
    server; the last two are empty on this machine. `server_gpus=free` takes GPUs outside the subset, in order. Where a host has
    too few of them, its servers share the subset's own.

    Raises:
        Refused: more GPU servers than GPUs, an unknown GPU, or a bound on staleness that no order of updates can keep.
    """
    bound, workers = strategy.get("max_staleness"), len(gpus) * max(1, len(hosts))
    if bound is not None and bound < workers - 1:
        raise Refused(
            f"strategy.max_staleness={bound}: accepted is at least {workers - 1}: where {workers} workers push in turn, "
            f"each sees {workers - 1} updates of the others"
        )
    wanted = strategy.get("server_gpus")
    if wanted is None or device != "cuda":
        return ()
    servers = int(strategy["servers"])
    places = [*on] or [""] * servers
    for host, number in Counter(places).items():
        if number > len(everyone[host]):
            there = f"the GPUs of {f'host {host}' if host else 'this machine'}"
            raise Refused(
                f"strategy.servers={servers}: accepted on GPUs is at most {len(everyone[host])}, {there}"
            )
    if wanted == "free":
        return tuple(_free(gpus, places, everyone, hosts or ("",)))
    named = (
        [str(gpu) for gpu in wanted] if isinstance(wanted, list | tuple) else str(wanted).split("+")
    )
    are_there = [
        gpu.isdecimal() and int(gpu) in everyone[host]
        for gpu, host in zip(named, places, strict=False)
    ]
    if len(named) != servers or not all(are_there):
        ids = sorted({gpu for host in places for gpu in everyone[host]})
        raise Refused(
            f"strategy.server_gpus={'+'.join(named)}: accepted are auto, or {servers} of {', '.join(map(str, ids))} "
            f"joined by +, one for each of strategy.servers={servers}"
        )
    return tuple(int(name) for name in named)


def _free(
    gpus: tuple[int, ...],
    places: Sequence[str],
    everyone: Mapping[str, tuple[int, ...]],
    hosts: Sequence[str],
) -> Iterator[int]:
    """Yield a GPU for each server: on its host one outside the subset, or one of the subset in turn if these are too few."""
    numbers: dict[str, int] = defaultdict(int)  # of servers that each host has so far
    wanted = Counter(places)
    for host in places:
        free = [gpu for gpu in everyone[host] if host not in hosts or gpu not in gpus]
        chosen = free if len(free) >= wanted[host] else gpus
        yield chosen[numbers[host] % len(chosen)]
        numbers[host] += 1
