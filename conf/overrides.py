"""The command line before Hydra reads it."""

from collections.abc import Sequence

from conf import gpus
from conf.knobs import Refused


def normalise(arguments: Sequence[str]) -> list[str]:
    """Rewrite `gpus=…` into canonical text and let `nccl.env.NAME=…` name a new key; refuse what copies secrets.

    Raises:
        Refused: names the argument and the right form.
    """
    for argument in arguments:
        if "${oc.env" in argument:
            raise Refused(f"{argument}: a record would keep the variable's text; let the shell expand it, or set it plainly")
    return [f"+{text}" if text.startswith("nccl.env.") else text for text in gpus.normalise(arguments)]
