"""libcuda's virtual memory management without a GPU: memory is a memfd, addresses are those of the process.

It keeps the driver's rules, as the CUDA Driver API (13.0) documents them: what breaks one gets an error, and an access
to memory that is not mapped, or has no access set, ends the process. Calls take ctypes arguments, as libcuda
does. One object is the driver of one process; processes share a `FakeCard`.
"""

import ctypes
import itertools
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gpu_worker.shared_pool import cuda_driver as calls

GRANULARITY = 2 << 20
INVALID_VALUE, NOT_INITIALIZED, INVALID_DEVICE, NOT_SUPPORTED, INVALID_HANDLE = 1, 3, 101, 801, 400
_NAMES = {
    INVALID_VALUE: (b"CUDA_ERROR_INVALID_VALUE", b"invalid argument"),
    calls.OUT_OF_MEMORY: (b"CUDA_ERROR_OUT_OF_MEMORY", b"out of memory"),
    NOT_INITIALIZED: (b"CUDA_ERROR_NOT_INITIALIZED", b"initialization error"),
    INVALID_DEVICE: (b"CUDA_ERROR_INVALID_DEVICE", b"invalid device ordinal"),
    INVALID_HANDLE: (b"CUDA_ERROR_INVALID_HANDLE", b"invalid resource handle"),
    NOT_SUPPORTED: (b"CUDA_ERROR_NOT_SUPPORTED", b"operation not supported"),
}
_FIXED, _NORESERVE = 0x10, 0x4000
_DIRT = b"\xff" * GRANULARITY


@dataclass(slots=True)
class FakeCard:
    """A card with `num_bytes`. Memory is used while a handle, a mapping or a descriptor of it is left anywhere."""

    num_bytes: int = 1 << 34
    uuid: bytes = b"a card of 16 byt"
    # New memory has undefined content: NaN in every format of floating-point numbers.
    is_dirty: bool = True
    # Inodes of the memfds that were allocated, with a descriptor that only asks for what is left.
    _allocations: dict[int, int] = field(default_factory=dict[int, int])

    def allocate(self, num_bytes: int) -> int | None:
        """Returns the memfd of new memory, or None if too little is free."""
        if num_bytes > self.num_bytes - self.used():
            return None
        memory = os.memfd_create("fake-device-memory", os.MFD_CLOEXEC)
        os.ftruncate(memory, num_bytes)
        if self.is_dirty:
            for at in range(0, num_bytes, len(_DIRT)):
                os.pwrite(memory, _DIRT[: num_bytes - at], at)
        self._allocations[os.fstat(memory).st_ino] = num_bytes
        return memory

    def used(self) -> int:
        """Bytes of memory that this process, or another one, still has a descriptor or a mapping of."""
        held = _held_inodes()
        return sum(num_bytes for inode, num_bytes in self._allocations.items() if inode in held)


def _held_inodes() -> set[int]:
    """Inodes of files that this process has open or mapped."""
    found: set[int] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.stat(f"/proc/self/fd/{name}").st_ino)
        except OSError:
            continue
    with open("/proc/self/maps") as maps:
        found.update(int(line.split()[4]) for line in maps)
    return found


@dataclass(slots=True, kw_only=True)
class _Mapping:
    num_bytes: int
    handle_of: int


class _Function:
    """A function of the library. Its prototype may be set, as that of a ctypes function."""

    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call
        self.argtypes: Any = None
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> int:
        assert self.argtypes is not None and len(arguments) == len(self.argtypes)
        for given, wanted in zip(arguments, self.argtypes, strict=True):
            # Raises TypeError for what ctypes could not pass.
            wanted.from_param(given)
        return self._call(*(_plain(each) for each in arguments))


def _plain(argument: Any) -> Any:
    """The number or the object behind a reference."""
    if hasattr(argument, "_obj"):
        return argument._obj
    return argument.value if isinstance(argument, ctypes._SimpleCData) else argument


