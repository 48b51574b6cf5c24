"""Comparing two outputs of the native tools: what differs, what is noise, what cannot be compared."""

import json
import re
from pathlib import Path

import pytest

from analysis.__main__ import main
from analysis.commands.native_difference import compare_measurements, read_measurement
from analysis.errors import UnreadableInput

DATA = Path(__file__).parent / "data"
A100 = (DATA / "p2p_a100_pcie_x4.txt").read_text()
H200 = (DATA / "nccl_tests_h200_x8.txt").read_text()
DEFAULT = H200[
    H200.index("## all_reduce_perf -b 8 -e 4G -f 2 -g 8") : H200.index("## NCCL_P2P_LEVEL")
]
LOC = H200[
    H200.index("## NCCL_P2P_LEVEL=LOC all_reduce_perf -b 8 -e 1G -f 4 -g 8") : H200.index(
        "## NCCL_ALGO=Tree"
    )
]


def result(a, b, *tolerances):
    return compare_measurements(read_measurement(a), read_measurement(b), *tolerances)


def scaled(text, count, factor):
    """The table with both times of the row of `count` elements multiplied, and its bandwidths to match."""

    def change(line):
        words = line.split()
        if line.startswith("#") or words[1:2] != [str(count)]:
            return line
        for at in (5, 9):
            time = float(words[at]) * factor
            words[at : at + 3] = (
                f"{time:.2f}",
                f"{int(words[0]) / time / 1e3:.2f}",
                f"{int(words[0]) / time / 1e3 * 1.75:.2f}",
            )
        return " ".join(words)

    return "\n".join(map(change, text.split("\n")))


def test_equal_files_do_not_differ():
    for text, count in ((A100, 128), (DEFAULT, 60), (H200, 334), (DEFAULT + A100, 188)):
        same = result(text, text)
        assert (same.compared, same.differ, same.only_a, same.only_b, same.notes) == (
            count,
            [],
            [],
            [],
            [],
        )


def test_entries_of_a_matrix_differ_beyond_the_tolerance_of_their_kind():
    changed = A100.replace(" 275.07", " 283.07").replace(" 275.51", " 285.51")  # 2.9 % and 3.6 %
    changed = changed.replace(" 2.25 ", " 2.45 ").replace(" 2.22 ", " 2.52 ")  # 8.9 % and 13.5 %
    differ = result(A100, changed).differ
    assert [(one.entry.name, one.a, one.b, one.better) for one in differ] == [
        ("latency_gpu_enabled 1->0", 2.22, 2.52, False), ("unidirectional_enabled 1->0", 275.51, 285.51, True),
    ]  # fmt: skip
    assert differ[1].ratio == pytest.approx(1.0363, abs=1e-4)
    assert len(result(A100, changed, 0.02, 0.05).differ) == 4
    assert result(A100, changed, 0.05, 0.2).differ == []


def test_rows_of_a_table_differ_by_time_and_small_messages_are_latencies():
    slow = scaled(scaled(DEFAULT, 1 << 26, 1.05), 1024, 1.05)
    found = result(DEFAULT, slow)
    assert [(one.entry.name, one.better) for one in found.differ] == [
        ("all_reduce on 8 ranks, 268435456 B float sum, out of place", False),
        ("all_reduce on 8 ranks, 268435456 B float sum, in place", False),
    ]
    whole = found.differ[0].as_json()
    assert whole["ratio"] == pytest.approx(1.05, abs=1e-3) and whole["busbw_b"] < whole["busbw_a"]
    assert len(result(DEFAULT, slow, 0.03, 0.03).differ) == 4


def test_the_scatter_of_repetitions_is_no_difference():
    low, high = A100.replace(" 275.07", " 250.07"), A100.replace(" 275.07", " 300.07")
    assert [one.entry.name for one in result(A100, low).differ] == ["unidirectional_enabled 0->1"]
    assert result(high + low, low).differ == []  # 250 to 300 has the 250 in it
    apart = result(high + A100, low + low)
    assert [(one.entry.values, one.other.values) for one in apart.differ] == [
        ([300.07, 275.07], [250.07, 250.07])
    ]


def test_a_setting_is_compared_with_its_absence_and_with_itself():
    found = result(DEFAULT, LOC)
    assert found.compared == 28 and len(found.only_a) == 32
    assert found.notes[1:] == ["all_reduce on 8 ranks: no setting against NCCL_P2P_LEVEL=LOC"]
    assert found.notes[0].startswith(
        "6 of 19 differences: messages of at most 64 KiB, whose single measurements are bimodal"
    )
    assert len(found.differ) == 19
    both = result(DEFAULT + LOC, LOC + DEFAULT)
    assert (both.compared, both.differ, both.notes) == (88, [], [])
    one = result(DEFAULT + LOC, LOC)
    assert (one.compared, one.differ, len(one.only_a)) == (28, [], 60)


def test_notes_of_the_files_and_other_gpus_are_told():
    other = A100.replace("NVIDIA A100 80GB PCIe", "NVIDIA H200").replace(
        "     3  21.49  21.66  21.60 1511.12", "     3  21.49"
    )
    found = result(A100, other)
    assert found.compared == 124 and len(found.only_a) == 4
    assert found.notes == [
        "different GPUs: NVIDIA A100 80GB PCIe against NVIDIA H200",
        "B: 1 cut or torn row(s) left out, the first in line 33", "B: unidirectional_disabled has no row 3",
    ]  # fmt: skip


