"""The weights: read through Transformers into a model on its device. Knows nothing of pages, plans or sockets."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from gpu_worker.attention import ATTENTION_NAME, register
from gpu_worker.model import prepare
from gpu_worker.model_files import ModelFiles, ModelRefused


def load_weights(files: ModelFiles, *, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The model on its device, in evaluation mode, with paged attention. Raises ModelRefused."""
    if not any(files.folder.glob("*.safetensors")):
        raise ModelRefused(f"{files.folder} has no *.safetensors; other weight formats can run code and are not read")
    register()
    model = AutoModelForCausalLM.from_pretrained(
        files.folder,
        config=files.config,
        dtype=dtype,
        use_safetensors=True,
        attn_implementation=ATTENTION_NAME,
        trust_remote_code=False,
    )
    return prepare(model, device=device, dtype=dtype)
