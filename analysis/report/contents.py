"""The sections of a study's report: those of the folder `sections`, and those that the study's benchmarks bring.

A module of the folder lists its functions in `SECTIONS`. A benchmark names its function in its YAML (`code: {section: …}`):
Ringside's own benchmarks and those of a user are found in the same way.
"""

import importlib
import pkgutil
from collections.abc import Iterable
from dataclasses import replace

from analysis.report import sections as folder
from analysis.report.measured_values import first_records
from analysis.report.section import Section, SectionFunction
from analysis.report.tables import Table
from analysis.study.estimates import Findings
from analysis.study.names import names_of_unit as of_unit
from analysis.study.names import unit_of
from analysis.study.study import Study, named
from analysis.text import single_line
from benchmarks.record import Record
from conf.groups import choice
from conf.options import Refused
from conf.targets import locate_without_torch


def contents(
    study: Study, findings: Findings, of_benchmarks: Iterable[Section]
) -> tuple[Section, ...]:
    """Return the sections of a report in their order, without empty ones."""
    general = [function(study, findings) for function in section_functions()]
    own = [_of_unit(section, unit_of(study)) for section in general if section is not None]
    every = sorted([*own, *of_benchmarks], key=lambda section: section.place)
    by_anchor: dict[str, Section] = {}
    for section in every:
        if section.lines or section.pictures or section.tables or section.commands:
            before = by_anchor.get(section.anchor)
            by_anchor[section.anchor] = section if before is None else _joined(before, section)
    return tuple(by_anchor.values())


def _of_unit(section: Section, unit: str) -> Section:
    """Return a section with its words on GPUs as words on the CPU workers of a study without GPUs."""
    if unit == "GPUs":
        return section

    def of_table(table: Table) -> Table:
        columns = tuple(replace(one, heading=of_unit(one.heading, unit)) for one in table.columns)
        rows = tuple(
            tuple(of_unit(one, unit) if isinstance(one, str) else one for one in row)
            for row in table.rows
        )
        return replace(table, caption=of_unit(table.caption, unit), columns=columns, rows=rows)

    return replace(
        section,
        lines=tuple(of_unit(line, unit) for line in section.lines),
        pictures=tuple(
            replace(one, caption=of_unit(one.caption, unit)) for one in section.pictures
        ),
        tables=tuple(map(of_table, section.tables)),
    )


def _joined(first: Section, second: Section) -> Section:
    """Return one section with all that two hold, under the title of the first."""
    return replace(
        first,
        lines=first.lines + second.lines,
        pictures=first.pictures + second.pictures,
        tables=first.tables + second.tables,
        commands=first.commands + second.commands,
    )


def section_functions() -> list[SectionFunction]:
    """Return the functions that the modules of the folder `sections`, and of folders in it, list in `SECTIONS`."""
    names = sorted(
        module.name for module in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}.")
    )
    return [
        function
        for name in names
        for function in getattr(importlib.import_module(name), "SECTIONS", ())
    ]


def benchmark_sections(study: Study, findings: Findings) -> dict[str, Section]:
    """Return {benchmark: its section} of the benchmarks that bring one, in the order in which they first ran."""
    dotted_names = {
        benchmark: _dotted_name(record)
        for benchmark, record in first_records(study.records).items()
    }
    return {
        benchmark: _section(benchmark, dotted, study, findings)
        for benchmark, dotted in dotted_names.items()
        if dotted
    }


def _dotted_name(record: Record) -> str:
    """Return the name of the function that makes the section of a record's benchmark; empty where it has none.

    Records of schema 2, and those measured before the benchmark had a section, do not name it: its YAML does.
    """
    declared = record.cell.declared.get("benchmark", {}).get("section")
    try:
        return str(
            declared or choice("benchmark", named(record, "benchmark")).code.get("section", "")
        )
    except Refused:  # a benchmark that is not in this installation
        return ""


def _section(benchmark: str, dotted: str, study: Study, findings: Findings) -> Section:
    """Return the section of a benchmark; where its code cannot make one, a section that says why."""
    try:
        section = locate_without_torch(dotted)(study, findings)
        if not isinstance(section, Section):
            raise TypeError(f"it returned {type(section).__name__}, accepted is a Section")
        return section
    except Refused as error:
        why = str(error)
    except Exception as error:  # code of a user may raise anything, and ends only its section
        why = f"{dotted} failed ({type(error).__name__}: {error})"
    return Section(
        benchmark,
        f"Benchmark {single_line(benchmark, 80)}",
        (single_line(f"This section cannot be made: {why}.", 600),),
    )
