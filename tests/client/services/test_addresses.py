"""The commands to paste that `tandem serve` prints for its addresses."""

from pathlib import Path

import pytest

from tandem_client.services.gateway import gateway_flags
from tandem_client.services.serving import of_grpc, of_http
from tests.rigs.authorities import Authority

BODY = """-d '{"prompt": "Return the", "max_tokens": 16}'"""
JSON = "-H 'content-type: application/json'"
PLAIN = {"tls_cert": None, "tls_key": None}


def test_a_plain_service_needs_its_address_alone() -> None:
    assert of_grpc("127.0.0.1:50051", "").command == 'tandem generate "Return the"'
    assert of_grpc("127.0.0.1:4711", "").command == 'tandem generate --address 127.0.0.1:4711 "Return the"'
    assert of_grpc("0.0.0.0:4711", "tandem generate --tls-ca c.pem").command == "tandem generate --tls-ca c.pem"
    found = of_http("http://127.0.0.1:8000", PLAIN, needs_token=False)
    assert (found.address, found.command) == (
        "http://127.0.0.1:8000",
        f"curl http://127.0.0.1:8000/v1/completions {JSON} {BODY}",
    )


@pytest.mark.parametrize(
    ("bound", "names", "words"),
    [
        ("127.0.0.1:8443", ("IP:127.0.0.1",), "https://127.0.0.1:8443"),
        ("0.0.0.0:8443", ("DNS:localhost",), "https://localhost:8443"),
        ("0.0.0.0:8443", ("DNS:*.example",), "--connect-to ::127.0.0.1:8443 https://tandem.example:8443"),
        ("[::1]:8443", ("DNS:a.example", "IP:::1"), "https://[::1]:8443"),
        ("[0:0:0:0:0:0:0:1]:8443", ("IP:::1",), "https://[0:0:0:0:0:0:0:1]:8443"),
        ("127.0.0.1:8443", ("DNS:a.example",), "--connect-to ::127.0.0.1:8443 https://a.example:8443"),
    ],
)
def test_curl_trusts_the_certificate_under_one_of_its_names(
    tmp_path: Path, bound: str, names: tuple[str, ...], words: str
) -> None:
    pair = Authority(tmp_path).issue("tandem.test", *names)
    gateway = {"tls_cert": str(pair.certificate), "tls_key": str(pair.key)}
    token = '-H "authorization: Bearer ${TANDEM_TOKEN:?is not set}"'
    assert of_http(f"https://{bound}", gateway, needs_token=True).command == (
        f"curl --cacert {pair.certificate} {words}/v1/completions {JSON} {token} {BODY}"
    )


@pytest.mark.parametrize(
    ("listen", "names", "named"),
    [
        ("[::1]:50051", ("DNS:a.example", "IP:::1"), []),
        ("[::1]:50051", ("DNS:a.example",), ["--service-name=a.example"]),
        ("127.0.0.1:50051", ("IP:::1", "IP:127.0.0.1"), []),
        ("127.0.0.1:50051", ("IP:::1",), ["--service-name=::1"]),
    ],
)
def test_the_gateway_names_the_service_only_if_its_certificate_is_not_for_its_address(
    tmp_path: Path, listen: str, names: tuple[str, ...], named: list[str]
) -> None:
    pair = Authority(tmp_path).issue("tandem.test", *names)
    flags = gateway_flags({"tls_cert": str(pair.certificate), "tls_key": str(pair.key)}, listen)
    assert [flag for flag in flags if flag.startswith("--service-name")] == named
