"""Whether each fast path that was asked for engaged: planted engaged and not, and in clean runs."""

import dataclasses

import planted_paths
import pytest
from build import make_record

from analysis.commands.definitions import definitions
from analysis.nccl.log import parse_nccl_log
from analysis.report.sections.conditions_section import fast_paths
from analysis.study.study import Study
from analysis.validity.effective import _used, choices_of
from analysis.validity.fast_paths import FAST_PATHS, answers, path_not_engaged
from benchmarks.record.record import as_read
from benchmarks.training.derive import path_tables
from conf.schema import ValidityLimits

# Facts as an H200 gave them (torch 2.11), and of loaders with two workers: the same in one process.
COMMON = {"passes": 1, "elements": 8, "weights": "contiguous", "prefetches": 0, "ahead": 0,
          "fused": False, "captured": 0, "replays": 0, "workers": 0}  # fmt: skip
RECORDED = [
    ("TF32", "yes", {"tf32_asked": True, "tf32_used": True}),
    ("TF32", "no", {"tf32_asked": True, "tf32_used": False}),  # NVIDIA_TF32_OVERRIDE=0
    ("pinned memory", "yes", {"copied": {"pinned, free": 49152}}),
    ("pinned memory", "no", {"copied": {"pageable, free": 49152}}),
    ("pinned memory", "no", {"copied": {"pinned, waits": 49152}}),
    ("CUDA graph", "yes", {"captured": 1, "replays": 1}),
    ("CUDA graph", "no", {"captured": 1}),
    ("CUDA graph", "no", {"compiled": True, "graphs": 1, "graph_breaks": 0, "first_break": "",
                          "graphs_skipped": 2}),
    ("loader workers", "yes", {"workers": 2, "working": "2 of 2"}),
    ("loader workers", "no", {"workers": 2, "working": "1 of 2"}),
    ("loader workers", "unknown", {"workers": 2}),
    ("torch.compile", "yes", {"compiled": True, "graphs": 1, "graph_breaks": 0, "first_break": ""}),
    ("torch.compile", "no", {"compiled": True, "graphs": 0}),
    ("fused optimizer", "unknown", {"fused": True}),  # operators were not watched
]  # fmt: skip
RING = "AllGather: 1024 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..7}"
RINGS = "Connected all rings, use ring PXN {} GDR {}"
CHANNELS = "24 coll channels, 24 collnet channels, {} nvls channels, 32 p2p channels, 2 p2p channels per peer"
REGISTER = "rank 0 - NET register userbuff 0x7f0000000000 (handle 0x7f0000001000), buffSize 1048576"
# Lines as the format strings of NCCL 2.28.9, 2.29.7 and 2.30.7 write them: (path, setting, answer, line)
LOGGED = [
    ("symmetric kernels", "NCCL_WIN_ENABLE=1", "yes",
     "AllReduce [Symmetric]: 1024 Bytes -> Kernel AllReduce_RSxLD_AGxST nchannels 8 nthreads 512 nWorks 1"),
    ("symmetric kernels", "NCCL_WIN_ENABLE=1", "no", RING),
    ("symmetric kernels", "NCCL_WIN_ENABLE=1", "no", f"{RING} cgaClusterSize 4"),
    ("zero-CTA policy", "NCCL_CTA_POLICY=ZERO", "yes", "AllGather [Copy Engine]: 1024 Bytes -> cudaMemcpy"),
    ("zero-CTA policy", "NCCL_CTA_POLICY=2", "yes",
     "AllGather [Copy Engine]: 1024 Bytes -> cudaMemcpy; CE synchronization with NVLS"),
    ("zero-CTA policy", "NCCL_CTA_POLICY=ZERO", "yes", "AllGather [Hierarchical CE]: 1024 Bytes -> RMA proxy + CE"),
    ("zero-CTA policy", "NCCL_CTA_POLICY=ZERO", "no", RING.replace("AllGather", "AllReduce")),
    ("zero-CTA policy", "NCCL_CTA_POLICY=ZERO", "unknown", RINGS.format(0, 1)),
    ("GDR", "NCCL_NET_GDR_LEVEL=SYS", "yes", RINGS.format(0, 1)),
    ("GDR", "NCCL_NET_GDR_LEVEL=SYS", "no", RINGS.format(0, 0)),
    ("PXN", "NCCL_PXN_DISABLE=0", "yes", RINGS.format(1, 1)),
    ("PXN", "NCCL_PXN_DISABLE=0", "no", RINGS.format(0, 1)),
    ("CollNet, SHARP", "NCCL_COLLNET_ENABLE=1", "yes", "rank 0 Connected CollNet"),
    ("CollNet, SHARP", "NCCL_COLLNET_ENABLE=1", "no", RINGS.format(0, 1)),
    ("NVLS", "NCCL_NVLS_ENABLE=1", "yes", CHANNELS.format(16)),
    ("NVLS", "NCCL_NVLS_ENABLE=1", "no", CHANNELS.format(0)),
    ("registered buffers", "NCCL_LOCAL_REGISTER=1", "yes", REGISTER),
    ("registered buffers", "NCCL_LOCAL_REGISTER=1", "no",
     "rank 0 failed to NET register userbuff 0x7f0000000000 buffSize 1048576 GDR flag 0"),
    ("registered buffers", "strategy.memory=registered", "yes",
     "rank 0 - IPC register buffer 0x7f0000000000 size 1048576 (baseAddr 0x7f0000000000 size 2097152) to peer 1"),
    ("registered buffers", "benchmark.memory=registered", "no",
     "register comm 0x55d0a0b0c0d0 buffer 0x7f0000000000 size 2097152"),
    ("registered buffers", "benchmark.memory=registered", "no",
     "Skipping registration for buffer 0x7f0000000000 size 2097152 (LocalRegister=0, P2pUsesMemcpy=0)"),
    ("registered buffers", "strategy.memory=registered", "unknown", RINGS.format(0, 1)),
    ("P2P setting", "NCCL_P2P_LEVEL=LOC", "yes", "Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct"),
    ("SHM setting", "NCCL_SHM_DISABLE=1", "yes", "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"),
]  # fmt: skip
JUDGED = {
    "P2P setting": ("NCCL_P2P_LEVEL", "transport_unexpected"),
    "SHM setting": ("NCCL_SHM_DISABLE", "transport_unexpected"),
    "algorithm, protocol": ("NCCL_ALGO", "algorithm_unexpected"),
    "channels": ("NCCL_MAX_CTAS", "channels_unexpected"),
}


