"""The token file: what it gives, what is refused and in which words, and that changes are taken over."""

import errno
import math
import os
from hashlib import sha256
from pathlib import Path
from unittest import mock

import pytest

from scheduler_svc.core.messages.operators import TenantLimits
from scheduler_svc.door import token_file
from scheduler_svc.door.tenant import CallerLimits, Right, Table
from scheduler_svc.door.token_file import TokenFile, TokenFileError, parse, read
from scheduler_svc.wire import tenants as wire
from tests.rigs.processes import no_threads

TOKEN = b"tandem_abc"
HASH = f"sha256:{sha256(TOKEN).hexdigest()}"
FULL = f"""
[tenants.acme]
tokens = [{{ hash = "{HASH}", rights = ["inference", "control"], expires = 2027-01-01T00:00:00Z, name = "ci" }}]
certificates = ["acme.example", {{ name = "ops.example", rights = ["metrics"] }}]
requests_per_minute = 600
tokens_per_minute = 200_000
queue_share = 0.5
row_share = 1
priority = [-10, 10]
max_new_tokens = 4096

[tenants."b.2"]
"""
EXPIRY = 1_798_761_600.0


def refusal(content: str | bytes) -> str:
    data = content.encode() if isinstance(content, str) else content
    with pytest.raises(TokenFileError) as caught:
        parse(data, Path("t.toml"))
    return str(caught.value)


def write(path: Path, content: str, mode: int = 0o600) -> Path:
    """Replaces the file at once, as an editor does."""
    fresh = path.with_suffix(".new")
    fresh.write_text(content)
    fresh.chmod(mode)
    fresh.rename(path)
    return path


def test_every_setting_arrives() -> None:
    acme, other = parse(FULL.encode(), Path("t.toml"))
    assert acme.caller_limits == CallerLimits(min_priority=-10, max_priority=10, max_new_tokens=4096)
    limits = {"requests_per_minute": 600, "tokens_per_minute": 200_000, "queue_share": 0.5, "row_share": 1.0}
    assert acme.limits == TenantLimits(**limits)
    [token] = acme.tokens
    assert (token.hash, token.rights) == (sha256(TOKEN).digest(), {Right.INFERENCE, Right.CONTROL})
    assert token.expires == EXPIRY
    assert [(each.name, set(each.rights)) for each in acme.certificates] == [
        ("acme.example", {Right.INFERENCE}), ("ops.example", {Right.METRICS})
    ]  # fmt: skip
    assert (other.name, other.tokens, other.caller_limits, other.limits) == ("b.2", (), CallerLimits(), TenantLimits())


def test_the_file_may_begin_with_a_byte_order_mark() -> None:
    assert parse(FULL.encode("utf-8-sig"), Path("t.toml")) == parse(FULL.encode(), Path("t.toml"))


def test_front_ends_get_the_same_tenants() -> None:
    both = parse(FULL.encode(), Path("t.toml"))
    for before, after in zip(both, wire.tenants_of(wire.message_of(both)), strict=True):
        assert (after.name, after.tokens, after.certificates) == (before.name, before.tokens, before.certificates)
        assert after.caller_limits == before.caller_limits
        assert after.limits == TenantLimits()


def test_a_token_is_found_until_it_expires() -> None:
    table = Table(parse(FULL.encode(), Path("t.toml")))
    found = table.of_token(TOKEN, EXPIRY - 1)
    assert found is not None and (found.tenant, found.limits.max_new_tokens) == ("acme", 4096)
    assert table.of_token(TOKEN, EXPIRY) is None
    assert table.of_token(TOKEN + b"x", 0.0) is None
    assert table.of_token(sha256(TOKEN).digest(), 0.0) is None
    by_name = table.of_certificate(["unknown", "ops.example"])
    assert by_name is not None and by_name.rights == {Right.METRICS}
    assert table.of_certificate([]) is None
    assert (found.proof, by_name.proof) == (sha256(TOKEN).digest(), "ops.example")
    endless = Table(parse(f'[tenants.a]\ntokens = [{{ hash = "{HASH}" }}]'.encode(), Path("t")))
    assert endless.of_token(TOKEN, math.nextafter(math.inf, 0)) is not None


