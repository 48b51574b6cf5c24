"""The reader of nccl-tests: damage, tags, several programs at once.

What captures say, and tables of 2.0 to 2.19 (tests/data/nccl_tests_tables; the collective is told
only where its table is certain), is in tests/golden/nccl_tests.txt.
"""

import json
import random
import time

import pytest
from build import DATA
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.input_files import UnreadableInput
from analysis.native.nccl_tests import parse_nccl_tests

BUDGET = settings(derandomize=True, max_examples=40, deadline=None, database=None)
H200 = (DATA / "nccl_tests_h200_x8.txt").read_text()
SHARP = (DATA / "nccl_tests_sharp_cluster.txt").read_text()


def only(text):
    (run,) = parse_nccl_tests(text)
    return run


def header(version, left):
    half = ["time", "algbw", "busbw", "error" if version < (2, 13) else "#wrong"]
    words = ["size", "count", "type", *left, *half, *half]
    head = "#\n#      out-of-place      in-place\n#  " + "  ".join(words)
    return head + "\n#   (B)  (elements)  (us)  (GB/s)\n"


def row(left, size, count, times, last, factor=1.0, dtype="float"):
    figures = ""
    for taken in times:
        algbw = size / taken / 1e3
        figures += f"  {taken:7.2f}  {algbw:6.2f}  {algbw * factor:6.2f}  {last:>5}"
    return f"{size:12d}  {count:12d}  {dtype:>6}  {left}{figures}"


def listed(count, group="Group  0 "):
    line = f"#  Rank {{0:2d}} {group}Pid  9 on host device {{0:2d}} [0000:07:00] NVIDIA H200\n"
    return "# Using devices\n" + "".join(map(line.format, range(count)))


BOTH = ["redop", "root"]
REDUCED = row("sum -1", 4 << 20, 1 << 20, (50.0, 51.0), "0", 1.75) + "\n"


def test_wrong_results_and_failures_are_told_and_unchecked_ones_are_unknown():
    failure = "node: Test NCCL failure common.cu:1017 'unhandled cuda error'"
    text = listed(2) + header((2, 17), BOTH)
    text += row("sum -1", 4 << 20, 1 << 20, (50.0, 51.0), "1e+06")
    run = only(f"{text}\n# Out of bounds values : 2 FAILED\n{failure}\n")
    assert (run.rows[0]["out_of_place"]["wrong"], run.out_of_bounds) == (1000000, 2)
    assert "wrong results: 1 row with wrong elements, 2 values out of bounds" in run.notes
    assert run.errors == [failure]
    line = row("sum -1", 4096, 1024, (9.5, 9.25), "N/A", 1.75) + "\n"
    assert only(header((2, 13), BOTH) + line).rows[0]["in_place"] == {
        "time_us": 9.25, "algbw": 0.44, "busbw": 0.77, "wrong": None, "error": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    "form",
    [
        "host:12:34 [0] NCCL INFO Channel 00/24 : 0 1 2 3\nhost:12:34 [0] NCCL WARN 3 4 5\n{}\n",
        "[1,0]<stdout>:{}\n[1,7]<stderr>:a 128  32\n",
        "    [prte-7@1,0]<stdout>: {}\n",
        " 0: {}\n 3: 8 8\n",
        "{}\r\n",
    ],
    ids=["log", "mpirun", "prte", "srun", "crlf"],
)
def test_tags_and_log_lines_between_rows_change_nothing(form):
    run = only("".join(map(form.format, SHARP.splitlines())))
    assert (run.rows, run.notes) == (only(SHARP).rows, only(SHARP).notes)


def test_programs_without_mpi_are_seen():
    text = listed(1) + header((2, 13), BOTH) + REDUCED
    run = only("".join(f"{line}\n" * 4 for line in text.splitlines()))
    assert run.ranks == 1
    for words in ("3 ranks listed more than once", "a second header"):
        assert any(words in note for note in run.notes)


def test_a_cut_list_of_ranks_and_uneven_groups_give_no_number():
    body = header((2, 13), BOTH) + row("none -1", 32768, 1024, (50.0, 51.0), "0") + "\n"
    assert only(listed(24) + "#  Rank 24 Group  0 Pid  9 on ho...\n" + body).ranks is None
    assert only(listed(8).replace("Rank  3", "Rank  9") + body).ranks is None
    two_a_process = "# nThread 1 nGpus 2 minBytes 8\n"
    assert only(two_a_process + listed(7) + body).ranks is None
    assert only(two_a_process + listed(8) + body).ranks == 8
    split = listed(4) + listed(4, group="Group  1 ").partition("\n")[2]
    assert only(split + body).ranks == 4
    uneven = only(split + listed(1, group="Group  2 ").partition("\n")[2] + body)
    assert uneven.ranks is None
    assert any("list of ranks is cut or its groups differ" in note for note in uneven.notes)


