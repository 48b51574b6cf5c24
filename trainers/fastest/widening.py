"""A 1 × 1 convolution that widens and the batch norm after it, computed as matrix products.

The convolution is z = W y for each pixel. Batch norm then reads z once for its mean and variance, and in backward z and the
gradient twice more to make the gradient of z, which two products read again. But z is linear in y, so none of this is needed:

- The mean of z is W mean(y), and the variance of each output is wᵀ Cov(y) w for its row w of W. Cov(y) is a product of y with
  itself. Where W widens, y is smaller than z.
- Backward needs Σ g and Σ g z over all pixels. Σ g z are the row sums of W ∘ (gᵀ y), and gᵀ y is the product that the gradient
  of W needs anyway.
- The gradient of z is s g + b z + c with numbers s, b, c for each output, so that of y is (s W)ᵀ g + Wᵀ diag(b) W y + Wᵀ c.

So neither z nor its gradient is ever written. The result is the same up to rounding; z is not rounded.
"""

from typing import Any

import torch
from torch import Tensor, fx, nn

LEAST_WIDENING = 2  # outputs for each input: Cov(y) then takes at most half of what the convolution takes


def fold(model: nn.Module) -> nn.Module:
    """Let every widening 1 × 1 convolution of a model do the batch norm that follows it, in place.

    Names, order and values of parameters and buffers stay. A model that torch.fx cannot trace stays as it is.
    """
    for convolution, norm in _pairs(model):
        convolution.__class__ = WideningConvolution
        object.__setattr__(convolution, "norm", norm)  # no module of its own: the norm keeps its place and its names
        norm.__class__ = DoneBefore
    return model


class WideningConvolution(nn.Conv2d):
    """A convolution that returns what the batch norm after it would."""

    norm: Any  # nn.BatchNorm2d

    def forward(self, images: Tensor) -> Tensor:
        """Return the normalised output (batch, outputs, height, width) of images (batch, inputs, height, width)."""
        batch, inputs, height, width = images.shape
        pixels = images.permute(0, 2, 3, 1).reshape(-1, inputs)
        norm, count = self.norm, len(pixels)
        out, mean, variance = NormalisedProduct.apply(pixels, self.weight, norm.weight, norm.bias, norm.eps)
        with torch.no_grad():
            norm.num_batches_tracked.add_(1)
            norm.running_mean.lerp_(mean, norm.momentum)
            norm.running_var.lerp_(variance * (count / (count - 1)), norm.momentum)
        normalised: Tensor = out.view(batch, height, width, -1).permute(0, 3, 1, 2)
        return normalised


class DoneBefore(nn.BatchNorm2d):
    """A batch norm that the convolution before it does."""

    def forward(self, images: Tensor) -> Tensor:
        """Return the images as they are."""
        return images


class NormalisedProduct(torch.autograd.Function):
    """Batch norm of pixels × weightsᵀ."""

    @staticmethod
    def forward(ctx: Any, pixels: Tensor, weight: Tensor, gain: Tensor, shift: Tensor, epsilon: float) -> Any:
        """Return the normalised outputs (pixels, outputs), their mean (outputs,) and variance (outputs,) before.

        `pixels` is (pixels, inputs), `weight` (outputs, inputs, 1, 1), `gain` and `shift` (outputs,).
        """
        with torch.autocast(pixels.device.type, enabled=False):
            count, rows = len(pixels), weight.flatten(1).float()
            total = pixels.sum(0, dtype=torch.float32)
            mean_in = total / count
            covariance = _product(pixels.t(), pixels) / count - mean_in.outer(mean_in)
            spread = rows @ covariance  # (outputs, inputs): the covariance of each output with each input
            mean, variance = rows @ mean_in, (spread * rows).sum(1).clamp_min(0.0)
            inverse = torch.rsqrt(variance + epsilon)
            scale = gain * inverse
            scaled = (scale[:, None] * rows).to(pixels.dtype)
            out = ((pixels @ scaled.t()).float() + (shift - mean * scale)).to(pixels.dtype)
        ctx.save_for_backward(pixels, weight, total, spread, mean, inverse, scale, scaled)
        ctx.mark_non_differentiable(mean, variance)
        return out, mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradients of pixels, weight, gain and shift."""
        pixels, weight, total, spread, mean, inverse, scale, scaled = ctx.saved_tensors
        given = gradients[0]
        with torch.autocast(pixels.device.type, enabled=False):
            count, rows = len(pixels), weight.flatten(1).float()
            of_shift = given.sum(0, dtype=torch.float32)
            with_inputs = _product(given.t(), pixels)  # (outputs, inputs)
            of_gain = inverse * ((rows * with_inputs).sum(1) - mean * of_shift)
            # The gradient of z is scale × given + of_output × z + constant.
            of_output = -scale * inverse * of_gain / count
            constant = -scale * of_shift / count - of_output * mean
            of_weight = (
                scale[:, None] * with_inputs
                + (count * of_output)[:, None] * spread
                - (scale * of_shift / count).outer(total)
            )
            through = (rows.t() * of_output) @ rows  # (inputs, inputs)
            of_pixels = torch.addmm((constant @ rows).to(pixels.dtype), pixels, through.to(pixels.dtype))
            of_pixels = torch.addmm(of_pixels, given, scaled)
        return of_pixels, of_weight.to(weight.dtype).view_as(weight), of_gain, of_shift, None


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return left × right in float32."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _pairs(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Return the widening 1 × 1 convolutions whose output only a batch norm reads, each with this batch norm."""
    try:
        graph = fx.Tracer().trace(model)
    except Exception:  # its forward asks for values: whatever a user's code and torch.fx raise then
        return []
    calls = [node for node in graph.nodes if node.op == "call_module"]
    found = []
    for node in calls:
        before = node.args[0] if node.args else None
        if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) > 1:
            continue
        convolution, norm = (model.get_submodule(str(one.target)) for one in (before, node))
        once = all(sum(call.target == one.target for call in calls) == 1 for one in (before, node))
        if once and _widens(convolution) and _is_usual(norm):
            found.append((convolution, norm))
    return found


def _widens(module: nn.Module) -> bool:
    return (
        type(module) is nn.Conv2d
        and module.kernel_size == module.stride == (1, 1)
        and module.padding in ((0, 0), "valid")
        and module.groups == 1
        and module.bias is None
        and module.out_channels >= LEAST_WIDENING * module.in_channels
    )


def _is_usual(module: nn.Module) -> bool:
    return (
        type(module) is nn.BatchNorm2d and module.affine and module.track_running_stats and module.momentum is not None
    )
