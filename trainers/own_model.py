"""The seam of a model that is trained on something else than images: it makes its own batches and has its own loss.

A subclass of OwnModel and one YAML, or `model.library=python model.builder=my_module:MyModel model.inputs=samples`. Everything
else is the same as for images: strategies, clock, checks, report. OWN.md has an example.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]  # what forward takes, in its order, and last the targets


class OwnModel(nn.Module, ABC):
    """A network, its batches and its loss. `forward` takes the tensors of a batch but the last."""

    @abstractmethod
    def batch(self, samples: int, generator: torch.Generator) -> Batch:
        """Return one batch: what forward takes, in its order, and last the targets of `loss`.

        The first dimension of the first tensor is `samples`. Draw random numbers from `generator` and make tensors on
        `generator.device`; each rank has a generator of its own. Called before the clock starts. Shapes and dtypes are yours;
        only `precision=bf16_weights` asks for inputs in the dtype of the weights.
        """

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch, a scalar; `outputs` is what forward returned. Runs under autocast, like forward."""

    def tokens(self, *batch: Tensor) -> int:
        """Return how many tokens a batch has; 0: its samples have none.

        Called in every step: look at shapes only, because reading a value makes the host wait for the GPU.
        """
        return 0
