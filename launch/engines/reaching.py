"""Ask the agents of a cell's hosts where its processes meet: at an address of the first host that all others reach."""

import contextlib
import uuid
from collections.abc import Iterator, Mapping

from benchmarks.host.messages import Do, Say
from conf import schema
from conf.options import Refused
from launch.engines.channel import AgentGone
from launch.engines.remote import ANSWER_S, RemoteHost
from launch.machine.fleet import Fleet
from launch.machine.meeting import MeetingAddress, candidates, chosen

# Statuses of a shell or a Python that cannot run the agent. That of ssh, if it does not come that far, is 255.
NOT_RUN = (1, 2, 126, 127)
NEEDS = "; accepted are hosts with Ringside (engine.folder=) and a Python that has what it needs, torch too (engine.python=)"


def meeting(fleet: Fleet, hosts: Mapping[str, RemoteHost], limits: schema.Engine) -> MeetingAddress:
    """Return where the hosts of `fleet` meet. `hosts` has their agents.

    Raises:
        Refused: an agent is gone, or no address of the first is reached by all others.
    """
    word = uuid.uuid4().hex
    first, *others = fleet.hosts
    wanted = candidates(first, others, limits.interface, limits.trusted_network)
    with refused(first.name):
        channel = hosts[first.name].channel
        channel.send(Do.LISTEN, addresses=wanted, word=word)
        listening = channel.answer(Say.LISTENING, ANSWER_S)
    answers = {}
    for other in others:
        with refused(other.name):
            hosts[other.name].channel.send(Do.REACH, ports=listening["ports"], word=word)
    for other in others:
        with refused(other.name):
            answers[other.name] = hosts[other.name].channel.answer(Say.REACHED, ANSWER_S)["found"]
    with refused(first.name):
        channel.send(Do.LISTEN, addresses=[], word=word)
        channel.answer(Say.LISTENING, ANSWER_S)
    return chosen(first, wanted, listening["refused"], answers)


@contextlib.contextmanager
def refused(name: str, status: int | None = None) -> Iterator[None]:
    """Have an agent that is gone be a sentence that names its host. `status` is that of the command that started it."""
    try:
        yield
    except AgentGone as error:
        needs = NEEDS if status in NOT_RUN else ""
        raise Refused(f"nodes={name}: no agent serves there: {error}{needs}") from None
    except OSError as error:
        raise Refused(f"nodes={name}: its agent could not be started: {error}") from None
