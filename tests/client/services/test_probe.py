"""Where the settings of tokens and certificates may be, and what follows."""

from pathlib import Path

import pytest

from tandem_client.services.probe import with_probe

PROBE = "--health-listen=127.0.0.1:0"


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        (["--tokens=t.toml"], {}),
        (["--tokens", "t.toml"], {}),
        (["--tls-cert=c.pem", "--tls-key=k.pem"], {}),
        ([], {"TANDEM_SCHEDULER_TOKENS": "t.toml"}),
        (["--config=FILE"], {}),
        (["--config", "FILE", "--log-level=info"], {}),
        ([], {"TANDEM_SCHEDULER_CONFIG": "FILE"}),
    ],
)
def test_a_scheduler_that_wants_proofs_gets_an_address_for_health(
    tmp_path: Path, flags: list[str], environ: dict[str, str]
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('tokens = "t.toml"\n')
    flags = [flag.replace("FILE", str(file)) for flag in flags]
    environ = {name: value.replace("FILE", str(file)) for name, value in environ.items()}
    assert with_probe(flags, environ) == ([*flags, PROBE], True)
    # An address that is set is used.
    chosen = [*flags, "--health-listen=127.0.0.1:8090"]
    assert with_probe(chosen, environ) == (chosen, True)
    assert with_probe(flags, {**environ, "TANDEM_SCHEDULER_HEALTH_LISTEN": "127.0.0.1:8090"}) == (flags, True)
    file.write_text('tokens = "t.toml"\nhealth_listen = "127.0.0.1:8090"\n')
    reads_file = any(str(file) in value for value in (*flags, *environ.values()))
    assert with_probe(flags, environ) == (flags if reads_file else [*flags, PROBE], True)


@pytest.mark.parametrize("text", ["max_waiting = 3\n", "tokens = \n", None])
def test_another_scheduler_keeps_its_flags(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "settings.toml"
    if text is not None:
        file.write_text(text)
    flags = [f"--config={file}", "--metrics-listen=127.0.0.1:0"]
    assert with_probe(flags, {"TANDEM_TOKEN": "t", "TANDEM_SCHEDULER_MAX_WAITING": "3"}) == (flags, False)
