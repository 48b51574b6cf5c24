"""NCCL's own words: distances, algorithms, protocols, the functions that its settings name, and the names of its variables.

Source: NCCL's release tags 2.4 to 2.30 (paths.cc, tuning.cc; for variables NCCL_PARAM and ncclGetEnv).
How nccl-tests counts collectives: benchmarks/collectives/busbw.py.
"""

import re
from collections.abc import Mapping

from conf.options import Refused

# Distances between two devices, near to far (2.30; earlier releases lack some words).
DISTANCES = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
# The distances that NCCL_P2P_LEVEL and NCCL_NET_GDR_LEVEL accept in every release.
LEVELS = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS")
# A level's legacy number is its place here; larger numbers mean SYS (paths.cc).
_LEGACY_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS")

# In the order of their numbers in TUNING lines of 2.20 to 2.23.
ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")
# The functions that NCCL_ALGO and NCCL_PROTO can name.
FUNCTIONS = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce")
# The algorithms that NCCL has for a function (tuning.cc); where a value allows none of them, older releases take Ring.
AVAILABLE: Mapping[str, frozenset[str]] = {
    "Broadcast": frozenset({"Ring"}),
    "Reduce": frozenset({"Ring"}),
    "AllGather": frozenset({"Ring", "CollNetDirect", "NVLS", "PAT"}),
    "ReduceScatter": frozenset({"Ring", "CollNetDirect", "NVLS", "PAT"}),
    "AllReduce": frozenset({"Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree"}),
}

