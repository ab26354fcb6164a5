"""The device that the worker runs on.

Owns its choice. Knows nothing of models.
"""

import torch


def choose_device(name: str) -> torch.device:
    """The device `name` (cpu, cuda or cuda:N); if it is empty, CUDA if available. Raises ValueError."""
    if not name:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        if torch.version.cuda is None and torch.version.hip is None:
            raise ValueError(
                f"device is {name}; this torch ({torch.__version__}) is built without CUDA: "
                "install a CUDA build of torch, or set device cpu"
            )
        count = torch.cuda.device_count()
        index = device.index or 0
        if index >= count:
            hint = f"set cuda:0 to cuda:{count - 1}" if count else "nvidia-smi and CUDA_VISIBLE_DEVICES show why"
            raise ValueError(f"device is {name}; this machine has {count} CUDA devices: {hint}")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device
