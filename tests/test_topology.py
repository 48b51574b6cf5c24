"""Topology: three readers, what they refuse, damage, drawing. Captures: tests/golden."""

import functools
import json
import random
import re
import subprocess
import sys
import types
from itertools import combinations

import pytest
from build import DATA

from analysis.__main__ import main
from analysis.commands import terminal_tables
from analysis.console import SafeConsole
from analysis.input_files import UnreadableInput
from analysis.topology.drawing import lay_out, saved, topology_figure
from analysis.topology.model import distinct_classes, is_known, nvlink_gb_per_s
from analysis.topology.nvml import NoDriver, pci_class, read_live_topology
from analysis.topology.readers import parse_topology, parse_topology_text, parse_topology_xml


def capture(name):
    return (DATA / f"topo_{name}.txt").read_text()


DGX1 = capture("dgx1_v100")


def test_what_captures_say_beside_their_links():
    names = ("dgx1_v100", "h200_x8", "a100_pcie_x4")
    dgx1, h200, a100 = (parse_topology_text(capture(name)) for name in names)
    assert dgx1.link_between(3, "mlx5_1") == "PIX"
    assert dgx1.link_between("mlx5_0", "mlx5_1") == "PHB"
    assert (dgx1.gpu(5).cpu_affinity, dgx1.gpu(5).numa_affinity) == ("20-39,60-79", None)
    # set off by doubled tabs
    assert (h200.gpu(7).cpu_affinity, h200.gpu(7).numa_affinity) == ("0-127", "0")
    assert [gpu.numa_affinity for gpu in a100.devices] == ["0", "1", "2", "3"]
    assert [topology.nvswitch for topology in (dgx1, h200, a100)] == [False, True, False]


def test_link_class_of_a_subset_lists_distinct_classes_best_first():
    topology = parse_topology_text(capture("dgx1_v100"))
    links = topology.to_json()["links"]
    assert distinct_classes([0], links) == ""
    assert distinct_classes([0, 3], links) == "NV2"
    assert distinct_classes([7, 0, 3], links) == "NV2+NV1+SYS"
    with pytest.raises(ValueError, match="no link between 0 and 9"):
        topology.link_between(0, 9)


def test_nvlinks_are_as_fast_as_their_generation():
    assert nvlink_gb_per_s("NVIDIA RTX A6000") == nvlink_gb_per_s(sm=86) == 14.0625
    assert nvlink_gb_per_s("NVIDIA B200") == 50.0 and nvlink_gb_per_s("Some other GPU") is None


ONE_GPU = (
    "        GPU0    NIC0    CPU Affinity    NUMA Affinity   GPU NUMA ID\n"
    "GPU0     X      PHB     0-251   0               N/A\n"
    "NIC0    PHB      X \n\nNIC Legend:\n\n  NIC0: mlx5_bond_0\n"
)


@pytest.mark.parametrize(
    ("text", "gpus", "nics", "links"),
    [
        (ONE_GPU, [0], ["mlx5_bond_0"], {}),
        ("\tGPU0\nGPU0\t X \n", [0], [], {}),
        ("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-7\t\tN/A\n", [0], [], {}),
        ("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSOC\t0-7\nGPU1\tSOC\t X \t8-15\n",
         [0, 1], [], {"0-1": "SYS"}),
        ("\tGPU0\tGPU1\nGPU0\t X \tXLINK3\nGPU1\tXLINK3\t X \n", [0, 1], [], {"0-1": "XLINK3"}),
        (f"$ nvidia-smi topo -m\n```\n{ONE_GPU}```\nIn the matrix GPU0 and GPU1 are near.\n",
         [0], ["mlx5_bond_0"], {}),
    ],
    ids=["legend", "no affinity", "doubled tabs", "old word", "unknown word", "prose around"],
)  # fmt: skip
def test_dialects(text, gpus, nics, links):
    topology = parse_topology_text(text)
    assert topology.to_json() == {"gpus": gpus, "nics": nics, "links": links}
    assert links or topology.nvswitch is None


def test_an_affinity_that_the_end_of_the_text_may_have_cut_is_unknown():
    text = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSYS\t0-127\nGPU1\tSYS\t X \t128-255"
    assert [gpu.cpu_affinity for gpu in parse_topology_text(text).devices] == ["0-127", None]
    assert parse_topology_text(text + "\n").gpu(1).cpu_affinity == "128-255"


