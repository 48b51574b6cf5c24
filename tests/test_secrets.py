"""What looks like a secret is nowhere in what Ringside writes; what is a setting stays."""

import json
from pathlib import Path

import pytest
from build import make_record, words

from analysis.report.sections.conditions_section import environment as section_of_environment
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
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----"
VALUES = [
    "https://me:hunter2@host/x", "postgresql://u:p@h/db", "https://hunter2@host",
    "AKIAIOSFODNN7EXAMPLE", "ghp_" + 36 * "a", "github_pat_" + 30 * "a", "hf_" + 30 * "a",
    "sk-proj-" + 30 * "a", "xoxb-1234-abcdefgh", "nvapi-" + 30 * "a", PEM,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl", RANDOM, f"some words, then {RANDOM}",
]  # fmt: skip
UUID = "GPU-8a1f8c2e-31cd-7c6a-96b4-1c0a4f0e63d9"
SETTINGS = {
    "NCCL_P2P_LEVEL": "LOC", "NCCL_IB_PKEY": "0x7fff", "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
    "NCCL_TOPO_FILE": "/etc/topo.xml", "CUDA_VISIBLE_DEVICES": f"{UUID},MIG-{UUID}/1/0",
    "OMP_PROC_BIND": "close", "LD_PRELOAD": "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2",
    "TORCH_LOGS": "+dynamo,graph_breaks", "GOMP_CPU_AFFINITY": "0-15:1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,garbage_collection_threshold:0.8",
    "TRITON_CACHE_DIR": "/home/anna/.cache/triton/" + 2 * "0f1e2d3c4b5a69788796a5b4c3d2e1f0",
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor_JohnDoe42/fxgraph",
}  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
def test_a_value_that_looks_like_a_secret_is_left_out_whatever_its_name(value):
    around = {"NCCL_DEBUG_HARMLESS": value, "NCCL_P2P_LEVEL": "LOC"}
    assert recorded_variables(around) == {"NCCL_P2P_LEVEL": "LOC"}
    assert left_out(around) == ["NCCL_DEBUG_HARMLESS"]
    assert "NCCL_DEBUG_HARMLESS" not in scrubbed(around)
    for text in (f"strategy.x={value}", f"a sentence with {value}, which ends"):
        kept = without_secrets(text)
        assert "***" in kept and not secret_value(kept.replace("***@", "")), text


NAMES = [
    "NCCL_FAKE_SECRET", "TORCH_SECRET", "OMP_API_KEY", "GLOO_PASSWORD", "NCCL_APPKEY", "torch_auth",
    "NCCL_SESSION_COOKIE", "TRITON_ACCESS_TOKEN", "NVSHMEM_CREDENTIALS", "PYTORCH_PRIVATE_ID",
]  # fmt: skip


def test_a_name_that_looks_like_a_secret_is_left_out_and_every_setting_stays():
    for name in NAMES:
        assert is_secret(name, "plain") and recorded_variables({name: "plain"}) == {}, name
    named = {f"NCCL_{name.upper()}": "1" for name in FIELDS} | dict.fromkeys(OTHERS, "1")
    recorded = {**named, **SETTINGS}
    assert recorded_variables(recorded) == dict(sorted(recorded.items()))
    assert left_out(recorded) == []


def test_nothing_that_was_ever_measured_is_taken_for_a_secret():
    """Every text of the records of H200s: hashes, UUIDs, paths, kernels, command lines."""
    files = Path("tests/data").glob("h200_x4/**/record.json")
    found = [word for file in files for word in words(json.loads(file.read_text()))]
    texts = [word for word in found if isinstance(word, str)]
    assert len(texts) > 10_000 and [text for text in texts if secret_value(text)] == []


def test_a_record_keeps_the_command_line_and_nccls_file_without_secrets():
    for typed, kept in {
        "tracking.uri=postgresql://u:p@h/db": "tracking.uri=postgresql://***@h/db",
        f"strategy.x=hf_{30 * 'a'}": "strategy.x=***",
        "model.options.api_key=plain": "model.options.api_key=***",
        "+model.options.token=plain": "+model.options.token=***",
        "benchmark.keys=weights": "benchmark.keys=weights",
        f"gpus={UUID}": f"gpus={UUID}",
    }.items():
        assert argument_without_secrets(typed) == kept
    kept = "NCCL_P2P_LEVEL=LOC\n# a comment\nNCCL_SECRET={}\nNCCL_X={}"
    text = configuration_without_secrets(kept.format("x", RANDOM))
    assert text == kept.format("***", "***") + "\n"


def test_the_report_names_what_was_left_out():
    environment = {"variables": {"NCCL_ALGO": "Ring"}, LEFT_OUT: ["NCCL_FAKE_SECRET"]}
    record = make_record(environment=environment)
    (table,) = section_of_environment(Study.of([record]), None).tables
    assert ("variable", "NCCL_FAKE_SECRET", "left out: it looks like a secret") in table.rows


@pytest.mark.parametrize("option", ["nccl.ib_hca", "+model.options.x", "tracking.uri"])
def test_a_request_with_a_secret_is_refused_without_repeating_it(launch, option):
    code, out, err = launch(f"{option}={RANDOM}", "dry_run=true")
    assert code == 2 and RANDOM not in out + err and err.count("\n") == 1
    assert "secret" in err or "tracking.uri=***" in err


def test_a_refusal_repeats_no_secret():
    assert redact(f"launch.py: nope={RANDOM}\x1b: unknown") == r"launch.py: nope=***\x1b: unknown"
