"""The cases that real ranks run for tests (conftest's `forked`), by name.

{workers, steps, strategy} trains; {workers, exchange, strategy} runs benchmark=exchange; {workers,
benchmarks: [options, …]} runs benchmarks that train nothing, in the same ranks; {kernels} runs the
kernel of jacobi; all others are functions that forked_ranks names.
"""

import itertools

from benchmarks.collectives.request import COLLECTIVES, ELEMENT_BYTES

# test_kvstore
STEPS = 5
SMALL_BUCKETS = {"bucket_cap_mb": 0.0003}  # MiB: about 80 elements, several buckets
SYNCHRONOUS = {
    "staged": {"name": "cpu_staged", **SMALL_BUCKETS},
    "staged_gpu": {"name": "cpu_staged", "optimizer_on": "gpu", **SMALL_BUCKETS},
    "staged_threads": {"name": "cpu_staged", "threads": 2},
    "staged_sharded": {"name": "cpu_staged", "staging": "sharded", **SMALL_BUCKETS},
    "staged_sharded_gpu": {"name": "cpu_staged", "staging": "sharded", "optimizer_on": "gpu"},
    "staged_gloo": {"name": "cpu_staged", "transport": "gloo", **SMALL_BUCKETS},
    "staged_gloo_gpu": {"name": "cpu_staged", "transport": "gloo", "optimizer_on": "gpu"},
    "local": {"name": "kvstore_local"},
    "device": {"name": "kvstore_device", **SMALL_BUCKETS},
    "device_owner": {"name": "kvstore_device", "reduce": "owner", **SMALL_BUCKETS},
    "sync": {"name": "kvstore_dist_sync", "servers": 1, **SMALL_BUCKETS},
    "sync_2_split": {"name": "kvstore_dist_sync", "servers": 2, "bigarray_bound": 60},
    "sync_3": {"name": "kvstore_dist_sync", "servers": 3, "bigarray_bound": 60, **SMALL_BUCKETS},
    "sync_device": {"name": "kvstore_dist_sync_device", "servers": 1},
}
HALF = {
    "staged": {"name": "cpu_staged"},
    "staged_sharded": {"name": "cpu_staged", "staging": "sharded"},
    "device": {"name": "kvstore_device"},
    "sync": {"name": "kvstore_dist_sync", "servers": 1},
}
# The same on several hosts: the case that it equals, the ranks of each host, each server's host.
FAR = {
    "sync_far": ("sync_2", [[0], [1]], [0]),
    "sync_3_far": ("sync_3_2", [[0], [1]], [1, 2, 0]),  # one host has a server only
    "sync_fp16_far": ("sync_fp16", [[0], [1]], [2]),
    "sync_4_far": ("sync_4_4", [[0, 1], [2, 3]], [1, 0, 2, 2]),
}
REFERENCE = {"name": "nccl_allreduce"}
ADAMW = ("staged", "staged_gpu", "staged_sharded", "staged_gloo", "device", "device_owner")
ADAMW += ("sync_2_split",)


def _train(strategy, workers=2, steps=STEPS, **more):
    """A case of training steps; servers have one process, if it says no number."""
    if "dist" in strategy["name"]:
        strategy = {"servers": 1, **strategy}
    return {"workers": workers, "steps": steps, "strategy": strategy, **more}


def _kvstore():
    """Cases of test_kvstore: training steps of a strategy."""
    asynchronous = {"name": "kvstore_dist_async"}
    cases = {f"allreduce_{workers}": _train(REFERENCE, workers) for workers in (2, 4)}
    cases["alone"] = _train(REFERENCE, 1)
    cases["async_alone"] = _train({**asynchronous, "servers": 2, **SMALL_BUCKETS}, 1)
    cases["async_alone_adamw"] = _train({**asynchronous, **SMALL_BUCKETS}, 1, optimizer="adamw")
    for name, strategy in SYNCHRONOUS.items():
        cases[f"{name}_2"] = _train(strategy, more=True)
    for name in ("staged", "staged_sharded", "device", "device_owner"):
        cases[f"{name}_4"] = _train(SYNCHRONOUS[name], 4)
    cases["sync_4_4"] = _train({**SYNCHRONOUS["sync_2_split"], "servers": 4}, 4)
    cases["allreduce_fp8"] = _train({**REFERENCE, "comm_hook": "fp8"})
    for hook in ("fp16", "bf16"):
        for name, strategy in {"allreduce": REFERENCE, **HALF}.items():
            cases[f"{name}_{hook}"] = _train({**strategy, "comm_hook": hook})
    cases["allreduce_adamw"] = _train(REFERENCE, optimizer="adamw")
    cases["alone_adamw"] = _train(REFERENCE, 1, optimizer="adamw")
    for name in ADAMW:
        cases[f"{name}_adamw"] = _train(SYNCHRONOUS[name], optimizer="adamw")
    slow = {"steps": 60, "slow_rank": 1, "learning_rate": 0.02}
    for bound in (None, 1, 3):
        cases[f"async_{bound}"] = _train({**asynchronous, "max_staleness": bound}, **slow)
    cases["async_far_3"] = {**cases["async_3"], "hosts": [[0], [1]], "server_hosts": [1]}
    split = {**asynchronous, "servers": 2, "bigarray_bound": 60}
    ahead = {"steps": 30, "learning_rate": 0.02, "ahead": 20}
    cases["async_far"] = _train(split, **ahead, hosts=[[0], [1]], server_hosts=[0, 2])
    cases["async_device"] = _train({"name": "kvstore_dist_async_device"}, **slow, more=True)
    for name, (near, hosts, servers) in FAR.items():
        cases[name] = {**cases[near], "hosts": hosts, "server_hosts": servers}
    return cases


