"""Copies between CPU workers: into a peer's shared memory (`enabled`), or as messages of gloo (`disabled`).

Timed by the host's clock of the rank that makes the copy. README.md.
"""

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.p2p.copies import (
    Copy,
    CopyMethod,
    CopyTimes,
    Latency,
    differing,
    write_opposite,
    write_pattern,
)
from benchmarks.rank.ranks import Ranks

FLAG_BYTES = 64  # after each worker's buffer: a cache line of its own
WAITED_FOR = 1 << 30  # a tag that no iteration has


class Workers:
    """Copies between the ranks of a cell. Every call is collective and returns the same on every rank."""

    words = {"enabled": "shared memory", "disabled": "gloo messages"}  # noqa: RUF012
    late = 0  # nothing is enqueued here
    enqueued_by: str | None = None

    def __init__(self, ranks: Ranks, size_bytes: int) -> None:
        """Take a private buffer for each worker, and a second one that all can address.

        Raises:
            OSError: there is not that much shared memory.
        """
        self._ranks = ranks
        self.devices: list[dict[str, str]] = [{} for _ in range(ranks.world_size)]
        whole = size_bytes + FLAG_BYTES
        self._mapping = ranks.map_shared(whole * ranks.world_size)
        everyone = torch.frombuffer(self._mapping, dtype=torch.uint8).split(whole)
        self._second = [one[:size_bytes] for one in everyone]
        self._flags: list[Any] = [one[size_bytes:].view(torch.int32).numpy() for one in everyone]
        self._first = torch.zeros(size_bytes, dtype=torch.uint8)
        self._mine = self._second[ranks.rank]

    def can_access(self, a: int, b: int) -> bool:
        """Return true: workers of one machine always share memory."""
        return True

    def time(self, copies: Sequence[Copy], how: CopyMethod) -> CopyTimes:
        """Time copies that start together; one rank's own copies take turns."""
        outside = [copy for copy in copies if copy.source != copy.target]
        within = [copy for copy in copies if copy.source == copy.target == self._ranks.rank]
        mine = (
            [copy for copy in outside if how.runner(copy) == self._ranks.rank]
            if how.enabled
            else []
        )
        self._ranks.barrier()
        opened = time.perf_counter()
        for _ in range(how.iterations):
            for copy in (*within, *mine):
                self._copy(copy, how)
        if outside and not how.enabled:
            self._send(outside, how)
        ms = (time.perf_counter() - opened) * 1e3
        # A message's time is its sender's, who waits for the answer.
        by_rank = [ms for (ms,) in self._ranks.gather([ms])]
        each_ms = [by_rank[how.runner(copy) if how.enabled else copy.source] for copy in copies]
        return CopyTimes(each_ms, max(each_ms))

    def latency(self, copy: Copy, how: CopyMethod) -> Latency:
        """Return half of a round trip; within one worker the time of one copy."""
        if copy.source == copy.target:
            return Latency(None, self.time([copy], how).all_ms * 1e3 / how.iterations)
        self._ranks.barrier()
        opened = time.perf_counter()
        if self._ranks.rank in (copy.source, copy.target):
            trip = self._shared_trip if how.enabled else self._message_trip
            for number in range(1, how.iterations + 1):
                trip(copy, how, number)
        seconds = time.perf_counter() - opened
        self._ranks.barrier()
        self._flags[self._ranks.rank][0] = 0
        seconds = self._ranks.gather([seconds])[copy.source][0]
        return Latency(None, seconds * 1e6 / how.iterations / 2)

    def wrong_elements(self, copy: Copy, how: CopyMethod) -> int:
        """Fill, copy once, and count on the target the elements that did not arrive."""
        number = 1 + copy.source * self._ranks.world_size + copy.target
        fetched = how.enabled and how.read and copy.source != copy.target
        source, target = (self._mine, self._first) if fetched else (self._first, self._mine)
        source, target = (buffer[: how.size_bytes].view(torch.int32) for buffer in (source, target))
        if self._ranks.rank == copy.source:
            write_pattern(source, number)
        if self._ranks.rank == copy.target:
            write_opposite(target, number)
        self.time([copy], CopyMethod(how.enabled, how.size_bytes, 1, how.read))
        wrong = differing(target, number) if self._ranks.rank == copy.target else 0
        return int(self._ranks.gather([wrong])[copy.target][0])

    def close(self) -> None:
        """Wait until every rank has finished with the shared memory, which ends with the last mapping."""
        self._ranks.barrier()

    def _copy(self, copy: Copy, how: CopyMethod) -> None:
        """Copy into or out of a peer's shared memory, or within one worker between its two buffers."""
        here, there = (
            self._first[: how.size_bytes],
            self._second[copy.target][copy.target_offset :][: how.size_bytes],
        )
        if copy.source == copy.target:
            source, target = (there, here) if copy.backwards else (here, there)
        elif how.read:  # what the source holds for others lies in its shared buffer
            source, target = self._second[copy.source][: how.size_bytes], here
        else:
            source, target = here, there
        target.copy_(source)

    def _send(self, copies: Sequence[Copy], how: CopyMethod) -> None:
        """Send every message of every copy at once; a copy ends with an answer of one byte."""
        rank, size = self._ranks.rank, how.size_bytes
        outgoing = [copy for copy in copies if copy.source == rank]
        incoming = [copy for copy in copies if copy.target == rank]
        answer = torch.zeros(1, dtype=torch.uint8)
        messages = [
            dist.irecv(self._mine[copy.target_offset :][:size], copy.source, tag=number)
            for copy in incoming
            for number in range(how.iterations)
        ]
        messages += [
            dist.isend(self._first[:size], copy.target, tag=number)
            for copy in outgoing
            for number in range(how.iterations)
        ]
        _finish(messages)
        answers = [dist.isend(answer, copy.source, tag=WAITED_FOR) for copy in incoming]
        answers += [
            dist.irecv(torch.empty_like(answer), copy.target, tag=WAITED_FOR) for copy in outgoing
        ]
        _finish(answers)

    def _shared_trip(self, copy: Copy, how: CopyMethod, number: int) -> None:
        """Make one round trip. Write: data, then flag (x86 keeps the order of stores). Read: flag, then the peer fetches."""
        rank, size = self._ranks.rank, how.size_bytes
        peer = copy.target if rank == copy.source else copy.source
        own = self._flags[rank]
        for sender in (copy.source, copy.target):
            if rank == sender:
                if not how.read:
                    self._second[peer][:size].copy_(self._first[:size])
                self._flags[peer][0] = number
            else:
                while own[0] != number:
                    os.sched_yield()  # there may be fewer cores than workers
                if how.read:
                    self._first[:size].copy_(self._second[peer][:size])

    def _message_trip(self, copy: Copy, how: CopyMethod, number: int) -> None:
        rank, size = self._ranks.rank, how.size_bytes
        peer = copy.target if rank == copy.source else copy.source
        for sender in (copy.source, copy.target):
            if rank == sender:
                dist.send(self._first[:size], peer)
            else:
                dist.recv(self._mine[:size], peer)


def _finish(messages: "list[dist.Work | None]") -> None:
    for message in messages:
        assert message is not None  # every rank belongs to the group
        message.wait()
