"""Readers of other tools' files have limits: what is beyond them is one sentence, not all of the machine's memory."""

import gzip
import io
import types
from pathlib import Path

import pytest
from build import DATA

from analysis import input_files
from analysis.__main__ import main
from analysis.input_files import UnreadableInput
from analysis.native.p2p import parse_matrices
from analysis.nccl.log import parse_nccl_log
from analysis.topology.nvml import cpu_list
from analysis.topology.readers import parse_topology_text, parse_topology_xml

READERS = (["nccl-log"], ["nccl-tests"], ["p2p"], ["topology"], ["subsets"])


@pytest.fixture
def small(monkeypatch):
    for name in ("LARGEST_TEXT_BYTES", "LARGEST_TOPOLOGY_BYTES"):
        monkeypatch.setattr(input_files, name, 1 << 20)
    monkeypatch.setattr(input_files.read_text, "__defaults__", (1 << 20,))


@pytest.mark.parametrize("command", READERS, ids=lambda command: command[0])
def test_an_endless_file_is_refused(small, refusal, command):
    assert refusal(*command, "/dev/zero")


def test_a_gzip_bomb_is_refused_before_it_is_whole(small, tmp_path):
    bomb = tmp_path / "bomb.gz"
    bomb.write_bytes(gzip.compress(bytes(64 << 20)))
    with pytest.raises(UnreadableInput, match="more than 1 MiB"):
        input_files.read_text(bomb)


def test_a_cut_gzip_file_is_refused(tmp_path):
    packed = tmp_path / "p2p.txt.gz"
    packed.write_bytes(gzip.compress((DATA / "p2p_h200_x2.txt").read_bytes())[:-20])
    with pytest.raises(UnreadableInput, match="cut or damaged gzip"):
        input_files.read_text(packed)


LOG = "nccl_dgx1_gpus_0_3_default.log"


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (["nccl-log"], LOG),
        (["nccl-tests"], "nccl_tests_sharp_cluster.txt"),
        (["p2p"], "p2p_a100_pcie_x4.txt"),
        (["topology"], "topo_dgx1_v100.txt"),
        (["topology"], "nccl_topo_h200_x4.xml"),
        (["subsets"], "topo_a100_pcie_x4.txt"),
        (["place", "--gpus", "2", "--topology"], "topo_a100_pcie_x4.txt"),
        (["trace"], "kineto_h200_x2/rank0.json"),
    ],
    ids=str,
)
def test_every_reader_takes_gzip(tmp_path, monkeypatch, capsys, command, file):
    command = [str(DATA / word) if (DATA / word).is_file() else word for word in command]
    source = next(path for path in (DATA / file, DATA / f"{file}.gz") if path.exists())
    content = source.read_bytes()
    if source.suffix == ".gz":
        content = gzip.decompress(content)
    plain, packed = tmp_path / Path(file).name, tmp_path / f"{Path(file).name}.gz"
    plain.write_bytes(content)
    packed.write_bytes(gzip.compress(content))
    told = []
    for path in (str(plain), str(packed), "-")[: 2 if command[0] == "trace" else 3]:
        typed = io.BufferedReader(io.BytesIO(packed.read_bytes()))
        monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=typed))
        assert main([*command, path, "--json"]) == 0
        out = capsys.readouterr().out
        told.append(out.replace(f'"{path}"', '"FILE"').replace(f'({path})"', '(FILE)"'))
    assert len(told[0]) > 100 and len(set(told)) == 1


def test_a_log_that_claims_a_billion_ranks_is_read_in_little_memory():
    started = "h:1:1 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 0 nranks 1000000000 cudaDev 0 nvmlDev 0 busId 1000 - Init START"
    log = parse_nccl_log(f"{started}\nh:1:1 [0] NCCL INFO Channel 00/02 : 0 1\n")
    assert (log.nranks, log.rings) == (1000000000, {})


def test_a_wide_mask_takes_linear_time():
    assert cpu_list((1 << 400_000) - 1) == "0-399999"


def test_tables_of_more_gpus_than_a_machine_has_are_refused():
    gpu = '<pci busid="{0}"><gpu dev="{0}" sm="90" rank="{0}"/></pci>'
    gpus = "".join(gpu.format(number) for number in range(3000))
    columns = " ".join(map(str, range(1500)))
    title = "Unidirectional P2P=Disabled Bandwidth Matrix (GB/s)"
    for read, text in (
        (parse_topology_xml, f'<system><cpu numaid="0">{gpus}</cpu></system>'),
        (parse_matrices, f"{title}\n D\\D {columns}\n"),
        (parse_topology_text, "\t".join(["", *(f"GPU{n}" for n in range(1500))]) + "\n"),
    ):
        with pytest.raises(UnreadableInput, match="no machine has more than 576"):
            read(text)
