"""The shape of the project: who imports whom, what lies at the top, what an installation holds."""

import ast
import collections
import fnmatch
import functools
import graphlib
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from build import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Modules of benchmarks that processes without torch use.
WITHOUT_RANKS = (
    *("benchmarks.record", "benchmarks.agent", "benchmarks.request", "benchmarks.derived"),
    *("benchmarks.*.request", "benchmarks.*.derive", "benchmarks.timing.statistics"),
)
# The design's arrows: a package, and what of ours it may import.
ARROWS = {
    "conf": ("conf",),
    "trainers": ("trainers", "conf"),
    "benchmarks": ("benchmarks", "trainers", "conf"),
    "launch": ("launch", "conf", "analysis", *WITHOUT_RANKS),
    "analysis": ("analysis", "conf", *WITHOUT_RANKS),
}
# The arrows inside a package: a folder, and the others that it may import, and what those may.
FOLDER_ARROWS = {
    "analysis": ("analysis.notebook",),
    "analysis.notebook": ("analysis.report",),
    "analysis.bundle": ("analysis.report",),
    "analysis.commands": (
        "analysis.bundle",
        "analysis.report",
        "analysis.verification",
        "analysis.prediction",
    ),
    "analysis.report": ("analysis.verification", "analysis.native", "analysis.prediction"),
    "analysis.verification": ("analysis.validity", "analysis.trace"),
    "analysis.validity": ("analysis.nccl", "analysis.prediction"),
    "analysis.prediction": ("analysis.findings",),
    "analysis.findings": ("analysis.study", "analysis.topology"),
    "analysis.study": (),
    "analysis.native": (),
    "analysis.topology": (),
    "analysis.trace": (),
    "analysis.nccl": (),
    "launch.__main__": ("launch.observe", "launch.tracking"),
    "launch.observe": ("launch.engines", "launch.tracking"),
    "launch.help": ("launch.hydra_errors", "launch.machine"),
    "launch.hydra_errors": (),
    "launch.sweep": ("launch.display", "launch.run_cell", "launch.tracking", "launch.compose"),
    "launch.display": ("launch.plan", "launch.supervision"),
    "launch.compose": ("launch.machine",),
    "launch.run_cell": ("launch.plan", "launch.profiled_pass"),
    "launch.profiled_pass": ("launch.nsys", "launch.supervision", "launch.study"),
    "launch.plan": ("launch.nsys", "launch.study", "launch.tracking"),
    "launch.nsys": ("launch.machine",),
    "launch.tracking": ("launch.study",),
    "launch.supervision": ("launch.engines",),
    "launch.study": ("launch.engines",),
    "launch.engines": ("launch.machine",),
    "launch.machine": (),
    "benchmarks.jacobi": ("benchmarks.collectives", "benchmarks.timing"),
    "benchmarks.collectives": ("benchmarks.timing",),
    "benchmarks.host_link": ("benchmarks.timing",),
    "benchmarks.p2p": ("benchmarks.timing",),
    "benchmarks.script": ("benchmarks.collectives", "benchmarks.training"),
    "benchmarks.training": ("benchmarks.timing",),
    "benchmarks.timing": ("benchmarks.rank",),
    "benchmarks.rank": ("benchmarks.agent",),
    "benchmarks.agent": ("benchmarks.record",),
    "benchmarks.record": (),
    "trainers.step": ("trainers.compile_passes",),
    "trainers.compile_passes": (),
    "trainers.strategies": ("trainers.kvstore",),
    "trainers.kvstore": (),
}
# Modules beside the folders that every folder of their package may import; they import no folder.
FOR_ALL = {
    "analysis": ("console", "cost", "input_files", "text"),
    "benchmarks": ("request", "path_facts", "derived"),
    "trainers": (
        "batches",
        "collectives",
        "comm_hooks",
        "cuda_graph",
        "memory",
        "models",
        "needed_memory",
        "optimizers",
        "process",
        "reference_probes",
        "strategy",
    ),
}
MOST_LINES, FEWEST_LINES, MOST_FILES = 600, 20, 15
# Files that are short for a reason.
SHORT: dict[str, str] = {}
WITHOUT_TORCH = ("conf", "launch", "analysis")
TORCH = {"torch", "torchvision", "timm"}
TOP = {"conf", "trainers", "benchmarks", "launch", "analysis", "tests"}
TOP |= {"launch.py", "pyproject.toml", "README.md", "LICENSE"}
# By runs and by an editable installation; ignored by git.
MADE = {"outputs", "__pycache__", "ringside.egg-info"}
MODULES = sorted(path for package in ARROWS for path in (ROOT / package).rglob("*.py"))


def is_module(name):
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


