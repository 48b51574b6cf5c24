"""What each of two ranks sees of fast paths: every one that needs no GPU, engaged and not engaged."""

import contextlib
import functools
import itertools
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.path_facts import WatchedUpdate

CLEAN_RUNS = 50
PATHS = {"DDP buckets", "static graph", "bucket views", "half-precision hook", "accumulation",
         "FSDP prefetch", "channels_last", "autocast", "fused optimizer", "whole graph"}  # fmt: skip
STEPS = 4  # the last is watched: DDP rebuilds its buckets in the second


def network(width=64, layers=3):
    torch.manual_seed(0)
    hidden = []
    for _ in range(layers):
        hidden += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(),
                         nn.Linear(4 * 64, width), *hidden, nn.Linear(width, 4))  # fmt: skip


class Halves(nn.Module):
    """Computes in float32 although autocast asks for bfloat16 around it."""

    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, images):
        with torch.autocast("cpu", enabled=False):
            return self.inner(images)


def broken(images):
    torch._dynamo.graph_break()
    return images * 2


def watched(model, optimizer=None, batches=None, inner=None, passes=1, sync="no_sync",
            autocast=False, spoil=None):  # fmt: skip
    """The facts of the last of some updates of a model, as a script would make them."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    call, watch = inner or model, None
    for step in range(STEPS):
        if step == STEPS - 1:
            watch = WatchedUpdate(call, optimizer)
        optimizer.zero_grad()
        for turn in range(passes):
            images = next(batches) if batches is not None else torch.randn(2, 3, 8, 8)
            if isinstance(images, list):
                images = images[0]
            may_skip = turn < passes - 1 and sync and hasattr(model, sync)
            with getattr(model, sync)() if may_skip else contextlib.nullcontext():
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    loss = call(images).float().square().mean()
                loss.backward()
        if spoil:
            spoil(model)
        optimizer.step()
    return watch.end()


def ddp(model=None, hook=None, **options):
    wrapped = nn.parallel.DistributedDataParallel(model or network(), **options)
    if hook:
        wrapped.register_comm_hook(None, hook)
    return wrapped


def sharded(prefetch):
    model = network()
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    for layer, following in itertools.pairwise(layers):
        layer.set_modules_to_forward_prefetch([following if prefetch else layers[0]])
    return model


def copied_gradients(model):
    for parameter in model.parameters():
        parameter.grad = parameter.grad.clone()


def ignored_hook(state, bucket):
    """A hook whose name asks for fp16, and which sends float32."""
    work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return work.then(lambda future: future.value()[0] / 2)


ignored_hook.__qualname__ = ignored_hook.__name__ = "fp16_but_float32"


def loaded(workers, dataset):
    return iter(DataLoader(dataset, batch_size=2, num_workers=workers))


def cases():
    """Every case: its name is the path, then whether it engages; then what makes its facts."""
    images = torch.randn(64, 3, 8, 8)
    last, big = torch.channels_last, 0.02
    yield "DDP buckets", "yes", lambda: watched(ddp(bucket_cap_mb=big))
    bypassed = ddp(bucket_cap_mb=big)
    yield "DDP buckets", "no", lambda: watched(bypassed, inner=bypassed.module)
    yield "static graph", "yes", lambda: watched(ddp(static_graph=True))
    static = ddp(static_graph=True)
    yield "static graph", "no", lambda: watched(static, inner=static.module)
    views = {"gradient_as_bucket_view": True}
    yield "bucket views", "yes", lambda: watched(ddp(**views))
    yield "bucket views", "no", lambda: watched(ddp(**views), spoil=copied_gradients)
    yield "half-precision hook", "yes", lambda: watched(ddp(hook=default_hooks.bf16_compress_hook))
    yield "half-precision hook", "no", lambda: watched(ddp(hook=ignored_hook))
    yield "accumulation", "yes", lambda: watched(ddp(), passes=3)
    yield "accumulation", "no", lambda: watched(ddp(), passes=3, sync=None)
    yield "FSDP prefetch", "yes", lambda: watched(sharded(prefetch=True))
    yield "FSDP prefetch", "no", lambda: watched(sharded(prefetch=False))
    batches = iter([images[:2].to(memory_format=last)] * STEPS)
    yield (
        "channels_last",
        "yes",
        lambda: watched(network().to(memory_format=last), batches=batches),
    )
    yield "channels_last", "no", lambda: watched(network().to(memory_format=last))
    yield "autocast", "yes", lambda: watched(network(), autocast=True)
    yield "autocast", "no", lambda: watched(Halves(), autocast=True)
    for kind, answer in ((torch.optim.SGD, "yes"), (torch.optim.RMSprop, "no")):
        model = network()
        optimizer = kind([{"params": list(model.parameters()), "fused": True}], lr=0.01)
        yield "fused optimizer", answer, functools.partial(watched, model, optimizer)
    yield "whole graph", "yes", lambda: compiled(network())
    yield "whole graph", "no", lambda: compiled(nn.Sequential(Broken(), network()))


class Broken(nn.Module):
    def forward(self, images):
        return broken(images)


def compiled(model):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return watched(torch.compile(model, backend="eager"))


def clean(number):
    """The facts of a run in which all that is asked for engages; `number` chooses what is asked."""
    draw = random.Random(number)
    last = draw.random() < 0.5
    model, layout = network(layers=draw.randint(1, 6)), torch.contiguous_format
    if last:
        layout = torch.channels_last
        model = model.to(memory_format=layout)
    wrapped = ddp(
        model,
        draw.choice([None, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook]),
        static_graph=draw.random() < 0.5,
        gradient_as_bucket_view=draw.random() < 0.5,
        bucket_cap_mb=draw.choice([0.02, 1, 25]),
    )
    kind = draw.choice([torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
    optimizer = kind(wrapped.parameters(), lr=0.01, fused=draw.random() < 0.5)
    passes = 1
    if not wrapped.static_graph:
        passes = draw.choice([1, 1, 2, 4])
    images = torch.randn(64, 3, 8, 8).to(memory_format=layout)
    batches = itertools.cycle([images[:4]])
    if draw.random() < 0.2 and not last:
        batches = loaded(draw.randint(1, 2), TensorDataset(images))
    return watched(wrapped, optimizer, batches, passes=passes, autocast=draw.random() < 0.3)


def run(rank, folder):
    """The path and the right answer of each case, and its facts."""
    return [[path, answer, make()] for path, answer, make in cases()]


def run_clean(rank, folder):
    return [clean(number) for number in range(CLEAN_RUNS)]
