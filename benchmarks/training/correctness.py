"""Facts about the exchange of every cell: is the gradient the mean, and do replicas agree?

METHOD.md, "Correctness, in every cell". The mean takes another path than the exchange, over gloo
and the hosts' memory: what NCCL breaks would be in both, and a cell that has nothing to do with
NCCL would have a communicator and traffic of the check's own. All else is done on the device.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rank.ranks import Ranks
from conf.host import free_memory
from trainers.batches import Batch
from trainers.step import Training
from trainers.strategy import local, whole

# Runs of backward without exchange on the same batch: what differs among them is what the
# arithmetic leaves open, since cuDNN's backward kernels may sum in another order each time.
RUNS = 3
RUNS_AFTER = 2  # of them after the timed windows; one where all were equal before
MARGIN = 10  # times that difference may be between the exchanged gradient and the mean
# Elements compared of each rank's gradient: bounds the cost of the float64 path for large models. A
# small array is compared whole, or a large one would hide it.
MOST_ELEMENTS, WHOLE_ELEMENTS = 1_000_000, 1024
# The integer whose bits are those of an element, by the element's bytes; a longer element is
# several words.
WORDS = {1: torch.int8, 2: torch.int16}
PIECE = 1 << 18  # words at most: a checksum takes a few MB of the device for tensors of any size
# SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"): shifts,
# and signed factors.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, 1))
DIGEST_BYTES = 8
ROOM = 2  # times its own size that must be free before a copy is made
# What is compared of a step: gradients as it leaves them, and how far it moves the weights.
COMPARED = ("gradient", "weights")
UNITS = 2  # in the last place of a weight, by which two steps may move it differently


def replicas_equal(training: Training, ranks: Ranks) -> bool:
    """Return whether the weights of all ranks are equal, bit for bit, by checksums. Collective."""
    return len(equal_arrays(training, ranks)) == len(training.parameters)


def equal_arrays(training: Training, ranks: Ranks) -> set[int]:
    """Return which weights are equal on all ranks, bit for bit, by number. Collective."""
    own = b"".join(checksums(training.parameters))
    of_ranks = torch.tensor(ranks.gather(own)).view(ranks.world_size, -1, DIGEST_BYTES)
    equal = (of_ranks == of_ranks[0]).all(2).all(0)
    return set(equal.nonzero().flatten().tolist())


# The exchanged gradient beside the mean.
class ComparedElements:
    """The elements of a gradient that are compared: all of a small array, some of a large."""

    def __init__(self, training: Training) -> None:
        sizes = [parameter.numel() for parameter in training.parameters]
        share = -(-sum(sizes) // MOST_ELEMENTS)
        # A prime shares no pattern with what is lost regularly.
        while any(share % divisor == 0 for divisor in range(2, int(share**0.5) + 1)):
            share += 1
        self.strides = []
        counts = []
        for size in sizes:
            stride = max(1, min(share, size // WHOLE_ELEMENTS))
            self.strides.append(stride)
            counts.append(-(-size // stride))
        self.counts = torch.tensor(counts)  # (arrays,): elements of each

    def gradient(self, training: Training) -> Tensor:
        """Return the chosen elements, (elements,) in float64; zeros where there is no gradient."""
        arrays = []
        for parameter in training.parameters:
            if parameter.grad is None:
                arrays.append(torch.zeros_like(parameter))
            else:
                arrays.append(parameter.grad)
        return self.values(arrays)

    def values(self, arrays: Sequence[Tensor]) -> Tensor:
        """Return the chosen elements of arrays, (elements,) in float64 on their device."""
        parts = []
        for array, stride in zip(arrays, self.strides, strict=True):
            parts.append(whole(array.detach()).flatten()[::stride].double())
        return torch.cat(parts)

    def by_array(self, values: Tensor) -> Tensor:
        """Return Σ|value| of each array, (arrays,), added up in the same order each time."""
        return torch.stack(torch._foreach_norm(list(values.split(self.counts.tolist())), 1))

    def repeats(self, runs: Sequence[Tensor]) -> Tensor:
        """Return how much runs of one step differ in each array, (arrays,): the largest pair."""
        most = torch.zeros_like(self.by_array(runs[0]))
        for first, second in itertools.combinations(runs, 2):
            most = torch.maximum(most, self.by_array(first - second))  # keeps NaN
        return most


def gradients_equal(training: Training, ranks: Ranks) -> bool:
    """Return whether the last step left equal gradients on all ranks, bit for bit. Collective."""
    of_ranks = ranks.gather(checksum([ComparedElements(training).gradient(training)]))
    return all(values == of_ranks[0] for values in of_ranks)


def gradient(
    training: Training, batch: Batch, ranks: Ranks, runs_alone: int = RUNS, in_step: bool = False
) -> dict[str, Any]:
    """Return facts: how far the exchanged gradient is from the mean, and how far it may be.

    `gradient_error` is ‖exchanged − mean‖ ÷ ‖mean‖, the largest of any rank. `gradient_spread` is
    ‖local − mean‖ ÷ ‖mean‖, the smallest of any rank: an error far below the spread proves an
    exchange. `gradient_repeat` is the same difference between runs of backward without exchange,
    and `gradient_tolerance` MARGIN times that, with what the exchange must round. `gradient_worst`
    says the same of the worst array: Σ|exchanged − mean| ÷ Σ of the ranks' mean |gradient|, beside
    its own tolerance. Collective; leaves weights as they were, but for `in_step`: then the
    exchanged gradient is the one that a whole step updates by.
    """
    elements = ComparedElements(training)
    with training.without_exchange():
        runs = [_settled_gradient(training, batch, ranks, elements)]
        runs += [_gradient_of(training, batch, elements) for _ in range(runs_alone - 1)]
    with training.strategy.gradients_only():
        if in_step:
            exchanged = _gradient_in_step(training, batch, elements)
        else:
            exchanged = _gradient_of(training, batch, elements)
            training.optimizer.zero_grad(set_to_none=True)
    mean = _mean(runs[0], ranks)
    # Each of n sums rounds half a unit in the last place, and reserve, as a share of Σ|local|.
    rounding = torch.clamp(ranks.world_size * _digits(training), min=training.strategy.rounding)
    step = training.strategy.smallest_step
    if training.strategy.smallest_share:
        largest = gathered(ranks, runs[0].abs().max()).max().item()
        step += training.strategy.smallest_share * largest
    facts = _of_all_arrays(ranks, runs, exchanged, mean, rounding.max().item())
    facts["gradient_tolerance"] += step * len(mean) ** 0.5 / (mean.norm().item() or 1.0)
    sums = [elements.by_array(exchanged - mean), elements.repeats(runs), elements.by_array(runs[0])]
    of_ranks = gathered(ranks, torch.stack(sums))
    wrong, repeats, _ = of_ranks.amax(0)
    sizes = of_ranks[:, 2].mean(0)
    worst = worst_array(wrong, repeats, sizes, rounding, step * elements.counts)
    return facts | {"gradient_worst": worst | {"array": training.names[worst["array"]]}}


def average(training: Training, ranks: Ranks) -> dict[str, Any]:
    """Return the weights that are farthest from the mean of the ranks' own, of those of a period.

    Each step is first taken without exchange, twice. Weights that are equal on all ranks behind the
    step itself are compared with the mean of these. Empty where a rank has no room for a copy of
    its state. Collective.
    """
    snapshot = Snapshot.take(training, ranks)
    if snapshot is None:
        return {}
    elements, rounding = ComparedElements(training), ranks.world_size * _digits(training)
    worst: dict[str, Any] = {}
    for _ in range(training.strategy.equal_every):
        batch, runs = next(training.batches), []
        for _ in range(RUNS_AFTER):
            with snapshot.restored(), training.without_exchange():
                runs.append(_weights_after_step(training, batch, elements))
        difference = _weights_after_step(training, batch, elements) - _mean(runs[0], ranks)
        sums = [elements.by_array(difference), elements.repeats(runs), elements.by_array(runs[0])]
        wrong, repeats, sizes = gathered(ranks, torch.stack(sums)).amax(0)
        equal = sorted(equal_arrays(training, ranks))
        if not equal:
            continue
        allowed = (repeats[equal], sizes[equal], rounding[equal], torch.zeros(len(equal)))
        facts = worst_array(wrong[equal], *allowed)
        facts["array"] = training.names[equal[facts["array"]]]
        if not worst or not facts["error"] <= worst["error"]:
            worst = facts
    return {"average_worst": worst}


def _weights_after_step(training: Training, batch: Batch, elements: ComparedElements) -> Tensor:
    torch.manual_seed(training.cell.seed)
    training.step(batch)
    return elements.values(training.parameters)


def _of_all_arrays(
    ranks: Ranks, runs: Sequence[Tensor], exchanged: Tensor, mean: Tensor, rounding: float
) -> dict[str, float]:
    """Return the facts of all arrays together, as shares of ‖mean‖. Collective."""
    local, repeat = runs[0], torch.zeros_like(mean.norm())
    for first, second in itertools.combinations(runs, 2):
        repeat = torch.maximum(repeat, (first - second).norm())
    own = torch.stack([(exchanged - mean).norm(), (local - mean).norm(), local.norm(), repeat])
    norms = gathered(ranks, own) / (mean.norm().item() or 1.0)
    error, _, size, repeat_share = norms.amax(0).tolist()  # torch's maximum keeps NaN
    return {
        "gradient_error": error,
        "gradient_spread": norms[:, 1].min().item(),
        "gradient_repeat": repeat_share,
        "gradient_tolerance": MARGIN * repeat_share + rounding * size,
    }


def _gradient_of(training: Training, batch: Batch, elements: ComparedElements) -> Tensor:
    torch.manual_seed(training.cell.seed)  # the same dropout masks each time
    training.backward(batch)
    return elements.gradient(training)


def _settled_gradient(
    training: Training, batch: Batch, ranks: Ranks, elements: ComparedElements
) -> Tensor:
    """Return the gradient of this rank alone. A loss scale with which that of a rank overflows is
    halved, as it is after such a step. Collective.
    """
    scaler = training.scaler
    while True:
        local = _gradient_of(training, batch, elements)
        if not scaler.is_enabled():
            return local
        fits = bool(local.isfinite().all()) or scaler.get_scale() <= 1
        if all(on_rank for (on_rank,) in ranks.gather([fits])):
            return local
        scaler.update(scaler.get_scale() / 2)


def _gradient_in_step(training: Training, batch: Batch, elements: ComparedElements) -> Tensor:
    """Return the gradient that a whole step updates by."""
    gradients = []
    usual = training.mark

    def mark(stage: str) -> AbstractContextManager[Any]:
        if stage == "optimizer":  # which may scale, clip or drop them
            gradients.append(elements.gradient(training))
        return usual(stage)

    torch.manual_seed(training.cell.seed)
    training.mark = mark
    try:
        training.step(batch)
    finally:
        training.mark = usual
    return gradients[0]


def _digits(training: Training) -> Tensor:
    """Return the precision of each array's dtype, (arrays,) in float64."""
    eps = [torch.finfo(parameter.dtype).eps for parameter in training.parameters]
    return torch.tensor(eps, dtype=torch.float64)


