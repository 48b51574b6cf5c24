"""Answer what launch.py is asked about itself, without composing a request: its version, an option, commands to begin with."""

import sys
from collections.abc import Sequence

from benchmarks.record.visible import forgive
from launch.help import topics


def inform(typed: Sequence[str]) -> bool:
    """Print the answer if a command only asks for one, and return whether it did.

    Raises:
        Refused: there is no such group or option.
    """
    forgive(sys.stdout)  # for all that follows, also what Hydra prints
    if "--version" in typed:
        from launch.machine.facts import version_lines  # the TAB key need not wait for it

        print(*version_lines(), sep="\n")
        return True
    if [*typed] == ["examples"]:
        from launch.help.examples import lines

        print(*lines(), sep="\n")
        return True
    asked = topics.topics(typed)
    for topic in asked:
        topics.show(topic)
    return bool(asked)
