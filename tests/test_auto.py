"""`auto` is resolved before a cell has a key: what is kept says what ran."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import pytest
from build import make_record, words
from hydra import compose
from omegaconf import OmegaConf

from conf import groups
from conf.cell import Cell
from conf.command_line import normalise
from conf.groups import choices, meaning
from conf.options import Refused
from conf.resolve import checked, resolve
from launch.study.study import StudyFolder

DATA = Path(__file__).parent / "data"
pytestmark = pytest.mark.usefixtures("hydra")


@functools.cache
def configuration(*typed):
    """What Hydra composes for a request, and which differs by neither GPUs nor device."""
    return OmegaConf.to_object(compose("config", overrides=normalise(typed)))


def cell_of(*typed, gpus=(0, 1), device="cpu"):
    """The cell of a request."""
    return resolve(checked(configuration(*typed))[0], gpus, device, all_gpus={"": (0, 1, 2, 3)})


def typed_autos(group, name):
    """Overrides that type `auto` for every option of a choice that has such a default."""
    return [
        f"{group}.{one}=auto"
        for one, value in groups.choice(group, name).options.items()
        if value == "auto"
    ]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("gpus", [(0,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize(
    ("group", "name"),
    [(group, name) for group in ("benchmark", "strategy", "model") for name in choices(group)],
)
def test_no_cell_holds_auto(group, name, gpus, device):
    typed = (
        typed_autos(group, name)
        if group != "model"
        else ["batch_size=auto", "image_size=auto", "optimize=auto"]
    )
    cell = cell_of(
        f"{group}={name}", "precision=auto", "channels_last=auto", *typed, gpus=gpus, device=device
    )
    assert "auto" not in words(cell.to_dict())
    assert cell.key == cell_of(f"{group}={name}", gpus=gpus, device=device).key
    assert Cell.from_dict(json.loads(json.dumps(cell.to_dict()))) == cell


@pytest.mark.parametrize("name", choices("benchmark"))
def test_a_typed_default_is_the_same_cell(name):
    cell = cell_of(f"benchmark={name}")
    for option in typed_autos("benchmark", name):
        typed, rules = (
            option.partition("=")[0].partition(".")[2],
            groups.choice("benchmark", name).rules,
        )
        value = (
            rules["auto"][typed]
            if typed in rules.get("omit_if_default", ())
            else cell.benchmark[typed]
        )
        if value is not None:  # factor, beside a step
            assert (
                cell_of(f"benchmark={name}", f"{option.removesuffix('auto')}{value}").key
                == cell.key
            )


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


def test_what_an_option_means_may_hang_on_another():
    sizes = {
        (staging, transport): cell_of(
            "strategy=cpu_staged", f"strategy.staging={staging}", f"strategy.transport={transport}"
        ).strategy["bucket_cap_mb"]
        for staging, transport in (("full", "shared"), ("sharded", "shared"), ("full", "gloo"))
    }
    assert sizes == {("full", "shared"): 4.0, ("sharded", "shared"): 25.0, ("full", "gloo"): 25.0}
    assert cell_of("benchmark=jacobi", "benchmark.nx=64").benchmark["ny"] == 64
    assert cell_of("benchmark=jacobi", "benchmark.nx=64", "benchmark.ny=32").benchmark["ny"] == 32


def test_the_smallest_message_can_be_shared_out():
    def least(collective, gpus):
        cell = cell_of("benchmark=collectives", f"benchmark.collective={collective}", gpus=gpus)
        return cell.benchmark["min_bytes"]

    assert (
        least("all_reduce", (0, 1)),
        least("all_gather", (0, 1)),
        least("all_gather", (0, 1, 2)),
    ) == (8, 32, 64)
    stepped = cell_of("benchmark=collectives", "benchmark.step=1K").benchmark
    assert (stepped["factor"], stepped["step"]) == (None, "1K")


def test_the_forms_of_a_rule():
    assert meaning(4.0, {}, "cpu") == 4.0
    assert (
        meaning({"cuda": 50, "cpu": 10}, {}, "cuda"),
        meaning({"cuda": 50, "cpu": 10}, {}, "cpu"),
    ) == (50, 10)
    assert meaning({"as": "nx"}, {"nx": 7}, "cpu") == 7
    cases = [{"value": 1, "where": {"a": "x"}}, {"value": {"cuda": 2, "cpu": 3}}]
    assert [meaning(cases, {"a": word}, "cuda") for word in "xy"] == [1, 2]


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


@pytest.mark.parametrize(
    "path", sorted(DATA.glob("**/record.json"))[:40], ids=lambda path: path.parent.name
)
def test_an_old_record_keeps_the_key_that_it_was_written_with(path):
    content = json.loads(path.read_text())
    assert Cell.from_dict(content["cell"]).key == content["cell_key"]