NO_GPU5 = "\n".join(line for line in DGX1.split("\n") if not line.startswith("GPU5"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no header line"),
        (NO_GPU5, "no row for GPU5"),
        (DGX1.replace("GPU1    NV1 ", "GPU1    NV2 "),
         "line 3: GPU1 to GPU0 is NV2, but GPU0 to GPU1 is NV1"),
        (DGX1 + DGX1, "line 24: a second table"),
        ("\tGPU0\nGPU0\t X \nGPU1\tSYS\t X \n", "line 3: a row for GPU1, which has no column"),
        (DGX1.replace("\nGPU3 ", "\nGPU2 "), "line 5: a second row for GPU2"),
        (DGX1.replace("GPU0     X ", "GPU0    SYS"), "line 2: GPU0 to GPU0 reads 'SYS'"),
        (DGX1.replace("GPU0     X      NV1 ", "GPU0     X      25.3"),
         "line 2: GPU0 to GPU1 reads '25.3'"),
        ("\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU1\tSYS\n",
         "line 3: 1 links in the row of GPU1; expected 2"),
        ("\tGPU0\tGPU1\nGPU0\t X \tSYS\t0-7\nGPU1\tSYS\t X \t0-7\n", "line 2: 1 more cells"),
        ("\tGPU0\tGPU0\nGPU0\t X \tSYS\n", "a device twice"),
    ],
)  # fmt: skip
def test_unreadable_text_names_the_line_and_what_was_expected(text, message):
    """tests/golden has a matrix of nvidia-smi topo -p2p, and other text."""
    with pytest.raises(UnreadableInput, match=re.escape(message)):
        parse_topology_text(text)


DIALECTS = json.loads((DATA / "topo_dialects" / "affinities.json").read_text())
WORDS = ["NV1", "NV2", "NV12", "NV18", "PIX", "PXB", "PHB", "NODE", "SYS", "XLINK"]


def dialect(name):
    return (DATA / "topo_dialects" / name).read_bytes().decode()


@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialect_has_its_affinities(name):
    """Tabs, colours, a legend, carriage returns, fewer columns; links are in tests/golden."""
    devices = parse_topology_text(dialect(name)).devices
    assert [[gpu.cpu_affinity, gpu.numa_affinity] for gpu in devices] == DIALECTS[name]


def damage(text, draw):
    """Drop or repeat a line; or change, drop or repeat one word of it. test_damaged_files cuts."""
    lines = text.split("\n")
    at = draw.randrange(len(lines))
    kind = draw.choice(["drop line", "repeat line", "word", "drop", "repeat"])
    if kind == "drop line":
        del lines[at]
    elif kind == "repeat line":
        lines.insert(at, lines[at])
    else:
        separator = "\t" if "\t" in lines[at] else " "
        words = lines[at].split(separator)
        which = draw.randrange(len(words))
        if kind == "drop":
            del words[which]
        elif kind == "repeat":
            words.insert(which, words[which])
        elif not words[which][:1].isdigit():  # an affinity is written once
            words[which] = draw.choice([*WORDS, "X", "N/A", "", "GPU1"])
        lines[at] = separator.join(words)
    return "\n".join(lines)


@pytest.mark.parametrize("name", DIALECTS)
def test_damage_never_gives_a_wrong_value(name):
    whole, read = parse_topology_text(dialect(name)), 0
    for seed in range(60):
        try:
            found = parse_topology_text(damage(dialect(name), random.Random(seed)))
        except UnreadableInput:
            continue
        read += 1
        assert found.gpus == whole.gpus and len(found.nics) == len(whole.nics)
        names = dict(zip((*found.gpus, *found.nics), (*whole.gpus, *whole.nics), strict=True))
        for a, b in combinations(names, 2):
            word = found.link_between(a, b)
            assert word == whole.link_between(names[a], names[b]) or not is_known(word)
        for gpu, truth in zip(found.devices, whole.devices, strict=True):
            assert gpu.cpu_affinity in (None, truth.cpu_affinity)
            assert gpu.numa_affinity in (None, truth.numa_affinity)
    assert read > 5


BUS = [f"0000:{bus}:00.0" for bus in ("06", "07", "0a", "0b", "85", "86", "89", "8a")]


