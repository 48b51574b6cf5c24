"""The NCCL variables that a study can sweep, with the values that each accepts.

`nccl.<name>` sets `NCCL_<NAME>`; `null` leaves the variable as the surrounding environment has it.
NCCL ignores an unknown word and writes nothing about it to its log (seen: `NCCL_P2P_LEVEL=loc`), so
values are checked here, before any process starts. Every other variable of NCCL's goes through
`nccl.other.NCCL_NAME`: no rule of ours knows its effect. Variables that load libraries, read or
write files, redirect traffic to another host or may switch multicast on are refused.

Sources: NVIDIA's page "Environment Variables" of the NCCL user guide; NCCL's release tags 2.4 to
2.30 (paths.cc, tuning.cc; for variables NCCL_PARAM and ncclGetEnv).
"""

# ruff: noqa: RUF009 (option() makes a dataclass field, not a value)

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from conf.options import Refused, check, metadata_of, option, unknown_option

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
# The algorithms that NCCL has for a function (tuning.cc); where a value allows none of them, older
# releases take Ring.
AVAILABLE: Mapping[str, frozenset[str]] = {
    "Broadcast": frozenset({"Ring"}),
    "Reduce": frozenset({"Ring"}),
    "AllGather": frozenset({"Ring", "CollNetDirect", "NVLS", "PAT"}),
    "ReduceScatter": frozenset({"Ring", "CollNetDirect", "NVLS", "PAT"}),
    "AllReduce": frozenset({"Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree"}),
}

