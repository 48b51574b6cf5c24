"""Facts about correctness of every cell: whether replicas agree, and how far the exchanged gradient is from the mean.

Equal replicas alone prove nothing (equal data and no exchange give them too), so ranks see different data, and the
gradient after the exchange is compared with the mean of the gradients before it, which takes another path: over gloo and the
hosts' memory, without a reduction of any backend. NCCL takes no part, or what it breaks would be in both, and a cell that has
nothing to do with NCCL, or an algorithm of it that gathers nothing, would have a communicator and traffic of the check's own.
All else is done on the device.
"""

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.rank.ranks import Ranks
from benchmarks.timing import compilation
from conf.host_limits import free_memory
from trainers.batches import Batch
from trainers.step import Training

# Runs of backward without exchange on the same batch: what differs among them is what the arithmetic leaves open, since
# cuDNN's backward kernels may sum in another order each time.
RUNS = 3
MARGIN = 10  # times that difference may be between the exchanged gradient and the mean
# Elements compared of each rank's gradient: bounds the cost of the float64 path for large models. A small array is compared
# whole, or a large one would hide it.
MOST_ELEMENTS, WHOLE_ELEMENTS = 1_000_000, 1024


def replicas_equal(training: Training, ranks: Ranks) -> bool:
    """Return whether the weights of all ranks are equal, bit for bit, by their checksums. Collective."""
    return len({tuple(values) for values in ranks.gather(of_all(training.parameters))}) == 1


