"""Code of the user's own: a strategy, a benchmark and a model in a folder of his."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256

import pytest
from build import ROOT
from own_user import QUIET, SHORT, import_own_code_here, records_of, user

from analysis.__main__ import main as analysis
from benchmarks.record import SCHEMA_VERSION
from conf import groups
from conf.cell import Network
from conf.options import Refused
from conf.targets import locate, locate_without_torch, sha256_of_foreign_code, source_file
from trainers import models

FILES = ROOT / "tests" / "data" / "own_code"  # src/my_package, and conf with its YAML
CONF = "--config-dir=conf"
BARRIER = (CONF, "gpus=0,1", "benchmark=barrier", "tracking=none", "validity.foreign_cpu_limit=1")


def forget_package():
    """A test may import the package into this process; the next has another of that name."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]


def with_files(folder):
    """A user with code of his own."""
    shutil.copytree(FILES, folder, dirs_exist_ok=True)
    return user(folder)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user with code of his own that has run nothing yet, in its folder; Python finds it."""
    forget_package()
    made = with_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "src"))
    yield made
    forget_package()
    groups.add_config_dir([])


@pytest.fixture
def refused(own, launch, monkeypatch):
    """Plan a request that is refused in one line; return the line."""
    import_own_code_here(monkeypatch)

    def refusal(*arguments):
        code, out, err = launch(*arguments, "device=cpu", "dry_run=true")
        assert (code, out) == (2, "") and err.startswith("launch.py: ") and err.count("\n") == 1
        return err

    return refusal


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The records of three strategies on a model of one's own; two are of one's own, and one of
    these does not compute the mean; the third is a variant of ours.
    """
    own = with_files(tmp_path_factory.mktemp("trained"))
    text = (ROOT / "conf" / "strategy" / "kvstore_device.yaml").read_text()
    text = text.replace("name: kvstore_device", "name: owners")
    text = text.replace("reduce: sharded ", "reduce: owner ")
    (own.folder / "conf" / "strategy" / "owners.yaml").write_text(text)
    model = ("model.library=python", "model.builder=my_package.models:build")
    asked = ("-m", CONF, "gpus=0,1", "strategy=one_by_one,half,owners")
    rows = records_of(own, own(*asked, *SHORT, *model, "+model.options.width=8", *QUIET))
    return own, {content["cell"]["strategy"]["name"]: (row, content) for row, content in rows}


@pytest.fixture(scope="module")
def timed_barrier(tmp_path_factory):
    """A benchmark of one's own has run, and the report has its section."""
    own = with_files(tmp_path_factory.mktemp("barrier"))
    ((record, content),) = records_of(own, own(*BARRIER))
    return own, record, content


@pytest.fixture
def copied(timed_barrier, tmp_path):
    """A copy of the folder in which the benchmark has run, to change its files."""
    return user(shutil.copytree(timed_barrier[0].folder, tmp_path / "copy"))


def hash_of(own, name):
    return sha256((own.folder / "src" / "my_package" / name).read_bytes()).hexdigest()


def test_a_strategy_of_ones_own_trains(trained):
    own, found = trained
    record, content = found["one_by_one"]
    assert record.state == "finished" and record.validity.verdict != "invalid", record.validity
    assert record.checks["replicas_equal"] is True
    assert record.checks["gradient_error"] <= record.checks["gradient_tolerance"]
    assert content["cell"]["strategy"] == {"name": "one_by_one", "scale": 1.0, "rounds": 2}
    target = "my_package.strategies.OneByOne"
    expected = {"target": target, "sha256": hash_of(own, "strategies.py")}
    assert content["cell"]["declared"]["strategy"] == expected
    assert content["schema_version"] == SCHEMA_VERSION


def test_a_strategy_that_computes_something_else_is_invalid_and_a_variant_is_a_yaml_alone(trained):
    record, _ = trained[1]["half"]
    assert record.validity.verdict == "invalid" and "gradient_not_mean" in record.validity.codes
    record, content = trained[1]["owners"]
    assert record.state == "finished" and record.validity.verdict != "invalid"
    assert content["cell"]["strategy"]["reduce"] == "owner"
    # Ringside's own code is known by its commit.
    assert "sha256" not in content["cell"]["declared"]["strategy"]


