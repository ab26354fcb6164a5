"""Transformers without Dynamo: what a fresh process has loaded; Dynamo is complete when something asks for it.

Each case has a process of its own, which one that has imported what they have in common forks.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.processes import REPOSITORY, child_environment

_LEAN = """
import gc, sys
from gpu_worker.process.starting import compiler_is_loaded, import_transformers, list_of_models, without_collections
with without_collections():
    import_transformers(without_compiler=True)
import torch
"""
_WHOLE = """
import logging, sys, transformers, torch
from gpu_worker.process import starting as lean_imports
"""
# A line of input is a program and the file of what it prints; a line of output is its exit code.
_FORKS = """
import json, os, sys, traceback
assert len(os.listdir("/proc/self/task")) == 1, "a fork has no other thread"
for line in sys.stdin:
    code, path = json.loads(line)
    if pid := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    sys.stdout = open(path, "w")
    try:
        exec(code, globals())
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)
os._exit(0)
"""


class Forks:
    """Programs that begin with what `common` has imported."""

    def __init__(self, common: str, folder: Path) -> None:
        self._output = folder / "output"
        self.process = subprocess.Popen(
            [sys.executable, "-c", common + _FORKS],
            cwd=REPOSITORY,
            # The threads of numpy's library of linear algebra would not be in a fork.
            env=child_environment() | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str) -> str:
        """What the program prints."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([code, str(self._output)]), file=self.process.stdin, flush=True)
        exit_code, printed = self.process.stdout.readline(), self._output.read_text()
        assert exit_code == "0\n", "see stderr"
        return printed.strip()


def forks(common: str, folder: Path) -> Iterator[Forks]:
    made = Forks(common, folder)
    yield made
    made.process.communicate()


@pytest.fixture(scope="module")
def lean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    yield from forks(_LEAN, tmp_path_factory.mktemp("lean"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    yield from forks(_WHOLE, tmp_path_factory.mktemp("whole"))


def test_a_model_runs_without_dynamo_and_its_parts(lean: Forks) -> None:
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
    assert lean.run(code) == "False [] True True\nTrue True"


@pytest.mark.parametrize("ask", ["import torch._dynamo.config", "pass"])
def test_dynamo_is_complete_when_something_asks_for_it(lean: Forks, ask: str) -> None:
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
    assert lean.run(code) == "[2.0, 2.0] [1] True\nTrue"


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
def test_a_version_that_needs_the_compiler_gets_it_and_the_log_says_so(
    whole: Forks, version: str, said: str | None
) -> None:
    code = f"""
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
class Loader:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers.masking_utils":
            {version}
sys.meta_path.insert(0, Loader())
lean_imports.import_transformers(without_compiler=True)
print("transformers.masking_utils" in sys.modules, transformers.__version__)
"""
    *lines, last = whole.run(code).splitlines()
    is_there, installed = last.split()
    assert is_there == "True"
    assert [line for line in lines if "compiler" in line][:1] == (
        [] if said is None else [line for line in lines if line.startswith(said.format(installed))]
    )
    assert (said is None) is not any("compiler" in line for line in lines)
