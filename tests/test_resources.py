"""Memory, energy and step times in the report: which figures there are, and what they show."""

from build import record, study

from analysis.report.build import examine

USE = {"memory/peak_gib": 3.0, "gpu/power_w": 600.0, "energy/images_per_joule": 7.5}
STEPS = {"step/ms_median": 50.0, "step/ms_p95": 55.0}


def resources(folder, records):
    """The figures of the section by name, and its tables; None without it."""
    content, _ = examine(study(folder / "study", records))
    for section in content.sections:
        if section.anchor == "resources":
            return {figure.name: figure for figure in section.figures}, section.tables
    return None


def test_memory_stands_beside_the_rate_and_energy_against_the_gpus(tmp_path):
    sharded = USE | STEPS | {"memory/peak_gib": 2.0}
    records = [
        record(0, [0], 900.0, metrics=USE | STEPS),
        record(1, [0, 3], 1800.0, metrics=USE | STEPS),
        record(2, [0, 3], 1500.0, strategy="fsdp", metrics=sharded),
    ]
    figures, (table,) = resources(tmp_path, records)
    assert list(figures) == ["memory", "energy", "power", "steps"]
    (fastest, memory), (slower, less) = (row[:2] for row in figures["memory"].data.rows)
    assert "fsdp" in slower and "fsdp" not in fastest and (memory.value, less.value) == (3.0, 2.0)
    assert ">1,500 images/s<" in figures["memory"].svg
    assert "The axis does not begin at 0" not in figures["memory"].caption
    for name, value, above in (
        ("energy", 7.5, 7.5),
        ("power", 600.0, 600.0),
        ("steps", 50.0, 55.0),
    ):
        for row, gpus in zip(figures[name].data.rows, (1, 2), strict=True):
            assert (row[1], row[2].value, row[2].high) == (gpus, value, above)
    assert [column.heading for column in table.for_people.columns][1:3] == ["images/s", "peak GiB"]
    assert len(table.rows) == 3


def test_a_single_point_has_no_figure(tmp_path):
    assert resources(tmp_path, [record(0, [0, 3], 900.0, metrics=USE | STEPS)]) is None
