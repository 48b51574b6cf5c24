"""A worker's side of the servers: its gradients go out bucket by bucket, weights (or the mean gradient) come back.

On a GPU, copies and flags are enqueued on streams of their own, so that neither the host nor the device waits inside
backward; a CPU worker's buffers are the shared memory itself.
"""

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.kvstore import cpu_sums, server_process
from trainers.kvstore.server import PAUSE_SECONDS, OnCpu, Server, short_naps
from trainers.kvstore.shared_regions import REDUCE, UPDATE, KvstoreConfig, Regions, Shared, views


@dataclass(frozen=True)
class Peers:
    """The workers that share servers: all ranks, or this one alone."""

    rank: int
    size: int

    def barrier(self) -> None:
        """Wait for all. Collective."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1))

    def told(self, text: str) -> str:
        """What rank 0 says. Collective."""
        box = [text]
        if self.size > 1:
            dist.broadcast_object_list(box, 0)
        return box[0]


class Worker:
    """One worker among its peers. `sent` and `weights`, `means` hold a flat tensor for each bucket."""

    def __init__(self, terms: KvstoreConfig, peers: Peers, device: torch.device, threads: int | str) -> None:
        """Map the shared memory and meet the servers. Collective over the peers.

        Raises:
            OSError: not enough shared memory.
        """
        self.terms, self.peers, self.device = terms, peers, device
        self.layout = terms.layout()
        self.on_gpu = device.type == "cuda"
        # Where servers are processes, theirs do the sums; as many of ours only measure the memory.
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.threads = cpu_sums.thread_count(threads, ranks, cpu_sums.SPARE_CORES if self.on_gpu else 0)
        self._server: Server | None = None
        self._thread: threading.Thread | None = None
        self._number = 0  # of the exchange in hand
        self._only_gradients = False
        path = Path(peers.told(str(Shared.new_path())))
        if peers.rank == 0:
            self._shared = Shared(path, terms, self.layout, create=True)
        peers.barrier()
        if peers.rank != 0:
            self._shared = Shared(path, terms, self.layout)
        self._control = self._shared.control
        self._own_buffers()
        if terms.servers and peers.rank == 0:
            server_process.announce(path, terms)
        self._meet(1)
        if peers.rank == 0:
            path.unlink()
        if self.on_gpu:
            self._connect()

    def begin(self, weights: Sequence[Tensor], settings: tuple[float, float, float]) -> None:
        """The servers start with rank 0's weights, a flat tensor for each bucket. Collective.

        `settings` are learning rate, momentum and weight decay of this worker's pushes.
        """
        self._control.settings[self.peers.rank, 1:] = settings
        if self.peers.rank == 0:
            for number, flat in enumerate(weights):
                if self.on_gpu:
                    self._pushing.stream.wait_stream(torch.cuda.current_stream())
                    self._pushing.copy(self._weights_at[number], flat.data_ptr(), flat.nbytes)
                    self._pushing.stream.synchronize()
                else:
                    assert self._shared.regions is not None
                    self._shared.regions.weights[number].copy_(flat)
        if not self.terms.servers:
            self._serve_here()
        self._meet(2)

    def ask_for(self, only_gradients: bool) -> None:
        """What is to come back from now on: weights, or the mean gradient. No exchange is under way."""
        self._only_gradients = only_gradients
        self._control.settings[self.peers.rank, 0] = REDUCE if only_gradients else UPDATE

    def _meet(self, stage: int) -> None:
        """Say that this worker has come to a stage, and wait for everybody, servers too."""
        self._control.attached[self.peers.rank] = stage
        everybody = self.terms.workers + self.terms.servers
        while (self._control.attached[:everybody] < stage).any():
            time.sleep(PAUSE_SECONDS["cpu"])

    def _own_buffers(self) -> None:
        """Where this worker's gradients start and answers arrive."""
        terms, layout, regions, rank = self.terms, self.layout, self._shared.regions, self.peers.rank
        if not self.on_gpu:
            assert regions is not None
            self.sent = regions.pushed[rank]
            self.means = self.sent if terms.echoes else regions.out_sent[rank]
            self.weights = regions.weights if terms.synchronous else regions.out[rank]
            return
        from trainers.kvstore import cuda_copies

        self._cuda = cuda_copies
        cuda_copies.page_lock(self._shared.address, len(self._shared.bytes))
        self._staging = torch.zeros(layout.push_bytes, dtype=torch.uint8, device=self.device)
        if terms.server_gpu:
            self._exported = cuda_copies.Exported(layout.pull_bytes, self.device)
            self._control.handles[rank] = list(self._exported.handle())
            inbox = self._exported.tensor
        else:
            inbox = torch.zeros(layout.pull_bytes, dtype=torch.uint8, device=self.device)
        self.sent = views(self._staging, layout, kept=False, push=True)
        self.means, self.weights = views(inbox, layout, kept=False), views(inbox, layout, kept=True)
        self._pushing, self._pulling = (cuda_copies.Lane(torch.cuda.Stream()) for _ in range(2))
        self._staged, self._fetched = ([torch.cuda.Event() for _ in layout.buckets] for _ in range(2))
        self._all_fetched = [torch.cuda.Event() for _ in range(2)]  # of exchanges with even and odd numbers

    def _connect(self) -> None:
        """Addresses of flags and of the servers' memory, as this GPU sees them."""
        shared, regions, rank = self._shared, self._shared.regions, self.peers.rank
        offset = self._cuda.device_address(shared.address) - shared.address
        self._push_flag = shared.address_of(self._control.pushed[rank]) + offset
        self._done_flag = shared.address_of(self._control.done[rank]) + offset
        if self.terms.server_gpu:
            bases = [self._cuda.imported(handle.tobytes()) for handle in self._control.handles[self.terms.workers :]]
            start = Regions.pushed_start(self.terms, self.layout, rank)
            self._push_to = [bases[bucket.server] + start + bucket.push_offset for bucket in self.layout.buckets]
            self._weights_at = [bases[bucket.server] + bucket.pull_offset for bucket in self.layout.buckets]
            return
        assert regions is not None

        def addresses(region: list[Tensor]) -> list[int]:
            return [view.data_ptr() + offset for view in region]

        self._push_to, self._weights_at = addresses(regions.pushed[rank]), addresses(regions.weights)
        self._means_from = self._push_to if self.terms.echoes else addresses(regions.out_sent[0])
        self._weights_from = self._weights_at if self.terms.synchronous else addresses(regions.out[rank])

    def _serve_here(self) -> None:
        """Start this worker's own server.

        Beside a GPU it is a thread that waits for pushes, with others that sum. A CPU worker serves while it waits for
        answers: a thread would take the core that computes.
        """
        arithmetic = OnCpu(self.terms, self._shared, self._mine())
        self._server = Server(self.terms, self._control, self.peers.rank, self._mine(), arithmetic)
        if self.on_gpu:
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        assert self._server is not None
        try:
            torch.set_num_threads(self.threads)  # of this thread; the process is near its GPU already
            self._server.run(lambda: bool(self._control.stop[0]), lambda served: None, PAUSE_SECONDS["cuda"])
        except BaseException:
            traceback.print_exc()  # to the rank's log
            os._exit(1)  # nothing else would notice, and every worker would wait

    def _mine(self) -> list[int]:
        """Buckets that this worker's own server serves."""
        buckets = enumerate(self.layout.buckets)
        return [] if self.terms.servers else [number for number, b in buckets if b.server == self.peers.rank]

    # An exchange.

    def push(self, bucket: int, after_answer: bool = False) -> None:
        """Send what lies in `sent[bucket]`, and have the answer fetched as soon as it is there.

        `after_answer` (on a GPU): not before the answer to the last push of the same bucket is here.
        """
        number = self._number + 1
        if not self.on_gpu:
            self._control.pushed[self.peers.rank, bucket] = number
            return
        sent, lane = self.sent[bucket], self._pushing
        self._staged[bucket].record()
        lane.stream.wait_event(self._staged[bucket])
        if after_answer:
            lane.stream.wait_event(self._fetched[bucket])
        lane.copy(self._push_to[bucket], sent.data_ptr(), sent.nbytes)
        lane.write_flag(self._push_flag + 4 * bucket, number)
        self._pulling.wait_flag(self._done_flag + 4 * bucket, number)
        if not self.terms.server_gpu:  # those write into our memory themselves
            answer = (self.means if self._only_gradients else self.weights)[bucket]
            source = (self._means_from if self._only_gradients else self._weights_from)[bucket]
            self._pulling.copy(answer.data_ptr(), source, answer.nbytes)
        self._fetched[bucket].record(self._pulling.stream)

    def answered(self, one_behind: bool = False) -> None:
        """Every bucket was pushed: the current stream (or this thread) waits for all answers.

        `one_behind` (on a GPU): for those of the exchange before.
        """
        self._number += 1
        if self.on_gpu:
            last, before = self._all_fetched[self._number % 2], self._all_fetched[1 - self._number % 2]
            last.record(self._pulling.stream)
            torch.cuda.current_stream().wait_event(before if one_behind else last)
            return
        short_naps()
        done = self._control.done[self.peers.rank]
        with self.on_threads():
            while (done < self._number).any():
                if self._server is None or not self._server.turn():
                    time.sleep(PAUSE_SECONDS["cpu"])

    def close(self) -> None:
        """End the servers. Collective over the peers."""
        if self.on_gpu:
            torch.cuda.synchronize()
        self.peers.barrier()
        self._control.stop[0] = 1
        if self._thread:
            self._thread.join()

    def staleness(self) -> dict[str, float]:
        """Updates so far and their staleness; for asynchronous servers."""
        updates = int(self._control.staleness.sum())
        mean = float(self._control.stale.sum()) / updates if updates else float("nan")
        worst = float(self._control.worst.max())
        return {"staleness/mean": mean, "staleness/max": worst, "staleness/updates": float(updates)}

    # What the machine allows.

    def all_at_once(self, out: bool, back: bool) -> None:
        """The bytes of an exchange in the largest possible copies, both ways at once, waiting for nobody. GPUs only."""
        current = torch.cuda.current_stream()
        lanes = [lane for lane, wanted in ((self._pushing, out), (self._pulling, back)) if wanted]
        for lane in lanes:
            lane.stream.wait_stream(current)
        if out and self.terms.server_gpu:
            for target, sent in zip(self._push_to, self.sent, strict=True):
                self._pushing.copy(target, sent.data_ptr(), sent.nbytes)
        elif out:
            self._pushing.copy(self._push_to[0], self._staging.data_ptr(), len(self._staging))
        if back:
            self._pulling.copy(self.means[0].data_ptr(), self._means_from[0], self.layout.push_bytes)
        for lane in lanes:
            current.wait_stream(lane.stream)

    def sum_alone(self) -> None:
        """This worker's share of the sums, on what lies there, waiting for nobody."""
        regions = self._shared.regions
        assert regions is not None
        space = torch.empty(max(bucket.elements for bucket in self.layout.buckets))
        with self.on_threads():
            for number in self._mine():
                if not self.terms.echoes:
                    cpu_sums.mean(
                        [w[number] for w in regions.pushed], [copy[number] for copy in regions.out_sent], space
                    )

    def summed_bytes(self) -> float:
        """Bytes that the sums of one exchange read and write in host memory, for each worker."""
        terms = self.terms
        if terms.echoes:
            return 0
        answers = terms.copies if terms.synchronous else terms.workers
        return self.layout.push_bytes * (terms.workers + answers) / terms.workers

    @contextlib.contextmanager
    def on_threads(self) -> Iterator[None]:
        """The calling thread's operators run on as many threads as the sums."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


class HostMemory:
    """What the sums of an exchange read and write in host memory, as STREAM's add (two reads, one write) on memory of its own;
    `linked`: while the links copy both ways, too.
    """

    def __init__(self, worker: Worker, linked: bool) -> None:
        self._worker, self._linked = worker, linked
        elements = int(worker.summed_bytes() // 12)
        self._one, self._other, self._sum = (torch.ones(elements) for _ in range(3))

    def __call__(self) -> None:
        """One exchange's worth, waiting for nothing."""
        if self._linked:
            self._worker.all_at_once(True, True)
        with self._worker.on_threads():
            torch.add(self._one, self._other, out=self._sum)
