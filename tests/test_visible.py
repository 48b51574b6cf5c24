"""Texts of others cannot steer a terminal or a page: each way by which one is shown escapes what it holds."""

import dataclasses
import io
import itertools
import json
import xml.etree.ElementTree as ElementTree

import pytest
from build import make_record
from rich.live import Live
from rich.table import Table
from rich.text import Text

from analysis.__main__ import main as analysis
from analysis.console import SafeConsole
from analysis.report.latex import latex
from analysis.text import markdown, single_line
from analysis.topology.drawing import draw_topology
from analysis.topology.readers import read_topology
from analysis.trace.timeline import _text
from benchmarks.record import Failure
from benchmarks.record.safe_text import one_line, visible
from launch.tracking.mlflow_run import project, summary_markdown

# What a terminal or a browser would obey, and how it is shown.
INJECTED = {
    "\x1b]0;owned": r"\x1b]0;owned", "\x1b[2J": r"\x1b[2J", "\0": r"\x00", "\x9b31m": r"\x9b31m",
    "\x7f": r"\x7f", "\u202eevil": r"\u202eevil", "\u2066a\u2069": r"\u2066a\u2069",
    "\ud800": r"\ud800",
}  # fmt: skip
DROPPED = "\a\b\r\v\f"  # rich leaves them out by itself
CODES = (range(9), range(11, 32), range(127, 160), range(0x202A, 0x202F), range(0x2066, 0x206A))
OBEYED = set(map(chr, itertools.chain(*CODES)))


def assert_harmless(text):
    assert not OBEYED & set(text), ascii(text)[:500]


@pytest.mark.parametrize(("text", "shown"), INJECTED.items(), ids=ascii)
def test_a_text_is_spelled_out(text, shown):
    assert visible(f"a {text}\n\tb") == f"a {shown}\n\tb"
    assert one_line(f"a\n{text}") == rf"a\n{shown}"
    assert single_line(f"a\n{text}") == f"a {shown}"
    assert_harmless(markdown(text) + latex(single_line(text)) + _text(0, 0, text))


def test_texts_of_people_stay():
    assert visible("é 日本 ±\u202f3\u00a0%") == "é 日本 ±\u202f3\u00a0%"
    assert single_line("±\u202f3") == "±\u202f3"


def test_an_endless_text_is_cut():
    long = one_line("a" * 10_000 + "accepted")
    assert len(long) < 4_000 and " … " in long and long.endswith("accepted")
    assert single_line("a" * 999, 10) == "aaaaaaaaa…"


@pytest.mark.parametrize("form", ["text", "markup", "Text", "table", "live"])
def test_a_console_obeys_nothing(form):
    console = SafeConsole(file=io.StringIO(), width=200)
    everything = "".join(INJECTED) + DROPPED
    if form == "table":
        table = Table()
        table.add_column("name")
        table.add_row(everything)
        console.print(table)
    elif form == "live":
        with Live(Text(everything), console=console, auto_refresh=False):
            pass
    else:
        console.print(Text(everything) if form == "Text" else everything, markup=form == "markup")
    said = console.file.getvalue()
    assert_harmless(said)
    assert "".join(INJECTED.values()) in said


def test_a_colour_of_ours_stays():
    console = SafeConsole(file=io.StringIO())
    console._force_terminal, console._color_system = True, console._color_system or 1
    console.print(Text("red\x1b", "red"))
    assert console.file.getvalue().startswith("\x1b[") and r"red\x1b" in console.file.getvalue()


HOSTILE = "a \x1b]0;x\0\x9b\u202e\rb"
P2P = f"""\
Device: 0, {HOSTILE}, pciBusID: 1, pciDeviceID: 0, pciDomainID:0
Unidirectional P2P=Disabled Bandwidth Matrix (GB/s)
   D\\D     0      1
     0 100.00  10.00
     1  10.00 100.00
"""
LOG = f"""\
vm:1:1 [0] NCCL INFO NCCL version 2.28.9+cuda13.0
vm:1:1 [0] NCCL WARN {HOSTILE.replace(chr(0), "")}
vm:1:1 [0] NCCL INFO NCCL_IB_HCA set by environment to {HOSTILE.replace(chr(0), "")}
"""


@pytest.mark.parametrize(
    ("command", "text"),
    [("p2p", P2P), ("nccl-log", LOG), ("topology", HOSTILE), ("trace", HOSTILE)],
)
def test_a_command_prints_nothing_that_a_terminal_obeys(tmp_path, capsys, command, text):
    file = tmp_path / "a\x1b[31m.txt"
    file.write_text(text)
    assert analysis([command, str(file)]) in (0, 2)
    said = capsys.readouterr()
    assert r"\x1b" in said.out + said.err
    assert_harmless(said.out + said.err)


def test_drawings_of_hostile_names_are_xml(tmp_path):
    topology = read_topology("tests/data/topo_dgx1_v100.txt")
    named = [dataclasses.replace(one, name=HOSTILE) for one in topology.devices]
    draw_topology(dataclasses.replace(topology, devices=tuple(named)), tmp_path / "topology.svg")
    for file in tmp_path.glob("*.svg"):
        assert ElementTree.parse(file)
        assert_harmless(file.read_text())


def test_what_mlflow_shows_of_a_record_is_harmless():
    record = make_record(
        state="failed",
        failure=Failure("exception", 1, HOSTILE, HOSTILE),
        name=HOSTILE,
        effective={"transport": [HOSTILE]},
    )
    shown = project(record)
    assert_harmless(
        json.dumps(dataclasses.asdict(shown), ensure_ascii=False) + summary_markdown([record], {})
    )
    assert r"\x1b" in shown.tags["failure.message"]
