"""The load of the host-step benchmark: a runner without a device, and the frames of a steady batch.

Owns the stand-ins. The runner is on torch's meta device, with tensors without data, so that it takes the path of a
GPU; graphs, CUDA events and page-locked memory are replaced.
"""

import random
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from tandem.internal.v1 import worker_pb2 as pb
from transformers import Qwen3Config

from gpu_worker.attention.kernel_options import Card
from gpu_worker.attention.paged import register
from gpu_worker.compatibility.check_model import check_model, meta_model_of
from gpu_worker.cuda.shapes import Shapes
from gpu_worker.geometry import Geometry
from gpu_worker.layout.step_layout import StepShape
from gpu_worker.step.output import StaticOutput
from gpu_worker.step.runner import Runner
from tests.gpu_worker.plans import TinyCore
from tests.rigs.padded_shapes import padded_runner

_VOCAB_SIZE, _PAGE_SIZE, _MAX_LENGTH = 151_936, 128, 2048
# The rows' first positions, drawn at random.
_FIRST, _LAST = 472, 728
# The most steps that rows of _LAST tokens can take.
MOST_STEPS = _MAX_LENGTH - _LAST
# Tokens of a mixed step's chunk; four of them are one prompt.
_CHUNK = 512
_DRAWING = {"temperature": 0.8, "top_p": 0.95, "top_k": 40}


@dataclass(frozen=True, slots=True)
class Load:
    """What the rows do: whether they draw, and whether the last one computes chunks of prompts instead of decoding."""

    draws: bool
    mixed: bool

    @property
    def name(self) -> str:
        """As the report names it."""
        return ("drawing" if self.draws else "greedy") + (", one chunk" if self.mixed else "")


def make_runner(num_rows: int) -> Runner:
    """Returns a runner of a small model without data; every shape of a step has a graph, and every token is 7."""
    config = Qwen3Config(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=_VOCAB_SIZE, max_position_embeddings=_MAX_LENGTH,
    )  # fmt: skip
    geometry = Geometry(
        page_size=_PAGE_SIZE,
        num_pages=num_rows * _MAX_LENGTH // _PAGE_SIZE + 1,
        max_rows=num_rows,
        max_length=_MAX_LENGTH,
        token_budget=max(4096, 2 * num_rows),
        chunk_align=64,
        vocab_size=_VOCAB_SIZE,
    )
    register()
    model = meta_model_of(config, dtype=torch.bfloat16)
    with patch.object(Card, "of", lambda device: None):
        own = {"device": torch.device("meta"), "dtype": torch.bfloat16, "shapes": Shapes.of(geometry)}
        runner = padded_runner(model, check_model(model), geometry, **own)
    tokens = torch.full((2 * num_rows,), 7)
    logits = torch.zeros(0)

    def replay(shape: StepShape) -> StaticOutput:
        return StaticOutput(logits=logits, tokens=tokens[: shape.samples])

    # Stand-ins for what only enqueues device work: the page tables' entries, and a graph of everything else.
    patch.object(runner.on_device.tables, "set_pages", lambda edits: None).start()
    patch.object(runner.steps.graphs, "replay", replay).start()
    return runner


def make_frames(geometry: Geometry, load: Load, num_steps: int) -> list[bytes]:
    """Returns the frames of a batch that is steady after the first step."""
    draw, core = random.Random(3), TinyCore(geometry)
    rows = list(range(1, geometry.max_rows + 1))
    chunk_row = rows.pop() if load.mixed else None
    for row in rows:
        length = draw.randint(_FIRST, _LAST)
        sampling: dict[str, Any] = {**_DRAWING, "seed": row} if load.draws else {}
        core.add(row, [draw.randrange(_VOCAB_SIZE) for _ in range(length)], position=length - 1, **sampling)
    # Rows are in no order, as after many requests have come and gone.
    draw.shuffle(rows)
    frames: list[bytes] = []
    for step in range(num_steps):
        chunks = {}
        if chunk_row is not None:
            if step % (_MAX_LENGTH // _CHUNK) == 0:
                if chunk_row in core.rows:
                    core.free(core.rows[chunk_row])
                core.add(chunk_row, [step % _VOCAB_SIZE] * _MAX_LENGTH)
            chunks = {chunk_row: _CHUNK}
        plan = core.plan(chunks=chunks, decode=rows)
        frames.append(pb.CoreToWorker(plan=plan).SerializeToString())
    return frames
