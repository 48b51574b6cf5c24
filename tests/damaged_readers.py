"""Readers of foreign files: what each reads whole (its seeds), and how it reads a damaged file.

A call returns what the reader made of the file as JSON values, or None where nothing is compared.
It raises Refusal for an error that the reader declares; anything else is a fault.
"""

import contextlib
import dataclasses
import functools
import gzip
import io
import json
import re
import sqlite3
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import damage

HERE = Path(__file__).parent
DATA = HERE / "data"
RAW = DATA / "raw_lines" / "h200_x2"
EAGER = DATA / "h200_x2" / "eager_a"
CELLS = (
    "resnet50-cpu_staged-gpus0-1-06d827de8c",
    "resnet50-kvstore_dist_sync-gpus0-1-7259ec65eb",
    "jacobi-gpus0-1-6bc17f8463",
    "p2p-gpus0-1-1eaf0b71f4",
)
# What Python says in a ValueError that no reader meant.
PYTHONS_WORDS = re.compile(
    r"^python -m analysis [\w-]+: (?:/\S+: )?(?:invalid literal for|could not convert"
    r"|.*values to unpack|.*codec can't|.*is not in list|cannot convert|embedded null"
    r"|Exceeds the limit|buffer size|operands could not|math domain)"
)


class Refusal(Exception):
    """What a reader declares to raise, or a status other than 0 of a command."""


@dataclass(frozen=True)
class Seed:
    """A whole file, and which of a folder's it is."""

    data: bytes
    name: str = ""


@dataclass(frozen=True)
class Reader:
    """One reader: its seeds, what damages them, and how it is called with (seed, folder)."""

    seeds: Callable[[], list[Seed]]
    read: Callable[[Seed, Path], Any]
    damages: tuple[Callable[..., bytes], ...]
    losses: tuple[Callable[..., bytes], ...] = damage.LOSSES
    follows: tuple[str, ...] = ()  # paths of a result that follow from how much of a file is there
    share: float = 1.0  # of the examples


def captures(*names):
    return lambda: [Seed((DATA / name).read_bytes()) for name in names]


def run_command(*arguments):
    """Run a command of analysis in this process and return what it printed. Raises Refusal."""
    from analysis.__main__ import main

    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(list(arguments))
    message = err.getvalue()
    assert status in (0, 1, 2), status
    assert len(message) <= 20_000
    assert not PYTHONS_WORDS.search(message), f"Python's words: {message[:300]!r}"
    assert status != 2 or (message.count("\n") == 1 and message.strip()), f"{message[:300]!r}"
    if status:
        raise Refusal(message)
    out.getvalue().encode()  # as a terminal would
    return out.getvalue()


def reject_constant(word):
    raise AssertionError(f"{word} is not JSON")


def run_json(*arguments):
    return json.loads(run_command(*arguments, "--json"), parse_constant=reject_constant)


def command(name, suffix="", drawn=False):
    """Return a reader that is `python -m analysis NAME FILE`, as a table, as JSON and drawn."""

    def read(seed, folder):
        path = folder / f"input{suffix}"
        path.write_bytes(seed.data)
        drawing = ("--svg", str(folder / "drawing.svg")) if drawn else ()
        run_command(name, str(path), *drawing)
        return run_json(name, str(path))

    return read


