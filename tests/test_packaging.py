"""The shape of the project: who may import whom, what lies at the top, and what an installation holds."""

import ast
import fnmatch
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# The design's arrows: a package, and what of ours it may import.
ARROWS = {
    "conf": ("conf",),
    "trainers": ("trainers", "conf"),
    "benchmarks": ("benchmarks", "trainers", "conf"),
    "launch": ("launch", "conf", "analysis", "benchmarks.record", "benchmarks.request"),
    "analysis": ("analysis", "conf", "benchmarks.record"),
}
WITHOUT_TORCH = ("conf", "launch", "analysis")
TOP = {
    "launch.py",
    "conf",
    "trainers",
    "benchmarks",
    "launch",
    "analysis",
    "tests",
    "pyproject.toml",
    "README.md",
    "LICENSE",
}
MADE = {"outputs", "__pycache__", "ringside.egg-info"}  # by runs and by an editable installation; ignored by git
MODULES = sorted(path for package in ARROWS for path in (ROOT / package).rglob("*.py"))


def is_module(name):
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imported(path):
    """Every module that a file imports, at any depth; `from package import module` is package.module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if is_module(full) else node.module


def within(name, package):
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows(path):
    package = path.relative_to(ROOT).parts[0]
    for name in imported(path):
        if name.split(".")[0] in ARROWS or name == "launch":
            assert any(within(name, allowed) for allowed in ARROWS[package]), f"{package} may not import {name}"
        if package in WITHOUT_TORCH:
            assert name.split(".")[0] not in ("torch", "torchvision", "timm"), f"{package} may not import {name}"
        assert name.split(".")[0] != "tests"


def test_the_record_needs_only_the_standard_library():
    for path in (ROOT / "benchmarks" / "record").glob("*.py"):
        names = {name for name in imported(path) if not within(name, "benchmarks.record")}
        assert {name.split(".")[0] for name in names} <= set(sys.stdlib_module_names)


def test_the_entry_is_short_and_sees_only_conf_and_launch():
    names = {name.split(".")[0] for name in imported(ROOT / "launch.py")}
    assert names & (set(ARROWS) | {"torch"}) == {"conf", "launch"}
    assert len((ROOT / "launch.py").read_text().splitlines()) < 80


def loaded(statement, *names):
    """Which of some modules a fresh interpreter has after a statement."""
    script = f"import sys\n{statement}\nprint(*[name for name in {names!r} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT / "tests",
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.split()


def test_the_supervising_process_never_loads_torch():
    statement = (
        "import launch.sweep, launch.__main__, analysis.__main__, conf.cell, conf.hydra_errors, conf.command_line"
    )
    assert loaded(statement, "torch", "torchvision", "trainers", "benchmarks.rank.worker", "launch.sweep") == [
        "launch.sweep"
    ]


def test_the_top_level_is_fixed():
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert found - MADE <= TOP
    for name in TOP - {"README.md", "LICENSE"}:
        assert (ROOT / name).exists()
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {"/outputs/", "__pycache__/", "*.egg-info/"} <= set(ignored)


def test_tests_are_flat():
    inside = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()} - {"__pycache__"}
    assert inside == {"data"}
    assert not (ROOT / "tests" / "__init__.py").exists()


def test_no_test_file_imports_another():
    for path in (ROOT / "tests").glob("*.py"):
        written = path.read_text(encoding="utf-8")  # also in the programs that a test hands to another process
        assert not re.search(r"^\s*(from|import) +test_", written, re.MULTILINE), f"{path.name} imports a test file"


def test_the_package_list_is_explicit_and_complete():
    find = PROJECT["tool"]["setuptools"]["packages"]["find"]
    assert find["namespaces"] is False
    have = {str(path.parent.relative_to(ROOT)).replace("/", ".") for path in MODULES if path.name == "__init__.py"}
    listed = {name for name in have if any(fnmatch.fnmatchcase(name, pattern) for pattern in find["include"])}
    assert listed == have >= set(ARROWS)
    assert all(pattern.split(".")[0] in ARROWS for pattern in find["include"])
    # A folder of modules without __init__.py would be left out of an installation without a word.
    assert {str(path.parent.relative_to(ROOT)).replace("/", ".") for path in MODULES} == have


def test_package_data_holds_every_yaml_of_the_configuration():
    data = PROJECT["tool"]["setuptools"]["package-data"]
    for package in ARROWS:
        held = {path for pattern in data.get(package, []) for path in (ROOT / package).glob(pattern)}
        others = {p for p in (ROOT / package).rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc", ".md")}
        assert others <= held
    assert ROOT / "conf" / "config.yaml" in {path for pattern in data["conf"] for path in (ROOT / "conf").glob(pattern)}


def test_the_project_is_an_application_with_its_extras():
    project = PROJECT["project"]
    assert project["name"] == "ringside"
    assert "Private :: Do Not Upload" in project["classifiers"]
    assert {"test", "timm"} <= set(project["optional-dependencies"])
    assert project["requires-python"] == ">=3.10"


def test_every_third_party_import_is_a_dependency():
    names = {
        "hydra": "hydra-core",
        "omegaconf": "hydra-core",
        "pynvml": "nvidia-ml-py",
        "mlflow": "mlflow-skinny",
        "cuda": "cuda-bindings",
        "triton": "torch",  # its own dependency where there is CUDA
    }
    declared = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["timm"]]
    declared = {re.split(r"[<>=!~\[; ]", text)[0].lower() for text in declared}
    used = {name.split(".")[0] for path in [*MODULES, ROOT / "launch.py"] for name in imported(path)}
    foreign = used - set(sys.stdlib_module_names) - set(ARROWS)
    assert {names.get(name, name) for name in foreign} <= declared


def test_every_module_says_what_it_is():
    for path in MODULES:
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path
