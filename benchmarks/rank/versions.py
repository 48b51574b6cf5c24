"""The versions of what a rank runs. Run as a module, it prints those of a process on GPUs as JSON, for the launcher to read."""

import importlib.metadata
import json
import platform


def versions(on_gpus: bool) -> dict[str, str]:
    """Return {"torch": "2.11.0+cu130", …} of this process; CUDA, cuDNN and NCCL only where GPUs are used."""
    import torch

    # torchvision by its metadata: an import takes seconds, and not every model is from there.
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": importlib.metadata.version("torchvision"),
    }
    if on_gpus:
        found |= {
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return found


if __name__ == "__main__":
    print(json.dumps(versions(on_gpus=True)))
