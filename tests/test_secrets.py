"""What looks like a secret is nowhere in what Ringside writes; what is a setting stays."""

import gzip
import json
import zipfile
from pathlib import Path

import pytest
from build import make_record, words

from analysis.__main__ import main as analysis_main
from analysis.report.sections.conditions_section import environment as section_of_environment
from analysis.study.provenance import LEFT_OUT
from analysis.study.study import Study
from conf.nccl import FIELDS, OTHERS
from conf.options import Refused
from conf.schema import Config
from conf.secrets import (
    argument_without_secrets,
    configuration_without_secrets,
    is_secret,
    without_secrets,
)
from launch.engines.environment import scrubbed
from launch.help import option_rows
from launch.hydra_errors import explain
from launch.machine.facts import left_out, recorded_variables

RANDOM = "wJalrXUtnFEMI0K7MDENGabPxRfiCY3EXAMPLEKEY"
# A secret of each kind, made up: the variable (or the option) that holds it, and its value. Of a
# value with words around it only the part in ⟨⟩ is secret.
KINDS = """
    NCCL_PASS hunter2-pass | TORCH_PAT hunter2-pat | NCCL_PIN 481516 | NCCL_MY_TOKEN hunter2-token
    NCCL_FAKE_SECRET hunter2-secret | OMP_API_KEY hunter2-api | GLOO_PASSWORD hunter2-password
    NCCL_APPKEY hunter2-app | TORCH_AUTH hunter2-auth | NCCL_SESSION_COOKIE hunter2-cookie
    TRITON_ACCESS_TOKEN hunter2-access | NVSHMEM_CREDENTIALS hunter2-credentials
    PYTORCH_PRIVATE_ID hunter2-private | NCCL_PASSPHRASE hunter2-phrase | OMP_PWD hunter2-pwd
    NCCL_SIGNATURE hunter2-signature | KMP_BEARER hunter2-bearer | NCCL_DSN hunter2-dsn
    NCCL_OTP 902331 | TORCH_TOKEN_2 hunter2-second | MKL_LICENSE_KEY hunter2-license
    CUBLAS_ENCRYPTION_KEY hunter2-encryption | NCCL_AUTHORIZATION hunter2-authorization
    api_key hunter2-option | access_token hunter2-camel | db.password hunter2-dotted
    NCCL_A user=me_password=⟨hunter2-inside⟩ | NCCL_B --token=⟨hunter2-argument⟩
    NCCL_C {"password":"⟨hunter2-json⟩"} | NCCL_D Authorization:_Bearer_⟨hunter2-header⟩
    NCCL_E AWS_SECRET_ACCESS_KEY=⟨hunter2-aws⟩ | NCCL_F password:_⟨hunter2-yaml⟩
    NCCL_G secret='⟨hunter2-quoted⟩' | NCCL_H https://⟨me:hunter2-url⟩@host/x
    NCCL_I postgresql://u:⟨hunter2-db⟩@h/db | NCCL_J https://⟨hunter2-user⟩@host
    NCCL_K https://host/x?a=1&sig=⟨hunter2-query⟩ | NCCL_L redis://:⟨hunter2-redis⟩@h:6379/0
    NCCL_M AKIAIOSFODNN7EXAMPLE | NCCL_N ghp_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
    NCCL_O github_pat_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa | NCCL_P hf_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
    NCCL_Q sk-proj-aaaaaaaaaaaaaaaaaaaaaaaaaaaa | NCCL_R xoxb-1234-abcdefgh
    NCCL_S nvapi-aaaaaaaaaaaaaaaaaaaaaaaaaaaa | NCCL_T glpat-aaaaaaaaaaaaaaaaaaaa
    NCCL_U AIzaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa | NCCL_V npm_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
    NCCL_W eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl | NCCL_X SG.aaaaaaaaaaaaaaaaaa.bbbbbbbbbbbbbbbbbb
    NCCL_Y dop_v1_aaaaaaaaaaaaaaaaaaaaaaaa | NCCL_Z hvs.aaaaaaaaaaaaaaaaaaaaaaaa
    NCCL_AA sk_live_aaaaaaaaaaaaaaaaaaaa | NCCL_AB dckr_pat_aaaaaaaaaaaaaaaaaaaa
    NCCL_AC pypi-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa | NCCL_AD dapi0123456789abcdef0123456789abcdef
    NCCL_AE -----BEGIN_RSA_PRIVATE_KEY-----⟨MIIE0123⟩-----END_RSA_PRIVATE_KEY-----
    NCCL_AF wJalrXUtnFEMI0K7MDENGabPxRfiCY3EXAMPLEKEY | NCCL_AG q3XnT8vLr0/Jw5Zb2Kd/YcPa7Hs1MfLp9+Bv
    NCCL_AH some_words,_then_⟨q3XnT8vLr0-Jw5-Zb2KdYcPa7Hs1Mf⟩ | NCCL_AI k3q8x1v7z2m9w4t6r5p0y3n8j1h7
    NCCL_AJ JBSW3Y2DPEHPK63PXPM5QW47ZA | NCCL_AK qWeRtYuIoPaSdFgHjKlZxCvBnM
"""


def kinds():
    """(Name, value, the secret part of it); `_` in a value of several words is a space."""
    rows = []
    for text in KINDS.replace("\n    ", " | ").strip(" |\n").split(" | "):
        name, value = text.split()
        if "⟨" in value:
            value = value.replace("_", " ").replace(
                "AWS SECRET ACCESS KEY", "AWS_SECRET_ACCESS_KEY"
            )
        secret = value.partition("⟨")[2].partition("⟩")[0] or value
        rows.append((name, value.replace("⟨", "").replace("⟩", ""), secret))
    return rows