# Variables of NCCL, and one of the SHARP plugin's, that the table of settings (conf.nccl) does not have.
_NAMES = """
ALLGATHERV_ENABLE ALLOC_P2P_NET_LL_BUFFERS CHECKS_DISABLE CHECK_MODE CHECK_POINTERS CHUNK_SIZE COMM_BLOCKING
COMM_SHRINK_SHARE_RESOURCES COMM_SPLIT_SHARE_RESOURCES CONNECT_ROUND_MAX_PEERS CREATE_THREAD_CONTEXT CTA_POLICY DEV_API_JIT
DISABLE_MEM_MANAGER ELASTIC_BUFFER_REGISTER ENABLE_VERSION_CHECK GDAKI_USE_RELIABLE_DB GDRCOPY_ENABLE GDRCOPY_FIFO_ENABLE
GDRCOPY_FLUSH_ENABLE GDRCOPY_SYNC_ENABLE GDR_FLUSH_DISABLE GIN_ENABLE GIN_ERROR_QUERY_SEC GIN_GDAKI_MAX_DEST_RD_ATOMIC
GIN_GDAKI_MAX_QP_RD_ATOMIC GIN_GDAKI_NIC_HANDLER GIN_GDAKI_QP_DEPTH GIN_IB_TC GIN_NCONNECTIONS GIN_PROXY_QUEUE_SIZE GIN_TYPE
GRAPH_HELPER_DISABLE GRAPH_STREAM_ORDERING GROUP_CUDA_STREAM IB_ADDR_FAMILY IB_ADDR_RANGE IB_CUDA_SUPPORT IB_DATA_DIRECT
IB_DEVICE_PCI_ORDER IB_ECE_ENABLE IB_FIFO_TC IB_MERGE_VFS IB_MQP_RETRY_ALL IB_MQP_RETRY_CNT IB_MQP_RETRY_SLEEP_MSEC
IB_OOO_RQ IB_PKEY IB_PREPOST_RECEIVE_WORK_REQUESTS IB_QUERY_PORT_SPEED IB_RECEIVER_SIDE_MATCHING_SCHEME
IB_RESILIENCY_PORT_FAILOVER IB_RESILIENCY_PORT_FAILOVER_MAX_ATTEMPTS IB_RESILIENCY_PORT_FAILOVER_PROBE_DELAY
IB_RESILIENCY_PORT_RECOVERY IB_RESILIENCY_PORT_RECOVERY_ACK_TIMEOUT IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_INTERVAL
IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_SIZE IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_SEQUENCE_SIZE
IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_TIMEOUT IB_RESILIENCY_PORT_RECOVERY_ATTEMPTS_MAX
IB_RESILIENCY_PORT_RECOVERY_START_DELAY IB_RETURN_ASYNC_EVENTS IB_ROCE_VERSION_NUM IB_ROUTABLE_FLID_GID_INDEX
IB_SUBNET_AWARE_ROUTING IB_SUBNET_PREFIX_LEN IB_USE_INLINE IB_WARN_RAIL_LOCAL IGNORE_COLLNET_MISMATCH IGNORE_DISABLED_P2P
IGNORE_NET_MISMATCH IPC_USE_ABSTRACT_SOCKET L1_SHARED_MEMORY_CARVEOUT LAUNCH_ORDER_IMPLICIT LAUNCH_RACE_FATAL
LEGACY_CUDA_REGISTER LL128_C2C LL128_NTHREADS LSA_TEAM_SIZE MAX_NRINGS MAX_RINGS MEM_SYNC_DOMAIN MIN_NRINGS MIN_RINGS
MLOPART_RDMA_ENABLE MNNVL_CROSS_CLIQUE MNNVL_RAIL_PER_HOST MNNVL_SCATTER_NETS_ENABLE MULTI_RANK_GPU_ENABLE
MULTI_SEGMENT_REGISTER NETDEVS_POLICY NET_DISABLE_INTRA NET_FORCE_FLUSH NET_FORCE_MERGE NET_GDR_C2C NET_GDR_MLOPART
NET_MERGE_LEVEL NET_MERGE_POLICY NET_OPTIONAL_RECV_COMPLETION NET_OVERHEAD NO_CACHE NUM_RMA_CTX NVB_PRECONNECT
NVLINK_UTIL_CENTRIC_SCHED_ENABLE NVLSTREE_MAX_CHUNKSIZE NVLS_CHUNKSIZE NVTX_DISABLE OOB_NET_ENABLE OOB_NET_IFNAME
P2P_EPOCH_ENABLE P2P_LL_THRESHOLD P2P_MAX_PEERS P2P_PER_CHANNEL_NET_BW P2P_READ_ENABLE P2P_SCHEDULE_GROUP_SIZE
PROGRESS_APPENDOP_FREQ PROTO_OVERRIDE PROXY_APPEND_BATCH_SIZE PROXY_CPUSET PXN_C2C REPORT_CONNECT_PROGRESS RMA_DISABLE
RMA_PROXY_QUEUE_SIZE SET_CPU_STACK_SIZE SET_STACK_SIZE SHADOW_MEMPOOL_MAX_SIZE SINGLE_PROC_MEM_REG_ENABLE
SINGLE_RING_THRESHOLD SOCKET_INLINE SOCKET_MAGIC SOCKET_MIN_TASKSIZE SOCKET_POLL_TIMEOUT_MSEC SOCKET_RCVBUF SOCKET_RETRY_CNT
SOCKET_RETRY_SLEEP_MSEC SOCKET_SNDBUF SYM_CE_THRESHOLD SYM_CTAS SYM_GIN_KERNELS_ENABLE SYM_KERNEL SYM_NOWIN_ENABLE
SYM_REUSE_SYSMEM_HANDLES SYM_RS_GIN_CHUNK_SIZE SYM_TMA_ENABLE THREAD_THRESHOLDS TOPO_SPLIT_MLOPART TREE_THRESHOLD
UID_STAGGER_RATE UID_STAGGER_THRESHOLD UNPACK_DOUBLE_NCHANNELS WIN_ENABLE WIN_STRIDE WORK_ARGS_BYTES WORK_FIFO_BYTES
"""
OTHERS = frozenset(("SHARP_COLL_ENABLE_SAT", *(f"NCCL_{name}" for name in _NAMES.split())))
# What a variable must not do, by its name: {pattern: what it does}. Variables of later releases are named alike.
FORBIDDEN: Mapping[re.Pattern[str], str] = {
    re.compile(r"PLUGIN|LIB(_|$)"): "makes NCCL load a library",
    re.compile(r"FILE|DUMP|_DIR(_|$)|_PATH(_|$)"): "makes NCCL read or write files",
    re.compile(r"COMM_ID|HOSTID|UUID|CLIQUE_ID|_ADDR$"): "makes ranks meet elsewhere",
    re.compile(r"^NCCL_(DEBUG|RAS)(_|$)"): "is set by Ringside itself, which reads NCCL's log",
    re.compile(
        r"NVLS|MULTICAST|MULTIMEM"
    ): "may switch NVLink multicast on, whose one switch is nccl.nvls_enable",
}


def forbidden(variable: str) -> str:
    """Return what a variable does that no study may ask for; '' for one that does nothing of the kind."""
    if variable in OTHERS:
        return ""
    return next((what for pattern, what in FORBIDDEN.items() if pattern.search(variable)), "")


