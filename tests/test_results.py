"""The figures of benchmarks/RESULTS.md, read from its text, beside the records in tests/data."""

import json
import re
from decimal import Decimal
from pathlib import Path
from statistics import median

import pytest

from analysis.findings.examine import findings_of
from analysis.study.study import Study, open_study
from benchmarks.record import read_study

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data"
TEXT = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")


def sections():
    """Return the tables of each section by its heading, each a list of rows of cells. The first says where it was measured."""
    found = {}
    for text in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]:
        groups = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
        rows = [
            [[cell.strip() for cell in line.strip("|\n").split("|")] for line in one.splitlines()]
            for one in groups
        ]
        found[text.splitlines()[0]] = [table[2:] for table in rows]
    return found


def tables(heading):
    """Return the tables of figures of a section."""
    return sections()[heading][1:]


def records(study):
    return [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((DATA / study).rglob("record.json"))
    ]


def number(cell):
    """Return the first number of a cell of a table, with the decimals it is printed with."""
    return Decimal(re.search(r"[\d,]+(\.\d+)?", cell).group().replace(",", ""))


def same(cell, value):
    """Tell whether the number printed in `cell` is `value`, rounded to as many decimals."""
    printed = number(cell)
    return abs(Decimal(value) - printed) <= Decimal("0.501").scaleb(printed.as_tuple().exponent)


def holds(row, record, *names, scale=()):
    """Compare the cells of a row with a record's metrics by name; a name that is None is skipped."""
    for cell, name in zip(row, names, strict=True):
        if name and cell not in ("", "–"):
            value = record["metrics"][name] * dict(scale).get(name, 1)
            assert same(cell, value), (record["name"], name, cell, value)


def test_every_folder_of_records_is_named_with_the_commit_that_its_records_have():
    named = {}
    for _, date, commit, folders in (row for tables in sections().values() for row in tables[0]):
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
        for folder in re.findall(r"`(h200_x\d/\w+)`", folders):
            named.setdefault(folder, set()).update(re.findall(r"`([0-9a-f]{7})`", commit))
    assert set(named) == {str(path.relative_to(DATA)) for path in DATA.glob("h200_x*/*")}
    for folder, commits in named.items():
        found = set()
        for record in records(folder):
            git = record["environment"].get("git")
            found |= {git["commit"][:7]} if git else set()
        assert found <= commits, folder


