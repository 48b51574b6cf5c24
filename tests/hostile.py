"""Hostile requests, drawn from a grammar: command lines and the YAML files of a study that they name.

What is drawn is at most foolish, never dangerous to run: a `_target_` that is obeyed would make a file called `obeyed`.
"""

import dataclasses

from hypothesis import strategies as some

OBEYED = "obeyed"  # a file of this name is proof that something was executed
MODULE = f"from pathlib import Path\nPath(__file__).with_name('{OBEYED}').touch()\ndef build(*a, **k):\n    return 1\n"

OPTIONS_TEXT = """
gpus nodes model model.name model.builder model.library model.options model.options.x model.gpu.image_size strategy
strategy.name strategy.bucket_cap_mb strategy.comm_hook strategy._target_ strategy.accepts strategy.new benchmark
benchmark.name benchmark.max_seconds benchmark.min_iterations benchmark.windows benchmark.keys nccl nccl.p2p_level nccl.algo
nccl.proto nccl.ib_hca nccl.min_nchannels nccl.other nccl.other.NCCL_CHECKS_DISABLE nccl.other.LD_PRELOAD nccl.net_plugin
optimizer optimizer.lr profiler tracking tracking.uri tracking.experiment tracking.enabled engine engine.start_timeout_s
engine.silence_timeout_s engine.stop_grace_s engine.cell_timeout_s validity.noise_limit validity.strict device batch_size
global_batch_size image_size precision optimize channels_last seed study output_dir waterfall report repeats noise_pairs
resume wait topology tuning_pass sample_gpus experiment hydra.run.dir hydra.sweep.dir hydra.output_subdir hydra.job.chdir
hydra.job.env_set.LD_PRELOAD hydra/launcher hydra/sweeper hydra/job_logging hydra.job_logging hydra.hydra_logging
hydra.searchpath hydra.callbacks.x hydra.launcher hydra.sweeper.params hydra defaults _target_ __class__ . .. = + ~ ++
model..name model. .model
"""
OPTIONS = OPTIONS_TEXT.split()

WORDS = [
    "", " ", "''", '""', "null", "None", "true", "auto", "nan", "NaN", ".nan", "inf", "-inf", "1e999", "-0", "0", "-1",
    "1.5", "1e-400", "9" * 30, "9" * 5000, "0x10", "1_000", "٣", "²", "½", "é", "日本", "\u202eevil", "\u2066a\u2069",
    "\ufeff", "\ud800", "\0", "a\0b", "\x1b]0;x\a", "\x1b[2J", "\x9b31m", "\r", "a\nb", "\t", "\b\b\b", "%s%n%x",
    "$(touch obeyed)", "`touch obeyed`", "; touch obeyed", "| touch obeyed", "&& touch obeyed", "../x",
    "../../etc/passwd", "/etc/passwd", "/", "~", "~root", "~nobody/x", ".", "..", "./", "//", "a/b", "link", "link/x",
    "file", "file/x", "/dev/zero", "/dev/full", "/proc/self/mem", "/proc/1/cwd", "CON", "-", "-m", "--help", "@file",
    "a@b", "file:///etc/passwd", "sqlite:///", "sqlite:////etc/passwd", "sqlite:///link", "sqlite://:memory:",
    "sqlite:///file", "ftp://x", "http://", "http://me:pw@h", "javascript:alert(1)", "postgresql://u:p@h/db",
    "mlflow.db", "mlartifacts", "os.system", "obey.build", "obey:build", "builtins.eval", "__import__('os')",
    "${oc.env:HOME}", "${oc.env:X,y}", "${hydra:runtime.cwd}", "${model}", "${.}", "${", "}", "${oc.decode:1}",
    "${study}", "???", "*", "?", "[", "]", "{", "}", "[]", "{}", "[[[]]]", "{a:{b:{c:1}}}", "{a:1,a:2}", "[1,2",
    "{a: [}", ",", ",,", "1,1", "1,,2", "a=b", "==", "\\", "'", '"', "'a", "\\'", "a b", "range(0,3)",
    "range(0,1000000000)", "range(0,1e30)", "range(1,2,0)", "range(3,1,1)", "interval(0,1)", "choice(1,2)", "glob(*)",
    "glob(", "sort(3,1)", "shuffle(1,2)", "int(1.5)", "str(1)", "float(x)", "bool(7)", "cast(1)", "tag(a,1)",
    "extend_list(1)", "resnet50", "nccl_allreduce", "throughput", "fp32", "LOC", "0,1", "0+1", "all", "pairs", "scale",
    "best:2", "classes:9", "0-3", "0,0", "-1,2", "99999999999999999999", "GPU-x", "each,each",
    "<script>alert(1)</script>", "{{7*7}}", "=cmd|'/C calc'!A0", "hf_" + 30 * "a",
]  # fmt: skip
LONG = [
    "a" * 100_000, "[" * 100_000, "{" * 50_000 + "}" * 50_000, "1," * 50_000 + "1", "'" * 100_001, "\\" * 99_999,
    "é" * 100_000, "a=" * 50_000, "${" * 33_000, "0+1," * 25_000 + "0", " " * 100_000, "-" * 100_000, "a." * 50_000,
    "(" * 100_000,
]  # fmt: skip
FLAGS_TEXT = """
-m --multirun -r --run -h --help --hydra-help --version --resolve -sc --shell-completion -c --cfg --cfg=job --cfg=hydra --cfg=all
-p --package --package=model -cp --config-path --config-path=/etc --config-path=.. -cn --config-name --config-name=nope
--config-name=../x -cd --config-dir --config-dir= --config-dir=/nowhere --config-dir=file --config-dir=.. --config-dir=link
-i --info
--info=all --info=config --info=plugins --info=defaults --experimental-rerun --experimental-rerun=file -x --nope --  - @file
--dry_run -mm -m=1 --multirun=x
"""
FLAGS = FLAGS_TEXT.split()


