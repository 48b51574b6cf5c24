"""How a model is compiled where only the rate of its steps counts. RESULTS.md tells what is known of each part."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainers.fastest import layers


def prepare(model: nn.Module) -> nn.Module:
    """Let layers of a model take the form that is fastest, in place. Names and values of its parameters stay."""
    return layers.in_faster_forms(model)


def compiled(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return a model that torch.compile compiles, with our rewrites, when it is first called."""
    from trainers.fastest.rewrites import JOINT, SPLIT  # inductor takes a second where nothing compiles

    options: dict[str, Any] = {"joint_custom_post_pass": JOINT, "post_grad_custom_post_pass": SPLIT}
    return torch.compile(model, options=options)
