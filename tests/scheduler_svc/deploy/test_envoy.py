"""Envoy's file: its names and limits are those of the client, API, server and simulator; its parts name each other.

`tests/system/test_envoy.py` runs Envoy with it.
"""

import re
from typing import Any

import pytest
import yaml
from tandem.v1 import control_pb2, inference_pb2

from scheduler_svc.frontend.rpc.options import MAX_CALLS_PER_CONNECTION, MIN_PING_INTERVAL_MS
from scheduler_svc.simulator.workload import LOAD_FACTOR
from tandem_client.wire.request import AFFINITY_KEY, SERVICE_KEY
from tests.architecture.source import ROOT

# Of Envoy's documentation of x-envoy-retry-on and x-envoy-retry-grpc-on: conditions under which no service can have
# accepted a request, because the retry comes before any part of an answer.
SAFE_RETRIES = {"connect-failure", "refused-stream", "unavailable", "resource-exhausted"}
OF_ANY_CELL = {"Generate", "Tokenize", "Detokenize", "RenderChat", "GetModelInfo"}
OF_THE_CELL_THAT_HAS_IT = {"Resume", "Abort"}
# The gateway asks it before it reads a body; the client never does.
OF_GATEWAYS = {"GetCaller"}


@pytest.fixture(scope="module")
def envoy() -> Any:
    return yaml.safe_load((ROOT / "scheduler_svc" / "deploy" / "envoy.yaml").read_text())["static_resources"]


def test_requests_stick_to_a_cell_by_the_metadata_that_the_client_sends(envoy: Any) -> None:
    for route in routes(envoy):
        assert route["route"]["hash_policy"] == [{"header": {"header_name": AFFINITY_KEY}}]
    [cluster] = envoy["clusters"]
    factor = cluster["common_lb_config"]["consistent_hashing_lb_config"]["hash_balance_factor"]
    assert cluster["lb_policy"] == "MAGLEV" and factor == 100 * LOAD_FACTOR
    session = connections(envoy)["http_filters"][0]["typed_config"]["session_state"]["typed_config"]
    assert session["name"] == SERVICE_KEY


def test_every_route_has_its_cluster_and_no_time_limit(envoy: Any) -> None:
    names = {cluster["name"] for cluster in envoy["clusters"]}
    for route in routes(envoy):
        assert route["route"]["cluster"] in names and route["route"]["timeout"] == "0s"
    assert all(cluster["load_assignment"]["cluster_name"] == cluster["name"] for cluster in envoy["clusters"])
    assert all("grpc_health_check" in check for cluster in envoy["clusters"] for check in cluster["health_checks"])


def test_each_method_has_its_route_and_those_about_one_service_have_none(envoy: Any) -> None:
    files = (inference_pb2.DESCRIPTOR, control_pb2.DESCRIPTOR)
    services = [service for file in files for service in file.services_by_name.values()]
    found = {
        method.name: route_of(envoy, f"/{service.full_name}/{method.name}")
        for service in services
        for method in service.methods
    }
    assert {name for name, route in found.items() if route is not None} == (
        OF_ANY_CELL | OF_THE_CELL_THAT_HAS_IT | OF_GATEWAYS
    )
    assert route_of(envoy, "/grpc.health.v1.Health/Check") is not None
    for name, route in found.items():
        assert route is None or ("retry_policy" in route["route"]) == (name not in OF_THE_CELL_THAT_HAS_IT)


def test_only_requests_that_no_cell_has_accepted_are_tried_again(envoy: Any) -> None:
    for policy in (route["route"]["retry_policy"] for route in routes(envoy) if "retry_policy" in route["route"]):
        assert set(policy["retry_on"].split(",")) <= SAFE_RETRIES
        assert "per_try_timeout" not in policy


def test_the_limits_of_the_server_are_kept(envoy: Any) -> None:
    assert connections(envoy)["http2_protocol_options"]["max_concurrent_streams"] == MAX_CALLS_PER_CONNECTION
    [options] = envoy["clusters"][0]["typed_extension_protocol_options"].values()
    keepalive = options["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"]
    assert 1000 * float(keepalive["interval"].removesuffix("s")) > MIN_PING_INTERVAL_MS


def connections(envoy: Any) -> Any:
    [listener] = envoy["listeners"]
    [filters] = [chain["filters"] for chain in listener["filter_chains"]]
    return filters[0]["typed_config"]


def routes(envoy: Any) -> list[Any]:
    return [route for host in connections(envoy)["route_config"]["virtual_hosts"] for route in host["routes"]]


def route_of(envoy: Any, path: str) -> Any:
    """The first route that takes a call; None without one."""
    taking = (each for each in routes(envoy) if re.fullmatch(each["match"]["safe_regex"]["regex"], path))
    return next(taking, None)
