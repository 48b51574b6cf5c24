"""The figures of benchmarks/RESULTS.md, read from its text, beside the records in tests/data."""

import json
import re
import shutil
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from statistics import median

import pytest

from analysis.findings.examine import findings_of
from analysis.study.asked import answer, questions_of, replay
from analysis.study.study import Study, open_study
from benchmarks.record import read_lines, read_study

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data"
TEXT = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
RATE = "throughput/images_per_second"
EFFICIENCY = "scaling/efficiency"
COST = "strategy/cost_ms"
TRACED = ("comm", "wait", "overlapped", "exposed", "exposed_in_gaps")
PAGES = (
    "README.md",
    "benchmarks/METHOD.md",
    "benchmarks/RESULTS.md",
    "trainers/OWN.md",
    ".github/CHANGELOG.md",
    ".github/CONTRIBUTING.md",
    "trainers/kvstore/README.md",
    "launch/engines/README.md",
    "launch/recipes/README.md",
    "launch/tracking/README.md",
    "analysis/PAPER.md",
    "analysis/prediction/README.md",
    "benchmarks/collectives/README.md",
    "benchmarks/host_link/README.md",
    "benchmarks/jacobi/README.md",
    "benchmarks/p2p/README.md",
    ".ci/gpu/README.md",
)


def tables_of(text):
    """Return the tables of a text, each a list of rows of cells without its heading."""
    tables = []
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        rows = block.splitlines()[2:]
        tables.append([[cell.strip() for cell in row.strip("|").split("|")] for row in rows])
    return tables


def sections():
    """Return the tables of each section by its heading."""
    parts = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
    return {part.splitlines()[0]: tables_of(part) for part in parts}


