"""What the client loads of the contract package needs the standard library alone."""

import json
import os
import subprocess
import sys
import sysconfig

from tests.architecture.source import ROOT, files, module_name

PROBE = """
import importlib, json, sys
import tandem_client
at_start = [name for name in sys.modules if name.partition(".")[0] == "tandem_contract"]
for name in json.load(sys.stdin):
    importlib.import_module(name)
# Looked up when it is asked for.
assert tandem_client.__version__
print(json.dumps([at_start, [name for name in sys.modules if name.startswith("tandem_contract.")]]))
"""
ALONE = """
import importlib, json, sys
for name in json.load(sys.stdin):
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names - {"__main__"})))
"""


def run(code: str, names: list[str], *flags: str, paths: list[str]) -> list[list[str]]:
    done = subprocess.run(
        [sys.executable, *flags, "-c", code],
        input=json.dumps(names), capture_output=True, text=True, check=False, cwd="/",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_client_loads_only_modules_that_need_the_standard_library_alone() -> None:
    # The gateway is a program of its own, with the reader of settings and pydantic.
    names = [module_name(path) for path in files("client") if not {"plot", "gateway"} & set(path.parts)]
    paths = [*(str(ROOT / each) for each in ("", "client", "protos", ".stubs")), sysconfig.get_path("purelib")]
    at_start, loaded = run(PROBE, names, paths=paths)
    assert at_start == [], "its own programs need them, `import tandem_client` does not"
    assert {"tandem_contract.child", "tandem_contract.logs", "tandem_contract.version"} <= set(loaded)
    # Without the folder of installed packages.
    assert run(ALONE, loaded, "-S", paths=[str(ROOT / "protos")]) == ["tandem_contract"]
