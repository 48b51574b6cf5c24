"""`auto` is resolved before a cell has a key: what is kept says what ran."""

import contextlib
import dataclasses
import json
import re

import pytest
from build import configuration, make_record, words

from conf import groups
from conf.cell import Cell
from conf.groups import choices, meaning
from conf.options import Refused
from conf.resolve import checked, resolve
from launch.study.study_folder import StudyFolder

pytestmark = pytest.mark.usefixtures("hydra")


def cell_of(*typed, gpus=(0, 1), device="cpu"):
    return resolve(checked(configuration(*typed))[0], gpus, device, all_gpus={"": (0, 1, 2, 3)})


def typed_autos(group, name):
    """Overrides that type `auto` for every option of a choice that has such a default."""
    options = groups.choice(group, name).options
    return [f"{group}.{option}=auto" for option, value in options.items() if value == "auto"]


BENCHMARKS = [name for name in choices("benchmark") if name != "script"]  # it needs benchmark.run
CHOICES = [("benchmark", name) for name in BENCHMARKS]
CHOICES += [(group, name) for group in ("strategy", "model") for name in choices(group)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("gpus", [(0,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_no_cell_holds_auto(group, name, gpus, device):
    typed = ["batch_size=auto", "image_size=auto", "optimize=auto"]
    if group != "model":
        typed = typed_autos(group, name)
    plain = f"{group}={name}"
    cell = cell_of(plain, "precision=auto", "channels_last=auto", *typed, gpus=gpus, device=device)
    assert "auto" not in words(cell.to_dict())
    assert cell.key == cell_of(plain, gpus=gpus, device=device).key
    assert Cell.from_dict(json.loads(json.dumps(cell.to_dict()))) == cell


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_typed_default_is_the_same_cell(name):
    cell = cell_of(f"benchmark={name}")
    rules = groups.choice("benchmark", name).rules
    for override in typed_autos("benchmark", name):
        option = override.removeprefix("benchmark.").removesuffix("=auto")
        value = cell.benchmark.get(option)
        if option in rules.get("omit_if_default", ()):
            value = rules["auto"][option]
        if value is not None:  # factor, beside a step
            typed = cell_of(f"benchmark={name}", f"benchmark.{option}={value}")
            assert typed.key == cell.key


def own_benchmark(folder, cpu):
    """A benchmark YAML that differs from throughput's in one default."""
    text = (groups.ROOT / "benchmark" / "throughput.yaml").read_text()
    changed = text.replace(
        "exchange_iterations: {cuda: 50, cpu: 10}", f"exchange_iterations: {{cuda: 50, cpu: {cpu}}}"
    )
    (folder / "benchmark").mkdir(parents=True)
    (folder / "benchmark" / "mine.yaml").write_text(
        changed.replace("name: throughput", "name: mine")
    )
    groups.add_config_dir([folder])
    options = groups.options("benchmark", groups.choice("benchmark", "mine").options)
    config, _ = checked(configuration())
    return resolve(dataclasses.replace(config, benchmark=options), (0, 1), "cpu")


def test_a_changed_default_changes_the_key(tmp_path):
    try:
        cells = [own_benchmark(tmp_path / str(cpu), cpu) for cpu in (10, 11)]
    finally:
        groups.add_config_dir([])
    assert [cell.benchmark["exchange_iterations"] for cell in cells] == [10, 11]
    assert cells[0].key != cells[1].key


@pytest.mark.parametrize(
    ("typed", "gpus", "option", "value"),
    [
        ("strategy=cpu_staged", (0, 1), "bucket_cap_mb", 4.0),
        ("strategy=cpu_staged strategy.staging=sharded", (0, 1), "bucket_cap_mb", 25.0),
        ("strategy=cpu_staged strategy.transport=gloo", (0, 1), "bucket_cap_mb", 25.0),
        ("benchmark=jacobi benchmark.nx=64", (0, 1), "ny", 64),
        ("benchmark=jacobi benchmark.nx=64 benchmark.ny=32", (0, 1), "ny", 32),
        ("benchmark=collectives benchmark.collective=all_reduce", (0, 1), "min_bytes", 8),
        ("benchmark=collectives benchmark.collective=all_gather", (0, 1), "min_bytes", 32),
        ("benchmark=collectives benchmark.collective=all_gather", (0, 1, 2), "min_bytes", 64),
        ("benchmark=collectives benchmark.step=1K", (0, 1), "factor", None),
    ],
)
def test_what_an_option_means_may_hang_on_another(typed, gpus, option, value):
    cell = cell_of(*typed.split(), gpus=gpus)
    assert {**cell.strategy, **cell.benchmark}[option] == value


CASES = [{"value": 1, "where": {"a": "x"}}, {"value": {"cuda": 2, "cpu": 3}}]


@pytest.mark.parametrize(
    ("rule", "options", "device", "value"),
    [
        (4.0, {}, "cpu", 4.0),
        ({"cuda": 50, "cpu": 10}, {}, "cuda", 50),
        ({"cuda": 50, "cpu": 10}, {}, "cpu", 10),
        ({"as": "nx"}, {"nx": 7}, "cpu", 7),
        (CASES, {"a": "x"}, "cuda", 1),
        (CASES, {"a": "y"}, "cuda", 2),
    ],
)
def test_the_forms_of_a_rule(rule, options, device, value):
    assert meaning(rule, options, device) == value


def test_an_auto_without_a_meaning_is_refused(tmp_path):
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "mine.yaml").write_text(
        "name: mine\n_target_: trainers.strategies.none.NoExchange\nsize: auto\nauto: {size: {cuda: 1}}\n"
    )
    groups.add_config_dir([tmp_path])
    try:
        with pytest.raises(
            Refused,
            match=re.escape("strategy.size=auto: ") + ".* does not say what it means on cpu",
        ):
            groups.resolved("strategy", {"name": "mine", "size": "auto"}, "cpu", 2)
    finally:
        groups.add_config_dir([])


def test_resume_takes_no_record_of_another_resolved_request(tmp_path):
    """A record whose file lies in the cell's own folder, although its request held `auto`, so its key is another."""
    cell = cell_of("model=resnet18")
    plain = json.loads(json.dumps(cell.to_dict()))
    unresolved = plain | {"benchmark": plain["benchmark"] | {"exchange_iterations": "auto"}}
    study = StudyFolder(str(tmp_path), "default")
    folder = study.folder / cell.folder
    folder.mkdir()
    for asked, is_taken in ((unresolved, False), (plain, True)):
        content = dataclasses.asdict(make_record(state="finished", failure=None))
        content |= {"cell": asked, "cell_key": Cell.from_dict(asked).key}
        (folder / "record.json").write_text(json.dumps(content))
        assert (study.finished(cell) is not None) == is_taken
    assert Cell.from_dict(unresolved).folder != cell.folder


def test_gpu_servers_on_several_hosts_refuse_fewer_hardware_queues():
    gpus = {"a": (0, 1), "b": (0, 1)}
    for queues in ("null", "32", "8"):
        config = checked(
            configuration(
                "strategy=kvstore_dist_sync_device", f"cuda_device_max_connections={queues}"
            )
        )[0]
        refusal = pytest.raises(
            Refused, match="cuda_device_max_connections=8: GPU servers on several hosts"
        )
        with refusal if queues == "8" else contextlib.nullcontext():
            assert resolve(config, (0, 1), "cuda", gpus, ("a", "b")).server_gpus
