"""Sets up a checkout: finds what the machine lacks, makes `.venv`, chooses a build of torch, runs pip with progress.

    python3 .ci/install.py venv FOLDER    makes a virtual environment, again if it is broken
    python3 .ci/install.py serving        installs what `make serve` and `make demo` need into .venv
    python3 .ci/install.py all            installs the tools of `make test` and `make check` too
    python3 .ci/install.py versions lowest|newest FOLDER    all of it with the lowest or newest torch and Transformers
                                          that pyproject.toml allows, into an environment of its own

Owns the choice of torch's build (TORCH=cpu, cuda or an index) and every line that an installation prints. Needs the
standard library alone. It changes nothing of pip's configuration, so mirrors and proxies go on to work.
"""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import tomllib
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
# By part: the extras of the project, and what they bring besides torch and the part before, by the constraints.
PARTS = {
    "serving": ("scheduler,chat,gateway,worker", "some 60 other packages, 80 MB"),
    "all": ("scheduler,chat,gateway,worker,dev", "44 tools of a developer, 52 MB"),
}
# What the ranges of pyproject.toml leave open, and `make test-versions` tries at both ends.
OPEN = ("torch", "transformers", "numpy")
# The index with PyTorch's builds for CPUs. Those of PyPI are for CUDA, and ten times as large.
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ANSWER_SECONDS = 4.0
SAY_SECONDS = 10.0
# What .venv takes in the end, with room for what pip unpacks.
CPU_BYTES, CUDA_BYTES = 2_000_000_000, 7_000_000_000
_COMPILERS = ("g++", "c++", "clang++")

T = TypeVar("T")


class Refused(Exception):
    """The installation cannot go on; the message is one line with a remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """The build of torch to install."""

    # Options of pip; none: the index that pip is configured for.
    options: tuple[str, ...] = ()
    # What is said of it, with its size.
    about: str
    is_cuda: bool = False


def say(line: str) -> None:
    """Prints one line at once."""
    print(line, flush=True)


# What the machine lacks


def check_python() -> None:
    """Raises Refused if this Python cannot make virtual environments."""
    for module in ("venv", "ensurepip"):
        try:
            __import__(module)
        except ImportError:
            raise Refused(
                f"{sys.executable} has no {module}: apt install python3-venv (python3-dev and g++ are useful, too)"
            ) from None


def check_room(folder: Path, needed: int, what: str) -> None:
    """Raises Refused if the disk of `folder` has less than `needed` bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise Refused(
            f"{folder} has {readable(free)} of free space, and {what} takes {readable(needed)}: free some, or "
            "move the checkout"
        )


