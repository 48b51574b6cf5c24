"""benchmarks/REFERENCE.md holds every metric and every code, as the program has them."""

from analysis.__main__ import main
from analysis.commands import reference
from analysis.validity.checks import CHECKS, OTHER_CODES
from benchmarks.record.metrics import METRICS

MOST_WORDS = 2900


def test_the_reference_is_what_the_program_writes(capsys):
    assert main(["reference", "--check"]) == 0, capsys.readouterr().out


def test_another_text_is_told_and_written_anew(monkeypatch, tmp_path, capsys):
    file = tmp_path / "REFERENCE.md"
    file.write_text("old")
    monkeypatch.setattr(reference, "FILE", file)
    assert main(["reference", "--check"]) == 1
    assert "is not current" in capsys.readouterr().out
    assert main(["reference"]) == 0
    assert main(["reference", "--check"]) == 0


def test_every_metric_and_code_has_one_row_with_a_meaning():
    text = reference.reference()
    for name in METRICS:
        assert text.count("| `" + name.replace("|", "\\|") + "` |") == 1
    for code in (*(check.code for check in CHECKS), *OTHER_CODES):
        assert text.count(f"| `{code}` |") == 1
    assert all(check.meaning for check in CHECKS)
    assert len(text.split()) <= MOST_WORDS
