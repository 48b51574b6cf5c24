"""What a study measured, and where: the first sentence of the first screen."""

from collections.abc import Sequence

from analysis.findings.control_cells import WITHOUT
from analysis.report.measured_values import RATE
from analysis.study.names import things_of, unit_of
from analysis.study.provenance import hardware
from analysis.study.study import Study, named
from analysis.text import count, join_words, single_line
from benchmarks.record import Record
from conf.cell import folded

NAMED = (
    3  # models, strategies, benchmarks or machines that are named; of more only the number is told
)


def measured(study: Study) -> str:
    """Return what was measured and on how many devices of which machine."""
    records = study.usable or study.records
    done = any(one.state == "finished" for one in records)
    trained = [
        one for one in records if RATE in one.metrics or named(one, "benchmark") == "throughput"
    ]
    if not trained:
        names = list(dict.fromkeys(named(record, "benchmark") for record in records))
        models = _names(records, "model")
        of = f" ({_several(models, 'model')})" if models else ""
        which = _several(names, "benchmark")
        which = (
            which
            if len(names) > NAMED
            else f"The benchmark{'' if len(names) == 1 else 's'} {which}"
        )
        verb = "ran" if done else "was to run" if len(names) == 1 else "were to run"
        return f"{which}{of} {verb} on {_devices(study, records)}."
    models, strategies = (_names(trained, group) for group in ("model", "strategy"))
    with_exchange = [name for name in strategies if name != WITHOUT]
    how = f"with {_several(with_exchange, 'strategy', 'strategies')}" if with_exchange else ""
    how += " and " * (0 < len(with_exchange) < len(strategies)) + "without any exchange" * (
        WITHOUT in strategies
    )
    verb = ("was" if len(models) == 1 else "were") + " to be" * (not done)
    return f"{_several(models, 'model')} {verb} trained {how} on {_devices(study, trained)}{_batch(study, trained)}."


def _names(records: Sequence[Record], group: str) -> list[str]:
    return list(dict.fromkeys(named(one, group) for one in records if one.cell.trains))


def _several(names: list[str], noun: str, plural: str = "") -> str:
    """Return a few names, or how many there are."""
    if len(names) > NAMED:
        return count(len(names), noun, plural)
    return join_words([single_line(name, 80) for name in names])


def _devices(study: Study, records: Sequence[Record]) -> str:
    """Return `1, 2 and 4 GPUs of 4 × NVIDIA H200`, or the workers and their CPU."""
    unit = unit_of(study)
    sizes = [str(size) for size in sorted({record.cell.world_size for record in records})]
    many = f"{join_words(sizes)} {unit if sizes[-1:] != ['1'] else unit.removesuffix('s')}"
    places = list(dict.fromkeys(map(_place, _on_most_hosts(records))))
    where = [single_line(place) for place in places]
    return f"{many} {'of' if unit == 'GPUs' else 'on'} {join_words(where, NAMED)}"


def _on_most_hosts(records: Sequence[Record]) -> list[Record]:
    """Return the records without those on a part of the hosts of others: the baselines of several hosts."""
    sets = {frozenset(record.cell.every_host) for record in records}
    hosts = [(record, frozenset(record.cell.every_host)) for record in records]
    return [record for record, own in hosts if not (own and any(own < other for other in sets))]


def _place(record: Record) -> str:
    """Return the hardware that a record ran on, and the hosts where the cell names them."""
    hosts = sorted(record.cell.every_host)
    return hardware(record).removeprefix("CPU workers on ") + (
        f" ({folded(hosts)})" if hosts else ""
    )


def _batch(study: Study, records: Sequence[Record]) -> str:
    """Return the images of a step, where they are the same in every cell."""
    steps = {record.cell.global_batch_size for record in records}
    each = {record.cell.batch_size for record in records}
    if steps == {None} and len(each) == 1:
        return f", with {each.pop():,} {things_of(study)} per {unit_of(study).removesuffix('s')} and step"
    if None not in steps and len(steps) == 1:
        return (
            f", with {steps.pop():,} {things_of(study)} per step on all {unit_of(study)} together"
        )
    return ""
