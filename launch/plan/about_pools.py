"""What a plan says of engine.start=warm, and what it refuses of warm_cold."""

from collections import Counter
from collections.abc import Iterator, Sequence

from analysis.report.text import count
from conf.cell import Cell
from conf.options import Refused
from conf.schema import Config
from launch.plan.order import PlannedCell, PoolPart
from launch.plan.pools import FEWEST, why_not_warm


def about_pools(order: Sequence[PlannedCell]) -> Iterator[str]:
    """Yield notices about the pools of an order: how many cells use the ranks of another, and why others do not."""
    parts = Counter(one.part for one in order)
    if pools := parts[PoolPart.BEGINS]:
        warm, lot = parts[PoolPart.WARM], parts[PoolPart.LOT]
        by_lot = (
            f"; {count(lot, 'other cell')} could, and {'has' if lot == 1 else 'have'} new ranks, drawn at random"
            if lot
            else ""
        )
        yield (
            f"{count(warm, 'cell')} {'uses' if warm == 1 else 'use'} the ranks of the cell before, "
            f"in {count(pools, 'pool')}. The first cell of each pool is measured once more at its end, to see that the ranks are "
            f"as fast as they were{by_lot}"
        )
    elif order:
        reasons = dict.fromkeys(filter(None, (why_not_warm(one.cell) for one in order)))
        why = "; ".join(reasons) or f"fewer than {FEWEST} cells of a repeat are open and alike in subset and settings"
        yield f"engine.start=warm changes nothing here, every cell has new ranks: {why}"


def refuse_warm_cold(config: Config, cells: Sequence[Cell]) -> None:
    """Refuse a comparison of new ranks with warm ones that cannot be made.

    Raises:
        Refused: names the option and what is accepted.
    """
    asked = f"warm_cold={config.warm_cold}"
    if not config.warm_cold:
        return
    if config.engine.start != "warm":
        raise Refused(f"{asked}: accepted with engine.start=warm, not with engine.start={config.engine.start}")
    if config.repeats != 1:
        raise Refused(f"{asked}: accepted with repeats=1, not with repeats={config.repeats}: each turn is a repeat")
    if config.noise_pairs not in ("auto", 0):
        raise Refused(f"{asked}: accepted with noise_pairs=0, not with noise_pairs={config.noise_pairs}")
    if reasons := [why for cell in cells if (why := why_not_warm(cell))]:
        raise Refused(f"{asked}: accepted for cells that warm ranks can measure; {reasons[0]}")