ROWS = kinds()
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


def test_sixty_kinds_of_secrets_are_hidden_as_variable_as_option_and_in_a_text():
    assert len(ROWS) >= 60
    for name, value, secret in ROWS:
        around = {name: value, "NCCL_P2P_LEVEL": "LOC"}
        assert recorded_variables(around) == {"NCCL_P2P_LEVEL": "LOC"}, name
        assert name.islower() or (left_out(around) == [name] and name not in scrubbed(around))
        assert is_secret(name, value), name
        for text in (
            f"{name}={value}",
            f"launch.py: {name}={value}: unknown",
            f"a ({name}={value})",
        ):
            assert secret not in without_secrets(text), text
            assert without_secrets(without_secrets(text)) == without_secrets(text)
        assert secret not in argument_without_secrets(f"+model.options.{name}={value}")


def test_every_setting_and_every_option_stays():
    named = {f"NCCL_{name.upper()}": "1" for name in FIELDS} | dict.fromkeys(OTHERS, "1")
    recorded = {**named, **SETTINGS}
    assert recorded_variables(recorded) == dict(sorted(recorded.items()))
    assert left_out(recorded) == []
    options = [row[0] for row in option_rows(Config, "")] + [
        "benchmark.keys",
        "model.options.class_token",
    ]
    assert [name for name in options if is_secret(name, "weights")] == ["model.options.class_token"]
    assert not is_secret("model.options.class_token", "true")
    for setting in (
        "TOKENIZERS_PARALLELISM=false",
        "cell_key=0f8d88b6f0f6519b",
        "--signal=B:TERM@60",
        "output_dir=/etc/passwd: cannot be written",
    ):
        assert without_secrets(setting) == setting


def texts_of(path):
    """Every text of a committed file: of JSON, with the names of its fields."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", errors="replace") as file:
        lines = [file.read()] if path.suffix == ".json" else file.readlines()
    for line in lines:
        try:
            yield from filter(lambda word: isinstance(word, str), words(json.loads(line)))
        except ValueError:
            yield line


def test_no_text_of_a_committed_study_is_taken_for_a_secret():
    """Hashes, UUIDs, paths, names of kernels and models, command lines: 0 of all texts."""
    files = [path for path in Path("tests/data").glob("h200_*/**/*") if path.is_file()]
    texts = {text for path in files for text in texts_of(path)}
    assert len(texts) > 20_000
    assert [text for text in texts if without_secrets(text) != text] == []


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


REFUSED = [
    f"nccl.ib_hca={RANDOM}", f"+model.options.x={RANDOM}", f"tracking.uri={RANDOM}",
    "nccl.other.NCCL_MY_TOKEN=hunter2", "nccl.other.NCCL_CONN='password=hunter2'",
    "+model.options.api_key=hunter2", "api_key=hunter2", f"study=ghp_{36 * 'a'}",
    f"tracking.experiment=hf_{30 * 'a'}", f"+model.options.ghp_{36 * 'a'}=1",
]  # fmt: skip


@pytest.mark.parametrize("argument", REFUSED)
def test_a_request_with_a_secret_is_refused_without_repeating_it(launch, argument):
    code, out, err = launch(argument, "dry_run=true")
    assert code == 2 and err.count("\n") == 1
    assert not any(secret in out + err for secret in (RANDOM, "hunter2", 20 * "a"))
    assert "secret" in err or "=***" in err


def test_a_refusal_repeats_no_secret():
    assert explain(Refused(f"nope={RANDOM}\x1b: unknown"), []) == r"nope=***\x1b: unknown"


MODEL = """
import torch
def build(*arguments, **options):
    raise RuntimeError({!r})
"""


def test_a_real_study_holds_none_of_sixty_secrets(launch, monkeypatch, output_dir):
    """Planted in the environment and in what a rank raises and prints. The rank's own log alone,
    which no bundle holds, has what was printed."""
    secrets = {}
    for name, value, secret in ROWS:
        monkeypatch.setenv(name, value)
        secrets[name] = secret.encode()
    printed = "; ".join(f"{name}={value}" for name, value, _ in ROWS)
    Path("planted.py").write_text(MODEL.format(printed))
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.syspath_prepend(str(Path.cwd()))
    own = ["model.library=python", "model.builder=planted:build", "model=fmnist_cnn"]
    asked = ["gpus=0", "device=cpu", f"output_dir={output_dir}", "study=planted", "report=true"]
    code, out, err = launch(*own, *asked)
    assert (code, err) == (1, "") and "RuntimeError" in out
    assert analysis_main(["report", str(output_dir / "planted"), "--bundle"]) == 0
    texts = {"terminal": out.encode()}
    for path in output_dir.rglob("*"):
        if path.suffix == ".zip":
            archive = zipfile.ZipFile(path)
            texts |= {f"bundle/{name}": archive.read(name) for name in archive.namelist()}
        elif path.is_file() and "logs" not in path.parts:
            texts[str(path.relative_to(output_dir))] = path.read_bytes()
    for part in (
        "record.json",
        "index.html",
        ".csv",
        ".tex",
        "mlflow.db",
        "bundle/",
        "mlartifacts",
    ):
        assert any(part in name for name in texts), part
    for place, content in texts.items():
        if place.endswith(".gz"):
            content = gzip.decompress(content)
        shown = [name for name, secret in secrets.items() if secret in content]
        assert shown == [], place
    record = json.loads(next(output_dir.glob("planted/*/record.json")).read_text())
    assert "NCCL_PASS" in record["environment"]["left_out"]
    assert "NCCL_PASS=***" in record["failure"]["log_tail"]
