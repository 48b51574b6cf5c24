"""What looks like a secret is nowhere in what Ringside writes; what is a setting stays."""

import json
from pathlib import Path

import pytest
from build import make_record

from analysis.report.sections.conditions import environment as section_of_environment
from analysis.study.provenance import LEFT_OUT
from analysis.study.study import Study
from conf.nccl import FIELDS, OTHERS
from launch.engines.environment import scrubbed
from launch.machine.facts import left_out, recorded_variables
from launch.machine.secrets import (
    argument_without_secrets,
    configuration_without_secrets,
    is_secret,
    redact,
    secret_value,
    without_secrets,
)

RANDOM = "wJalrXUtnFEMI0K7MDENGabPxRfiCY3EXAMPLEKEY"
# Made up; each has the form of its service's tokens.
VALUES = [
    "https://me:hunter2@host/x", "postgresql://u:p@h/db", "https://hunter2@host", "AKIAIOSFODNN7EXAMPLE", "ghp_" + 36 * "a",
    "github_pat_" + 30 * "a", "hf_" + 30 * "a", "sk-proj-" + 30 * "a", "xoxb-1234-abcdefgh", "nvapi-" + 30 * "a",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
    RANDOM, f"some words, then {RANDOM}",
]  # fmt: skip
SETTINGS = {
    "NCCL_P2P_LEVEL": "LOC", "NCCL_IB_PKEY": "0x7fff", "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1", "NCCL_TOPO_FILE": "/etc/topo.xml",
    "CUDA_VISIBLE_DEVICES": "GPU-8a1f8c2e-31cd-7c6a-96b4-1c0a4f0e63d9,MIG-GPU-8a1f8c2e-31cd-7c6a-96b4-1c0a4f0e63d9/1/0",
    "OMP_PROC_BIND": "close", "LD_PRELOAD": "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2", "TORCH_LOGS": "+dynamo,graph_breaks",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,garbage_collection_threshold:0.8",
    "TRITON_CACHE_DIR": "/home/anna/.cache/triton/0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c4b5a69788796a5b4c3d2e1f0",
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor_JohnDoe42/fxgraph", "GOMP_CPU_AFFINITY": "0-15:1",
}  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
def test_a_value_that_looks_like_a_secret_is_left_out_whatever_its_name(value):
    around = {"NCCL_DEBUG_HARMLESS": value, "NCCL_P2P_LEVEL": "LOC"}
    assert recorded_variables(around) == {"NCCL_P2P_LEVEL": "LOC"} and left_out(around) == [
        "NCCL_DEBUG_HARMLESS"
    ]
    assert "NCCL_DEBUG_HARMLESS" not in scrubbed(around)
    for text in (f"strategy.x={value}", f"a sentence with {value}, which ends"):
        assert "***" in without_secrets(text) and not secret_value(
            without_secrets(text).replace("***@", "")
        ), text


@pytest.mark.parametrize(
    "name",
    ["NCCL_FAKE_SECRET", "TORCH_SECRET", "OMP_API_KEY", "GLOO_PASSWORD", "NCCL_APPKEY", "torch_auth", "NCCL_SESSION_COOKIE",
     "TRITON_ACCESS_TOKEN", "NVSHMEM_CREDENTIALS", "PYTORCH_PRIVATE_ID"],
)  # fmt: skip
def test_a_name_that_looks_like_a_secret_is_left_out_whatever_its_prefix(name):
    assert is_secret(name, "plain") and recorded_variables({name: "plain"}) == {}


def test_every_setting_stays():
    named = {f"NCCL_{name.upper()}": "1" for name in FIELDS} | dict.fromkeys(OTHERS, "1")
    recorded = {**named, **SETTINGS}
    assert (
        recorded_variables(recorded) == dict(sorted(recorded.items())) and left_out(recorded) == []
    )


def test_nothing_that_was_ever_measured_is_taken_for_a_secret():
    """Every text of the records of H200s: hashes, UUIDs, paths, kernels, command lines."""

    def texts(value):
        if isinstance(value, dict):
            value = [*value, *value.values()]
        yield from [value] if isinstance(value, str) else ()
        for one in value if isinstance(value, list) else ():
            yield from texts(one)

    files = list(Path("tests/data").glob("h200_x4/**/record.json"))
    found = [text for file in files for text in texts(json.loads(file.read_text()))]
    assert len(found) > 10_000 and [text for text in found if secret_value(text)] == []


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("tracking.uri=postgresql://u:p@h/db", "tracking.uri=postgresql://***@h/db"),
        (f"strategy.x=hf_{30 * 'a'}", "strategy.x=***"),
        ("model.options.api_key=plain", "model.options.api_key=***"),
        ("+model.options.token=plain", "+model.options.token=***"),
        ("benchmark.keys=weights", "benchmark.keys=weights"),
        (
            "gpus=GPU-8a1f8c2e-31cd-7c6a-96b4-1c0a4f0e63d9",
            "gpus=GPU-8a1f8c2e-31cd-7c6a-96b4-1c0a4f0e63d9",
        ),
    ],
)
def test_a_record_keeps_the_command_line_without_secrets(typed, kept):
    assert argument_without_secrets(typed) == kept


def test_a_configuration_file_of_nccl_is_kept_without_secrets():
    text = f"NCCL_P2P_LEVEL=LOC\n# a comment\nNCCL_SECRET=x\nNCCL_X={RANDOM}"
    assert (
        configuration_without_secrets(text)
        == "NCCL_P2P_LEVEL=LOC\n# a comment\nNCCL_SECRET=***\nNCCL_X=***\n"
    )


def test_the_report_names_what_was_left_out():
    record = make_record(
        environment={"variables": {"NCCL_ALGO": "Ring"}, LEFT_OUT: ["NCCL_FAKE_SECRET"]}
    )
    (table,) = section_of_environment(Study.of([record]), None).tables
    assert ("variable", "NCCL_FAKE_SECRET", "left out: it looks like a secret") in table.rows


@pytest.mark.parametrize("option", ["nccl.ib_hca", "+model.options.x", "tracking.uri"])
def test_a_request_with_a_secret_is_refused_without_repeating_it(launch, option):
    code, out, err = launch(f"{option}={RANDOM}", "dry_run=true")
    assert code == 2 and RANDOM not in out + err and err.count("\n") == 1
    assert "secret" in err or "tracking.uri=***" in err


def test_a_refusal_repeats_no_secret():
    assert redact(f"launch.py: nope={RANDOM}\x1b: unknown") == r"launch.py: nope=***\x1b: unknown"
