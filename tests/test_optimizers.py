"""The optimizers of a cell: torch's own, the same steps on flat pieces, what is refused."""

import json
from pathlib import Path

import pytest
import torch
from build import composed_cell, make_cell

from analysis.study.names import varying
from conf.cell import Cell, Optimizer
from trainers.optimizers import FlatSteps, name_of, optimizer_of, settings
from trainers.step import Training

RECORDS = sorted(Path(__file__).parent.glob("data/h200_x2/bootcamp_*/*/record.json"))[:20]
CPU = torch.device("cpu")
SGD = Optimizer(learning_rate=0.1, momentum=0.8, weight_decay=0.01)
ADAMW = Optimizer(0.01, weight_decay=0.1, name="adamw", beta1=0.8, beta2=0.95, epsilon=1e-6)


def test_a_strategy_of_the_users_own_updates_under_a_loss_scaler_too():
    training = Training(make_cell(strategy={"name": "none"}, precision="fp16"), CPU, 0)
    calls, update = [], training.strategy.update

    def counted(optimizer):
        calls.append(optimizer.param_groups)
        update(optimizer)

    training.strategy.update = counted
    before = [parameter.detach().clone() for parameter in training.parameters]
    batch = next(training.batches)
    for _ in range(3):
        training.step(batch)
    assert calls == [training.optimizer.param_groups] * 3
    scale = training.scaler.get_scale()
    assert scale > 0 and not all(map(torch.equal, before, training.parameters))
    training.parameters[0].register_hook(lambda gradient: gradient * float("inf"))
    before = [parameter.detach().clone() for parameter in training.parameters]
    training.step(batch)
    assert training.scaler.get_scale() < scale, "a step that overflows is skipped"
    assert all(map(torch.equal, before, training.parameters))


@pytest.mark.parametrize("options", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_flat_pieces_and_fused_parameters_move_as_torchs_plain_optimizer(options):
    torch.manual_seed(0)
    start, gradients = torch.randn(10), torch.randn(4, 10)
    plain, fused = (torch.nn.Parameter(start.clone()) for _ in range(2))
    if options is SGD:
        reference = torch.optim.SGD([plain], 0.1, 0.8, weight_decay=0.01, foreach=False)
    else:
        reference = torch.optim.AdamW([plain], 0.01, (0.8, 0.95), 1e-6, 0.1, foreach=False)
    ours, flat = optimizer_of(options, [fused]), start.clone()
    steps = FlatSteps(name_of(ours), flat)
    for gradient in gradients:
        plain.grad, fused.grad = gradient.clone(), gradient.clone()
        reference.step()
        ours.step()
        steps.begin()
        for piece in (slice(0, 4), slice(4, 10)):  # of one step
            steps.take(gradient[piece], settings(ours), piece)
    torch.testing.assert_close(fused.detach(), plain.detach())
    torch.testing.assert_close(flat, plain.detach())


def test_auto_is_each_optimizers_own(hydra):
    assert composed_cell().optimizer == Optimizer()
    assert composed_cell("optimizer.momentum=0").optimizer == Optimizer(momentum=0.0)
    adamw = composed_cell("optimizer.name=adamw", "optimizer.beta2=0.95")
    assert adamw.optimizer == Optimizer(0.001, weight_decay=0.01, name="adamw", beta2=0.95)
    assert adamw.name == "resnet50 · nccl_allreduce · gpus 0,1 · adamw"
    assert Cell.from_dict(json.loads(json.dumps(adamw.to_dict()))) == adamw
    assert [[*cell.values()] for cell in varying([composed_cell(), adamw])] == [["sgd"], ["adamw"]]


def test_cells_of_sgd_keep_their_keys():
    assert set(make_cell().to_dict()["optimizer"]) == {"learning_rate", "momentum", "weight_decay"}
    assert len(RECORDS) == 20
    for path in RECORDS:
        cell = json.loads(path.read_text())["cell"]
        assert Cell.from_dict(cell).to_dict()["optimizer"] == cell["optimizer"]
