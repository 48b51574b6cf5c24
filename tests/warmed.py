"""Records of ranks that go on from cell to cell, of a machine whose truth is known."""

import dataclasses

from simulated import Simulator, changed

from analysis.findings.communication.several_records import with_values
from analysis.findings.warm.pools import POOL_DRIFT
from analysis.validity.checks import judged
from benchmarks.record import Validity
from conf.schema import ValidityLimits

SWEEP = "5" * 32


class WarmSimulator(Simulator):
    """Makes records with a place in a pool."""

    def cell(self, gpus=(0, 1), pool=None, place=0, factor=1.0, **cell):
        """One run; `factor` is planted into its rate. Without a pool its ranks ended with it."""
        made = self.record(gpus, factor=factor, **cell)
        where = {} if pool is None else {"pool": pool, "place": place}
        facts = {"rank": 0, "started": "warm" if place else "fork", "done": True, **where}
        return changed(made, sweep_id=SWEEP, ranks=[facts], cell_key=made.cell.key)

    def pool(self, name, factors, batches=None, end=1.0):
        """A pool of cells of several batch sizes, with these factors in their rates, and its end, which is judged."""
        batches = batches or [256 + 8 * number for number in range(len(factors))]
        made = []
        for place, (factor, batch) in enumerate(zip(factors, batches, strict=True)):
            made.append(self.cell(pool=name, place=place, factor=factor, batch_size=batch))
        last = made[0].cell.at_pool_end()
        ends = self.cell(pool=name, place=len(made), factor=end, batch_size=batches[0], repeat=last.repeat)
        return [*made, written(changed(ends, cell=last, cell_key=last.key), made)]


def written(record, known):
    """A record with what the others give it and its verdict, as a launcher writes it; it has no lines, which others check."""
    made = judged(with_values(dataclasses.replace(record, checks={}), known), ValidityLimits())
    codes, missing = ({code: one for code, one in found.items() if code == POOL_DRIFT}
                      for found in (made.validity.codes, made.validity.unchecked))  # fmt: skip
    return changed(made, validity=Validity("suspect" if codes else "valid", codes, missing))