# Variables of NCCL, and one of the SHARP plugin's, that the table of settings (conf.nccl) does not
# have.
_NAMES = """
ALLGATHERV_ENABLE ALLOC_P2P_NET_LL_BUFFERS CHECKS_DISABLE CHECK_MODE CHECK_POINTERS CHUNK_SIZE
COMM_BLOCKING COMM_SHRINK_SHARE_RESOURCES COMM_SPLIT_SHARE_RESOURCES CONNECT_ROUND_MAX_PEERS
CREATE_THREAD_CONTEXT CTA_POLICY DEV_API_JIT DISABLE_MEM_MANAGER ELASTIC_BUFFER_REGISTER
ENABLE_VERSION_CHECK GDAKI_USE_RELIABLE_DB GDRCOPY_ENABLE GDRCOPY_FIFO_ENABLE GDRCOPY_FLUSH_ENABLE
GDRCOPY_SYNC_ENABLE GDR_FLUSH_DISABLE GIN_ENABLE GIN_ERROR_QUERY_SEC GIN_GDAKI_MAX_DEST_RD_ATOMIC
GIN_GDAKI_MAX_QP_RD_ATOMIC GIN_GDAKI_NIC_HANDLER GIN_GDAKI_QP_DEPTH GIN_IB_TC GIN_NCONNECTIONS
GIN_PROXY_QUEUE_SIZE GIN_TYPE GRAPH_HELPER_DISABLE GRAPH_STREAM_ORDERING GROUP_CUDA_STREAM
IB_ADDR_FAMILY IB_ADDR_RANGE IB_CUDA_SUPPORT IB_DATA_DIRECT IB_DEVICE_PCI_ORDER IB_ECE_ENABLE
IB_FIFO_TC IB_MERGE_VFS IB_MQP_RETRY_ALL IB_MQP_RETRY_CNT IB_MQP_RETRY_SLEEP_MSEC IB_OOO_RQ
IB_PKEY IB_PREPOST_RECEIVE_WORK_REQUESTS IB_QUERY_PORT_SPEED IB_RECEIVER_SIDE_MATCHING_SCHEME
IB_RESILIENCY_PORT_FAILOVER IB_RESILIENCY_PORT_FAILOVER_MAX_ATTEMPTS
IB_RESILIENCY_PORT_FAILOVER_PROBE_DELAY IB_RESILIENCY_PORT_RECOVERY
IB_RESILIENCY_PORT_RECOVERY_ACK_TIMEOUT IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_INTERVAL
IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_BATCH_SIZE
IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_SEQUENCE_SIZE IB_RESILIENCY_PORT_RECOVERY_ALIVE_MSG_TIMEOUT
IB_RESILIENCY_PORT_RECOVERY_ATTEMPTS_MAX IB_RESILIENCY_PORT_RECOVERY_START_DELAY
IB_RETURN_ASYNC_EVENTS IB_ROCE_VERSION_NUM IB_ROUTABLE_FLID_GID_INDEX IB_SUBNET_AWARE_ROUTING
IB_SUBNET_PREFIX_LEN IB_USE_INLINE IB_WARN_RAIL_LOCAL IGNORE_COLLNET_MISMATCH IGNORE_DISABLED_P2P
IGNORE_NET_MISMATCH IPC_USE_ABSTRACT_SOCKET L1_SHARED_MEMORY_CARVEOUT LAUNCH_ORDER_IMPLICIT
LAUNCH_RACE_FATAL LEGACY_CUDA_REGISTER LL128_C2C LL128_NTHREADS LSA_TEAM_SIZE MAX_NRINGS MAX_RINGS
MEM_SYNC_DOMAIN MIN_NRINGS MIN_RINGS MLOPART_RDMA_ENABLE MNNVL_CROSS_CLIQUE MNNVL_RAIL_PER_HOST
MNNVL_SCATTER_NETS_ENABLE MULTI_RANK_GPU_ENABLE MULTI_SEGMENT_REGISTER NETDEVS_POLICY
NET_DISABLE_INTRA NET_FORCE_FLUSH NET_FORCE_MERGE NET_GDR_C2C NET_GDR_MLOPART NET_MERGE_LEVEL
NET_MERGE_POLICY NET_OPTIONAL_RECV_COMPLETION NET_OVERHEAD NO_CACHE NUM_RMA_CTX NVB_PRECONNECT
NVLINK_UTIL_CENTRIC_SCHED_ENABLE NVLSTREE_MAX_CHUNKSIZE NVLS_CHUNKSIZE NVTX_DISABLE OOB_NET_ENABLE
OOB_NET_IFNAME P2P_EPOCH_ENABLE P2P_LL_THRESHOLD P2P_MAX_PEERS P2P_PER_CHANNEL_NET_BW
P2P_READ_ENABLE P2P_SCHEDULE_GROUP_SIZE PROGRESS_APPENDOP_FREQ PROTO_OVERRIDE
PROXY_APPEND_BATCH_SIZE PROXY_CPUSET PXN_C2C REPORT_CONNECT_PROGRESS RMA_DISABLE
RMA_PROXY_QUEUE_SIZE SET_CPU_STACK_SIZE SET_STACK_SIZE SHADOW_MEMPOOL_MAX_SIZE
SINGLE_PROC_MEM_REG_ENABLE SINGLE_RING_THRESHOLD SOCKET_INLINE SOCKET_MAGIC SOCKET_MIN_TASKSIZE
SOCKET_POLL_TIMEOUT_MSEC SOCKET_RCVBUF SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC SOCKET_SNDBUF
SYM_CE_THRESHOLD SYM_CTAS SYM_GIN_KERNELS_ENABLE SYM_KERNEL SYM_NOWIN_ENABLE
SYM_REUSE_SYSMEM_HANDLES SYM_RS_GIN_CHUNK_SIZE SYM_TMA_ENABLE THREAD_THRESHOLDS TOPO_SPLIT_MLOPART
TREE_THRESHOLD UID_STAGGER_RATE UID_STAGGER_THRESHOLD UNPACK_DOUBLE_NCHANNELS WIN_ENABLE
WIN_STRIDE WORK_ARGS_BYTES WORK_FIFO_BYTES
"""
OTHERS = frozenset(("SHARP_COLL_ENABLE_SAT", *(f"NCCL_{name}" for name in _NAMES.split())))
# What a variable must not do, by its name: {pattern: what it does}. Variables of later releases are
# named alike.
FORBIDDEN: Mapping[re.Pattern[str], str] = {
    re.compile(
        r"PLUGIN|LIB(_|$)"
    ): "makes NCCL load a library; export it before you start launch.py",
    re.compile(r"FILE|DUMP|_DIR(_|$)|_PATH(_|$)"): "makes NCCL read or write files",
    re.compile(r"COMM_ID|HOSTID|UUID|CLIQUE_ID|_ADDR$"): "makes ranks meet elsewhere",
    re.compile(r"^NCCL_(DEBUG|RAS)(_|$)"): "is set by Ringside itself, which "
    "keeps NCCL's log in the folder of each run",
    re.compile(
        r"NVLS|MULTICAST|MULTIMEM"
    ): "may switch NVLink multicast on, whose one switch is nccl.nvls_enable",
}


def forbidden(variable: str) -> str:
    """Return what a variable does that no study may ask for; empty: nothing of the kind."""
    if variable not in OTHERS:
        for pattern, effect in FORBIDDEN.items():
            if pattern.search(variable):
                return effect
    return ""


