"""`python -m tests.fuzz [--cases N] [--workers N] [--seconds N] [--seed N] [--out FILE] [--only READER] [--case N]`.

Damages real files and gives them to every reader of foreign text. Case N of a reader is the same for the same seed, everywhere.
What counts, per reader:

    refused       an error that the reader declares; of a command one line on stderr and status 1 or 2
    accepted      it returned something
    tracebacks    any other exception (untyped: one that says nothing, an AssertionError or a SystemError)
    hangs         longer than 5 seconds of the processor, or 40 s altogether
    over_memory   more than 1 GiB, or a worker that died
    other_values  a file that only lost something gave what the whole file does not give
"""

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path

os.environ.setdefault(
    "OPENBLAS_NUM_THREADS", "1"
)  # a thread for each core takes more addresses than a case may have
sys.path[:0] = [
    one
    for one in (str(Path(__file__).parents[1]), str(Path(__file__).parent))
    if one not in sys.path
]

from fuzz_calls import Refusal  # noqa: E402
from fuzz_case import CASE_BYTES, GOOD, OUTCOMES, STARVED_SECONDS, Cases, damaged  # noqa: E402
from fuzz_readers import BY_NAME, READERS  # noqa: E402

KEPT = 20  # failing cases of a reader in the result
CHUNK = 200  # cases that a worker takes at once


def work(pipe, seed, at):
    """Take chunks (reader, first, last) from a pipe and send back ({outcome: number}, failing cases, CPU seconds)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # of numbers that are none
    os.fsync = lambda _: None  # what is on disk is not looked at here, and each costs milliseconds
    cases = Cases(seed)
    warm = set()
    while (chunk := pipe.recv()) is not None:
        name, first, last = chunk
        reader = BY_NAME[name]
        if name not in warm:  # imports and seeds count for no case
            warm.add(name)
            for number in range(2):
                cases.run(reader, number)
            _limit_memory()
        counts, failing, began = Counter(), [], time.process_time()
        for number in range(first, last):
            at[0] = number
            outcome, said = cases.run(reader, number)
            counts[outcome] += 1
            if outcome not in GOOD:
                failing.append((number, outcome, said))
        pipe.send((counts, failing[:KEPT], time.process_time() - began))


def _limit_memory():
    """Let this process grow by a bit more than CASE_BYTES."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmSize:"):
            most = (int(line.split()[1]) << 10) + CASE_BYTES + (CASE_BYTES >> 2)
            resource.setrlimit(
                resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1])
            )


class Worker:
    """A process that works, and the chunk that it has."""

    def __init__(self, seed):
        """Start it."""
        context = multiprocessing.get_context("fork")
        self.at = context.RawArray("l", 1)  # the case that it is at
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, seed, self.at), daemon=True)
        self.process.start()
        theirs.close()
        self.chunk, self._seen = None, (-1, time.monotonic())

    def give(self, chunk):
        """Let it run a chunk of cases; None: let it end."""
        self.chunk, self._seen = chunk, (-1, time.monotonic())
        with suppress(OSError):
            self.pipe.send(chunk)

    def stuck(self):
        """Tell whether it has been at one case for so long that no signal handler of its own will run."""
        if self.chunk is None or self.at[0] != self._seen[0]:
            self._seen = self.at[0], time.monotonic()
        return time.monotonic() - self._seen[1] > 1.5 * STARVED_SECONDS

    def end(self):
        """End it at once."""
        self.process.kill()
        self.process.join()


