"""The set-up of a checkout: what the machine lacks, the environment, and torch's build, from indexes on loopback."""

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("checkout_install", ROOT / ".ci" / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def add_wheel(index: Path, name: str, version: str, requires: str = "") -> None:
    """Puts a wheel of no code into an index of static files."""
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += f"Requires-Dist: {requires}\n" if requires else ""
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as written:
        written.writestr(f"{info}/METADATA", metadata)
        written.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        written.writestr(f"{info}/RECORD", "")
    links = []
    for path in sorted(folder.glob("*.whl")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        links.append(f'<a href="{path.name.replace("+", "%2B")}#sha256={digest}">{path.name}</a>')
    (folder / "index.html").write_text("<html><body>" + "<br>".join(links) + "</body></html>")


@pytest.fixture(scope="module")
def indexes(install: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of two indexes: pypi has torch with CUDA, cpu has it without. empty has nothing."""
    folder, version = tmp_path_factory.mktemp("indexes"), install.torch_version()
    add_wheel(folder / "pypi", "torch", version, "nvidia-cublas==13.1")
    add_wheel(folder / "pypi", "nvidia-cublas", "13.1")
    add_wheel(folder / "cpu", "torch", f"{version}+cpu")
    (folder / "empty").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


VENV = Path(sys.prefix)


@functools.cache
def asked_once(install: ModuleType) -> Callable[..., object]:
    return functools.cache(install.planned_files)


@pytest.fixture
def pips_index(install: ModuleType, indexes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pip is configured for the index with CUDA's build, and for nothing else. It is asked once for all tests."""
    monkeypatch.setattr(install, "planned_files", asked_once(install))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{indexes}/pypi")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")


@pytest.mark.usefixtures("pips_index")
@pytest.mark.parametrize(
    ("setting", "gpu", "answers", "build", "says"),
    [
        ("", False, "cpu", "cpu", "no GPU was found"),
        ("", False, "empty", "cuda", "does not answer; TORCH=URL names another"),
        ("", True, "cpu", "cuda", "a GPU was found"),
        ("cuda", False, "cpu", "cuda", "TORCH is cuda"),
        ("cpu", True, "cpu", "cpu", "TORCH is cpu"),
        ("{indexes}/cpu", True, "empty", "cpu", "TORCH is http://127.0.0.1:"),
    ],
)
def test_the_build_of_torch(
    install: ModuleType, indexes: str, monkeypatch: pytest.MonkeyPatch,
    setting: str, gpu: bool, answers: str, build: str, says: str,
) -> None:  # fmt: skip
    """With its true size, before pip installs it."""
    monkeypatch.setattr(install, "CPU_INDEX", f"{indexes}/{answers}")
    torch = install.choose_torch(setting.format(indexes=indexes), VENV, gpu=gpu)
    assert torch.options == (("--index-url", f"{indexes}/cpu") if build == "cpu" else ())
    assert torch.is_cuda is (build == "cuda")
    assert says in torch.about
    if build == "cuda":
        assert "with CUDA, 2 packages, 0 MB" in torch.about
    else:
        assert "/cpu, 0 MB" in torch.about


@pytest.mark.usefixtures("pips_index")
def test_pip_installs_the_chosen_build(install: ModuleType, indexes: str, tmp_path: Path) -> None:
    version, options = install.torch_version(), ("--index-url", f"{indexes}/cpu", "--no-deps")
    install.pip(VENV, "--target", str(tmp_path), *options, f"torch=={version}")
    assert [path.name for path in tmp_path.iterdir()] == [f"torch-{version}+cpu.dist-info"]


def test_an_index_that_is_silent_is_left_after_a_limit(
    install: ModuleType, indexes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a name that is never resolved nor a socket that never answers holds the installation."""
    ended = threading.Event()
    assert install.within(0.01, ended.wait) is None
    ended.set()
    monkeypatch.setattr(install, "planned_files", lambda *_: [])
    monkeypatch.setattr(install, "CPU_INDEX", "http://127.0.0.1:9/nothing-listens")
    torch = install.choose_torch("", VENV, gpu=False)
    assert torch.options == ()
    assert "unknown number of packages, unknown size" in torch.about


@pytest.mark.parametrize("setting", ["CPU", "rocm", "2.13.0+cpu", "/wheels"])
def test_an_unknown_build_is_refused(install: ModuleType, setting: str) -> None:
    with pytest.raises(install.Refused, match="it must be cpu, cuda or the address of a package index"):
        install.choose_torch(setting, VENV, gpu=False)


@pytest.fixture(params=["quick", pytest.param("real", marks=pytest.mark.long)])
def python(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python that makes environments: this one, or a program that makes one of this one's packages at once."""
    if request.param == "quick":
        program = tmp_path / "python"
        script = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
        program.write_text(
            f'#!/bin/sh\nrm -rf "$4" && mkdir -p "$4/bin" && cd "$4/bin" || exit 1\n'
            f"cat > python <<'END'\n{script}END\nchmod +x python\n"
        )
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.usefixtures("python")
@pytest.mark.parametrize("left", ["nothing", "empty folder", "no pip", "a dangling python"])
def test_an_incomplete_environment_is_made_again(
    install: ModuleType, tmp_path: Path, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / ".venv"
    (folder / "bin").mkdir(parents=True)
    if left == "nothing":
        shutil.rmtree(folder)
    elif left == "no pip":
        (folder / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")
        (folder / "bin" / "python").chmod(0o755)
    elif left == "a dangling python":
        (folder / "bin" / "python").symlink_to("/usr/bin/no-such-python")
    install.make_venv(folder)
    done = subprocess.run([folder / "bin" / "python", "-m", "pip", "--version"], capture_output=True, check=False)
    assert done.returncode == 0
    said = "creating .venv\n" if left == "nothing" else ".venv is incomplete: making it again\n"
    assert capsys.readouterr().out == said
    install.make_venv(folder)
    assert capsys.readouterr().out == ""


def test_an_environment_that_cannot_be_made_leaves_nothing(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with Debian's Python without python3-venv, found before anything is made or downloaded."""
    folder = tmp_path / ".venv"
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "ensurepip", None)
        with pytest.raises(install.Refused, match="has no ensurepip: apt install python3-venv"):
            install.make_venv(folder)
    assert not folder.exists()
    # A Python that fails on the way.
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nmkdir -p "$4/bin"; echo "no room"; exit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(install.Refused, match="cannot be made: no room; apt install python3-venv"):
        install.make_venv(folder)
    assert not folder.exists()


def test_what_is_missing_is_named_with_its_package(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    [compiler] = install.warnings(has_gpu=False, develops=False)
    assert compiler.endswith("apt install g++")
    assert [line.rsplit("; ", 1)[1] for line in install.warnings(has_gpu=True, develops=False)] == [
        "apt install g++",
        "apt install python3-dev",
    ]
    (tmp_path / "Python.h").touch()
    (tmp_path / "g++").touch(0o755)
    assert install.warnings(has_gpu=True, develops=True) == []
    with pytest.raises(install.Refused, match=r"of free space, and \.venv takes 9000000000\.0 GB"):
        install.check_room(tmp_path, 9 * 10**18, ".venv")


def test_every_line_of_pip_gives_progress_and_its_errors_stay(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    doing = ""
    lines = {
        "Collecting torch==2.13.0": "resolving torch==2.13.0",
        "  Downloading torch-2.13.0-cp311.whl (899.7 MB)": "downloading torch-2.13.0-cp311.whl (899.7 MB)",
        "Processing ./x.whl": "downloading torch-2.13.0-cp311.whl (899.7 MB)",
        "Installing collected packages: torch": "unpacking torch",
        "Installing collected packages: a, b, c": "unpacking 3 packages",
    }
    for line, expected in lines.items():
        doing = install.doing_of(line, doing)
        assert doing == expected
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(install.Refused, match="pip failed with status 1, see above"):
        install.pip(VENV, "no-such-package-anywhere")
    assert "No matching distribution found for no-such-package-anywhere" in capfd.readouterr().err


def test_progress_is_said_while_nothing_else_is(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    said, enough = [], threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 2:
            enough.set()

    monkeypatch.setattr(install, "say", say)
    monkeypatch.setattr(install, "SAY_SECONDS", 0.001)
    with install.Progress() as progress:
        progress.doing = "unpacking 49 packages"
        assert enough.wait(60)
    assert said[1].endswith(" s: unpacking 49 packages")


def test_serving_needs_no_tools_of_a_developer() -> None:
    """make serve and make demo depend on the serving part alone."""
    for target in ("demo", "serve", "run-worker", "stubs"):
        command = ["make", "--dry-run", "--always-make", target, "PYTHON=python3"]
        planned = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert ".ci/install.py serving" in planned
        assert ".ci/install.py all" not in planned