def level_word(value: str) -> str:
    """Return NCCL's word for a level; a legacy number as NCCL translates it (0 LOC … 4 and more
    SYS)."""
    digits = re.match(r"[0-9]{1,9}", value)
    if not digits:
        return value
    return _LEGACY_LEVELS[min(int(digits[0]), len(_LEGACY_LEVELS) - 1)]


def legacy_number(word: str) -> int | None:
    """Return the number that older documents use for a level; None where it has none."""
    if word not in _LEGACY_LEVELS:
        return None
    return _LEGACY_LEVELS.index(word)


def allowed(value: str, names: tuple[str, ...]) -> dict[str, set[str]]:
    """Return what NCCL_ALGO or NCCL_PROTO leaves to each function: {function: words of `names`}.

    Reads NCCL's grammar, `[function:][^]word,word[;function:…]`, words in any case (per function
    from 2.24). Later parts overwrite earlier ones. A part without a function is for all.

    Raises ValueError: NCCL does not know a word; it would ignore it silently.
    """
    by_lower = {name.lower(): name for name in names}
    functions = [name.lower() for name in FUNCTIONS]
    result = {name: set(names) for name in FUNCTIONS}
    for part in value.split(";"):
        prefix, colon, rest = part.rpartition(":")
        if colon and prefix.lower() not in functions:
            raise ValueError(
                f"{prefix!r} is not a collective; expected {', '.join(FUNCTIONS).lower()}"
            )
        chosen = set()
        for word in rest.removeprefix("^").split(","):
            if word.lower() not in by_lower:
                raise ValueError(
                    f"{word!r} is not one of {', '.join(names)}; write for instance {names[1]}, or "
                    f"for one collective allreduce:{names[0].lower()}"
                )
            chosen.add(by_lower[word.lower()])
        if rest.startswith("^"):
            chosen = set(names) - chosen
        for function in FUNCTIONS:
            if not colon or prefix.lower() == function.lower():
                result[function] = set(chosen)
    return result


def refuse_selections(algo: str | None, proto: str | None) -> None:
    """Refuse selections with an unknown word, or that leave a collective nothing."""
    left = {}
    for name, text, words in (("algo", algo, ALGORITHMS), ("proto", proto, PROTOCOLS)):
        try:
            if text is not None:
                left[name] = allowed(text, words)
        except ValueError as error:
            raise Refused(f"nccl.{name}={text}: {error}") from None
    without = []
    for function, protocols in left.get("proto", {}).items():
        if not protocols:
            without.append(function.lower())
    if without:
        which = "every collective" if len(without) == len(FUNCTIONS) else without[0]
        raise Refused(f"nccl.proto={proto}: leaves {which} without a protocol")
    for function, chosen in left.get("algo", {}).items():
        if chosen & AVAILABLE[function]:
            continue
        # Ranks would fail at the first call.
        name, parts = function.lower(), str(algo).lower().split(";")
        hint = f"name the collective (nccl.algo=allreduce:{parts[0]})"
        if any(part.startswith(f"{name}:") for part in parts):
            hint = f"give {name} another one"
        raise Refused(
            f"nccl.algo={algo}: leaves {name} without an algorithm (DDP needs all-gather and "
            f"broadcast to start); {hint}, or allow Ring too (nccl.algo=\"'{algo},Ring'\")"
        )


def switch(help: str) -> int | None:
    """Declare a variable that is 0 or 1."""
    return option(None, help, least=0, most=1)  # type: ignore[no-any-return]


def number(help: str, least: int, most: int) -> int | None:
    """Declare a variable that is an integer between two bounds."""
    return option(None, help, least=least, most=most)  # type: ignore[no-any-return]


def level(help: str) -> str | None:
    """Declare a variable that is a distance between two devices."""
    return option(None, help, words=LEVELS)  # type: ignore[no-any-return]


def word(help: str, *words: str) -> str | None:
    """Declare a variable that is one of some words, or any text where no words are given."""
    return option(None, help, words=words)  # type: ignore[no-any-return]


