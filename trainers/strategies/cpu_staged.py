"""CPU staging, and MXNet's kvstore=local: gradients go to pinned host memory, the CPUs sum them, weights come back.

`staging=full`: every rank stages its whole gradient, and every rank's threads sum a share of the buckets. `sharded`: GPUs
reduce-scatter among themselves first, so that each stages 1/n. `transport=gloo` is the naive reference.
"""

from typing import Any

from trainers.kvstore.gloo_staging import GlooStaging
from trainers.kvstore.push_pull import PushPull
from trainers.kvstore.sharded_staging import ShardedStaging
from trainers.strategy import Strategy

# MiB of a bucket: small enough for the three stages to overlap, and larger where collectives move buckets.
# Seen on 4 H200s: full staging takes 6.2 ms with 2 or 4, 6.5 with 8; sharded 4.6 with 4 and 1.6 with 16.
STAGED_MB, COLLECTIVE_MB = 4.0, 25.0


def staged(
    bucket_cap_mb: float | str, optimizer_on: str, staging: str, transport: str, comm_hook: str, threads: int | str
) -> Strategy:
    """Make the strategy from the YAML's options."""
    collective = transport == "gloo" or staging == "sharded"
    cap_mb = (COLLECTIVE_MB if collective else STAGED_MB) if bucket_cap_mb == "auto" else bucket_cap_mb
    given: dict[str, Any] = {"bucket_cap_mb": cap_mb, "only_gradients": optimizer_on == "gpu"}
    if transport == "gloo":
        return GlooStaging(**given, comm_hook=comm_hook)
    if staging == "sharded":
        return ShardedStaging(**given, comm_hook=comm_hook, threads=threads)
    return PushPull(**given, comm_hook=comm_hook, threads=threads)


STRATEGY = staged
