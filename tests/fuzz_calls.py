"""How the fuzzing (tests/fuzz.py) calls each reader of foreign text, and what a reader may never do.

A call is fed with one damaged file. It returns what the reader found, as JSON values, or None where there is nothing to compare.
It raises Refusal for an error that the reader declares; anything else is a finding.
"""

import contextlib
import dataclasses
import functools
import gzip
import io
import json
import pickle
import re
import sys
import zipfile
import zlib

from fuzz_seeds import HERE, bundle_seeds, cell_files, raw_files, report_files

PACKED = ".gz"


class Refusal(Exception):
    """What a reader declares to raise, or the status 2 of a command."""


class Wrong(Exception):
    """What no reader may do: a second line on stderr, output that is no JSON, a number that a store cannot take."""


def through_command(command, suffix="", drawn=False):
    """Return a reader that is `python -m analysis COMMAND FILE --json`; now and then its table, and its drawing."""

    def read(seed, folder, number):
        path = folder / f"input{suffix}"
        path.write_bytes(seed.data)
        if number % 16 == 3:
            ran(command, str(path))
        if drawn and number % 256 == 5:
            ran(command, str(path), "--svg", str(folder / "drawing.svg"))
        text = ran(command, str(path), "--json")
        try:
            return json.loads(text, parse_constant=_no_constant)
        except ValueError as error:
            raise Wrong(f"--json printed no JSON ({error})") from None

    return read


# What Python says in a ValueError that no reader meant.
PYTHONS = re.compile(
    r"^python -m analysis [\w-]+: (?:/\S+: )?(?:invalid literal for|could not convert|.*values to unpack|.*codec can't"
    r"|.*is not in list|cannot convert|embedded null|Exceeds the limit|buffer size|operands could not|math domain)"
)


def ran(*arguments):
    """Run a command of analysis in this process and return what it printed. Raises Refusal for status 1 and 2."""
    from analysis.__main__ import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(list(arguments))
    said = err.getvalue()
    if status not in (0, 1, 2):
        raise Wrong(f"status {status}")
    if status == 2 and (said.count("\n") != 1 or not said.strip()):
        raise Wrong(f"{said.count(chr(10))} lines on stderr: {said[:300]!r}")
    if words := PYTHONS.search(said):
        raise Wrong(f"Python's words, not a sentence of the reader: {words[0]!r} in {said[:300]!r}")
    if len(said) > 20_000:
        raise Wrong(f"a sentence of {len(said)} characters")
    if status:
        raise Refusal(said)
    out.getvalue().encode()  # as a terminal would
    return out.getvalue()


def _no_constant(word):
    raise ValueError(f"{word} is no JSON")


def read_record(seed, folder, number):
    """Read one record.json as every command does."""
    from benchmarks.record import RecordError, read

    path = folder / "record.json"
    path.write_bytes(seed.data)
    try:
        return json.loads(json.dumps(dataclasses.asdict(read(path))))
    except RecordError as error:
        raise Refusal(str(error)) from None


def project_record(seed, folder, number):
    """Read a record and make what MLflow gets of it, and its rows in the notes of a sweep."""
    from benchmarks.record import RecordError, read
    from launch.study.identity import sweep_of
    from launch.tracking.note import summary_markdown
    from launch.tracking.projection import project
    from launch.tracking.sync import DAMAGED

    path = folder / "record.json"
    path.write_bytes(seed.data)
    try:
        record = read(path)
    except RecordError as error:
        raise Refusal(str(error)) from None
    try:
        made = project(record)
        sweep_of([record])
        summary_markdown([record])
    except DAMAGED as error:
        raise Refusal(str(error)) from None
    for name, _value, time, step in made.metrics:
        if not all(-(2**63) <= one < 2**63 for one in (time, step)):
            raise Wrong(f"{name}: a time or a step that no store can take: {time}, {step}")
    for one in (*made.params.values(), *made.tags.values(), made.name):
        one.encode()
    return None


def recover_cell(seed, folder, number):
    """Start a launcher on a study with one damaged file: close the attempt, judge it, look whether it is finished."""
    from analysis.validity.gpu_samples import summary
    from benchmarks.agent import processes
    from benchmarks.record import CellFolder, RecordError, read
    from launch.study.study import StudyFolder
    from launch.supervision.failure import ends, first_cause
    from launch.supervision.progress import Watch

    chosen, _, damaged = seed.name.partition(":")
    whole, cell = cell_files(chosen)
    study = folder / "study"
    for name, data in whole.items():
        path = study / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(seed.data if name == damaged else data)
    processes.end = (
        lambda token, grace_s: []
    )  # looking through every process takes longer than all the rest
    study_folder = StudyFolder(str(folder), "study")
    study_folder.recover()
    study_folder.finished(cell)
    own = CellFolder(study / cell.folder)
    watch = Watch(own, cell.world_size, cell.servers)
    watch.update()
    first_cause(watch, own, ends(own), 1)
    summary(own)
    try:
        record = read(own.record)
    except RecordError as error:
        raise Refusal(str(error)) from None
    return {
        name: getattr(record, name)
        for name in ("metrics", "within_run", "series", "tables", "model", "ranks")
    }


