"""The exchange alone: a phase of `throughput`, and `benchmark=exchange`, MXNet's tools/bandwidth/measure.py for any strategy.

The benchmark exchanges known gradients of the model's shapes, without training, and compares what comes back with their
mean in float64, which every rank computes for itself. METHOD.md, "The exchange alone".
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.rank.ranks import Ranks, Reporter, Result
from benchmarks.record import Kind
from benchmarks.timing.clock import Clock
from conf.cell import Cell
from trainers import models
from trainers.hosts import Hosts
from trainers.strategy import ExchangeAlone, Strategy, load

# Exchanges before the timed ones: they connect, and allocate buffers that the step does not use.
WARM_UP = 2
PATTERNS = 7  # arrays that follow one another are exchanged with different values
# As in MXNet's own test, tests/python/gpu/test_kvstore_gpu.py: sum of differences ÷ sum of the reference.
TOLERANCE = 1e-4


def timed(
    strategy: Strategy,
    exchange: ExchangeAlone,
    gradient_bytes: float,
    iterations: int,
    clock: Clock,
    ranks: Ranks,
    reporter: Reporter,
) -> None:
    """Time the exchange alone. Inside `gradients_only`; collective."""
    reporter.phase("exchange")
    for _ in range(WARM_UP):
        exchange()
    block = clock.block(exchange, iterations, reporter.beat)
    reporter.line(
        Kind.EXCHANGE,
        synchronous=strategy.in_lockstep,
        gradient_bytes=gradient_bytes,
        bytes_moved=strategy.bytes_moved(gradient_bytes, ranks.world_size),
    )
    reporter.block("exchange", block, 0)


def in_a_stream(exchange: ExchangeAlone, iterations: int, clock: Clock, reporter: Reporter) -> None:
    """Time exchanges that do not wait for the ones before, where the strategy can; an answer is still under way at the end."""
    if pipelined := exchange.pipelined():
        reporter.block("pipelined", clock.block(pipelined, iterations, reporter.beat), 0)


def once_more(
    strategy: Strategy,
    exchange: ExchangeAlone,
    parameters: Sequence[nn.Parameter],
    used: Sequence[bool],
    ranks: Ranks,
) -> dict[str, float]:
    """Exchange small whole numbers right after the timed exchanges. Return facts about what came back. Collective.

    `exchanged_bytes` are the bytes of the arrays that came back. `exchange_error` is the largest error of an element of an array
    that is `used`, as a share of the right value, on any rank; none where a compression loses precision.
    """

    def known(rank: int, number: int) -> float:
        return 1.0 + rank + number % PATTERNS

    exchange.fill(
        [torch.full_like(p, known(ranks.rank, number)) for number, p in enumerate(parameters)]
    )
    exchange()
    returned = exchange.result()
    found = {"exchanged_bytes": float(sum(array.nbytes for array in returned))}
    if not strategy.exact and strategy.returns_mean:
        return found
    everyone = range(ranks.world_size) if strategy.returns_mean else [ranks.rank]
    errors = [torch.zeros((), dtype=torch.float64, device=parameters[0].device)]
    for number, array in enumerate(returned):
        if used[number]:
            mean = sum(known(rank, number) for rank in everyone) / len(everyone)
            errors.append((array - mean).abs().max().double() / mean)
    worst = (
        torch.tensor(ranks.gather([torch.stack(errors).max().item()])).max().item()
    )  # torch's max keeps NaN
    digits = max(torch.finfo(parameter.dtype).eps for parameter in parameters)
    return found | {
        "exchange_error": worst,
        "exchange_tolerance": max(strategy.rounding, ranks.world_size * digits),
    }


def references(
    strategy: Strategy, iterations: int, clock: Clock, ranks: Ranks, reporter: Reporter
) -> None:
    """Time by the same clock what the machine allows the strategy. Collective."""
    if not iterations:
        return
    reporter.phase("references")
    for probe in strategy.probes():
        if (
            not probe.share
        ):  # one rank alone moves nothing between ranks, and gloo does not send to itself
            continue
        probe.run()  # connects, allocates
        block = clock.block(probe.run, iterations, reporter.beat)
        facts = {
            "name": probe.name,
            "way": probe.way,
            "share": probe.share,
            "reference": probe.reference,
        }
        reporter.block(f"{probe.name} {probe.way}".strip(), block, 0, probe=facts)


def run(cell: Cell, ranks: Ranks, reporter: Reporter) -> Result:
    """Measure one cell. Collective: every rank of the process group calls it with the same cell.

    Raises:
        ValueError: the strategy exchanges nothing.
    """
    options = cell.benchmark
    reporter.phase("build")
    parameters = gradients_like(cell, options["keys"], ranks.device)
    given = cell.strategy | ({"bucket_cap_mb": 0.0} if options["per_key"] else {})
    strategy = load(given, cell.target("strategy"), Hosts.of(cell))
    result = Result(model=models.sizes(parameters))
    gradient_bytes = result.model["gradient_bytes"]
    clock = Clock(ranks)
    with strategy.gradients_only():
        exchange = strategy.exchange_alone(parameters)
        if exchange is None:
            raise ValueError(
                f"strategy={cell.strategy['name']}: it exchanges nothing; accepted is a strategy that exchanges gradients"
            )
        reporter.phase("check")
        error, worst = _errors(cell, strategy, exchange, parameters, ranks)
        timed(
            strategy, exchange, gradient_bytes, int(options["iterations"]), clock, ranks, reporter
        )
        result.checks |= once_more(strategy, exchange, parameters, [True] * len(parameters), ranks)
        in_a_stream(exchange, int(options["iterations"]), clock, reporter)
        result.checks["trained_bytes"] = sum(parameter.nbytes for parameter in parameters)
        if (
            strategy.exact or not strategy.returns_mean
        ):  # a lossy compression does not return the mean
            digits = max(torch.finfo(parameter.dtype).eps for parameter in parameters)
            tolerance = max(
                TOLERANCE, strategy.rounding, 2 * digits
            )  # four units in the last place of what comes back
            both = torch.tensor([worst, result.checks["exchange_error"]], dtype=torch.float64)
            result.checks |= {"exchange_error": both.max().item(), "exchange_tolerance": tolerance}
        references(strategy, int(options["limit_iterations"]), clock, ranks, reporter)
        result.metrics["comm/error"] = error
        result.checks |= words_used(strategy)
    strategy.close()
    return result


def words_used(strategy: Strategy) -> dict[str, int]:
    """Return what words of the request came to on this machine, for the record's checks: `threads=share`."""
    threads = strategy.summing_threads()
    return {} if threads is None else {"summing_threads": threads}


