"""TLS between the gateway and the service: what goes together, and what is refused at start by the name of its flag."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from tandem_client.gateway.server import check
from tandem_client.gateway.settings import PROGRAM
from tandem_contract.settings import SettingError
from tests.client.gateway import plain_http
from tests.client.gateway.conftest import PAGE, gateway_with
from tests.client.gateway.told_service import ToldService
from tests.rigs.authorities import Authority, Pair
from tests.rigs.processes import run

NAME = "tandem.test"
NAMED = f"--service-ca=CA --service-name={NAME}"


class Services:
    """A service of each kind, and the files that callers need."""

    def __init__(self, folder: Path) -> None:
        self.authority, self.other = Authority(folder), Authority(folder, "other")
        self.pair = self.authority.issue("service", f"DNS:{NAME}")
        self.unnamed = self.authority.issue(NAME, file="unnamed")
        self.client = self.authority.issue("client", "DNS:client.test")
        self.stranger = self.other.issue("stranger", "DNS:client.test")
        self.plain = ToldService()
        self.tls = ToldService(self.pair.of_server())
        self.mutual = ToldService(self.pair.of_server(self.authority.certificate))

    def flags(self, words: str) -> list[str]:
        """Replaces the names of services and files in the words of a table."""
        names = {
            "PLAIN": self.plain.address, "TLS": self.tls.address, "MUTUAL": self.mutual.address,
            "OTHER": self.other.certificate, "CA": self.authority.certificate, "ITSELF": self.pair.certificate,
        }  # fmt: skip
        pairs: dict[str, Pair] = {"CLIENT": self.client, "STRANGER": self.stranger}
        found = list[str]()
        for word in words.split():
            flag, _, value = word.partition("=")
            if value in pairs:
                found += [f"{flag}-cert={pairs[value].certificate}", f"{flag}-key={pairs[value].key}"]
            else:
                found.append(f"{flag}={names.get(value, value)}" if value else flag)
        return found


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    made = Services(tmp_path_factory.mktemp("tls"))
    yield made
    for service in (made.plain, made.tls, made.mutual):
        service.stop()


@pytest.mark.parametrize(
    "flags",
    [
        "--address=PLAIN",
        "--address=TLS --service-ca=CA --service-name=tandem.test",
        "--address=TLS --service-ca=ITSELF --service-name=tandem.test",
        "--address=MUTUAL --service-ca=CA --service-name=tandem.test --service=CLIENT",
        # Nothing listens there: the service may start after the gateway.
        "--address=127.0.0.1:1",
        "--address=127.0.0.1:1 --service-ca=CA",
    ],
)
async def test_flags_that_suit_the_service(services: Services, flags: str) -> None:
    await check(PROGRAM.read(services.flags(flags), {}))


WRONG = [
    ("--address=TLS", "speaks TLS; give --service-ca"),
    ("--address=MUTUAL", "speaks TLS; give --service-ca"),
    ("--address=PLAIN --service-ca=CA", "speaks plaintext; leave out --service-ca"),
    ("--address=PLAIN --service-tls", "speaks plaintext; leave out --service-ca and --service-tls"),
    ("--address=TLS --service-ca=OTHER --service-name=tandem.test", r"is not from \S+ \(--service-ca\)"),
    ("--address=TLS --service-tls --service-name=tandem.test", "is not of a known authority; give --service-ca"),
    ("--address=TLS --service-ca=CA", "is for tandem.test and not for 127.0.0.1; give --service-name"),
    ("--address=TLS --service-ca=CA --service-name=b.test", "is for tandem.test and not for b.test"),
    (f"--address=MUTUAL {NAMED}", "wants a certificate of its clients; give --service-cert and --service-key"),
    (f"--address=MUTUAL {NAMED} --service=STRANGER", "does not accept the certificate of --service-cert"),
]


@pytest.mark.parametrize(("flags", "words"), WRONG)
async def test_flags_that_do_not_suit_the_service_are_named(services: Services, flags: str, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        await check(PROGRAM.read(services.flags(flags), {}))


@pytest.mark.parametrize("processes", ["1", "2"])
def test_wrong_flags_end_the_gateway_at_its_start_with_one_line(services: Services, processes: str) -> None:
    flags, words = WRONG[0]
    command = ["tandem_client.gateway", "--listen", "127.0.0.1:0", "--processes", processes]
    ended = run(*command, *services.flags(flags))
    [line] = ended.stderr.splitlines()
    assert ended.returncode == 2 and words in line


def test_a_page_is_answered_by_a_gateway_that_shows_the_service_its_certificate(services: Services) -> None:
    """CORS in front, mTLS behind: a preflight, an answer and a refusal have the headers of pages."""
    words = f"--address=MUTUAL --service-ca=CA --service-name={NAME} --service=CLIENT --cors-origins={PAGE}"
    ours = ("--tls-cert", str(services.pair.certificate), "--tls-key", str(services.pair.key))
    trust = Pair(services.authority.certificate, services.pair.key).trust()
    with (
        gateway_with(*services.flags(words), *ours) as (_, url),
        httpx.Client(base_url=url, verify=trust, headers={"origin": PAGE}) as page,
    ):
        asked = page.options("/v1/models", headers={"access-control-request-method": "GET"})
        answers = [asked, page.get("/v1/models"), page.get("/v1/models/none")]
        other = page.get("/v1/models", headers={"origin": "https://other.example"})
    assert [answer.status_code for answer in answers] == [200, 200, 404]
    assert [answer.headers["access-control-allow-origin"] for answer in answers] == [PAGE] * 3
    assert other.status_code == 200 and "access-control-allow-origin" not in other.headers


def test_a_service_that_starts_later_with_another_protocol_is_reported(services: Services) -> None:
    first = ToldService()
    first.stop()
    with gateway_with("--address", first.address) as (gateway, url):
        gateway.wait_line(f"the service at {first.address} does not answer yet")
        later = ToldService(services.pair.of_server(), address=first.address)
        gateway.wait_line("ERROR .*speaks TLS; give --service-ca")
        assert plain_http.get(f"{url}/v1/models").status_code == 503
        later.stop()


def test_both_certificates_follow_their_files(tmp_path: Path) -> None:
    """The one certificate of service and gateway, which signs itself, is replaced; then the service starts again."""

    pair = Pair(tmp_path / "cert.pem", tmp_path / "key.pem")

    def replace(name: str) -> ssl.SSLContext:
        made = Authority(tmp_path, name).certificate
        made.with_suffix(".key").rename(pair.key)
        made.rename(pair.certificate)
        return pair.trust()

    trust = replace("first")
    service = ToldService(pair.of_server())
    ours = ("--tls-cert", str(pair.certificate), "--tls-key", str(pair.key))
    theirs = ("--service-ca", str(pair.certificate), "--service-name", "first")
    with gateway_with("--address", service.address, *ours, *theirs) as (gateway, url):
        assert httpx.get(f"{url}/v1/models", verify=trust).status_code == 200
        pair.key.write_text("nonsense")
        gateway.wait_line("key.pem cannot be used: .*; what was read before stays in force")
        assert httpx.get(f"{url}/v1/models", verify=trust).status_code == 200
        seen, address = len(gateway.lines), service.address
        service.stop()
        trust = replace("first")
        service = ToldService(pair.of_server(), address=address)
        gateway.wait_line("key.pem was read again", after=seen)
        gateway.wait_line(r"INFO \S+cert.pem was read again", after=seen)
        answers = (httpx.get(f"{url}/v1/models", verify=trust).status_code for _ in range(1000))
        assert 200 in answers
    service.stop()
