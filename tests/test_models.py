"""The networks: sizes against published ones, gradients, auxiliary heads, precision and batches."""

import dataclasses

import pytest
import torch
from build import ROOT
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from conf import groups, schema
from conf.cell import Network
from conf.resolve import checked, resolve
from trainers import models
from trainers.batches import synthetic

NAMES = sorted(path.stem for path in (ROOT / "conf" / "model").glob("*.yaml"))
CPU = torch.device("cpu")
# Parameters by torchvision's documentation; arrays and elements without batch norm's, as MXNet's
# tools/bandwidth counts (of resnet200 205 arrays, 257.991328 MB).
SIZES = {
    "alexnet": (61_100_840, 16, 61_100_840),
    "fmnist_cnn": (1_199_882, 8, 1_199_882),
    "googlenet": (13_004_888, 69, 12_989_816),  # with both auxiliary heads; 6,624,904 without
    "inception_v3": (27_161_264, 100, 27_125_040),  # with its auxiliary head
    "resnet18": (11_689_512, 22, 11_679_912),
    "resnet34": (21_797_672, 38, 21_780_648),
    "resnet50": (25_557_032, 55, 25_503_912),
    "resnet101": (44_549_160, 106, 44_443_816),
    "resnet152": (60_192_808, 157, 60_041_384),
    "resnet200": (64_673_832, 205, 64_497_832),
    "vgg16": (138_357_544, 32, 138_357_544),
}


@pytest.fixture(scope="module")
def cells():
    """One cell for each model, on one CPU worker."""
    GlobalHydra.instance().clear()
    schema.register()
    cells = {}
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        for name in NAMES:
            config, _ = checked(OmegaConf.to_object(compose("config", overrides=[f"model={name}"])))
            cells[name] = resolve(config, (0,), "cpu")
    return cells


def on_meta(network):
    """The network without storage: shapes and sizes only."""
    with torch.device("meta"):
        return models.build(network)


def is_batch_norm(module):
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def without_batch_norm(model):
    """{name: parameter} of everything but batch norm."""
    rest = dict(model.named_parameters())
    for name, module in model.named_modules():
        if is_batch_norm(module):
            for own, _ in module.named_parameters():
                del rest[f"{name}.{own}"]
    return rest


@pytest.mark.parametrize("name", NAMES)
def test_a_model_has_its_published_size_and_the_outputs_of_its_yaml(cells, name):
    network = cells[name].model
    model = on_meta(network)
    parameters, arrays, elements = SIZES[name]
    rest = without_batch_norm(model)
    assert (len(rest), sum(p.numel() for p in rest.values())) == (arrays, elements)
    assert models.sizes(model.parameters()) == {
        "parameters": parameters,
        "gradient_bytes": 4 * parameters,
        "arrays": len(list(model.parameters())),
    }
    assert model.training
    images = torch.zeros(2, network.channels, network.image_size, network.image_size, device="meta")
    with FlopCounterMode(display=False) as counter:
        outputs = model(images)
    # Layers that see no pixels, AlexNet's last ones above all, keep their operations for small
    # images.
    share = (network.image_size / groups.of_model(name, "gpu.image_size")) ** 2
    gigaflop = groups.of_model(name, "gigaflop") * share
    assert 0.95 < counter.get_total_flops() / len(images) / (1e9 * gigaflop) < 2.5
    heads = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    assert all(head.shape == (2, network.classes) for head in heads)
    assert len(heads) == {"inception_v3": 2, "googlenet": 3}.get(name, 1)


def test_resnet200_and_inception_are_those_of_mxnets_bandwidth_tool(cells):
    resnet = without_batch_norm(on_meta(cells["resnet200"].model))
    assert [name for name in resnet if name.endswith("bias")] == ["fc.bias"]
    inception = without_batch_norm(on_meta(cells["inception_v3"].model))
    main = [p.numel() for name, p in inception.items() if not name.startswith("AuxLogits")]
    assert (len(main), sum(main)) == (96, 23_800_136)


def test_sizes_count_what_is_trained():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    model[0].requires_grad_(False)
    sizes = {"parameters": 25, "arrays": 2, "gradient_bytes": 100}
    assert models.sizes(model.parameters()) == sizes