def _mean(local: Tensor, ranks: Ranks) -> Tensor:
    """Return the mean over the ranks of (elements,) values, on their device. Collective.

    Every rank gets its share of the elements from all ranks over gloo, adds them up itself and
    gives the means to all.
    """
    own = torch.nn.functional.pad(local.cpu(), (0, -len(local) % ranks.world_size))
    of_ranks, mean = torch.empty_like(own), torch.empty_like(own)
    dist.all_to_all_single(of_ranks, own)
    own_mean = of_ranks.view(ranks.world_size, -1).sum(0) / ranks.world_size
    dist.all_gather_into_tensor(mean, own_mean)
    return mean[: len(local)].to(local.device)


def worst_array(
    wrong: Tensor, repeats: Tensor, sizes: Tensor, rounding: Tensor, smallest: Tensor
) -> dict[str, Any]:
    """Return the array, by number, whose error is the most of its tolerance.

    All are (arrays,) sums of |value|.
    """
    # An array of few elements may repeat by chance: none is trusted to repeat better than most do.
    usual = (repeats / sizes).nan_to_num(0.0).median() * sizes
    allowed = MARGIN * torch.maximum(repeats, usual) + rounding * sizes + smallest
    share = torch.where(wrong == 0, 0.0, wrong / allowed)
    index = int(share.argmax())  # torch's: NaN is the largest
    size = sizes[index].item() or 1.0
    error, tolerance = wrong[index].item() / size, allowed[index].item() / size
    return {"array": index, "error": error, "tolerance": tolerance}


