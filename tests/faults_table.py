"""The campaign's table: which kind of fault strikes which process in which phase, and what must come of it.

Pairs that are not in it, and why:
    ranks, servers and agents in compose, projection and report: none of them runs then; in spawn the launcher alone knows of them
    a server in the phases of the ranks between build and exit: it knows only that it waits for workers or serves (exchange)
    a wrong collective in build and exit: there is no process group, or no other rank is in a collective
    exit 0 in exit: that is what a rank does there
    the agent leaving by itself: it has no phase of its own; that its ranks do it is in the table
    SIGSTOP of the launcher: nobody is left to notice; it goes on at SIGCONT
"""

import random
from dataclasses import replace
from functools import partial

from faults import OF_THE_LAUNCHER, PHASES, Fault
from faults_seen import ANY

# A busy machine may stop a process for seconds, and is slow to start ranks.
SILENCE_S, START_S, LOST_AFTER_S = 12.0, 40.0, 10.0
OF_RANKS = PHASES[2:10]
# Phases with a count of iterations behind them: a rank without one is given the time of a start (supervise._silent).
STARTING = ("build", "first step")
# What a fault of a rank or server is called in the record.
CAUSES = {
    "SIGKILL": "killed", "SIGSEGV": "killed", "SIGABRT": "killed",
    "exit 0": "exception", "exit 7": "exception", "exception": "exception", "exception like a peer's": "exception",
    "control characters": "exception", "MemoryError": "oom",
    "SIGSTOP": "hang", "sleep": "hang", "GIL held": "hang", "wrong collective": "hang",
}  # fmt: skip
OF_SERVERS = ("SIGKILL", "SIGSEGV", "exit 0", "exit 7", "exception", "SIGSTOP", "sleep", "GIL held")
# Exit status of a launcher that gets a signal: while it composes, and later.
SIGNALS = {
    "SIGKILL": (-9, -9), "SIGTERM": (130, 130), "SIGINT": (130, 130), "SIGINT twice": (130, 130), "SIGHUP": (-1, 0),
}  # fmt: skip
SERVER = 2  # the number of the server of two ranks


def fault_of(kind, phase, target, process):
    """A fault of a rank or of a server, which the record must name."""
    deadline = None
    if CAUSES[kind] == "hang":
        deadline = START_S if phase in STARTING else SILENCE_S
    after = {"first step": 0, "exchange": 1, "limits": 1}.get(phase, 2)
    expected = {"cause": CAUSES[kind], "rank": process, "deadline_s": deadline}
    return Fault(kind, phase, target, process=process, after=after, **expected)


def of_ranks(seed, ranks=2):
    """Faults of ranks, in an order and of ranks that the seed draws; three ranks are for the wrong collective.

    Of two ranks in two collectives nobody could say which one is wrong.
    """
    draw = random.Random(seed)
    if ranks == 3:
        pairs = [
            ("wrong collective", phase) for phase in OF_RANKS if phase not in ("build", "exit")
        ]
    else:
        pairs = [
            (kind, phase) for kind in CAUSES for phase in OF_RANKS if kind != "wrong collective"
        ]
        pairs.remove(("exit 0", "exit"))
    draw.shuffle(pairs)
    return [fault_of(kind, phase, "rank", draw.randrange(ranks)) for kind, phase in pairs]


def of_servers(seed):
    """Faults of a server and, beside it, of ranks that need it."""
    draw = random.Random(seed)
    faults = [
        fault_of(kind, phase, "server", SERVER)
        for kind in OF_SERVERS
        for phase in ("build", "exchange")
    ]
    faults += [
        fault_of(kind, "exchange", "rank", draw.randrange(2))
        for kind in ("SIGKILL", "SIGSTOP", "exception")
    ]
    draw.shuffle(faults)
    return faults