def test_a_model_of_ones_own_trains(trained):
    own, found = trained
    for record, content in found.values():
        assert record.name.startswith("models.build · ") and record.state == "finished"
        assert content["model"]["parameters"] == (9 + 1) * 8 + (8 + 1) * 10
        assert content["cell"]["declared"]["model"]["sha256"] == hash_of(own, "models.py")


def test_a_benchmark_of_ones_own_runs(timed_barrier):
    own, record, content = timed_barrier
    assert record.metrics["barrier/us"] > 0 and record.metrics["barrier/rounds"] == 7
    assert record.validity.verdict == "valid", record.validity
    assert content["cell"]["benchmark"] == {"name": "barrier", "rounds": 7}
    declared = content["cell"]["declared"]["benchmark"]
    assert declared["sha256"] == hash_of(own, "barrier/measure.py")
    assert declared["section"] == "my_package.barrier.section.section"


def report_again(own, monkeypatch, is_found=True, is_declared=True):
    """What a report says where a YAML names the code or only the record does, and Python finds it or not."""
    forget_package()
    more = ["--config-dir", str(own.folder / "conf")] if is_declared else []
    with monkeypatch.context() as patch:
        if is_found:
            patch.syspath_prepend(str(own.folder / "src"))
        assert analysis(["report", str(own.folder / "outputs" / "default"), *more]) == 0
    groups.add_config_dir([])
    forget_package()
    return (own.folder / "outputs" / "default" / "report" / "report.md").read_text()


def test_a_benchmark_of_ones_own_brings_its_section_of_the_report(
    timed_barrier, copied, monkeypatch
):
    own, record = copied, timed_barrier[1]
    folder = own.folder / "outputs" / "default" / "report"
    us = record.metrics["barrier/us"]
    assert (folder / "tables" / "barriers.csv").read_text() == f"us\n{us}\n"
    page = (folder / "index.html").read_text()
    places = [page.index(f'<section id="{anchor}">') for anchor in ("barrier", "validity", "cells")]
    assert f"The shortest barrier took {us:.9f} µs." in page and places == sorted(places)
    assert '<a href="#barrier">Barriers</a>' in page
    written = (folder / "report.md").read_text()
    assert report_again(own, monkeypatch) == written
    name = "my\\_package.barrier.section.section"
    text = report_again(own, monkeypatch, is_declared=False)
    assert f"This section was not made: {name} is not run (a record names it, and no YAML" in text
    text = report_again(own, monkeypatch, is_found=False)
    assert f"This section was not made: {name}: cannot be imported (ModuleNotFound" in text
    assert "## Every run" in text and not (folder / "tables" / "barriers.csv").exists()
    fails = "def section(study, findings):\n    return 1 / 0\n"
    (own.folder / "src" / "my_package" / "barrier" / "section.py").write_text(fails)
    text = report_again(own, monkeypatch)
    assert f"{name} failed (ZeroDivisionError: division by zero)." in text


def test_a_builder_that_returns_no_module_says_so(own):
    network = Network("mine", "python", "my_package.models:nothing", 1, 10, 28, 0.0, {"width": 8})
    said = r"models:nothing: returned str; expected a torch\.nn\.Module"
    with pytest.raises(TypeError, match=said):
        models.build(network)


def test_a_changed_file_is_another_cell(timed_barrier, copied):
    cell, path = (
        timed_barrier[1].cell,
        copied.folder / "src" / "my_package" / "barrier" / "measure.py",
    )
    path.write_text(path.read_text().replace("1e6 * min", "1e6 * max"))
    changed = cell.declared["benchmark"] | {"sha256": hash_of(copied, "barrier/measure.py")}
    assert changed != cell.declared["benchmark"]
    assert replace(cell, declared=cell.declared | {"benchmark": changed}).key != cell.key