def gathered(ranks: Ranks, values: Tensor) -> Tensor:
    """Return the values of every rank, (ranks, *shape). Collective."""
    of_ranks = torch.tensor(ranks.gather(values.flatten().tolist()), dtype=torch.float64)
    return of_ranks.view(-1, *values.shape)


# Checksums of tensors, made on their device: equal tensors have equal ones, and only these travel.
def checksums(tensors: Sequence[Tensor]) -> list[bytes]:
    """Return 8 bytes for each tensor of one device, which depend on its bits and their order."""
    if not tensors:
        return []
    most_words = min(PIECE, max(tensor.nbytes for tensor in tensors))
    # Multipliers of int64: too large products lose their upper bits everywhere.
    mixed = torch.arange(1, most_words + 1, device=tensors[0].device) * GOLDEN
    for shift, factor in MIX:
        mask = (1 << (64 - shift)) - 1  # a shift brings in the sign: cut it off
        mixed = (mixed ^ (mixed >> shift & mask)) * factor
    multipliers = mixed | 1
    sums: list[Tensor] = []
    ends = []  # of each tensor's sums
    for tensor in tensors:
        flat = whole(tensor.detach()).flatten().contiguous()
        for piece in flat.view(WORDS.get(flat.element_size(), torch.int32)).split(PIECE):
            sums.append((piece.to(torch.int64) * multipliers[: len(piece)]).sum())
        ends.append(len(sums))
    values = torch.stack(sums).tolist()  # waits for the device once
    digests = []
    for start, end in itertools.pairwise([0, *ends]):
        words = [value.to_bytes(8, "big", signed=True) for value in values[start:end]]
        digests.append(_digest(words))
    return digests