# As NCCL dumps it: two GPUs and a NIC a PCIe switch, two switches a NUMA node; two GPUs behind NVSwitch.
DGX1_XML, SWITCHED = ((DATA / f"nccl_topo_{name}.xml").read_text() for name in ("dgx1", "switched"))


def test_xml_of_a_dgx1_agrees_with_its_text():
    topology, text = parse_topology(DGX1_XML), parse_topology_text(DGX1)
    assert topology.links == text.links
    assert topology.nics == text.nics
    assert topology.gpu(0).numa_affinity == "0"
    assert topology.gpu(0).bus_id == "0000:06:00.0"
    assert topology.gpu(0).nvlink_gb_per_s == 25.0
    assert topology.nvswitch is False


def test_xml_links_to_switches_add_up_even_when_the_switches_are_invisible():
    topology = parse_topology_xml(SWITCHED)
    assert topology.to_json() == {"gpus": [0, 3], "nics": [], "links": {"0-3": "NV18"}}
    assert topology.nvswitch is True
    assert (topology.gpu(0).cpu_affinity, topology.gpu(0).numa_affinity) == ("0-15", None)
    assert topology.gpu(0).nvlink_gb_per_s == 25.0


def without_nvlinks(xml):
    return "\n".join(line for line in xml.split("\n") if "<nvlink" not in line)


def test_xml_paths_without_nvlink():
    topology = parse_topology_xml(without_nvlinks(DGX1_XML))
    words = [topology.link_between(0, gpu) for gpu in range(1, 8)]
    assert words == ["PIX", "PHB", "PHB", "SYS", "SYS", "SYS", "SYS"]
    deep = without_nvlinks(SWITCHED)
    for old, new in (
        (' <pci busid="0000:98:00.0"', ' <pci busid="0000:16:01.0"'),
        ('<cpu host_hash="0x1" numaid="-1" affinity="0000ffff">',
         '<cpu numaid="0"><pci busid="0:1:0.0">'),
        ("</cpu>", "</pci></cpu>"),
    ):  # fmt: skip
        deep = deep.replace(old, new)
    assert parse_topology_xml(deep).link_between(0, 3) == "PXB"


BOMB = '<!DOCTYPE a [<!ENTITY b "x"><!ENTITY c "&b;&b;&b;">]>\n<system><cpu>&c;</cpu></system>'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "line 1: a document type"),
        (DGX1_XML[:900], "expected whole XML"),
        ("<system/>", "no <gpu"),
        ("<graphs><gpu dev='0'/></graphs>", "root element is 'graphs'"),
        (SWITCHED.replace('dev="3"', 'dev="0"'), "line 13: a second <gpu dev=0>, the first in"),
        (SWITCHED.replace('count="5"', 'count="many"'), "line 6: <nvlink> has count='many'"),
        (SWITCHED.replace('count="5"', 'count="0"'), "line 6: <nvlink> has count='0'"),
        (SWITCHED.replace('dev="3"', ""), "line 13: <gpu> has dev=''"),
        (DGX1_XML.replace('07:00.0" count="1"', '07:00.0" count="2"', 1),
         "2 NVLinks from GPU 0 to GPU 1, but 1 back"),
        ("<system>" + "<a>" * 100, "nested deeper"),
        ("<system>" + " " * 9_000_000, "at most"),
    ],
    ids=range(11),
)  # fmt: skip
def test_unreadable_xml(text, message):
    with pytest.raises(UnreadableInput, match=message):
        parse_topology(text)


KINDS = {"switch": 2, "unknown": 255, "cpu": 1}


