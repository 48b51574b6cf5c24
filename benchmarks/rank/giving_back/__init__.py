"""What a rank gives back between two cells, and the proof that it did.

A rank that stays for the next cell (benchmarks.rank) takes a Baseline when it is fresh. After each cell, when the strategy is
closed and the process group destroyed, `give_back` drops what torch keeps and sets back what was changed, and `left` tells what
is held all the same. A rank that kept too much, or whose cell changed what Ringside does not, is ended: the next cell starts
anew.
"""

from benchmarks.rank.giving_back.baseline import Baseline, give_back, left
from benchmarks.rank.giving_back.graphs import KeptGraphs
from benchmarks.rank.giving_back.held import Held, Left

__all__ = ["Baseline", "Held", "KeptGraphs", "Left", "give_back", "left"]
