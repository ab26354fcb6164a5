"""The metrics page of a service under test: fetched over HTTP, parsed by Prometheus' own client library."""

import ssl
import urllib.request
from collections.abc import Callable

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.rigs.waiting import TIMEOUT_SECONDS, until


class MetricsPage:
    """The samples of one fetch. `get` and `sum` find them by the sample's name."""

    def __init__(self, text: str) -> None:
        self.families: dict[str, Metric] = {family.name: family for family in text_string_to_metric_families(text)}

    def get(self, name: str, **labels: str) -> float:
        """The value of the sample with exactly these labels."""
        [value] = [sample.value for sample in self._samples(name) if sample.labels == labels]
        return value

    def sum(self, name: str) -> float:
        """The sum over all labels."""
        return sum(sample.value for sample in self._samples(name))

    def by_label(self, name: str) -> dict[str, float]:
        """The values that are not 0, by the value of the only label."""
        return {next(iter(one.labels.values())): one.value for one in self._samples(name) if one.value}

    def _samples(self, name: str) -> list:  # type: ignore[type-arg]
        return [sample for family in self.families.values() for sample in family.samples if sample.name == name]


def fetch(url: str, *, token: str = "", context: ssl.SSLContext | None = None) -> MetricsPage:
    """Fetches the page. Raises urllib.error.HTTPError if it is refused."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS, context=context) as answer:
        return MetricsPage(answer.read().decode())


def wait_page(url: str, condition: Callable[[MetricsPage], bool]) -> MetricsPage:
    """Fetches the page until it meets the condition: front ends report once a second."""
    return until(lambda: (page := fetch(url)) and condition(page) and page, "figures of the metrics page")