class FakeNvml:
    """Answers as nvidia-ml-py does: `links` holds, per GPU, the far end of each active link."""

    class NVMLError(Exception):
        pass

    NVML_NVLINK_MAX_LINKS = 18
    NVML_P2P_CAPS_INDEX_READ = (0,)  # the tuple that nvidia-ml-py really has

    def __init__(self, links, ancestors=None, partitioned=()):
        def far_end(gpu, link):
            far = links[gpu][link]
            if far == "unknown":
                raise self.NVMLError("Not Supported")
            bus = "00000000:07:00.0" if isinstance(far, str) else f"0000{BUS[far]}".encode()
            return types.SimpleNamespace(busId=bus)

        answers = {
            "GetCount": lambda: len(links),
            "GetHandleByIndex": lambda gpu: gpu,
            "GetName": lambda gpu: b"Tesla V100-SXM2-16GB",  # bytes: nvidia-ml-py before 11.5
            "GetUUID": lambda gpu: f"GPU-{gpu}",
            # eight digits of domain, upper case
            "GetPciInfo": lambda gpu: types.SimpleNamespace(busId=f"0000{BUS[gpu].upper()}"),
            "GetCpuAffinity": lambda gpu, words: [0xFFFFF if gpu < 4 else 0xFFFFF00000, 0][:words],
            "GetNvLinkState": lambda gpu, link: int(link < len(links[gpu])),
            "GetNvLinkRemoteDeviceType": lambda gpu, link: KINDS.get(links[gpu][link], 0),
            "GetNvLinkRemotePciInfo": far_end,
            "GetP2PStatus": lambda a, b, index: {2: 5 if {a, b} <= set(partitioned) else 0}[index],
            "GetTopologyCommonAncestor": lambda a, b: (ancestors or {}).get((a, b), 50),
        }
        for name, answer in answers.items():
            setattr(self, f"nvmlDevice{name}", answer)
        self.links = links

    def nvmlInit(self):
        if self.links is None:
            raise self.NVMLError("NVML Shared Library Not Found")

    def nvmlShutdown(self):
        pass

    def nvmlDeviceGetMemoryAffinity(self, *_):
        raise self.NVMLError("Not Supported")


def test_live_dgx1_counts_links_between_gpus(tmp_path):
    text = parse_topology_text(DGX1)
    links = {gpu: [] for gpu in range(8)}
    for pair, word in text.to_json()["links"].items():
        a, b = map(int, pair.split("-"))
        for gpu, peer in ((a, b), (b, a)):
            links[gpu] += [peer] * (int(word[2:]) if word.startswith("NV") else 0)
    topology = read_live_topology(FakeNvml(links), tmp_path)
    assert topology.to_json()["links"] == text.to_json()["links"]
    assert topology.nvswitch is False
    assert topology.gpu(0).name == "Tesla V100-SXM2-16GB"
    assert (topology.gpu(4).bus_id, topology.gpu(4).cpu_affinity) == ("0000:85:00.0", "20-39")


ANCESTORS = {(0, 1): 0, (0, 2): 10, (0, 3): 20, (1, 2): 30, (1, 3): 40, (2, 3): None}


@pytest.mark.parametrize(
    ("nvml", "links"),
    [
        (FakeNvml([["switch"] * n for n in (18, 17, 18)]), "0-1 NV17 0-2 NV18 1-2 NV17"),
        (FakeNvml([["unknown"] * n for n in (18, 17, 18)]), "0-1 NV17 0-2 NV18 1-2 NV17"),
        (FakeNvml([["switch"] * 6] * 3, partitioned=(0, 2)), "0-1 NV6 0-2 SYS 1-2 NV6"),
        (FakeNvml([[], [], ["cpu"], []], ANCESTORS),
         "0-1 PIX 0-2 PIX 0-3 PXB 1-2 PHB 1-3 NODE 2-3 N/A"),
    ],
    ids=["switch", "unknown", "partitioned", "no NVLink"],
)  # fmt: skip
def test_live_pairs_have_their_active_links_or_their_common_ancestor(nvml, links, tmp_path):
    topology = read_live_topology(nvml, tmp_path)
    assert " ".join(f"{pair} {word}" for pair, word in topology.to_json()["links"].items()) == links
    if "NV18" in links:
        assert topology.nvswitch is True


def sysfs_device(sysfs, chain, node):
    path = sysfs / "devices" / "/".join(chain)
    path.mkdir(parents=True)
    (path / "numa_node").write_text(f"{node}\n")
    return path


