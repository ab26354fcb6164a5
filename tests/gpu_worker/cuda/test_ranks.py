"""Captured steps of a rank: their collective calls, which all ranks must make in one order."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gpu_worker.checkpoint.files import read_files
from gpu_worker.checkpoint.loading import load_weights
from gpu_worker.cuda.shapes import Shapes
from gpu_worker.memory.model_facts import examine
from gpu_worker.process.ranks import Ranks
from gpu_worker.sharding.plan import part_of, pretended_group
from gpu_worker.step.runner import Runner
from tests.gpu_worker.cuda.rig import CPU, GEOMETRY, SPEC
from tests.gpu_worker.reference import eager_model
from tests.gpu_worker.rig import config_of
from tests.rigs.graph_recorder import GraphRecorder
from tests.rigs.padded_shapes import padded_runner
from tests.rigs.plain_flex import plain_flex
from tests.rigs.recorded_worker import recorder
from tests.rigs.torch_kernels import torch_kernels

SIZE = 2
# Embedding, two per layer, logits, tokens.
LAYER_CALLS, OTHER_CALLS = 2, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    config = config_of(SPEC)
    eager_model(config, seed=7).save_pretrained(found)
    config.save_pretrained(found)
    return found


def captured(folder: Path, rank: int) -> tuple[Runner, GraphRecorder]:
    """The runner of one rank without its peers, with every shape captured."""
    ranks = Ranks(rank=rank, size=SIZE, local_rank=rank, local_size=SIZE)
    files = read_files(folder)
    whole = examine(files.config, dtype=torch.float32, packs=True)
    part = part_of(files.config, whole, ranks, dtype=torch.float32, packs=True)
    backend = recorder()
    with pretended_group(ranks), plain_flex():
        facts = part.facts
        model = load_weights(files, device=CPU, dtype=torch.float32, merged=facts.merged, shared=part.plan)
        runner = padded_runner(
            *(model, facts.layers, GEOMETRY),
            device=CPU,
            dtype=torch.float32,
            shapes=Shapes.of(GEOMETRY),
            graphs=backend,
        )
        runner.on_device.share_tokens = lambda tokens: dist.broadcast(tokens, 0)
        runner.warm_up()
    return runner, backend


def test_all_ranks_make_the_same_collective_calls_in_the_same_order(folder: Path) -> None:
    with torch_kernels():
        found = [captured(folder, rank) for rank in range(SIZE)]
    calls = [
        [[name for name in graph.operators if name.startswith("c10d")] for graph in backend.graphs]
        for _, backend in found
    ]
    assert calls[0] == calls[1]
    runner = found[0][0]
    assert len(calls[0]) == len(runner.steps.shapes.steps) == runner.steps.graphs.num_graphs
    num_layers = len(runner.on_device.cache.keys)
    for of_graph in calls[0]:
        assert len(of_graph) == LAYER_CALLS * num_layers + OTHER_CALLS
        assert of_graph[-2:] == ["c10d._allgather_base_.default", "c10d.broadcast_.default"]
