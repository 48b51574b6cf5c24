"""The exposed communication of several hosts: what is exposed inside them and what between them."""

from collections.abc import Mapping

from analysis.findings.communication.exposed import COST
from analysis.findings.communication.steps import Step, mean_step, step_of
from analysis.findings.model import Member
from analysis.findings.runs import Runs

COMMUNICATION = "exposed communication"
INSIDE, BETWEEN = "communication inside hosts", "communication between hosts"  # together what is exposed of it
Parts = list[tuple[str, Step | None, str]]  # of a waterfall: name, time, why it is not known or what qualifies it


def by_hosts(runs: Runs, parts: Parts, hosts: Mapping[Member, Runs], alone: Step | None) -> Parts:
    """Return the parts of the communication, of several hosts split into what is exposed inside them and between them.

    Inside is what the strategy costs on a host alone with all its GPUs, the mean over the hosts, without what it costs on one.
    """
    (_, exposed, why), *others = parts
    if len(runs.cell.hosts) < 2 or exposed is None:
        return parts
    if len(runs.cell.gpus) == 1:
        return [(BETWEEN, exposed, why), *others]
    costs = [step for one in hosts.values() if (step := step_of(one, COST)) is not None]
    whole = mean_step(costs) if hosts and len(costs) == len(hosts) else None
    if whole is None:
        untold = (
            "no host was measured alone with all its GPUs: what is lost inside hosts and between them is not told apart"
        )
        return [(COMMUNICATION, exposed, "; ".join(filter(None, (why, untold)))), *others]
    inside = whole - alone if alone else whole
    return [(INSIDE, inside, why), (BETWEEN, exposed - inside, ""), *others]
