"""Published ladders: read as they are published, and forecast from their first points without a look at the others."""

import json
from pathlib import Path

import pytest

from analysis.__main__ import main
from analysis.prediction.ladders import climb, mean_errors, read_ladder

LADDERS = sorted((Path(__file__).parent / "data" / "ladders").glob("*.json"))


def read(name):
    return read_ladder(next(path for path in LADDERS if path.stem == name))


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("dgx_a100", [120.0, 19.47, 15.16, 8.90]),
        ("dgx_h100_v3.0", [57.08, 10.86, 9.11, 9.45, 5.68]),
        ("dgx_h100_v4.0", [55.86, 10.19, 5.87]),
        ("dell_xe8545", [67.33, 72.03, 72.64, 74.62]),
        ("dell_r750xa_v1.1", [136.2, 138.9, 142.8]),
    ],
)
def test_steps_follow_from_the_published_rates(name, steps):
    ladder = read(name)
    assert [ladder.step_ms(one) for one in ladder.rungs] == pytest.approx(steps, abs=0.05)


def test_the_null_model_by_hand():
    """DGX A100: 120.0 ms of 408 images, 19.47 ms of 51 on 64 GPUs; 35 images give 19.47 − 16 · 120.0 ÷ 408 = 14.76 ms."""
    found = {one.rung.nodes: one for one in climb([read("dgx_a100")])}
    assert found[128].null_ms == pytest.approx(14.76, abs=0.01)
    assert [one.null_ms / one.step_ms - 1 for one in found.values()] == pytest.approx(
        [-0.026, -0.003], abs=1e-3
    )
    (other,) = climb([read("dgx_h100_v4.0")])
    assert other.null_ms / other.step_ms - 1 == pytest.approx(-0.074, abs=1e-3)


def test_points_that_are_forecast_change_no_forecast(tmp_path):
    text = next(path for path in LADDERS if path.stem == "dell_xe8545").read_text()
    ladder = json.loads(text)
    ladder["points"][-1]["images_per_second"] /= 2
    (tmp_path / "slow.json").write_text(json.dumps(ladder))
    sound, slow = climb([read("dell_xe8545")]), climb([read_ladder(tmp_path / "slow.json")])
    assert [one.said_ms for one in slow] == [one.said_ms for one in sound]
    assert slow[-1].step_ms == pytest.approx(2 * sound[-1].step_ms)


def test_all_ladders_and_their_errors(capsys):
    """The figures of RESULTS.md; nothing is fitted to them, and not every one is within what is aimed at."""
    found = climb([read_ladder(path) for path in LADDERS])
    climbed = [one for one in found if "," in one.from_what]
    assert (len(found), len(climbed)) == (18, 12)
    said, null = mean_errors(climbed)
    assert said < 0.04 and said < null
    assert max(abs(one.said_ms / one.step_ms - 1) for one in climbed) < 0.1
    assert main(["predict", *map(str, LADDERS)]) == 0
    assert "the null model's" in capsys.readouterr().out


def test_half_the_network_takes_longer():
    ladder = json.loads(
        next(path for path in LADDERS if path.stem == "dell_r750xa_v1.1").read_text()
    )
    assert ladder["network"] == "1x12.5GB/s,14us"
    fast, slow = read("dell_r750xa_v3.0_3_2xopa100"), read("dell_r750xa_v3.0_1_opa100")
    crossed = [one for one in climb([slow, fast]) if one.from_what == "opa100"]
    assert all(one.said_ms < one.null_ms for one in crossed) and len(crossed) == 3


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("{", "no ladder"), ("[]", "no ladder"), ("{}", "points is no list"), ("\xff", "no ladder"),
     ('{"system":"","round":"","gpus_per_node":8,"points":[{"nodes":1,"batch_size":8,"images_per_second":1e999},'
     '{"nodes":2,"batch_size":8,"images_per_second":9}],"network":"fast"}', "images_per_second is inf")],
)  # fmt: skip
def test_a_file_that_is_no_ladder(text, sentence, tmp_path, capsys):
    path = tmp_path / "ladder.json"
    path.write_text(text, encoding="latin-1")
    assert main(["predict", str(path)]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1
    assert main(["predict", str(LADDERS[0]), "--holdout", "size"]) == 2
    assert "needs the folder of a study" in capsys.readouterr().err
