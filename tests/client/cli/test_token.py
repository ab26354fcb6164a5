"""`tandem token new` and the flags of tokens, as a user runs them."""

import hashlib
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tandem_client.cli.__main__ import app
from tests.rigs.processes import run


def tandem(*words: str, **variables: str) -> Result:
    return CliRunner(env=variables).invoke(app, words)


def test_the_entry_has_the_hash_and_the_token_is_shown_once() -> None:
    done = tandem("token", "new", "--tenant", "a.b", "--rights", "control", "--rights", "inference", "--name", 'x "y"')
    assert done.exit_code == 0, done.stderr
    token = done.stderr.split()[-1]
    assert token.startswith("tandem_") and len(token) == 50
    [entry] = tomllib.loads(done.stdout)["tenants"]["a.b"]["tokens"]
    digest = hashlib.sha256(token.encode()).hexdigest()
    assert entry == {"hash": f"sha256:{digest}", "rights": ["control", "inference"], "name": 'x "y"'}
    assert token not in done.stdout


@pytest.mark.parametrize(
    ("name", "written"),
    [("\n\\", r'"\u000a\u005c"'), ("\U000e0001\U0001f600", '"\\U000e0001\U0001f600"'), ("a\udcff", '"a?"')],
)
def test_every_name_is_toml(name: str, written: str) -> None:
    done = tandem("token", "new", "--name", name)
    [entry] = tomllib.loads(done.stdout)["tenants"]["default"]["tokens"]
    assert done.stdout.endswith(f"name = {written}\n")
    assert entry["name"] == name.replace("\udcff", "?")


def test_a_token_can_go_to_a_file_and_entries_can_be_appended(tmp_path: Path) -> None:
    entries = ""
    for number in range(2):
        path = tmp_path / f"{number}.token"
        done = tandem("token", "new", "--tenant", "acme", "--expires", "2999-01-01", "--out", str(path))
        assert (done.exit_code, done.stderr) == (0, "")
        assert path.stat().st_mode & 0o777 == 0o600
        entries += done.stdout
    tokens = tomllib.loads(entries)["tenants"]["acme"]["tokens"]
    for number, entry in enumerate(tokens):
        token = (tmp_path / f"{number}.token").read_text().strip()
        assert entry["hash"] == f"sha256:{hashlib.sha256(token.encode()).hexdigest()}"
        assert entry["expires"].isoformat() == "2999-01-01T00:00:00+00:00"
    again = run("tandem_client.cli", "token", "new", "--out", str(tmp_path / "0.token"))
    assert again.returncode == 1 and "File exists" in again.stderr


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--tenant", "a/b", "--tenant is 'a/b'; it must have 1 to 64"),
        ("--expires", "soon", "--expires is 'soon'; it must be like 2027-01-01"),
        ("--expires", "2020-01-01", "--expires is 2020-01-01; it must be in the future"),
        ("--rights", "all", "--rights"),
    ],
)
def test_wrong_flags_are_named(flag: str, value: str, message: str) -> None:
    done = tandem("token", "new", flag, value)
    assert done.exit_code == 2 and message in done.stderr


def test_a_token_is_read_from_a_file_or_a_variable_and_never_printed(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("tandem_secret\n")
    remote = ("--address", "192.0.2.1:1", "--timeout", "1")
    for words, variables in ((("--token-file", str(path)), {}), ((), {"TANDEM_TOKEN": "tandem_secret"})):
        done = tandem("info", *remote, *words, **variables)
        assert done.exit_code == 2
        assert "without encryption" in done.stderr
        assert "tandem_secret" not in done.stderr + done.stdout
    missing = run("tandem_client.cli", "info", *remote, "--token-file", str(tmp_path / "none"))
    assert (missing.returncode, missing.stderr) == (1, f"error: {tmp_path}/none: No such file or directory\n")
    unknown = tandem("info", "--token", "tandem_secret")
    assert unknown.exit_code == 2 and "tandem_secret" not in unknown.stderr