def describe_host(seed, folder, number):
    """Read what a host says of itself, compare it with a whole one, and look for an address."""
    from described import host

    from benchmarks.record.encoding import encoded
    from conf.options import Refused
    from launch.machine.fleet import Fleet, Host, candidates, compare

    try:
        other = Host.described("b", seed.data)
        for sentence in compare(Fleet((host("a"), other))):
            sentence.encode()
        candidates(other, [host("a")], None, False)
    except Refused as error:
        if "\n" in str(error):
            raise Wrong("two lines") from None
        raise Refusal(str(error)) from None
    return json.loads(encoded(dataclasses.asdict(other)))


def read_floor(seed, folder, number):
    """Read noise_floor.json as the end of a sweep, and as a report of a study beside it does."""
    from analysis.study.noise_floor import NoiseFloors, as_json, floors_of, of_other_studies

    (folder / "noise_floor.json").write_bytes(seed.data)
    shown = of_other_studies(folder / "study")
    floors = NoiseFloors(shown)
    for group, metric in shown:
        floors.of(group, metric)
    try:
        found = floors_of(folder / "noise_floor.json")
    except (OSError, ValueError) as error:
        raise Refusal(str(error)) from None
    return json.loads(json.dumps(as_json(found), allow_nan=False))


def verify_cell(seed, folder, number):
    """Derive the record of a cell again with one damaged file: a raw file with other content may not pass."""
    whole, study = raw_files(), folder / "study"
    for name, data in whole.items():
        path = study / "cell" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(seed.data if name == seed.name else data)
    try:
        told = json.loads(ran("verify", str(study), "--json"), parse_constant=_no_constant)
    except ValueError as error:
        raise Wrong(f"--json printed no JSON ({error})") from None
    if (
        told["right"]
        and seed.name.endswith(PACKED)
        and _unpacked(seed.data) != _unpacked(whole[seed.name])
    ):
        raise Wrong("another content passes as what the record was derived from")


def verify_bundle(seed, folder, number):
    """Verify a damaged archive of a bundle: none with another content may pass."""
    path = folder / "bundle.zip"
    path.write_bytes(seed.data)
    told = json.loads(ran("verify", str(path), "--json"), parse_constant=_no_constant)
    (whole,) = bundle_seeds()
    if told["values"] and _contents(seed.data) != _contents(whole.data):
        raise Wrong("another content passes as the bundle")


def _contents(data):
    """What an archive unpacks to: {path: bytes}."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _unpacked(data):
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error):
        return None


def read_report(seed, folder, number):
    """Write the whole report of a study with one damaged record."""
    study = folder / "study"
    for name, data in report_files().items():
        (study / name).parent.mkdir(parents=True)
        (study / name).write_bytes(seed.data if name == seed.name else data)
    ran("report", str(study), "--json")


@functools.cache
def _composed():
    """The configuration without a study, as Hydra composes it."""
    from hydra import compose, initialize_config_dir

    from conf import schema

    schema.register()
    with initialize_config_dir(str(HERE.parent / "conf"), version_base="1.3"):
        return pickle.dumps(compose("config"))


def read_yaml(seed, folder, number):
    """Read a YAML of --config-dir with the functions that launch.py calls; each 500th file with launch.py itself."""
    import yaml
    from hydra.errors import HydraException
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    from benchmarks.record.visible import one_line
    from conf import groups
    from conf.resolve import checked
    from launch.cli.errors import explain

    path = folder / seed.name / "fuzzed.yaml"
    path.parent.mkdir()
    path.write_bytes(seed.data)
    if number % 500 == 7:
        return _launched(seed.name, folder)
    if seed.name in ("strategy", "benchmark"):
        path.write_bytes(seed.data.replace(b"name: ", b"name: fuzzed #", 1))
    base = pickle.loads(_composed())
    groups._read.cache_clear()
    try:
        groups.search_also([folder])
        if seed.name in ("strategy", "benchmark"):
            choice = groups.choice(seed.name, "fuzzed")
            groups.options(seed.name, {"name": "fuzzed", **choice.options, **choice.rules})
            choice.declared()
            return None
        loaded = OmegaConf.load(path)
        if not OmegaConf.is_dict(loaded):
            raise Refusal("Hydra refuses what is no mapping")
        with open_dict(loaded):
            for name in ("defaults", "hydra"):
                loaded.pop(name, None)
        merged = OmegaConf.merge(base, loaded if seed.name == "experiment" else {"model": loaded})
        checked(OmegaConf.to_object(merged))
    except (
        HydraException,
        OmegaConfBaseException,
        yaml.YAMLError,
        ValueError,
        OverflowError,
    ) as error:
        said = one_line(explain(error, []))
        if "\n" in said:
            raise Wrong(f"several lines: {said!r:.300}") from None
        raise Refusal(said) from None
    finally:
        groups.search_also([])
    return None


def _launched(group, folder):
    """Run launch.py with the file, dry, in this process. Raises Refusal for status 2."""
    import runpy

    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    plus = "+" if group == "experiment" else ""
    before, out, err = sys.argv, io.StringIO(), io.StringIO()
    sys.argv = [
        "launch.py", f"--config-dir={folder}", f"{plus}{group}=fuzzed", "dry_run=true", f"output_dir={folder}/out", "device=cpu",
        "hydra.mode=MULTIRUN",
    ]  # fmt: skip
    status = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(str(HERE.parent / "launch.py"), run_name="__main__")
    except SystemExit as ended:
        status = ended.code
    finally:
        sys.argv = before
    said = err.getvalue()
    if status not in (0, 2) or (status == 2 and said.count("\n") != 1):
        raise Wrong(f"launch.py: status {status}, {said[-500:]!r}")
    if status:
        raise Refusal(said)
    return None
