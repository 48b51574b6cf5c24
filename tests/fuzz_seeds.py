"""Whole files for the fuzzing (tests/fuzz.py): real captures, cut down to a few kB, and what stands beside them in a study."""

import dataclasses
import functools
import gzip
import json
import sqlite3
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
DATA = HERE / "data"
CELLS = DATA / "raw_lines" / "h200_x2"


@dataclass(frozen=True)
class Seed:
    """A whole file, and which of a folder's it is."""

    data: bytes
    name: str = ""


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
    return [
        Seed(b"".join(text[:60])),
        *files("nccl_tests_h200_x2_graph.txt", "nccl_tests_sharp_cluster.txt")(),
    ]


def nccl_tests_documents():
    """Documents of `-J`, written from the rows of a capture: every form of the file that the reader knows."""
    from analysis.native.nccl_tests import parse_nccl_tests

    run = parse_nccl_tests((DATA / "nccl_tests_h200_x2_graph.txt").read_text())[0]

    def figures(one):
        return {
            "time": one.time_us,
            "alg_bw": one.algbw,
            "bus_bw": one.busbw,
            "nwrong": one.wrong or 0,
        }

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
    return [
        Seed(json.dumps(whole).encode()),
        Seed(json.dumps({**whole, "results": rows[:3]}, indent=1).encode() * 2),
    ]


def p2p_records():
    """Records of benchmark=p2p."""
    names = ("p2p-gpus0-1-d8d7030d8f", "p2p-gpus0-1-9781131b4b")
    return [
        Seed((DATA / "h200_x2" / "links" / name / "record.json").read_bytes()) for name in names
    ]


def collectives_records():
    """Records of benchmark=collectives, of one collective with both placements and of one out of place alone."""
    names = ("collectives-gpus0-1-07a8cfe4cc", "collectives-gpus0-1-7841729728")
    return [
        Seed((DATA / "h200_x4" / "links" / name / "record.json").read_bytes()) for name in names
    ]


def topology_xmls():
    """The dump of four H200s, and one with several CPUs, switches and NICs."""
    gpu = (
        '<pci busid="0000:{a}:00.0" link_speed="16.0 GT/s PCIe" link_width="16"><pci busid="0000:{b}:00.0" link_speed="8 GT/s" '
        'link_width="16"><gpu dev="{n}" sm="70"><nvlink target="0000:{peer}:00.0" count="2" tclass="0x030200"/></gpu></pci>'
        '<pci busid="0000:{c}:00.0"><nic><net name="mlx5_{n}" dev="{n}"/></nic></pci></pci>'
    )
    inside = [gpu.format(n=n, a=f"a{n}", b=f"b{n}", c=f"c{n}", peer=f"b{n ^ 1}") for n in range(4)]
    two = "".join(
        f'<cpu numaid="{n}" affinity="0000000f,ffffffff">{"".join(inside[2 * n : 2 * n + 2])}</cpu>\n'
        for n in (0, 1)
    )
    return [
        *files("nccl_topo_h200_x4.xml")(),
        Seed(f'<system version="1">\n{two}</system>\n'.encode()),
    ]


def kineto_traces():
    """Traces of a rank on a GPU and of one on the host, of some 60 events, of every category."""
    found = []
    for name in ("kineto_h200_x2/rank0.json.gz", "kineto_gloo_x2/rank1.json.gz"):
        whole = json.loads(gzip.decompress((DATA / name).read_bytes()))
        events = [one for one in whole["traceEvents"] if one.get("ph") == "X"]
        by_kind = {}
        for one in events:
            by_kind.setdefault(
                (one.get("cat"), "nccl" in one["name"] or "gloo" in one["name"]), []
            ).append(one)
        kept = [one for same in by_kind.values() for one in same[:8]]
        found.append(Seed(json.dumps({**whole, "traceEvents": kept}, indent=0).encode()))
    return found


@functools.cache
def nsys_exports():
    """Exports of two ranks with the first rows of every table, in pages of 512 bytes."""
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
            tables = connection.execute(
                "SELECT name FROM source.sqlite_master WHERE type = 'table'"
            ).fetchall()
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


@functools.cache
def record_seeds():
    """Records of a training cell, of a migrated one, of a benchmark with tables, a failed one, and one of two hosts."""
    from records import make_record, on_hosts

    paths = [
        *sorted(CELLS.glob("*/record.json"))[:1],
        *sorted((DATA / "h200_x2" / "scaling").glob("*/record.json"))[:1],
    ]
    paths += sorted((DATA / "h200_x2" / "eager_a").glob("*/record.json"))[:1]
    made = json.dumps(dataclasses.asdict(make_record(state="failed"))).encode()
    served = {"strategy": {"name": "kvstore_dist_sync", "servers": 1}, "server_hosts": ["b"]}
    hosts = json.dumps(on_hosts(1, ("a", "b"), [0, 1], 9000.0, cell=served)).encode()
    return [Seed(made), Seed(hosts), *(Seed(path.read_bytes()) for path in paths)]