@dataclass(frozen=True)
class ComparedElements:
    """Which elements of a gradient are compared: every element of a small array, an equal share of each large one."""

    strides: list[int]
    counts: Tensor  # (arrays,): elements of each

    @classmethod
    def of(cls, training: Training) -> "ComparedElements":
        """Choose the elements of a training's gradient."""
        sizes = [parameter.numel() for parameter in training.parameters]
        share = _next_prime(
            -(-sum(sizes) // MOST_ELEMENTS)
        )  # a prime shares no pattern with what is lost regularly
        strides = [max(1, min(share, size // WHOLE_ELEMENTS)) for size in sizes]
        counts = torch.tensor(
            [-(-size // stride) for size, stride in zip(sizes, strides, strict=True)]
        )
        return cls(strides, counts)

    def gradient(self, training: Training) -> Tensor:
        """Return the chosen elements, (elements,) in float64 on the device; zeros of an array without a gradient."""
        return self.values(
            [torch.zeros_like(one) if one.grad is None else one.grad for one in training.parameters]
        )

    def values(self, arrays: Sequence[Tensor]) -> Tensor:
        """Return the chosen elements of arrays, (elements,) in float64 on their device."""
        parts = [
            array.detach().flatten()[::stride].double()
            for array, stride in zip(arrays, self.strides, strict=True)
        ]
        return torch.cat(parts)

    def by_array(self, values: Tensor) -> Tensor:
        """Return Σ|value| of each array, (arrays,), added up in the same order each time."""
        return torch.stack(torch._foreach_norm(list(values.split(self.counts.tolist())), 1))


def gradient(training: Training, batch: Batch, ranks: Ranks) -> dict[str, Any]:
    """Return facts: how far the exchanged gradient is from the mean of the local ones, and how far it may be.

    `gradient_error` is ‖exchanged − mean‖ ÷ ‖mean‖, the largest of any rank. `gradient_spread` is ‖local − mean‖ ÷ ‖mean‖, the
    smallest of any rank: an error far below the spread proves an exchange. `gradient_repeat` is the same difference between
    runs of backward without exchange, and `gradient_tolerance` MARGIN times that, with what the exchange must round.
    `gradient_worst` says the same of the worst array: Σ|exchanged − mean| ÷ Σ of the ranks' mean |gradient|, beside its own
    tolerance. Collective; leaves weights as they were.
    """
    sample = ComparedElements.of(training)
    with training.without_exchange():
        runs = [_seeded(training, batch, sample) for _ in range(RUNS)]
    with training.strategy.gradients_only():
        exchanged = _seeded(training, batch, sample)
    training.optimizer.zero_grad(set_to_none=True)
    local, mean = runs[0], _mean(runs[0], ranks)
    wrong = exchanged - mean
    pairs = [one - other for one, other in itertools.combinations(runs, 2)]
    repeat = torch.stack([pair.norm() for pair in pairs]).max()
    norms = gathered(
        ranks, torch.stack([wrong.norm(), (local - mean).norm(), local.norm(), repeat])
    )
    repeats = torch.stack([sample.by_array(pair) for pair in pairs]).amax(0)
    by_array = gathered(
        ranks, torch.stack([sample.by_array(wrong), repeats, sample.by_array(local)])
    )

    norm = mean.norm().item() or 1.0
    error, _, size, repeat = (
        value / norm for value in norms.amax(0).tolist()
    )  # torch's maximum keeps NaN
    rounding = torch.tensor(
        [_rounding(training, p.dtype, ranks.world_size) for p in training.parameters]
    ).double()
    step = training.strategy.smallest_step
    tolerance = MARGIN * repeat + rounding.max().item() * size + step * len(mean) ** 0.5 / norm
    wrongs, repeats, _ = by_array.amax(0)
    worst_array = worst(wrongs, repeats, by_array[:, 2].mean(0), rounding, step * sample.counts)
    return {
        "gradient_error": error,
        "gradient_spread": norms[:, 1].min().item() / norm,
        "gradient_repeat": repeat,
        "gradient_tolerance": tolerance,
        "gradient_worst": worst_array | {"array": training.names[worst_array["array"]]},
    }


def _mean(local: Tensor, ranks: Ranks) -> Tensor:
    """Return the mean over the ranks of (elements,) values, on their device. Collective.

    Every rank gets its share of the elements from all ranks over gloo, adds them up itself and gives the means to all.
    """
    own = torch.nn.functional.pad(local.cpu(), (0, -len(local) % ranks.world_size))
    of_all, mean = torch.empty_like(own), torch.empty_like(own)
    dist.all_to_all_single(of_all, own)
    dist.all_gather_into_tensor(mean, of_all.view(ranks.world_size, -1).sum(0) / ranks.world_size)
    return mean[: len(local)].to(local.device)


def worst(
    wrong: Tensor, repeats: Tensor, sizes: Tensor, rounding: Tensor, smallest: Tensor
) -> dict[str, Any]:
    """Return the array, by number, whose error is the most of its tolerance; all are (arrays,) sums of |value|."""
    # An array of few elements may repeat by chance: none is trusted to repeat better than most arrays do.
    usual = (repeats / sizes).nan_to_num(0.0).median() * sizes
    allowed = MARGIN * torch.maximum(repeats, usual) + rounding * sizes + smallest
    share = torch.where(wrong == 0, 0.0, wrong / allowed)
    number = int(share.argmax())  # torch's: NaN is the largest
    size = sizes[number].item() or 1.0
    return {
        "array": number,
        "error": wrong[number].item() / size,
        "tolerance": allowed[number].item() / size,
    }


def _rounding(training: Training, dtype: torch.dtype, world_size: int) -> float:
    """Return the share of Σ|local| that the exchange may round: each of n sums half a unit in the last place, and reserve."""
    return max(training.strategy.rounding, world_size * torch.finfo(dtype).eps)


def gathered(ranks: Ranks, values: Tensor) -> Tensor:
    """Return the values of every rank, (ranks, *shape). Collective."""
    of_ranks = torch.tensor(ranks.gather(values.flatten().tolist()), dtype=torch.float64)
    return of_ranks.view(-1, *values.shape)


def _seeded(training: Training, batch: Batch, sample: ComparedElements) -> Tensor:
    """Run backward with the same dropout masks each time. Return the chosen elements of the gradient."""
    torch.manual_seed(training.cell.seed)
    training.backward(batch)
    return sample.gradient(training)


def _next_prime(number: int) -> int:
    """Return the smallest prime that is not below a number."""
    while any(number % divisor == 0 for divisor in range(2, int(number**0.5) + 1)):
        number += 1
    return number


# Facts about what ran, to be compared with what was asked: batches, arithmetic, compiled parts, weights.


LAYERS = (nn.modules.conv._ConvNd, nn.Linear)  # what autocast computes in half precision
OWN = "python"  # the library of a user's own model, which may freeze weights on purpose
ALTERNATING = 0.1  # share of its rate that AdamW surely moves a weight


def batches(drawn: Sequence[Batch], ranks: Ranks) -> dict[str, Any]:
    """Return whether all ranks drew different first batches, and how many different ones this rank drew. Collective."""
    digests = [of_all(inputs) for *inputs, _ in drawn]
    first = [tuple(values) for values in ranks.gather(digests[0])]
    in_turn = min(int(count) for (count,) in ranks.gather([len(set(digests))]))
    return {
        "batches_differ": len(set(first)) == ranks.world_size,
        "batches_in_turn": in_turn,
        "sample": _sample(drawn[0]),
    }


def _sample(batch: Batch) -> dict[str, Any]:
    """Return the dtype and the shape of one sample: of each tensor that forward takes, and of the targets."""
    *inputs, targets = (f"{_word(tensor.dtype)} {list(tensor.shape[1:])}" for tensor in batch)
    return {"inputs": inputs, "targets": targets}


@contextmanager
def arithmetic(training: Training) -> Iterator[dict[str, Any]]:
    """Yield facts that the forward passes inside fill in.

    `autocast` is the dtype that autocast had when the model was called, None where it was off. `layers` counts the
    convolutions and matrix products by the dtype that they returned; compiled ones are not seen. `tf32` tells whether float32
    operations may use it. `compiled_parts`, where torch.compile was asked for, counts those that forward went through.
    """
    kind, real = training.device.type, training.model
    layers: Counter[str] = Counter()
    found: dict[str, Any] = {"autocast": None, "layers": layers}

    def seen(module: nn.Module, arguments: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            layers[_word(output.dtype)] += 1

    def watched(*inputs: Tensor) -> Tensor:
        found["autocast"] = (
            _word(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        )
        outputs = real(*inputs)
        if compiled:
            found["compiled_parts"] = compilation.parts(outputs)
        return outputs

    compiled = training.cell.compiled  # a hook would compile it again
    modules = (
        []
        if compiled
        else [module for module in training.network.modules() if isinstance(module, LAYERS)]
    )
    hooks = [module.register_forward_hook(seen) for module in modules]
    training.model = watched
    try:
        yield found
    finally:
        training.model = real
        for hook in hooks:
            hook.remove()
        found["layers"] = dict(layers)
        found["tf32"] = (
            torch.backends.cudnn.allow_tf32 or torch.get_float32_matmul_precision() != "highest"
        )


class Weights:
    """The weights of a training at one time, as checksums."""

    def __init__(self, training: Training) -> None:
        self._training = training
        own = training.cell.model.library == OWN
        self._named = {
            name: weight
            for name, weight in training.network.named_parameters()
            if weight.requires_grad or not own
        }
        self._before = of_each(list(self._named.values()))

    def still(self, ranks: Ranks) -> dict[str, Any]:
        """Return facts about the arrays that should have moved since then and did not, on the rank with most. Collective.

        An array whose gradient is too small to change any of its elements, or that takes no part, need not move.
        """
        after, names = of_each(list(self._named.values())), list(self._named)
        still = [
            number
            for number, weight in enumerate(self._named.values())
            if after[number] == self._before[number] and self._must_move(weight)
        ]
        share = sum(self._named[names[number]].numel() for number in still) / self._elements()
        count, share, first = max(ranks.gather([len(still), share, still[0] if still else 0]))
        return {"weights_still": int(count), "weights_still_share": share} | (
            {"weights_still_first": names[int(first)]} if count else {}
        )

    def _elements(self) -> int:
        return sum(weight.numel() for weight in self._named.values()) or 1

    def _must_move(self, weight: nn.Parameter) -> bool:
        """Tell whether one step changes an element of this array."""
        if not weight.requires_grad:
            return True
        if weight.grad is None:
            return False
        asked = self._training.cell.optimizer
        if asked.name == "adamw":
            # A step has the size of the rate, whatever the gradient's; alternating ones make it smaller.
            step = (weight.grad != 0) * (asked.learning_rate * ALTERNATING)
        else:
            step = weight.grad.abs() * (asked.learning_rate / self._training.scaler.get_scale())
        return bool((step > weight.detach().abs() * torch.finfo(weight.dtype).eps).any())


def trained_bytes(training: Training) -> int:
    """Return the bytes of all gradients: of every weight of the network that is trained."""
    return sum(weight.nbytes for weight in training.network.parameters() if weight.requires_grad)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Checksums of tensors, made on their device: equal tensors have equal ones, and only the checksums travel.


# The integer whose bits are those of an element, by the element's bytes; a longer element is several words.
WORDS = {1: torch.int8, 2: torch.int16}
PIECE = (
    1 << 18
)  # words at most: a checksum takes a few MB of the device, however large the tensors are
# SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"): shifts, and signed factors.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, 1))


def of_each(tensors: Sequence[Tensor]) -> list[bytes]:
    """Return 8 bytes for each tensor of one device, which depend on the bits and the order of its elements."""
    if not tensors:
        return []
    multipliers = _multipliers(
        min(PIECE, max(tensor.nbytes for tensor in tensors)), tensors[0].device
    )
    found = [
        [
            (piece.to(torch.int64) * multipliers[: len(piece)]).sum()
            for piece in _words(tensor).split(PIECE)
        ]
        for tensor in tensors
    ]
    sums = iter(
        torch.stack([one for pieces in found for one in pieces]).tolist()
    )  # waits for the device once
    return [_hashed(next(sums).to_bytes(8, "big", signed=True) for _ in pieces) for pieces in found]


def of_all(tensors: Sequence[Tensor]) -> bytes:
    """Return 8 bytes for all tensors together, which depend on their order too."""
    return _hashed(of_each(tensors))


def _hashed(parts: Iterable[bytes]) -> bytes:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    return whole.digest()[:8]


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as words (words,), in the order of its indices, whatever its layout."""
    flat = tensor.detach().flatten().contiguous()
    return flat.view(WORDS.get(flat.element_size(), torch.int32))


def _multipliers(count: int, device: torch.device) -> Tensor:
    """Return the multipliers, (count,) int64: products that are too large lose their upper bits, on every device alike."""
    mixed = torch.arange(1, count + 1, device=device) * GOLDEN
    for shift, factor in MIX:
        mixed = (
            mixed ^ (mixed >> shift & (1 << (64 - shift)) - 1)
        ) * factor  # a shift brings in the sign: cut it off
    return mixed | 1


# What steps without exchange change on a rank, kept and brought back: timed steps then go on as if these had never been.


ROOM = 2  # times its own size that must be free before a copy is made


class Kept:
    """Copies of a rank's weights, buffers and what its optimizer and loss scaler keep, on its device.

    Weights that a strategy keeps elsewhere (servers, flat buckets) need no copy: steps without exchange do not reach them.
    `whole`: they are kept too, where the strategy tells them.
    """

    def __init__(self, training: Training, whole: bool = False) -> None:
        """Make the copies now, so that later steps find the device's memory as the timed ones do."""
        self._training, self._whole = training, whole
        self._copies = [torch.empty_like(tensor) for tensor in self._tensors()]

    @classmethod
    def of(cls, training: Training, ranks: Ranks, whole: bool = False) -> "Kept | None":
        """Make the copies on every rank, or None on every rank where one of them has no room. Collective."""
        needed = ROOM * sum(tensor.nbytes for tensor in _tensors(training, whole))
        free = _free_bytes(training.device) / (
            1 if training.device.type == "cuda" else ranks.world_size
        )
        return (
            cls(training, whole)
            if all(fits for (fits,) in ranks.gather([free >= needed]))
            else None
        )

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Bring everything back at the end of the context. Waits for nothing, but with a loss scaler."""
        optimizer, scaler = self._training.optimizer, self._training.scaler
        before, of_scaler = list(optimizer.state), scaler.state_dict()
        with torch.no_grad():
            torch._foreach_copy_(self._copies, self._tensors())
        yield
        for parameter in (
            optimizer.state.keys() - before
        ):  # an optimizer that only steps without exchange has none yet
            del optimizer.state[parameter]
        scaler.load_state_dict(of_scaler)
        with torch.no_grad():
            torch._foreach_copy_(self._tensors(), self._copies)

    def _tensors(self) -> list[Tensor]:
        return _tensors(self._training, self._whole)


def _tensors(training: Training, whole: bool) -> list[Tensor]:
    """Return the tensors that a step changes on this rank, always in the same order."""
    state = [
        kept
        for own in training.optimizer.state.values()
        for kept in own.values()
        if isinstance(kept, Tensor)
    ]
    elsewhere = training.strategy.state() if whole else []
    return [*training.network.parameters(), *training.network.buffers(), *state, *elsewhere]


def _free_bytes(device: torch.device) -> int:
    """Return the bytes that nobody uses, on a GPU or in the host's memory; 0 where it is not known."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory() or 0


# Facts about the CUDA graphs of a cell: whether a replay does what the step does without a graph, and how often each ran.


# What is compared of a step: gradients as it leaves them, and how far it moves the weights.
COMPARED = ("gradient", "weights")
UNITS = 2  # in the last place of a weight, by which two steps may move it differently


def differences(training: Training, drawn: Sequence[Batch], ranks: Ranks) -> dict[str, Any]:
    """Return facts about the array by which a replay differs most from the same step without a graph, of its tolerance.

    Steps with and without exchange are graphs of their own, and each is replayed on another batch than the one that its graph
    holds. `error` is Σ|replayed − not| ÷ Σ|not|, `tolerance` what runs without a graph differ by, MARGIN times, and
    what is rounded. Empty without graphs, and where a rank has no room for a second copy of its state. Collective; leaves the
    state as it was.
    """
    kept = Kept.of(training, ranks, whole=True)
    if kept is None or training.graphs is None:
        return {}
    sample = ComparedElements.of(training)
    found = []
    for exchanges in (True, False) if training.strategy.in_lockstep else (True,):
        with nullcontext() if exchanges else training.without_exchange():
            with kept.unchanged():
                training.step(drawn[0])  # captures
            other = next((batch for batch in drawn if not training.graphs.holds(batch)), drawn[0])
            for name, facts in _compared(training, kept, sample, other, ranks).items():
                found.append({"what": name, "exchange": exchanges, **facts})
    return {"replay": max(found, key=lambda one: _share(one["error"], one["tolerance"]))}


def counted(training: Training, ranks: Ranks) -> dict[str, Any]:
    """Return the replays that each rank asked for, and those that its device counted. Collective."""
    if training.graphs is None:
        return {}
    of_ranks = ranks.gather([training.graphs.asked, training.graphs.done])
    return {"replays": [[int(asked), int(done)] for asked, done in of_ranks]}


def _compared(
    training: Training, kept: Kept, sample: ComparedElements, batch: Batch, ranks: Ranks
) -> dict[str, dict[str, Any]]:
    """Return the worst array of everything that is compared, by its name. Collective."""

    def stepped(step: Callable[[Batch], object]) -> Tensor:
        with kept.unchanged():
            torch.manual_seed(training.cell.seed)
            before = sample.values(training.parameters)
            step(batch)
            return torch.stack(
                [sample.gradient(training), sample.values(training.parameters) - before]
            )

    runs = [stepped(training.uncaptured_step) for _ in range(RUNS)]
    difference = stepped(training.step) - runs[0]
    pairs = [one - other for one, other in itertools.combinations(runs, 2)]
    rounding = torch.tensor(
        [torch.finfo(one.dtype).eps for one in training.parameters], dtype=torch.float64
    )
    weights = gathered(ranks, sample.by_array(sample.values(training.parameters))).amax(0)
    facts = {}
    for place, name in enumerate(COMPARED):
        repeats = torch.stack([sample.by_array(pair[place]) for pair in pairs]).amax(0)
        here = torch.stack(
            [sample.by_array(difference[place]), repeats, sample.by_array(runs[0][place])]
        )
        wrong, repeats, sizes = gathered(ranks, here).amax(0)  # the largest of all ranks
        smallest = UNITS * rounding * weights if name == "weights" else torch.zeros_like(weights)
        found = worst(wrong, repeats, sizes, ranks.world_size * rounding, smallest)
        facts[name] = found | {"array": training.names[found["array"]]}
    return facts


def _share(error: float, tolerance: float) -> float:
    """Return the error as a share of what is allowed; more than any number where it is none."""
    return (
        0.0 if error == 0 else error / tolerance if tolerance and error == error else float("inf")
    )
