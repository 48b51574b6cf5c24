"""Every reader of foreign text for the fuzzing (tests/fuzz.py): what it reads, how it refuses, and what it may never do.

A reader is fed with one damaged file. It returns what it found, as JSON values, or None where there is nothing to compare. It
raises Refusal for an error that it declares; anything else is a finding.
"""

import contextlib
import dataclasses
import functools
import gzip
import importlib
import io
import json
import pickle
import re
import sqlite3
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [one for one in (str(HERE.parent), str(HERE)) if one not in sys.path]

import fuzz_mutations as mutations  # noqa: E402

DATA = HERE / "data"
CELLS = DATA / "raw_lines" / "h200_x2"


class Refusal(Exception):
    """What a reader declares to raise, or the status 2 of a command."""


class Wrong(Exception):
    """What no reader may do: a second line on stderr, output that is no JSON, a number that a store cannot take."""


@dataclass(frozen=True)
class Seed:
    """A whole file, and which of a folder's it is."""

    data: bytes
    name: str = ""


@dataclass(frozen=True)
class Reader:
    """One reader: its seeds, what is done to them, and how it is called."""

    name: str
    seeds: Callable[[], list[Seed]]
    read: Callable[[Seed, Path, int], Any]  # (damaged file, an empty folder, number of the case)
    damages: tuple[Callable[..., bytes], ...]
    # What only takes away, where the reader must notice or return less. Nobody can know what JSON lacks that is whole again.
    removing: tuple[Callable[..., bytes], ...] = (mutations.cut, mutations.cut_gzip)
    # Paths of what it returns that follow from how much is there: they may differ from those of the whole file.
    follows: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # modules beyond Ringside's own
    share: float = 1.0  # of the cases that are asked for
    least: int = 1

    @property
    def missing(self) -> list[str]:
        """Name the modules that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


# --- what only takes away leaves nothing else ---------------------------------------------------------------------

SAID = (".*/notes", "/truncated", "/lost", ".*/file", ".*/line")  # what a reader says about the damage, and where


def others(part, whole, follows=(), path=""):
    """Yield the paths of what a part has otherwise than the whole. Lists may have fewer elements, in the same order."""
    if part is None or any(re.fullmatch(pattern, path) for pattern in (*SAID, *follows)):
        return
    if isinstance(part, dict) and isinstance(whole, dict):
        for key, value in part.items():
            yield from others(value, whole.get(key), follows, f"{path}/{key}")
    elif isinstance(part, list) and isinstance(whole, list):
        if len(part) == len(whole):
            found = [one for a, b in zip(part, whole, strict=True) for one in others(a, b, follows, f"{path}/*")]
            if not found or not part:
                return
        rest = list(whole)
        for one in part:
            compared = [list(others(one, other, follows, f"{path}/*")) for other in rest]
            if [] not in compared:
                yield from min(compared, key=len, default=[f"{path}/*: {one!r:.100} is new"])
                return
            del rest[: compared.index([]) + 1]
    elif part != whole or isinstance(part, bool) is not isinstance(whole, bool):
        yield f"{path}: {part!r:.100} instead of {whole!r:.100}"


# --- commands -----------------------------------------------------------------------------------------------------


def through_command(command, suffix="", drawn=False):
    """Return a reader that is `python -m analysis COMMAND FILE --json`; now and then its table, and its drawing."""

    def read(seed, folder, number):
        path = folder / f"input{suffix}"
        path.write_bytes(seed.data)
        if number % 16 == 3:
            ran(command, str(path))
        if drawn and number % 256 == 5:
            ran(command, str(path), "--svg", str(folder / "drawing.svg"))
        text = ran(command, str(path), "--json")
        try:
            return json.loads(text, parse_constant=_no_constant)
        except ValueError as error:
            raise Wrong(f"--json printed no JSON ({error})") from None

    return read


# What Python says in a ValueError that no reader meant.
PYTHONS = re.compile(
    r"^python -m analysis [\w-]+: (?:/\S+: )?(?:invalid literal for|could not convert|.*values to unpack|.*codec can't"
    r"|.*is not in list|cannot convert|embedded null|Exceeds the limit|buffer size|operands could not|math domain)"
)


def ran(*arguments):
    """Run a command of analysis in this process and return what it printed. Raises Refusal for status 1 and 2."""
    from analysis.__main__ import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(list(arguments))
    said = err.getvalue()
    if status not in (0, 1, 2):
        raise Wrong(f"status {status}")
    if status == 2 and (said.count("\n") != 1 or not said.strip()):
        raise Wrong(f"{said.count(chr(10))} lines on stderr: {said[:300]!r}")
    if words := PYTHONS.search(said):
        raise Wrong(f"Python's words, not a sentence of the reader: {words[0]!r} in {said[:300]!r}")
    if len(said) > 20_000:
        raise Wrong(f"a sentence of {len(said)} characters")
    if status:
        raise Refusal(said)
    out.getvalue().encode()  # as a terminal would
    return out.getvalue()


def _no_constant(word):
    raise ValueError(f"{word} is no JSON")


def files(*names):
    """Return a function that reads captures."""
    return lambda: [Seed((DATA / name).read_bytes()) for name in names]


def nccl_logs():
    """Two whole logs, and the heads of eight ranks of a large one."""
    large = (DATA / "nccl_h200_x8_default.log").read_bytes().splitlines(keepends=True)
    tuning = [Seed(gzip.decompress(path.read_bytes())[:6000].rpartition(b"\n")[0] + b"\n")
              for path in sorted(DATA.glob("h200_x2/eager_a/*/nccl/*.gz"))[:1]]  # fmt: skip
    small = files("nccl_dgx1_gpus_0_3_p2p_level_1.log", "nccl_h200_gpus_0_3_p2p_level_LOC.log")()
    return [*small, Seed(b"".join(large[:: len(large) // 60])), *tuning]


def nccl_tests_texts():
    """Whole runs of a few kB."""
    text = (DATA / "nccl_tests_h200_x2.txt").read_bytes().splitlines(keepends=True)
    return [Seed(b"".join(text[:60])), *files("nccl_tests_h200_x2_graph.txt", "nccl_tests_sharp_cluster.txt")()]


def nccl_tests_documents():
    """Documents of `-J`, written from the rows of a capture: every form of the file that the reader knows."""
    from analysis.nccl_tests.reader import parse_nccl_tests

    run = parse_nccl_tests((DATA / "nccl_tests_h200_x2_graph.txt").read_text())[0]

    def figures(one):
        return {"time": one.time_us, "alg_bw": one.algbw, "bus_bw": one.busbw, "nwrong": one.wrong or 0}

    rows = [
        {"size": row.bytes, "count": row.count, "type": row.dtype, "redop": row.redop or "none", "root": "    -1",
         "out_of_place": figures(row.out_of_place), "in_place": figures(row.in_place),
         "out_of_place_per_iter": {"p50_us": 14.0, "times_us": [14.0, 15.0]}}
        for row in run.rows
    ]  # fmt: skip
    whole = {
        "version": 3, "args": ["./build/all_reduce_perf", "-g", "2"], "nccl_version": 22809, "env": ["NCCL_P2P_LEVEL=LOC"],
        "config": {"nthreads": 1, "ngpus": 2, "step_factor": 2, "iterations": 20, "graph": 0, "devices": [
            {"rank": 0, "group": 0, "hostname": "a", "device": 0, "device_hex": "0x1", "device_info": "H200"}]},
        "results": rows, "out_of_bounds": {"count": 0}, "average_bus_bandwidth": {"bandwidth": 448.74}, "errors": [],
    }  # fmt: skip
    return [Seed(json.dumps(whole).encode()), Seed(json.dumps({**whole, "results": rows[:3]}, indent=1).encode() * 2)]


def p2p_records():
    """Records of benchmark=p2p."""
    names = ("p2p-gpus0-1-d8d7030d8f", "p2p-gpus0-1-9781131b4b")
    return [Seed((DATA / "h200_x2" / "links" / name / "record.json").read_bytes()) for name in names]


def topology_xmls():
    """The dump of four H200s, and one with several CPUs, switches and NICs."""
    gpu = (
        '<pci busid="0000:{a}:00.0" link_speed="16.0 GT/s PCIe" link_width="16"><pci busid="0000:{b}:00.0" link_speed="8 GT/s" '
        'link_width="16"><gpu dev="{n}" sm="70"><nvlink target="0000:{peer}:00.0" count="2" tclass="0x030200"/></gpu></pci>'
        '<pci busid="0000:{c}:00.0"><nic><net name="mlx5_{n}" dev="{n}"/></nic></pci></pci>'
    )
    inside = [gpu.format(n=n, a=f"a{n}", b=f"b{n}", c=f"c{n}", peer=f"b{n ^ 1}") for n in range(4)]
    two = "".join(
        f'<cpu numaid="{n}" affinity="0000000f,ffffffff">{"".join(inside[2 * n : 2 * n + 2])}</cpu>\n' for n in (0, 1)
    )
    return [*files("nccl_topo_h200_x4.xml")(), Seed(f'<system version="1">\n{two}</system>\n'.encode())]


def kineto_traces():
    """Traces of a rank on a GPU and of one on the host, of some 60 events, of every category."""
    found = []
    for name in ("kineto_h200_x2/rank0.json.gz", "kineto_gloo_x2/rank1.json.gz"):
        whole = json.loads(gzip.decompress((DATA / name).read_bytes()))
        events = [one for one in whole["traceEvents"] if one.get("ph") == "X"]
        by_kind = {}
        for one in events:
            by_kind.setdefault((one.get("cat"), "nccl" in one["name"] or "gloo" in one["name"]), []).append(one)
        kept = [one for same in by_kind.values() for one in same[:8]]
        found.append(Seed(json.dumps({**whole, "traceEvents": kept}, indent=0).encode()))
    return found


@functools.cache
def _nsys_seeds():
    """Exports of two ranks with the first rows of every table, in pages of 512 bytes."""
    import tempfile

    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, rows in (
            ("nsys_h200_x2.sqlite.gz", 40),
            ("nsys_h200_x2_p2p_level_LOC.sqlite.gz", 30),
        ):
            whole, small = Path(folder) / "whole.sqlite", Path(folder) / f"{name}.small"
            whole.write_bytes(gzip.decompress((DATA / name).read_bytes()))
            connection = sqlite3.connect(small, isolation_level=None)
            connection.execute("PRAGMA page_size=512")
            connection.execute(f"ATTACH '{whole}' AS source")
            tables = connection.execute("SELECT name FROM source.sqlite_master WHERE type = 'table'").fetchall()
            for (table,) in tables:
                if table.startswith("ENUM"):
                    continue
                every = "rowid % 50 = 0 OR rowid <= 12" if table.startswith("CUPTI") else "1"
                limit = 150 if table == "StringIds" else rows
                connection.execute(
                    f'CREATE TABLE "{table}" AS SELECT * FROM source."{table}" WHERE {every} LIMIT {limit}'
                )
            connection.execute("DETACH source")
            connection.execute("VACUUM")
            connection.close()
            found.append(Seed(small.read_bytes()))
    return found


# --- records, folders of cells, projections -----------------------------------------------------------------------


@functools.cache
def record_seeds():
    """Records of a training cell, of an older schema, of a benchmark with tables, and a failed one."""
    from records import make_record

    paths = [
        *sorted(CELLS.glob("*/record.json"))[:1],
        *sorted((DATA / "h200_x2" / "scaling").glob("*/record.json"))[:1],
    ]
    paths += sorted((DATA / "h200_x2" / "eager_a").glob("*/record.json"))[:1]
    made = json.dumps(dataclasses.asdict(make_record(state="failed"))).encode()
    return [Seed(made), *(Seed(path.read_bytes()) for path in paths)]


def read_record(seed, folder, number):
    """Read one record.json as every command does."""
    from benchmarks.record import RecordError
    from benchmarks.record.files import read

    path = folder / "record.json"
    path.write_bytes(seed.data)
    try:
        return json.loads(json.dumps(dataclasses.asdict(read(path))))
    except RecordError as error:
        raise Refusal(str(error)) from None


def project_record(seed, folder, number):
    """Read a record and make what MLflow gets of it, and its rows in the notes of a sweep."""
    from benchmarks.record import RecordError
    from benchmarks.record.files import read
    from launch.study.identity import sweep_of
    from launch.tracking.note import summary_markdown
    from launch.tracking.projection import project
    from launch.tracking.sync import DAMAGED

    path = folder / "record.json"
    path.write_bytes(seed.data)
    try:
        record = read(path)
    except RecordError as error:
        raise Refusal(str(error)) from None
    try:
        made = project(record)
        sweep_of([record])
        summary_markdown([record])
    except DAMAGED as error:
        raise Refusal(str(error)) from None
    for name, _value, time, step in made.metrics:
        if not all(-(2**63) <= one < 2**63 for one in (time, step)):
            raise Wrong(f"{name}: a time or a step that no store can take: {time}, {step}")
    for one in (*made.params.values(), *made.tags.values(), made.name):
        one.encode()
    return None


CELLS_READ = ("resnet50-cpu_staged-gpus0-1-06d827de8c", "resnet50-kvstore_dist_sync-gpus0-1-7259ec65eb",
              "jacobi-gpus0-1-6bc17f8463", "p2p-gpus0-1-1eaf0b71f4")  # fmt: skip


@functools.cache
def _cell_files(name):
    """The files of a study with one cell whose launcher died: {path in the study's folder: bytes}; and the cell."""
    from conf.cell import Cell
    from launch.study.identity import ProcessIdentity

    record = json.loads((CELLS / name / "record.json").read_text())
    cell = Cell.from_dict(record["cell"])
    attempt = {
        name: record[name] for name in ("record_id", "started_at", "study", "sweep_id", "overrides", "environment")
    }
    found = {"cell.json": json.dumps(cell.to_dict()).encode(), "attempt.json": json.dumps(attempt).encode()}
    found["failures.json"] = b'{"1": -9}\n'
    found |= {f"ranks/{path.name}": path.read_bytes() for path in (CELLS / name).glob("ranks/*")}
    samples = next((DATA / "h200_x2" / "eager_a").glob("*gpus0-1*/gpus.jsonl.gz")).parent
    for kind in ("gpus.jsonl", "cpu.jsonl"):
        lines = gzip.decompress((samples / f"{kind}.gz").read_bytes()).splitlines(keepends=True)
        found[kind] = b"".join(lines[:8])
    dead = dataclasses.asdict(dataclasses.replace(ProcessIdentity.own(), boot_id="an earlier boot"))
    begin = {
        "kind": "begin",
        "time": record["started_at"],
        "process": dead,
        "cell": cell.folder,
        "token": record["record_id"],
    }
    lines = [
        {"kind": "sweep", "time": 1.0, "process": dead},
        begin | {"token": "0" * 32},
        begin | {"kind": "end", "token": "0" * 32},
    ]
    journal = b"".join(json.dumps(one).encode() + b"\n" for one in [*lines, begin])
    return {f"{cell.folder}/{name}": data for name, data in found.items()} | {"journal.jsonl": journal}, cell


def cell_seeds():
    """Every file of such studies; `name` is that of the cell and the path in its study."""
    return [Seed(data, f"{name}:{path}") for name in CELLS_READ for path, data in _cell_files(name)[0].items()]


def recover_cell(seed, folder, number):
    """Start a launcher on a study with one damaged file: close the attempt, judge it, look whether it is finished."""
    from analysis.validity.gpu_samples import summary
    from benchmarks.record import CellFolder, RecordError
    from benchmarks.record.files import read
    from launch.engines import processes
    from launch.study import study as studies
    from launch.study.study import StudyFolder

    chosen, _, damaged = seed.name.partition(":")
    whole, cell = _cell_files(chosen)
    study = folder / "study"
    for name, data in whole.items():
        path = study / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(seed.data if name == damaged else data)
    processes.end = lambda token, grace_s: []  # looking through every process takes longer than all the rest
    study_folder = StudyFolder(str(folder), "study")
    study_folder.recover()
    study_folder.finished(cell)
    own = CellFolder(study / cell.folder)
    with contextlib.suppress(*studies.DAMAGED):
        summary(own)
    try:
        record = read(own.record)
    except RecordError as error:
        raise Refusal(str(error)) from None
    return {name: getattr(record, name) for name in ("metrics", "within_run", "series", "tables", "model", "ranks")}


def floor_seeds():
    """A noise floor with two studies."""
    rows = []
    from analysis.findings.next_run.floors import FloorGroup

    values = {"str": "x", "int": 2, "float": 1.0, "bool": False}
    group = {
        name: values[kind if isinstance(kind, str) else kind.__name__]
        for name, kind in FloorGroup.__annotations__.items()
    }
    for number in range(6):
        rows.append(
            {**group, "metric": f"m{number % 3}", "runs": 4 + number, "freedom": 2 + number, "squares": 0.001 * number}
        )
    whole = {"version": 1, "studies": {"study": rows, "other": rows[:3]}}
    return [Seed(json.dumps(whole, indent=1).encode()), Seed(json.dumps(whole).encode())]


def read_floor(seed, folder, number):
    """Read noise_floor.json as the end of a sweep, and as a report of a study beside it does."""
    from analysis.findings.next_run.floor_file import as_json, floors_of, of_other_studies
    from analysis.findings.next_run.floors import NoiseFloors

    (folder / "noise_floor.json").write_bytes(seed.data)
    shown = of_other_studies(folder / "study")
    floors = NoiseFloors(shown)
    for group, metric in shown:
        floors.of(group, metric)
    try:
        found = floors_of(folder / "noise_floor.json")
    except (OSError, ValueError) as error:
        raise Refusal(str(error)) from None
    return json.loads(json.dumps(as_json(found), allow_nan=False))


@functools.cache
def _report_files():
    """A study of four real cells: {path: record}."""
    source = DATA / "h200_x2" / "eager_a"
    return {f"{path.parent.name}/record.json": path.read_bytes() for path in sorted(source.glob("*/record.json"))[:4]}


def report_seeds():
    """Its records."""
    return [Seed(data, name) for name, data in _report_files().items()]


def read_report(seed, folder, number):
    """Write the whole report of a study with one damaged record, and check it against its raw samples."""
    study = folder / "study"
    for name, data in _report_files().items():
        (study / name).parent.mkdir(parents=True)
        (study / name).write_bytes(seed.data if name == seed.name else data)
    ran("report", str(study), "--json")
    with contextlib.suppress(Refusal):
        ran("verify", str(study), "--json")


# --- YAML ---------------------------------------------------------------------------------------------------------


def yaml_seeds():
    """Studies, strategies and benchmarks as users write them."""
    conf = HERE.parent / "conf"
    found = [Seed(path.read_bytes(), "experiment") for path in sorted((conf / "experiment").glob("*.yaml"))]
    for group in ("strategy", "benchmark", "model"):
        found += [Seed(path.read_bytes(), group) for path in sorted((conf / group).glob("*.yaml"))[:6]]
    return found


@functools.cache
def _composed():
    """The configuration without a study, as Hydra composes it."""
    from hydra import compose, initialize_config_dir

    from conf import schema

    schema.register()
    with initialize_config_dir(str(HERE.parent / "conf"), version_base="1.3"):
        return pickle.dumps(compose("config"))


def read_yaml(seed, folder, number):
    """Read a YAML of --config-dir with the functions that launch.py calls; each 500th file with launch.py itself."""
    import yaml
    from hydra.errors import HydraException
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    from benchmarks.record.visible import one_line
    from conf import groups
    from conf.hydra_errors import explain
    from conf.resolve import checked

    path = folder / seed.name / "fuzzed.yaml"
    path.parent.mkdir()
    path.write_bytes(seed.data)
    if number % 500 == 7:
        return _launched(seed.name, folder)
    base = pickle.loads(_composed())
    groups._read.cache_clear()
    try:
        groups.search_also([folder])
        if seed.name in ("strategy", "benchmark"):
            text = seed.data.replace(b"name: ", b"name: fuzzed #", 1)
            path.write_bytes(text)
            choice = groups.choice(seed.name, "fuzzed")
            groups.options(seed.name, {"name": "fuzzed", **choice.options, **choice.rules})
            choice.declared()
            return None
        loaded = OmegaConf.load(path)
        if not OmegaConf.is_dict(loaded):
            raise Refusal("Hydra refuses what is no mapping")
        with open_dict(loaded):
            for name in ("defaults", "hydra"):
                loaded.pop(name, None)
        merged = OmegaConf.merge(base, loaded if seed.name == "experiment" else {"model": loaded})
        checked(OmegaConf.to_object(merged))
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        said = one_line(explain(error, []))
        if "\n" in said:
            raise Wrong(f"several lines: {said!r:.300}") from None
        raise Refusal(said) from None
    finally:
        groups.search_also([])
    return None


def _launched(group, folder):
    """Run launch.py with the file, dry, in this process. Raises Refusal for status 2."""
    import runpy

    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    plus = "+" if group == "experiment" else ""
    before, out, err = sys.argv, io.StringIO(), io.StringIO()
    sys.argv = [
        "launch.py", f"--config-dir={folder}", f"{plus}{group}=fuzzed", "dry_run=true", f"output_dir={folder}/out", "device=cpu",
        "hydra.mode=MULTIRUN",
    ]  # fmt: skip
    status = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(str(HERE.parent / "launch.py"), run_name="__main__")
    except SystemExit as ended:
        status = ended.code
    finally:
        sys.argv = before
    said = err.getvalue()
    if status not in (0, 2) or (status == 2 and said.count("\n") != 1):
        raise Wrong(f"launch.py: status {status}, {said[-500:]!r}")
    if status:
        raise Refusal(said)
    return None


TEXT = mutations.ANY
WITH_JSON = (*mutations.ANY, *mutations.JSON)
LINES_TOO = (mutations.cut, mutations.cut_gzip, mutations.lost_lines)

READERS = (
    Reader("record", record_seeds, read_record, WITH_JSON, removing=(mutations.cut, mutations.lost_entry)),
    Reader("cell", cell_seeds, recover_cell, WITH_JSON, removing=(mutations.cut, mutations.lost_lines),
           follows=("/ranks/.*/done",), needs=("filelock", "psutil")),
    Reader("projection", record_seeds, project_record, (*mutations.JSON, mutations.wrong_number), needs=("psutil", "filelock")),
    Reader("nccl-log", nccl_logs, through_command("nccl-log"), TEXT, removing=LINES_TOO,
           # how many said something, and whether a line proves that a subsystem was logged
           follows=("/processes", "/announced_by/.*", "/env_logged", "/channels_from")),
    Reader("nccl-tests-json", nccl_tests_documents, through_command("nccl-tests"), WITH_JSON),
    Reader("nccl-tests-text", nccl_tests_texts, through_command("nccl-tests"), TEXT,
           # Whoever takes the end of one table and the head of the next leaves one whole table; a note says what does not fit.
           removing=(mutations.cut, mutations.cut_gzip, mutations.lost_line)),
    Reader(
        "p2p-text", files("p2p_a100_pcie_x4.txt", "p2p_h200_x2.txt", "p2p_dgx_a100_row0.txt"),
        through_command("p2p", drawn=True), TEXT,
        # Whoever takes the end of one matrix and the head of the next leaves one whole matrix: nobody can see that.
        removing=(mutations.cut, mutations.cut_gzip, mutations.lost_line),
    ),
    Reader("p2p-record", p2p_records, through_command("p2p", drawn=True), WITH_JSON),
    Reader(
        "topo-text", files("topo_a100_pcie_x4.txt", "topo_dgx1_v100.txt", "topo_h200_x4.txt"),
        through_command("topology", drawn=True), TEXT, removing=LINES_TOO,
    ),
    Reader("topo-xml", topology_xmls, through_command("topology", drawn=True),
           (*TEXT, *(mutations.xml_part,) * 6, mutations.deep)),
    Reader("nsys", _nsys_seeds, through_command("trace", ".sqlite"),
           (mutations.flip, mutations.replaced_bytes, mutations.splice, *(mutations.sql,) * 5, mutations.packed),
           needs=("numpy",)),
    Reader("kineto", kineto_traces, through_command("trace", ".json"), WITH_JSON, needs=("numpy",)),
    Reader("yaml", yaml_seeds, read_yaml, (*TEXT, *(mutations.yaml_part,) * 8, mutations.deep), removing=(),
           needs=("hydra", "yaml")),
    Reader("noise-floor", floor_seeds, read_floor, WITH_JSON),
    Reader("report", report_seeds, read_report, mutations.JSON, removing=(), share=0.005, least=2,
           needs=("matplotlib", "jinja2")),
)  # fmt: skip
BY_NAME = {reader.name: reader for reader in READERS}