def _every():
    """Cases of the campaign: every synchronous strategy, and one process with all batches."""
    strategies = {"allreduce": {**REFERENCE, **SMALL_BUCKETS}, **SYNCHRONOUS}
    strategies["hierarchical"] = {"name": "hierarchical", **SMALL_BUCKETS}
    cases = {}
    for workers, optimizer in itertools.product((3, 4), ("sgd", "adamw")):
        for name, strategy in strategies.items():
            case = _train(strategy, workers, optimizer=optimizer)
            cases[f"every_{name}_{workers}_{optimizer}"] = case
        none = _train({"name": "none"}, 1, optimizer=optimizer, of_ranks=workers)
        cases[f"one_process_{workers}_{optimizer}"] = none
    return cases


EVERY = _every()

# test_across_hosts: ranks of this machine that are told to be on several hosts
HOSTS = {"2x2": [[0, 1], [2, 3]], "2x1": [[0], [1]], "3x1": [[0], [1], [2]]}
HIERARCHICAL = {"name": "hierarchical", **SMALL_BUCKETS}
ACROSS = {  # where the ranks are; those without groups of their own do the same wherever
    "hierarchical": (HIERARCHICAL, ("2x2", "2x1", "3x1")),
    "staged": (SYNCHRONOUS["staged"], ("2x2", "2x1", "3x1")),
    "staged_sharded": (SYNCHRONOUS["staged_sharded"], ("2x2", "2x1", "3x1")),
    "staged_gpu": (SYNCHRONOUS["staged_gpu"], ("2x2",)),
    "staged_sharded_gpu": (SYNCHRONOUS["staged_sharded_gpu"], ("2x1",)),
    "staged_gloo": (SYNCHRONOUS["staged_gloo"], ("2x2",)),
    "device": (SYNCHRONOUS["device"], ("2x2",)),
    "device_owner": (SYNCHRONOUS["device_owner"], ("3x1",)),
    "allreduce": (REFERENCE, ("2x2",)),
}


def _across():
    """Cases of test_across_hosts: a strategy on several hosts, and one made for them on one."""
    cases = {"across_reference_3": _train(REFERENCE, 3)}
    for name, (strategy, places) in ACROSS.items():
        for place in places:
            hosts = HOSTS[place]
            case = _train(strategy, sum(map(len, hosts)), hosts=hosts, more=True)
            cases[f"across_{name}_{place}"] = case
    two = HOSTS["2x1"]
    for hook in ("fp16", "bf16"):
        for name in ("hierarchical", "staged"):
            half = {**ACROSS[name][0], "comm_hook": hook}
            cases[f"across_{name}_{hook}"] = _train(half, hosts=two)
    cases["across_staged_adamw"] = _train(SYNCHRONOUS["staged"], hosts=two, optimizer="adamw")
    cases["cells_on_hosts"] = {"workers": 4, "hosts": HOSTS["2x2"]}
    for workers in (1, 2):
        cases[f"hierarchical_{workers}"] = _train(HIERARCHICAL, workers, more=True)
    return cases


# test_exchange
STRATEGIES = {
    "nccl_allreduce": {"name": "nccl_allreduce"},
    "cpu_staged": {"name": "cpu_staged"},
    "kvstore_device": {"name": "kvstore_device"},
}
SERVERS = {
    "kvstore_dist_sync": {"name": "kvstore_dist_sync", "servers": 2, "bucket_cap_mb": 100.0},
    "kvstore_dist_async": {"name": "kvstore_dist_async", "servers": 1, "bucket_cap_mb": 100.0},
}
OTHER_EXCHANGES = {
    "sharded": {"strategy": {"name": "cpu_staged", "staging": "sharded"}},
    "one_rank": {"workers": 1, "strategy": STRATEGIES["nccl_allreduce"]},
    "bf16_hook": {"strategy": {"name": "kvstore_device", "comm_hook": "bf16"}},
    "bf16_weights": {"strategy": STRATEGIES["cpu_staged"], "precision": "bf16_weights"},
    "one_bias": {"strategy": STRATEGIES["nccl_allreduce"], "fault": "one bias"},
    "sums": {"strategy": STRATEGIES["nccl_allreduce"], "fault": "sums"},
    "nan": {"strategy": STRATEGIES["nccl_allreduce"], "fault": "nan"},
    "lossy": {"strategy": STRATEGIES["nccl_allreduce"], "fault": "sums", "lossy": True},
}
EXCHANGE = {}
for per_key in (False, True):
    for name, strategy in STRATEGIES.items():
        case = {"strategy": strategy, "exchange": {"per_key": per_key}}
        EXCHANGE[f"exchange_{name}_{per_key}"] = {"workers": 2} | case
