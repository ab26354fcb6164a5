"""Imports what a worker that compiles imports of torch and Transformers, as the worker does."""

import torch
import torch._dynamo
import torch._inductor.compile_fx  # noqa: F401

from gpu_worker.process.starting import import_transformers

import_transformers(without_compiler=False)
