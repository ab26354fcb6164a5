"""Imports what a worker on a CPU imports of torch and Transformers, as the worker does."""

import torch  # noqa: F401

from gpu_worker.process.starting import import_transformers

import_transformers(without_compiler=True)
