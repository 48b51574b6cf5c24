"""The reader of p2pBandwidthLatencyTest: older and newer forms, and damage. Captures are in tests/golden/p2p.txt."""

import json
import random
import time

import pytest
from build import DATA
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.__main__ import main
from analysis.input_files import UnreadableInput
from analysis.native.p2p import parse_matrices

BUDGET = settings(derandomize=True, max_examples=40, deadline=None, database=None)


def capture(name):
    return (DATA / f"p2p_{name}.txt").read_text()


A100 = capture("a100_pcie_x4")


def only(text):
    (run,) = parse_matrices(text)
    return run


def matrix(title, word, *rows):
    columns = "".join(f"{column:6d} " for column in range(len(rows[0])))
    lines = [
        "".join([f"{number:6d} ", *(f"{value:6.2f} " for value in row)])
        for number, row in enumerate(rows)
    ]
    return f"{title}\n   {word}{columns}\n" + "\n".join(lines) + "\n"


def test_titles_without_writes_and_of_p2p_read():
    text = ""
    for title, word, *rows in (
        ("Unidirectional P2P=Enabled Bandwidth Matrix (GB/s)", "D\\D", (900, 1.5), (1.25, 900)),
        ("Unidirectional P2P=Enabled Bandwidth (P2P Reads) Matrix (GB/s)", "D\\D", (900, 2.5), (2.25, 900)),
        ("P2P=Enabled Latency Matrix (us)", "GPU", (3, 4), (5, 6)),
        ("P2P=Enabled Latency (P2P Reads) Matrix (us)", "GPU", (7, 8), (9, 10)),
    ):  # fmt: skip
        text += matrix(title, word, *rows)
    assert only(text).to_json()["matrices"] == {
        "unidirectional_enabled": [[900, 1.5], [1.25, 900]],
        "unidirectional_enabled_reads": [[900, 2.5], [2.25, 900]],
        "latency_gpu_enabled": [[3, 4], [5, 6]],
        "latency_gpu_enabled_reads": [[7, 8], [9, 10]],
    }


def test_indented_quotes_log_lines_and_carriage_returns_change_nothing():
    whole = only(A100).to_json()
    lines = A100.splitlines(keepends=True)
    for text in (
        "".join("    " + line for line in lines),
        "kernel: Xid 79\n1.00 2.00\n".join(lines),
        A100.replace("\n", "\r\n"),
    ):
        assert only(text).to_json() == whole


def test_several_runs_in_one_file():
    rows = A100[A100.index("Unidirectional P2P=D") :]
    for text in (A100 * 3, A100 + rows + rows):
        runs = parse_matrices(text)
        assert [run.entries for run in runs] == [only(A100).entries] * 3


def test_unknown_figures_are_null_and_devices_may_be_a_selection():
    text = "P2P=Disabled Latency Matrix (us)\n   CPU     2     5\n     2   1.00    nan \n     5    inf   2.00 \n"
    assert only(text).to_json()["matrices"] == {"latency_cpu_disabled": [[1.0, None], [None, 2.0]]}
    assert [device["id"] for device in only(text).to_json()["devices"]] == [2, 5]


def test_contradictions_about_access_are_told():
    run = only(A100.replace("     0\t     1     1", "     0\t     1     0"))
    note = "line 24: access of 0 to 1 contradicts an earlier line; the earlier one is kept"
    assert run.notes == [note]
    refused = only(A100.replace("Device=1 CAN Access", "Device=1 CANNOT Access"))
    assert refused.to_json()["access"]["0-1"] is False


def values_of(run):
    found = set()
    for name, some in run.entries.items():
        found |= {(name, *pair, value) for pair, value in some.items()}
    return found


TRUE = values_of(only(A100))


def entries(text):
    """The figures of a text; none where it is refused with a sentence."""
    try:
        runs = parse_matrices(text)
    except UnreadableInput as error:
        assert str(error).startswith("expected the output of p2pBandwidthLatencyTest")
        return set()
    json.dumps([run.to_json() for run in runs], allow_nan=False)
    return set().union(*map(values_of, runs))


@BUDGET
@given(st.integers(0, len(A100)))
def test_a_text_cut_at_any_byte_has_only_true_figures(end):
    assert entries(A100[:end]) <= TRUE
    assert entries(A100[end:]) <= TRUE


