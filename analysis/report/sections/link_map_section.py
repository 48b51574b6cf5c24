"""Which way to synchronise is fastest behind which link: a study of each link, and of one host."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from analysis.findings.examine import Findings
from analysis.prediction.calibration_data import CalibrationData, calibrate, read_bucket_times
from analysis.prediction.forecast import forecast
from analysis.prediction.link_model import HostNetwork
from analysis.prediction.query import CellQuery, query_of, workload_of
from analysis.report.charts import MARKERS, new_axes
from analysis.report.figure import Figure, as_figure, colours
from analysis.report.section import RATE, Section
from analysis.report.table import Table, columns_of, numbers_table
from analysis.study.names import BETWEEN, format_option, short_names, spoken
from analysis.study.provenance import STUDY
from analysis.study.runs import Runs, grouped
from analysis.study.study import Study
from analysis.text import count, join_words

# Links that are forecast: 10 Mbit/s to 25 Gbit/s, and ms from one host to another.
FORECAST_GB_PER_S = np.geomspace(0.00125, 3.125, 12)
FORECAST_MS = np.geomspace(0.05, 50.0, 7)
ANCHOR = "where_each_wins"
LEAST_US = 10.0  # shorter ways from one host to another are not seen in two sizes


@dataclass(frozen=True)
class Link:
    """A link between hosts, and images per second behind it, {configuration: rate}."""

    network: HostNetwork
    compute_to_wire: float  # the shortest step without exchange ÷ the time to send its gradients
    forecasts: Mapping[str, float]
    rates: Mapping[str, float]  # as measured, else the forecasts
    name: str = ""  # empty: it was not measured

    @property
    def fastest(self) -> str:
        """The configuration with the highest rate."""
        return max(self.rates, key=self.rates.__getitem__)

    @property
    def is_as_forecast(self) -> bool:
        """Whether the fastest of those with a forecast is the one that was forecast."""
        fastest = max(self.forecasts, key=self.rates.__getitem__)
        return fastest == max(self.forecasts, key=self.forecasts.__getitem__)


def where_each_wins(study: Study, findings: Findings) -> Section | None:
    """Return the map of studies that have a link each; None without two, and without one host."""
    between = [runs for runs in study.timed if len(runs.cell.hosts) > 1]
    by_study = grouped(between, lambda runs: runs.provenance.get(STUDY, ""))
    if len(by_study) < 2:
        return None
    try:
        calibration = calibrate(Study.of(each for each in study.usable if not each.cell.hosts[1:]))
    except ValueError:  # no step of one host
        return None
    links: list[Link] = []
    queries: dict[str, CellQuery] = {}
    for name, members in by_study.items():
        rates, here = {}, {}
        for runs in members:
            options = study.naming_options_of(runs, ("batch_size",))
            words = [format_option(option, runs.request[option]) for option in options]
            configuration = BETWEEN.join(words) or runs.strategy
            workload = workload_of(runs.request, runs.records[0].model)
            rates[configuration] = runs.median(RATE) or 0.0
            here[configuration] = query_of(runs.cell, workload)
        network = next(filter(None, map(network_of, members)), None)
        if network is not None:
            measured = links_behind(calibration, here, network)
            links += [replace(link, rates=rates, name=name) for link in measured]
            queries |= here
    if len(links) < 2:
        return None
    table, answer = _table(links), _winners(links)
    for gb_per_s, ms in product(FORECAST_GB_PER_S, FORECAST_MS):
        network = HostNetwork(float(gb_per_s), 1e3 * float(ms))
        links += links_behind(calibration, queries, network)
    title = "Fastest behind which link"
    return Section(ANCHOR, title, (), (_map(links),), (table,), finding=(answer,))


def _winners(links: Sequence[Link]) -> str:
    wins = Counter(link.fastest for link in links)
    names, parts = short_names(wins), []
    for name, number in wins.most_common():
        parts.append(f"{spoken(names[name])} behind {count(number, 'link')}")
    forecast = sum(link.is_as_forecast for link in links)
    return f"Fastest: {join_words(parts)}; as forecast behind {forecast} of {len(links)}."


def network_of(runs: Runs) -> HostNetwork | None:
    """Return the link by all-reduces of two sizes; None where the ranks timed none alone."""
    times_us = read_bucket_times(runs.records[0].tables)
    ranks, small, large = runs.cell.world_size, min(times_us, default=0), max(times_us, default=0)
    if small == large or times_us[small] >= times_us[large]:
        return None
    us_per_byte = (times_us[large] - times_us[small]) / (large - small)
    fixed_us = (times_us[small] - us_per_byte * small) / 2 / (len(runs.cell.hosts) - 1)  # of a ring
    return HostNetwork(2 * (ranks - 1) / ranks / us_per_byte / 1e3, max(fixed_us, LEAST_US))


def links_behind(
    calibration: CalibrationData, queries: Mapping[str, CellQuery], network: HostNetwork
) -> Iterator[Link]:
    """Yield a link with its forecasts by runs on one host alone; nothing where none is possible."""
    there = replace(calibration, links=replace(calibration.links, network=network))
    forecasts, ratios = {}, []
    for configuration, query in queries.items():
        with contextlib.suppress(ValueError, ZeroDivisionError):  # there is none of it
            expected = forecast(there, query)
            sent_bytes = query.workload.gradient_bytes * 2 * (query.ranks - 1) / query.ranks
            ratios.append(expected.compute_ms * network.host_gb_per_s * 1e6 / sent_bytes)
            forecasts[configuration] = expected.images_per_second
    if forecasts:
        yield Link(network, min(ratios), forecasts, forecasts)


def _map(links: Sequence[Link]) -> Figure:
    figure, axes = new_axes(3.6)
    fastest = list(dict.fromkeys(link.fastest for link in links))
    names, palette, rows = short_names(fastest), colours(fastest), []
    for index, name in enumerate(fastest):
        look = {"marker": MARKERS[index % len(MARKERS)], "color": palette[name], "ls": ""}
        axes.plot([], [], label=names[name].replace(BETWEEN, "\n"), **look)
        for link in links:
            if link.fastest != name:
                continue
            x, y = link.compute_to_wire, link.network.latency_us / 1e3
            rows.append((x, y, name, link.name))
            axes.plot(x, y, markersize=9 if link.name else 3, **look)
            if not link.is_as_forecast:
                axes.plot(x, y, "x", color="white", zorder=3)
    axes.loglog()
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(xlabel="compute of a step ÷ sending its gradients", ylabel="ms between hosts")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    caption = (
        "The highest rate behind each link. Large: measured; small: forecast from one host alone; "
        "crossed: another one was forecast. A rate says nothing of how much a step learns."
    )
    data = numbers_table(("compute_to_wire", "ms_between_hosts", "fastest", "link"), rows)
    return as_figure(figure, "where-each-wins", caption, data)


def _table(links: Sequence[Link]) -> Table:
    shown, rows = short_names(link.name for link in links), []
    for link in sorted(links, key=lambda link: link.compute_to_wire):
        for name, rate in link.rates.items():
            expected = link.forecasts.get(name)
            row = {"link": shown[link.name], "gb_per_s": link.network.host_gb_per_s}
            row |= {"ms": link.network.latency_us / 1e3, "ratio": link.compute_to_wire}
            row |= {"configuration": name, "rate": rate, "forecast": expected}
            rows.append(row | {"error": rate / expected - 1 if expected else None})
    columns = (
        *columns_of(link="link", configuration="configuration"),
        *columns_of("number", gb_per_s="GB/s", ms="ms", ratio="compute ÷ sending"),
        *columns_of("rate", rate="images/s", forecast="forecast"),
        *columns_of("change", error="vs. forecast"),
    )
    return Table.of("where_each_wins", "Links as their ranks timed them.", columns, rows)
