"""OpenAI's JavaScript client against the gateway. It needs node, and the package, which `make test` installs."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.client.gateway.conftest import Fronted
from tests.client.gateway.told_service import thoughts_and_calls
from tests.rigs.processes import REPOSITORY

FOLDER = REPOSITORY / ".clients" / "npm"
SCRIPT = Path(__file__).with_name("openai_npm.mjs")


def test_the_javascript_client(fronted: Fronted) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not on PATH")
    if not (FOLDER / "node_modules" / "openai").is_dir():
        pytest.skip("the npm package openai is missing; `make .clients/npm/installed` installs it")
    fronted.service.behaviour = thoughts_and_calls
    done = subprocess.run(
        [node, str(SCRIPT), str(FOLDER), fronted.url], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "models": [fronted.service.model],
        "completion": ["Let me see.", "tool_calls", 16],
        "usage": 9,
        "finish": "tool_calls",
        "text": "Let me see.",
        "calls": [
            {"id": "abcdefgh1", "name": "weather", "arguments": {"city": "Paris"}},
            {"id": "abcdefgh2", "name": "clock", "arguments": {}},
        ],
        "final": 2,
        "error": ["BadRequestError", 400, "nonsense", "unknown_parameter"],
    }
    assert fronted.service.metadata("authorization") == ["Bearer tandem_key"]
