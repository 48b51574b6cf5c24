"""CPU staging, and MXNet's kvstore=local: gradients go to pinned host memory, the CPUs sum them, weights come back.

`staging=full`: every rank stages its whole gradient, and every rank's threads sum a share of the buckets. `sharded`: GPUs
reduce-scatter among themselves first, so that each stages 1/n. `transport=gloo` is the naive reference.
"""

from typing import Any

from trainers.kvstore.gloo_staging import GlooStaging
from trainers.kvstore.push_pull import PushPull
from trainers.kvstore.sharded_staging import ShardedStaging
from trainers.strategy import Strategy


def staged(
    bucket_cap_mb: float, optimizer_on: str, staging: str, transport: str, comm_hook: str, threads: int | str
) -> Strategy:
    """Make the strategy from the YAML's options."""
    given: dict[str, Any] = {"bucket_cap_mb": bucket_cap_mb, "only_gradients": optimizer_on == "gpu"}
    if transport == "gloo":
        return GlooStaging(**given, comm_hook=comm_hook)
    if staging == "sharded":
        return ShardedStaging(**given, comm_hook=comm_hook, threads=threads)
    return PushPull(**given, comm_hook=comm_hook, threads=threads)