@dataclasses.dataclass(frozen=True)
class Request:
    """A command line, and the files that lie in its `--config-dir study`, by path."""

    arguments: tuple[str, ...]
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)


WORD, OPTION = some.sampled_from(WORDS), some.sampled_from(OPTIONS)
JOINED = some.builds(
    str.join,
    some.sampled_from(("", ",", "+", " ", "/", ":")),
    some.lists(WORD, min_size=1, max_size=3),
)
VALUE = JOINED | JOINED | JOINED | some.sampled_from(LONG)
SIGN = some.sampled_from(("", "+", "++", "~", "+~"))
PACKAGE = some.sampled_from(("", "@model", "@_global_", "@:x", "@a:b"))
EQUALS = some.sampled_from(("=", "", "==", " = ", ":"))
ONLY_THE_VALUE_IS_ODD = some.builds("{}={}".format, OPTION, WORD)  # it comes further
ARGUMENT = (
    ONLY_THE_VALUE_IS_ODD
    | ONLY_THE_VALUE_IS_ODD
    | some.builds("{}{}{}{}{}".format, SIGN, OPTION, PACKAGE, EQUALS, VALUE)
    | VALUE
    | some.sampled_from(FLAGS)
)
COMMANDS = some.builds(Request, some.lists(ARGUMENT, min_size=1, max_size=3).map(tuple))


# --- study YAMLs ----------------------------------------------------------------------------------------------------

STRATEGY = """\
name: mine
_target_: obey.build
size: 4
text: auto
accepts:
  size: {least: 1, most: 8, whole: true}
  text: {words: [auto, a]}
auto:
  text: {cuda: a, cpu: a}
"""
EXPERIMENT = (
    "# @package _global_\ndefaults:\n  - override /strategy: none\nstudy: mine\ngpus: [0]\n"
)


def _bomb(levels):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for n in range(1, levels):
        lines.append(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]")
    return "\n".join(lines)


def _merges():
    lines = ["a0: &a0 {x: 1}"]
    for n in range(1, 12):
        lines.append(f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]")
    return "\n".join(lines)


