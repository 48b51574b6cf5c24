"""The networks as they are built: sizes against published ones, gradients, auxiliary heads, precision and batches."""

import dataclasses
from pathlib import Path

import pytest
import torch
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

ROOT = Path(__file__).parent.parent
NAMES = sorted(path.stem for path in (ROOT / "conf" / "model").glob("*.yaml"))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cells():
    """One cell for each model, on one CPU worker."""
    GlobalHydra.instance().clear()
    schema.register()
    found = {}
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        for name in NAMES:
            config, _ = checked(OmegaConf.to_object(compose("config", overrides=[f"model={name}"])))
            found[name] = resolve(config, (0,), "cpu")
    return found


def on_meta(network):
    """The network without storage: shapes and sizes only."""
    with torch.device("meta"):
        return models.build(network)


def is_batch_norm(module):
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def without_batch_norm(model):
    """(name, parameter) of everything but batch norm: what MXNet's tools/bandwidth counts."""
    norms = {name for name, module in model.named_modules() if is_batch_norm(module)}
    return [
        (name, p) for name, p in model.named_parameters() if name.rpartition(".")[0] not in norms
    ]


# torchvision's documentation gives these numbers for its weights; the last two columns count neither batch norm's arrays.
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
    "resnet200": (
        64_673_832,
        205,
        64_497_832,
    ),  # MXNet's tools/bandwidth: 205 arrays, 257.991328 MB
    "vgg16": (138_357_544, 32, 138_357_544),
}