def test_proofs_of_a_tenant_with_the_same_rights_share_their_owner() -> None:
    # An object for each of 100,000 tokens would take 0.2 s of the time in which callers are served.
    entries = ", ".join(f'{{ hash = "sha256:{i:064x}" }}' for i in range(3))
    content = f"[tenants.a]\ntokens = [{entries}]\ncertificates = ['a.example', {{ name = 'b', rights = ['metrics'] }}]"
    table = Table(parse(content.encode(), Path("t.toml")))
    inference, metrics = ((*(i.to_bytes(32) for i in range(3)), "a.example"), "b")
    assert len({id(table.of_proof(proof)) for proof in inference}) == 1
    owner = table.of_proof(metrics)
    assert owner is not None and (owner.tenant, owner.rights) == ("a", {Right.METRICS})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "t.toml names no tenant"),
        ("x = 1", "t.toml has an unknown setting 'x'"),
        ("[tenants", "t.toml is not TOML: Expected ']'"),
        (b"\xff", "t.toml is not TOML: it has a byte that is not UTF-8"),
        ("[tenants.a]\n\nqueue_share = 1.5", "t.toml, line 3: tenants.a.queue_share is 1.5; it must be above 0"),
        ("[tenants.a]\nrow_share = 0", "line 2: tenants.a.row_share is 0; it must be above 0 and at most 1"),
        ("[tenants.a]\nrow_share = nan", "line 2: tenants.a.row_share is nan"),
        ("[tenants.a]\n[tenants.b]\nrow_share = true", "line 3: tenants.b.row_share is True"),
        ("[tenants.a]\nmax_new_tokens = 0", "is 0; it must be a whole number from 1 to 1,073,741,823"),
        ("[tenants.a]\nrequests_per_minute = 1.5", "requests_per_minute is 1.5; it must be a whole number"),
        ("[tenants.a]\npriority = [5, 1]", "priority is [5, 1]; it must be two whole numbers from -1000 to 1000"),
        ("[tenants.a]\npriority = [0, 1001]", "priority is [0, 1001]"),
        ("[tenants.a]\npriority = 3", "priority is 3"),
        ("[tenants.a]\ntoken = 1", "tenants.a has an unknown setting 'token'; it can have tokens, certificates"),
        ("[tenants.'a b']", "line 1: tenants.'a b' is not a name of a tenant"),
        ("[tenants.'']", "tenants.'' is not a name of a tenant"),
        (f"[tenants.{'a' * 65}]", "is not a name of a tenant; it must have 1 to 64"),
        ("tenants.a = 1", "tenants.a is 1; it must be a table"),
        ("[tenants.a]\ntokens = ['abc']", "tenants.a.tokens[0] is not a table"),
        ("[tenants.a]\ntokens = [{}]", "tenants.a.tokens[0].hash is missing"),
        (f"[tenants.a]\ntokens = [{{hash = '{HASH.upper()}'}}]", "tokens[0].hash is not a hash"),
        (f"[tenants.a]\n[[tenants.a.tokens]]\nhash = '{HASH}'\nrights = ['admin']", "has 'admin'; the rights are"),
        (f"[tenants.a]\ntokens = [{{hash = '{HASH}', rights = []}}]", "tokens[0].rights is []"),
        (f"[tenants.a]\ntokens = [{{hash = '{HASH}', expires = 2027-01-01}}]", "expires is 2027-01-01; it must be"),
        (f"[tenants.a]\ntokens = [{{hash = '{HASH}', expires = 2027-01-01T00:00:00}}]", "like 2027-01-01T00:00:00Z"),
        ("[tenants.a]\ncertificates = [1]", "certificates[0] is 1"),
        ("[tenants.a]\ncertificates = ['']", "certificates[0].name must be a text of 1 to 256"),
        (
            f"[tenants.a]\ntokens = [{{hash = '{HASH}'}}]\n[tenants.b]\ntokens = [{{hash = '{HASH}'}}]",
            "tenants.b.tokens[0] is also a token of tenants.a",
        ),
    ],
)
def test_an_error_names_line_tenant_field_value_and_limit(content: str | bytes, words: str) -> None:
    assert words in refusal(content)


