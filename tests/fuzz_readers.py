"""The readers of the fuzzing (tests/fuzz.py): what each reads, how its files are damaged, and what damage may change."""

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuzz_calls as calls
import fuzz_mutations as mutations
import fuzz_seeds as seeds
import fuzz_studies as studies


@dataclass(frozen=True)
class Reader:
    """One reader: its seeds, what is done to them, and how it is called."""

    name: str
    seeds: Callable[[], list[seeds.Seed]]
    read: Callable[
        [seeds.Seed, Path, int], Any
    ]  # (damaged file, an empty folder, number of the case)
    damages: tuple[Callable[..., bytes], ...]
    # What only takes away, where the reader must notice or return less. Nobody can know what JSON lacks that is whole again.
    removing: tuple[Callable[..., bytes], ...] = (mutations.cut, mutations.cut_gzip)
    # Paths of what it returns that follow from how much is there: they may differ from those of the whole file.
    follows: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("rich",)  # modules beyond Ringside's own and Python's
    share: float = 1.0  # of the cases that are asked for
    least: int = 1

    @property
    def missing(self) -> list[str]:
        """Name the modules that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


SAID = (
    ".*/notes",
    "/truncated",
    "/lost",
    ".*/file",
    ".*/line",
)  # what a reader says about the damage, and where


def others(part, whole, follows=(), path=""):
    """Yield the paths of what a part has otherwise than the whole. Lists may have fewer elements, in the same order."""
    if part is None or any(re.fullmatch(pattern, path) for pattern in (*SAID, *follows)):
        return
    if isinstance(part, dict) and isinstance(whole, dict):
        for key, value in part.items():
            yield from others(value, whole.get(key), follows, f"{path}/{key}")
    elif isinstance(part, list) and isinstance(whole, list):
        if len(part) == len(whole):
            found = [
                one
                for a, b in zip(part, whole, strict=True)
                for one in others(a, b, follows, f"{path}/*")
            ]
            if not found or not part:
                return
        rest = list(whole)
        for one in part:
            compared = [list(others(one, other, follows, f"{path}/*")) for other in rest]
            if [] not in compared:
                yield from min(compared, key=len, default=[f"{path}/*: {one!r:.100} is new"])
                return
            del rest[: compared.index([]) + 1]
    elif part != whole or isinstance(part, bool) is not isinstance(whole, bool):
        yield f"{path}: {part!r:.100} instead of {whole!r:.100}"


TEXT = mutations.ANY
WITH_JSON = (*mutations.ANY, *mutations.JSON)
LINES_TOO = (mutations.cut, mutations.cut_gzip, mutations.lost_lines)
READERS = (
    Reader("record", seeds.record_seeds, calls.read_record, WITH_JSON, removing=(mutations.cut, mutations.lost_entry),
           needs=("omegaconf",)),
    Reader("cell", seeds.cell_seeds, calls.recover_cell, WITH_JSON, removing=(mutations.cut, mutations.lost_lines),
           follows=("/ranks/.*/done",), needs=("filelock", "hydra", "numpy", "psutil")),
    Reader("projection", seeds.record_seeds, calls.project_record, (*mutations.JSON, mutations.wrong_number),
           needs=("filelock", "hydra", "psutil")),
    Reader("nccl-log", seeds.nccl_logs, calls.through_command("nccl-log"), TEXT, removing=LINES_TOO,
           # how many said something, and whether a line proves that a subsystem was logged
           follows=("/processes", "/announced_by/.*", "/env_logged", "/channels_from")),
    Reader("nccl-tests-json", seeds.nccl_tests_documents, calls.through_command("nccl-tests"), WITH_JSON),
    Reader("nccl-tests-record", seeds.collectives_records, calls.through_command("nccl-tests"), WITH_JSON),
    Reader("nccl-tests-text", seeds.nccl_tests_texts, calls.through_command("nccl-tests"), TEXT,
           # Whoever takes the end of one table and the head of the next leaves one whole table; a note says what does not fit.
           removing=(mutations.cut, mutations.cut_gzip, mutations.lost_line)),
    Reader(
        "p2p-text", seeds.files("p2p_a100_pcie_x4.txt", "p2p_h200_x2.txt", "p2p_dgx_a100_row0.txt"),
        calls.through_command("p2p", drawn=True), TEXT,
        # Whoever takes the end of one matrix and the head of the next leaves one whole matrix: nobody can see that.
        removing=(mutations.cut, mutations.cut_gzip, mutations.lost_line), needs=("matplotlib", "rich"),
    ),
    Reader("p2p-record", seeds.p2p_records, calls.through_command("p2p", drawn=True), WITH_JSON,
           needs=("matplotlib", "rich")),
    Reader(
        "topo-text", seeds.files("topo_a100_pcie_x4.txt", "topo_dgx1_v100.txt", "topo_h200_x4.txt"),
        calls.through_command("topology", drawn=True), TEXT, removing=LINES_TOO,
    ),
    Reader("topo-xml", seeds.topology_xmls, calls.through_command("topology", drawn=True),
           (*TEXT, *(mutations.xml_part,) * 6, mutations.deep)),
    Reader("nsys", seeds.nsys_exports, calls.through_command("trace", ".sqlite"),
           (mutations.flip, mutations.replaced_bytes, mutations.splice, *(mutations.sql,) * 5, mutations.packed),
           needs=("numpy", "rich")),
    Reader("kineto", seeds.kineto_traces, calls.through_command("trace", ".json"), WITH_JSON, needs=("numpy", "rich")),
    Reader("yaml", seeds.yaml_seeds, calls.read_yaml, (*TEXT, *(mutations.yaml_part,) * 8, mutations.deep), removing=(),
           needs=("filelock", "hydra", "psutil", "rich", "yaml")),
    Reader("host", seeds.host_seeds, calls.describe_host, WITH_JSON, needs=("psutil",)),
    Reader("noise-floor", seeds.floor_seeds, calls.read_floor, WITH_JSON, needs=()),
    Reader("verify", seeds.raw_seeds, calls.verify_cell, WITH_JSON, removing=(), needs=("hydra", "numpy", "rich")),
    Reader("bundle", seeds.bundle_seeds, calls.verify_bundle,
           (mutations.flip, mutations.replaced_bytes, mutations.splice, mutations.packed), removing=(mutations.cut,),
           needs=("hydra", "jinja2", "matplotlib", "numpy", "rich"), share=0.1, least=20),
    Reader("forecasts", studies.study_seeds, studies.read_study_by_commands, WITH_JSON, removing=(),
           needs=("numpy", "rich", "scipy"), share=0.2, least=3),
    Reader("next-forecast", studies.study_seeds, studies.forecast_the_next_cell, mutations.JSON, removing=(),
           needs=("numpy", "scipy"), share=0.2, least=1),
    Reader("sections", studies.study_seeds, studies.read_study_by_sections, mutations.JSON, removing=(),
           needs=("matplotlib", "numpy", "scipy"), share=0.02, least=1),
    Reader("ladder", studies.ladder_seeds, studies.read_ladder, WITH_JSON, needs=("numpy", "rich", "scipy")),
    Reader("hosts", studies.hosts_seeds, studies.read_hosts, TEXT, removing=(), needs=("hydra",)),
    Reader("report", seeds.report_seeds, calls.read_report, mutations.JSON, removing=(), share=0.005, least=2,
           needs=("hydra", "jinja2", "matplotlib", "rich", "scipy")),
)  # fmt: skip
BY_NAME = {reader.name: reader for reader in READERS}