def headings(path):
    """Return the anchors that GitHub gives the headings of a page."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {
        re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in lines
        if line.startswith("#")
    }


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "benchmarks/METHOD.md",
        "benchmarks/RESULTS.md",
        "trainers/OWN.md",
        ".github/CHANGELOG.md",
    ],
)
def test_links_lead_to_files_and_headings(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        other = path.parent / name if name else path
        assert other.exists(), target
        assert not anchor or anchor in headings(other), target


def test_every_section_of_the_results_stands_in_their_first_table():
    first = TEXT.partition("\n## ")[0]
    assert re.findall(r"^\| \[([^\]]+)\]", first, re.MULTILINE) == list(sections())


def test_settings():
    rows = {}
    for record in records("h200_x4/settings"):
        nccl = record["cell"]["nccl"]
        rows[nccl.get("NCCL_P2P_LEVEL", "–"), nccl.get("NCCL_ALGO", "–")] = record
    (table,) = tables("NCCL settings")
    assert len(table) == len(rows) == 8
    for row in table:
        record = rows[row[0], row[1]]
        names = (
            "throughput/images_per_second",
            "comm/exchange_ms",
            "comm/busbw_gb_per_s",
            "comm/exposed_ms",
        )
        holds(row[2:6], record, *names)
        effective = record["effective"]
        assert (
            row[6] == effective["transport"]
            and int(row[7]) == effective["nccl"]["channels"]["collective"]
        )
        assert row[8] == ": ".join([record["validity"]["verdict"], *record["validity"]["codes"]])


@pytest.mark.parametrize("table", [0, 1])
def test_strategies_on_four_gpus(table):
    by_name = {record["name"]: record for record in records("h200_x4/strategies")}
    compared, strategy = 0, ""
    for row in tables("Strategies on four GPUs")[table]:
        word = row[0].split("`")[1]
        strategy = strategy if row[0].startswith("…") else word
        if "10 threads" in row[0]:
            continue  # no record was kept
        option = "" if word == strategy or word.startswith("threads") else f" · {word}"
        gpus = "0,1,2,3" if table == 0 else "0,1,2"
        record = by_name[f"resnet50 · {strategy} · gpus {gpus}{option}"]
        names = (
            "throughput/images_per_second",
            "comm/exchange_ms",
            None,
            None,
            None,
            "comm/exposed_ms",
        )
        holds(row[1:], record, *names)
        if row[4] != "–":
            limit = record["metrics"][f"limit/{row[4].split('`')[1]}_ms"]
            assert same(row[4], limit) and same(
                row[5], 100 * limit / record["metrics"]["comm/exchange_ms"]
            )
        compared += 1
    assert compared == (12, 2)[table]


def test_strategies_on_two_gpus():
    runs = {}
    for record in records("h200_x2/strategies"):
        if not record["drift"]:
            runs.setdefault(record["cell"]["strategy"]["name"], []).append(record["metrics"])
    (table,) = tables("Strategies on two GPUs")
    assert len(table) == len(runs) == 8
    for row in table:
        repeats = runs[row[0].strip("`")]
        assert len(repeats) == 3
        medians = {name: median(one[name] for one in repeats) for name in repeats[0]}
        record = {"name": row[0], "metrics": medians}
        names = (
            "throughput/images_per_second",
            None,
            "comm/exchange_ms",
            None,
            "comm/ideal_ratio",
            "comm/exposed_ms",
        )
        holds(row[1:], record, *names, scale={"comm/ideal_ratio": 100})


def test_exchanges_on_two_gpus():
    found = {}
    for record in records("h200_x2/exchange"):
        strategy, level = record["cell"]["strategy"], record["cell"]["nccl"].get("NCCL_P2P_LEVEL")
        untouched = {
            "comm_hook": "none",
            "transport": "shared",
            "staging": "full",
            "nccl.p2p_level": None,
        }
        asked = {name: strategy.get(name, value) for name, value in untouched.items()} | {
            "nccl.p2p_level": level
        }
        changed = [f"{name}={value}" for name, value in asked.items() if value != untouched[name]]
        found[(strategy["name"], *changed)] = record
    (table,) = tables("The exchange alone")
    assert len(table) == len(found) == 10
    strategy = ""
    for row in table:
        words = re.findall(r"`([^`]+)`", row[0])
        strategy, changed = (strategy, words) if row[0].startswith("…") else (words[0], [])
        record = found[(strategy, *changed)]
        names = ("comm/exchange_ms", None, "comm/ideal_ms", "comm/ideal_ratio")
        holds(row[1:5], record, *names, scale={"comm/ideal_ratio": 100})


def test_the_next_run():
    eager, compiled, _ = tables("The next run")
    runs = [timed(f"eager_{sweep}") for sweep in "ab"]
    assert len(eager) == len(runs[0]) == len(runs[1]) == 6
    for strategy, gpus, *printed in eager:
        for cell, found in zip(printed, runs, strict=True):
            shown = found[strategy.strip("`"), gpus].next_run("throughput/images_per_second")
            assert cell == f"{shown.value:,.0f} ({shown.low:,.0f} to {shown.high:,.0f})"
    ended = {
        (sweep, ",".join(map(str, one["cell"]["gpus"])), f"{one['metrics']['throughput/images_per_second']:,.0f}"): one
        for sweep, name in (("first", "compiled_a"), ("second", "compiled_b")) for one in records(f"h200_x2/{name}")
    }  # fmt: skip
    assert len(compiled) == len(ended) == 8
    for sweep, gpus, rate, *row in compiled:
        record = ended[sweep, gpus, rate]
        names = ("gpu/sm_mhz", "scaling/efficiency", "scaling/efficiency_at_equal_clocks")
        holds(row[:3], record, *names, scale=dict.fromkeys(names[1:], 100))
        assert row[3] == ": ".join([record["validity"]["verdict"], *record["validity"]["codes"]])


def timed(name):
    """Return the timed runs of a study by strategy and GPUs."""
    found = open_study(DATA / "h200_x2" / name).timed
    return {
        (one.records[0].cell.strategy["name"], ",".join(map(str, one.gpus))): one for one in found
    }


def test_traces():
    found = {}
    for record in records("h200_x2/traces"):
        found[record["cell"]["nccl"].get("NCCL_P2P_LEVEL", "–"), record["cell"]["profiler"]] = (
            record
        )
    table, _ = tables("Traces")
    assert len(table) == len(found) == 4
    for row in table:
        names = ("comm", "wait", "overlapped", "exposed", "exposed_in_gaps")
        names = tuple(f"trace/{name}_ms_per_step" for name in names)
        holds(
            [row[2], *row[4:]],
            found[row[0], row[1].split()[0]],
            "trace/nccl_avg_us",
            *names,
            "comm/exposed_ms",
        )


def test_parts_of_the_waterfall():
    """Each part, its interval and its share of the ideal rate are what the findings say today."""
    (waterfall,) = findings_of(Study.of(read_study(DATA / "h200_x2" / "scaling")[0])).waterfalls
    found = {
        part.name: part.lost
        for part in waterfall.parts
        if part.lost is not None and not part.above_ideal
    }
    (table,) = tables("Where the rate goes")
    names = {"DDP's own work, which one GPU pays too": "strategy overhead on one GPU"}
    *rows, whole = table
    assert {names.get(row[0], row[0]) for row in rows} == found.keys()
    for name, images, share in rows:
        lost = found[names.get(name, name)]
        assert same(images, lost.value) and same(share, 100 * lost.value / waterfall.ideal.value)
        if lost.low is not None:
            ends = re.search(r"\((−?\d+) to (\d+)\)", images).groups()
            assert [int(end.replace("−", "-")) for end in ends] == [
                round(lost.low),
                round(lost.high),
            ]
    assert same(whole[1], waterfall.ideal.value - waterfall.measured.value)


def test_intervals_of_strategies_are_for_the_next_run_and_of_the_difference():
    found = findings_of(Study.of(read_study(DATA / "h200_x2" / "strategies")[0]))
    points = {
        one.key["strategy.name"]: one.rate for curve in found.scaling.curves for one in curve.points
    }
    against = {
        one.second.split(" · ")[1]: one.difference
        for one in found.comparisons
        if one.first.split(" · ")[1] == "none" and one.asked == "strategy"
    }
    (table,) = tables("Strategies on two GPUs")
    for row in table:
        name = row[0].strip("`")
        low, high = (
            Decimal(end.replace(",", ""))
            for end in re.search(r"\(([\d,]+) to ([\d,]+)\)", row[1]).groups()
        )
        assert (low, high) == (round(points[name].low), round(points[name].high))
        if name != "none":
            value, near, far = re.findall(r"\d+\.?\d*", row[2])
            for printed, end in ((value, "value"), (near, "high"), (far, "low")):
                assert same(printed, -100 * getattr(against[name], end))


def one_gpu(study, **asked):
    """Return the cells of a study of one GPU that ask for this, the first run of each first."""
    found = [one for one in records(f"h200_x1/{study}") if asked.items() <= one["cell"].items()]
    return sorted(found, key=lambda one: one["cell"]["repeat"])


def test_graphs_on_one_gpu():
    table, _ = tables("CUDA graphs")[:2]
    models = {"ResNet-50": "resnet50", "Inception-v3": "inception_v3"}
    assert len(table) == 10
    for model, batch, *row in table:
        for at, optimize in enumerate(("eager", "compile", "graph", "compile_graph")):
            rates, idle = row[2 * at : 2 * at + 2]
            cells = [
                one for one in one_gpu("graphs", batch_size=int(batch), optimize=optimize)
                if one["cell"]["model"]["name"] == models[model]
            ]  # fmt: skip
            assert sorted(rates.split("; ")) == sorted(rate(one) for one in cells)
            assert all(same(idle, one["metrics"]["gpu/idle_share"] * 100) for one in cells)


def rate(record):
    return f"{record['metrics']['throughput/images_per_second']:,.0f}"


def test_the_way_to_the_published_rate():
    best, gains = tables("The way to the published rate")
    for optimize, batch, printed, clock in best:
        (record,) = one_gpu(
            "fastest_long", optimize=optimize.strip("`"), batch_size=int(batch.replace(",", ""))
        )
        assert printed == rate(record) and record["validity"]["verdict"] == "valid"
        assert same(clock, record["metrics"]["gpu/sm_mhz"])
    of_steps = json.loads((DATA / "gains_h200.json").read_text(encoding="utf-8"))["step_ms"]
    base = of_steps["compile"]
    assert len(gains) == len(of_steps)
    for (_, printed, gain), steps in zip(gains, of_steps.values(), strict=True):
        assert same(printed, 512e3 / median(steps))
        if steps is not base:
            assert same(
                gain,
                sum(one / other - 1 for one, other in zip(base, steps, strict=True))
                / len(base)
                * 100,
            )


def test_blind_forecasts_of_one_gpu():
    table = tables("Forecasts")[0]
    assert len(table) == 6
    for strategy, batch, forecast, measured, error in table:
        (record,) = (
            one for one in one_gpu("forecasts", batch_size=int(number(batch)))
            if one["cell"]["strategy"]["name"] == strategy.strip("`")
        )  # fmt: skip
        assert measured == rate(record) and same(
            forecast, record["metrics"]["predicted/images_per_second"]
        )
        assert same(error, abs(record["metrics"]["prediction/error"]) * 100)
