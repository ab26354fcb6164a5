"""Transformers without Dynamo: what a fresh process has loaded; Dynamo is complete when something asks for it."""

import subprocess
import sys

import pytest

from tests.rigs.processes import REPOSITORY, child_environment

_LEAN = """
import gc, sys
from gpu_worker.process.starting import compiler_is_loaded, import_transformers, list_of_models, without_collections
with without_collections():
    import_transformers(without_compiler=True)
import torch
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _LEAN + code],
        cwd=REPOSITORY,
        env=child_environment() | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_model_runs_without_dynamo_and_its_parts() -> None:
    heavy = ("sympy", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp")
    code = f"""
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
model = LlamaForCausalLM(config)
with torch.inference_mode():
    model(input_ids=torch.zeros(1, 3, dtype=torch.int64), use_cache=False)
import inspect
inspect.getmodule(model)
loaded = [name for name in {heavy} if name in sys.modules]
print(compiler_is_loaded(), loaded, gc.isenabled(), gc.get_freeze_count() > 0)

# The list of models is the one that their package would read.
from pathlib import Path
from transformers.utils.import_utils import define_import_structure
import transformers.models
folder = Path(transformers.models.__file__).parent
shared = list_of_models(define_import_structure(folder, prefix="models"))
own = define_import_structure(str(folder / "__init__.py"))
print({{key: names for key, names in shared.items() if names}} == own, len(own) > 1)
"""
    assert run(code) == "False [] True True\nTrue True"


@pytest.mark.parametrize("ask", ["import torch._dynamo.config", "pass"])
def test_dynamo_is_complete_when_something_asks_for_it(ask: str) -> None:
    code = f"""
{ask}
counted = []
def count(graph, inputs):
    counted.append(len(inputs))
    return graph.forward
print(torch.compile(lambda x: x + 1, backend=count)(torch.ones(2)).tolist(), counted, compiler_is_loaded())
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
print(isinstance(TransformGetItemToIndex(), torch.overrides.TorchFunctionMode))
"""
    assert run(code) == "[2.0, 2.0] [1] True\nTrue"


@pytest.mark.parametrize(
    ("version", "said"),
    [
        # It uses the compiler as its modules are imported, and asks for a name that nothing stands in for.
        ("import torch._dynamo; torch._dynamo.config", "Transformers {} imports torch's compiler"),
        ("import sympy", "Transformers {} imports torch's compiler"),
        ("if 'torch._dynamo.config' not in sys.modules: raise AttributeError('x')", "Transformers {} imports torch's"),
        ("pass", None),
    ],
)
def test_a_version_that_needs_the_compiler_gets_it_and_the_log_says_so(version: str, said: str | None) -> None:
    code = f"""
import logging, sys, transformers
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from gpu_worker.process import starting as lean_imports
class Loader:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers.masking_utils":
            {version}
sys.meta_path.insert(0, Loader())
lean_imports.import_transformers(without_compiler=True)
print("transformers.masking_utils" in sys.modules, transformers.__version__)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=child_environment() | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    is_there, installed = last.split()
    assert is_there == "True"
    assert [line for line in lines if "compiler" in line][:1] == (
        [] if said is None else [line for line in lines if line.startswith(said.format(installed))]
    )
    assert (said is None) is not any("compiler" in line for line in lines)