class FakeLibcuda:
    """The library of one process. `fails` has a code for each call that is to fail, and `calls` counts them."""

    def __init__(self, card: FakeCard, *, is_supported: bool = True) -> None:
        self.card, self.is_supported = card, is_supported
        self.fails: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        # Descriptors by handle; reservations and mappings by address.
        self.handles: dict[int, int] = {}
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, _Mapping] = {}
        self._numbers: Iterator[int] = itertools.count(1 << 32)
        self._is_initialised = False
        self._libc = _libc()
        for name in calls.CALLS:
            setattr(self, name, _Function(self._counted(name, getattr(self, f"_{name}"))))
        self.cuGetErrorName = _Function(lambda code, out: self._text(code, out, 0))
        self.cuGetErrorString = _Function(lambda code, out: self._text(code, out, 1))

    def _counted(self, name: str, call: Callable[..., int]) -> Callable[..., int]:
        def counted(*arguments: Any) -> int:
            self.counts[name] = self.counts.get(name, 0) + 1
            if name in self.fails:
                return self.fails[name]
            if name != "cuInit" and not self._is_initialised:
                return NOT_INITIALIZED
            return call(*arguments)

        return counted

    def is_empty(self) -> bool:
        """Whether nothing is left: no handle, no mapping, no reservation."""
        return not (self.handles or self.mapped or self.reserved)

    def end(self) -> None:
        """The process ends: the driver gives up all that it had."""
        for address, mapping in list(self.mapped.items()):
            self._cuMemUnmap(address, mapping.num_bytes)
        for handle in list(self.handles):
            self._cuMemRelease(handle)
        for address, num_bytes in list(self.reserved.items()):
            self._cuMemAddressFree(address, num_bytes)

    def _text(self, code: int, out: Any, which: int) -> int:
        if code not in _NAMES:
            return INVALID_VALUE
        out.value = _NAMES[code][which]
        return 0

    def _cuInit(self, flags: int) -> int:
        self._is_initialised = True
        return 0 if flags == 0 else INVALID_VALUE

    def _cuDeviceGet(self, out: Any, ordinal: int) -> int:
        out.value = ordinal
        return 0 if ordinal == 0 else INVALID_DEVICE

    def _cuDeviceGetAttribute(self, out: Any, attribute: int, device: int) -> int:
        assert attribute in (calls.VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, calls.FILE_DESCRIPTOR_SUPPORTED)
        out.value = int(self.is_supported)
        return 0

    def _cuDeviceGetUuid_v2(self, out: Any, device: int) -> int:
        ctypes.memmove(out, self.card.uuid, 16)
        return 0

    def _cuMemGetAllocationGranularity(self, out: Any, prop: Any, option: int) -> int:
        out.value = GRANULARITY
        return 0 if _is_right(prop) and option == calls.MINIMUM else INVALID_VALUE

    def _cuMemAddressReserve(self, out: Any, num_bytes: int, alignment: int, hint: int, flags: int) -> int:
        if num_bytes <= 0 or num_bytes % mmap.PAGESIZE or alignment & (alignment - 1) or flags or hint:
            return INVALID_VALUE
        found = self._mmap(0, num_bytes + alignment, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1)
        start = -(-found // alignment) * alignment
        # What is not needed for the alignment is given back.
        for begin, end in ((found, start), (start + num_bytes, found + num_bytes + alignment)):
            if end > begin:
                self._libc.munmap(begin, end - begin)
        self.reserved[start] = num_bytes
        out.value = start
        return 0

    def _cuMemAddressFree(self, address: int, num_bytes: int) -> int:
        if self.reserved.get(address) != num_bytes or any(address <= at < address + num_bytes for at in self.mapped):
            return INVALID_VALUE
        del self.reserved[address]
        return 0 if self._libc.munmap(address, num_bytes) == 0 else INVALID_VALUE

    def _cuMemCreate(self, out: Any, num_bytes: int, prop: Any, flags: int) -> int:
        if num_bytes <= 0 or num_bytes % GRANULARITY or flags or not _is_right(prop):
            return INVALID_VALUE
        memory = self.card.allocate(num_bytes)
        if memory is None:
            return calls.OUT_OF_MEMORY
        out.value = self._new_handle(memory)
        return 0

    def _cuMemRelease(self, handle: int) -> int:
        if handle not in self.handles:
            return INVALID_VALUE
        os.close(self.handles.pop(handle))
        return 0

    def _cuMemMap(self, address: int, num_bytes: int, offset: int, handle: int, flags: int) -> int:
        is_wrong = offset or flags or num_bytes <= 0 or address % GRANULARITY or num_bytes % GRANULARITY
        if is_wrong or handle not in self.handles or not self._is_free(address, num_bytes):
            return INVALID_VALUE
        if num_bytes > os.fstat(self.handles[handle]).st_size:
            return INVALID_VALUE
        # Mapped without access, until it is set.
        self._mmap(address, num_bytes, mmap.MAP_SHARED | _FIXED, self.handles[handle])
        self.mapped[address] = _Mapping(num_bytes=num_bytes, handle_of=handle)
        return 0

    def _is_free(self, address: int, num_bytes: int) -> bool:
        """Whether the range is within one reservation and nothing is mapped in it."""
        end = address + num_bytes
        is_reserved = any(at <= address and end <= at + size for at, size in self.reserved.items())
        return is_reserved and not any(at < end and address < at + each.num_bytes for at, each in self.mapped.items())

    def _cuMemSetAccess(self, address: int, num_bytes: int, access: Any, count: int) -> int:
        where = access.location
        if count != 1 or (where.type, where.id) != (calls.ON_DEVICE, 0) or access.flags != calls.READ_WRITE:
            return INVALID_VALUE
        mapping = self.mapped.get(address)
        if mapping is None or mapping.num_bytes != num_bytes:
            return INVALID_VALUE
        return 0 if self._libc.mprotect(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE) == 0 else INVALID_VALUE

    def _cuMemUnmap(self, address: int, num_bytes: int) -> int:
        mapping = self.mapped.get(address)
        if mapping is None or mapping.num_bytes != num_bytes:
            return INVALID_VALUE
        del self.mapped[address]
        self._mmap(address, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED, -1)
        return 0

    def _cuMemExportToShareableHandle(self, out: Any, handle: int, handle_type: int, flags: int) -> int:
        if handle not in self.handles or handle_type != calls.FILE_DESCRIPTOR or flags:
            return INVALID_VALUE
        out.value = os.dup(self.handles[handle])
        return 0

    def _cuMemImportFromShareableHandle(self, out: Any, descriptor: int, handle_type: int) -> int:
        try:
            is_device_memory = "fake-device-memory" in os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            is_device_memory = False
        if not is_device_memory or handle_type != calls.FILE_DESCRIPTOR:
            return INVALID_VALUE
        out.value = self._new_handle(os.dup(descriptor))
        return 0

    def _new_handle(self, memory: int) -> int:
        handle = next(self._numbers)
        self.handles[handle] = memory
        return handle

    def _mmap(self, address: int, num_bytes: int, flags: int, memory: int) -> int:
        found = self._libc.mmap(address or None, num_bytes, 0, flags, memory, 0)
        assert found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
        return int(found)


def _is_right(prop: Any) -> bool:
    """Whether memory is pinned on device 0, and file descriptors can stand for it."""
    wanted = (calls.PINNED, calls.FILE_DESCRIPTOR, calls.ON_DEVICE, 0, None)
    found = (prop.type, prop.requested_handle_types, prop.location.type, prop.location.id, prop.win32_handle_meta_data)
    return found == wanted


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