@functools.cache
def imported(path):
    """Every module that a file imports; `from package import module` is package.module."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.append(full if is_module(full) else node.module)
    return tuple(names)


def within(name, package):
    return name == package or name.startswith(f"{package}.")


def matches(name, pattern):
    return fnmatch.fnmatchcase(name, pattern) or within(name, pattern)


@pytest.mark.parametrize("package", ARROWS)
def test_imports_follow_the_arrows(package):
    wrong = set()
    for path in (ROOT / package).rglob("*.py"):
        for name in imported(path):
            first = name.split(".")[0]
            if first in ARROWS and not any(matches(name, one) for one in ARROWS[package]):
                wrong.add((path, name))
            if first == "tests" or (package in WITHOUT_TORCH and first in TORCH):
                wrong.add((path, name))
    assert wrong == set()


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def import_graph():
    """{module: modules of ours that it imports}."""
    ours = {module_name(path): path for path in MODULES}
    return {name: ours.keys() & set(imported(path)) for name, path in ours.items()}


def folder_of(name):
    """The folder of a package in which a module lies, or the module itself beside the folders."""
    return ".".join(name.split(".")[:2])


def below(folder):
    """The folders that a folder may import."""
    return {name for under in FOLDER_ARROWS[folder] for name in (under, *below(under))}


def allowed(folder, other):
    """Whether a folder, or a module beside the folders, may import another of its package."""
    package, name = other.split(".")[:2]
    if folder in FOLDER_ARROWS:
        return other in below(folder) or name in FOR_ALL.get(package, ())
    return other not in FOLDER_ARROWS


def test_folders_of_a_package_import_only_those_below_them():
    wrong = set()
    for module, names in import_graph().items():
        folder, package = folder_of(module), module.split(".")[0]
        for name in names:
            other = folder_of(name)
            is_of_another = within(name, package) and other not in (folder, package)
            if is_of_another and not allowed(folder, other):
                wrong.add((module, name))
    assert wrong == set(), "these imports go against FOLDER_ARROWS"


def test_the_arrows_name_every_folder_and_nothing_else():
    folders = set()
    for path in MODULES:
        if len(path.relative_to(ROOT).parts) > 2:
            folders.add(folder_of(module_name(path)))
    assert folders <= set(FOLDER_ARROWS), "a new folder has a line in FOLDER_ARROWS"
    assert all(is_module(name) for name in FOLDER_ARROWS), "what is gone has none"


def test_no_modules_import_each_other_in_a_circle():
    graphlib.TopologicalSorter(import_graph()).prepare()  # CycleError names the circle


def test_what_processes_without_torch_use_never_leads_to_torch():
    graph, paths = import_graph(), {module_name(path): path for path in MODULES}
    ahead, reached = set(), set()
    for pattern in WITHOUT_RANKS:
        ahead |= set(fnmatch.filter(graph, pattern))
    while ahead:
        reached |= ahead
        ahead = set().union(*(graph[module] for module in ahead)) - reached
    for module in reached:
        foreign = {name.split(".")[0] for name in imported(paths[module])}
        assert not foreign & {*TORCH, "trainers"}, module


def folder_name(path):
    return ".".join(path.parent.relative_to(ROOT).parts)


def lines_of(path):
    return len(path.read_text(encoding="utf-8").splitlines())


def test_files_are_neither_long_nor_tiny():
    files = {str(path.relative_to(ROOT)): lines_of(path) for path in MODULES}
    long = {name for name, lines in files.items() if lines > MOST_LINES}
    assert long == set(), f"a file has at most {MOST_LINES} lines"
    tiny = {name for name, lines in files.items() if lines < FEWEST_LINES}
    tiny -= {name for name in tiny if name.endswith("__init__.py")}
    assert tiny <= set(SHORT), f"a file has at least {FEWEST_LINES} lines, or a reason in SHORT"
    assert set(SHORT) - tiny == set(), "these are long enough or gone: remove them from SHORT"


def test_a_folder_holds_few_files():
    count = collections.Counter(str(path.parent.relative_to(ROOT)) for path in MODULES)
    assert not {folder: files for folder, files in count.items() if files > MOST_FILES}


def test_a_class_name_has_one_meaning():
    places = defaultdict(list)
    for path in MODULES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_the_record_needs_only_the_standard_library_and_msgspec():
    own = ("benchmarks.record", "conf.cell", "conf.options")  # a record holds its cell
    paths = [*(ROOT / "benchmarks" / "record").glob("*.py")]
    paths += [ROOT / "conf" / "cell.py", ROOT / "conf" / "options.py"]
    for path in paths:
        names = {name for name in imported(path) if not any(within(name, one) for one in own)}
        assert {name.split(".")[0] for name in names} <= {*sys.stdlib_module_names, "msgspec"}, path


def test_the_entry_is_short_and_sees_only_conf_and_launch():
    names = {name.split(".")[0] for name in imported(ROOT / "launch.py")}
    assert names & (set(ARROWS) | {"torch"}) == {"conf", "launch"}
    assert len((ROOT / "launch.py").read_text().splitlines()) < 90


def loaded(statement, *names):
    """Which of some modules a fresh interpreter has after a statement."""
    script = f"import sys\n{statement}\nprint(*[name for name in {names!r} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    options = {"cwd": ROOT / "tests", "env": environment, "timeout": 60, "check": True}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    return done.stdout.split()


def test_the_supervising_process_never_loads_torch():
    ours = "launch.sweep, launch.__main__, launch.hydra_errors, analysis.__main__, conf.cell"
    names = ("torch", "torchvision", "numpy", "trainers", "benchmarks.rank.worker", "launch.sweep")
    assert loaded(f"import {ours}, conf.command_line", *names) == ["launch.sweep"]


def test_the_interface_for_notebooks_loads_nothing_before_it_is_used():
    names = "numpy scipy pandas matplotlib jinja2 rich torch analysis.report analysis"
    assert loaded("from analysis import open_study", *names.split()) == ["analysis"]


def test_the_top_level_is_fixed():
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert found - MADE <= TOP
    for name in TOP:
        assert (ROOT / name).exists()
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {"/outputs/", "__pycache__/", "*.egg-info/"} <= set(ignored)


def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 153
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert len(links) > 10
    for link in links:
        assert (ROOT / link).exists(), link


def test_tests_are_flat():
    inside = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()} - {"__pycache__"}
    assert inside == {"data", "golden"}
    assert not (ROOT / "tests" / "__init__.py").exists()


def test_no_test_file_imports_another():
    """Also not in the programs that a test hands to another process."""
    for path in (ROOT / "tests").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(from|import) +test_", text, re.MULTILINE), path.name


def test_the_package_list_is_explicit_and_complete():
    find = PROJECT["tool"]["setuptools"]["packages"]["find"]
    assert find["namespaces"] is False
    have = {folder_name(path) for path in MODULES if path.name == "__init__.py"}
    listed = set()
    for pattern in find["include"]:
        listed |= set(fnmatch.filter(have, pattern))
    assert listed == have >= set(ARROWS)
    assert all(pattern.split(".")[0] in ARROWS for pattern in find["include"])
    # A folder of modules without __init__.py would be left out of an installation without a word.
    assert {folder_name(path) for path in MODULES} == have


def test_package_data_holds_every_yaml_of_the_configuration():
    data = PROJECT["tool"]["setuptools"]["package-data"]
    held = set()
    for package, patterns in data.items():
        for pattern in patterns:
            held |= set((ROOT / package).glob(pattern))
    for package in ARROWS:
        for path in filter(Path.is_file, (ROOT / package).rglob("*")):
            assert path in held or path.suffix in (".py", ".pyc", ".md"), path
    assert ROOT / "conf" / "config.yaml" in held


def test_the_project_is_an_application_with_its_extras():
    project = PROJECT["project"]
    assert project["name"] == "ringside"
    assert "Private :: Do Not Upload" in project["classifiers"]
    assert {"test", "timm", "notebook", "slurm"} <= set(project["optional-dependencies"])
    assert project["requires-python"] == ">=3.10"


def test_every_third_party_import_is_a_dependency():
    names = {
        "hydra": "hydra-core",
        "omegaconf": "hydra-core",
        "pynvml": "nvidia-ml-py",
        "mlflow": "mlflow-skinny",
        "cuda": "cuda-bindings",
        "yaml": "pyyaml",
        "triton": "torch",  # its own dependency where there is CUDA
    }
    extras = PROJECT["project"]["optional-dependencies"]
    declared = [*PROJECT["project"]["dependencies"], *extras["timm"]]
    declared += [*extras["notebook"], *extras["slurm"]]
    declared = {re.split(r"[<>=!~\[; ]", text)[0].lower() for text in declared}
    used = set()
    for path in [*MODULES, ROOT / "launch.py"]:
        used |= {name.split(".")[0] for name in imported(path)}
    foreign = used - set(sys.stdlib_module_names) - set(ARROWS)
    assert {names.get(name, name) for name in foreign} <= declared


def test_every_module_says_what_it_is():
    for path in MODULES:
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path


def test_every_refusal_says_what_was_expected_in_the_same_plain_word():
    other = re.compile(r"[\"(;:] ?accepted (is|are|with|without|on|here|together|alone)\b")
    for path in MODULES:
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not other.search(line), (path.name, line)
