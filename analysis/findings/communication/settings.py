"""What every NCCL setting changed, against the same cell in which it was left alone: the transport, the exchange, the rate."""

from collections.abc import Sequence

from analysis.findings import labels
from analysis.findings.model import Comparison, SettingEffect
from analysis.findings.runs import Runs, middle
from analysis.findings.study import Study
from analysis.findings.wires.measured import transport_of

PREFIX = "nccl."  # of the names of settings in a key
EXCHANGE = "comm/exchange_ms"


def setting_effects(study: Study, compared: Sequence[Comparison]) -> tuple[SettingEffect, ...]:
    """Return the effect of every setting that one of the compared cells has and the other one leaves alone."""
    runs_of = {(runs.gpus, frozenset(runs.key.items())): runs for runs in study.rated}
    found = []
    for one in compared:
        settings = [name for name in one.differing if name.startswith(PREFIX) and name in one.second_key]
        if not settings or any(name in one.first_key for name in one.differing):
            continue
        without, with_it = (runs_of[one.gpus, frozenset(key.items())] for key in (one.first_key, one.second_key))
        words = [labels.worded(name, one.second_key[name]) for name in settings]
        found.append(
            SettingEffect(
                " ".join(words),
                one,
                (_transport(without), _transport(with_it)),
                (middle(without.records, EXCHANGE), middle(with_it.records, EXCHANGE)),
            )
        )
    return tuple(found)


def _transport(runs: Runs) -> str:
    """Return `P2P/CUMEM` or `SHM`: the transport without the links that it runs over or leaves unused."""
    return (transport_of(runs) or "").partition(" over ")[0].partition(",")[0].removesuffix("/direct/direct")


def unused_on_cpu_workers(study: Study) -> str:
    """Return a sentence where cells of CPU workers were asked with different NCCL settings; else nothing."""
    asked = {tuple(sorted(one.cell.nccl.items())) for one in study.usable if one.cell.device == "cpu"}
    return "what NCCL settings change: CPU workers do not use NCCL" if len(asked) > 1 else ""
