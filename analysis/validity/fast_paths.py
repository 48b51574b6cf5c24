"""Did each fast path that was asked for engage? Yes, no or unknown, with the line that proves it.

FAST_PATHS lists them. What ranks saw in one update (benchmarks.path_facts) and what NCCL's log says
proves it. What another check judges already is not judged again: its answer is that of the check.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from analysis.validity.check import Judgement, check
from benchmarks.record import Record
from conf.cell import Cell
from conf.schema import ValidityLimits

YES, NO, UNKNOWN = "yes", "no", "unknown"
ANSWERS = (NO, UNKNOWN, YES)  # the worst first
WORDS = {True: YES, False: NO, None: UNKNOWN}
CODE = "path_not_engaged"
HALF = {"fp16": "float16", "bf16": "bfloat16"}
MOSTLY = 0.9  # share of bytes
REPEATED = 1.5  # gradients reduced in one update, from which on accumulation saved nothing
# Where nothing was compiled.
DEFAULTS = dict[str, Any](compiled=False, graphs=0, graphs_skipped=0, replays=0, comm_hook="")
Facts = Mapping[str, Any]  # of a rank, with DEFAULTS and the number of `ranks`; or record.effective
Proof = tuple[bool | None, str]


class Answer(NamedTuple):
    """What was asked for, whether it engaged (YES, NO, UNKNOWN), and the line that proves it."""

    path: str
    asked: str
    answer: str
    line: str
    code: str  # of the check that judges it; empty: none does


@dataclass(frozen=True)
class RankPath:
    """A path that ranks see in one update. Without a fact that it needs it is unknown."""

    name: str
    asked_by: str
    asked: Callable[[Facts], object]
    engaged: Callable[[Facts], bool | None]
    evidence: str  # the line that proves it, with names of facts
    code: str = CODE  # of the check that judges it in a cell of our own; empty: none does

    def answers(self, ranks: Iterable[Facts], in_script: bool) -> list[Answer]:
        """Return the answer of the worst rank; none where no rank was asked."""
        code = CODE if self.code and in_script else self.code
        rows: dict[str, Answer] = {}
        for facts in ranks:
            try:
                if not self.asked(facts):
                    continue
                answer, line = WORDS[self.engaged(facts)], self.evidence.format_map(facts)
            except KeyError as missing:
                answer, line = UNKNOWN, f"{missing.args[0]} was not seen"
            line = f"rank {facts['rank']}: {line}"
            rows.setdefault(answer, Answer(self.name, self.asked_by, answer, line, code))
        return [rows[answer] for answer in ANSWERS if answer in rows][:1]


@dataclass(frozen=True)
class NcclPath:
    """A path that settings of NCCL ask for. Without `proof` the check with `code` judges it."""

    name: str
    asked_by: str  # the settings
    evidence: str
    proof: Callable[[Facts], Proof] | None = None  # of record.effective
    values: tuple[str, ...] = ()  # those that ask for it; none: every value
    code: str = CODE

    def answers(self, settings: Mapping[str, str], effective: Facts) -> list[Answer]:
        """Return an answer for each of NCCL's settings that asks for it."""
        rows = []
        for name in self.asked_by.split(", "):
            value = settings.get(name)
            if value is None:
                continue
            if self.values and not {*self.values} & {*value.upper().split("|")}:
                continue
            if self.proof:
                engaged, line = self.proof(effective)
            else:
                engaged, line = _judged(name, self.code, effective)
            rows.append(Answer(self.name, f"{name}={value}", WORDS[engaged], line, self.code))
        return rows


def _judged(setting: str, code: str, effective: Facts) -> Proof:
    """Return what the checks of NCCL's settings found, and else how the GPUs were joined."""
    proof: Proof = (None, "NCCL's log does not say")
    if "transport" in effective:
        proof = (True, f"{effective['transport']}, {effective.get('channels', 'unknown')} channels")
    for finding in effective.get("findings", ()):
        if finding["setting"] == setting and finding["code"] in (code, "setting_ignored"):
            if finding["severity"] in ("invalid", "suspect"):
                return False, finding["sentence"]
            if finding["code"] == code:
                proof = (None, finding["sentence"])
    return proof


def _chosen(words: str) -> Callable[[Facts], Proof]:
    def look(effective: Facts) -> Proof:
        writes = "tuning_pass=true, for a script profiler=torch, writes them"
        proof: Proof = (None, f"NCCL's log has no TUNING line; {writes}")
        for row in effective.get("choices", ()):
            choice = f"{row['algorithm']} {row['protocol']}"
            line = f"{row['function']} of {row['bytes']} bytes: {choice}"
            if re.search(words, row["algorithm"]):
                return True, line
            proof = (False, line)
        return proof

    return look


def _logged(engaged: str, not_engaged: str, network: bool = True) -> Callable[[Facts], Proof]:
    def look(effective: Facts) -> Proof:
        nccl = effective.get("nccl", {})
        lines, words = nccl.get("paths", []), str(nccl.get("transports"))
        if network and "NET/" not in words:
            return None, "no connection goes through a network"
        for answer, words in ((True, engaged), (False, not_engaged)):
            for line in lines:
                if re.search(words, line):
                    return answer, line
        return None, "NCCL's log does not say"

    return look


