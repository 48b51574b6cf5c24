"""The networks, from the library that is known for them, and the loss with auxiliary heads."""

from collections import OrderedDict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from conf.cell import IMAGES, OWN_MODEL, Network
from conf.targets import locate
from trainers.batches import OwnModel


def build(network: Network) -> nn.Module:
    """Build a network with random weights on the current default device, in training mode.

    A model of the user's own is made by `build(classes=…, channels=…, **options)`, or for samples
    by `build(**options)`.

    Raises:
        ValueError: the library is not installed or has no such builder.
        TypeError: the user's function returns no module of torch, or for samples no OwnModel.
    """
    model: object
    arguments = {"num_classes": network.classes, **network.options}
    if network.library == "ringside":
        builders = {"resnet200": _resnet200, "fmnist_cnn": _fmnist_cnn}
        if network.builder not in builders:
            raise ValueError(
                f"model.builder={network.builder}: with model.library=ringside expected "
                f"{', '.join(builders)}"
            )
        model = builders[network.builder](**arguments)
    elif network.library == OWN_MODEL and network.inputs == IMAGES:
        sizes = {"classes": network.classes, "channels": network.channels}
        model = locate(network.builder)(**sizes, **network.options)
        _check_type(network, model, nn.Module, "torch.nn.Module")
    elif network.library == OWN_MODEL:
        model = locate(network.builder)(**network.options)
        _check_type(network, model, OwnModel, "trainers.batches.OwnModel")
    elif network.library == "timm":
        import timm

        model = timm.create_model(
            network.builder, pretrained=False, in_chans=network.channels, **arguments
        )
    else:
        import torchvision

        model = torchvision.models.get_model(network.builder, weights=None, **arguments)
    assert isinstance(model, nn.Module)
    return model.train()


def _check_type(network: Network, model: object, expected: type, name: str) -> None:
    if not isinstance(model, expected):
        raise TypeError(
            f"model.builder={network.builder}: returned {type(model).__name__}; expected a {name}"
        )


def _resnet200(num_classes: int) -> nn.Module:
    """Build ResNet-200, bottlenecks 3-24-36-3, as in MXNet's tools/bandwidth."""
    from torchvision.models.resnet import Bottleneck, ResNet

    model: nn.Module = ResNet(Bottleneck, [3, 24, 36, 3], num_classes=num_classes)
    return model


class Chain(nn.Sequential):
    """nn.Sequential with a forward that torch.compile compiles inside DDP: it skips torch's own."""

    def forward(self, images: Tensor) -> Tensor:
        """Return the output of the last module."""
        for module in self:
            images = module(images)
        return images


def _fmnist_cnn(num_classes: int) -> nn.Module:
    """Build the Keras network of the gpubootcamp notebook: images 1 × 28 × 28."""
    return Chain(
        OrderedDict(
            convolution_1=nn.Conv2d(1, 32, 3),
            relu_1=nn.ReLU(),
            convolution_2=nn.Conv2d(32, 64, 3),
            relu_2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            dropout_1=nn.Dropout(0.25),
            flatten=nn.Flatten(),
            dense_1=nn.Linear(64 * 12 * 12, 128),
            relu_3=nn.ReLU(),
            dropout_2=nn.Dropout(0.5),
            dense_2=nn.Linear(128, num_classes),
        )
    )


def loss(
    outputs: Tensor | tuple[Tensor | None, ...], labels: Tensor, auxiliary_weight: float
) -> Tensor:
    """Return the cross-entropy of the main head plus `auxiliary_weight` × that of each other.

    `outputs` is (batch, classes), or a tuple of such tensors, the main head first (torchvision's
    Inception, GoogLeNet). `labels` is (batch,).
    """
    if isinstance(outputs, Tensor):
        return functional.cross_entropy(outputs, labels)
    losses = [functional.cross_entropy(head, labels) for head in outputs if head is not None]
    if len(losses) == 1:
        return losses[0]
    return losses[0] + auxiliary_weight * torch.stack(losses[1:]).sum()


def bf16_weights(model: nn.Module) -> nn.Module:
    """Cast weights to bfloat16 in place, but batch norm's.

    Its sums need the digits of float32, and it has few bytes.
    """
    for module in model.modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(torch.bfloat16)
    return model


def sizes(parameters: Iterable[nn.Parameter]) -> dict[str, float]:
    """Return `parameters` (elements), `arrays` (tensors) and `gradient_bytes` of the trained."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return {
        "parameters": sum(parameter.numel() for parameter in trained),
        "arrays": len(trained),
        "gradient_bytes": sum(parameter.nbytes for parameter in trained),
    }