def test_live_nics_from_sysfs(tmp_path):
    switch = ["pci0000:00", "0000:00:01.0", "0000:04:00.0"]
    gpu = sysfs_device(tmp_path, [*switch, "0000:05:00.0", BUS[0]], 0)
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    (tmp_path / "bus/pci/devices" / BUS[0]).symlink_to(gpu)
    for name, chain, node in (
        ("mlx5_0", [*switch, "0000:05:01.0", "0000:07:09.0"], 0),
        ("mlx5_1", ["pci0000:00", "0000:00:02.0", "0000:08:00.0"], 0),  # another port of the root
        ("mlx5_2", ["pci0000:40", "0000:40:02.0", "0000:48:00.0"], 0),  # another root
        ("mlx5_10", ["pci0000:80", "0000:80:02.0", "0000:88:00.0"], 1),  # another socket
    ):
        (tmp_path / "class/infiniband" / name).mkdir(parents=True)
        (tmp_path / "class/infiniband" / name / "device").symlink_to(
            sysfs_device(tmp_path, chain, node)
        )
    topology = read_live_topology(FakeNvml([[]]), tmp_path)
    assert topology.nics == ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_10")
    assert [topology.link_between(0, nic) for nic in topology.nics] == ["PIX", "PHB", "NODE", "SYS"]
    assert topology.gpu(0).numa_affinity == "0"
    assert pci_class(gpu, tmp_path / "nothing") == "N/A"


def test_no_driver_is_a_sentence():
    with pytest.raises(NoDriver, match="no NVIDIA driver"):
        read_live_topology(FakeNvml(None))
    with pytest.raises(NoDriver, match="no GPU"):
        read_live_topology(FakeNvml([]))


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        (
            "dgx1_v100",
            "GPU7|mlx5_3|PCIe switch|CPUs 0-19,40-59|NV2 (8 pairs)|SYS (12 pairs, no line)",
        ),
        ("h200_x8", "GPU7|NVSwitch|NV18 (28 pairs)"),
        ("a100_pcie_x4", "GPU3|NUMA node 3|NV12 (2 pairs)"),
    ],
    ids=["dgx1", "h200", "a100"],
)
def test_drawing_is_the_same_every_time_and_names_everything(name, labels, tmp_path, capsys):
    for file in ("one.svg", "two.svg"):
        command = ["topology", str(DATA / f"topo_{name}.txt"), "--svg", str(tmp_path / file)]
        assert main(command) == 0
    svg = (tmp_path / "one.svg").read_text()
    assert svg == (tmp_path / "two.svg").read_text() and "dc:date" not in svg
    assert [label for label in labels.split("|") if label not in svg] == []
    assert ("NVSwitch" in svg) == (name == "h200_x8")


@pytest.mark.parametrize("label", ["0-19", "mlx5_1", "NV2"])
def test_a_drawing_cuts_a_label_of_any_length(label):
    """matplotlib would take seconds for it."""
    drawing = saved(
        topology_figure(parse_topology_text(DGX1.replace(label, label + "0" * 9000))), "svg"
    )
    assert b"0" * 200 not in drawing and f"{label}0000".encode() in drawing


def test_drawing_has_gpus_in_one_row_above_their_nics():
    places = lay_out(parse_topology_text(DGX1)).places
    assert [places[gpu][1] for gpu in range(8)] == [0.0] * 8
    assert sorted(range(8), key=lambda gpu: places[gpu][0]) == [*range(8)]
    assert places[2][0] < places["mlx5_1"][0] < places[3][0] and places["mlx5_1"][1] < -1


def test_tables_at_80_columns_cut_no_word_and_lose_no_column(monkeypatch, capsys):
    """`mlx5_0` was folded into `mlx` and `5_0`, and the last column of a trace was lost."""
    narrow = functools.partial(SafeConsole, width=80)
    monkeypatch.setattr(terminal_tables, "console", narrow)
    assert main(["topology", str(DATA / "topo_dgx1_v100.txt")]) == 0
    printed = capsys.readouterr().out
    assert "mlx5_0  mlx5_1 " in printed and " mlx5_2  mlx5_3 " in printed
    assert "CPU affinity 0-19,40-59: GPU0, GPU1, GPU2, GPU3\n" in printed
    assert main(["trace", str(DATA / "kineto_h200_x2")]) == 0
    printed = capsys.readouterr().out
    assert "communication ms" in printed and "exposed ms/step  … in gaps" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_command_reads_standard_input():
    """What each capture says as JSON is in tests/golden/topology.txt."""
    command = [sys.executable, "-m", "analysis", "topology", "-", "--json"]
    done = subprocess.run(command, input=DGX1_XML, text=True, stdout=-1, cwd=DATA.parent.parent)
    assert json.loads(done.stdout)["links"]["0-3"] == "NV2"
