"""What Kubernetes sets in the environment of every container for Services such as tandem-scheduler. Owns their form."""

import re
from collections.abc import Mapping

# As NAME=VALUE: the host of a Service, its ports, and one group for each port.
_SERVICE_LINK = re.compile(
    r"TANDEM_(\w+_)?(SERVICE_HOST=[\da-f.:]+|SERVICE_PORT(_\w+)?=\d+|PORT(_\d+_(TCP|UDP|SCTP))?=(tcp|udp|sctp)://\S+"
    r"|PORT_\d+_(TCP|UDP|SCTP)_(PROTO=(tcp|udp|sctp)|PORT=\d+|ADDR=[\da-f.:]+))"
)


def without_service_links(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that somebody has set for the program."""
    return {name: value for name, value in environ.items() if not _SERVICE_LINK.fullmatch(f"{name}={value}")}


def service_link_warnings(environ: Mapping[str, str], prefix: str, others: tuple[str, ...] = ()) -> list[str]:
    """Returns one line if Kubernetes sets variables that begin with `prefix`, and with none of `others`."""
    links = sorted(environ.keys() - without_service_links(environ).keys())
    named = [name for name in links if name.startswith(prefix) and not name.startswith(others)]
    return [f"ignored what Kubernetes sets for Services: {', '.join(named)}"] if named else []
