"""Where a service is reached, with a command to paste for each of its addresses.

A token is never in a command: it takes it from a variable, and the shell says so if the variable is not set.
"""

import json
import shlex
from pathlib import Path

from tandem_client.address import DEFAULT_ADDRESS, dialled
from tandem_client.peer import own_names
from tandem_client.services.display import Endpoint
from tandem_client.services.settings import Settings

_BODY = json.dumps({"prompt": "Return the", "max_tokens": 16})
_TOKEN = '"authorization: Bearer ${TANDEM_TOKEN:?is not set}"'


def of_grpc(address: str, command: str) -> Endpoint:
    """`command`: the scheduler's own; empty if the address is all that a caller needs."""
    named = "" if address == DEFAULT_ADDRESS else f"--address {address} "
    return Endpoint("gRPC", address, command or f'tandem generate {named}"Return the"')


def of_http(url: str, gateway: Settings, *, needs_token: bool) -> Endpoint:
    """The gateway with these settings, which listens at `url`."""
    scheme, _, bound = url.partition("://")
    address = dialled(bound)
    words = ["curl"]
    certificate, key = gateway["tls_cert"], gateway["tls_key"]
    if certificate and key:
        words.append(f"--cacert {shlex.quote(str(Path(certificate).absolute()))}")
        host, _, port = address.rpartition(":")
        names = own_names(Path(certificate), Path(key))
        if names and host.strip("[]") not in names:
            here = [name for name in ("localhost", "127.0.0.1") if name in names and address != bound]
            if not here:
                words.append(f"--connect-to ::{address}")
            name = here[0] if here else names[0].replace("*", "tandem", 1)
            address = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
    words.append(f"{scheme}://{address}/v1/completions -H 'content-type: application/json'")
    if needs_token:
        words.append(f"-H {_TOKEN}")
    return Endpoint("HTTP", f"{scheme}://{bound}", " ".join([*words, f"-d '{_BODY}'"]))
