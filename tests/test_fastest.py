"""optimize=max: what it changes of a model and of the traced graph leaves results as they were, and is really there."""

import copy

import pytest
import torch
from torch import nn
from torch._decomp import get_decompositions

from trainers import models
from trainers.fastest import compiling, layers

aten = torch.ops.aten
# What inductor decomposes a batch norm and a ReLU by; its whole table takes seconds to import.
PARTS = get_decompositions(
    [aten._native_batch_norm_legit_functional, aten.native_batch_norm_backward, aten.threshold_backward]
)


@pytest.fixture(autouse=True)
def rewrites(monkeypatch, tmp_path):
    """The module. Inductor, which it imports, names its cache in the environment, which later tests would hand on to cells."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    from trainers.fastest import rewrites

    return rewrites


def small():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 32, 1), nn.BatchNorm2d(32), nn.ReLU(inplace=True),
    ).train()  # fmt: skip


def trained(model, called=None, dtype=torch.float32):
    """Gradients and buffers after one backward, by name."""
    images = torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    outputs = (called or model)(images)
    (outputs.float() * outputs.float().sin()).sum().backward()
    state = {name: value.clone() for name, value in model.named_buffers()}
    return state | {name: value.grad for name, value in model.named_parameters()} | {"images": images.grad}


def differing(one, other, allowed):
    scale = max(value.abs().max() for value in other.values())
    return [name for name in other if (one[name] - other[name]).abs().max() > allowed * scale]


def partly_compiled(model, change=None):
    """The model as torch.compile traces and splits it, run operator by operator; the change is made before it is split."""
    from torch._functorch.aot_autograd import aot_module
    from torch._functorch.compilers import nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def partition(joint, *arguments, **options):
        if change:
            change(joint.graph)
            joint.recompile()
        return min_cut_rematerialization_partition(joint, *arguments, **options)

    return aot_module(model, nop, nop, partition_fn=partition, decompositions=PARTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rewritten_graphs_train_as_the_model_does(dtype, rewrites):
    found, counts = [], []
    for change in (None, rewrites.variances_from_sums):
        model = small()
        for layer in (model[0], model[3]):
            layer.to(dtype)
        counted = (lambda graph, change=change: counts.append((change(graph), change(graph)))) if change else None
        found.append(trained(model, partly_compiled(model, counted), dtype))
    assert counts == [(2, 0)], "both batch norms, and none is left"
    for changed in found[1:]:
        assert not differing(changed, found[0], 1e-5 if dtype == torch.float32 else 1e-2)


def test_other_variances_stay(rewrites):
    graph = torch.fx.Graph()
    values = graph.placeholder("values")
    values.meta["val"] = torch.zeros(4, 4)
    graph.call_function(aten.var_mean.correction, (values, [0]), {"correction": 1})
    values.meta["val"] = torch.zeros(4, 4, dtype=torch.float64)
    graph.call_function(aten.var_mean.correction, (values, [0]), {"correction": 0})
    assert rewrites.variances_from_sums(graph) == 0


def test_equal_rewrites_are_one_for_kept_graphs_and_caches(rewrites):
    assert rewrites.Rewrites() == rewrites.Rewrites() and rewrites.Rewrites().uuid() == rewrites.Rewrites().uuid()


# --- layers in other forms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "stride", "padding", "pixels", "form"),
    [
        (7, 2, 3, 33, layers.StrideFreeConvolution),  # ResNet
        (3, 2, 0, 30, layers.StrideFreeConvolution),  # Inception
        (11, 4, 2, 63, layers.StrideFreeConvolution),  # AlexNet
        ((3, 5), 2, (1, 0), 20, layers.StrideFreeConvolution),
        (3, 1, 1, 9, nn.Conv2d),
    ],
)
def test_a_layer_in_another_form_gives_the_same_numbers(window, stride, padding, pixels, form):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 8, window, stride, padding, bias=False)).double()
    other = layers.in_faster_forms(copy.deepcopy(plain))
    assert type(other[0]) is form
    images = torch.randn(2, 3, pixels, pixels + 3, dtype=torch.double)
    for model in (plain, other):
        model(images).sin().sum().backward()
    torch.testing.assert_close(other(images), plain(images))
    torch.testing.assert_close(other[0].weight.grad, plain[0].weight.grad)


def test_torch_takes_our_options():
    assert callable(compiling.compiled(nn.ReLU()))


@pytest.mark.gpu
def test_on_a_gpu_compiled_steps_train_as_before(monkeypatch):
    resnet = pytest.importorskip("torchvision.models.resnet")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # or the reference is no float32
    torch.manual_seed(0)
    with torch.device("cuda"):
        stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
        plain = models.bf16_weights(nn.Sequential(stem, resnet.Bottleneck(64, 16), resnet.Bottleneck(64, 16)))
        images = torch.randn(32, 3, 64, 64, dtype=torch.bfloat16)
    plain, images = (one.to(memory_format=torch.channels_last) for one in (plain, images))
    fast = compiling.prepare(copy.deepcopy(plain))
    exact = copy.deepcopy(plain).float()
    for model, called in ((plain, torch.compile(plain)), (fast, compiling.compiled(fast)), (exact, exact)):
        called(images.to(next(model.parameters()).dtype)).float().square().mean().backward()
    apart = [
        torch.cat([(one.grad.float() - other.grad).flatten() for one, other in zip(*pair, strict=True)]).norm()
        for pair in ((model.parameters(), exact.parameters()) for model in (fast, plain))
    ]
    assert apart[0] <= 1.5 * apart[1], "as near to float32 as the plain model in bfloat16"