def warnings(*, has_gpu: bool, develops: bool) -> list[str]:
    """A line for each package without which Tandem serves, and what it does without."""
    named = shlex.split(os.environ.get("CXX", ""))[:1]
    warnings = []
    if not any(map(shutil.which, named or _COMPILERS)):
        warnings.append("no C++ compiler: a CPU serves with torch's operators, more slowly; apt install g++")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if (has_gpu or develops) and not header.exists():
        warnings.append(f"no {header}: a GPU's kernels and some tests do not compile; apt install python3-dev")
    return warnings


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU with its driver."""
    places = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/nvidia0"))
    return bool(shutil.which("nvidia-smi")) or any(place.exists() for place in places)


# The virtual environment


def make_venv(folder: Path) -> None:
    """Makes a virtual environment, unless `folder` is one that works. Raises Refused, and leaves no part of one."""
    if _works(folder):
        return
    say(f"{folder.name} is incomplete: making it again" if folder.exists() else f"creating {folder.name}")
    check_python()
    try:
        command = [sys.executable, "-m", "venv", "--clear", str(folder)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode or not _works(folder):
            lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
            raise Refused(f"{folder} cannot be made: {' '.join(lines)[:500]}; apt install python3-venv")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _works(folder: Path) -> bool:
    test = "import sys, pip; sys.exit(sys.version_info < (3, 11))"
    try:
        done = subprocess.run([folder / "bin" / "python", "-c", test], capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


# The build of torch


def torch_version() -> str:
    """The version of torch in the constraints."""
    [version] = re.findall(r"^torch==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    return version


def choose_torch(setting: str, venv: Path, *, gpu: bool) -> Torch:
    """The build to install.

    setting: cpu, cuda, the address of an index, or empty: PyTorch's index for CPUs if there is no GPU and the index
    answers, else what pip is configured for. Raises Refused for other settings.
    """
    if setting not in ("", "cpu", "cuda") and "://" not in setting:
        raise Refused(f"TORCH is {setting!r}; it must be cpu, cuda or the address of a package index")
    version, why = torch_version(), "a GPU was found" if gpu else "TORCH is cuda"
    if setting != "cuda" and (setting or not gpu):
        index = setting if "://" in setting else CPU_INDEX
        wheel = within(ANSWER_SECONDS, lambda: find_wheel(index, version))
        if wheel is not None or setting:
            size = "unknown size" if wheel is None else readable(within(ANSWER_SECONDS, lambda: size_of(wheel)))
            reason = f"TORCH is {setting}" if setting else "no GPU was found"
            return Torch(options=("--index-url", index), about=f"torch {version} from {index}, {size} ({reason})")
        why = f"no GPU was found, but {CPU_INDEX} does not answer; TORCH=URL names another index"
    say(f"asking pip what torch {version} brings")
    files = planned_files(venv, version)
    is_cuda = any(name.startswith("nvidia-") for name, _ in files) if files else gpu or setting == "cuda"
    build = "with CUDA" if is_cuda else "for a CPU"
    count = f"{len(files)} packages" if files else "an unknown number of packages"
    about = f"torch {version} {build}, {count}, {readable(total_size(url for _, url in files))}"
    return Torch(about=f"{about} ({why})" if is_cuda else about, is_cuda=is_cuda)


def find_wheel(index: str, version: str) -> str | None:
    """The address of torch's wheel for this Python in a package index; None if there is none, or no answer."""
    page = f"{index.rstrip('/')}/torch/"
    with urllib.request.urlopen(page, timeout=ANSWER_SECONDS) as answer:
        links = re.findall(r'href="([^"#]+)', answer.read(1 << 24).decode(errors="replace"))
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    name = re.compile(rf"torch-{re.escape(version)}(\+\w+)?-({tag}-{tag}|py3-none)-(any|.*{platform.machine()})\.whl")
    matching = (link for link in links if name.fullmatch(urllib.parse.unquote(link.rsplit("/", 1)[-1])))
    link = next(matching, None)
    return None if link is None else urllib.parse.urljoin(page, link)


def planned_files(venv: Path, version: str) -> list[tuple[str, str]]:
    """Name and address of each file that pip would download for torch; empty if pip does not tell."""
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--dry-run", "--ignore-installed"]
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", *options, "--report", "-", f"torch=={version}"]
    with Progress() as progress:
        progress.doing = "asking pip"
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        report = json.loads(done.stdout)
        return [(item["metadata"]["name"], item["download_info"]["url"]) for item in report["install"]]
    except (ValueError, KeyError, TypeError):
        return []


def size_of(url: str) -> int | None:
    """The bytes of a file in a package index; None if it does not say."""
    request = urllib.request.Request(url, method="HEAD")
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
        return int(answer.headers["Content-Length"])


def total_size(urls: Iterable[str]) -> int | None:
    """The bytes of all files; None if that of one is unknown."""
    with ThreadPoolExecutor(16) as pool:
        sizes = list(pool.map(lambda url: within(ANSWER_SECONDS, lambda: size_of(url)), urls))
    given = [size for size in sizes if size is not None]
    return sum(given) if given and len(given) == len(sizes) else None


def within(seconds: float, ask: Callable[[], T]) -> T | None:
    """What `ask` returns; None after `seconds`, or if it fails. Names are looked up without a limit of their own."""
    answers: list[T] = []

    def run() -> None:
        try:
            answers.append(ask())
        except (OSError, ValueError, TypeError):
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def readable(num_bytes: int | None) -> str:
    """A size as people read it."""
    if num_bytes is None:
        return "unknown size"
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


# Pip


