"""The NCCL variables that a study can sweep, with the values that each accepts.

`nccl.<name>` sets `NCCL_<NAME>`; `null` leaves the variable as the surrounding environment has it. NCCL ignores an unknown
word and writes nothing about it to its log (seen: `NCCL_P2P_LEVEL=loc`), so values are checked here, before any process
starts. Sources: NVIDIA's page "Environment Variables" of the NCCL user guide, and NCCL's sources up to 2.30.
Variables that load libraries, write files or redirect traffic to another host have no field and are refused.
"""

# ruff: noqa: RUF009 (option() makes a dataclass field, not a value)

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from conf.nccl_vocabulary import ALGORITHMS, AVAILABLE, FUNCTIONS, LEVELS, PROTOCOLS, UnknownWord, allowed, level_word
from conf.options import Refused, check, closest, described, option


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
    p2p_net_chunksize: int | None = number("bytes of a send/recv chunk over the network", 1, 1 << 30)
    shm_disable: int | None = switch("1: no shared-memory transport")
    shm_use_cuda_memcpy: int | None = switch("1: copy engine for shared memory")
    shm_memcpy_mode: int | None = number("1 sender, 2 receiver, 3 both", 1, 3)
    shm_locality: int | None = number("1 sender's node, 2 receiver's node", 1, 2)
    nvb_disable: int | None = switch("1: no NVLink path through another GPU")
    # how
    algo: str | None = word("algorithms, e.g. Ring, or per function: allreduce:tree")
    proto: str | None = word("protocols, e.g. LL,Simple or ^LL128, or per function: allreduce:ll128")
    min_nchannels: int | None = number("fewest channels", 1, 64)
    max_nchannels: int | None = number("most channels", 1, 64)
    min_ctas: int | None = number("fewest thread blocks", 1, 64)
    max_ctas: int | None = number("most thread blocks", 1, 64)
    min_p2p_nchannels: int | None = number("fewest channels of send/recv", 1, 64)
    max_p2p_nchannels: int | None = number("most channels of send/recv", 1, 64)
    nchannels_per_net_peer: int | None = number("channels of send/recv to each remote peer", 1, 64)
    nthreads: int | None = option(None, "threads of a block: 64, 128, 256 or 512", words=("64", "128", "256", "512"))
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
    plugin_p2p: str | None = word("point-to-point layer of the SHARP plugin", "ib", "ucx", "ucx_rma")
    sharp_max_comms: int | None = number("communicators that may use SHARP", 0, 2)
    # network
    net: str | None = word("network", "IB", "Socket")
    net_gdr_level: str | None = level("maximum distance between NIC and GPU for GPUDirect RDMA")
    net_gdr_read: int | None = switch("1: GPUDirect RDMA for sends too")
    net_shared_buffers: int | None = switch("0: a buffer for each pair")
    net_shared_comms: int | None = switch("0: a connection for each channel")
    cross_nic: int | None = number("rings over different NICs: 0 never, 1 yes, 2 prefer not", 0, 2)
    pxn_disable: int | None = switch("1: no relay through another GPU of the node")
    p2p_pxn_level: int | None = number("when send/recv is relayed: 0 never, 1 when needed, 2 always", 0, 2)
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
    env: dict[str, str] = option({}, "further variables of the list FURTHER, as NCCL_NAME: value")


# Harmless variables that are rarely swept: accepted in nccl.env, with any value.
FURTHER = (
    "NCCL_CHECKS_DISABLE", "NCCL_COMM_BLOCKING", "NCCL_CREATE_THREAD_CONTEXT", "NCCL_GDRCOPY_ENABLE",
    "NCCL_GDR_FLUSH_DISABLE", "NCCL_IB_CUDA_SUPPORT", "NCCL_IB_ECE_ENABLE", "NCCL_IB_FIFO_TC", "NCCL_IB_RETURN_ASYNC_EVENTS",
    "NCCL_IB_USE_INLINE", "NCCL_LL128_C2C", "NCCL_MAX_RINGS", "NCCL_MIN_RINGS", "NCCL_NVLSTREE_MAX_CHUNKSIZE",
    "NCCL_NVLS_CHUNKSIZE", "NCCL_OOB_NET_ENABLE", "NCCL_P2P_READ_ENABLE", "NCCL_PROGRESS_APPENDOP_FREQ", "NCCL_PROTO_OVERRIDE",
    "NCCL_SET_STACK_SIZE", "NCCL_SINGLE_RING_THRESHOLD", "NCCL_SOCKET_POLL_TIMEOUT_MSEC", "NCCL_TREE_THRESHOLD",
    "NCCL_WORK_FIFO_BYTES", "SHARP_COLL_ENABLE_SAT",
)  # fmt: skip

# Values with which a variable that disables something disables nothing.
OFF = ("", "0", "n", "no", "f", "false", "off")

FIELDS = {field.name: field for field in dataclasses.fields(Nccl) if field.name != "env"}


