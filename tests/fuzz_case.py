"""One case of the fuzzing (tests/fuzz.py): a damaged file, a reader, limits of time and memory, and the outcome."""

import functools
import random
import resource
import shutil
import signal
import tempfile
import time
import traceback
from pathlib import Path

from fuzz_calls import Refusal, Wrong
from fuzz_mutations import sql
from fuzz_readers import others
from fuzz_seeds import Seed

CASE_SECONDS = 5.0
STARVED_SECONDS = (
    40.0  # on a machine that is so busy that the case had less than CASE_SECONDS of it until then
)
CASE_BYTES = 1 << 30
OUTCOMES = ("refused", "accepted", "tracebacks", "untyped", "hangs", "over_memory", "other_values")
GOOD = OUTCOMES[:2]


class Hang(BaseException):
    """A case took too long. No reader may catch it."""


seeds_of = functools.cache(lambda reader: reader.seeds())


def damaged(reader, seed, number, folder):
    """Return (whole file, damaged file, names of what was done, whether it only lost something)."""
    source = random.Random(f"{seed}/{reader.name}/{number}")
    seeds = seeds_of(reader)
    whole = source.choice(seeds)
    same = [one.data for one in seeds if one.name == whole.name]
    if reader.removing and source.random() < 0.25:
        chosen = [source.choice(reader.removing)]
    else:
        chosen = source.choices(
            (*reader.damages, *reader.removing), k=source.choice((1, 1, 1, 2, 3))
        )
    data = whole.data
    for one in chosen:
        data = one(source, data, folder if one is sql else same)
    names = [one.__name__ for one in chosen]
    return whole, Seed(data, whole.name), names, len(chosen) == 1 and chosen[0] in reader.removing


class Cases:
    """Runs cases in this process, within limits."""

    def __init__(self, seed):
        """Keep the seed."""
        self.seed = seed
        self._folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        self._whole = {}  # what each whole file gives
        self._began = self._cpu = 0.0
        signal.signal(signal.SIGALRM, self._late)

    def run(self, reader, number):
        """Run one case. Return (outcome, what it says)."""
        folder = self._folder
        try:
            whole, part, names, lost = damaged(reader, self.seed, number, folder)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            outcome, said = self._limited(reader, part, folder / "case", number)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
            if grown > CASE_BYTES:
                outcome, said = "over_memory", f"{grown >> 20} MiB"
            if outcome == "accepted" and lost and said is not None:
                different = list(
                    others(said, self._of_whole(reader, whole, folder), reader.follows)
                )
                if different:
                    outcome, said = "other_values", "; ".join(different[:3])
        finally:
            shutil.rmtree(folder / "case", ignore_errors=True)
        return (
            outcome,
            None if outcome in GOOD else f"{'+'.join(names)} of {whole.name or 'a file'}: {said}",
        )

    def _limited(self, reader, part, folder, number):
        folder.mkdir()
        self._began, self._cpu = time.monotonic(), time.process_time()
        try:
            signal.setitimer(signal.ITIMER_REAL, CASE_SECONDS)
            try:
                return "accepted", reader.read(part, folder, number)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Refusal as error:
            return "refused", str(error)
        except Hang:
            return "hangs", f"{time.monotonic() - self._began:.1f} s"
        except MemoryError:
            return "over_memory", "MemoryError"
        except (Wrong, AssertionError, SystemError) as error:
            return "untyped", f"{type(error).__name__}: {error}"
        except (Exception, SystemExit) as error:
            where = traceback.extract_tb(error.__traceback__)
            place = [f"{Path(one.filename).name}:{one.lineno}" for one in where][-4:]
            return (
                "tracebacks",
                f"{type(error).__name__}: {str(error)[:200]} at {' > '.join(place)}",
            )

    def _late(self, *_):
        """A case is late; where the machine was busy with others, wait on."""
        had = time.process_time() - self._cpu
        if had < CASE_SECONDS and time.monotonic() - self._began < STARVED_SECONDS:
            signal.setitimer(signal.ITIMER_REAL, CASE_SECONDS - had)
            return
        signal.setitimer(
            signal.ITIMER_REAL, 0.2
        )  # once more: Python drops what is raised while it cleans up
        raise Hang

    def _of_whole(self, reader, whole, folder):
        """Return what the reader makes of the whole file."""
        key = reader.name, whole
        if key not in self._whole:
            again = folder / f"whole{len(self._whole)}"
            again.mkdir()
            self._whole[key] = reader.read(whole, again, 0)
        return self._whole[key]
