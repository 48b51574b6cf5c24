"""What NCCL itself says about a variable: whether and how it announces it.

From the sources of the release tags 2.4 to 2.30. NCCL_PARAM integers are read, and announced, at
their first use: a variable whose code is never reached (NCCL_SHM_DISABLE where P2P carries
everything) is never announced.
"""

import re

from conf.nccl import level_word

_LEVEL_SETTINGS = {"NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL"}

# Announced whatever NCCL_DEBUG_SUBSYS selects, while the topology is searched.
_ALL = {"NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE"}
# Announced at every start of a communicator of two ranks or more, to the ENV subsystem, from this
# release on.
_AT_START = {
    "NCCL_ALGO": (2, 5),
    "NCCL_PROTO": (2, 5),
    "NCCL_MIN_NCHANNELS": (2, 5),
    "NCCL_MAX_NCHANNELS": (2, 5),
    "NCCL_NTHREADS": (2, 5),
    "NCCL_BUFFSIZE": (2, 5),
    "NCCL_SOCKET_IFNAME": (2, 5),
    "NCCL_COLLNET_ENABLE": (2, 12),
    "NCCL_IGNORE_CPU_AFFINITY": (2, 5),
    "NCCL_MIN_CTAS": (2, 17),
    "NCCL_MAX_CTAS": (2, 17),
    "NCCL_CGA_CLUSTER_SIZE": (2, 17),
    "NCCL_NVLS_ENABLE": (2, 18),
    "NCCL_LAUNCH_MODE": (2, 18),
    "NCCL_PAT_ENABLE": (2, 23),
}
# Integers were announced to every subsystem before this release, to ENV alone from it on.
_ENV_ONLY_INTEGERS = (2, 15)
_STRINGS = {"NCCL_ALGO", "NCCL_PROTO", "NCCL_SOCKET_IFNAME", "NCCL_LAUNCH_MODE"}

# Variables whose effect shows in transports, channels or algorithms: only for these an equal log
# means "no effect".
VISIBLE = {
    *("NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE", "NCCL_P2P_DIRECT_DISABLE", "NCCL_SHM_DISABLE"),
    *("NCCL_NVB_DISABLE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
    *("NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE"),
    *("NCCL_PXN_DISABLE", "NCCL_CROSS_NIC", "NCCL_NET", "NCCL_IB_DISABLE", "NCCL_IB_HCA"),
    *("NCCL_NET_GDR_LEVEL", "NCCL_COLLNET_ENABLE", "NCCL_MNNVL_ENABLE", "NCCL_PAT_ENABLE"),
}


def same_value(name: str, requested: str, announced: str) -> bool:
    """Tell whether NCCL announced the requested value.

    NCCL reads integers as C does and prints decimals.
    """
    if name in _LEVEL_SETTINGS:
        return level_word(requested) == level_word(announced)
    if name == "NCCL_LAUNCH_MODE":
        mode = "GROUP" if requested.upper() == "GROUP" else "PARALLEL"
        return announced == mode
    if requested == announced:
        return True
    text = requested.strip()
    octal = re.fullmatch(r"([+-]?)0([0-7]+)", text)
    try:
        if octal:
            value = int(octal[1] + octal[2], 8)
        else:
            value = int(text, 0)
        # before 2.12 negative numbers were printed as unsigned ones
        return value % 2**64 == int(announced) % 2**64
    except ValueError:
        return False


def announcement(name: str, value: str, version: tuple[int, ...] | None) -> str:
    """Return when a variable is announced.

    "always"; "env": at start, when the ENV subsystem is logged; "used": only where its code is
    reached; "level": not itself, `NCCL_P2P_LEVEL … LOC` instead (NCCL_P2P_DISABLE=1 to 2.22);
    "never".
    """
    if name == "NCCL_P2P_DISABLE":
        if value != "1":
            return "never"  # only a 1 is announced
        return "level" if version is not None and version < (2, 23) else "always"
    if name in _ALL:
        return "always"
    if name == "NCCL_NET":
        return "never"  # the line `Using network` says it instead
    since = _AT_START.get(name)
    if since is None or (version is not None and version < since):
        return "used"
    if name not in _STRINGS and version is not None and version < _ENV_ONLY_INTEGERS:
        return "always"
    return "env"