@pytest.mark.parametrize(
    ("name", "image_size", "precision"),
    [
        ("fmnist_cnn", 28, "fp32"),
        ("resnet18", 32, "bf16_weights"),
        ("googlenet", 64, "fp32"),
        ("inception_v3", 299, "fp32"),
    ],
)
def test_forward_and_backward_give_every_parameter_a_finite_gradient(
    cells, name, image_size, precision
):
    cell = cells[name]
    network = dataclasses.replace(cell.model, image_size=image_size, classes=10)
    torch.manual_seed(0)
    model = models.build(network)
    cell = dataclasses.replace(cell, model=network, batch_size=2, precision=precision)
    if precision == "bf16_weights":
        model = models.bf16_weights(model)
    images, labels = next(synthetic(cell, CPU, 0))
    loss = models.loss(model(images), labels, network.auxiliary_weight)
    loss.backward()
    assert 0 < loss.item() < 20
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    assert sum(bool(gradient.any()) for gradient in gradients) > 0.9 * len(gradients)
    if precision == "bf16_weights":
        assert model.conv1.weight.grad.dtype == torch.bfloat16
        assert model.bn1.weight.grad.dtype == torch.float32
    if name == "inception_v3":
        assert network.auxiliary_weight == 0.4 and model.AuxLogits.fc.weight.grad.any()


def test_auxiliary_heads_count_in_the_loss():
    labels = torch.tensor([0, 2])
    torch.manual_seed(0)
    heads = [torch.randn(2, 3, requires_grad=True) for _ in range(3)]
    main, first, second = (functional.cross_entropy(head, labels) for head in heads)
    for outputs in (heads[0], (heads[0],), (heads[0], None, None)):
        assert torch.allclose(models.loss(outputs, labels, 0.3), main)
    assert torch.allclose(models.loss((heads[0], heads[1]), labels, 0.4), main + 0.4 * first)
    whole = models.loss(tuple(heads), labels, 0.3)
    assert torch.allclose(whole, main + 0.3 * (first + second))
    whole.backward()
    assert all(head.grad.abs().sum() > 0 for head in heads)


@pytest.mark.parametrize("name", ["resnet50", "inception_v3", "fmnist_cnn"])
def test_bf16_weights_halve_the_gradient_except_batch_norm(cells, name):
    model = on_meta(cells[name].model)
    before = models.sizes(model.parameters())
    rest = sum(parameter.numel() for parameter in without_batch_norm(model).values())
    after = models.sizes(models.bf16_weights(model).parameters())
    assert after["gradient_bytes"] == 2 * rest + 4 * (before["parameters"] - rest)
    for module in model.modules():
        dtype = torch.float32 if is_batch_norm(module) else torch.bfloat16
        assert all(p.dtype == dtype for p in module.parameters(recurse=False))
        assert not is_batch_norm(module) or module.running_mean.dtype == torch.float32


def test_batches_are_random_differ_between_ranks_and_are_equal_for_equal_seeds(cells):
    def batches(rank, seed=0):
        source = synthetic(dataclasses.replace(cell, seed=seed), CPU, rank)
        return [next(source) for _ in range(2)]

    cell = dataclasses.replace(cells["fmnist_cnn"], batch_size=256)
    here = batches(0)
    for batch, again in zip(here, batches(0), strict=True):
        assert torch.equal(batch[0], again[0]) and torch.equal(batch[1], again[1])
    for other in (batches(1), batches(0, seed=1), here[::-1]):
        assert not torch.equal(here[0][0], other[0][0])
        assert not torch.equal(here[0][1], other[0][1])
    for images, labels in here:
        assert images.shape == (256, 1, 28, 28) and labels.shape == (256,)
        assert (images != 0).float().mean() > 0.999
        assert abs(images.mean()) < 0.02 and abs(images.std() - 1) < 0.02
        assert set(labels.tolist()) == set(range(10))


DTYPES = [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]


@pytest.mark.parametrize(("precision", "dtype"), [*DTYPES, ("bf16_weights", torch.bfloat16)])
def test_batches_come_as_the_first_layer_computes(cells, precision, dtype):
    changes = {"precision": precision, "channels_last": True, "batch_size": 2}
    images, labels = next(synthetic(dataclasses.replace(cells["resnet18"], **changes), CPU, 0))
    assert (images.dtype, labels.dtype) == (dtype, torch.int64)
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_a_builder_of_ours_that_does_not_exist_is_named():
    network = Network("x", "ringside", "resnet201", 3, 10, 32, 0.0, {})
    with pytest.raises(ValueError, match=r"builder=resnet201: .* expected resnet200, fmnist_cnn"):
        models.build(network)
