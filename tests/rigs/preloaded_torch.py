"""Imports what a worker on a CPU imports of torch and Transformers, as the worker does."""

import torch

from gpu_worker.process.starting import import_transformers

import_transformers(without_compiler=True)

# What is imported or made when weights are loaded.
import sympy  # noqa: E402, F401
import torch.fx.experimental.symbolic_shapes  # noqa: E402, F401
import transformers.models.qwen3.modeling_qwen3  # noqa: E402, F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping  # noqa: E402

import gpu_worker.cpu.steps  # noqa: E402, F401

get_checkpoint_conversion_mapping("qwen3")
