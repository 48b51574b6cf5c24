"""Convolutions that are computed in another form, which is faster and gives the same numbers.

cuDNN has no fast kernels for the first layer of a network: 3 inputs fill a fifth of what its tiles hold. The same sums over 48
inputs do fill them. And a 1 × 1 convolution is a matrix product, for whose gradients cuBLAS has the faster kernels.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

FEW_INPUTS = 4  # of a first layer


def replace(model: nn.Module) -> nn.Module:
    """Let every convolution of a model that has such a form take it, in place. Parameters and their names stay."""
    for module in model.modules():
        if type(module) is nn.Conv2d and _is_plain(module):
            if module.in_channels <= FEW_INPUTS and module.stride[0] == module.stride[1] > 1:
                module.__class__ = UnrolledConvolution
            elif module.kernel_size == module.stride == (1, 1) and module.padding == (0, 0):
                module.__class__ = PointwiseConvolution
    return model


def _is_plain(module: nn.Conv2d) -> bool:
    return (
        module.groups == 1
        and module.dilation == (1, 1)
        and module.bias is None
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )


class PointwiseConvolution(nn.Conv2d):
    """A 1 × 1 convolution as a product of pixels and weights."""

    def forward(self, images: Tensor) -> Tensor:
        """Return (batch, outputs, height, width) for images (batch, inputs, height, width)."""
        return functional.linear(images.permute(0, 2, 3, 1), self.weight.flatten(1)).permute(0, 3, 1, 2)


class UnrolledConvolution(nn.Conv2d):
    """A convolution with a stride, as one without, of fewer rows and no columns, over more inputs.

    The inputs are those of one window's width in `stride` rows. For the 7 × 7 window of ResNet with stride 2 on 3 colours they
    are 2 × 8 × 3 = 48, and the window is 4 × 1. Weights beyond the window are 0.
    """

    def forward(self, images: Tensor) -> Tensor:
        """Return (batch, outputs, height, width) for images (batch, inputs, height, width)."""
        stride, (high, wide) = self.stride[0], self.kernel_size
        rows, columns = -(-high // stride), stride * -(-wide // stride)  # windows in steps of the stride
        above, left = (int(pad) for pad in self.padding)
        height = (images.shape[2] + 2 * above - high) // stride + 1
        width = (images.shape[3] + 2 * left - wide) // stride + 1
        # What the windows see, and no more: a negative frame cuts off.
        below = stride * (height + rows - 1) - images.shape[2] - above
        right = stride * (width - 1) + columns - images.shape[3] - left
        framed = functional.pad(images, (left, right, above, below))
        # (batch, inputs, rows of the result and a window's more, columns of the result, stride, columns)
        windows = framed.unfold(2, stride, stride).unfold(3, columns, stride)
        inputs = windows.permute(0, 4, 5, 1, 2, 3).flatten(1, 3).contiguous(memory_format=torch.channels_last)
        weight = functional.pad(self.weight, (0, columns - wide, 0, rows * stride - high))
        weight = weight.unflatten(2, (rows, stride)).permute(0, 3, 4, 1, 2).flatten(1, 3).unsqueeze(3)
        return functional.conv2d(inputs, weight.contiguous())
