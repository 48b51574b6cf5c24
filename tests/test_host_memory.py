"""Memory that a step frees: kept by a CPU worker's process, so that no window pays for page faults that another does not."""

import subprocess
import sys

ROUNDS = """
import ctypes, resource, torch
from trainers.process import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        tensors = [torch.ones(1 << 20) for _ in range(4)]  # 4 MiB each
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
ctypes.CDLL(None).mallopt(-3, 128 << 10)  # what glibc begins with; it adapts this limit in some runs and not in others
faults()
given_back = faults()
keep_freed_memory()
faults()
print(given_back, faults())
"""


def test_freed_memory_stays_with_the_process():
    ran = subprocess.run([sys.executable, "-c", ROUNDS], capture_output=True, text=True, check=True)
    given_back, kept = map(int, ran.stdout.split())
    assert (
        given_back > 30_000
    )  # of the 40,960 pages of these tensors: else this test could not fail
    assert kept < 1_000
