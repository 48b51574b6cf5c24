"""optimize=max: what it changes of a model and of the traced graph leaves results as they were."""

import copy

import pytest
import torch
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass

from trainers import compile_passes, models
from trainers.compile_passes import JOINT, SPLIT, StrideFreeConvolution

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """Inductor names its cache in the environment, which later tests would hand on to cells."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


class Residual(nn.Module):
    """Two ReLUs: after a batch norm alone, and after a sum; what comes before is used twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, images):
        return self.relu(self.second(self.first(images)) + images)


def small(dtype):
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    model = nn.Sequential(first, Residual(), Residual()).train()
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            layer.to(dtype)
    return model


def trained(dtype, joint=(), split=()):
    """Gradients and buffers after one backward, by name, of what inductor traces and splits.

    It runs operator by operator, with changes before and after it is split.
    """
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
        patches = {"joint_custom_post_pass": Joint()}
        return compile_fx(traced, inputs, inner_compile=lowered, config_patches=patches)

    model = small(dtype)
    images = torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(1)).to(dtype)
    images.requires_grad_()
    outputs = torch.compile(model, backend=backend)(images)
    (outputs.float() * outputs.float().sin()).sum().backward()
    state = {name: value.clone() for name, value in model.named_buffers()}
    state |= {name: value.grad for name, value in model.named_parameters()}
    return state | {"images": images.grad}


# For each change how often it is made: to forward and backward in one, or to both one after the
# other.
COUNTS = {
    "variances_from_sums": [5],
    "masks_from_inputs": [3],  # not after the sums
    "widened_by_each_reader": [0, 0],
    "masks_for_each_reader": [0, 9],  # two sums and the gradient itself read each
    "sums_written_once": [0, 2],
}
WIDENED = COUNTS | {"widened_by_each_reader": [5, 20]}


@pytest.mark.parametrize(
    ("dtype", "expected", "tolerance"),
    [(torch.float32, COUNTS, 1e-5), (torch.bfloat16, WIDENED, 1e-2)],
    ids=["float32", "bfloat16"],
)
def test_rewritten_graphs_train_as_the_model_does(dtype, expected, tolerance):
    counts = {name: [] for name in expected}

    def counted(rewrites):
        return [lambda g, c=change: counts[c.__name__].append(c(g)) for change in rewrites.changes]

    reference, state = trained(dtype), trained(dtype, counted(JOINT), counted(SPLIT))
    assert counts == expected
    scale = max(value.abs().max() for value in reference.values())
    for name, value in reference.items():
        assert (state[name] - value).abs().max() <= tolerance * scale, name


def test_other_variances_stay():
    graph = torch.fx.Graph()
    values = graph.placeholder("values")
    values.meta["val"] = torch.zeros(4, 4)
    graph.call_function(aten.var_mean.correction, (values, [0]), {"correction": 1})
    values.meta["val"] = torch.zeros(4, 4, dtype=torch.float64)
    graph.call_function(aten.var_mean.correction, (values, [0]), {"correction": 0})
    assert compile_passes.variances_from_sums(graph) == 0


def test_equal_rewrites_are_one_for_kept_graphs_and_caches_and_torch_takes_them():
    same = compile_passes.Rewrites(*JOINT.changes)
    assert same == JOINT != SPLIT and hash(same) == hash(JOINT)
    assert same.uuid() == JOINT.uuid() != SPLIT.uuid()
    assert callable(compile_passes.compiled(nn.ReLU()))


@pytest.mark.parametrize(
    ("window", "stride", "padding", "pixels", "form"),
    [
        (7, 2, 3, 33, StrideFreeConvolution),  # ResNet
        (3, 2, 0, 30, StrideFreeConvolution),  # Inception
        (11, 4, 2, 63, StrideFreeConvolution),  # AlexNet
        ((3, 5), 2, (1, 0), 20, StrideFreeConvolution),
        (3, 1, 1, 9, nn.Conv2d),
    ],
)
def test_a_layer_in_another_form_gives_the_same_numbers(window, stride, padding, pixels, form):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 8, window, stride, padding, bias=False)).double()
    changed = compile_passes.in_faster_forms(copy.deepcopy(plain))
    assert type(changed[0]) is form
    images = torch.randn(2, 3, pixels, pixels + 3, dtype=torch.double)
    for model in (plain, changed):
        model(images).sin().sum().backward()
    torch.testing.assert_close(changed(images), plain(images))
    torch.testing.assert_close(changed[0].weight.grad, plain[0].weight.grad)


@pytest.mark.gpu
def test_on_a_gpu_compiled_steps_train_as_before(monkeypatch):
    resnet = pytest.importorskip("torchvision.models.resnet")
    # Else the reference is not computed in float32.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    with torch.device("cuda"):
        convolution = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        stem = nn.Sequential(convolution, nn.BatchNorm2d(64), nn.ReLU(inplace=True))
        blocks = (resnet.Bottleneck(64, 16) for _ in range(2))
        plain = models.bf16_weights(nn.Sequential(stem, *blocks))
        images = torch.randn(32, 3, 64, 64, dtype=torch.bfloat16)
    plain, images = (x.to(memory_format=torch.channels_last) for x in (plain, images))
    fast = compile_passes.in_faster_forms(copy.deepcopy(plain))
    exact = copy.deepcopy(plain).float()
    compiled = [torch.compile(plain), compile_passes.compiled(fast), exact]
    for model, called in zip((plain, fast, exact), compiled, strict=True):
        called(images.to(next(model.parameters()).dtype)).float().square().mean().backward()

    def distance(model):
        pairs = zip(model.parameters(), exact.parameters(), strict=True)
        return torch.cat([(one.grad.float() - other.grad).flatten() for one, other in pairs]).norm()

    assert distance(fast) <= 1.5 * distance(plain), "as near to float32 as the plain model"
