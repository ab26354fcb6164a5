"""The environment of all processes of Ray. Ray reads it when it is imported, so it is set before the tests are."""

import os
import secrets

from gpu_worker.cluster.__main__ import environment
from tests.rigs.processes import child_environment

for _name in [name for name in os.environ if name.startswith("TANDEM_")]:
    del os.environ[_name]
os.environ.update(environment(child_environment()))
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
