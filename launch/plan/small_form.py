"""The small form of a study on CPU workers: the block `on_cpu` of its YAML, as if typed before the user's own words."""

from collections.abc import Mapping, Sequence

from conf.options import canonical
from conf.schema import Config
from launch.machine.devices import look
from launch.plan.shared_options import refuse_several_values

NEED_GPUS = (
    "optimize",
)  # options of `on_cpu` that the full form has too: GPUs alone have what they replace


def small_form(
    requests: Sequence[tuple[Config, list[str]]],
    typed: Sequence[str],
    surroundings: Mapping[str, str],
) -> list[str]:
    """Return what `on_cpu` adds to a command on a machine without GPUs; nothing elsewhere and with nodes=.

    `requests` are the configurations and overrides that Hydra makes of the command without it.

    With `full=true` only what needs GPUs is replaced. An option that was typed, or whose group was chosen anew, stays as it
    was typed.

    Raises:
        Refused: `device=cuda`, and this machine has no usable GPU; or the requests are of several studies.
    """
    config = requests[0][0]
    is_for_another_machine = bool(config.nodes) or (config.topology is not None and config.dry_run)
    if (
        not config.on_cpu
        or is_for_another_machine
        or look(config.device, surroundings).kind != "cpu"
    ):
        return []
    refuse_several_values([one for one, _ in requests], [overrides for _, overrides in requests])
    chosen = [text.lstrip("+~").partition("=")[0] for text in typed if not text.startswith("-")]
    return [
        f"{name}={canonical(value)}"
        for name, value in config.on_cpu.items()
        if not any(name == one or name.startswith(f"{one}.") for one in chosen)
        and (not config.full or name in NEED_GPUS)
    ]


def about_small_form(small: Sequence[str], study: str) -> str:
    """Return the sentence that says what a study is on CPU workers, and how to have it in full."""
    if all(text.partition("=")[0] in NEED_GPUS for text in small):
        return f"study {study} has {' '.join(small)} on CPU workers: what it has instead needs GPUs"
    return f"study {study} runs in its small form for CPU workers ({' '.join(small)}); full=true measures it in full"