def record_of(facts=(), nccl=(), ranks=2, **changes):
    """A record of ranks with these facts, and of these settings of NCCL."""
    cell = make_record().cell
    cell = dataclasses.replace(
        cell, gpus=tuple(range(ranks)), nccl=dict(nccl), strategy={"name": "none"}
    )
    lines = {rank: [{"kind": "paths", "time": 0.0, **own}] for rank, own in enumerate(facts)}
    tables = as_read({"tables": path_tables(lines)})["tables"]
    return make_record(cell=cell, tables=tables, **changes)


def judged(record):
    return {row.path: row for row in answers(record)}


def observed(setting, line):
    """A record whose NCCL wrote one line."""
    name, _, value = setting.partition("=")
    log = parse_nccl_log(f"\nhost:1:1 [0] NCCL INFO {line}\n")
    record = record_of(nccl={name: value})
    effective = _used(log, {}, record)
    effective["nccl"]["paths"] = list(log.paths)
    effective["nccl"]["transports"] = {"0->1": ["NET/IB/0"]}
    return dataclasses.replace(record, effective=effective | {"choices": choices_of(log)})


def test_ranks_tell_each_path_that_engaged_and_each_that_did_not(forked):
    of_ranks = forked("paths")
    for own in zip(*of_ranks, strict=True):
        path, answer, _ = own[0]
        record = record_of([facts for _, _, facts in own])
        row = judged(record)[path]
        assert (path, row.answer) == (path, answer), row
        assert row.line.startswith("rank 0: ")
        if answer == "no" and path != "whole graph":
            in_script = dataclasses.replace(record.cell, benchmark={"name": "script"})
            record = dataclasses.replace(record, cell=in_script)
            assert path in path_not_engaged.judge(record, ValidityLimits())


@pytest.mark.parametrize(("path", "answer", "facts"), RECORDED)
def test_facts_of_a_gpu_and_of_loaders(path, answer, facts):
    assert judged(record_of([COMMON | facts], ranks=1))[path].answer == answer


@pytest.mark.parametrize(("path", "setting", "answer", "line"), LOGGED)
def test_lines_of_nccl(path, setting, answer, line):
    row = judged(observed(setting, line))[path]
    assert (row.answer, row.asked) == (answer, setting), row


@pytest.mark.parametrize("path", JUDGED)
def test_what_another_check_judges_is_not_judged_again(path):
    setting, code = JUDGED[path]
    wrong = {"code": code, "severity": "invalid", "sentence": "no", "setting": setting}
    used = {"transport": "P2P/CUMEM", "channels": 24}
    for findings, answer in (
        ([], "yes"),
        ([wrong], "no"),
        ([wrong | {"severity": "unchecked"}], "unknown"),
    ):
        record = record_of(nccl={setting: "1"}, effective=used | {"findings": findings})
        assert judged(record)[path].answer == answer
        assert not path_not_engaged.judge(record, ValidityLimits())


def test_the_worst_rank_answers_and_the_report_shows_it():
    good, bad = (COMMON | {"captured": 1, "replays": replays} for replays in (1, 0))
    record = record_of([good, bad])
    assert judged(record)["CUDA graph"].line == "rank 1: 0 replays of 1 graphs"
    record = dataclasses.replace(
        record, validity=dataclasses.replace(record.validity, verdict="valid")
    )
    section = fast_paths(Study.of([record]), None)
    assert section.tables[0].rows[0][:4] == ("CUDA graph", "capturing a CUDA graph", "no", 1)
    assert fast_paths(Study.of([record_of([COMMON])]), None) is None


def test_every_path_is_explained_and_planted():
    names = {path.name for path in FAST_PATHS}
    planted = {path for path, *_ in (*RECORDED, *LOGGED)} | JUDGED.keys()
    assert names == planted | planted_paths.PATHS
    assert all("Proof that it was used: " in definitions()[name].meaning for name in names)


@pytest.mark.campaign
def test_no_false_answer_in_fifty_clean_runs(forked):
    for own in zip(*forked("clean_paths"), strict=True):
        rows = answers(record_of(own))
        assert rows and {row.answer for row in rows} == {"yes"}