def test_every_model_has_its_size_here():
    assert sorted(SIZES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_gradient_bytes(cells, name):
    model = on_meta(cells[name].model)
    rest = without_batch_norm(model)
    parameters, arrays, elements = SIZES[name]
    sizes = models.sizes(model.parameters())
    assert sizes["parameters"] == parameters
    assert sizes["gradient_bytes"] == 4 * parameters
    assert sizes["arrays"] == len(list(model.parameters()))
    assert (len(rest), sum(p.numel() for _, p in rest)) == (arrays, elements)
    assert model.training


def test_resnet200_is_the_network_of_mxnet_s_bandwidth_tool(cells):
    counted = without_batch_norm(on_meta(cells["resnet200"].model))
    assert sum(p.numel() for _, p in counted) * 4 / 1e6 == 257.991328
    assert [name for name, _ in counted if name.endswith("bias")] == ["fc.bias"]


def test_inception_without_its_auxiliary_head_is_mxnet_s(cells):
    main = [
        p
        for name, p in without_batch_norm(on_meta(cells["inception_v3"].model))
        if not name.startswith("AuxLogits")
    ]
    assert (len(main), sum(p.numel() for p in main)) == (96, 23_800_136)
    assert sum(p.numel() for p in main) * 4 / 1e6 == 95.200544


def test_sizes_count_what_is_trained():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    model[0].requires_grad_(False)
    assert models.sizes(model.parameters()) == {
        "parameters": 25,
        "arrays": 2,
        "gradient_bytes": 100,
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_outputs_have_a_row_for_each_image_at_the_sizes_of_the_yaml(cells, name):
    network = cells[name].model
    model = on_meta(network)
    images = torch.zeros(2, network.channels, network.image_size, network.image_size, device="meta")
    with FlopCounterMode(display=False) as counter:
        outputs = model(images)
    # Layers that see no pixels, AlexNet's last ones above all, keep their operations for small images.
    share = (network.image_size / groups.of_model(name, "gpu.image_size")) ** 2
    assert (
        0.95
        < counter.get_total_flops()
        / len(images)
        / (1e9 * groups.of_model(name, "gigaflop") * share)
        < 2.5
    )
    heads = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    assert all(head.shape == (2, network.classes) for head in heads)
    assert len(heads) == {"inception_v3": 2, "googlenet": 3}.get(name, 1)


@pytest.mark.parametrize(
    ("name", "image_size"), [("fmnist_cnn", 28), ("resnet18", 32), ("googlenet", 64)]
)
def test_forward_and_backward_give_every_parameter_a_finite_gradient(cells, name, image_size):
    cell = cells[name]
    network = dataclasses.replace(cell.model, image_size=image_size, classes=10)
    torch.manual_seed(0)
    model = models.build(network)
    images, labels = next(synthetic(dataclasses.replace(cell, model=network, batch_size=2), CPU, 0))
    loss = models.loss(model(images), labels, network.auxiliary_weight)
    loss.backward()
    assert 0 < loss.item() < 20
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    assert sum(bool(gradient.any()) for gradient in gradients) > 0.9 * len(gradients)


def test_the_auxiliary_head_of_inception_learns_at_full_size(cells):
    network = dataclasses.replace(cells["inception_v3"].model, classes=10)
    assert (network.image_size, network.auxiliary_weight) == (299, 0.4)
    torch.manual_seed(0)
    model = models.build(network)
    images, labels = next(
        synthetic(dataclasses.replace(cells["inception_v3"], model=network, batch_size=2), CPU, 0)
    )
    outputs = model(images)
    loss = models.loss(outputs, labels, network.auxiliary_weight)
    expected = functional.cross_entropy(outputs[0], labels) + 0.4 * functional.cross_entropy(
        outputs[1], labels
    )
    assert torch.allclose(loss, expected)
    loss.backward()
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for parameter in model.parameters()
    )
    assert model.AuxLogits.fc.weight.grad.any() and model.Conv2d_1a_3x3.conv.weight.grad.any()


def test_auxiliary_heads_count_in_the_loss():
    labels = torch.tensor([0, 2])
    heads = [
        torch.randn(2, 3, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        for seed in range(3)
    ]
    main, first, second = (functional.cross_entropy(head, labels) for head in heads)
    assert torch.allclose(models.loss(heads[0], labels, 0.3), main)
    assert torch.allclose(models.loss((heads[0],), labels, 0.3), main)
    assert torch.allclose(models.loss((heads[0], None, None), labels, 0.3), main)
    assert torch.allclose(models.loss((heads[0], heads[1]), labels, 0.4), main + 0.4 * first)
    whole = models.loss(tuple(heads), labels, 0.3)
    assert torch.allclose(whole, main + 0.3 * (first + second))
    whole.backward()
    assert all(head.grad.abs().sum() > 0 for head in heads)


@pytest.mark.parametrize("name", ["resnet50", "inception_v3", "fmnist_cnn"])
def test_bf16_weights_halve_the_gradient_except_batch_norm(cells, name):
    model = on_meta(cells[name].model)
    norm = sum(
        p.numel()
        for module in model.modules()
        if is_batch_norm(module)
        for p in module.parameters(recurse=False)
    )
    before = models.sizes(model.parameters())
    after = models.sizes(models.bf16_weights(model).parameters())
    assert after["parameters"] == before["parameters"]
    assert after["gradient_bytes"] == 2 * (before["parameters"] - norm) + 4 * norm
    for module in model.modules():
        dtype = torch.float32 if is_batch_norm(module) else torch.bfloat16
        assert all(p.dtype == dtype for p in module.parameters(recurse=False))
        assert not is_batch_norm(module) or module.running_mean.dtype == torch.float32


def test_bf16_weights_have_bf16_gradients(cells):
    cell = dataclasses.replace(cells["resnet18"], precision="bf16_weights", batch_size=2)
    cell = dataclasses.replace(
        cell, model=dataclasses.replace(cell.model, image_size=32, classes=10)
    )
    model = models.bf16_weights(models.build(cell.model))
    images, labels = next(synthetic(cell, CPU, 0))
    models.loss(model(images), labels, 0.0).backward()
    assert model.conv1.weight.grad.dtype == torch.bfloat16
    assert model.bn1.weight.grad.dtype == torch.float32


def batches(cell, rank, count=2):
    source = synthetic(cell, CPU, rank)
    return [next(source) for _ in range(count)]


def test_batches_differ_between_ranks_and_are_equal_for_equal_seeds(cells):
    cell = dataclasses.replace(cells["fmnist_cnn"], batch_size=16)
    here = batches(cell, 0)
    again = batches(cell, 0)
    assert all(
        torch.equal(a, b)
        for one, two in zip(here, again, strict=True)
        for a, b in zip(one, two, strict=True)
    )
    others = [batches(cell, 1), batches(dataclasses.replace(cell, seed=1), 0), [here[1], here[0]]]
    for other in others:
        assert not torch.equal(here[0][0], other[0][0])
        assert not torch.equal(here[0][1], other[0][1])


def test_batches_are_not_zero_and_fill_all_classes(cells):
    cell = dataclasses.replace(cells["fmnist_cnn"], batch_size=256)
    for images, labels in batches(cell, 3):
        assert images.shape == (256, 1, 28, 28) and labels.shape == (256,)
        assert (images != 0).float().mean() > 0.999
        assert abs(images.mean()) < 0.02 and abs(images.std() - 1) < 0.02
        assert set(labels.tolist()) == set(range(10))


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("bf16_weights", torch.bfloat16),
    ],
)
def test_batches_come_as_the_first_layer_computes(cells, precision, dtype):
    cell = dataclasses.replace(
        cells["resnet18"], precision=precision, channels_last=True, batch_size=2
    )
    images, labels = next(synthetic(cell, CPU, 0))
    assert (images.dtype, labels.dtype) == (dtype, torch.int64)
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_a_builder_of_ours_that_does_not_exist_is_named():
    network = Network("x", "ringside", "resnet201", 3, 10, 32, 0.0, {})
    with pytest.raises(
        ValueError,
        match=r"model\.builder=resnet201: accepted with model\.library=ringside are resnet200, fmnist_cnn",
    ):
        models.build(network)
