"""optimize=max: what it changes of a model and of the traced graph leaves results as they were, and is really there."""

import copy

import pytest
import torch
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass

from trainers import compile_passes, models

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """Inductor names its cache in the environment, which later tests would hand on to cells."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


class Residual(nn.Module):
    """Two ReLUs: one after a batch norm alone, one after a sum; what comes before is used twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, images):
        return self.relu(self.second(self.first(images)) + images)


def small():
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    return nn.Sequential(first, Residual(), Residual()).train()


def trained(model, called=None, dtype=torch.float32):
    """Gradients and buffers after one backward, by name."""
    images = (
        torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(1))
        .to(dtype)
        .requires_grad_()
    )
    outputs = (called or model)(images)
    (outputs.float() * outputs.float().sin()).sum().backward()
    state = {name: value.clone() for name, value in model.named_buffers()}
    return (
        state
        | {name: value.grad for name, value in model.named_parameters()}
        | {"images": images.grad}
    )


def differing(one, other, allowed):
    scale = max(value.abs().max() for value in other.values())
    return [name for name in other if (one[name] - other[name]).abs().max() > allowed * scale]


def partly_compiled(model, joint=(), split=()):
    """The model as inductor traces and splits it, run operator by operator, with changes before and after it is split."""
    from functorch.compile import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    def lowered(traced, _, **__):
        for change in split:
            change(traced.graph)
        traced.graph.lint()
        traced.recompile()
        return make_boxed_func(traced.forward)

    class Joint(CustomGraphPass):
        def __call__(self, graph):
            for change in joint:
                change(graph)

        def uuid(self):
            return None

    def backend(traced, inputs):
        return compile_fx(
            traced,
            inputs,
            inner_compile=lowered,
            config_patches={"joint_custom_post_pass": Joint()},
        )

    return torch.compile(model, backend=backend)


# For each change how often it is made: to forward and backward in one, or to both one after the other.
COUNTS = {
    "variances_from_sums": [5],
    "masks_from_inputs": [3],  # not after the sums
    "widened_by_each_reader": [0, 0],
    "masks_for_each_reader": [0, 9],  # two sums and the gradient itself read each
    "sums_written_once": [0, 2],
}
WIDENED = COUNTS | {"widened_by_each_reader": [5, 20]}


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float32, COUNTS), (torch.bfloat16, WIDENED)],
    ids=["float32", "bfloat16"],
)
def test_rewritten_graphs_train_as_the_model_does(dtype, expected):
    def model():
        built = small()
        for layer in built.modules():
            if isinstance(layer, nn.Conv2d):
                layer.to(dtype)
        return built

    found = {name: [] for name in expected}

    def noted(change):
        return lambda graph: found[change.__name__].append(change(graph))

    joint, split = (
        tuple(map(noted, one.changes)) for one in (compile_passes.JOINT, compile_passes.SPLIT)
    )
    plain, changed = model(), model()
    reference = trained(plain, partly_compiled(plain), dtype)
    state = trained(changed, partly_compiled(changed, joint, split), dtype)
    assert found == expected
    assert not differing(state, reference, 1e-5 if dtype == torch.float32 else 1e-2)


def test_other_variances_stay():
    graph = torch.fx.Graph()
    values = graph.placeholder("values")
    values.meta["val"] = torch.zeros(4, 4)
    graph.call_function(aten.var_mean.correction, (values, [0]), {"correction": 1})
    values.meta["val"] = torch.zeros(4, 4, dtype=torch.float64)
    graph.call_function(aten.var_mean.correction, (values, [0]), {"correction": 0})
    assert compile_passes.variances_from_sums(graph) == 0


def test_equal_rewrites_are_one_for_kept_graphs_and_caches():
    same = compile_passes.Rewrites(*compile_passes.JOINT.changes)
    assert same == compile_passes.JOINT != compile_passes.SPLIT and hash(same) == hash(
        compile_passes.JOINT
    )
    assert same.uuid() == compile_passes.JOINT.uuid() != compile_passes.SPLIT.uuid()


# --- layers in other forms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "stride", "padding", "pixels", "form"),
    [
        (7, 2, 3, 33, compile_passes.StrideFreeConvolution),  # ResNet
        (3, 2, 0, 30, compile_passes.StrideFreeConvolution),  # Inception
        (11, 4, 2, 63, compile_passes.StrideFreeConvolution),  # AlexNet
        ((3, 5), 2, (1, 0), 20, compile_passes.StrideFreeConvolution),
        (3, 1, 1, 9, nn.Conv2d),
    ],
)
def test_a_layer_in_another_form_gives_the_same_numbers(window, stride, padding, pixels, form):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 8, window, stride, padding, bias=False)).double()
    other = compile_passes.in_faster_forms(copy.deepcopy(plain))
    assert type(other[0]) is form
    images = torch.randn(2, 3, pixels, pixels + 3, dtype=torch.double)
    for model in (plain, other):
        model(images).sin().sum().backward()
    torch.testing.assert_close(other(images), plain(images))
    torch.testing.assert_close(other[0].weight.grad, plain[0].weight.grad)


def test_torch_takes_our_options():
    assert callable(compile_passes.compiled(nn.ReLU()))


@pytest.mark.gpu
def test_on_a_gpu_compiled_steps_train_as_before(monkeypatch):
    resnet = pytest.importorskip("torchvision.models.resnet")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # or the reference is no float32
    torch.manual_seed(0)
    with torch.device("cuda"):
        stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)
        )
        plain = models.bf16_weights(
            nn.Sequential(stem, resnet.Bottleneck(64, 16), resnet.Bottleneck(64, 16))
        )
        images = torch.randn(32, 3, 64, 64, dtype=torch.bfloat16)
    plain, images = (one.to(memory_format=torch.channels_last) for one in (plain, images))
    fast = compile_passes.in_faster_forms(copy.deepcopy(plain))
    exact = copy.deepcopy(plain).float()
    for model, called in (
        (plain, torch.compile(plain)),
        (fast, compile_passes.compiled(fast)),
        (exact, exact),
    ):
        called(images.to(next(model.parameters()).dtype)).float().square().mean().backward()
    apart = [
        torch.cat(
            [(one.grad.float() - other.grad).flatten() for one, other in zip(*pair, strict=True)]
        ).norm()
        for pair in ((model.parameters(), exact.parameters()) for model in (fast, plain))
    ]
    assert apart[0] <= 1.5 * apart[1], "as near to float32 as the plain model in bfloat16"
