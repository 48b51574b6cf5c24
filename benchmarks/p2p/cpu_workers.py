"""Copies between CPU workers: into a peer's shared memory (`enabled`), or gloo's (`disabled`).

Timed by the host's clock of the rank that makes the copy. README.md.
"""

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.p2p.copies import Copy, CopyMethod, differing, write_opposite, write_pattern
from benchmarks.rank.ranks import Ranks

FLAG_BYTES = 64  # after each worker's buffer: a cache line of its own
ANSWER_TAG = 1 << 30  # that no iteration has


class Workers:
    """Copies between the ranks of a cell. Every call is collective and returns the same on all."""

    words = {"enabled": "shared memory", "disabled": "gloo messages"}  # noqa: RUF012
    late = 0  # nothing is enqueued here
    enqueued_by: str | None = None

    def __init__(self, ranks: Ranks, size_bytes: int) -> None:
        """Take a private buffer for each worker, and a second one that all can address.

        Raises OSError: there is not that much shared memory.
        """
        self._ranks, self._rank = ranks, ranks.rank
        self.devices: list[dict[str, str]] = [{} for _ in range(ranks.world_size)]
        self._mapping = ranks.map_shared((size_bytes + FLAG_BYTES) * ranks.world_size)
        self._first = torch.zeros(size_bytes, dtype=torch.uint8)
        self._second: list[Tensor] = []  # of every worker
        self._flags: list[Any] = []
        whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        for part in whole.split(size_bytes + FLAG_BYTES):
            self._second.append(part[:size_bytes])
            self._flags.append(part[size_bytes:].view(torch.int32).numpy())

    def can_access(self, a: int, b: int) -> bool:
        """Return true: workers of one machine always share memory."""
        return True

    def time(self, copies: Sequence[Copy], how: CopyMethod) -> tuple[list[float], float]:
        """Return (ms of each copy, until all are done); one rank's own copies take turns."""
        within, outward, messages = [], [], []
        for copy in copies:
            if copy.source == copy.target:
                if copy.source == self._rank:
                    within.append(copy)
            elif not how.enabled:
                messages.append(copy)
            elif how.runner(copy) == self._rank:
                outward.append(copy)
        self._ranks.barrier()
        opened = time.perf_counter()
        for _ in range(how.iterations):
            for copy in (*within, *outward):
                self._copy(copy, how)
        if messages:
            self._send(messages, how)
        own_ms = (time.perf_counter() - opened) * 1e3
        # A message's time is its sender's, who waits for the answer.
        by_rank = self._ranks.gather([own_ms])
        each_ms = []
        for copy in copies:
            timed_by = how.runner(copy) if how.enabled else copy.source
            each_ms.append(by_rank[timed_by][0])
        return each_ms, max(each_ms)

    def latency(self, copy: Copy, how: CopyMethod) -> tuple[float | None, float]:
        """Return half of a round trip; within one worker the time of one copy."""
        if copy.source == copy.target:
            return None, self.time([copy], how)[1] * 1e3 / how.iterations
        self._ranks.barrier()
        opened = time.perf_counter()
        if self._rank in (copy.source, copy.target):
            peer = copy.target if self._rank == copy.source else copy.source
            for turn in range(1, how.iterations + 1):
                for sender in (copy.source, copy.target):  # there and back
                    if how.enabled:
                        self._pass_shared(sender, peer, how, turn)
                    elif self._rank == sender:
                        dist.send(self._first[: how.size_bytes], peer)
                    else:
                        dist.recv(self._second[self._rank][: how.size_bytes], peer)
        own_seconds = time.perf_counter() - opened
        self._ranks.barrier()
        self._flags[self._rank][0] = 0
        seconds = self._ranks.gather([own_seconds])[copy.source][0]
        return None, seconds * 1e6 / how.iterations / 2

    def wrong_elements(self, copy: Copy, how: CopyMethod) -> int:
        """Fill, copy once, and count on the target the elements that did not arrive."""
        seed = 1 + copy.source * self._ranks.world_size + copy.target
        source, target = self._first, self._second[self._rank]
        if how.enabled and how.read and copy.source != copy.target:  # fetched
            source, target = target, source
        source = source[: how.size_bytes].view(torch.int32)
        target = target[: how.size_bytes].view(torch.int32)
        if self._rank == copy.source:
            write_pattern(source, seed)
        if self._rank == copy.target:
            write_opposite(target, seed)
        self.time([copy], CopyMethod(how.enabled, how.size_bytes, 1, how.read))
        wrong = differing(target, seed) if self._rank == copy.target else 0
        return int(self._ranks.gather([wrong])[copy.target][0])

    def close(self) -> None:
        """Wait until every rank has finished with the shared memory."""
        self._ranks.barrier()

    def _copy(self, copy: Copy, how: CopyMethod) -> None:
        """Copy into or out of a peer's shared memory, or within one worker between its buffers."""
        here = self._first[: how.size_bytes]
        there = self._second[copy.target][copy.target_offset :][: how.size_bytes]
        if copy.backwards:
            here.copy_(there)
        elif how.read and copy.source != copy.target:
            # What the source holds for others lies in its shared buffer.
            here.copy_(self._second[copy.source][: how.size_bytes])
        else:
            there.copy_(here)

    def _send(self, copies: Sequence[Copy], how: CopyMethod) -> None:
        """Send every message of every copy at once; a copy ends with an answer of one byte."""
        size, own = how.size_bytes, self._second[self._rank]
        outgoing, incoming = [], []
        for copy in copies:
            if copy.source == self._rank:
                outgoing.append(copy)
            if copy.target == self._rank:
                incoming.append(copy)
        works: list[Any] = []
        for copy in incoming:
            for turn in range(how.iterations):
                received = own[copy.target_offset :][:size]
                works.append(dist.irecv(received, copy.source, tag=turn))
        for copy in outgoing:
            for turn in range(how.iterations):
                works.append(dist.isend(self._first[:size], copy.target, tag=turn))
        for work in works:
            work.wait()
        answer = torch.zeros(1, dtype=torch.uint8)
        works = [dist.isend(answer, copy.source, tag=ANSWER_TAG) for copy in incoming]
        for copy in outgoing:
            works.append(dist.irecv(torch.empty_like(answer), copy.target, tag=ANSWER_TAG))
        for work in works:
            work.wait()

    def _pass_shared(self, sender: int, peer: int, how: CopyMethod, turn: int) -> None:
        """Send to the peer, or receive from it.

        Write: data, then flag (x86 keeps the order of stores). Read: flag, then the peer fetches.
        """
        size = how.size_bytes
        if self._rank == sender:
            if not how.read:
                self._second[peer][:size].copy_(self._first[:size])
            self._flags[peer][0] = turn
            return
        while self._flags[self._rank][0] != turn:
            os.sched_yield()  # there may be fewer cores than workers
        if how.read:
            self._first[:size].copy_(self._second[peer][:size])
