"""Traces of Nsight Systems for tests: the two real captures, and small exports with known times."""

import sqlite3
from contextlib import closing
from pathlib import Path

MS = 1_000_000
KERNEL_COLUMNS = (
    "start, end, deviceId, streamId, correlationId, globalPid, demangledName, shortName"
)
NVL, LOC = (
    Path(__file__).parent / "data" / f"nsys_h200_x2_p2p_level_{level}.sqlite.gz"
    for level in ("NVL", "LOC")
)
STEPS = Path(__file__).parent / "data" / "nsys_h200_x2.sqlite.gz"
GLOO = Path(__file__).parent / "data" / "kineto_gloo_x2"  # two ranks on the host, by torch.profiler


def process(pid):
    return (1 << 48) | (pid << 24)


def make_export(path, kernels, copies=(), ranges=(), calls=(), sets=(), gpus=(), cuda=(), extra=()):
    """An export of schema 3 with these rows; times in ms. A kernel: (pid, device, stream, start, end, name, correlation)."""
    strings = {}

    def number(text):
        return strings.setdefault(text, len(strings) + 1)

    with closing(sqlite3.connect(path)) as made:
        made.execute("CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT)")
        made.execute("INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_PRODUCT_VERSION', '2025.3.2')")
        made.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({KERNEL_COLUMNS})")
        for pid, device, stream, start, end, name, correlation in kernels:
            row = (
                start * MS,
                end * MS,
                device,
                stream,
                correlation,
                process(pid),
                number(name),
                number(name),
            )
            made.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row
            )
        made.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start, end, deviceId, streamId, correlationId, globalPid, bytes, "
            "copyKind, srcDeviceId, dstDeviceId)"
        )
        for pid, device, stream, start, end, kind, size in copies:
            row = (start * MS, end * MS, device, stream, 0, process(pid), size, kind, None, None)
            made.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row
            )
        made.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start, end, deviceId, streamId, globalPid)"
        )
        for pid, device, stream, start, end in sets:
            row = (start * MS, end * MS, device, stream, process(pid))
            made.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET VALUES (?, ?, ?, ?, ?)", row)
        if ranges:
            made.execute(
                "CREATE TABLE NVTX_EVENTS (start, end, eventType, text TEXT, textId, globalTid)"
            )
        for at, (pid, start, end, name) in enumerate(ranges):
            text, text_id = (
                (name, None) if at % 2 else (None, number(name))
            )  # both ways in which nsys stores it
            row = (start * MS, end * MS, 59, text, text_id, process(pid) | pid)
            made.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)", row)
        if calls:
            made.execute(
                "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId, nameId)"
            )
        for pid, start, correlation in calls:
            row = (
                start * MS,
                start * MS + 1000,
                process(pid) | pid,
                correlation,
                number("cudaLaunchKernel_v7000"),
            )
            made.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", row)
        if gpus:
            made.execute("CREATE TABLE TARGET_INFO_GPU (id, name, busLocation)")
            made.executemany("INSERT INTO TARGET_INFO_GPU VALUES (?, ?, ?)", gpus)
            made.execute("CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId, cudaId, pid)")
            made.executemany("INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (?, ?, ?)", cuda)
        for statement in extra:
            made.execute(statement)
        made.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        made.executemany(
            "INSERT INTO StringIds VALUES (?, ?)", [(at, text) for text, at in strings.items()]
        )
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
        (10, 0, 7, 0, 10, GEMM, 1),
        (10, 0, 7, 14, 20, GEMM, 2),
        (10, 0, 17, 8, 16, REDUCE, 3),
        (11, 1, 7, 2, 12, GEMM, 1),
        (11, 1, 17, 12, 16, REDUCE, 2),
    ]
    return make_export(path, kernels, **more)