for name, strategy in SERVERS.items():
    EXCHANGE[f"exchange_{name}"] = {"workers": 2, "exchange": {}, "strategy": strategy}
for name, case in OTHER_EXCHANGES.items():
    EXCHANGE[f"exchange_{name}"] = {"workers": 2, "exchange": {}} | case

# test_collectives
SHORT = {
    "name": "collectives", "min_bytes": "1K", "max_bytes": "1KiB", "iterations": 2, "warmup": 1,
}  # fmt: skip
TABLE = {**SHORT, "max_bytes": "16KiB", "factor": 4, "format": "nccl-tests"}
OTHER_COLLECTIVES = [
    *({"op": op} for op in ("prod", "min", "max")),
    *({"dtype": dtype} for dtype in ELEMENT_BYTES),
    {"collective": "reduce", "root": 1, "op": "max"},
    {"collective": "broadcast", "root": 1},
    {"collective": "gather", "root": 1},
    {"collective": "scatter", "root": 1},
    {"coalesced": 3},
    {"collective": "all_gather", "coalesced": 2},
    {"collective": "reduce_scatter", "coalesced": 2, "percentiles": False},
    {"verify": False, "format": "nccl-tests"},
]
EVERY_ONE = [{"collective": name} for name in COLLECTIVES]
IDLE = ["benchmarks.collectives.calls", "TorchCalls", "prepare"]


def _links(workers, asked, others=({},), **more):
    """A case of benchmarks that train nothing: the same with other options."""
    return {"workers": workers, "benchmarks": [asked | other for other in others], **more}


COLLECTIVE = {
    "collectives": _links(2, TABLE, EVERY_ONE),
    "collectives_other": _links(2, SHORT, OTHER_COLLECTIVES),
    "collectives_three": _links(3, SHORT, EVERY_ONE),
    "collectives_idle": _links(2, SHORT, fault=IDLE),
}

# test_verify
HOST_LINK = {"host_link": _links(2, {"name": "host_link", "bytes": 1 << 20, "iterations": 3})}

# test_jacobi
SMALL_GRID = {"name": "jacobi", "nx": 40, "ny": 23, "niter": 30, "norm_every": 7}
ASKED = {
    "host": {"exchange": "host"},
    "one_row_each": {"ny": 5, "nx": 5},
    "until_tolerance": {"tolerance": 2e-2, "niter": 5000, "solves": 2},
}
DEAF = ["benchmarks.jacobi.halo", "HostOnCpu", "receive"]
JACOBI = {f"jacobi_{workers}": _links(workers, SMALL_GRID, ASKED.values()) for workers in (1, 2, 3)}
JACOBI["jacobi_deaf"] = _links(2, SMALL_GRID, fault=DEAF)
KERNELS = list(itertools.product((512, 201), (1, 2, 3, 9, 10, 11)))  # columns, rows
JACOBI["jacobi_kernel"] = {"workers": 1, "kernels": KERNELS}

# test_p2p_benchmark
SMALL_COPIES = {"name": "p2p", "bytes": 65536, "iterations": 2, "latency_iterations": 5}
ONE_WAY = {"repeats": 2, "direction": "read"}
ONCE = {"repeats": 1, "p2p": "disabled"}
AT_ONCE = {"repeats": 1, "concurrent": True, "p2p": "required"}
P2P = {
    "p2p_two": _links(2, SMALL_COPIES, [ONE_WAY, ONCE]),
    "p2p_three": _links(3, SMALL_COPIES, [AT_ONCE]),
}

# test_told
TOLD = {"told": {"workers": 3}}

WHOLE = ("measuring", "planted", "live", "calibrating", "paths", "clean_paths")
TRAINING = {name: {"workers": 2} for name in WHOLE}
TRAINING["calibrating_alone"] = {"workers": 1}
SYNCHRONISING = {f"synchronising_{ranks}": {"workers": ranks} for ranks in (2, 3, 4)}
# Cases that run together where a whole module of tests asks for them.
GROUPS = (
    *({name: case} for name, case in (TRAINING | SYNCHRONISING).items()),
    *(TOLD, _kvstore(), EVERY, _across(), EXCHANGE, COLLECTIVE, HOST_LINK, JACOBI, P2P),
)
CASES = {name: case for group in GROUPS for name, case in group.items()}
