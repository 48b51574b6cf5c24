"""The exchange alone: a phase of `throughput`, and `benchmark=exchange`.

The benchmark is MXNet's tools/bandwidth/measure.py for any strategy. It exchanges known gradients
of the model's shapes, without training, and compares what comes back with their mean in float64,
which every rank computes for itself. METHOD.md, "The exchange alone".
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.rank.ranks import Ranks, Reporter, Result
from benchmarks.record import Kind
from benchmarks.timing.clock import Clock
from conf.cell import Cell
from trainers import models
from trainers.strategy import ExchangeAlone, Hosts, Strategy, load

# Exchanges before the timed ones: they connect, and allocate buffers that the step does not use.
WARM_UP = 2
PATTERNS = 7  # arrays that follow one another are exchanged with different values
# As in MXNet's own test, tests/python/gpu/test_kvstore_gpu.py: sum of differences ÷ sum of the
# reference.
TOLERANCE = 1e-4


def measure(
    strategy: Strategy,
    exchange: ExchangeAlone,
    parameters: Sequence[nn.Parameter],
    used: Sequence[bool],
    iterations: int,
    limit_iterations: int,
    clock: Clock,
    ranks: Ranks,
    reporter: Reporter,
) -> dict[str, float]:
    """Time the exchange alone, and its references. Returns facts. In `gradients_only`; collective.

    Exchanges that do not wait for the ones before are timed where the strategy can: an answer is
    still under way at the end.
    """
    gradient_bytes = models.sizes(parameters)["gradient_bytes"]
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
    facts = _check_returned(strategy, exchange, parameters, used, ranks)
    pipelined = exchange.pipelined()
    if pipelined:
        reporter.block("pipelined", clock.block(pipelined, iterations, reporter.beat), 0)
    references(strategy, limit_iterations, clock, reporter)
    return facts


def _check_returned(
    strategy: Strategy,
    exchange: ExchangeAlone,
    parameters: Sequence[nn.Parameter],
    used: Sequence[bool],
    ranks: Ranks,
) -> dict[str, float]:
    """Exchange small whole numbers right after the timed exchanges. Returns facts of the result.

    `exchanged_bytes` are the bytes of the arrays that came back. `exchange_error` is the largest
    error of an element of an array that is `used`, as a share of the right value, on any rank;
    none where a compression loses precision. Collective.
    """

    def value(rank: int, index: int) -> float:
        return 1.0 + rank + index % PATTERNS

    gradients = []
    for index, parameter in enumerate(parameters):
        gradients.append(torch.full_like(parameter, value(ranks.rank, index)))
    exchange.fill(gradients)
    exchange()
    returned = exchange.result()
    facts = {"exchanged_bytes": float(sum(array.nbytes for array in returned))}
    if not strategy.exact and strategy.returns_mean:
        return facts
    averaged = _averaged_ranks(strategy, ranks)
    errors = [torch.zeros((), dtype=torch.float64, device=parameters[0].device)]
    for index, array in enumerate(returned):
        if used[index]:
            mean = sum(value(rank, index) for rank in averaged) / len(averaged)
            errors.append((array - mean).abs().max().double() / mean)
    own_error = torch.stack(errors).max().item()
    facts["exchange_error"] = _largest(ranks.gather([own_error]))
    facts["exchange_tolerance"] = max(strategy.rounding, ranks.world_size * _digits(parameters))
    return facts


def _digits(parameters: Sequence[nn.Parameter]) -> float:
    return max(torch.finfo(parameter.dtype).eps for parameter in parameters)


def _averaged_ranks(strategy: Strategy, ranks: Ranks) -> Sequence[int]:
    """Return the ranks of which a rank gets the mean: all, or itself alone if asynchronous."""
    return range(ranks.world_size) if strategy.returns_mean else [ranks.rank]


def _largest(values: Sequence[float] | Sequence[Sequence[float]]) -> float:
    return torch.tensor(values).max().item()  # torch's max keeps NaN


def references(strategy: Strategy, iterations: int, clock: Clock, reporter: Reporter) -> None:
    """Time by the same clock what the machine allows the strategy. Collective."""
    if not iterations:
        return
    reporter.phase("references")
    for probe in strategy.probes():
        # One rank alone moves nothing between ranks, and gloo does not send to itself.
        if not probe.share:
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

    Raises ValueError: the strategy exchanges nothing.
    """
    options = cell.benchmark
    reporter.phase("build")
    parameters = gradients_like(cell, options["keys"], ranks.device)
    strategy_options = dict(cell.strategy)
    if options["per_key"]:
        strategy_options["bucket_cap_mb"] = 0.0
    strategy = load(strategy_options, cell.target("strategy"), Hosts.of(cell))
    result = Result(model=models.sizes(parameters))
    iterations, limit_iterations = int(options["iterations"]), int(options["limit_iterations"])
    with strategy.gradients_only():
        exchange = strategy.exchange_alone(parameters)
        if exchange is None:
            accepted = "expected a strategy that exchanges gradients"
            raise ValueError(f"strategy={cell.strategy['name']}: it exchanges nothing; {accepted}")
        reporter.phase("check")
        error, worst = _errors(cell, strategy, exchange, parameters, ranks)
        checks = measure(
            strategy,
            exchange,
            parameters,
            [True] * len(parameters),
            iterations,
            limit_iterations,
            Clock(ranks),
            ranks,
            reporter,
        )
        checks["trained_bytes"] = sum(parameter.nbytes for parameter in parameters)
        # A lossy compression does not return the mean.
        if "exchange_error" in checks:
            checks["exchange_error"] = _largest([worst, checks["exchange_error"]])
            # Four units in the last place of what comes back.
            tolerance = max(TOLERANCE, strategy.rounding, 2 * _digits(parameters))
            checks["exchange_tolerance"] = tolerance
        result.metrics["comm/error"] = error
        result.checks |= checks | resolved_options(strategy)
    strategy.close()
    return result


