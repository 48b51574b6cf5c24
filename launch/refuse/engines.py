"""Refuse requests whose `nodes=`, `hosts=` and `engine=` do not fit each other, before any host is asked anything."""

import re
from collections.abc import Iterator, Sequence

from conf import groups
from conf.options import Refused, canonical, path_of
from conf.schema import Config, Engine

REMOTE = ("ssh", "slurm", "command")
# The engines that read an option; every engine reads the others.
READ_BY = {
    "prefix": ("command",),
    "ssh_config": ("ssh",),
    **dict.fromkeys(
        ("submit", "time_minutes", "partition", "account", "job_nodes", "gpus_per_node", "sbatch"),
        ("slurm",),
    ),
    "interface": REMOTE,
    "trusted_network": REMOTE,
    "python": REMOTE,
    "folder": REMOTE,
}
INTERFACE = re.compile(r"[A-Za-z0-9_.:-]{1,15}", re.ASCII)  # Linux has at most 15 bytes
HOST = "{host}"


def refuse_engines(configs: Sequence[Config]) -> None:
    """Refuse a sweep whose hosts and engine do not fit each other. Raises Refused."""
    for config in configs:
        _refuse_one_without_the_other(config)
    if said := next(_wrong_options(configs[0].engine), None):  # a sweep has one engine
        raise Refused(said)


def _refuse_one_without_the_other(config: Config) -> None:
    typed, engine = ",".join(config.nodes), config.engine.name
    if config.nodes and engine not in REMOTE:
        raise Refused(
            f"nodes={typed}: accepted together with an engine that starts agents there, {_engines()}"
        )
    if engine in REMOTE and not config.nodes:
        raise Refused(
            f"engine={engine}: accepted together with nodes=, which says on which hosts; nodes=1 is one host, nodes=a,b are two"
        )
    if config.hosts is not None and not config.nodes:
        raise Refused(
            f"hosts={config.hosts}: accepted together with nodes=, which says how many of them, and {_engines()}"
        )
    if config.hosts is not None and engine == "slurm":
        raise Refused(
            f"hosts={config.hosts}: accepted with engine=ssh and engine=command; the hosts of Slurm are its allocation"
        )
    servers = (
        config.strategy.get("server_nodes", "auto") if isinstance(config.strategy, dict) else "auto"
    )
    if servers != "auto" and not config.nodes:
        raise Refused(
            f"strategy.server_nodes={servers}: accepted together with nodes=, which says where the ranks are"
        )
    profiler = config.profiler["name"] if isinstance(config.profiler, dict) else ""
    if config.nodes and profiler == "nsys":
        raise Refused(
            "profiler=nsys: accepted on this machine only, without nodes=; profiler=torch traces ranks on every host"
        )


def _engines() -> str:
    return ", ".join(f"engine={one}" for one in REMOTE[:-1]) + f" or engine={REMOTE[-1]}"


def _wrong_options(engine: Engine) -> Iterator[str]:
    """Yield what is wrong with the options of an engine, a sentence each."""
    defaults = Engine()
    for name, engines in READ_BY.items():
        value = getattr(engine, name)
        if value != getattr(defaults, name) and engine.name not in engines:
            typed = _list(value) if isinstance(value, list) else canonical(value)
            yield f"engine.{name}={typed}: accepted with {' or '.join(f'engine={one}' for one in engines)}"
    if engine.name == "command" and not engine.prefix:
        yield (
            "engine.prefix=[]: accepted with engine=command are the words that run a command on a host, such as "
            f"engine.prefix=[ip,netns,exec,{HOST}]"
        )
    if engine.prefix and not any(HOST in word for word in engine.prefix):
        yield f"engine.prefix={_list(engine.prefix)}: has no {HOST}, where the name of the host goes; accepted is one with it"
    for word in engine.prefix:
        if not word or not word.isprintable():
            yield f"engine.prefix={_list(engine.prefix)}: {word!r} is no word; accepted are printable words"
    if engine.interface is not None and not INTERFACE.fullmatch(engine.interface):
        yield (
            f"engine.interface={engine.interface!r}: accepted is the name of one network interface, at most 15 letters, digits, "
            "'.', '_', ':' and '-'"
        )
    if (
        engine.ssh_config is not None
        and not path_of("engine.ssh_config", engine.ssh_config).is_file()
    ):
        yield f"engine.ssh_config={engine.ssh_config!r}: is no file; accepted is one of this machine, as ssh -F has it"
    for name in ("python", "folder"):
        value = getattr(engine, name)
        if value is not None and not (value.isprintable() and value.startswith("/")):
            yield f"engine.{name}={value!r}: accepted is a whole path there, which begins with /"


def _list(words: Sequence[str]) -> str:
    return "[" + ",".join(words) + "]"


def refuse_one_host_only(config: Config, sets: Sequence[Sequence[str]]) -> None:
    """Refuse sets of several hosts for a strategy or benchmark whose YAML says `hosts: false`. Raises Refused."""
    trains = groups.choice("benchmark", config.benchmark["name"]).trains
    for group in ("benchmark", "strategy") if trains else ("benchmark",):
        name = str(getattr(config, group)["name"])
        if max(map(len, sets)) > 1 and not groups.choice(group, name).several_hosts:
            raise Refused(
                f"{group}={name}: works inside one host; accepted are one host a cell, nodes=each, and other choices"
            )
