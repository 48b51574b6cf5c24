"""The page about one's own model, data and strategy: its examples run as they stand there."""

import re
import shlex
import sys
from dataclasses import replace

import pytest
import yaml
from build import ROOT, make_cell
from own_user import QUIET, SHORT, import_own_code_here, records_of, user

from analysis.__main__ import main
from analysis.prediction.calibration_data import calibrate
from analysis.prediction.distributions import constant, mean
from analysis.prediction.forecast import forecast
from analysis.prediction.link_model import DIRECT, ExchangeWire, LinkModel, TimeCurve
from analysis.study.study import Study
from conf import groups
from conf.cell import Network
from launch.plan import own_code
from launch.plan.own_code import STRATEGY, Call, own_calls

PAGE = (ROOT / "trainers" / "OWN.md").read_text(encoding="utf-8")
FILES = {name: text for name, text in re.findall(r"```\w+\n# (\S+)\n(.*?)```", PAGE, re.DOTALL)}
COMMANDS = re.findall(r"^    python launch\.py (.*)$", PAGE, re.MULTILINE)
MODULES = [name.removesuffix(".py") for name in FILES if name.endswith(".py")]


def with_page(folder):
    """A user who copied the files of the page, and has a text."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "my_text.txt").write_bytes(bytes(range(256)) * 100)
    (folder / "my_module.py").write_text("def build(classes, channels): ...\n")
    return folder


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """One cell with all three examples: a model of tokens, a text as data, a strategy."""
    folder = with_page(tmp_path_factory.mktemp("page"))
    own = user(folder, python_path=".")
    options = [option for option in SHORT if not option.startswith(("model=", "batch_size="))]
    asked = ("model=tiny_gpt", "gpus=0,1", "data=text", "strategy=one_by_one")
    done = own("--config-dir", "conf", *asked, *options, *QUIET)
    ((record, content),) = records_of(own, done)
    return record, content


def test_a_model_of_tokens_with_data_and_a_strategy_of_ones_own_holds_every_check(ran):
    record, content = ran
    assert record.state == "finished" and record.validity.verdict != "invalid", record.validity
    checks, metrics = record.checks, record.metrics
    assert checks["replicas_equal"] is True and checks["batches_differ"] is True
    assert checks["gradient_error"] <= checks["gradient_tolerance"] < checks["gradient_spread"]
    assert checks["sample"] == {"inputs": ["int64 [64]"], "targets": "int64 [64]"}
    images = 8 * 2 * metrics["step/iterations"]
    assert (metrics["throughput/images"], metrics["throughput/tokens"]) == (images, 64 * images)
    tokens_per_second = 64 * metrics["throughput/images_per_second"]
    assert metrics["throughput/tokens_per_second"] == pytest.approx(tokens_per_second)
    assert metrics["data/wait_ms"] > 0
    assert {"low", "high"} <= record.within_run["data/cost_ms"].keys()
    declared = content["cell"]["declared"]
    own_groups = {group for group, rules in declared.items() if "sha256" in rules}
    assert own_groups == {"model", "data", "strategy"}
    options = {"file": "my_text.txt"}
    loaded = {"name": "text", "loader": "my_data:load", "options": options}
    assert content["cell"]["data"] == loaded


def test_the_strategy_is_forecast_by_what_its_yaml_sends(ran):
    """It is an all-reduce after backward, so all of its exchange is tail."""
    record, content = ran
    assert content["cell"]["declared"]["strategy"]["sends"] == "ring"
    calibration = calibrate(Study.of([record]))
    cell = replace(calibration.cells[0], cost_ms=constant(9.0))  # not measured beside a loader
    sizes, times_us = (1e3, 1e6, 1e8), (20.0, 120.0, 1e4)
    curve = TimeCurve("all_reduce", ExchangeWire(DIRECT), 2, 1, sizes, times_us, "alone")
    calibration = replace(calibration, cells=(cell,), links=LinkModel((curve,)))
    query = replace(cell.query, gpus=4, members=())
    made = forecast(calibration, query)
    alone_ms = mean(calibration.links.time("all_reduce", query.sent_bytes, 4, query.wire))
    assert made.tail_ms == pytest.approx(alone_ms) and made.contention_ms == 0
    assert made.step_ms > made.tail_ms


def of_the_page(command):
    marks = pytest.mark.needs("timm") if "timm" in command else ()
    return pytest.param(command, id=" ".join(command.split()[:4]), marks=marks)


@pytest.mark.parametrize("command", [*map(of_the_page, COMMANDS)])
def test_the_commands_of_the_page_can_be_asked(command, launch, page):
    code, out, err = launch(*shlex.split(command), "device=cpu", "dry_run=true")
    assert (code, err) == (0, ""), err
    assert " · " in out


def test_the_recipe_for_ci_asks_what_can_be_asked(launch, page, capsys):
    recipe = yaml.safe_load((ROOT / "launch" / "recipes" / "ci.yml").read_text(encoding="utf-8"))
    (job,) = recipe["jobs"].values()
    *sweeps, compare = (step["run"] for step in job["steps"][1:])
    assert [command.rpartition("=")[2] for command in sweeps] == ["base", "change", "base"]
    for command in sweeps:
        asked = command.partition("launch.py ")[2].replace("$ASK", job["env"]["ASK"])
        code, _, err = launch(*shlex.split(asked), "device=cpu", "dry_run=true")
        assert (code, err) == (0, ""), err
    studies = ROOT / "tests" / "data" / "h200_x2"
    compare = compare.replace("outputs/base", f"{studies}/eager_a").partition(" >> ")[0]
    words = shlex.split(compare.replace("outputs/change", f"{studies}/eager_b"))
    assert main(words[3:]) == 3 and "INCONCLUSIVE" in capsys.readouterr().out


MODEL, DATA, STRATEGIES = "my_models.py", "my_data.py", "my_strategies.py"
STRATEGY_YAML, DATA_YAML = "conf/strategy/one_by_one.yaml", "conf/data/text.yaml"
RULE = ("sends:", "grap: true\nsends:")
NO_LOADER = ("loader: my_data:load", "")
UNEXPECTED = "got an unexpected keyword argument"
THROUGH_LAUNCH = {
    "strategy=one_by_one": (STRATEGY_YAML, *RULE, f"as OneByOne(grap=…): {UNEXPECTED} 'grap'"),
    "data=text": (DATA_YAML, *NO_LOADER, "works only with data.loader, a function of your own"),
}


@pytest.mark.parametrize("request_", THROUGH_LAUNCH)
def test_a_likely_mistake_is_one_sentence_before_anything_starts(request_, launch, page):
    file, text, instead, sentence = THROUGH_LAUNCH[request_]
    assert text in FILES[file]
    (page / file).write_text(FILES[file].replace(text, instead))
    code, out, err = launch("--config-dir", "conf", request_, "device=cpu", "dry_run=true")
    assert (code, out) == (2, ""), out + err
    assert err.startswith("launch.py: ") and err.count("\n") == 1 and sentence in err, err


def page_cell(**changed):
    """The cell that `ran` asks for, or another."""
    builder, options = "my_models:TinyGpt", {"length": 64}
    network = Network("tiny_gpt", "python", builder, 0, 0, 0, 0.0, options, "samples")
    own = {"model": builder, "data": "my_data:load", "strategy": "my_strategies.OneByOne"}
    cell = replace(
        make_cell(),
        strategy={"name": "one_by_one"},
        model=network,
        data={"name": "text", "loader": "my_data:load", "options": {"file": "my_text.txt"}},
        declared={group: {"target": target, "sha256": "0"} for group, target in own.items()},
    )
    return replace(cell, **changed)


def options(**given):
    return {"model": replace(page_cell().model, options=given)}


def loaded(**options):
    return {"data": {"name": "text", "loader": "my_data:load", "options": options}}


CLASS, IMPORT = "class OneByOne(Strategy)", "from trainers.strategy import Strategy"
BETWEEN = "class Base(Strategy): ...\n\n\nclass OneByOne(Base)"
WRAPPED = "def any_keyword(function):\n    return lambda **given: function(**given)\n\n\n"
WRAPPED += "@any_keyword\ndef load("
TORCH, EXIT = "import torch\n", "import torch\nraise SystemExit(3)\n"
SCALED = {"strategy": {"name": "one_by_one", "scale": 2.0}}
AS_IMAGES = {"model": replace(page_cell().model, inputs="images")}
# Changes of a file and of the cell that are accepted, and that are refused with a sentence.
TAKEN = [
    (MODEL, "", "", {}, ""),  # as on the page
    (STRATEGIES, CLASS, BETWEEN, {}, ""),  # an abstract class of the user's between
    (DATA, "def load(", WRAPPED, loaded(more=3), ""),  # a decorator that changes what it takes
    (STRATEGIES, IMPORT, "from trainers import strategy as seam", {}, ""),  # a base by its module
]
UNKNOWN = "NameError: name 'Strategy' is not defined"
MISTAKES = [
    (STRATEGIES, CLASS, "class OneByOne", {},
     "OneByOne is not a subclass of trainers.strategy.Strategy; expected one, or a"),
    (STRATEGIES, "def bytes_moved", "def bytes_sent", {},
     "OneByOne has no bytes_moved, as trainers.strategy.Strategy "),
    (STRATEGIES, IMPORT, "", {}, f"OneByOne: cannot be imported ({UNKNOWN})"),
    (STRATEGIES, IMPORT, "from trainers.strategies import Strategy", {},
     "cannot be imported (ImportError: cannot import name 'Strategy' from "),
    (DATA, TORCH, "import torch, absent\n", {},
     "load: cannot be imported (ModuleNotFoundError: No module named 'absent')"),
    (DATA, TORCH, EXIT, {}, "data.loader=my_data:load: cannot be imported (SystemExit: 3)"),
    (DATA, "def load(", "def lode(", {}, "data.loader=my_data:load: "),
    (MODEL, "", "", SCALED, f"is called as OneByOne(scale=…): {UNEXPECTED} 'scale'"),
    (MODEL, "class TinyGpt(OwnModel)", "class TinyGpt(nn.Module)", {},
     "TinyGpt is not a subclass of trainers.batches.OwnModel"),
    (MODEL, "def loss", "def cost", {},
     "TinyGpt has no loss, as trainers.batches.OwnModel asks for"),
    (MODEL, "", "", options(), "is called as TinyGpt(): missing a required argument: 'length'"),
    (MODEL, "", "", options(length=1, depth=3), f"(length=…, depth=…): {UNEXPECTED} 'depth'"),
    (MODEL, "", "", AS_IMAGES,
     "a model that makes its own batches is asked for with model.inputs=samples"),
    (DATA, "", "", loaded(), "world_size=…, seed=…): missing a required argument: 'file'"),
]  # fmt: skip


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A folder with the page's files, on Python's path, of which nothing is imported yet."""
    folder = with_page(tmp_path)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    import_own_code_here(monkeypatch)
    groups.add_config_dir([folder / "conf"])
    for name in MODULES:
        sys.modules.pop(name, None)  # that of another test
    yield folder
    for name in MODULES:
        sys.modules.pop(name, None)
    groups.add_config_dir([])


