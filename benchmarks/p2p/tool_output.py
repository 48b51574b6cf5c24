"""The output of `benchmark=p2p`: matrices for people, or in the layout of p2pBandwidthLatencyTest for scripts."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.timing.statistics import spread

TITLES = {"unidirectional": "Unidirectional", "bidirectional": "Bidirectional"}
PATTERNS = {
    "matching": ("round", "disjoint pairs at once, both ways"),
    "one_to_all": ("from", "one to all others at once"),
    "all_to_one": ("to", "all others to one at once"),
}


def output_lines(tables: Mapping[str, Any], late: int, form: str) -> list[str]:
    """Return what a cell prints; `form` is none or cuda-samples, `late` counts measurements that began too early."""
    table = tables["p2p"]
    found = cuda_samples(table) if form == "cuda-samples" else _plain(table)
    if len(table["devices"]) == 1:
        found.append("One member alone: only the diagonal, copies within it.")
    if late:
        found.append(f"{late} measurements began before their last copy was enqueued.")
    if concurrent := tables.get("p2p_concurrent"):
        found += _concurrent(concurrent)
    return found


def _plain(table: Mapping[str, Any]) -> list[str]:
    words = table["words"]
    found = [f"{table['bytes']} bytes a copy, {table['latency_bytes']} for latency, copy={table['copy']}"]
    found += [f"P2P {state}: {words[state]}" for state in ("enabled", "disabled")]
    ids = [device["id"] for device in table["devices"]]
    for name, matrix in table["matrices"].items():
        squares = table["samples"][name]
        what = f"{name.replace('_', ' ')}, {'µs' if name.startswith('latency') else 'GB/s'}"
        if len(squares) > 1:
            what += f" (median of {len(squares)}, entries vary by up to {100 * _variation(squares):.1f} %)"
        found += ["", what, *_rows("", ids, matrix, 9)]
    return found


def _variation(squares: Sequence[Sequence[Sequence[float]]]) -> float:
    places = range(len(squares[0]))
    return max(spread([square[a][b] for square in squares]) for a in places for b in places)


def _rows(head: str, ids: Sequence[int], matrix: Sequence[Sequence[float]], width: int) -> list[str]:
    found = [f"{head:>6s}" + "".join(f"{one:>{width}d}" for one in ids)]
    for one, row in zip(ids, matrix, strict=True):
        found.append(f"{one:>6d}" + "".join(f"{value:>{width}.2f}" for value in row))
    return found


def cuda_samples(table: Mapping[str, Any]) -> list[str]:
    """Return the layout of p2pBandwidthLatencyTest, with the subset's own GPU ids."""
    ids = [device["id"] for device in table["devices"]]
    found = ["[P2P (Peer-to-Peer) GPU Bandwidth Latency Test]"]
    for device in table["devices"]:
        if device["bus_id"]:
            domain, bus, number = (int(part, 16) for part in device["bus_id"].split(":"))
            place = f"pciBusID: {bus:x}, pciDeviceID: {number:x}, pciDomainID:{domain:x}"
            found.append(f"Device: {device['id']}, {device['name']}, {place}")
        else:
            found.append(f"CPU worker {device['id']}")
    if not table["devices"][0]["bus_id"]:
        found += [f"P2P={state.capitalize()} here: {words}" for state, words in table["words"].items()]

    def can(a: int, b: int) -> bool:
        return a == b or bool(table["access"][f"{min(a, b)}-{max(a, b)}"])

    for a in ids:
        found += [f"Device={a} {'CAN' if can(a, b) else 'CANNOT'} Access Peer Device={b}" for b in ids if a != b]
    found += [
        "",
        "***NOTE: In case a device doesn't have P2P access to other one, it falls back to normal memcopy procedure.",
        "So you can see lesser Bandwidth (GB/s) and unstable Latency (us) in those cases.",
        "",
        "P2P Connectivity Matrix",
        "     D\\D" + "".join(f"{one:6d}" for one in ids),
    ]
    found += [f"{a:6d}\t" + "".join(f"{int(can(a, b)):6d}" for b in ids) for a in ids]
    titled: set[str] = set()
    for name, matrix in table["matrices"].items():
        title, head = _title(name)
        found += [title] if title not in titled else [""]
        titled.add(title)
        found.append(f"   {head}" + "".join(f"{one:6d} " for one in ids))
        found += [
            f"{one:6d} " + "".join(f"{value:6.2f} " for value in row) for one, row in zip(ids, matrix, strict=True)
        ]
    return found


def _title(name: str) -> tuple[str, str]:
    """Return (title, head of the columns) of a matrix; matrices of GPU and CPU latency share a title."""
    reads = name.endswith("_reads")
    state = "Enabled" if "_enabled" in name else "Disabled"
    how = f" (P2P {'Reads' if reads else 'Writes'})" if state == "Enabled" else ""
    if name.startswith("latency"):
        return f"P2P={state} Latency{how} Matrix (us)", "CPU" if "_cpu_" in name else "GPU"
    kind = name.partition("_")[0]
    if kind == "bidirectional":
        how = ""
    return f"{TITLES[kind]} P2P={state} Bandwidth{how} Matrix (GB/s)", "D\\D"


def _concurrent(table: Mapping[str, Any]) -> list[str]:
    """Return a line for each pattern: the total, and each copy's rate at once and alone."""
    found = []
    for name, (what, title) in PATTERNS.items():
        rows = [row for row in table["rows"] if row["pattern"] == name]
        if rows:
            found += ["", f"{title}, {rows[0]['bytes']} bytes, P2P {table['p2p']}: GB/s at once (alone)"]
        for row in rows:
            copies = "  ".join(
                f"{copy['from']}->{copy['to']} {copy['gb_per_s']:.1f} ({copy['alone_gb_per_s']:.1f})"
                for copy in row["copies"]
            )
            found.append(f"  {what} {row['number']}: total {row['total_gb_per_s']:.1f}  {copies}")
    return found