def test_a_zero_has_no_ratio():
    found = result(A100, A100.replace(" 275.07", "   0.00"))
    assert [(one.b, one.ratio) for one in found.differ] == [(0.0, 0.0)]
    assert [
        (one.a, one.ratio) for one in result(A100.replace(" 275.07", "   0.00"), A100).differ
    ] == [(0.0, None)]


@pytest.mark.parametrize(
    ("a", "b", "sentence"),
    [
        (
            A100,
            DEFAULT,
            "A holds matrices of p2p; B holds tables of nccl-tests (all_reduce on 8 ranks)",
        ),
        (DEFAULT, H200[H200.index("## sendrecv_perf") :], "nothing in common"),
        (
            A100[: A100.index("Bidirectional")],
            (DATA / "p2p_dgx_a100_row0.txt").read_text(),
            "nothing in common",
        ),
    ],
)
def test_nothing_in_common_is_a_sentence(a, b, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        result(a, b)


@pytest.mark.parametrize("tolerance", [-0.1, float("nan"), float("inf")])
def test_a_tolerance_is_a_part_of_one(tolerance):
    with pytest.raises(ValueError, match="accepted is a number from 0"):
        result(A100, A100, tolerance)


def test_foreign_text_names_what_was_expected_of_both_kinds():
    with pytest.raises(
        UnreadableInput, match=r"accepted is nccl-tests' output.*; or accepted is the output of p2p"
    ):
        read_measurement("hello\n")


def test_the_command_prints_differences_and_json(capsys, tmp_path):
    files = {
        "a": A100,
        "b": A100.replace(" 275.07", " 300.07"),
        "default": DEFAULT,
        "loc": LOC,
        "empty": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    a, b, default, loc, empty = (str(tmp_path / name) for name in files)
    assert main(["compare", a, b]) == 0
    out = capsys.readouterr().out
    assert "unidirectional_enabled 0->1" in out and "1.091" in out and "faster" in out
    assert (
        "1 of 128 entries differ by more than the tolerance (3 %, of latencies 10 %): B is faster in 1"
        in out
    )
    assert (
        "These are single measurements" in out
        and "beyond noise" not in out
        and "bimodal" not in out
    )
    assert main(["compare", a, b, "--tolerance", "0.2"]) == 0
    assert "0 of 128 entries differ" in capsys.readouterr().out
    assert main(["compare", "--json", default, loc]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert (whole["compared"], whole["tolerance"], whole["latency_tolerance"]) == (28, 0.03, 0.1)
    assert whole["differ"][0]["ratio"] > 10 and not whole["differ"][0]["better"]
    assert main(["compare", default, loc]) == 0
    assert "busbw A" in capsys.readouterr().out
    for wrong in (
        [a, default],
        [a, empty],
        [a, str(tmp_path / "absent")],
        [a, b, "--tolerance", "-1"],
    ):
        assert main(["compare", *wrong]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("python -m analysis compare: ")
        assert captured.err.count("\n") == 1


def test_single_captures_are_told_as_such_and_latencies_by_the_cpu_as_bimodal():
    four, eight, two = ((DATA / f"p2p_h200_x{gpus}.txt").read_text() for gpus in (4, 8, 2))
    single = result(four, eight)
    by_cpu = sum("latency_cpu" in one.entry.name for one in single.differ)
    assert single.single and by_cpu > 20
    (note,) = [note for note in single.notes if "bimodal" in note]
    assert note.startswith(
        f"{by_cpu} of {len(single.differ)} differences: latencies by the CPU's clock"
    )
    repeated = result(two, two)  # three runs each
    assert not repeated.single and not repeated.notes


def test_records_of_collectives_are_read_as_tables_of_nccl_tests(capsys):
    """One cell beside the native tool on two other GPUs, beside itself, and damaged."""
    path = DATA / "h200_x4" / "links" / "collectives-gpus0-1-07a8cfe4cc" / "record.json"
    text, native = path.read_text(), (DATA / "nccl_tests_h200_x2.txt").read_text()
    same = result(text, text)
    assert (same.compared, same.differ, same.notes) == (28, [], [])
    found = result(text, native)
    assert found.compared == 26 and all(
        "reduce_scatter on 2 ranks" in one.entry.name for one in found.differ
    )
    assert main(["nccl-tests", str(path), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    table = json.loads(text)["tables"]["nccl-tests"]["runs"][0]
    assert (run["collective"], run["ranks"], run["nccl_version"], run["notes"]) == (
        "reduce_scatter",
        2,
        "2.28.9",
        [],
    )
    assert [row["out_of_place"]["busbw"] for row in run["rows"]] == [
        row["out_of_place"]["busbw"] for row in table["rows"]
    ]
    damaged = json.loads(text)
    del damaged["tables"]["nccl-tests"]["runs"][0]["rows"][3]["count"]
    with pytest.raises(UnreadableInput, match=r"tables\.nccl-tests is damaged"):
        read_measurement(json.dumps(damaged))