@pytest.mark.parametrize(("file", "text", "instead", "changed", "sentence"), TAKEN + MISTAKES)
def test_code_that_cannot_be_called_is_refused_and_nothing_else(
    file, text, instead, changed, sentence, page
):
    content = FILES[file].replace(text, instead) if text else FILES[file]
    if "seam" in instead:
        content = content.replace("(Strategy)", "(seam.Strategy)")
    (page / file).write_text(content)
    reasons = [*filter(None, map(own_code.refusal, own_calls(page_cell(**changed))))]
    assert [sentence in reason for reason in reasons] == [True] * bool(sentence), reasons


ACCEPTED = "is not a subclass of trainers.strategy.Strategy"
MAINTAINED = {
    "trainers.strategies.none.Nothing": "none.py defines no Nothing",
    "trainers.strategy.ExchangeAlone": f"ExchangeAlone {ACCEPTED}",
    "trainers.strategies.hierarchical.Hierarchical": "missing a required argument: 'bucket_cap_mb'",
}


@pytest.mark.parametrize("target", MAINTAINED)
def test_a_strategy_that_a_maintainer_adds_is_held_to_the_same(target):
    assert MAINTAINED[target] in own_code.refusal(Call("_target_", target, [], STRATEGY))


def test_every_strategy_of_ringside_passes():
    for one in (groups.choice("strategy", name) for name in groups.choices("strategy")):
        options = groups.resolved("strategy", {"name": one.name, **one.options}, "cpu", 2)
        keywords = [name for name in options if name != "name"]
        call = Call("_target_", one.rules["_target_"], keywords, STRATEGY)
        assert own_code.refusal(call) == ""
