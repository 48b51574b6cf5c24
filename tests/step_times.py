"""The times of steps of a Training, without the product's own clock: by events on a GPU, by the host's clock on CPU workers."""

import itertools
import time

import torch


def timed_ms(training, steps):
    """The ms of each of so many steps, one after the other; on a GPU nothing waits in between."""
    marks = []
    for _ in range(steps + 1):
        if training.device.type == "cuda":
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        else:
            marks.append(time.perf_counter())
        training.step()
    if training.device.type != "cuda":
        return [1e3 * (end - start) for start, end in itertools.pairwise(marks)]
    torch.cuda.synchronize(training.device)
    return [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]