def chunks_of(readers, cases):
    """Return chunks of cases, so that after any time every reader has had about the same share."""
    found = []
    for reader in readers:
        asked = max(reader.least, round(cases * reader.share))
        size = max(1, min(CHUNK, asked // 8)) if reader.share == 1 else 1
        found += [
            (first / asked, (reader.name, first, min(asked, first + size)))
            for first in range(0, asked, size)
        ]
    return [chunk for _, chunk in sorted(found, reverse=True)]  # taken from the end


def campaign(readers, cases, workers, seconds, seed):
    """Run cases of readers in processes; return the result by reader."""
    found = {
        reader.name: {"cases": 0, **dict.fromkeys(OUTCOMES, 0), "seconds": 0.0, "failing": []}
        for reader in readers
    }
    scratch = tempfile.tempdir = tempfile.mkdtemp(
        prefix="fuzz-of-"
    )  # what a killed worker leaves goes with it
    waiting, until = chunks_of(readers, cases), time.monotonic() + seconds
    crew = [Worker(seed) for _ in range(min(workers, len(waiting)))]
    try:
        while True:
            for worker in crew:
                if worker.chunk is None and waiting and time.monotonic() < until:
                    worker.give(waiting.pop())
            busy = [worker for worker in crew if worker.chunk is not None]
            if not busy:
                return found
            ready = multiprocessing.connection.wait([worker.pipe for worker in busy], timeout=1.0)
            for worker in busy:
                if worker.pipe in ready or worker.stuck():
                    rest = _take(worker, found)
                    if rest is not None:
                        crew[crew.index(worker)] = Worker(seed)
                        waiting += rest
    finally:
        for worker in crew:
            worker.end()
        tempfile.tempdir = None
        shutil.rmtree(scratch, ignore_errors=True)


def _take(worker, found):
    """Add what a worker sends to the result. Return None; of one that died or hangs the chunks that are still to run."""
    name, first, last = worker.chunk
    own = found[name]
    try:
        if worker.stuck():
            raise EOFError
        counts, failing, spent = worker.pipe.recv()
    except (EOFError, OSError):
        hung, at = worker.stuck(), worker.at[0]
        worker.end()
        outcome = "hangs" if hung else "over_memory"
        said = (
            "no signal could end it"
            if hung
            else f"the process died with status {worker.process.exitcode}"
        )
        own["cases"] += 1
        own[outcome] += 1
        own["failing"].append((at, outcome, said))
        return [(name, a, b) for a, b in ((at + 1, last), (first, at)) if a < b]
    own["cases"] += last - first
    own["seconds"] += spent
    for outcome, number in counts.items():
        own[outcome] += number
    own["failing"] = (own["failing"] + failing)[:KEPT]
    worker.chunk = None
    return None


def failed(found):
    """Return how many cases failed."""
    return sum(
        own[outcome] for own in found.values() for outcome in OUTCOMES if outcome not in GOOD
    )


def main(arguments=None):
    """Run, print one line a reader, write the JSON. Return 0 if no case failed, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Damage real files and read them."
    )
    parser.add_argument(
        "--cases", type=int, default=500, help="of each reader (the report takes one in 200)"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start no further cases after that"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument(
        "--only", action="append", choices=sorted(BY_NAME), metavar="READER", help="may be repeated"
    )
    parser.add_argument(
        "--case", type=int, help="run one case of --only and show what it reads and says"
    )
    asked = parser.parse_args(arguments)
    readers = [BY_NAME[name] for name in asked.only] if asked.only else list(READERS)
    without = {reader.name: reader.missing for reader in readers if reader.missing}
    readers = [reader for reader in readers if reader.name not in without]
    if asked.case is not None:
        return _one(readers[0], asked.seed, asked.case)
    began = time.monotonic()
    found = campaign(readers, asked.cases, asked.workers, asked.seconds, asked.seed)
    for name, own in found.items():
        each = 1e3 * own["seconds"] / max(1, own["cases"])
        bad = ", ".join(f"{own[one]} {one}" for one in OUTCOMES[2:] if own[one]) or "none failed"
        print(
            f"{name:16} {own['cases']:7} cases, {own['refused']:6} refused, {each:6.1f} ms each: {bad}",
            flush=True,
        )
        for number, outcome, said in own["failing"][:3]:
            print(f"    --only {name} --case {number}: {outcome}: {said[:300]}")
    for name, modules in without.items():
        print(f"{name:16} not run: {', '.join(modules)} is not installed")
    if asked.out:
        whole = {"seed": asked.seed, "workers": asked.workers, "seconds": round(time.monotonic() - began, 1),
                 "python": sys.version.split()[0], "not_run": without, "readers": found}  # fmt: skip
        asked.out.write_text(json.dumps(whole, indent=1) + "\n")
    return 1 if failed(found) else 0


def _one(reader, seed, number):
    """Run one case in this process and leave its file."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-case-"))
    _, part, names, _ = damaged(reader, seed, number, folder)
    (folder / "damaged").write_bytes(part.data)
    (folder / "again").mkdir()
    print(f"{'+'.join(names)} of {part.name or 'a file'}: {folder / 'damaged'}")
    print(*Cases(seed).run(reader, number))
    with suppress(Refusal):
        print(reader.read(part, folder / "again", number))
    shutil.rmtree(folder / "again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
