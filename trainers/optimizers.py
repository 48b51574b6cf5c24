"""The optimizers: torch's own on a rank's parameters, and the same steps on flat weights.

SGD with momentum (Sutskever et al. 2013, in torch's form) is that of the published ResNet and
Inception recipes. AdamW is Loshchilov and Hutter 2019, arXiv:1711.05101. Both take torch's fused
kernels, on the CPU too.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from conf.cell import Optimizer

# Numbers kept for each weight: the momentum; the means of the gradient and of its square.
STATES = {"sgd": 1, "adamw": 2}
SETTINGS = 5  # numbers that say how a step is taken; see `settings`
ALL = slice(None)


def optimizer_of(
    options: Optimizer, parameters: Sequence[nn.Parameter], in_a_graph: bool = False
) -> torch.optim.Optimizer:
    """Return torch's optimizer of these parameters. `in_a_graph`: a CUDA graph holds its steps."""
    rate, decay = options.learning_rate, options.weight_decay
    if options.name == "adamw":
        betas, epsilon = (options.beta1, options.beta2), options.epsilon
        adamw = torch.optim.AdamW(
            parameters, rate, betas, epsilon, decay, fused=True, capturable=in_a_graph
        )
        if in_a_graph:  # where a graph finds it, from the start, as for SGD
            for parameter in parameters:
                adamw.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        return adamw
    sgd = torch.optim.SGD(parameters, rate, options.momentum, weight_decay=decay, fused=True)
    # torch's fused SGD leaves fresh momentum uninitialised when the loss scaler skips the first
    # step (seen: NaN under fp16); zeros are what the first step would start from anyway.
    for parameter in parameters:
        sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return sgd


def name_of(optimizer: torch.optim.Optimizer | None) -> str:
    """Return the name of an optimizer; `sgd` without one: only gradients are exchanged."""
    return "adamw" if isinstance(optimizer, torch.optim.AdamW) else "sgd"


def settings(optimizer: torch.optim.Optimizer | None) -> tuple[float, ...]:
    """Return SETTINGS numbers: learning rate, weight decay, momentum or beta1, beta2, epsilon.

    Zeros without an optimizer.
    """
    if optimizer is None:
        return (0.0,) * SETTINGS
    group = optimizer.param_groups[0]
    if name_of(optimizer) == "adamw":
        return group["lr"], group["weight_decay"], *group["betas"], group["eps"]
    return group["lr"], group["weight_decay"], group["momentum"], 0.0, 0.0


class FlatSteps:
    """Takes an optimizer's steps on one flat tensor of weights, in place, and keeps their state.

    A step is `begin`, then `take` for the whole tensor or for one piece after the other.
    """

    def __init__(self, name: str, weights: Tensor) -> None:
        """`weights` is (elements,); the state is zeros of its dtype, as torch's optimizers have."""
        self._name, self._weights = name, weights
        self._state = [torch.zeros_like(weights) for _ in range(STATES[name])]
        # So far; AdamW divides by what its means still lack.
        self._steps = torch.zeros((), device=weights.device)

    @property
    def state(self) -> list[Tensor]:
        """What is kept from step to step beside the weights."""
        return [*self._state, self._steps]

    def begin(self) -> None:
        """Begin a step."""
        if self._name == "adamw":
            self._steps += 1

    def take(self, gradient: Tensor, settings: Sequence[float], piece: slice = ALL) -> None:
        """Update a piece of the weights by the gradient of this piece."""
        weights, gradients = [self._weights[piece]], [gradient.to(self._weights.dtype)]
        rate, decay, first, second, epsilon = settings
        options: dict[str, Any] = {"lr": rate, "weight_decay": decay, "maximize": False}
        state = [[tensor[piece]] for tensor in self._state]
        if self._name == "adamw":
            options |= {"beta1": first, "beta2": second, "eps": epsilon, "amsgrad": False}
            first_mean, second_mean = state
            steps = [self._steps]
            torch._fused_adamw_(weights, gradients, first_mean, second_mean, [], steps, **options)
        else:
            momenta = state[0] if first else []
            options |= {"momentum": first, "dampening": 0.0, "nesterov": False}
            torch._fused_sgd_(weights, gradients, momenta, is_first_step=False, **options)
