"""Keep `noise_floor.json` in output_dir: what each study showed of the scatter between runs of equal cells."""

from collections.abc import Callable, Sequence
from pathlib import Path

from analysis.findings.next_run.floor_file import FILE, as_json, floors_of
from analysis.findings.study import Study
from benchmarks.record import Record, own_files, write_json
from benchmarks.record.os_errors import because

LOCK_WAIT_S = 10.0


def update_noise_floor(study_folder: Path, records: Sequence[Record], note: Callable[[str], None]) -> None:
    """Write what a study's records show in place of what they showed before; `note` gets the reason where that fails.

    A study that shows nothing makes no file. A file that cannot be read is left as it is.
    """
    path = study_folder.parent.resolve() / FILE  # output_dir may be a link
    shown = Study.of(records).floors.own()
    try:
        with own_files.locked(path.with_name(f".{FILE}.lock"), LOCK_WAIT_S) as ours:
            if not ours:
                raise OSError(f"another launcher has held its lock for {LOCK_WAIT_S:.0f} s")
            known = floors_of(path)
            others = {study: rows for study, rows in known.items() if study != study_folder.name}
            if shown or study_folder.name in known:
                write_json(path, as_json(others | ({study_folder.name: shown} if shown else {})))
    except (OSError, ValueError) as error:
        reason = because(error) if isinstance(error, OSError) else error
        note(f"the noise floor of this study was not added to {path}: {reason}")