CELLS_READ = ("resnet50-cpu_staged-gpus0-1-06d827de8c", "resnet50-kvstore_dist_sync-gpus0-1-7259ec65eb",
              "jacobi-gpus0-1-6bc17f8463", "p2p-gpus0-1-1eaf0b71f4")  # fmt: skip


@functools.cache
def cell_files(name):
    """The files of a study with one cell whose launcher died: {path in the study's folder: bytes}; and the cell."""
    from conf.cell import Cell
    from launch.study.identity import ProcessIdentity

    record = json.loads((CELLS / name / "record.json").read_text())
    cell = Cell.from_dict(record["cell"])
    attempt = {
        name: record[name]
        for name in ("record_id", "started_at", "study", "sweep_id", "overrides", "environment")
    }
    found = {
        "cell.json": json.dumps(cell.to_dict()).encode(),
        "attempt.json": json.dumps(attempt).encode(),
    }
    found["failures.json"] = b'{"1": -9}\n'
    found |= {f"ranks/{path.name}": path.read_bytes() for path in (CELLS / name).glob("ranks/*")}
    samples = next((DATA / "h200_x2" / "eager_a").glob("*gpus0-1*/gpus.jsonl.gz")).parent
    for kind in ("gpus.jsonl", "cpu.jsonl"):
        lines = gzip.decompress((samples / f"{kind}.gz").read_bytes()).splitlines(keepends=True)
        found[kind] = found[kind.replace(".", "-1.")] = b"".join(lines[:8])  # of a second host too
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
    return {f"{cell.folder}/{name}": data for name, data in found.items()} | {
        "journal.jsonl": journal
    }, cell


def cell_seeds():
    """Every file of such studies; `name` is that of the cell and the path in its study."""
    return [
        Seed(data, f"{name}:{path}")
        for name in CELLS_READ
        for path, data in cell_files(name)[0].items()
    ]


def host_seeds():
    """Two hosts that describe themselves, one of them with GPUs."""
    from described import WITH_GPUS, described

    return [Seed(json.dumps(described(**changes)).encode()) for changes in ({}, WITH_GPUS)]


def floor_seeds():
    """A noise floor with two studies."""
    rows = []
    from analysis.study.noise_floor import FloorGroup

    values = {"str": "x", "int": 2, "float": 1.0, "bool": False}
    group = {
        name: values[kind if isinstance(kind, str) else kind.__name__]
        for name, kind in FloorGroup.__annotations__.items()
    }
    for number in range(6):
        rows.append(
            {
                **group,
                "metric": f"m{number % 3}",
                "runs": 4 + number,
                "freedom": 2 + number,
                "squares": 0.001 * number,
            }
        )
    whole = {"version": 1, "studies": {"study": rows, "other": rows[:3]}}
    return [Seed(json.dumps(whole, indent=1).encode()), Seed(json.dumps(whole).encode())]


@functools.cache
def raw_files():
    """A cell with its record and its packed raw files, whose SHA-256 the record has: {path: content}."""
    folder = next((DATA / "h200_x2" / "eager_a").glob("resnet50-kvstore_device-gpus1-*"))
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def raw_seeds():
    """Its files."""
    return [Seed(data, name) for name, data in raw_files().items()]


@functools.cache
def bundle_seeds():
    """The archive of a bundle with one cell."""
    from analysis.bundle.archive import pack
    from analysis.bundle.stage import SUMS, sums

    with tempfile.TemporaryDirectory() as folder:
        root, file = Path(folder) / "study.bundle", Path(folder) / "zip"
        for name, data in raw_files().items():
            path = root / "study" / "cell" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        (root / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sums(root)))
        pack(root, file)
        return [Seed(file.read_bytes())]


@functools.cache
def report_files():
    """A study of four real cells: {path: record}."""
    source = DATA / "h200_x2" / "eager_a"
    return {
        f"{path.parent.name}/record.json": path.read_bytes()
        for path in sorted(source.glob("*/record.json"))[:4]
    }


def report_seeds():
    """Its records."""
    return [Seed(data, name) for name, data in report_files().items()]


def yaml_seeds():
    """Studies, strategies and benchmarks as users write them."""
    conf = HERE.parent / "conf"
    found = [
        Seed(path.read_bytes(), "experiment")
        for path in sorted((conf / "experiment").glob("*.yaml"))
    ]
    for group in ("strategy", "benchmark", "model"):
        found += [
            Seed(path.read_bytes(), group) for path in sorted((conf / group).glob("*.yaml"))[:6]
        ]
    return found
