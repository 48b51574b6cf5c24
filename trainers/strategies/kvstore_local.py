"""MXNet's kvstore=local: CPU staging with the optimizer on the CPU."""

from trainers.strategies.cpu_staged import staged

STRATEGY = staged