def place(files, seed, folder):
    """Write the files {path: bytes} of a study below a folder, one of them damaged."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (folder / seed.name).write_bytes(seed.data)
    return folder


# NCCL logs, nccl-tests, p2p, topologies, traces


def nccl_logs():
    packed = sorted(EAGER.glob("*/nccl/*.gz"))[0]
    tuning = gzip.decompress(packed.read_bytes())[:6000].rpartition(b"\n")[0] + b"\n"
    small = captures(
        *("nccl_dgx1_gpus_0_3_p2p_level_1.log", "nccl_h200_gpus_0_3_p2p_level_LOC.log"),
        *(f"nccl_dialects/{version}.log" for version in ("2.4.8", "2.18.3", "2.30.7")),
    )
    return [*small(), Seed(tuning)]


def nccl_tests_texts():
    lines = (DATA / "nccl_tests_h200_x2.txt").read_bytes().splitlines(keepends=True)
    whole = captures("nccl_tests_h200_x2_graph.txt", "nccl_tests_sharp_cluster.txt")()
    return [Seed(b"".join(lines[:60])), *whole]


@functools.cache
def nsys_exports():
    """Return exports of two ranks with the first rows of every table, in pages of 512 bytes."""
    seeds = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("nsys_h200_x2.sqlite.gz", "nsys_h200_x2_p2p_level_LOC.sqlite.gz"):
            whole = Path(folder) / "whole.sqlite"
            small = Path(folder) / f"{name}.small"
            whole.write_bytes(gzip.decompress((DATA / name).read_bytes()))
            connection = sqlite3.connect(small, isolation_level=None)
            connection.execute("PRAGMA page_size=512")
            connection.execute(f"ATTACH '{whole}' AS source")
            query = "SELECT name FROM source.sqlite_master WHERE type = 'table'"
            for (table,) in connection.execute(query).fetchall():
                if table.startswith("ENUM"):
                    continue
                rows = "1"
                if table.startswith("CUPTI"):
                    rows = "rowid % 50 = 0 OR rowid <= 12"
                limit = {"StringIds": 150}.get(table, 40)
                source = f'SELECT * FROM source."{table}" WHERE {rows} LIMIT {limit}'
                connection.execute(f'CREATE TABLE "{table}" AS {source}')
            connection.execute("DETACH source")
            connection.execute("VACUUM")
            connection.close()
            seeds.append(Seed(small.read_bytes()))
    return seeds


def kineto_traces():
    """Return traces of a rank on a GPU and of one on the host: 8 events of every category."""
    seeds = []
    for name in ("kineto_h200_x2/rank0.json.gz", "kineto_gloo_x2/rank1.json.gz"):
        trace = json.loads(gzip.decompress((DATA / name).read_bytes()))
        by_kind = {}
        for event in trace["traceEvents"]:
            if event.get("ph") == "X":
                communicates = "nccl" in event["name"] or "gloo" in event["name"]
                by_kind.setdefault((event.get("cat"), communicates), []).append(event)
        events = [event for kind in by_kind.values() for event in kind[:8]]
        seeds.append(Seed(json.dumps({**trace, "traceEvents": events}, indent=0).encode()))
    return seeds


# Our own files: records, cells of a launcher that died, hosts, noise floors, bundles


@functools.cache
def record_seeds():
    """Return a failed record, one of two hosts, and those of three studies."""
    from build import make_record, on_hosts

    failed = json.dumps(dataclasses.asdict(make_record(state="failed")))
    served = {"strategy": {"name": "kvstore_dist_sync", "servers": 1}, "server_hosts": ["b"]}
    hosts = json.dumps(on_hosts(1, ("a", "b"), [0, 1], 9000.0, cell=served))
    seeds = [Seed(failed.encode()), Seed(hosts.encode())]
    for study in (RAW, DATA / "h200_x2" / "scaling", EAGER):
        seeds.append(Seed(sorted(study.glob("*/record.json"))[0].read_bytes()))
    return seeds


def read_record(seed, folder):
    """Read a record: of what is read all can be used, and it is written as it was."""
    from benchmarks.record import CellFolder, RecordError, read, write

    path = folder / "record.json"
    path.write_bytes(seed.data)
    try:
        record = read(path)
    except RecordError as error:
        raise Refusal(str(error)) from None
    assert isinstance(record.usable, bool) and isinstance(sorted(record.cell.gpus), list)
    assert datetime.fromtimestamp(record.started_at) and datetime.fromtimestamp(record.ended_at)
    assert all(isinstance(float(value), float) for value in record.metrics.values())
    assert read(write(CellFolder(folder), record)).record_id == record.record_id
    return json.loads(json.dumps(dataclasses.asdict(record)))


@functools.cache
def dead_cell(name):
    """Return the files of a study, {path: bytes}, of a cell whose launcher died, and the cell."""
    from conf.cell import Cell
    from launch.study.study_folder import ProcessIdentity

    record = json.loads((RAW / name / "record.json").read_text())
    cell = Cell.from_dict(record["cell"])
    facts = ("record_id", "started_at", "study", "sweep_id", "overrides", "environment")
    attempt = {fact: record[fact] for fact in facts}
    files = {
        "cell.json": json.dumps(cell.to_dict()).encode(),
        "attempt.json": json.dumps(attempt).encode(),
        "failures.json": b'{"1": -9}\n',
    }
    for path in (RAW / name).glob("ranks/*"):
        files[f"ranks/{path.name}"] = path.read_bytes()
    samples = next(EAGER.glob("*gpus0-1*/gpus.jsonl.gz")).parent
    for kind in ("gpus", "cpu"):
        packed = (samples / f"{kind}.jsonl.gz").read_bytes()
        lines = gzip.decompress(packed).splitlines(keepends=True)[:8]
        files[f"{kind}.jsonl"] = files[f"{kind}-1.jsonl"] = b"".join(lines)
    process = dataclasses.replace(ProcessIdentity.own(), boot_id="an earlier boot")
    dead = dataclasses.asdict(process)
    begin = {"kind": "begin", "time": record["started_at"], "process": dead, "cell": cell.folder}
    journal = [
        {"kind": "sweep", "time": 1.0, "process": dead},
        {**begin, "token": "0" * 32},
        {**begin, "kind": "end", "token": "0" * 32},
        {**begin, "token": record["record_id"]},
    ]
    lines = "".join(json.dumps(line) + "\n" for line in journal)
    study = {f"{cell.folder}/{path}": data for path, data in files.items()}
    return {**study, "journal.jsonl": lines.encode()}, cell


def cell_seeds():
    seeds = []
    for name in CELLS:
        files, _ = dead_cell(name)
        seeds += [Seed(data, f"{name}:{path}") for path, data in files.items()]
    return seeds


def recover_cell(seed, folder):
    """Start a launcher on a damaged study: close the attempt, judge it, look for its end."""
    from analysis.validity.gpu_samples import summary
    from benchmarks.agent import processes
    from benchmarks.record import CellFolder, RecordError, read
    from launch.engines.engine import rank_ends
    from launch.study.study_folder import StudyFolder
    from launch.supervision.failure import first_cause
    from launch.supervision.watch import Watch

    name, _, path = seed.name.partition(":")
    files, cell = dead_cell(name)
    place(files, Seed(seed.data, path), folder / "study")
    study = StudyFolder(str(folder), "study")
    # A look at every process takes longer than all the rest.
    with mock.patch.object(processes, "end", lambda token, grace_s: []):
        study.recover()
    study.finished(cell)
    cell_folder = CellFolder(folder / "study" / cell.folder)
    watch = Watch(cell_folder, cell.world_size, cell.servers)
    watch.update()
    first_cause(watch, cell_folder, rank_ends(cell_folder), 1)
    summary(cell_folder)
    try:
        record = read(cell_folder.record)
    except RecordError as error:
        raise Refusal(str(error)) from None
    kept = ("metrics", "within_run", "series", "tables", "model", "ranks")
    return {name: getattr(record, name) for name in kept}


def host_seeds():
    from build import WITH_GPUS, described

    return [Seed(json.dumps(described(**changes)).encode()) for changes in ({}, WITH_GPUS)]


def describe_host(seed, folder):
    """Read what a host says of itself, compare it with a whole one, look for an address."""
    from build import host

    from conf.options import Refused
    from launch.engines.rendezvous import candidates
    from launch.machine.fleet import Fleet, Host, compare

    try:
        damaged = Host.described("b", seed.data)
        for sentence in compare(Fleet((host("a"), damaged))):
            sentence.encode()
        candidates(damaged, [host("a")], None, False)
    except Refused as error:
        assert "\n" not in str(error)
        raise Refusal(str(error)) from None
    return json.loads(json.dumps(dataclasses.asdict(damaged), default=str))


def floor_seeds():
    from analysis.study.noise_floor import FloorGroup

    values = {"str": "x", "int": 2, "float": 1.0, "bool": False}
    group = {}
    for name, kind in FloorGroup.__annotations__.items():
        group[name] = values[getattr(kind, "__name__", kind)]
    rows = []
    for number in range(6):
        sums = {"runs": 4 + number, "freedom": 2 + number, "squares": 0.001 * number}
        rows.append({**group, "metric": f"m{number % 3}", **sums})
    whole = {"version": 1, "studies": {"study": rows, "other": rows[:3]}}
    return [Seed(json.dumps(whole, indent=1).encode()), Seed(json.dumps(whole).encode())]


def read_floor(seed, folder):
    """Read noise_floor.json as the end of a sweep, and as a report of a study beside it does."""
    from build import make_record

    from analysis.study.noise_floor import NoiseFloors, as_json, floors_of, of_other_studies

    (folder / "noise_floor.json").write_bytes(seed.data)
    scatters = of_other_studies(folder / "study")
    floors = NoiseFloors(scatters)
    for group, metric in scatters:
        floors.of(make_record(), group, metric)
    try:
        sums = floors_of(folder / "noise_floor.json")
    except (OSError, ValueError) as error:
        raise Refusal(str(error)) from None
    return json.loads(json.dumps(as_json(sums), allow_nan=False))


@functools.cache
def packed_cell():
    """Return a cell with its record and packed raw files, whose SHA-256 the record has."""
    folder = next(EAGER.glob("resnet50-kvstore_device-gpus1-*"))
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            files[f"study/cell/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
    return files


def unpacked(data):
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error):
        return None


def verify_cell(seed, folder):
    """Derive a record again with one damaged file: a raw file with other content may not pass."""
    files = packed_cell()
    place(files, seed, folder)
    shown = run_json("verify", str(folder / "study"))
    if shown["right"] and seed.name.endswith(".gz"):
        assert unpacked(seed.data) == unpacked(files[seed.name]), "another content passes"


@functools.cache
def bundle_seeds():
    with tempfile.TemporaryDirectory() as folder:
        place(packed_cell(), Seed(*reversed(next(iter(packed_cell().items())))), Path(folder))
        run_command("report", f"{folder}/study", "--bundle")
        (archive,) = Path(folder).rglob("*.zip")
        return [Seed(archive.read_bytes())]


def contents(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def verify_bundle(seed, folder):
    path = folder / "bundle.zip"
    path.write_bytes(seed.data)
    shown = run_json("verify", str(path))
    (whole,) = bundle_seeds()
    if shown["values"]:
        assert contents(seed.data) == contents(whole.data), "another content passes"


@functools.cache
def study_files():
    files = {}
    for path in sorted(EAGER.glob("*/record.json"))[:4]:
        files[f"study/{path.parent.name}/record.json"] = path.read_bytes()
    return files


def seeds_of(files):
    return lambda: [Seed(data, name) for name, data in files().items()]


def place_record(files, seed, folder):
    """Place a study of which one record is damaged. Raises Refusal for most that cannot be read:
    commands say the same of all, and take a hundred times as long as the reading.
    """
    from benchmarks.record import RecordError, read

    try:
        read(place(files, seed, folder) / seed.name)
    except RecordError as error:
        if zlib.crc32(seed.data) % 20:
            raise Refusal(str(error)) from None
    return str(folder / "study")


def read_report(seed, folder):
    """Make the report, its figures for the page only: as PDF the same would be drawn again."""
    from matplotlib.figure import Figure

    whole_savefig = Figure.savefig

    def savefig(figure, out, **options):
        if options["format"] != "pdf":
            whole_savefig(figure, out, **options)

    study = place_record(study_files(), seed, folder)
    with mock.patch.object(Figure, "savefig", savefig):
        run_command("report", study)


@functools.cache
def forecast_study():
    """Return the records of an invented machine with calibration and forecasts."""
    from simulate import ForecastMachine

    machine = ForecastMachine().calibrate()
    later = [machine.measure(gpus, batch) for gpus in ((0, 2), (1, 3)) for batch in (64, 256)]
    files = {}
    for number, record in enumerate([*machine.known, *later]):
        text = json.dumps(dataclasses.asdict(record), default=str)
        files[f"study/cell{number}/record.json"] = text.encode()
    return files


def forecast_seeds():
    seeds = seeds_of(forecast_study)()
    return [*seeds[:2], seeds[len(seeds) // 2], *seeds[-4:]]


def read_forecasts(seed, folder):
    """Forecast, hold out, advise, compare and say the seconds of a study with a damaged record."""
    study = place_record(forecast_study(), seed, folder)
    requests = (
        ("predict", study),
        ("predict", study, "--holdout", "condition"),
        ("predict", study, "--gpus", "0+1,0+1+2", "--batch", "96,512"),
        ("advise", study, "--gpus", "0+1,0+2"),
        ("seconds", study),
        ("compare", study, study),
    )
    request = requests[len(seed.data) % len(requests)]
    run_command(*request)
    run_json(*request)


# What users write: YAML of --config-dir, files of hosts


def yaml_seeds():
    seeds = []
    for group in ("experiment", "strategy", "benchmark", "model"):
        for path in sorted((HERE.parent / "conf" / group).glob("*.yaml"))[:6]:
            seeds.append(Seed(path.read_bytes(), group))
    return seeds


def compose_yaml(seed, folder):
    """Plan a request with the file as launch.py does. Raises Refusal for status 2."""
    import runpy

    path = folder / seed.name / "damaged.yaml"
    path.parent.mkdir()
    path.write_bytes(seed.data)
    plus = "+" if seed.name == "experiment" else ""
    words = [f"--config-dir={folder}", f"{plus}{seed.name}=damaged", "dry_run=true", "device=cpu"]
    out = io.StringIO()
    err = io.StringIO()
    status = 0
    try:
        with (
            mock.patch("sys.argv", ["launch.py", "-m", *words, f"output_dir={folder}/out"]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            runpy.run_path(str(HERE.parent / "launch.py"), run_name="__main__")
    except SystemExit as ended:
        status = ended.code or 0
    message = err.getvalue()
    assert status in (0, 2), f"status {status}: {message[-500:]!r}"
    if status:
        assert message.count("\n") == 1, message[-500:]
        raise Refusal(message)


def read_hosts(seed, folder):
    from conf.options import Refused
    from conf.subsets import listed_hosts

    path = folder / "hosts"
    path.write_bytes(seed.data)
    try:
        return [dataclasses.asdict(host) for host in listed_hosts(str(path))]
    except Refused as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
        raise Refusal(str(error)) from None


def hosts_seeds():
    slots = b"# ours\nnode01 slots=4\nnode02 slots=4\n\nnode03\n"
    return [Seed(slots), Seed(b"a\nb\nc.example.org slots=8  # far\n")]


TEXT = damage.TEXT
TEXT_AND_JSON = (*damage.TEXT, *damage.JSON)
LINES = (damage.cut, damage.cut_gzip, damage.lose_lines)
ONE_LINE = (damage.cut, damage.cut_gzip, damage.lose_line)  # two tables may become one whole one
BYTES = (damage.flip_bits, damage.replace_bytes, damage.splice)
P2P = ("p2p_a100_pcie_x4.txt", "p2p_h200_x2.txt", "p2p_dgx_a100_row0.txt")
TOPOLOGIES = ("topo_a100_pcie_x4.txt", "topo_dgx1_v100.txt", "topo_h200_x4.txt")
READERS = {
    "record": Reader(
        record_seeds, read_record, TEXT_AND_JSON, (damage.cut, damage.lose_entry), share=4.0
    ),
    "cell": Reader(
        cell_seeds, recover_cell, TEXT_AND_JSON, (damage.cut, damage.lose_lines),
        follows=("/ranks/.*/done", "/metrics/gpu/.*"),  # a window without an end goes on
    ),
    "nccl-log": Reader(
        nccl_logs, command("nccl-log"), TEXT, LINES,
        follows=("/processes", "/announced_by/.*", "/channels_from"),
    ),
    "nccl-tests-text": Reader(nccl_tests_texts, command("nccl-tests"), TEXT, ONE_LINE),
    "p2p-text": Reader(captures(*P2P), command("p2p"), TEXT, ONE_LINE),
    "topo-text": Reader(captures(*TOPOLOGIES), command("topology", drawn=True), TEXT, LINES),
    "topo-xml": Reader(
        captures("nccl_topo_h200_x4.xml", "nccl_topo_dgx1.xml"), command("topology", drawn=True),
        (*TEXT, *(damage.change_xml,) * 6, damage.nest),
    ),
    "nsys": Reader(
        nsys_exports, command("trace", ".sqlite"),
        (*BYTES, *(damage.change_sql,) * 5, damage.encode_otherwise),
    ),
    "kineto": Reader(kineto_traces, command("trace", ".json"), TEXT_AND_JSON),
    "yaml": Reader(
        yaml_seeds, compose_yaml, (*TEXT, *(damage.change_yaml,) * 8, damage.nest), (), share=0.5
    ),
    "host": Reader(host_seeds, describe_host, TEXT_AND_JSON),
    "noise-floor": Reader(floor_seeds, read_floor, TEXT_AND_JSON),
    "verify": Reader(seeds_of(packed_cell), verify_cell, TEXT_AND_JSON, ()),
    "bundle": Reader(
        bundle_seeds, verify_bundle, (*BYTES, damage.encode_otherwise), (damage.cut,), share=0.5
    ),
    "forecasts": Reader(forecast_seeds, read_forecasts, TEXT_AND_JSON, (), share=0.3),
    "hosts": Reader(hosts_seeds, read_hosts, TEXT, ()),
    "report": Reader(seeds_of(study_files), read_report, damage.JSON, (), share=0.2),
}  # fmt: skip