OWN_MODEL = "model.library=python model.builder="
IN_CONF = f"{CONF} "
OF_A_FILE = "only the YAML file of"
WRONG = {
    f"{OWN_MODEL}my_package.models:biuld": "models.py defines no biuld",
    f"{OWN_MODEL}trainers.models:biuld": "models.py defines no biuld",
    f"{OWN_MODEL}my_package.absent:build": "finds no module my_package.absent",
    f"{OWN_MODEL}absent:build": "model.builder=absent:build: Python finds no module",
    f"{OWN_MODEL}build": "model.builder=build: expected a name that Python can",
    f"{OWN_MODEL}os.path:../x": "expected a name that Python can import",
    "strategy._target_=os.system": f"strategy._target_=os.system: {OF_A_FILE} a strategy",
    "++strategy._target_=os.system": f"strategy._target_=os.system: {OF_A_FILE}",
    "++benchmark._target_=os.system": f"benchmark._target_=os.system: {OF_A_FILE}",
    "~strategy._target_": f"~strategy._target_: {OF_A_FILE}",
    "++benchmark.code.refuse=os.system": "only the YAML file of a benchmark can set code.refuse",
    "++strategy={_target_:os.system}": "leave out the +",
    "++experiment=first": "++experiment=first: write +experiment=first",
    "strategy={_target_:os.system}": "only the file strategy/nccl_allreduce.yaml can set it",
    f"{IN_CONF}strategy=one_by_one strategy.scale=3": "strategy.scale=3: expected a number",
    f"{IN_CONF}strategy=one_by_one strategy.size=3": "strategy.size=3: unknown option of",
    f"{IN_CONF}strategy=one_by_won": "strategy=one_by_won: did you mean one_by_one?",
    f"{IN_CONF}gpus=0,1,2 benchmark=barrier": "a barrier of three is too much for me",
    f"{IN_CONF}benchmark=barrier benchmark.rounds=0": "benchmark.rounds=0: expected auto or an integer",
    "--config-dir nowhere strategy=none": "nowhere",
    "strategy.name=none": "expected the whole file, strategy=none, or a YAML of your own",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_what_cannot_be_is_one_sentence(refused, arguments):
    assert WRONG[arguments] in refused(*arguments.split())


MINE = "name: mine\n_target_: "
SIZE = f"{MINE}x.y\nsize: 1\naccepts: "
WRONG_STRATEGIES = {
    "name: mine\nsize: 1\n": "mine.yaml: has no _target_, the dotted name of the class or function",
    f"{MINE}my_package.strategies.OneByTwo\n": "strategies.py defines no OneByTwo",
    f"{MINE}my_package.absent.Strategy\n": "Python finds no module my_package.absent",
    f"{SIZE}[size]\n": "mine.yaml: accepts is ['size']: Expected `object`, got `array`",
    "name: none_of_that\n_target_: x.y\n": "strategy.name=none_of_that: did you mean none or one_by_one?",
    f"{SIZE}{{size: {{least: 1{'0' * 400}}}}}\n": ": Number out of range",
    f"{MINE}x.y\nsize: {'[' * 60}\n": "mine.yaml: deeper than 50 levels",
    f"{SIZE}{{size: {{words: [1.5]}}}}\n": "strategy.size=1: expected 1.5",
    "a: [1\nb: }": "conf/strategy/mine.yaml, line 2: is not YAML (",
}


@pytest.mark.parametrize("yaml", WRONG_STRATEGIES, ids=WRONG_STRATEGIES.values())
def test_a_wrong_yaml_is_one_sentence(own, refused, yaml):
    (own.folder / "conf" / "strategy" / "mine.yaml").write_text(yaml)
    assert WRONG_STRATEGIES[yaml] in refused(CONF, "strategy=mine")


def test_code_is_found_without_running_it(own):
    source, inner = own.folder / "src", own.folder / "src" / "space" / "inner"
    (source / "my_package" / "models.py").write_text("raise SystemExit('run')\nclass Net: ...\n")
    inner.mkdir(parents=True)  # packages without __init__.py
    (inner / "code.py").write_text("try:\n    from json import dumps as build\nfinally: ...\n")
    assert source_file("x", "my_package.models:Net").name == "models.py"
    assert source_file("x", "space.inner.code.build").parent.name == "inner"
    assert "my_package" not in sys.modules
    assert sha256_of_foreign_code("x", "trainers.strategies.none.NoExchange") is None
    assert locate("conf.targets:locate") is locate
    with pytest.raises(Refused, match=r"absent\.name: cannot be imported"):
        locate_without_torch("absent.name")


def test_torch_in_the_launching_process_is_refused(own, monkeypatch):
    """All code of a YAML is imported by one function."""
    (own.folder / "src" / "torch.py").write_text("")
    monkeypatch.delitem(sys.modules, "torch")
    said = "my_package.with_torch.refuse: imports torch; the launching process calls it"
    with pytest.raises(Refused, match=said):
        locate_without_torch("my_package.with_torch.refuse")


def test_version_says_what_ringside_runs_on():
    command = [sys.executable, "-X", "importtime", "launch.py", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)
    said = {line[:14].strip(): line[15:] for line in done.stdout.splitlines()}
    names = "Ringside, commit, record schema, Python, torch, NCCL, NVIDIA driver"
    assert ", ".join(said) == names and said["record schema"] == str(SCHEMA_VERSION)
    assert said["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert said["Ringside"] == "0.1.0" and all(said.values())


OBJECT = "Expected `object`, got"
TEXT = "Expected `str`, got"
WRONG_FILES = {
    "auto: {rounds: [3]}": f"auto.rounds is 3: {OBJECT} `int`",
    "auto: {rounds: [{value: 1, where: {size: 1}}]}": "auto.rounds.where names 'size', which is",
    "auto: {rounds: {as: size}}": "auto.rounds.as names 'size', which is not an option",
    "auto: {size: 1}": "auto names 'size', which is not an option",
    "accepts: {rounds: 3}": f"accepts.rounds is 3: {OBJECT} `int`",
    "accepts: {rounds: {least: one}}": "accepts.rounds is {'least': 'one'}: Expected `float",
    "accepts: {rounds: {words: 3}}": "accepts.rounds is {'words': 3}: Expected `array`, got `int`",
    "accepts: {rounds: {most_of: 3}}": "{'most_of': 3}: Object contains unknown field `most_of`",
    "accepts: {size: {least: 1}}": "accepts names 'size', which is not an option",
    "conflicts: [3]": f"conflicts is [3]: {OBJECT} `int`",
    "conflicts: [{size: 1}]": "conflicts names 'size', which is not an option",
    "omit_if_default: [[3]]": f"omit_if_default is [[3]]: {TEXT} `array`",
    "omit_if_default: [size]": "omit_if_default names 'size', of which auto does not say what it",
    "trains: 0": "trains is 0: Expected `bool`, got `int`",
    "code: {derive: 3}": f"code is {{'derive': 3}}: {TEXT} `int`",
    "code: {run: a.b}": "code is {'run': 'a.b'}: Object contains unknown field `run`",
    "code: {derive: my_package.barrier.measure.none}": "measure.py defines no none",
    "code: {derive: my_package.nothing.derive}": "nothing.derive: Python finds no module",
    "code: {refuse: my_package.barrier.measure.run}": "barrier.measure.run: raised TypeError: ",
    "code: {resolve: my_package.barrier.measure.none}": "measure.none: cannot be imported",
    "compared: {metric: barrier/us}": "Object missing required field `less_is_better`",
    "compared: {metric: 3}": f"compared is {{'metric': 3}}: {TEXT} `int`",
    "3: 4": "3 is not the name of an option",
    "off: 4": "False is not the name of an option; put a name that YAML reads as something else in",
}


@pytest.mark.parametrize("content", WRONG_FILES)
def test_a_wrong_file_of_a_benchmark_is_one_sentence(own, refused, content):
    text = "name: wrong\n_target_: my_package.barrier.measure.run\ntrains: false\nrounds: 3\n"
    if content.startswith("trains"):
        text = text.replace("trains: false\n", "")
    (own.folder / "conf" / "benchmark" / "wrong.yaml").write_text(f"{text}{content}\n")
    assert WRONG_FILES[content] in refused(CONF, "benchmark=wrong")


def test_every_name_in_a_yaml_of_ours_is_there():
    for group in groups.WITH_TARGET:
        for name in groups.choices(group):
            one = groups.choice(group, name)
            assert one.is_ours
            for dotted in (one.rules["_target_"], *one.code.values()):
                assert callable(locate(dotted))
