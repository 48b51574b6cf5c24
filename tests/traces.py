"""Traces of Nsight Systems for tests: the two real captures, and small exports with known times."""

import sqlite3
from contextlib import closing
from pathlib import Path

MS = 1_000_000
TABLES = {
    "META_DATA_EXPORT": "name TEXT, value TEXT",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start, end, deviceId, streamId, correlationId, globalPid, demangledName",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start, end, deviceId, streamId, globalPid, copyKind, bytes",
    "CUPTI_ACTIVITY_KIND_MEMSET": "start, end, deviceId, streamId, globalPid",
    "NVTX_EVENTS": "start, end, eventType, text TEXT, textId, globalTid",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, globalTid, correlationId, nameId",
    "TARGET_INFO_GPU": "id, name, busLocation",
    "TARGET_INFO_CUDA_DEVICE": "gpuId, cudaId, pid",
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT",
}
NVL, LOC = (
    Path(__file__).parent / "data" / f"nsys_h200_x2_p2p_level_{level}.sqlite.gz"
    for level in ("NVL", "LOC")
)
STEPS = Path(__file__).parent / "data" / "nsys_h200_x2.sqlite.gz"
GLOO = Path(__file__).parent / "data" / "kineto_gloo_x2"  # two ranks on the host, by torch.profiler


def process(pid):
    return (1 << 48) | (pid << 24)


def make_export(path, kernels, copies=(), ranges=(), calls=(), gpus=(), cuda=(), extra=()):
    """An export of schema 3 with these rows; times in ms.

    A kernel: (pid, device, stream, start, end, name, correlation).
    """
    strings = {}

    def number(text):
        return strings.setdefault(text, len(strings) + 1)

    rows = {table: [] for table in TABLES}
    rows["META_DATA_EXPORT"] = [("EXPORT_PRODUCT_VERSION", "2025.3.2")]
    for pid, device, stream, start, end, name, correlation in kernels:
        row = (start * MS, end * MS, device, stream, correlation, process(pid), number(name))
        rows["CUPTI_ACTIVITY_KIND_KERNEL"].append(row)
    for pid, device, stream, start, end, kind, size in copies:
        row = (start * MS, end * MS, device, stream, process(pid), kind, size)
        rows["CUPTI_ACTIVITY_KIND_MEMCPY"].append(row)
    for at, (pid, start, end, name) in enumerate(ranges):
        # Both ways in which nsys stores it.
        text, text_id = (name, None) if at % 2 else (None, number(name))
        row = (start * MS, end * MS, 59, text, text_id, process(pid) | pid)
        rows["NVTX_EVENTS"].append(row)
    for pid, start, correlation in calls:
        name = number("cudaLaunchKernel_v7000")
        row = (start * MS, start * MS + 1000, process(pid) | pid, correlation, name)
        rows["CUPTI_ACTIVITY_KIND_RUNTIME"].append(row)
    rows |= {"TARGET_INFO_GPU": gpus, "TARGET_INFO_CUDA_DEVICE": cuda}
    rows["StringIds"] = [(at, text) for text, at in strings.items()]
    with closing(sqlite3.connect(path)) as made:
        for table, columns in TABLES.items():
            if rows[table] or (
                table.startswith("CUPTI_ACTIVITY_KIND_") and table[-7:] != "RUNTIME"
            ):
                made.execute(f"CREATE TABLE {table} ({columns})")
                marks = ", ".join("?" * (columns.count(",") + 1))
                made.executemany(f"INSERT INTO {table} VALUES ({marks})", rows[table])
        for statement in extra:
            made.execute(statement)
        made.commit()
    return path


REDUCE, GATHER, GEMM = (
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)",
    "ncclDevKernel_AllGather_RING_LL(x)",
    "gemm(int)",
)


def two_ranks(path, **more):
    """Rank 0 computes 0-10 and 14-20 and reduces 8-16; rank 1 computes 2-12, reduces 12-16; times in ms."""
    kernels = [
        (10, 0, 7, 0, 10, GEMM, 1), (10, 0, 7, 14, 20, GEMM, 2), (10, 0, 17, 8, 16, REDUCE, 3),
        (11, 1, 7, 2, 12, GEMM, 1), (11, 1, 17, 12, 16, REDUCE, 2),
    ]  # fmt: skip
    return make_export(path, kernels, **more)