@pytest.mark.parametrize(
    "content",
    [
        "[tenants.a]\ntokens = '{}'",
        "[tenants.a]\ntokens = ['{}']",
        "[tenants.a]\ntokens = [{{ hash = '{}' }}]",
        "[tenants.a]\ncertificates = '{}'",
        "[tenants.a]\n{} = 1",
        "[tenants.{}]\nx = 1",
        "{} = 1",
        "[tenants.a]\npriority = '{}'",
        "[tenants.a]\ntokens = {}",
    ],
)
def test_a_token_in_the_wrong_place_is_in_no_message(content: str) -> None:
    token = f"tandem_{'Q' * 43}"
    assert "QQ" not in refusal(content.format(token))


def test_the_bounds_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_file, "MAX_TENANTS", 2)
    monkeypatch.setattr(token_file, "MAX_TOKENS", 3)
    many = "\n".join(f"[tenants.t{i}]" for i in range(3))
    assert "has 3 tenants; the limit is 2" in refusal(many)
    names = ", ".join(f"'{i}'" for i in range(4))
    assert "tenants.a.certificates is 4 long; the limit is 3" in refusal(f"[tenants.a]\ncertificates = [{names}]")
    two = "[tenants.a]\ncertificates = ['1', '2']\n[tenants.b]\ncertificates = ['3', '4']"
    assert "has 4 tokens and certificates; the limit is 3" in refusal(two)
    monkeypatch.setattr(token_file, "MAX_FILE_BYTES", 10)
    with pytest.raises(TokenFileError, match="more than 10 bytes"):
        read(write(tmp_path / "t.toml", FULL))


def test_a_file_that_others_may_use_or_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    modes = [0o644, 0o660, 0o604, 0o700]
    for path, problem in (
        *((write(tmp_path / f"{m}", FULL, m), f"has mode {m:04o}; it must be 0600 or 0640") for m in modes),
        (tmp_path / "none.toml", "cannot be read: No such file"),
        (tmp_path / "pipe", "pipe is not a file"),
        (tmp_path, "cannot be read: Is a directory"),
    ):
        with pytest.raises(TokenFileError, match=problem):
            read(path)


def settled(file: TokenFile) -> bool:
    """Polls until a thread that reads has ended that began after now; returns whether the content was replaced."""
    is_replaced = False
    for _ in range(3):
        # A file that is missing is read at each poll.
        if file._reader is not None:
            file._reader.join()
        is_replaced |= file.poll()
    return is_replaced


def test_changes_are_taken_over_and_mistakes_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "t.toml", FULL)
    file = TokenFile(path)
    assert not settled(file)
    write(path, FULL.replace("acme", "other"))
    assert settled(file)
    assert [tenant.name for tenant in file.tenants] == ["other", "b.2"]
    found = file.table.of_token(TOKEN, 0.0)
    assert found is not None and found.tenant == "other"

    for wrong, words in (("[tenants.a]\npriority = 1", "tenants.a.priority is 1"), ("[tenants.a]", "has mode 0644")):
        write(path, wrong, 0o644 if "mode" in words else 0o600)
        assert not settled(file)
        assert words in caplog.text
        assert file.table.of_token(TOKEN, 0.0) == found
    path.unlink()
    assert not settled(file)
    assert "cannot be read" in caplog.text
    assert file.table.of_token(TOKEN, 0.0) == found

    write(path, "[tenants.a]")
    assert settled(file)
    assert file.table.of_token(TOKEN, 0.0) is None
    assert token_file.summary(file.tenants) == "1 tenant, 0 tokens, 0 certificates"


def test_a_change_is_read_when_a_thread_can_be_started_again(tmp_path: Path) -> None:
    path = write(tmp_path / "t.toml", FULL)
    file = TokenFile(path)
    write(path, FULL.replace("acme", "other"))
    with no_threads():
        assert not file.poll() and not file.poll()
    assert settled(file) and file.tenants[0].name == "other"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.EIO])
def test_a_file_that_could_not_be_read_is_read_later(
    number: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "t.toml", FULL)
    file = TokenFile(path)
    write(path, FULL.replace("acme", "other"))
    with mock.patch.object(token_file, "_without_waiting", side_effect=OSError(number, "not now")):
        assert not settled(file) and not settled(file)
    assert caplog.text.count("cannot be read: not now") == 1
    assert settled(file) and file.tenants[0].name == "other"
    assert not settled(file)