SNIPPETS = [
    _bomb(6), _bomb(9), _bomb(30), _merges(), "a: &a [*a]", "a: &a\n  b: *a", "a: *nowhere",
    "a: " + "[" * 10, "a: " + "[" * 300, "a: " + "[" * 5000, "a: " + "{b: " * 300 + "1" + "}" * 300,
    "a: " + "[" * 900 + "]" * 900, "\n".join(" " * n + "a:" for n in range(300)), "name: one\nname: two",
    "? [1, 2]\n: 3", "1: 2", "null: 2", "a: !!python/object/apply:os.system ['touch obeyed']",
    "a: !!python/name:os.system", "a: !!python/object/apply:pathlib.Path [obeyed]", "a: !!binary |\n  AAAA", "a: !x 1",
    "_target_: os.system", "_target_: obey.build", "_target_: 7", "_target_: " + "a." * 2000 + "b",
    "_target_: ../obey.build", "_target_: ''", "_args_: ['touch obeyed']", "_partial_: true", "_recursive_: true",
    "code: {resolve: os.system}", "code: {refuse: obey.build, section: os.system}", "code: {derive: 'obey.build'}",
    "code: 7", "accepts: 7", "accepts: {size: 7}", "accepts: {size: {least: .nan, most: x}}", "conflicts: [[[]]]",
    "conflicts: [{size: 4}]", "auto: {text: {as: nowhere}}", "auto: {text: [{value: 1, where: {x: 1}}]}",
    "compared: {}", "shared_memory: maybe", "trains: 3", "defaults: [mine]", "defaults: 7",
    "defaults:\n  - /experiment: mine", "defaults:\n  - override hydra/launcher: nope", "defaults:\n  - ../../x",
    "defaults:\n  - /etc/passwd", "defaults:\n  - _self_\n  - _self_",
    "hydra:\n  job:\n    env_set: {LD_PRELOAD: obeyed.so}", "hydra:\n  job: {chdir: true}", "hydra:\n  run: {dir: /}",
    "hydra:\n  output_subdir: ../../x", "hydra: 7", "hydra:\n  callbacks:\n    x: {_target_: obey.build}",
    "hydra:\n  launcher: {_target_: obey.build}", "hydra:\n  sweeper: {_target_: obey.build}",
    "hydra:\n  searchpath: [pkg://obey, file:///etc]", "hydra:\n  sweeper:\n    params: {seed: 'range(0,1000000000)'}",
    "hydra:\n  mode: MULTIRUN",
    "hydra:\n  job_logging:\n    handlers: {x: {class: logging.FileHandler, filename: obeyed}}", "a: ${oc.env:HOME}",
    "study: ${hydra:runtime.cwd}", "a: ${a}", "a: ${b}\nb: ${a}", "a: ${oc.create:${oc.decode:'{a:1}'}}", "a: ${",
    "a: .inf", "a: .nan", "a: " + "9" * 6000, "a: 1e999999", "a: 0o777", "a: 1:2:3:4:5.5", "a: \"\\0\\e[2J\\u202e\"",
    "\"\\e[2J\": 1", "a: |\n  " + "x" * 100_000, "\tq: 1", "a: b: c", "a: [", "a: 'x", "%YAML 9.9\n---\na: 1",
    "--- 1\n--- 2", "a: " + "1, " * 2, "- 1", "just text", "7", "~", "- a: 1\n- b: 2", "size: null", "size: [1]",
    "size: {a: 1}",
    "model: {library: python, builder: 'obey:build'}", "gpus: ${gpus}", "dry_run: false",
]  # fmt: skip
RAW = [
    b"", b"\0" * 100, b"\xff\xfe\x00", b"\xef\xbb\xbfname: mine\n", "name: mine\n".encode("utf-16"), bytes(range(256)),
    b"\x1f\x8b\x08", b"name: mine\r\n", b"a: \x80", b"\x1b[2J: 1\n", b"x" * (2 << 20), b"a: 1\n" * 50_000,
    b"[1," * 2000,
]  # fmt: skip


SNIPPET = (
    some.sampled_from(SNIPPETS)
    | some.builds("{}: {!r}".format, some.sampled_from(("study", "output_dir")) | OPTION, WORD)
    | some.builds("tracking:\n  uri: {!r}".format, WORD)
    | some.builds("model:\n  library: python\n  builder: {!r}".format, WORD)
)


@some.composite
def _studies(draw):
    """A strategy, benchmark, model or experiment of its own, damaged by a snippet or two."""
    group = draw(some.sampled_from(("strategy", "experiment", "benchmark", "model")))
    name = draw(
        some.sampled_from(("mine", "nccl_allreduce", "\x1b[2J", "a b", "-x", ".x", "..", "é"))
    )
    text = EXPERIMENT if group == "experiment" else STRATEGY
    for snippet in draw(some.lists(SNIPPET, min_size=1, max_size=2)):
        key = snippet.partition(":")[0]
        kept = [line for line in text.splitlines() if not line.startswith(f"{key}:")]
        text = "\n".join([*kept, snippet, ""])
    content = draw(some.just(text.encode("utf-8", "surrogatepass")) | some.sampled_from(RAW))
    sign = "+" if group == "experiment" else draw(some.sampled_from(("", "+")))
    arguments = [
        "--config-dir=study",
        f"{sign}{group}={name}",
        *draw(some.lists(ARGUMENT, max_size=1)),
    ]
    return Request(tuple(arguments), {f"{group}/{name}.yaml": content})


REQUESTS = COMMANDS | COMMANDS | _studies()