def records(study):
    paths = sorted((DATA / study).rglob("record.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def same(cell, value):
    """Tell whether the first number printed in `cell` is `value`, rounded to as many decimals."""
    digits = re.search(r"[\d,]+(\.\d+)?", cell).group().replace(",", "")
    printed = Decimal(digits)
    return abs(Decimal(value) - printed) <= Decimal("0.501").scaleb(printed.as_tuple().exponent)


def assert_row(cells, metrics, *names):
    """Compare cells with metrics; a name that ends with % is a share, None is skipped."""
    for cell, name in zip(cells, names, strict=True):
        if name is None or cell in ("", "–"):
            continue
        share = name.endswith("%")
        value = metrics[name.removesuffix("%")]
        if share:
            value *= 100
        assert same(cell, value), (cells, name, value)


def assert_verdict(cell, record):
    assert cell == ": ".join([record["validity"]["verdict"], *record["validity"]["codes"]])


def full_names(rows):
    """Yield (strategy, options, row); a first cell that begins with … goes on with the strategy."""
    strategy = ""
    for row in rows:
        words = re.findall(r"`([^`]+)`", row[0])
        if not row[0].startswith("…"):
            strategy, *words = words
        yield strategy, words, row


def test_every_folder_of_records_is_named_with_the_commit_that_its_records_have():
    commits = {}
    (overview,) = tables_of(TEXT.partition("\n## ")[0])
    for _, _, date, commit, folders in overview:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
        for folder in re.findall(r"`(h200_\w+/\w+)`", folders):
            commits[folder] = set(re.findall(r"`([0-9a-f]{7})`", commit))
    folders = {str(path.relative_to(DATA)) for path in DATA.glob("h200_*/*") if path.is_dir()}
    assert set(commits) == folders
    for folder in folders:
        for record in records(folder):
            git = record["environment"].get("git")
            assert git is None or git["commit"][:7] in commits[folder], folder


def headings(path):
    """Return the anchors that GitHub gives the headings of a page."""
    anchors = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = re.sub(r"[^\w -]", "", line.lstrip("# ").lower())
            anchors.add(heading.replace(" ", "-"))
    return anchors


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        linked = path.parent / name if name else path
        assert linked.exists(), target
        assert not anchor or anchor in headings(linked), target


def test_every_section_of_the_results_stands_in_their_first_table():
    overview = TEXT.partition("\n## ")[0]
    assert re.findall(r"^\| \[([^\]]+)\]", overview, re.MULTILINE) == list(sections())


def test_scaling():
    models = {"ResNet-50": "resnet50", "Inception-v3": "inception_v3"}
    cells = {}
    for record in records("h200_x4/scaling"):
        cell = record["cell"]
        key = cell["model"]["name"], cell.get("optimize", "eager"), tuple(cell["gpus"])
        cells[key] = record["metrics"]
    (table,) = sections()["Scaling"]
    for model, mode, *rates in table:
        for text, gpus in zip(rates, [(0,), (0, 1), (0, 1, 2, 3)], strict=True):
            metrics = cells[models[model], mode, gpus]
            assert same(text, metrics[RATE])
            if len(gpus) > 1:
                assert same(text.partition("(")[2], 100 * metrics[EFFICIENCY])


def test_settings():
    by_setting = {}
    for record in records("h200_x4/settings"):
        nccl = record["cell"]["nccl"]
        by_setting[nccl.get("NCCL_P2P_LEVEL", "–"), nccl.get("NCCL_ALGO", "–")] = record
    (table,) = sections()["NCCL settings"]
    for level, algorithm, *row in table:
        record = by_setting[level, algorithm]
        names = (RATE, "comm/exchange_ms", "comm/busbw_gb_per_s", COST)
        assert_row(row[:4], record["metrics"], *names)
        effective = record["effective"]
        assert row[4] == effective["transport"]
        assert int(row[5]) == effective["nccl"]["channels"]["collective"]
        assert_verdict(row[6], record)


def test_strategies_on_four_gpus():
    by_name = {record["name"]: record["metrics"] for record in records("h200_x4/strategies")}
    (table,) = sections()["Strategies on four GPUs"]
    for strategy, options, row in full_names(table):
        name = " · ".join(["resnet50", strategy, "gpus 0,1,2,3", *options])
        metrics = by_name[name]
        assert_row([row[1], row[2], row[5]], metrics, RATE, "comm/exchange_ms", COST)
        if row[3] != "–":
            probe = row[3].split("`")[1]
            reference = metrics[f"reference/{probe}_ms"]
            assert same(row[3], reference)
            assert same(row[4], 100 * reference / metrics["comm/exchange_ms"])


def test_strategies_on_two_gpus():
    runs = {}
    for record in records("h200_x2/strategies"):
        if not record["drift"]:
            runs.setdefault(record["cell"]["strategy"]["name"], []).append(record["metrics"])
    (table,) = sections()["Strategies on two GPUs"]
    assert len(table) == len(runs) == 8
    for row in table:
        repeats = runs[row[0].strip("`")]
        assert len(repeats) == 3
        medians = {name: median(run[name] for run in repeats) for name in repeats[0]}
        names = (RATE, None, "comm/exchange_ms", "comm/ideal_ratio%", COST)
        assert_row(row[1:], medians, *names)


def test_intervals_of_strategies_are_for_the_next_run_and_of_the_difference():
    findings = findings_of(Study.of(read_study(DATA / "h200_x2" / "strategies")[0]))
    rates = {}
    for curve in findings.scaling.curves:
        for point in curve.points:
            rates[point.key["strategy.name"]] = point.rate
    against_none = {}
    for comparison in findings.comparisons:
        if comparison.first.split(" · ")[1] == "none" and comparison.asked == "strategy":
            against_none[comparison.second.split(" · ")[1]] = comparison.difference
    (table,) = sections()["Strategies on two GPUs"]
    for row in table:
        name = row[0].strip("`")
        ends = re.search(r"\(([\d,]+) to ([\d,]+)\)", row[1]).groups()
        low, high = (int(end.replace(",", "")) for end in ends)
        assert (low, high) == (round(rates[name].low), round(rates[name].high))
        if name != "none":
            difference = against_none[name]
            value, near, far = re.findall(r"\d+\.?\d*", row[2])
            assert same(value, -100 * difference.value)
            assert same(near, -100 * difference.high)
            assert same(far, -100 * difference.low)


def test_exchanges_on_two_gpus():
    untouched = {"comm_hook": "none", "transport": "shared", "staging": "full"}
    by_request = {}
    for record in records("h200_x2/exchange"):
        strategy = record["cell"]["strategy"]
        options = []
        for name, value in untouched.items():
            if strategy.get(name, value) != value:
                options.append(f"{name}={strategy[name]}")
        level = record["cell"]["nccl"].get("NCCL_P2P_LEVEL")
        if level:
            options.append(f"nccl.p2p_level={level}")
        by_request[(strategy["name"], *options)] = record["metrics"]
    (table,) = sections()["The exchange alone"]
    for strategy, options, row in full_names(table):
        names = ("comm/exchange_ms", "comm/ideal_ms", "comm/ideal_ratio%")
        assert_row(row[1:4], by_request[(strategy, *options)], *names)


def test_the_next_run():
    (table,) = sections()["The next run"]
    for column, sweep in ((2, "eager_a"), (3, "eager_b")):
        shown = {}
        for runs in open_study(DATA / "h200_x2" / sweep).timed:
            gpus = ",".join(map(str, runs.gpus))
            shown[runs.records[0].cell.strategy["name"], gpus] = runs.next_run(RATE)
        assert len(table) == len(shown) == 6
        for row in table:
            rate = shown[row[0].strip("`"), row[1]]
            assert row[column] == f"{rate.value:,.0f} ({rate.low:,.0f} to {rate.high:,.0f})"


def test_traces():
    by_profiler = {}
    for record in records("h200_x2/traces"):
        level = record["cell"]["nccl"].get("NCCL_P2P_LEVEL", "–")
        by_profiler[level, record["cell"]["profiler"]] = record["metrics"]
    (table,) = sections()["Traces"]
    assert len(table) == len(by_profiler) == 4
    times = [f"trace/{name}_ms_per_step" for name in TRACED]
    for row in table:
        assert_row(row[2:], by_profiler[row[0], row[1]], "trace/nccl_avg_us", *times, COST)


def test_parts_of_the_waterfall():
    """Each part, its interval and its share of the ideal rate are what the findings say today."""
    study = Study.of(read_study(DATA / "h200_x2" / "scaling")[0])
    (waterfall,) = findings_of(study).waterfalls
    lost = {}
    for part in waterfall.parts:
        if part.lost is not None and not part.above_ideal:
            lost[part.name] = part.lost
    names = {"DDP's own work, which one GPU pays too": "strategy overhead on one GPU"}
    (table,) = sections()["Where the rate goes"]
    *rows, whole = table
    assert {names.get(row[0], row[0]) for row in rows} == lost.keys()
    for name, images, share in rows:
        estimate = lost[names.get(name, name)]
        assert same(images, estimate.value)
        assert same(share, 100 * estimate.value / waterfall.ideal.value)
        if estimate.low is not None:
            ends = re.search(r"\((−?\d+) to (\d+)\)", images).groups()
            low, high = (int(end.replace("−", "-")) for end in ends)
            assert (low, high) == (round(estimate.low), round(estimate.high))
    assert same(whole[1], waterfall.ideal.value - waterfall.measured.value)


def test_hosts():
    by_strategy = {}
    for study in ("allreduce", "servers", "waterfall"):
        for record in records(f"h200_net/{study}"):
            if record["cell"].get("hosts") == ["a", "b"]:
                name = record["cell"]["strategy"]["name"], study
                by_strategy[name] = record["metrics"]
    folders = {"nccl_allreduce": "allreduce", "hierarchical": "waterfall"}
    (table,) = sections()["Two hosts"]
    for row in table:
        strategy = row[0].strip("`")
        metrics = by_strategy[strategy, folders.get(strategy, "servers")]
        assert_row(row[1:], metrics, RATE, "comm/exchange_ms", "comm/ideal_ratio%")


def one_gpu(study, **asked):
    """Return the first run of the cells of a study of one GPU that ask for this."""
    matching = []
    for record in records(f"h200_x1/{study}"):
        if asked.items() <= record["cell"].items():
            matching.append(record)
    return min(matching, key=lambda record: record["cell"]["repeat"])


def test_graphs_on_one_gpu():
    models = {"ResNet-50": "resnet50", "Inception-v3": "inception_v3"}
    (table,) = sections()["CUDA graphs"]
    cells = {}
    for record in sorted(records("h200_x1/graphs"), key=lambda record: record["cell"]["repeat"]):
        cell = record["cell"]
        key = cell["model"]["name"], cell["batch_size"], cell["optimize"]
        cells[key] = record["metrics"]
    for model, batch, *row in table:
        for text, optimize in zip(row, ("eager", "compile", "graph", "compile_graph"), strict=True):
            metrics = cells[models[model], int(batch), optimize]
            assert_row([text, text.partition("(")[2]], metrics, RATE, "gpu/idle_share%")


def test_the_fastest_rate():
    best, gains = sections()["The fastest rate"]
    for optimize, batch, rate, clock in best:
        size = int(batch.replace(",", ""))
        record = one_gpu("fastest_long", optimize=optimize.strip("`"), batch_size=size)
        assert_row([rate, clock], record["metrics"], RATE, "gpu/sm_mhz")
        assert record["validity"]["verdict"] == "valid"
    text = (DATA / "mlperf_v4.0_resnet_h200_x8.txt").read_text(encoding="utf-8")
    epochs = [float(line.split()[1]) for line in text.splitlines() if not line.startswith("#")]
    of_mlperf = re.search(r"MLPerf v4.0's (\S+) images/s a GPU", TEXT)[1]
    assert same(of_mlperf, sum(epochs) / len(epochs) / 8)
    step_ms = json.loads((DATA / "gains_h200.json").read_text(encoding="utf-8"))["step_ms"]
    base = step_ms["compile"]
    assert len(gains) == len(step_ms)
    for (_, rate, gain), steps in zip(gains, step_ms.values(), strict=True):
        assert same(rate, 512e3 / median(steps))
        if steps is not base:
            ratios = [before / after - 1 for before, after in zip(base, steps, strict=True)]
            assert same(gain, 100 * sum(ratios) / len(ratios))


def sweep_of(study):
    """Return the finished records of a study, and the seconds that its sweep took."""
    text = (DATA / study / "journal.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    finished = [record for record in records(study) if record["metrics"].get(RATE)]
    ends = [line["time"] for line in lines if line["kind"] == "closed"] or [lines[-1]["time"]]
    begins = [line["began"] for line in lines if line["kind"] == "sweep"]
    return finished, sum(ends) - sum(begins)


@pytest.mark.parametrize(
    ("row", "asked", "grid"),
    [
        (0, "h200_x1/asked_layout_resnet50", "h200_x1/layout_grid"),
        (1, "h200_x1/asked_layout_inception_v3", ""),
        (2, "h200_x1/asked_precision_resnet50", "h200_x1/precision_grid"),
        (3, "h200_x1/asked_precision_inception_v3", ""),
        (4, "h200_x1/asked_way", "h200_x1/way_grid"),
        (5, "h200_x2/asked_strategy", "h200_x2/strategy_grid"),
        (6, "asked_strategies/asked", "asked_strategies/grid"),
    ],
)
def test_questions_beside_their_grids(row, asked, grid, tmp_path):
    """The answer is the question's own; the grid's is the ratio of its medians."""
    if not (DATA / asked).exists():
        shutil.unpack_archive(DATA / "asked_strategies.tar.xz", tmp_path)
        asked, grid = tmp_path / asked, tmp_path / grid
    (table,) = sections()["Questions"]
    _, _, answered, effort, of_grid, grid_effort = table[row]
    folder = DATA / asked
    (question,) = questions_of(folder).values()
    sentence = answer(question, replay(question, open_study(folder).records))[0]
    verdict, _, difference = answered.partition(" ")
    difference = re.sub("^by ", "its rate is ", difference)
    assert verdict in sentence.lower() and difference in sentence
    for study, said in ((asked, effort), (grid, grid_effort)):
        if study:
            finished, seconds = sweep_of(study)
            assert said == f"{len(finished)}, {seconds:.0f}"
    if grid:
        rates = defaultdict(list)
        varied = re.search(r"`(\w+)", table[row][0] if row else "`channels_last`")[1]
        for record in sweep_of(grid)[0]:
            cell = record["cell"]
            cell |= {"strategy": cell["strategy"]["name"]}
            value = str(cell[varied]).lower()
            rates[value].append(record["metrics"][RATE])
        medians = {value: median(of_value) for value, of_value in rates.items()}
        if varied in ("optimize", "strategy"):  # the two fastest
            reference, changed, *_ = sorted(medians, key=medians.get, reverse=True)
            assert reference in answered and of_grid.startswith(f"{changed} ")
        else:
            changed, reference = re.findall(r"(false|true|tf32|fp32)`", table[row][0])
        change = 100 * (medians[changed] / medians[reference] - 1)
        assert of_grid.endswith(f"{change:+.1f} %".replace("-", "−"))


def test_strategies_of_today():
    (table,) = sections()["Strategies of today"]
    measured = defaultdict(list)
    for record in records("h200_x2/today") + records("h200_x2/strategy_grid"):
        cell, strategy = record["cell"], record["cell"]["strategy"]
        changed = {"comm_hook": strategy.get("comm_hook"), "accumulate": cell["accumulate"]}
        changed["p2p_level"] = cell["nccl"].get("NCCL_P2P_LEVEL")
        name = strategy["name"]
        for option, value in changed.items():
            if value not in (None, "none", 1):
                name += f" {option}={value}"
        in_grid = record["study"] == "grid"
        if not in_grid or name in ("zero2", "fsdp"):
            measured[name].append(record)
    name, idle = "", {}
    for row in table:
        own = row[0].split("`")[1]
        name = f"{name.split()[0]} {own}" if row[0].startswith("…") else own
        runs = measured.pop(name)
        verdicts = {run["validity"]["verdict"] for run in runs}
        assert verdicts == {"suspect" if "suspect" in row[0] else "valid"}
        names = (RATE, "comm/exchange_ms", COST, "memory/peak_gib")
        medians = {metric: median(run["metrics"][metric] for run in runs) for metric in names}
        assert_row(row[1:], medians, *names)
        if name in ("zero2", "fsdp"):
            idle[name] = median(run["metrics"]["gpu/idle_share"] for run in runs)
    assert not measured
    said = f"the GPUs wait {100 * idle['zero2']:.0f} and {100 * idle['fsdp']:.0f} % for the CPU"
    assert f"Of a step of `zero2` and `fsdp` {said}." in TEXT


def test_a_script_beside_the_cell_of_its_model():
    (table,) = sections()["Scripts"]
    rates = {}
    for record in records("h200_x2/scripts"):
        cell = record["cell"]
        column = len(cell["gpus"])
        column = {"LOC": 3, "PIX": 4}.get(cell["nccl"].get("NCCL_P2P_LEVEL"), column)
        rates[cell["benchmark"]["name"] != "script", column] = record["metrics"][RATE]
    for (row, column), rate in rates.items():
        assert same(table[row][column], rate)
    assert len(rates) == 6
    busbw = {}
    for record in records("h200_x2/registered"):
        memory = record["cell"]["benchmark"].get("memory", "default")
        busbw[memory] = f"{record['metrics']['collectives/busbw_gb_per_s']:.0f}"
    said = f"a busbw of {busbw['default']} GB/s, with\n`benchmark.memory=registered` {busbw['registered']}."
    assert said in TEXT


def test_what_observing_costs():
    """Of the page on scripts."""
    step_ms = []
    for line in read_lines(DATA / "observed_h200_x2" / "clean" / "0.jsonl"):
        step_ms += line["ms"] if line["kind"] == "steps" else []
    of_cell = []
    for record in records("h200_x2/scripts"):
        cell = record["cell"]
        if cell["benchmark"]["name"] == "script" and (cell["gpus"], cell["nccl"]) == ([0, 1], {}):
            of_cell.append(record["metrics"]["step/ms_median"])
    page = (ROOT / "benchmarks" / "script" / "README.md").read_text(encoding="utf-8")
    assert f"took {median(step_ms):.1f} ms observed and {median(of_cell):.1f} ms as a cell" in page


def held_out():
    """Return {(whether cells of one GPU were given, what was held out): its errors}, as in golden."""
    text = (ROOT / "tests" / "golden" / "holdout.txt").read_text(encoding="utf-8")
    found = {}
    for line, printed in re.findall(r"^\$ (.+ --json)\n(\{\n(?:.*\n)*?\})$", text, re.MULTILINE):
        content = json.loads(printed)
        found["h200_x1" in line, content["holdout"]] = content["summary"]
    return found


def test_held_out_errors_on_the_page_of_forecasts():
    page = (ROOT / "analysis" / "prediction" / "README.md").read_text(encoding="utf-8")
    several, with_one = tables_of(page.partition("## Held-out errors")[2])
    found = held_out()
    kinds = [(False, kind) for kind in ("condition", "size", "transport", "model")]
    for row, kind in zip([*several, *with_one], [*kinds, (True, "batch")], strict=True):
        errors = found[kind]
        cells = errors["cells"] - errors["not_forecast"]
        assert row[1] == f"{cells} of {errors['cells']}", kind
        for cell, name in ((row[2], "cost"), (row[3], "step")):
            for printed, value in zip(cell.split("("), (name, f"null_{name}"), strict=True):
                assert same(printed, 100 * errors[value]), (kind, value)
        if errors["covered"] is not None:
            assert row[4] == f"{errors['covered']} of {errors['with_interval']}", kind


def test_blind_forecasts_of_one_gpu():
    (table,) = sections()["Forecasts"]
    for strategy, batch, forecast, rate, error in table:
        size = int(re.match(r"\d+", batch).group())
        for record in records("h200_x1/forecasts"):
            cell = record["cell"]
            if (cell["batch_size"], f"`{cell['strategy']['name']}`") == (size, strategy):
                break
        metrics = record["metrics"]
        assert_row([forecast, rate], metrics, "predicted/images_per_second", RATE)
        assert same(error, 100 * abs(metrics["prediction/error"]))