def settings(nccl: Nccl) -> tuple[dict[str, str], list[str]]:
    """Check every setting and return (the variables that it sets, a notice for each legacy number that was translated).

    What is `null` sets no variable.

    Raises:
        Refused: names the field, the value and what is accepted.
    """
    variables: dict[str, str] = {}
    notices = []
    for name, field in FIELDS.items():
        value = getattr(nccl, name)
        if value is None:
            continue
        if field.metadata["words"] == LEVELS and _is_legacy_number(str(value)):
            word = level_word(str(value))
            notices.append(f"nccl.{name}={value} is NCCL's legacy number for {word}; {word} is used")
            value = word
        _check_value(name, value, field)
        variables[f"NCCL_{name.upper()}"] = str(value)
    _check_selections(nccl)
    _check_bounds(nccl)
    return variables | _further(nccl.env), notices


def _is_legacy_number(text: str) -> bool:
    """Return whether a level is written as a number from 0 to 5, as older documents of NCCL do."""
    return text in ("0", "1", "2", "3", "4", "5")


def _check_value(name: str, value: Any, field: "dataclasses.Field[Any]") -> None:
    """Refuse a value that its field does not accept, or a text that no environment variable should hold."""
    if isinstance(value, str) and (not value or not value.isascii() or not value.isprintable() or len(value) > 500):
        raise Refused(f"nccl.{name}={value!r}: accepted is printable ASCII text of 1 to 500 characters")
    check(f"nccl.{name}", value, described(field))


def _check_bounds(nccl: Nccl) -> None:
    """Refuse a lower bound above its upper bound."""
    for low, high in (
        ("min_nchannels", "max_nchannels"),
        ("min_ctas", "max_ctas"),
        ("min_p2p_nchannels", "max_p2p_nchannels"),
    ):
        least, most = getattr(nccl, low), getattr(nccl, high)
        if least is not None and most is not None and least > most:
            raise Refused(f"nccl.{low}={least}: accepted is at most nccl.{high}={most}")


def _further(env: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of `nccl.env` as text. Raises Refused for one that is not in FURTHER."""
    for name, value in env.items():
        if name not in FURTHER:
            own = name.removeprefix("NCCL_").lower()
            hint = f"; it has a field: nccl.{own}={value}" if own in FIELDS else closest(name, FURTHER)
            raise Refused(f"nccl.env.{name}={value}: accepted are {', '.join(FURTHER)}{hint}")
        if not re.fullmatch(r"[\x20-\x7e]{1,200}", str(value)):
            raise Refused(f"nccl.env.{name}={value!r}: accepted is printable ASCII text of 1 to 200 characters")
    return {name: str(value) for name, value in env.items()}


def _check_selections(nccl: Nccl) -> None:
    """Refuse `algo` and `proto` where they have an unknown word, or leave a collective nothing that works."""
    if nccl.proto is not None:
        left = _selected("proto", nccl.proto, PROTOCOLS)
        if without := [function for function, words in left.items() if not words]:
            which = "every collective" if len(without) == len(FUNCTIONS) else without[0].lower()
            raise Refused(f"nccl.proto={nccl.proto}: leaves {which} without a protocol")
    if nccl.algo is not None:
        left = _selected("algo", nccl.algo, ALGORITHMS)
        for function in FUNCTIONS:
            if not left[function] & AVAILABLE[function]:
                raise Refused(_without_algorithm(nccl.algo, function.lower()))


def _selected(name: str, text: str, words: tuple[str, ...]) -> dict[str, set[str]]:
    """Return {function: words left to it}. Raises Refused for a word that NCCL would ignore."""
    try:
        if not all(text.split(";")):
            raise UnknownWord("an empty part", "", False)
        return allowed(text, words)
    except UnknownWord as error:
        if error.is_function:
            functions = ", ".join(function.lower() for function in FUNCTIONS)
            raise Refused(f"nccl.{name}={text}: {error.word!r} is no collective; accepted are {functions}") from None
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


def with_configuration_files(surrounding: Mapping[str, str], texts: Iterable[str]) -> dict[str, str]:
    """Return the surroundings with NCCL_NVLS_ENABLE of NCCL's configuration files, which a cell's own file would hide.

    `texts` are the files in the order in which NCCL reads them. A variable that is set counts before every file.
    """
    merged = dict(surrounding)
    for text in texts:
        for line in text.splitlines():
            name, equals, value = line.partition("=")
            if equals and name.strip() == "NCCL_NVLS_ENABLE":
                merged.setdefault(name.strip(), value.strip())
    return merged


def refuse_multicast(variables: Mapping[str, str], surroundings: Mapping[str, str]) -> None:
    """Refuse NVLink multicast where the surrounding environment forbids it (it can put shared GPUs out of service).

    Raises:
        Refused: names the variable of the environment that forbids it.
    """
    wanted = variables.get("NCCL_NVLS_ENABLE", "0")
    if wanted == "0":
        return
    for name, allows in (
        ("NCCL_NVLS_ENABLE", ("", "1", "2")),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", OFF),
        ("NVSHMEM_DISABLE_NVLS", OFF),
    ):
        value = surroundings.get(name, "").strip()
        if value.lower() not in allows:  # a spelling that is not known forbids, to be safe
            raise Refused(
                f"nccl.nvls_enable={wanted}: the environment forbids NVLink multicast ({name}={value}); "
                "accepted here are null and 0"
            )
