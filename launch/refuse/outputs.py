"""Refuse places that results must not be written to, before anything starts: nothing of the user's own is ever replaced."""

from collections.abc import Iterable
from pathlib import Path

from analysis.study import noise_floor as floor_file
from conf.cell import Cell
from conf.options import Refused
from conf.schema import Config
from launch.study.study import study_folder
from launch.tracking.store import (
    ARTIFACTS,
    DEFAULT_STORE,
    WrongUri,
    not_a_store,
    sqlite_file,
    store_uri,
)

# What Ringside itself keeps in output_dir, beside the studies.
OURS = (DEFAULT_STORE, ARTIFACTS, floor_file.FILE)


def refuse_outputs(config: Config) -> None:
    """Refuse a study, an output_dir or a store whose place something else has. Raises Refused."""
    study = study_folder(config.output_dir, config.study)
    if config.study in OURS:
        raise Refused(
            f"study={config.study}: accepted is another name; output_dir keeps {', '.join(OURS)} beside the studies"
        )
    for path in (study.parent, study):
        try:
            reason = "is no folder" if path.exists() and not path.is_dir() else ""
        except OSError as error:  # of somebody else's, or a name that is too long
            reason = f"cannot be looked at: {error.strerror}"
        if reason:
            raise Refused(f"output_dir={config.output_dir}: cannot be written ({path} {reason})")
    if not config.tracking.enabled:
        return
    if (artifacts := study.parent / ARTIFACTS).is_symlink():
        raise _link(config, artifacts)
    file = _store_file(config.tracking.uri, study.parent)
    if file is not None and (reason := not_a_store(file)):
        raise Refused(
            f"tracking.uri={file}: {reason}; accepted is a new file or a store of MLflow's"
        )


def _store_file(uri: str | None, output_dir: Path) -> Path | None:
    """Return the file of the SQLite store; None for another store. Raises Refused for a URI that no store can have."""
    if uri is None:
        return output_dir / DEFAULT_STORE  # without SQLAlchemy, which takes a while to import
    try:
        return sqlite_file(store_uri(uri, output_dir))
    except WrongUri as error:
        raise Refused(str(error)) from None


def refuse_links(config: Config, cells: Iterable[Cell]) -> None:
    """Refuse a study or a cell whose folder is a link: its files would be written and tidied elsewhere. Raises Refused."""
    study = study_folder(config.output_dir, config.study)
    for folder in (study, *(study / cell.folder for cell in cells)):
        if folder.is_symlink():
            raise _link(config, folder)


def _link(config: Config, path: Path) -> Refused:
    return Refused(
        f"output_dir={config.output_dir}: {path} is a link; accepted are folders (output_dir may be a link)"
    )