@dataclass
class Nccl:
    """The settings of NCCL. Every field is `null` (untouched) unless a study sets it."""

    # peer to peer and shared memory
    p2p_disable: int | None = switch("1: no direct access between GPUs")
    p2p_level: str | None = level("maximum distance between two GPUs for direct access; LOC: never")
    p2p_direct_disable: int | None = switch("1: no direct access within one process")
    p2p_use_cuda_memcpy: int | None = switch("1: peer copies by the copy engine")
    p2p_nvl_chunksize: int | None = number("bytes of a send/recv chunk over NVLink", 1, 1 << 30)
    p2p_pci_chunksize: int | None = number("bytes of a send/recv chunk over PCIe", 1, 1 << 30)
    p2p_net_chunksize: int | None = number(
        "bytes of a send/recv chunk over the network", 1, 1 << 30
    )
    shm_disable: int | None = switch("1: no shared-memory transport")
    shm_use_cuda_memcpy: int | None = switch("1: copy engine for shared memory")
    shm_memcpy_mode: int | None = number("1 sender, 2 receiver, 3 both", 1, 3)
    shm_locality: int | None = number("1 sender's node, 2 receiver's node", 1, 2)
    nvb_disable: int | None = switch("1: no NVLink path through another GPU")
    # how
    algo: str | None = word("algorithms, e.g. Ring, or per function: allreduce:tree")
    proto: str | None = word(
        "protocols, e.g. LL,Simple or ^LL128, or per function: allreduce:ll128"
    )
    min_nchannels: int | None = number("fewest channels", 1, 64)
    max_nchannels: int | None = number("most channels", 1, 64)
    min_ctas: int | None = number("fewest thread blocks", 1, 64)
    max_ctas: int | None = number("most thread blocks", 1, 64)
    min_p2p_nchannels: int | None = number("fewest channels of send/recv", 1, 64)
    max_p2p_nchannels: int | None = number("most channels of send/recv", 1, 64)
    nchannels_per_net_peer: int | None = number("channels of send/recv to each remote peer", 1, 64)
    nthreads: int | None = option(
        None, "threads of a block: 64, 128, 256 or 512", words=("64", "128", "256", "512")
    )
    buffsize: int | None = number("bytes of the buffer between two GPUs", 1024, 1 << 30)
    ll_buffsize: int | None = number("bytes of the LL buffer", 1024, 1 << 30)
    ll128_buffsize: int | None = number("bytes of the LL128 buffer", 1024, 1 << 30)
    cga_cluster_size: int | None = number("thread blocks of a cluster", 0, 8)
    launch_mode: str | None = word("how kernels of one process are launched", "PARALLEL", "GROUP")
    runtime_connect: int | None = switch("1: connect at the first call that needs it")
    pat_enable: int | None = switch("1: the PAT algorithm may be chosen")
    graph_mixing_support: int | None = switch("0: CUDA graph and plain launches are not mixed")
    graph_register: int | None = switch("1: register buffers captured in CUDA graphs")
    local_register: int | None = switch("1: register user buffers")
    cumem_enable: int | None = number("CUDA virtual memory for buffers; -2: NCCL decides", -2, 1)
    cumem_host_enable: int | None = number("the same for host memory", -1, 1)
    ignore_cpu_affinity: int | None = switch("1: ignore the job's CPU affinity")
    # NVLink multicast and in-network reduction
    nvls_enable: int | None = number("NVLink SHARP (multicast); 2: when it can", 0, 2)
    nvls_nchannels: int | None = number("channels of NVLink SHARP", 1, 64)
    collnet_enable: int | None = switch("1: in-network reduction (SHARP) through a plugin")
    collnet_node_threshold: int | None = number("fewest nodes for in-network reduction", 1, 1 << 20)
    plugin_p2p: str | None = word(
        "point-to-point layer of the SHARP plugin", "ib", "ucx", "ucx_rma"
    )
    sharp_max_comms: int | None = number("communicators that may use SHARP", 0, 2)
    # network
    net: str | None = word("network", "IB", "Socket")
    net_gdr_level: str | None = level("maximum distance between NIC and GPU for GPUDirect RDMA")
    net_gdr_read: int | None = switch("1: GPUDirect RDMA for sends too")
    net_shared_buffers: int | None = switch("0: a buffer for each pair")
    net_shared_comms: int | None = switch("0: a connection for each channel")
    cross_nic: int | None = number("rings over different NICs: 0 never, 1 yes, 2 prefer not", 0, 2)
    pxn_disable: int | None = switch("1: no relay through another GPU of the node")
    p2p_pxn_level: int | None = number(
        "when send/recv is relayed: 0 never, 1 when needed, 2 always", 0, 2
    )
    mnnvl_enable: int | None = number("NVLink between nodes; 2: when it can", 0, 2)
    dmabuf_enable: int | None = switch("0: no DMA-BUF for GPUDirect RDMA")
    ib_disable: int | None = switch("1: no InfiniBand or RoCE")
    ib_hca: str | None = word("adapters, e.g. mlx5_0,mlx5_1 or ^mlx5_2 or =mlx5_0:1")
    ib_gid_index: int | None = number("GID of RoCE", 0, 255)
    ib_qps_per_connection: int | None = number("queue pairs of a connection", 1, 128)
    ib_split_data_on_qps: int | None = switch("1: a message is split over the queue pairs")
    ib_merge_nics: int | None = switch("1: ports of one adapter are one device")
    ib_adaptive_routing: int | None = switch("1: use adaptive routing")
    ib_ar_threshold: int | None = number("bytes from which adaptive routing is used", 0, 1 << 40)
    ib_pci_relaxed_ordering: int | None = number("PCIe relaxed ordering; 2: when it can", 0, 2)
    ib_sl: int | None = number("service level", 0, 15)
    ib_tc: int | None = number("traffic class", 0, 255)
    ib_timeout: int | None = number("timeout exponent", 0, 31)
    ib_retry_cnt: int | None = number("retries", 0, 7)
    socket_ifname: str | None = word("interfaces by prefix, e.g. eth,^docker")
    socket_family: str | None = word("address family", "AF_INET", "AF_INET6")
    socket_nthreads: int | None = number("helper threads of a connection", 1, 16)
    nsocks_perthread: int | None = number("sockets of a helper thread", 1, 16)
    other: dict[str, Any] = option(
        {}, "variables without a field, as NCCL_NAME: value; their effect is not checked"
    )