def gradients_like(cell: Cell, keys: str, device: torch.device) -> list[nn.Parameter]:
    """Return parameters of the model's shapes, without its layers, as the strategy would get them."""
    with torch.device("meta"):
        model = models.build(cell.model)
    if cell.precision == "bf16_weights":
        model = models.bf16_weights(model)
    without = {
        id(parameter)
        for module in model.modules()
        if keys == "weights" and isinstance(module, nn.modules.batchnorm._BatchNorm)
        for parameter in module.parameters(recurse=False)
    }
    named = [
        (name, p)
        for name, p in model.named_parameters()
        if p.requires_grad and id(p) not in without
    ]
    if keys == "weights":  # MXNet asks for these words in the name
        named = [(name, p) for name, p in named if "weight" in name or "bias" in name]
    return [nn.Parameter(torch.zeros(p.shape, dtype=p.dtype, device=device)) for _, p in named]


def _known(cell: Cell, rank: int, number: int, like: Tensor) -> Tensor:
    """Return the known gradient of a rank, uniform between −1 and 1 as in MXNet; every rank can make every rank's."""
    generator = torch.Generator(device=like.device).manual_seed(
        (cell.seed << 32) + (number << 12) + rank
    )
    return (
        torch.rand(like.shape, generator=generator, device=like.device, dtype=torch.float32)
        .mul_(2)
        .sub_(1)
        .to(like.dtype)
    )


def _errors(
    cell: Cell,
    strategy: Strategy,
    exchange: ExchangeAlone,
    parameters: list[nn.Parameter],
    ranks: Ranks,
) -> tuple[float, float]:
    """Compare what comes back with the mean in float64; of asynchronous ranks with each rank's own. Collective.

    Returns Σ|returned − mean| over arrays and ranks ÷ Σ|mean|, as MXNet's tool counts it, and the error of the worst array of
    any rank: Σ|returned − mean| ÷ Σ of the ranks' mean |gradient|. A small array hides in the first.
    """
    exchange.fill([_known(cell, ranks.rank, number, p) for number, p in enumerate(parameters)])
    exchange()
    difference = reference = 0.0
    by_array: list[float] = []
    everyone = range(ranks.world_size) if strategy.returns_mean else [ranks.rank]
    for number, (parameter, returned) in enumerate(zip(parameters, exchange.result(), strict=True)):
        mean, size = (
            torch.zeros(parameter.shape, dtype=torch.float64, device=parameter.device)
            for _ in range(2)
        )
        for rank in everyone:
            known = _known(cell, rank, number, parameter).double()
            mean += known / len(everyone)
            size += known.abs() / len(everyone)
        wrong = (returned.double() - mean).abs().sum().item()
        difference += wrong
        reference += mean.abs().sum().item()
        by_array.append(wrong / size.sum().item())
    gathered = ranks.gather(
        [difference, torch.tensor(by_array).max().item()]
    )  # torch's max keeps NaN
    total, worst = torch.tensor(gathered, dtype=torch.float64).T
    return total.sum().item() / reference, worst.max().item()
