"""What a record says of the hosts of its cell, and on which of them something is otherwise when the study goes on."""

import copy
import dataclasses
import json
from pathlib import Path

import pytest
from build import GPUS, WITH_GPUS, fleet, make_cell

from analysis.validity.surroundings import setting_not_asked
from benchmarks import record as records
from benchmarks.record import CellFolder
from conf.schema import ValidityLimits
from launch.engines.environment import HostEnvironment, cell_variables
from launch.study.run_environment import HostsEnvironment
from launch.study.study_folder import StudyFolder, find_finished

REAL = records.read_study(Path(__file__).parent / "data" / "h200_x2" / "eager_a")[0][0]
CELL = make_cell((1, 0), device="cuda", hosts=("a", "b"))
FOLDER = CellFolder(Path("{cell}"))
TOPOLOGY = {"facts.topology": "GPU0 GPU1\n", "facts.links": {"0-1": "NV18"}}
OF_A = {**WITH_GPUS, **TOPOLOGY, "facts.host": "n1"}
GPUS_OF_B = [{**gpu, "uuid": f"GPU-b{gpu['id']}"} for gpu in GPUS]
OF_B = {**OF_A, "facts.host": "n2", "machine.devices": GPUS_OF_B}
OF_B |= {"facts.gpu": {"driver": "580.65.06", "gpus": GPUS_OF_B}}
OF_B |= {"variables": {"NCCL_ALGO": "Ring"}}


def here(**changes):
    """The surroundings of two hosts; `changes` are of host b."""
    hosts = fleet(a=OF_A, b={**OF_B, **changes})

    def variables(cell, name, token):
        where = HostEnvironment(name, f"eth-{name}")
        return cell_variables(cell, hosts[name].machine, FOLDER, token, where)

    return HostsEnvironment(hosts.hosts[0].machine, {}, hosts, variables)


def measured(around, **changes):
    """A record of the cell in these surroundings."""
    environment = around.facts(CELL, FOLDER) | {"versions": {"torch": "of the ranks"}}
    facts = {"cell": CELL, "cell_key": CELL.key, "environment": json.loads(json.dumps(environment))}
    facts["ranks"] = [{"rank": rank, "name": "NVIDIA H200"} for rank in range(4)]
    return dataclasses.replace(REAL, **facts, **changes)


def test_a_record_has_the_facts_of_every_host_and_large_ones_once():
    environment = here().facts(CELL, FOLDER)
    first, second = environment["hosts"]
    assert environment["host"] == first["host"] == "n1"
    assert second["host"] == "n2"
    assert (first["name"], second["name"]) == ("a", "b")
    in_order_of_ranks = ["GPU-1", "GPU-0", "GPU-b1", "GPU-b0"]
    assert environment["planned_uuids"] == in_order_of_ranks
    assert environment["topology"] == "GPU0 GPU1\n"
    assert not {"topology", "links"} & (first.keys() | second.keys())
    assert second["variables"]["NCCL_ALGO"] == "Ring"
    assert second["inherited"] == ["NCCL_ALGO"]
    assert first["inherited"] == []
    assert (first["interface"], second["interface"]) == ("eth-a", "eth-b")
    assert first["interfaces"] and first["versions"]["torch"] and first["gpu"] != second["gpu"]
    other = here(**{"facts.topology": "GPU0\n"}).facts(CELL, FOLDER)["hosts"]
    assert "topology" not in other[0] and other[1]["topology"] == "GPU0\n"


CHANGES = [
    ({"facts.host": "n7"}, ["host b: host n2, now n7"]),
    ({"facts.gpu": {"driver": "580.99"}}, ["host b: driver 580.65.06, now 580.99"]),
    ({"versions.torch": "2.99"}, ["host b: torch "]),
    ({"versions.nccl": "2.99"}, ["host b: NCCL "]),
    ({"facts.cpu.cores": 3}, ["host b: CPU "]),
    ({"variables": {"NCCL_ALGO": "Tree"}}, ["host b: NCCL_ALGO Ring, now Tree"]),
    ({"variables": {}}, ["host b: NCCL_ALGO Ring, now unset"]),
    ({"facts.nccl_conf": "NCCL_ALGO=Tree\n"}, ["host b: /etc/nccl.conf has changed"]),
    ({"machine.devices": GPUS, "facts.gpu": WITH_GPUS["facts.gpu"]}, ["host b: other GPUs of this host, also 2 × H200"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), CHANGES)
def test_what_is_otherwise_on_a_host_is_told_with_its_name(changes, said):
    found = here(**changes).differences(measured(here()))
    assert len(found) == len(said), found
    for sentence, words in zip(found, said, strict=True):
        assert sentence.startswith(words)


def test_what_is_as_it_was_is_done_and_the_rest_is_measured_again(tmp_path):
    study = StudyFolder(str(tmp_path), "study")
    folder = CellFolder(study.folder / CELL.folder)
    folder.path.mkdir()
    records.write(folder, measured(here(), state="finished"))
    assert here().differences(measured(here())) == []
    notes = []
    assert list(find_finished([CELL], study, here(), notes.append)) == [0] and notes == []
    updated = here(**{"facts.gpu": {"driver": "580.99"}})
    assert find_finished([CELL], study, updated, notes.append) == {}
    said = "measuring 1 run again: host b: driver 580.65.06, now 580.99. Earlier results "
    assert notes == [f"{said}are kept"]


@pytest.mark.parametrize("hosts", [[], [{}], [{"name": "b"}]])
def test_a_list_of_hosts_that_lacks_one_is_measured_again(hosts):
    record = measured(here())
    record.environment["hosts"] = hosts
    assert any(one.startswith("host a: ") for one in here().differences(record))


def test_the_interface_that_ringside_chose_on_a_host_is_no_foreign_setting():
    record = copy.deepcopy(measured(here()))
    record.effective["nccl"] = {"settings": {"NCCL_SOCKET_IFNAME": "=eth-b"}}
    assert not setting_not_asked.judge(record, ValidityLimits())
    record.environment["hosts"][1]["inherited"].append("NCCL_SOCKET_IFNAME")
    said = setting_not_asked.judge(record, ValidityLimits())
    assert "NCCL_SOCKET_IFNAME==eth-b from the environment" in said