def _registered(effective: Facts) -> Proof:
    by_a_transport = "^rank (?!.* failed ).* (register|reuse) "
    engaged, line = _logged(by_a_transport, " failed ", network=False)(effective)
    for asked in ("register comm", "Skipping registration"):
        if engaged is None and asked in effective.get("nccl", {}).get("paths", ()):
            return False, f"{asked} …, and no transport registered a buffer"
    return engaged, line


def nvls_channels(effective: Facts) -> Proof:
    """Return whether NCCL made channels for NVLS."""
    number = effective.get("nccl", {}).get("channels", {}).get("nvls")
    return (None if number is None else number > 0), f"{number} nvls channels"


def _half(facts: Facts) -> str:
    return next((HALF[word] for word in HALF if word in facts["comm_hook"]), "")


def _mostly(amounts: Mapping[str, int], wanted: str, least: float = MOSTLY) -> bool | None:
    if not amounts:
        return None
    return amounts.get(wanted, 0) >= least * sum(amounts.values())


LOG, TUNED = "NCCL's log", "TUNING lines of NCCL's log"
CONNECTED = f"transports in {LOG}"
REGISTERING = ("NCCL_LOCAL_REGISTER", "NCCL_GRAPH_REGISTER", "strategy.memory", "benchmark.memory")
FAST_PATHS: tuple[RankPath | NcclPath, ...] = (
    NcclPath("P2P setting", "NCCL_P2P_LEVEL, NCCL_P2P_DISABLE", CONNECTED,
             code="transport_unexpected"),
    NcclPath("SHM setting", "NCCL_SHM_DISABLE", CONNECTED, code="transport_unexpected"),
    NcclPath("algorithm, protocol", "NCCL_ALGO, NCCL_PROTO", TUNED, code="algorithm_unexpected"),
    NcclPath("channels", "NCCL_MIN_CTAS, NCCL_MAX_CTAS, NCCL_MIN_NCHANNELS, NCCL_MAX_NCHANNELS",
             f"the number of channels in {LOG}", code="channels_unexpected"),
    NcclPath("GDR", "NCCL_NET_GDR_LEVEL", f"“GDR 1” in {LOG}", _logged("GDR 1", "GDR 0"),
             ("PIX", "PXB", "PHB", "SYS", "1", "2", "3", "4", "5")),
    NcclPath("PXN", "NCCL_PXN_DISABLE", f"“PXN 1” in {LOG}", _logged("PXN 1", "PXN 0"), ("0",)),
    NcclPath("CollNet, SHARP", "NCCL_COLLNET_ENABLE", f"“Connected CollNet” in {LOG}",
             _logged("Connected CollNet", "Connected all rings"), ("1",)),
    NcclPath("NVLS", "NCCL_NVLS_ENABLE", f"nvls channels in {LOG}", nvls_channels, ("1",)),
    NcclPath("symmetric kernels", "NCCL_WIN_ENABLE, NCCL_SYM_KERNEL", f"[Symmetric] in {TUNED}",
             _chosen("Symmetric")),
    NcclPath("zero-CTA policy", "NCCL_CTA_POLICY", f"[Copy Engine] or [Hierarchical CE] in {TUNED};"
             " an all-reduce cannot have it", _chosen("Copy Engine|Hierarchical CE"),
             ("2", "ZERO")),
    NcclPath("registered buffers", ", ".join(REGISTERING), f"REG lines of {LOG}", _registered,
             ("1", "REGISTERED")),
    RankPath("DDP buckets", "DistributedDataParallel", lambda f: "bucket_cap_bytes" in f,
             lambda f: f.get("reductions") != 0 and (
             f["buckets"] > 1 or f["total_parameter_size_bytes"] <= 2 * f["bucket_cap_bytes"]),
             "buckets: {buckets}, cap {bucket_cap_bytes} bytes, reductions: {reductions}"),
    RankPath("static graph", "static_graph=True", lambda f: f.get("static_graph"),
             lambda f: bool(f["has_rebuilt_buckets"]),
             "DDP rebuilt its buckets in order of arrival: {has_rebuilt_buckets}"),
    RankPath("bucket views", "gradient_as_bucket_view=True",
             lambda f: f.get("gradient_as_bucket_view") and f["gradients"] > f["buckets"],
             lambda f: f["views"] >= (f["gradients"] - f["buckets"]) / 2,
             "{views} of {gradients} gradients lie in a bucket"),
    RankPath("half-precision hook", "comm_hook", lambda f: _half(f) and f["ranks"] > 1,
             lambda f: _mostly(f["reduced"], _half(f)), "bytes reduced: {reduced}"),
    RankPath("accumulation", "more than one pass per update (accumulate=2)",
             lambda f: f["passes"] > 1 and f["ranks"] > 1,
             lambda f: f["reduced_elements"] < REPEATED * f["elements"],
             "{passes} passes, {reduced_elements} elements reduced, the gradient has {elements}",
             "accumulated_nothing"),
    RankPath("FSDP prefetch", "set_modules_to_forward_prefetch",
             lambda f: f["prefetches"] and f["ranks"] > 1,
             lambda f: f["ahead"] >= f["prefetches"] / 2,
             "{prefetches} modules ask for it, {ahead} gathers had begun before their turn"),
    RankPath("channels_last", "channels_last weights or batches",
             lambda f: "channels_last" in (f["weights"], f.get("layout")),
             lambda f: None if f["layout"] == "either" else f["layout"] == "channels_last",
             "input of the first convolution: {layout}; weights: {weights}"),
    RankPath("TF32", "torch.set_float32_matmul_precision",
             lambda f: f.get("tf32_asked") and "float32" in f.get("products", {"float32": 1}),
             lambda f: f["tf32_used"], "a float32 matmul is rounded as TF32: {tf32_used}",
             code="precision_not_used"),
    RankPath("autocast", "torch.autocast", lambda f: f.get("autocast") and f["products"],
             lambda f: _mostly(f["products"], f["autocast"][0], 0.5),
             "autocast to {autocast}; inputs of convolutions and matmuls: {products}",
             code="precision_not_used"),
    RankPath("torch.compile", "torch.compile", lambda f: f["compiled"], lambda f: f["graphs"] > 0,
             "{graphs} graphs", code="not_compiled"),
    RankPath("whole graph", "torch.compile", lambda f: f["graphs"], lambda f: not f["graph_breaks"],
             "{graph_breaks} graph breaks {first_break}", code=""),  # DDP makes some on purpose
    RankPath("CUDA graph", "capturing a CUDA graph", lambda f: f["captured"] or f["graphs_skipped"],
             lambda f: f["replays"] > 0, "{replays} replays of {captured} graphs",
             "replays_miscounted"),
    RankPath("fused optimizer", "fused=True", lambda f: f["fused"],
             lambda f: f["fused_updates"] > 0, "fused operators in one update: {fused_updates}"),
    RankPath("pinned memory", "pin_memory or non_blocking=True",
             lambda f: f.get("copied") and {*f["copied"]} != {"pageable, waits"},
             lambda f: _mostly(f["copied"], "pinned, free"), "bytes copied: {copied}"),
    RankPath("loader workers", "num_workers", lambda f: f["workers"],
             lambda f: len({*f["working"].split(" of ")}) == 1, "{working} workers are active"),
)  # fmt: skip
# Settings whose effect only lines of one kind show.
NEED_TUNING = {"NCCL_ALGO", "NCCL_PROTO", "NCCL_WIN_ENABLE", "NCCL_SYM_KERNEL", "NCCL_CTA_POLICY",
               *REGISTERING}  # fmt: skip