# Values with which a variable that disables something disables nothing.
OFF = ("", "0", "n", "no", "f", "false", "off")
# Variables that can forbid NVLink multicast, and the values with which each allows it.
_MULTICAST = {
    "NCCL_NVLS_ENABLE": ("", "1", "2"),
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": OFF,
    "NVSHMEM_DISABLE_NVLS": OFF,
}

FIELDS = {field.name: field for field in dataclasses.fields(Nccl) if field.name != "other"}
BOUNDS = (
    ("min_nchannels", "max_nchannels"),
    ("min_ctas", "max_ctas"),
    ("min_p2p_nchannels", "max_p2p_nchannels"),
)


def settings(nccl: Nccl) -> tuple[dict[str, str], list[str]]:
    """Check every setting and return (the variables that it sets, notices for the user).

    What is `null` sets no variable. A legacy number of a level is translated.
    """
    for name, value in vars(nccl).items():  # Hydra's `+nccl.name=value` adds any
        if name not in (*FIELDS, "other"):
            raise Refused(unknown_setting(name, str(value)))
    variables: dict[str, str] = {}
    notices = []
    for name, field in FIELDS.items():
        value = getattr(nccl, name)
        if value is None:
            continue
        if field.metadata["words"] == LEVELS and str(value) in ("0", "1", "2", "3", "4", "5"):
            word = level_word(str(value))
            notices.append(
                f"nccl.{name}={value} is NCCL's legacy number for {word}; {word} is used"
            )
            value = word
        if isinstance(value, str) and not re.fullmatch(r"[\x20-\x7e]{1,500}", value):
            raise Refused(
                f"nccl.{name}={value!r}: expected printable ASCII text of 1 to 500 characters"
            )
        check(f"nccl.{name}", value, metadata_of(field))
        variables[f"NCCL_{name.upper()}"] = str(value)
    refuse_selections(nccl.algo, nccl.proto)
    for low, high in BOUNDS:
        least, most = getattr(nccl, low), getattr(nccl, high)
        if least is not None and most is not None and least > most:
            raise Refused(f"nccl.{low}={least}: expected at most nccl.{high}={most}")
    for name, text in _others(nccl.other).items():
        unknown = ""
        if name not in OTHERS:
            unknown = (
                "; NCCL up to 2.30 has no such variable, and NCCL ignores what it does not know"
            )
        notices.append(f"nccl.other.{name}={text}: its effect is not checked{unknown}")
        variables[name] = text
    return variables, notices