class Progress:
    """A line every `SAY_SECONDS` with what is going on, while it is entered."""

    def __init__(self) -> None:
        self.doing = ""
        self._ended, self._begun = threading.Event(), time.monotonic()
        self._thread = threading.Thread(target=self._say, daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _say(self) -> None:
        while not self._ended.wait(SAY_SECONDS):
            say(f"  {time.monotonic() - self._begun:3.0f} s: {self.doing}")


def doing_of(line: str, before: str) -> str:
    """What pip does, by a line of its output."""
    for pattern, doing in (
        (r"Collecting (\S+)", "resolving {}"),
        (r"\s*(?:Downloading|Using cached) (\S+(?: \(.*\))?)", "downloading {}"),
        (r"\s*((?:Installing build|Getting requirements|Preparing|Building).*)", "{}"),
    ):
        if match := re.match(pattern, line):
            return doing.format(match[1].rsplit("/", 1)[-1])
    if match := re.match(r"Installing collected packages: (.*)", line):
        names = match[1].split(", ")
        return f"unpacking {names[0] if len(names) == 1 else f'{len(names)} packages'}"
    return before


def pip(venv: Path, *arguments: str) -> None:
    """Runs `pip install` with progress. Its errors appear as they are. Raises Refused."""
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    lines: list[str] = []
    with (
        Progress() as progress,
        subprocess.Popen([*command, "--progress-bar", "off", *arguments], stdout=subprocess.PIPE, text=True) as run,
    ):
        progress.doing = "starting pip"
        assert run.stdout is not None
        for line in run.stdout:
            lines.append(line)
            progress.doing = doing_of(line, progress.doing)
    if run.returncode:
        print("".join(lines[-20:]), end="", file=sys.stderr, flush=True)
        raise Refused(f"pip failed with status {run.returncode}, see above; the same command goes on where it ended")


def installed_torch(venv: Path) -> str:
    """The version of the environment's torch; empty if it has none."""
    test = "import importlib.metadata as m; print(m.version('torch'))"
    done = subprocess.run([venv / "bin" / "python", "-c", test], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def install(part: str) -> None:
    """Installs the packages of a part into .venv. Raises Refused."""
    begun, gpu = time.monotonic(), has_gpu()
    if not _works(VENV):
        check_python()
        for line in warnings(has_gpu=gpu, develops=part == "all"):
            say(f"note: {line}")
        check_room(ROOT, CPU_BYTES, ".venv")
    make_venv(VENV)
    # First, because pip reports packages that lack others, as torch does for a while.
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    pip(VENV, "-c", str(CONSTRAINTS), *requires)
    if installed_torch(VENV).partition("+")[0] != torch_version():
        torch = choose_torch(os.environ.get("TORCH", ""), VENV, gpu=gpu)
        check_room(ROOT, CUDA_BYTES if torch.is_cuda else CPU_BYTES, ".venv")
        say(f"installing {torch.about}")
        # What torch needs comes with the other packages, in the versions of the constraints.
        pip(VENV, *torch.options, "--no-deps", f"torch=={torch_version()}")
    extras, about = PARTS[part]
    say(f"installing {about}")
    pip(VENV, "-c", str(CONSTRAINTS), "--no-build-isolation", "-e", f"{ROOT}[{extras}]")
    say(f".venv is ready after {time.monotonic() - begun:.0f} s")


def install_versions(which: str, folder: Path) -> None:
    """Installs all parts into `folder`: `OPEN` packages at one end of their ranges. Raises Refused."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [
        line for line in project["project"]["optional-dependencies"]["worker"] if re.split("[>=]", line)[0] in OPEN
    ]
    exact = [line.replace(">=", "==") for line in wanted] if which == "lowest" else ["--upgrade", *wanted]
    make_venv(folder)
    constraints = folder / "constraints.txt"
    lines = CONSTRAINTS.read_text().splitlines()
    constraints.write_text("\n".join(line for line in lines if line.partition("==")[0] not in OPEN) + "\n")
    say(f"installing {' '.join(exact)} and {PARTS['all'][1]} into {folder.name}")
    pip(folder, "-c", str(constraints), *project["build-system"]["requires"])
    pip(folder, "-c", str(constraints), *exact)
    pip(folder, "-c", str(constraints), "--no-build-isolation", "-e", f"{ROOT}[{PARTS['all'][0]}]")


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    try:
        match arguments:
            case ["venv", folder]:
                make_venv(Path(folder).absolute())
            case ["versions", "lowest" | "newest" as which, folder]:
                install_versions(which, Path(folder).absolute())
            case [part] if part in PARTS:
                install(part)
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