def resolved_options(strategy: Strategy) -> dict[str, int]:
    """Return what `threads=share` came to on this machine, for the record's checks."""
    threads = strategy.summing_threads()
    if threads is None:
        return {}
    return {"summing_threads": threads}


def gradients_like(cell: Cell, keys: str, device: torch.device) -> list[nn.Parameter]:
    """Return parameters of the model's shapes, without its layers, as the strategy gets them."""
    with torch.device("meta"):
        model = models.build(cell.model)
    if cell.precision == "bf16_weights":
        model = models.bf16_weights(model)
    only_weights = keys == "weights"
    left_out: set[int] = set()
    for module in model.modules():
        if only_weights and isinstance(module, nn.modules.batchnorm._BatchNorm):
            left_out.update(map(id, module.parameters(recurse=False)))
    gradients = []
    for name, parameter in model.named_parameters():
        # MXNet asks for these words in the name.
        is_key = not only_weights or "weight" in name or "bias" in name
        if parameter.requires_grad and id(parameter) not in left_out and is_key:
            zeros = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
            gradients.append(nn.Parameter(zeros))
    return gradients


def _errors(
    cell: Cell,
    strategy: Strategy,
    exchange: ExchangeAlone,
    parameters: list[nn.Parameter],
    ranks: Ranks,
) -> tuple[float, float]:
    """Compare what comes back with the mean in float64; of asynchronous ranks with their own.

    Gradients are uniform between −1 and 1 as in MXNet; every rank can make all. Returns
    Σ|returned − mean| over arrays and ranks ÷ Σ|mean|, as MXNet's tool counts it, and the error of
    the worst array of any rank: Σ|returned − mean| ÷ Σ of the ranks' mean |gradient|. A small array
    hides in the first. Collective.
    """

    def gradient(rank: int, index: int) -> Tensor:
        like = parameters[index]
        seed = (cell.seed << 32) + (index << 12) + rank
        generator = torch.Generator(device=like.device).manual_seed(seed)
        values = torch.rand(
            like.shape, generator=generator, device=like.device, dtype=torch.float32
        )
        return values.mul_(2).sub_(1).to(like.dtype)

    exchange.fill([gradient(ranks.rank, index) for index in range(len(parameters))])
    exchange()
    difference = reference = 0.0
    by_array: list[float] = []
    averaged = _averaged_ranks(strategy, ranks)
    for index, returned in enumerate(exchange.result()):
        mean = torch.zeros_like(parameters[index], dtype=torch.float64)
        size = torch.zeros_like(mean)
        for rank in averaged:
            own = gradient(rank, index).double()
            mean += own / len(averaged)
            size += own.abs() / len(averaged)
        wrong = (returned.double() - mean).abs().sum().item()
        difference += wrong
        reference += mean.abs().sum().item()
        by_array.append(wrong / size.sum().item())
    gathered = ranks.gather([difference, _largest(by_array)])
    total, worst = torch.tensor(gathered, dtype=torch.float64).T
    return total.sum().item() / reference, worst.max().item()