def _others(typed_values: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of `nccl.other` as text; `null` is untouched. Raises Refused."""
    variables: dict[str, str] = {}
    for key, value in typed_values.items():
        if value is None:
            continue
        typed, name = f"nccl.other.{key}={value}", _variable_of(str(key))
        if in_table(name):
            raise Refused(
                f"{typed}: {name} has an option of its own; write nccl.{_field_of(name)}={value}"
            )
        if forbidden(name):
            raise Refused(f"{typed}: {setting_of_variable(name, str(value))}")
        if name not in OTHERS and not re.fullmatch(r"NCCL_[A-Z0-9_]{2,60}", name):
            raise Refused(
                f"{typed}: expected names of NCCL's variables; they begin with "
                f"NCCL_{_near(name, 0.6)}"
            )
        near = _near(name, 0.85)
        if name not in OTHERS and near:
            raise Refused(
                f"{typed}: NCCL up to 2.30 has no such variable{near}. For a newer NCCL, "
                "set it in the environment of launch.py: ranks inherit it"
            )
        if name in variables:
            raise Refused(f"{typed}: given twice; expected one value for {name}")
        is_plain = type(value) in (int, float, str)
        if not is_plain or not re.fullmatch(r"[\x20-\x7e]{1,200}", str(value)):
            raise Refused(
                f"{typed}: expected a number or printable ASCII text of 1 to 200 characters"
            )
        variables[name] = str(value)
    return variables


def _variable_of(typed: str) -> str:
    """Return the variable of a name: `win_enable` and `NCCL_WIN_ENABLE` are NCCL_WIN_ENABLE."""
    name = typed.upper()
    if f"NCCL_{name}" in OTHERS or in_table(f"NCCL_{name}"):
        return f"NCCL_{name}"
    return name


def in_table(variable: str) -> bool:
    """Return whether a variable has a setting of its own, `nccl.<name>`."""
    return variable.startswith("NCCL_") and _field_of(variable) in FIELDS


def _field_of(variable: str) -> str:
    return variable.removeprefix("NCCL_").lower()


def _near(variable: str, cutoff: float) -> str:
    """Return ' (did you mean X?)' for the nearest name of a variable, else ''."""
    names = [*OTHERS, *(f"NCCL_{name.upper()}" for name in FIELDS)]
    near = difflib.get_close_matches(variable, sorted(names), n=1, cutoff=cutoff)
    if not near:
        return ""
    return f" (did you mean {near[0]}?)"


def setting_of_variable(variable: str, value: str) -> str:
    """Return what to write to set a variable of NCCL's, as the end of a sentence."""
    if in_table(variable):
        return f"write nccl.{_field_of(variable)}={value}"
    effect = forbidden(variable)
    if effect:
        return f"{variable} cannot be set here: it {effect}"
    return f"write nccl.other.{variable}={value} (its effect is not checked)"


def unknown_setting(key: str, value: str) -> str:
    """Return the sentence for `nccl.<key>=<value>` where the table has no such setting."""
    typed, name = f"nccl.{key}={value}", _variable_of(key)
    variable = f"NCCL_{_field_of(name).upper()}"
    refused = forbidden(variable) and not _near(variable, 0.85)
    if in_table(name) or name in OTHERS:
        return f"{typed}: {setting_of_variable(name, value)}"
    if refused:
        return f"{typed}: {setting_of_variable(variable, value)}"
    sentence = unknown_option("nccl", key, value, [*FIELDS])
    return f"{sentence} (for another variable of NCCL: nccl.other.NCCL_NAME={value})"


def with_configuration_files(
    surrounding: Mapping[str, str], texts: Iterable[str]
) -> dict[str, str]:
    """Return the surroundings with NCCL_NVLS_ENABLE of NCCL's configuration files, which a cell's
    own file would hide.

    `texts` are the files in the order in which NCCL reads them. A variable that is set counts
    before every file.
    """
    merged = dict(surrounding)
    for text in texts:
        for line in text.splitlines():
            name, equals, value = line.partition("=")
            if equals and name.strip() == "NCCL_NVLS_ENABLE":
                merged.setdefault(name.strip(), value.strip())
    return merged


def forbidding_multicast(surroundings: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that forbid NVLink multicast (it can put shared GPUs
    out of service)."""
    forbidding = {}
    for name, allowing in _MULTICAST.items():
        # A spelling that is not known forbids, to be safe.
        if name in surroundings and surroundings[name].strip().lower() not in allowing:
            forbidding[name] = surroundings[name]
    return forbidding


def refuse_multicast(
    variables: Mapping[str, str], surroundings: Mapping[str, str], whose: str = "environment"
) -> None:
    """Refuse NVLink multicast where the surrounding environment forbids it."""
    wanted = variables.get("NCCL_NVLS_ENABLE", "0")
    if wanted == "0":
        return
    for name, value in forbidding_multicast(surroundings).items():
        raise Refused(
            f"nccl.nvls_enable={wanted}: the {whose} forbids NVLink multicast "
            f"({name}={value.strip()}); possible here: null and 0"
        )