NEED_LINES = {"NCCL_NET_GDR_LEVEL", "NCCL_PXN_DISABLE", "NCCL_COLLNET_ENABLE", *REGISTERING}


def asked_of_nccl(cell: Cell) -> dict[str, str]:
    """Return what a cell asks of NCCL: its settings, and `memory` where ranks exchange buffers."""
    asked = dict(cell.nccl)
    for group, options in (("strategy", cell.strategy), ("benchmark", cell.benchmark)):
        if cell.world_size > 1 and options.get("memory") == "registered":
            asked[f"{group}.memory"] = "registered"
    return asked


def answers(record: Record) -> list[Answer]:
    """Return an answer for each fast path that a cell asked for; CPU workers have no NCCL."""
    cell, ranks = record.cell, []
    replays = sum(done for _, done in record.checks.get("replays", ()))
    for own in record.tables.get("fast_paths", {}).get("rows", ()):
        facts = DEFAULTS | own | {"ranks": cell.world_size}
        facts["comm_hook"] = cell.strategy.get("comm_hook") or facts["comm_hook"]
        facts["replays"] += replays
        ranks.append(facts)
    settings = asked_of_nccl(cell) if cell.device == "cuda" else {}
    return answers_to(ranks, settings, record.effective, cell.benchmark["name"] == "script")


def answers_to(
    ranks: Sequence[Facts], settings: Mapping[str, str], effective: Facts, in_script: bool
) -> list[Answer]:
    """Return an answer for each fast path that ranks, or settings of NCCL, asked for."""
    rows: list[Answer] = []
    for path in FAST_PATHS:
        if isinstance(path, NcclPath):
            rows += path.answers(settings, effective)
        else:
            rows += path.answers(ranks, in_script)
    return rows


@check("suspect", "asked for, did not engage: {}")
def path_not_engaged(record: Record, _: ValidityLimits) -> Judgement:
    """a faster path of NCCL that was asked for, such as NVLS or registered buffers, was not used

    Read the line of NCCL's log that the report's table of fast paths quotes: it says why, or what
    was used instead.
    """
    missing = []
    for row in answers(record):
        if row.answer == NO and row.code == CODE:
            missing.append(f"{row.path} ({row.asked}): {row.line}")
    return "; ".join(missing)
