"""The token file: TOML with tenants, the hashes of their tokens, and their limits.

Owns the format and its bounds, and the last good content: the file is read again when it has changed, and one that
becomes wrong or unreadable changes nothing but the log, so a typing error locks no caller out. An error names the file,
the line, the tenant, the field, the value and the limit. It never contains a hash, because people paste tokens where
hashes belong.
"""

import logging
import math
import os
import re
import stat
import threading
import tomllib
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, cast

from tandem.v1.control_pb2 import ListRequestsRequest

from scheduler_svc.core.messages.operators import TenantLimits
from scheduler_svc.door.tenant import (
    MAX_PRIORITY,
    MIN_PRIORITY,
    CallerLimits,
    Certificate,
    Right,
    Rights,
    Table,
    Tenant,
    Token,
)
from tandem_contract.files import FileState, state_of
from tandem_contract.limits import limit_at
from tandem_contract.needed import started
from tandem_contract.plural import counted

log = logging.getLogger("tandem.core")

TOKEN_PREFIX = "tandem_"
MAX_FILE_BYTES = 16 << 20
MAX_TENANTS = 10_000
# The most of all tenants together, certificates included.
MAX_TOKENS = 100_000
MAX_TENANT_CHARS = limit_at(ListRequestsRequest, "tenant").chars
_NAME = re.compile(rf"(?!{TOKEN_PREFIX})[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_TENANT_CHARS - 1}}}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_MAX_CERTIFICATE_CHARS = 256
# Only the owner may write the file, and only owner and group may read it.
_FORBIDDEN_MODE = 0o137
_MAX_COUNT = 1 << 40
_FIELDS = (
    "tokens", "certificates", "requests_per_minute", "tokens_per_minute", "queue_share", "row_share", "priority",
    "max_new_tokens",
)  # fmt: skip


class TokenFileError(Exception):
    """The file cannot be read, or its content is wrong."""


class _UnreadError(TokenFileError):
    """The file cannot be read now."""


class _FieldError(Exception):
    """`field` of a tenant is wrong."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field


def read(path: Path) -> tuple[Tenant, ...]:
    """Returns the tenants of the file, in order. Raises TokenFileError."""
    try:
        # A pipe without a writer must not stop the service.
        with open(path, "rb", opener=_without_waiting) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise TokenFileError(f"{path} is not a file")
            if mode & _FORBIDDEN_MODE:
                raise TokenFileError(f"{path} has mode {mode & 0o777:04o}; it must be 0600 or 0640 (chmod 600 {path})")
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _UnreadError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise TokenFileError(f"{path} has more than {MAX_FILE_BYTES:,} bytes, which is the limit")
    return parse(data, path)


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def parse(data: bytes, path: Path) -> tuple[Tenant, ...]:
    """Returns the tenants of the file's content. Raises TokenFileError; `path` is for its message."""
    try:
        text = data.decode("utf-8-sig")
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # The error of a wrong byte would contain the bytes around it.
        what = "it has a byte that is not UTF-8" if isinstance(error, UnicodeDecodeError) else error
        raise TokenFileError(f"{path} is not TOML: {what}") from None
    tables: Any = content.pop("tenants", {})
    if content:
        name = next(iter(content))
        raise TokenFileError(f"{path} has an unknown setting {shown(name)}; it consists of tables [tenants.NAME]")
    if not isinstance(tables, dict) or not tables:
        raise TokenFileError(f"{path} names no tenant; it needs at least one table [tenants.NAME]")
    tables = cast("dict[str, Any]", tables)
    if len(tables) > MAX_TENANTS:
        raise TokenFileError(f"{path} has {len(tables):,} tenants; the limit is {MAX_TENANTS:,}")
    tenants: list[Tenant] = []
    for name, table in tables.items():
        try:
            tenants.append(_tenant(name, table))
        except _FieldError as error:
            named = name if _NAME.fullmatch(name) else shown(name)
            place = ".".join(filter(None, ("tenants", named, error.field)))
            raise TokenFileError(f"{path}, {line_of(text, name, error.field)}: {place} {error}") from None
    _check_unique(tenants, path)
    return tuple(tenants)


def _tenant(name: str, table: Any) -> Tenant:
    if not _NAME.fullmatch(name):
        wanted = f"it must have 1 to {MAX_TENANT_CHARS} letters, digits, dots, dashes or underscores and begin with"
        raise _FieldError("", f"is not a name of a tenant; {wanted} a letter or digit")
    if not isinstance(table, dict):
        raise _FieldError("", f"is {shown(table)}; it must be a table")
    table = cast("dict[str, Any]", table)
    _check_keys("", table, _FIELDS)
    low, high = _priority(table.get("priority", [0, 0]))
    return Tenant(
        name=name,
        tokens=tuple(_each("tokens", table.get("tokens", []), _token)),
        certificates=tuple(_each("certificates", table.get("certificates", []), _certificate)),
        caller_limits=CallerLimits(
            min_priority=low, max_priority=high, max_new_tokens=_count(table, "max_new_tokens", (1 << 30) - 1)
        ),
        limits=TenantLimits(
            requests_per_minute=_count(table, "requests_per_minute", 1_000_000_000),
            tokens_per_minute=_count(table, "tokens_per_minute", _MAX_COUNT),
            queue_share=_share(table, "queue_share"),
            row_share=_share(table, "row_share"),
        ),
    )


def _each(field: str, values: Any, read_one: Callable[[str, Any], Any]) -> Iterable[Any]:
    if not isinstance(values, list):
        raise _FieldError(field, f"is {shown(values)}; it must be a list")
    values = cast("list[Any]", values)
    if len(values) > MAX_TOKENS:
        raise _FieldError(field, f"is {len(values):,} long; the limit is {MAX_TOKENS:,}")
    for idx, value in enumerate(values):
        yield read_one(f"{field}[{idx}]", value)


def _token(field: str, value: Any) -> Token:
    if not isinstance(value, dict):
        raise _FieldError(field, 'is not a table like { hash = "sha256:…" }; `tandem token new` prints one')
    table = cast("dict[str, Any]", value)
    _check_keys(field, table, ("hash", "rights", "expires", "name"))
    written = table.get("hash")
    match = _HASH.fullmatch(written) if isinstance(written, str) else None
    if match is None:
        what = "is missing" if written is None else "is not a hash"
        raise _FieldError(f"{field}.hash", f"{what}; it must be sha256: and 64 hexadecimal digits in lower case")
    if not isinstance(table.get("name", ""), str):
        raise _FieldError(f"{field}.name", f"is {shown(table['name'])}; it must be a text")
    return Token(hash=bytes.fromhex(match[1]), rights=_rights(field, table), expires=_expires(field, table))


def _certificate(field: str, value: Any) -> Certificate:
    table: dict[str, Any] = {"name": value} if isinstance(value, str) else value
    if not isinstance(table, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _FieldError(field, f"is {shown(value)}; it must be a name, or a table with name and rights")
    _check_keys(field, table, ("name", "rights"))
    name = table.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= _MAX_CERTIFICATE_CHARS:
        raise _FieldError(f"{field}.name", f"must be a text of 1 to {_MAX_CERTIFICATE_CHARS} characters")
    return Certificate(name=name, rights=_rights(field, table))


def _rights(field: str, table: Mapping[str, Any]) -> Rights:
    values: Any = table.get("rights", [Right.INFERENCE])
    names = [right.value for right in Right]
    if not isinstance(values, list) or not values:
        given = shown(cast("object", values))
        raise _FieldError(f"{field}.rights", f"is {given}; it must be a list of {', '.join(names)}")
    rights = cast("list[Any]", values)
    for value in rights:
        if value not in names:
            raise _FieldError(f"{field}.rights", f"has {shown(value)}; the rights are {', '.join(names)}")
    return frozenset(Right(value) for value in rights)


def _expires(field: str, table: Mapping[str, Any]) -> float:
    value = table.get("expires")
    if value is None:
        return math.inf
    if not isinstance(value, datetime) or value.tzinfo is None:
        # A time without a zone would mean another moment on another machine.
        raise _FieldError(f"{field}.expires", f"is {shown(value)}; it must be like 2027-01-01T00:00:00Z")
    return value.timestamp()


def _priority(value: Any) -> tuple[int, int]:
    limit = f"two whole numbers from {MIN_PRIORITY} to {MAX_PRIORITY}, the smaller one first"
    pair: list[Any] = cast("list[Any]", value) if isinstance(value, list) else []
    if len(pair) != 2 or any(type(one) is not int for one in pair):
        raise _FieldError("priority", f"is {shown(cast('object', value))}; it must be {limit}")
    if not MIN_PRIORITY <= pair[0] <= pair[1] <= MAX_PRIORITY:
        raise _FieldError("priority", f"is {pair}; it must be {limit}")
    return pair[0], pair[1]


def _count(table: Mapping[str, Any], field: str, limit: int) -> int | None:
    value = table.get(field)
    if value is not None and (type(value) is not int or not 1 <= value <= limit):
        raise _FieldError(field, f"is {shown(value)}; it must be a whole number from 1 to {limit:,}")
    return value


def _share(table: Mapping[str, Any], field: str) -> float | None:
    value = table.get(field)
    if value is not None and (type(value) not in (int, float) or not 0 < value <= 1):
        raise _FieldError(field, f"is {shown(value)}; it must be above 0 and at most 1")
    return None if value is None else float(value)


def _check_keys(field: str, table: Mapping[str, Any], settings: Iterable[str]) -> None:
    if unknown := [key for key in table if key not in settings]:
        raise _FieldError(field, f"has an unknown setting {shown(unknown[0])}; it can have {', '.join(settings)}")


def _check_unique(tenants: Iterable[Tenant], path: Path) -> None:
    """Raises TokenFileError if two entries are the same, or if all tenants together have too many."""
    owners: dict[bytes | str, str] = {}
    for tenant in tenants:
        for kind, keys in (
            ("token", [token.hash for token in tenant.tokens]),
            ("certificate", [certificate.name for certificate in tenant.certificates]),
        ):
            for idx, key in enumerate(keys):
                if key in owners:
                    raise TokenFileError(
                        f"{path}: tenants.{tenant.name}.{kind}s[{idx}] is also a {kind} of tenants.{owners[key]}"
                    )
                owners[key] = tenant.name
    if len(owners) > MAX_TOKENS:
        raise TokenFileError(f"{path} has {len(owners):,} tokens and certificates; the limit is {MAX_TOKENS:,}")


def line_of(text: str, tenant: str, field: str) -> str:
    """Returns `line N` of a tenant's field, as well as the text shows it: of its table if the field is elsewhere."""
    header = re.compile(rf"\s*\[+\s*tenants\s*\.\s*[\"']?{re.escape(tenant)}[\"']?\s*[\].]")
    setting = re.compile(rf"\s*(\[\[.*\.\s*)?{field.partition('[')[0] or '$^'}\s*[=\]]")
    header_number, is_inside = 0, False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("["):
            is_inside = header.match(line) is not None
            header_number = header_number or (number if is_inside else 0)
        if is_inside and setting.match(line):
            return f"line {number}"
    return f"line {header_number or 1}"


def shown(value: object) -> str:
    """The value, cut short. Never a token that was pasted into the wrong place."""
    text = value.isoformat() if isinstance(value, datetime | date | time) else repr(value)
    if TOKEN_PREFIX in text:
        return "a token"
    return text if len(text) <= 40 else f"{text[:39]}…"


class TokenFile:
    """The token file and its last good content."""

    def __init__(self, path: Path) -> None:
        """Reads the file. Raises TokenFileError."""
        self._path = path
        self._state = state_of(path)
        self._failure: tuple[FileState | None, str] | None = None
        self.tenants = read(path)
        self.table = Table(self.tenants)
        self._reader: threading.Thread | None = None
        self._read: tuple[tuple[Tenant, ...], Table] | None = None

    def poll(self) -> bool:
        """Looks at the file; returns whether its content was replaced. Call it about once a second.

        A thread reads the file, because a large one takes seconds, and a later call takes what it has read.
        """
        if self._reader is not None:
            if self._reader.is_alive():
                return False
            self._reader = None
            if self._read is not None:
                (self.tenants, self.table), self._read = self._read, None
                log.info("%s was read: %s", self._path, summary(self.tenants))
                return True
        state = state_of(self._path)
        if state is None or state != self._state:
            self._state = state
            try:
                self._reader = started(threading.Thread(target=self._read_again, args=(state,), daemon=True))
            except OSError:
                # The next look tries again.
                self._state = None
        return False

    def _read_again(self, state: FileState | None) -> None:
        try:
            tenants = read(self._path)
            self._read, self._failure = (tenants, Table(tenants)), None
        except TokenFileError as error:
            if isinstance(error, _UnreadError):
                # The next look tries again, because the cause may not be the file.
                self._state = None
            if (failure := (state, str(error))) != self._failure:
                self._failure = failure
                log.error("tokens: %s; the tokens read before stay in force", error)


def summary(tenants: tuple[Tenant, ...]) -> str:
    """Returns how many tenants, tokens and certificates there are."""
    num_tokens = sum(len(tenant.tokens) for tenant in tenants)
    num_certificates = sum(len(tenant.certificates) for tenant in tenants)
    return (
        f"{counted(len(tenants), 'tenant')}, {counted(num_tokens, 'token')}, {counted(num_certificates, 'certificate')}"
    )