@pytest.mark.parametrize("lost", range(0, A100.count("\n"), 3))
def test_a_lost_line_moves_no_figure_to_another_matrix(lost):
    lines = A100.splitlines(keepends=True)
    assert entries("".join(lines[:lost] + lines[lost + 1 :])) <= TRUE


@BUDGET
@given(st.randoms(use_true_random=False))
def test_torn_and_foreign_lines_never_make_a_figure(source: random.Random):
    kept = []
    for line in A100.splitlines(keepends=True):
        if source.random() < 0.15:  # another process writes in the middle of a line
            cut = source.randrange(len(line))
            kept += [line[:cut] + "host:1:2 [0] NCCL INFO 2.00 3.00\n", line[cut:]]
        else:
            kept.append(line)
    assert entries("".join(kept)) <= TRUE


@pytest.mark.parametrize("piece", [" ", "1 ", "1.00 ", "Device: 1, ", "P2P=", "0 1.00  ", "GPU 0 "])
def test_the_time_is_linear_in_the_length(piece):
    begin = time.process_time()
    entries(A100[: A100.index("     1  21.40")] + piece * 20000 + "\n" + A100)
    assert time.process_time() - begin < 1


def test_a_matrix_whose_head_is_lost_joins_no_other():
    first = matrix("P2P=Disabled Latency Matrix (us)", "GPU", (1, 2), (3, 4))
    run = only(first + "     0   9.00   8.00 \n")
    assert run.entries == only(first).entries
    note = "line 5: row 0 has no header of its own; it and the rows after it are left out"
    assert run.notes[0] == note


def test_short_long_and_cut_rows_are_told():
    title = "Bidirectional P2P=Enabled Bandwidth Matrix (GB/s)"
    text = matrix(title, "D\\D", *[(1.0, 2.0, 3.0, 4.0)] * 4)
    for good, bad in (
        ("     1   1.00 ", "     1 "),
        ("     2   1.00", "     2   1.0"),
        ("     3 ", "     7 "),
    ):
        text = text.replace(good, bad)
    run = only(text.replace("     7 \n", "     3 \n"))  # the header's last column
    assert list(run.entries["bidirectional_enabled"]) == [(0, column) for column in range(4)]
    assert run.notes[:2] == [
        "3 cut or torn row(s) left out, the first in line 4", "bidirectional_enabled has no row 1, 2, 3"
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["p2p_h200_x2.txt", "p2p_h200_x2_sm.txt"])
def test_a_text_cut_anywhere_has_every_value_or_says_what_it_lacks(name):
    runs = (DATA / name).read_text().split("[P2P (Peer")
    text = f"[P2P (Peer{runs[1]}"
    whole = only(text)
    assert whole.notes == []
    silent = []
    for cut in range(len(text)):
        try:
            run = only(text[:cut])
        except UnreadableInput:
            continue
        assert all(
            values.items() <= whole.entries[of].items() for of, values in run.entries.items()
        )
        if run.entries != whole.entries and not run.notes:
            silent.append(cut)
    assert silent == []
    again = parse_matrices(text + text[: text.index("Unidirectional")])
    assert len(again) == 1 and "a run without a matrix" in again[0].notes[-1]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the text is empty"),
        ("\n \n", "the text is empty"),
        ("hello\n", "line 1 begins 'hello'"),
        (A100[: A100.index("Unidirectional P2P=D")], "line 1 looks like this output, but no matrix follows"),
        (A100[: A100.index("     0 1508")], "the matrix unidirectional_disabled has no whole row"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_and_where(text, sentence):
    with pytest.raises(UnreadableInput) as raised:
        parse_matrices(text)
    head = "expected the output of p2pBandwidthLatencyTest: a title such as"
    assert str(raised.value).startswith(head) and sentence in str(raised.value)


def test_the_command_prints_every_run(capsys, tmp_path):
    """What each capture says, and what is refused, is in tests/golden."""
    twice = tmp_path / "twice.txt"
    twice.write_text(A100 * 2)
    assert main(["p2p", "--json", str(twice)]) == 0
    whole = only(A100).to_json()
    assert json.loads(capsys.readouterr().out) == whole | {"repeats": [whole]}
