"""What the programs read of their flags, before any of them starts."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem_client.services.gateway import asks_for_proofs, health_flags
from tandem_client.services.settings import (
    GATEWAY,
    SCHEDULER,
    WORKER,
    HelpAsked,
    Settings,
    SettingsReader,
    SettingsRefused,
)

PROBE = ["--health-listen=127.0.0.1:0"]


def read(**flags: Sequence[str]) -> dict[str, Settings]:
    with SettingsReader(*flags) as reader:
        return reader.read(flags)


def test_flags_come_before_variables_and_these_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('max_waiting = 3\nfrontends = 3\ntokens = "t.toml"\n')
    monkeypatch.setenv("TANDEM_SCHEDULER_FRONTENDS", "2")
    monkeypatch.setenv("TANDEM_SCHEDULER_MAX_WAITING", "2")
    found = read(scheduler=["--config", str(file), "--max-waiting=1"], worker=["--device=cpu"])
    assert [found[SCHEDULER][name] for name in ("max_waiting", "frontends", "tokens")] == [1, 2, "t.toml"]
    assert (found[WORKER]["device"], found[WORKER]["shared_pool"]) == ("cpu", "auto")


@pytest.mark.parametrize(
    ("flags", "asks", "own"),
    [
        (["--tokens=t.toml"], True, PROBE),
        (["--tokens", "t.toml"], True, PROBE),
        (["--tls-cert=c.pem", "--tls-key=k.pem"], True, PROBE),
        (["--tokens=t.toml", "--health-listen=127.0.0.1:8090"], True, []),
        (["--max-waiting=3"], False, []),
    ],
)
def test_a_scheduler_that_wants_proofs_gets_an_address_for_health(flags: list[str], asks: bool, own: list[str]) -> None:
    found = read(scheduler=flags)[SCHEDULER]
    assert (asks_for_proofs(found), health_flags(found)) == (asks, own)


def test_every_refused_setting_is_one_line_with_its_program() -> None:
    common = "--log-level=loud"
    with pytest.raises(SettingsRefused) as refused:
        read(scheduler=["--max-waiting=0", common], worker=["--max-rows=x", common])
    assert str(refused.value).splitlines() == [
        "scheduler: --max-waiting is 0; it must be a whole number from 1 to 1,000,000",
        "scheduler and worker: --log-level is 'loud'; it must be one of debug, info, warning, error",
        "worker: --max-rows is 'x'; it must be a whole number, at least 1",
    ]


def test_a_gateway_is_read_by_its_own_rules() -> None:
    assert read(gateway=["--listen=127.0.0.1:0"])[GATEWAY]["tls_cert"] is None
    with pytest.raises(SettingsRefused, match=r"^gateway: --tls-cert and --tls-key are missing"):
        read(gateway=["--listen=0.0.0.0:0"])


def test_help_in_the_flags_of_a_program_is_its_help() -> None:
    with pytest.raises(HelpAsked, match="--page-size"):
        read(worker=["--help"])


def test_a_reader_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu_worker").mkdir()
    (tmp_path / "gpu_worker" / "__init__.py").write_text("raise RuntimeError('no worker')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with pytest.raises(SettingsRefused, match="the settings cannot be read: RuntimeError: no worker"):
        read(worker=[])