class UnknownWord(ValueError):
    """A word of NCCL_ALGO or NCCL_PROTO that NCCL does not know; `is_function` where it stands for a function."""

    def __init__(self, message: str, word: str, is_function: bool) -> None:
        super().__init__(message)
        self.word, self.is_function = word, is_function


def level_word(value: str) -> str:
    """Return NCCL's word for a level; a legacy number as NCCL translates it (0 LOC, 1 PIX, 2 PXB, 3 PHB, 4 and more SYS)."""
    number = re.match(r"[0-9]{1,9}", value)
    return _LEGACY_LEVELS[min(int(number[0]), len(_LEGACY_LEVELS) - 1)] if number else value


def legacy_number(word: str) -> int | None:
    """Return the number that older documents use for a level; None where it has none."""
    return _LEGACY_LEVELS.index(word) if word in _LEGACY_LEVELS else None


def allowed(value: str, names: tuple[str, ...]) -> dict[str, set[str]]:
    """Return what NCCL_ALGO or NCCL_PROTO leaves to each function: {function: words of `names`}.

    Reads NCCL's grammar, `[function:][^]word,word[;function:…]`, words in any case (per function from 2.24). Later parts
    overwrite earlier ones. A part without a function is for all.

    Raises:
        UnknownWord: NCCL does not know a word; it would ignore it silently.
    """
    known = {name.lower(): name for name in names}
    functions = {name.lower(): name for name in FUNCTIONS}
    result = {name: set(names) for name in FUNCTIONS}
    for part in filter(None, value.split(";")):
        prefix, colon, rest = part.rpartition(":")
        if colon and prefix.lower() not in functions:
            raise UnknownWord(
                f"{part!r}: {prefix!r} is none of {', '.join(FUNCTIONS)}", prefix, True
            )
        words = rest.removeprefix("^").split(",")
        if unknown := [word for word in words if word.lower() not in known]:
            raise UnknownWord(
                f"{part!r}: accepted is a list of {', '.join(names)}", unknown[0], False
            )
        chosen = {known[word.lower()] for word in words}
        chosen = set(names) - chosen if rest.startswith("^") else chosen
        for function in [functions[prefix.lower()]] if colon else FUNCTIONS:
            result[function] = set(chosen)
    return result


def refuse_selections(algo: str | None, proto: str | None) -> None:
    """Refuse `nccl.algo` and `nccl.proto` where they have an unknown word, or leave a collective nothing that works.

    Raises:
        Refused: names the setting, the value and what is accepted.
    """
    if proto is not None:
        left = _selected("proto", proto, PROTOCOLS)
        if without := [function for function, words in left.items() if not words]:
            which = "every collective" if len(without) == len(FUNCTIONS) else without[0].lower()
            raise Refused(f"nccl.proto={proto}: leaves {which} without a protocol")
    if algo is not None:
        left = _selected("algo", algo, ALGORITHMS)
        for function in FUNCTIONS:
            if not left[function] & AVAILABLE[function]:
                raise Refused(_without_algorithm(algo, function.lower()))


def _selected(name: str, text: str, words: tuple[str, ...]) -> dict[str, set[str]]:
    """Return {function: words left to it}. Raises Refused for a word that NCCL would ignore."""
    try:
        if not all(text.split(";")):
            raise UnknownWord("an empty part", "", False)
        return allowed(text, words)
    except UnknownWord as error:
        if error.is_function:
            functions = ", ".join(function.lower() for function in FUNCTIONS)
            raise Refused(
                f"nccl.{name}={text}: {error.word!r} is no collective; accepted are {functions}"
            ) from None
        example = f"{words[1]}, or for one collective allreduce:{words[0].lower()}"
        raise Refused(
            f"nccl.{name}={text}: {error.word!r} is not one of {', '.join(words)}; write for instance {example}"
        ) from None


def _without_algorithm(text: str, function: str) -> str:
    """Return the sentence for a selection that leaves a collective no algorithm: ranks would fail at its first call."""
    parts = text.lower().split(";")
    if any(part.startswith(f"{function}:") for part in parts):
        hint = f"give {function} another one"
    else:
        hint = f"name the collective (nccl.algo=allreduce:{parts[0]})"
    return (
        f"nccl.algo={text}: leaves {function} without an algorithm, and DDP needs all-gather and broadcast to start; "
        f"{hint} or keep Ring in the list"
    )
