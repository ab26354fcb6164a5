"""One environment serves all programs: each reads variables with its own prefix, and a few that both share."""

import ast
import os
import re
from collections.abc import Callable

import pytest

from gpu_worker import command_line
from gpu_worker import settings as worker
from scheduler_svc import settings as scheduler
from tandem_client.gateway import settings as gateway
from tests.architecture import source
from tests.rigs.default_ports import DEFAULT_PORTS

SCHEDULER_SETTINGS = set(scheduler.SchedulerSettings.model_fields)
WORKER_SETTINGS = set(worker.WorkerSettings.model_fields)


def test_the_programs_use_different_prefixes_of_variables() -> None:
    prefixes = [scheduler.ENV_PREFIX, worker.ENV_PREFIX]
    assert prefixes == ["TANDEM_SCHEDULER_", "TANDEM_WORKER_"]
    assert scheduler.SHARED_PREFIX == worker.SHARED_PREFIX == "TANDEM_"


def test_both_programs_share_the_same_settings() -> None:
    assert scheduler.SHARED_SETTINGS == worker.SHARED_SETTINGS
    # Both programs have `config` too, but a file has the keys of one program.
    assert scheduler.SHARED_SETTINGS | {"config"} == SCHEDULER_SETTINGS & WORKER_SETTINGS


def test_the_tests_hold_every_default_port() -> None:
    """A port that a program names as an address of its own code is one at which a test might start it."""
    address = re.compile(r"(?:127\.0\.0\.1|localhost|\[::1?\]|0\.0\.0\.0)?:(\d+)")
    texts = [
        node.value
        for path in source.files(*source.PROGRAMS)
        for node in ast.walk(source.tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    ports = {int(found[1]) for text in texts if (found := address.fullmatch(text.removeprefix("tcp://")))}
    assert ports - {0} == set(DEFAULT_PORTS)


# Reads the settings, with the variables of the process; returns the warnings.
Load = Callable[[], list[str]]
PROGRAMS: dict[str, Load] = {
    "scheduler": lambda: scheduler.load([]) and scheduler.variable_warnings(os.environ),
    "worker": lambda: command_line.load_settings([]) and command_line.variable_warnings(os.environ),
    "gateway": lambda: gateway.load([], os.environ) and gateway.variable_warnings(os.environ),
}


def service_links(service: str, host: str, *ports: tuple[str, int, str]) -> dict[str, str]:
    """What Kubernetes sets for a Service with these ports, each a name, a number and a protocol.

    As in https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables.
    """
    prefix = service.upper().replace("-", "_")
    at = f"[{host}]" if ":" in host else host
    found = {f"{prefix}_SERVICE_HOST": host, f"{prefix}_SERVICE_PORT": str(ports[0][1])}
    found[f"{prefix}_PORT"] = f"{ports[0][2].lower()}://{at}:{ports[0][1]}"
    for name, port, protocol in ports:
        if name:
            found[f"{prefix}_SERVICE_PORT_{name.upper().replace('-', '_')}"] = str(port)
        one = f"{prefix}_PORT_{port}_{protocol}"
        found |= {one: f"{protocol.lower()}://{at}:{port}", f"{one}_PROTO": protocol.lower()}
        found |= {f"{one}_PORT": str(port), f"{one}_ADDR": host}
    return found


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("service", ["tandem-{}", "tandem-{}-1", "tandem"])
@pytest.mark.parametrize(
    ("host", "ports"),
    [
        ("10.0.0.11", [("", 50051, "TCP")]),
        ("fd00::b", [("grpc", 50051, "TCP"), ("http-metrics", 9090, "TCP"), ("health", 53, "UDP"), ("x", 1, "SCTP")]),
    ],
)
def test_what_kubernetes_sets_for_services_is_ignored_with_one_line(
    monkeypatch: pytest.MonkeyPatch, program: str, service: str, host: str, ports: list[tuple[str, int, str]]
) -> None:
    for name in list(os.environ):
        if name.startswith("TANDEM_"):
            monkeypatch.delenv(name)
    others = {
        name: value for other in PROGRAMS for name, value in service_links(f"tandem-{other}", host, *ports).items()
    }
    own = service_links(service.format(program), host, *ports)
    for name, value in (others | own).items():
        monkeypatch.setenv(name, value)
    (line,) = PROGRAMS[program]()
    assert line.startswith("ignored what Kubernetes sets for Services: ")
    wanted = own if service != "tandem" or program != "gateway" else service_links("tandem-gateway", host, *ports)
    assert set(wanted) <= set(line.rpartition(": ")[2].split(", "))


@pytest.mark.parametrize(("program", "refusal"), [
    ("scheduler", scheduler.SettingError), ("worker", worker.SettingsRefused), ("gateway", gateway.SettingsError),
])  # fmt: skip
def test_another_unknown_variable_is_refused(
    monkeypatch: pytest.MonkeyPatch, program: str, refusal: type[Exception]
) -> None:
    """Also one with a name of Kubernetes and another value."""
    monkeypatch.setenv(f"TANDEM_{program.upper()}_PORT", "50051")
    with pytest.raises(refusal, match=f"TANDEM_{program.upper()}_PORT"):
        PROGRAMS[program]()


def test_no_setting_has_a_name_that_kubernetes_uses() -> None:
    fields = set(gateway.Settings.__dataclass_fields__)
    every = SCHEDULER_SETTINGS | WORKER_SETTINGS | fields
    assert not [name for name in every if name.endswith(("_port", "_service_host")) or "_port_" in name]