def checksum(tensors: Sequence[Tensor]) -> bytes:
    """Return 8 bytes for all tensors together, which depend on their order too."""
    return _digest(checksums(tensors))


def _digest(parts: Iterable[bytes]) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()[:DIGEST_BYTES]


# Steps without exchange leave no trace: timed steps then go on as if these had never been.
class Snapshot:
    """Copies of a rank's weights, buffers and the state of optimizer and scaler, on its device.

    Weights that a strategy keeps elsewhere (servers, flat buckets) need no copy: steps without
    exchange do not reach them. With `whole` they are copied too, where the strategy names them.
    """

    def __init__(self, training: Training, whole: bool = False) -> None:
        """Make the copies now, so that later steps find the device's memory as timed ones do."""
        self._training, self._whole = training, whole
        self._copies = [torch.empty_like(tensor) for tensor in _state(training, whole)]

    @classmethod
    def take(cls, training: Training, ranks: Ranks, whole: bool = False) -> "Snapshot | None":
        """Make the copies on every rank; None on all where one has no room. Collective."""
        needed = ROOM * sum(tensor.nbytes for tensor in _state(training, whole))
        if training.device.type == "cuda":
            free: float = torch.cuda.mem_get_info(training.device)[0]
        else:
            free = (free_memory() or 0) / ranks.world_size
        if all(fits for (fits,) in ranks.gather([free >= needed])):
            return cls(training, whole)
        return None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Bring everything back at the end of the context. Waits only with a loss scaler."""
        optimizer, scaler = self._training.optimizer, self._training.scaler
        before, scaler_state = list(optimizer.state), scaler.state_dict()
        with torch.no_grad():
            torch._foreach_copy_(self._copies, _state(self._training, self._whole))
        yield
        # An optimizer that only steps without exchange has none yet.
        for parameter in optimizer.state.keys() - before:
            del optimizer.state[parameter]
        scaler.load_state_dict(scaler_state)
        with torch.no_grad():
            torch._foreach_copy_(_state(self._training, self._whole), self._copies)


def _state(training: Training, whole: bool) -> list[Tensor]:
    """Return the tensors that a step changes on this rank, always in the same order."""
    tensors: list[Tensor] = [*training.network.parameters(), *training.network.buffers()]
    for state in training.optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                tensors.append(value)
    if whole:
        tensors += training.strategy.state()
    return [local(tensor) for tensor in tensors]


# CUDA graphs: does a replay do what the step does without a graph, and how often did each run?
def replay_differences(training: Training, drawn: Sequence[Batch], ranks: Ranks) -> dict[str, Any]:
    """Return the array by which a replay differs most from the step without a graph.

    Steps with and without exchange are graphs of their own, and each is replayed on another batch
    than the one that its graph holds. `error` is Σ|replayed − not| ÷ Σ|not|, `tolerance` what runs
    without a graph differ by, MARGIN times, and what is rounded. Empty without graphs, and where a
    rank has no room for a second copy of its state. Collective; leaves the state as it was.
    """
    snapshot = Snapshot.take(training, ranks, whole=True)
    if snapshot is None or training.graphs is None:
        return {}
    worst: dict[str, Any] = {}
    worst_share = -1.0
    for exchanges in (True, False):
        if not exchanges and not training.strategy.in_lockstep:
            continue
        with nullcontext() if exchanges else training.without_exchange():
            with snapshot.restored():
                training.step(drawn[0])  # captures
            batch = drawn[0]
            for candidate in drawn:
                if not training.graphs.holds(candidate):
                    batch = candidate
                    break
            for name, facts in _compare(training, snapshot, batch, ranks).items():
                error, tolerance = facts["error"], facts["tolerance"]
                share = float("inf")  # where nothing is allowed, or the error is not a number
                if not error:
                    share = 0.0
                elif tolerance and error == error:
                    share = error / tolerance
                if share > worst_share:
                    worst_share = share
                    worst = {"what": name, "exchange": exchanges, **facts}
    return {"replay": worst}


def replay_counts(training: Training, ranks: Ranks) -> dict[str, Any]:
    """Return the replays that each rank asked for, and those its device counted. Collective."""
    if training.graphs is None:
        return {}
    replays = []
    for requested, done in ranks.gather([training.graphs.asked, training.graphs.done]):
        replays.append([int(requested), int(done)])
    return {"replays": replays}


def _compare(
    training: Training, snapshot: Snapshot, batch: Batch, ranks: Ranks
) -> dict[str, dict[str, Any]]:
    """Return the worst array of everything that is compared, by its name. Collective."""
    elements = ComparedElements(training)

    def changes(step: Callable[[Batch], object]) -> Tensor:
        with snapshot.restored():
            torch.manual_seed(training.cell.seed)
            before = elements.values(training.parameters)
            step(batch)
            moved = elements.values(training.parameters) - before
            return torch.stack([elements.gradient(training), moved])

    runs = [changes(training.uncaptured_step) for _ in range(RUNS)]
    difference = changes(training.step) - runs[0]
    rounding = _digits(training)
    weights = gathered(ranks, elements.by_array(elements.values(training.parameters))).amax(0)
    facts = {}
    for row, name in enumerate(COMPARED):
        repeats = elements.repeats([run[row] for run in runs])
        own = [elements.by_array(difference[row]), repeats, elements.by_array(runs[0][row])]
        wrong, repeats, sizes = gathered(ranks, torch.stack(own)).amax(0)  # the largest rank
        smallest = torch.zeros_like(weights)
        if name == "weights":
            smallest = UNITS * rounding * weights
        worst = worst_array(wrong, repeats, sizes, ranks.world_size * rounding, smallest)
        facts[name] = worst | {"array": training.names[worst["array"]]}
    return facts
