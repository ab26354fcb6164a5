"""A second network namespace for tests: a worker in it reaches this one over a pair of virtual cables.

Owns the namespace and the cable. Needs root and iproute2. The addresses are of the range for benchmarks of networks
(RFC 2544), which no real network uses.
"""

import os
import shutil
import subprocess


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


def why_not() -> str:
    """Returns why this machine allows no network namespaces, or an empty string."""
    if os.getuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "iproute2 is not installed: there is no ip"
    try:
        with Network():
            return ""
    except subprocess.CalledProcessError as error:
        return f"this machine allows no network namespaces: {error.stderr.strip()}"


class Network:
    """A namespace with one cable to this one. Leaving the context removes both."""

    _num_made = 0

    def __enter__(self) -> "Network":
        number = (os.getpid() * 4 + Network._num_made) % 16_000
        Network._num_made += 1
        self.name, self._here, self._there = f"tandem-{number}", f"td{number}a", f"td{number}b"
        prefix = f"198.18.{number // 64}"
        self.address, self.far_address = (f"{prefix}.{number % 64 * 4 + end}" for end in (1, 2))
        _ip("netns", "add", self.name)
        try:
            _ip("link", "add", self._here, "type", "veth", "peer", "name", self._there, "netns", self.name)
            _ip("address", "add", f"{self.address}/30", "dev", self._here)
            _ip("link", "set", self._here, "up")
            _ip("-n", self.name, "address", "add", f"{self.far_address}/30", "dev", self._there)
            _ip("-n", self.name, "link", "set", "lo", "up")
            _ip("-n", self.name, "link", "set", self._there, "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _remove(self) -> None:
        # The cable goes with the namespace.
        _ip("netns", "delete", self.name)

    @property
    def within(self) -> list[str]:
        """The command that becomes another one, inside the namespace."""
        return ["ip", "netns", "exec", self.name]

    def cut(self) -> None:
        """Pulls the cable at the other end: frames vanish, and no connection hears of it."""
        _ip("-n", self.name, "link", "set", self._there, "down")

    def restore(self) -> None:
        _ip("-n", self.name, "link", "set", self._there, "up")
