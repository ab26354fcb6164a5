"""What the pages say can be pasted: every block of commands and every program of README and handbook, as it stands."""

import re
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.pages.blocks import PAGES, REASONS, ROOT, Block, blocks
from tests.pages.session import run, script, why_not

_WHY_NOT = why_not()
_MARKED = [block for page in PAGES for block in blocks(page) if block.reason]
# The README's session runs while `make serve` does.
_FIRST = {"README.md": ("make serve",), "scheduler_svc/deploy/README.md": ()}


@pytest.fixture
def short() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="p-"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.pages
@pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_as_they_stand(page: str, tmp_path: Path, short: Path) -> None:
    found = blocks(page)
    output = run(script(found, _FIRST[page]), tmp_path, short)
    assert re.findall(r"^== (.*)$", output, re.M) == [block.name for block in found if not block.reason]


@pytest.mark.parametrize(
    "block", [block for page in PAGES for block in blocks(page) if block.reason], ids=Block.name.fget
)
def test_a_block_that_is_not_run_says_why(block: Block) -> None:
    assert block.reason in REASONS
    pytest.skip(block.reason)


def test_each_page_has_links_to_what_is_there() -> None:
    missing = []
    for path in (ROOT / "README.md", *ROOT.glob("[!.]*/**/*.md")):
        for target in re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", path.read_text()):
            if "://" not in target and not (path.parent / target).exists():
                missing.append(f"{path.relative_to(ROOT)}: {target}")
    assert missing == []


def test_each_page_names_modules_and_folders_that_are_there() -> None:
    found = [path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.*"), *ROOT.glob("[!.]*/**/*.*"))]
    ends = {path[start:] for path in found for start in _starts(path)}
    folders = {end for path in found for end in map(str, Path(path).parents) if end != "."}
    ends |= {f"{folder[start:]}/" for folder in folders for start in _starts(folder)}
    missing = []
    for path in [path for path in found if path.endswith("README.md")]:
        text = (ROOT / path).read_text()
        named = re.findall(r"`([\w/]+(?:\.py|\.cpp|\.proto|/))`", text)
        for shown in re.findall(r"^```text\n(.*?)^```$", text, re.M | re.S):
            named += re.findall(r"[\w/]+\.py\b", shown)
        missing += [f"{path}: {name}" for name in named if name not in ends and not name.startswith("google/")]
    assert missing == []


def _starts(path: str) -> list[int]:
    """Where each name in a path begins."""
    return [0, *(match.end() for match in re.finditer("/", path))]


def test_a_strict_client_takes_the_handbooks_certificate(tmp_path: Path) -> None:
    (text,) = [block.text for block in blocks("scheduler_svc/deploy/README.md") if "openssl req" in block.text]
    (command,) = re.findall(r"^openssl req .*?[^\\]$", text, re.M | re.S)
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True, capture_output=True)
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    theirs = ssl.create_default_context(cafile=tmp_path / "cert.pem")
    # The default from Python 3.13 on.
    theirs.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = ours.wrap_bio(to_server, to_client, server_side=True)
    client = theirs.wrap_bio(to_client, to_server, server_hostname="localhost")
    for end in (client, server, client, server):
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    assert client.version() == "TLSv1.3"
