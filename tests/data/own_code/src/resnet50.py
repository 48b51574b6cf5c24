"""A training script as torchrun starts it: torchvision's ResNet-50 in DDP on images made on the device.

resnet50.py [BATCH [STEPS [SLOW_RANK]]]: SLOW_RANK computes a large product beside its steps.
"""

import os
import sys

import torch
import torch.distributed as dist
import torchvision
from torch import nn

batch, steps, slow_rank = [
    int(word) for word in (sys.argv[1:] + ["256", "100000", "-1"][len(sys.argv) - 1 :])
]
on_gpus = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
if on_gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpus else "gloo")
network = torchvision.models.resnet50().to(device, memory_format=torch.channels_last)
model = nn.parallel.DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
images = torch.randn(batch, 3, 224, 224, device=device).to(memory_format=torch.channels_last)
labels = torch.arange(batch, device=device) % 1000
matrix = torch.randn(4096, 4096, device=device) if dist.get_rank() == slow_rank else None
for _ in range(steps):
    optimizer.zero_grad()
    with torch.autocast(device.type, torch.bfloat16):
        loss = nn.functional.cross_entropy(model(images), labels)
    if matrix is not None:
        matrix @ matrix
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
