"""Bandwidth of the exchange by link, and what a link is worth: figure and tables."""

from collections.abc import Iterator, Mapping, Sequence

from analysis.report.figures import ROWS, more_in, row_label, rows_figure
from analysis.report.numbers import ABSENT, number
from analysis.report.section import Section
from analysis.report.style import INK, Picture, colours, drawn, marker, rendered
from analysis.report.tables import Column, Table
from analysis.study.estimates import Findings, SubsetLinks
from analysis.study.names import gpu_ids, ran_alone, short_names, things_of, unit_of
from analysis.study.study import Study
from analysis.text import count, first_lines, join_words, sentence, single_line
from analysis.topology.link_classes import NET, best_first

BETWEEN_HOSTS = " Between hosts: by the reference net_link, and by the rate of the interface."


def is_between_hosts(links: SubsetLinks) -> bool:
    """Tell whether a subset is on several hosts."""
    return (links.link_class or "").startswith(NET)


def wires(study: Study, findings: Findings) -> Section | None:
    """Return the bandwidth of each subset's exchange with its links, and what a link is worth; one GPU alone has none."""
    if not study.trains or (study.records and ran_alone(study)):
        return None
    names = short_names(dict.fromkeys(w.label for w in findings.wires))
    of_hosts = any(is_between_hosts(w) for w in findings.wires)
    rows = tuple(
        (
            names[w.label], w.strategy, gpu_ids(w.gpus), w.link_class, w.transport, w.exchange_gb_per_s,
            w.p2p_gb_per_s, w.nominal_gb_per_s, w.efficiency, w.stands_out,
        )
        for w in findings.wires
    )  # fmt: skip
    table = Table(
        "wires",
        "The exchange of each subset (busbw), its slowest link, and what its links carry by measured copies and by data sheets."
        + BETWEEN_HOSTS * of_hosts,
        (
            Column("cell", "cell"), Column("strategy", "strategy", shown=False), Column("gpus", unit_of(study)),
            Column("link_class", "link class"), Column("transport", "transport"),
            Column("exchange_gb_per_s", "exchange GB/s", "number"),
            Column("p2p_gb_per_s", "links alone GB/s" if of_hosts else "peer copies GB/s", "number"),
            Column("nominal_gb_per_s", "nominal GB/s", "number"), Column("efficiency", "efficiency", "share"),
            Column("stands_out", "stands out"),
        ),
        rows, frozenset(place for place, row in enumerate(rows) if row[-1]),
    )  # fmt: skip
    one = unit_of(study).removesuffix("s")
    worth = Table(
        "worth",
        f"What a link is worth: {things_of(study)} per second that each {one} loses with a link class, against the best class.",
        (
            Column("cell", "cell"), Column("strategy", "strategy"), Column("link_class", "link class"),
            Column("lost", f"lost {things_of(study)}/s per {one}", "number", True),
            Column("gradient_bytes", "gradient bytes", "count"),
            Column("batch_size", "batch", "count"),
        ),
        tuple((w.label, w.strategy, w.link_class, w.lost, w.gradient_bytes, w.batch_size) for w in findings.worth),
    )  # fmt: skip
    lines = first_lines(sentence(w.stands_out) for w in findings.wires if w.stands_out)
    if findings.links_from:
        lines.append(
            f"Links of this machine were also measured in {count(len(findings.links_from), 'other study', 'other studies')}: "
            f"{single_line(join_words(list(findings.links_from)))}."
        )
    if not rows:
        lines.append(f"No cell of several {unit_of(study)} with known links measured its exchange.")
    return Section(
        "wires",
        "Bandwidth and links",
        tuple(lines),
        tuple(wire_figure(findings.wires, names)),
        (table, worth),
        place=30,
    )


def wire_figure(wires: Sequence[SubsetLinks], names: Mapping[str, str]) -> Iterator[Picture]:
    """Yield bandwidth of the exchange by link class and strategy, with that of a peer copy."""
    with_rate = [wire for wire in wires if wire.exchange_gb_per_s is not None]
    order = best_first(wire.link_class or ABSENT for wire in with_rate)
    groups: dict[tuple[int, str, str, str, tuple[tuple[str, str], ...]], list[SubsetLinks]] = {}
    for wire in with_rate:
        name, cell = names[wire.label], tuple(sorted(wire.key.items()))
        key = (
            order.index(wire.link_class or ABSENT),
            wire.strategy,
            name,
            wire.transport or "",
            cell,
        )
        groups.setdefault(key, []).append(wire)
    if not groups:
        return
    palette = colours(wire.strategy for wire in wires)
    shown = sorted(groups)[:ROWS]
    transports = {transport for *_, transport, _ in groups}
    figure, axes = rows_figure(len(shown))
    for y, key in enumerate(shown):
        members = groups[key]
        rates = [wire.exchange_gb_per_s for wire in members if wire.exchange_gb_per_s is not None]
        limits = [wire.p2p_gb_per_s for wire in members if wire.p2p_gb_per_s is not None]
        axes.plot(
            rates,
            [y + 0.08] * len(rates),
            marker(key[1]),
            color=palette[key[1]],
            alpha=0.85,
            zorder=3,
        )
        axes.plot(
            limits,
            [y + 0.08] * len(limits),
            "|",
            color=INK,
            markersize=9,
            markeredgewidth=1.4,
            zorder=2,
        )
        told = (order[key[0]], key[2], key[3] if len(transports) > 1 else "")
        words = [word for word in told if word and word != ABSENT]
        least, most = (number(end(rates)) for end in (min, max))
        row_label(axes, y, " · ".join(words), least if least == most else f"{least} to {most}")
    axes.set_xlim(0, 1.04 * axes.get_xlim()[1])
    axes.set_xlabel("exchange of all buckets, busbw GB/s")
    caption = "Bandwidth of the exchange by link class, a dot for each subset"
    if len(transports) == 1 and any(transports):
        caption += f", all of them {single_line(next(iter(transports)))}"
    if any(wire.p2p_gb_per_s for wire in wires):
        caption += "; vertical strokes: what all rings carry at the measured peer copies"
        caption += ", between hosts what the network carries" * any(
            is_between_hosts(wire) for wire in wires
        )
    rows = [
        (order[key[0]], key[2], gpu_ids(one.gpus), one.transport, one.exchange_gb_per_s, one.p2p_gb_per_s)
        for key in shown for one in groups[key]
    ]  # fmt: skip
    keys = ("link_class", "cell", "gpus", "transport", "exchange_gb_per_s", "peer_copies_gb_per_s")
    yield rendered(
        figure,
        "wires",
        f"{caption}.{more_in(list(groups), ROWS, 'more row', 'wires.csv')}",
        drawn(keys, rows),
    )


SECTIONS = (wires,)