def of_agents(seed):
    killed = [Fault("SIGKILL", phase, "agent", "killed", None) for phase in OF_RANKS]
    # Its ranks go on and end; that it does not is told after the time of a start.
    stopped = [
        Fault("SIGSTOP", phase, "agent", "hang", None, deadline_s=START_S)
        for phase in ("build", "timed", "exit")
    ]
    faults = [replace(one, after=0 if one.phase == "first step" else 1) for one in killed + stopped]
    faults = [replace(one, may_finish=True) if one.phase == "exit" else one for one in faults]
    random.Random(seed).shuffle(faults)
    return faults


def of_profiled_passes(seed):
    """Faults of ranks in the profiled pass: what was measured before it stays finished."""
    draw = random.Random(seed)
    kinds = ("SIGKILL", "exit 7", "exception", "MemoryError", "SIGSTOP", "sleep")
    return [Fault(kind, "profile", "rank", status=0, process=draw.randrange(2)) for kind in kinds]


def of_the_launcher(seed):
    faults = []
    for kind, (composing, later) in SIGNALS.items():
        for phase in PHASES:
            ended = kind != "SIGHUP" and phase not in ("compose", "profile", "projection", "report")
            faults.append(
                Fault(
                    kind, phase, "launcher", "interrupted" if ended else None,
                    status=composing if phase == "compose" else later, after=0 if phase == "first step" else 1,
                    may_finish=phase == "exit",
                )
            )  # fmt: skip
    random.Random(seed).shuffle(faults)
    return faults


def of_two_hosts(seed):
    return [replace(fault, host="ab"[fault.process]) for fault in of_ranks(seed)]


# What is done to host b: to which process, the cause and the rank, the hosts that are named, and
# after how long.
OF_HOSTS = {
    ("SIGKILL", "host"): ("node_lost", None, "b", None),
    ("SIGSTOP", "host"): ("node_lost", None, "b", LOST_AFTER_S),
    ("host SIGKILL", "host"): ("node_lost", None, "b", None),
    ("SIGKILL", "agent"): ("killed", 1, "b", None),
    ("full disk", "rank"): ("exception", 1, "b", None),
    ("wire cut", "rank"): ("hang", ANY, "a and b", SILENCE_S),
    ("packets lost", "rank"): ("hang", ANY, "a and b", SILENCE_S),
    ("SIGKILL", "launcher"): ("interrupted", None, "", None),
    ("SIGTERM", "launcher"): ("interrupted", None, "", None),
}


def of_hosts(seed):
    """Faults of host b, of its wire and of its disk, each in a launcher of its own."""
    faults = []
    for (kind, target), (cause, rank, host, usual_s) in OF_HOSTS.items():
        for phase in OF_RANKS:
            deadline = START_S if usual_s == SILENCE_S and phase in STARTING else usual_s
            status = 1
            if target == "launcher":
                status = SIGNALS[kind][1]
            # The last lines of a rank may fit into the page that its file ends in.
            may_finish = phase == "exit" or (kind, phase) == ("full disk", "limits")
            faults.append(
                Fault(
                    kind, phase, target, cause, rank, status, deadline, process=1,
                    after=0 if phase == "first step" else 1, may_finish=may_finish, host=host,
                )
            )  # fmt: skip
    random.Random(seed).shuffle(faults)
    return faults


TABLES = {
    "two": of_ranks, "three": partial(of_ranks, ranks=3), "server": of_servers,
    "agent": of_agents, "pass": of_profiled_passes, "launcher": of_the_launcher,
}  # fmt: skip
TABLES_OF_HOSTS = {"ranks": of_two_hosts, "hosts": of_hosts}


def drawn(tables, seed, number=None):
    """The faults of each table, by its name: all, or `number` together, in proportion.

    Tables that have too few are drawn again.
    """
    every = {name: table(seed) for name, table in tables.items()}
    total = sum(map(len, every.values()))
    for name, faults in every.items():
        share = len(faults)
        if number is not None:
            share = round(number * share / total)
        again = seed
        while len(faults) < share:
            again += 1
            faults += tables[name](again)
        del faults[share:]
    return every


def key_of(fault, cap):
    """Under which key a fault is planted: that of its cell, or of the launcher for phases in which no rank runs."""
    return "launcher" if fault.target == "launcher" and fault.phase in OF_THE_LAUNCHER else cap
