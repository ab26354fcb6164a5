"""The page for other languages in protos/README.md: its commands and programs, as they stand there, call a service."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.processes import REPOSITORY
from tests.rigs.waiting import TIMEOUT_SECONDS
from tests.system.conftest import Served

PAGE = (REPOSITORY / "protos/README.md").read_text().split("## Other languages", 1)[1].split("\n## ")[0]
ADDRESS = "127.0.0.1:50051"
BLOCKS = [block.splitlines() for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)]
BUF = REPOSITORY / ".buf/node_modules/.bin/buf"
NPM = REPOSITORY / ".clients/npm/node_modules"
RPCS_OF_INFERENCE = ("Generate", "Resume", "Tokenize", "Detokenize", "RenderChat")
RPCS = (*RPCS_OF_INFERENCE, "GetLoad", "UpdateWeights")
# What the stubs made by protoc can do alone.
CALL = """
import sys
sys.path.insert(0, "stubs")
import grpc
from tandem.v1 import control_pb2, control_pb2_grpc
stub = control_pb2_grpc.ControlServiceStub(grpc.insecure_channel(sys.argv[1]))
print(stub.GetModelInfo(control_pb2.GetModelInfoRequest()).model)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a user with the protos alone."""
    (tmp_path / "protos").mkdir()
    shutil.copytree(REPOSITORY / "protos/tandem/v1", tmp_path / "protos/tandem/v1")
    return tmp_path


def run(folder: Path, *command: str) -> str:
    options: dict[str, Any] = {"cwd": folder, "env": {"PATH": "/usr/bin:/bin"}, "timeout": TIMEOUT_SECONDS}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def block_of(tool: str) -> list[str]:
    """The commands of the page around those of a tool."""
    (found,) = [block for block in BLOCKS if any(line.startswith(f"{tool} ") for line in block)]
    return found


def test_every_command_of_the_page_is_run_here() -> None:
    assert {line.split()[0] for block in BLOCKS for line in block} == {
        *("buf", "grpcurl", "mkdir", "python", "grpc_tools_ruby_protoc", "ruby", "protoc", "javac", "java"),
    }


@pytest.mark.parametrize(
    ("tool", "path", "rpcs"), [("buf", BUF, RPCS), ("grpcurl", shutil.which("grpcurl"), RPCS_OF_INFERENCE)]
)
def test_a_tool_calls_a_service_by_reflection(
    served: Served, folder: Path, tool: str, path: Path | str | None, rpcs: tuple[str, ...]
) -> None:
    if path is None or not Path(path).exists():
        pytest.skip(f"{tool} is not installed; `make .buf/node_modules/.bin/buf` installs buf")
    shutil.rmtree(folder / "protos")
    listed, info, generated = (
        run(folder, "bash", "-c", line.replace(f"{tool} ", f"{path} ", 1).replace(ADDRESS, served.scheduler.address))
        for line in block_of(tool)
    )
    assert {re.split(r"[/.]", line)[-1] for line in listed.splitlines()} >= {*rpcs}
    assert json.loads(info)["model"] == served.caller.model_info().model
    decoder, answers, rest = json.JSONDecoder(), [], generated.strip()
    while rest:
        answer, end = decoder.raw_decode(rest)
        answers.append(answer)
        rest = rest[end:].strip()
    assert "accepted" in answers[0]
    # grpcurl prints the names in the files, buf those of JSON.
    usage = answers[-1]["summary"]["usage"]
    assert usage.get("outputTokens", usage.get("output_tokens")) == 8


def test_protoc_makes_stubs_that_call_a_service(served: Served, folder: Path) -> None:
    for line in block_of("python"):
        run(folder, "bash", "-c", line.replace("python ", f"{sys.executable} ", 1))
    assert run(folder, sys.executable, "-c", CALL, served.scheduler.address).strip() == served.caller.model_info().model
    assert b"tandem.v1" in (folder / "tandem.binpb").read_bytes()


def test_node_streams_a_completion(served: Served, folder: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not on PATH")
    if not (NPM / "@grpc/grpc-js").is_dir():
        pytest.skip("the npm package @grpc/grpc-js is missing; `make .clients/npm/installed` installs it")
    (program,) = re.findall(r"```js\n(.*?)```", PAGE, re.DOTALL)
    (folder / "program.mjs").write_text(program.replace(ADDRESS, served.scheduler.address))
    (folder / "node_modules").symlink_to(NPM)
    text = run(folder, node, "program.mjs")
    assert text


IMPORTED = {"/usr/include/google/protobuf/descriptor.proto": "libprotobuf-dev"}
# What each is made of, and the package of Debian that has it.
COMPILED = {
    "ruby": ("program.rb", {"grpc_tools_ruby_protoc": "ruby-grpc-tools", "ruby": "ruby-grpc", **IMPORTED}),
    "java": (
        "Program.java",
        {
            "javac": "default-jdk-headless",
            "protoc": "protobuf-compiler",
            **IMPORTED,
            "grpc_java_plugin": "protobuf-compiler-grpc-java-plugin",
            "/usr/share/java/grpc-netty.jar": "libgrpc-java",
            "/usr/share/java/netty-codec-http2.jar": "libnetty-java",
            "/usr/share/java/protobuf.jar": "libprotobuf-java",
            "/usr/share/java/perfmark-api.jar": "libperfmark-java",
        },
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("language", COMPILED)
def test_a_program_of_another_language_streams_a_completion(served: Served, folder: Path, language: str) -> None:
    file, needs = COMPILED[language]
    missing = [package for tool, package in needs.items() if shutil.which(tool) is None and not Path(tool).exists()]
    if missing:
        pytest.skip(f"apt-get install {' '.join(missing)}")
    (program,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    (folder / file).write_text(program.replace(ADDRESS, served.scheduler.address))
    *making, running = block_of(language)
    for line in making:
        run(folder, "bash", "-c", line)
    assert run(folder, "bash", "-c", running).strip()
