"""The settings of torch that one cell could leave to the next: how each is read and set.

A setting that this version of torch does not have, or that the machine cannot tell, has the value None and is never set.
"""

import contextlib
import functools
import operator
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Flags by the module of torch that has them. torch refuses to read an older flag while the newer `fp32_precision` says
# something else: those come first, so that they are the first to be set back.
_PRECISIONS = (
    "backends", "backends.cudnn", "backends.cudnn.conv", "backends.cudnn.rnn", "backends.cuda.matmul",
    "backends.mkldnn", "backends.mkldnn.conv", "backends.mkldnn.rnn", "backends.mkldnn.matmul",
)  # fmt: skip
_ATTRIBUTES = {
    **dict.fromkeys(_PRECISIONS, ("fp32_precision",)),
    "backends.cudnn": ("fp32_precision", "enabled", "benchmark", "benchmark_limit", "deterministic", "allow_tf32"),
    "backends.cuda.matmul": (
        "fp32_precision", "allow_tf32", "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation",
    ),
    "backends.mkldnn": ("fp32_precision", "enabled", "deterministic"),
    "backends.opt_einsum": ("enabled", "strategy"),
    "utils.deterministic": ("fill_uninitialized_memory",),
}  # fmt: skip
# Functions of torch: how a setting is read, and how it is set.
_FUNCTIONS = {
    "float32_matmul_precision": ("get_float32_matmul_precision", "set_float32_matmul_precision"),
    "deterministic_debug_mode": ("get_deterministic_debug_mode", "set_deterministic_debug_mode"),
    "default_dtype": ("get_default_dtype", "set_default_dtype"),
    "num_threads": ("get_num_threads", "set_num_threads"),
    "grad_mode": ("is_grad_enabled", "_C._set_grad_enabled"),
    "multithreaded_backward": ("_C._is_multithreading_enabled", "_C._set_multithreading_enabled"),
    "warn_always": ("is_warn_always_enabled", "set_warn_always"),
    "anomaly_mode": ("is_anomaly_enabled", "_C._set_anomaly_enabled"),
    "autocast_cache": ("is_autocast_cache_enabled", "set_autocast_cache_enabled"),
    "flash_attention": ("_C._get_flash_sdp_enabled", "_C._set_sdp_use_flash"),
    "memory_efficient_attention": ("_C._get_mem_efficient_sdp_enabled", "_C._set_sdp_use_mem_efficient"),
    "math_attention": ("_C._get_math_sdp_enabled", "_C._set_sdp_use_math"),
    "cudnn_attention": ("_C._get_cudnn_sdp_enabled", "_C._set_sdp_use_cudnn"),
}
_AUTOCAST = {
    "autocast": ("is_autocast_enabled", "set_autocast_enabled"),
    "autocast's dtype": ("get_autocast_dtype", "set_autocast_dtype"),
}
_MODES = {"function modes": "_C._len_torch_function_stack", "dispatch modes": "_C._len_torch_dispatch_stack"}
_CONFIGS = ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config")


@dataclass(frozen=True)
class TorchSetting:
    """One setting."""

    read: Callable[[], Any]
    set: Callable[[Any], object] | None  # None: what cannot be set back


def _of_torch(dotted: str) -> Any:
    """Return something of torch by its dotted name. Raises AttributeError."""
    return operator.attrgetter(dotted)(torch)


def _all(device: torch.device) -> dict[str, TorchSetting]:
    """Return every setting that this torch has, by the name that people know it by."""
    found: dict[str, TorchSetting] = {}
    for dotted, flags in _ATTRIBUTES.items():
        for flag in flags:
            try:
                place = _of_torch(dotted)
            except AttributeError:
                continue
            read, write = functools.partial(getattr, place, flag), functools.partial(setattr, place, flag)
            found[f"torch.{dotted}.{flag}"] = TorchSetting(read, write)
    for name, (getter, setter) in _FUNCTIONS.items():
        try:
            found[f"torch's {name}"] = TorchSetting(_of_torch(getter), _of_torch(setter))
        except AttributeError:
            continue
    for kind in {"cpu", device.type}:
        for name, (getter, setter) in _AUTOCAST.items():
            found[f"{name} on {kind}"] = TorchSetting(
                functools.partial(_of_torch(getter), kind), functools.partial(_of_torch(setter), kind)
            )
    found["torch's default_device"] = TorchSetting(torch.get_default_device, _set_default_device)
    for name, getter in _MODES.items():
        found[f"torch's {name}"] = TorchSetting(_of_torch(getter), None)
    return found


def _set_default_device(device: torch.device) -> None:
    # None, because a device that is set, the CPU too, goes through every call of torch.
    torch.set_default_device(None if device.type == "cpu" else device)


def _value(setting: TorchSetting) -> Any:
    try:
        return setting.read()
    except (AttributeError, AssertionError, NotImplementedError):
        return None
    except RuntimeError as error:  # two ways to set the same thing say different things
        return f"unreadable: {error!s:.40}"


def read(device: torch.device) -> dict[str, Any]:
    """Return every setting by its name."""
    values = {name: _value(setting) for name, setting in _all(device).items()}
    return values | {f"{name}.{one}": value for name in _CONFIGS for one, value in _configured(name).items()}


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings that are not as before."""
    return [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]


def set_back(before: Mapping[str, Any], device: torch.device) -> list[str]:
    """Set every setting that is not as `before`, which `read` returned. Returns the names of those that could not be set."""
    for name, setting in [*_all(device).items()] * 2:  # the older flags and the newer change each other
        if setting.set is not None and before.get(name) is not None and _value(setting) != before[name]:
            with contextlib.suppress(RuntimeError, ValueError):  # it is told
                setting.set(before[name])
    for config in _CONFIGS:
        for name, value in _configured(config).items():
            known = before.get(f"{config}.{name}")
            if known != value:
                module: Any = sys.modules[config]
                setattr(module, name, module._config[name].default if known is None else known)
    return differing(before, read(device))


def _configured(name: str) -> dict[str, Any]:
    """Return what differs from its default in a configuration of torch's compiler; nothing where it is not imported."""
    module: Any = sys.modules.get(name)
    entries = getattr(module, "_config", {})
    own = {one: entry.default for one, entry in entries.items() if getattr(entry, "alias", None) is None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about entries that have no meaning any more
        return {one: value for one, default in own.items() if (value := getattr(module, one, None)) != default}
