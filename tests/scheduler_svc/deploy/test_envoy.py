"""Envoy's file: its names are those of the client and of the API, and its parts name each other."""

from typing import Any

import pytest
import yaml

from tandem_client.cells import router
from tandem_client.cells.affinity import METADATA_KEY
from tests.architecture.source import ROOT

# Of Envoy's documentation of x-envoy-retry-on and x-envoy-retry-grpc-on: conditions under which no service can have
# accepted a request, because the retry comes before any part of an answer.
SAFE_RETRIES = {"connect-failure", "refused-stream", "unavailable", "resource-exhausted"}


@pytest.fixture(scope="module")
def envoy() -> Any:
    return yaml.safe_load((ROOT / "scheduler_svc" / "deploy" / "envoy.yaml").read_text())["static_resources"]


def test_requests_stick_to_a_cell_by_the_metadata_that_the_client_sends(envoy: Any) -> None:
    [[policy]] = [route["route"]["hash_policy"] for route in routes(envoy)]
    assert policy == {"header": {"header_name": METADATA_KEY}}
    [cluster] = envoy["clusters"]
    factor = cluster["common_lb_config"]["consistent_hashing_lb_config"]["hash_balance_factor"]
    assert cluster["lb_policy"] == "RING_HASH" and factor == 100 * router.LOAD_FACTOR


def test_every_route_has_its_cluster_and_no_time_limit(envoy: Any) -> None:
    names = {cluster["name"] for cluster in envoy["clusters"]}
    for route in routes(envoy):
        assert route["route"]["cluster"] in names and route["route"]["timeout"] == "0s"
    assert all(cluster["load_assignment"]["cluster_name"] == cluster["name"] for cluster in envoy["clusters"])
    assert all("grpc_health_check" in check for cluster in envoy["clusters"] for check in cluster["health_checks"])


def test_only_requests_that_no_cell_has_accepted_are_tried_again(envoy: Any) -> None:
    for route in routes(envoy):
        policy = route["route"]["retry_policy"]
        assert set(policy["retry_on"].split(",")) <= SAFE_RETRIES
        assert "per_try_timeout" not in policy


def routes(envoy: Any) -> list[Any]:
    [listener] = envoy["listeners"]
    [filters] = [chain["filters"] for chain in listener["filter_chains"]]
    hosts = filters[0]["typed_config"]["route_config"]["virtual_hosts"]
    return [route for host in hosts for route in host["routes"]]