def test_lost_rows_show_in_the_average():
    lines = SHARP.splitlines(keepends=True)
    run = only("".join(lines[:-8] + lines[-4:]))
    note = "the printed average of busbw is 7.7601, but the rows give "
    assert run.avg_busbw == 7.7601 and any(note in text for text in run.notes)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("128            32 ", "128            33 "),  # a count that its size does not fit
        ("  12603   10.65", "   2603   10.65"),  # a time that lost its first digit
        ("   21.22  7e-07", "   21.22      7"),  # fits, but see below
        ("   21.22  7e-07", "   21.22  7e-0"),
        ("float     sum    23.12", "float     sum"),
        ("float     sum    23.12", "float     sum    23.12    23.12"),
        ("float     sum    23.12", "float     sum    23.1.2"),
        ("   21.22  7e-07", "   21.22  7e+999"),
    ],
)
def test_a_row_that_contradicts_itself_is_left_out(good, bad):
    assert good in SHARP
    run = only(SHARP.replace(good, bad, 1))
    if bad.endswith("7"):  # an error of 7 is an odd error, but a figure
        assert run.rows[-1]["out_of_place"]["error"] == 7
    else:
        assert len(run.rows) == 22
        assert any("1 cut or torn row(s) left out" in note for note in run.notes)


PART = H200[H200.index("## NCCL_ALGO=Tree") : H200.index("## sendrecv_perf")] + SHARP
FIGURES = {str(row) for run in parse_nccl_tests(PART) for row in run.rows}


def figures(text):
    """The rows of a text as strings; None where it is refused with a sentence."""
    try:
        runs = parse_nccl_tests(text)
    except UnreadableInput as error:
        assert str(error).startswith("expected nccl-tests' output")
        return None
    json.dumps([run.to_json() for run in runs], allow_nan=False)
    return [str(row) for run in runs for row in run.rows]


@BUDGET
@given(st.randoms(use_true_random=False))
def test_lost_torn_and_foreign_lines_never_make_a_row(source: random.Random):
    kept = []
    for line in PART.splitlines(keepends=True):
        chance = source.random()
        if 0.05 < chance < 0.15:  # another process writes in the middle of a line
            cut = source.randrange(len(line))
            kept += [line[:cut] + "host:1:2 [0] NCCL INFO Trees [0] 1/-1/-1->0->-1\n", line[cut:]]
        elif chance > 0.15:
            kept.append(line)
    rows = figures("".join(kept))
    assert rows is None or set(rows) <= FIGURES


def test_rows_of_a_run_whose_header_was_lost_join_no_other_run():
    start = H200.index("## NCCL_ALGO=Tree")
    body = H200[start:].split("#        (B)")[1].partition("\n")[2]
    whole = H200[: H200.index("## all_reduce_perf", 5)]
    run = only(whole + body[: body.index("# Out of")])
    assert len(run.rows) == 30
    assert any("14 row(s) without a header left out" in note for note in run.notes)


@pytest.mark.parametrize(
    "piece",
    ["[1", "1 ", " ", "# ", "a\\\n", "x all_reduce_perf -n 1 ", "NCCL_A=1 ", "[1,0]<stdout>:"],
)
def test_the_time_is_linear_in_the_length(piece):
    begin = time.process_time()
    figures(piece * 20000 + "\n" + PART)
    assert time.process_time() - begin < 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the text is empty"),
        ("hello\nworld\n", "line 1 begins 'hello'"),
        (SHARP[SHARP.index("         128") :], "line 1 looks like a row, but no header names"),
        (SHARP[: SHARP.index("         128")], "a run starts in line 3, but no row follows"),
        (
            listed(2) + "x: Test CUDA failure a.cu:9\n",
            "no row follows: x: Test CUDA failure a.cu:9",
        ),
        ("# size count type time\n 8 2 float 1\n", "line 2 looks like a row"),
        (header((2, 0), []) + " 8 2 float 1 1\n", "no row fits its table, the first is line 5"),
    ],
    ids=["empty", "foreign", "no header", "no row", "failure", "short header", "short row"],
)
def test_a_refusal_says_what_and_where(text, sentence):
    """tests/golden/refusals.txt has the command's."""
    with pytest.raises(UnreadableInput) as raised:
        parse_nccl_tests(text)
    assert str(raised.value).startswith("expected nccl-tests' output")
    assert sentence in str(raised.value)
