"""A training script as torchrun starts it: a small network in DDP."""

import os

import torch
import torch.distributed as dist
from torch import nn

on_gpus = torch.cuda.is_available() and bool(os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
device = torch.device("cpu")
if on_gpus:
    # Ranks may share a GPU.
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpus else "gloo")
network = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 10)).to(device)
model = nn.parallel.DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(65536, 512), torch.arange(65536) % 10)
for inputs, labels in torch.utils.data.DataLoader(data, 32):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device)).backward()
    optimizer.step()
dist.destroy_process_group()
