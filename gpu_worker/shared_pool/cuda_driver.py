"""The virtual memory management of the CUDA driver, as typed calls that raise sentences.

Physical memory has a *handle*; a file descriptor can stand for it in another process. Addresses are reserved apart from
it, and memory is mapped at them. Owns the binary interface (arguments, constants and structures as in cuda.h), and no
memory: `cuda_region.py` does. See the "Virtual Memory Management" section of the CUDA Driver API for the rules of each
call.
"""

import ctypes
from typing import Any

# CUdeviceptr and CUmemGenericAllocationHandle; CUdevice and enumerations.
Address = Handle = ctypes.c_uint64
Device = ctypes.c_int
_Size, _Flags, _Enum = ctypes.c_size_t, ctypes.c_ulonglong, ctypes.c_int

SUCCESS, OUT_OF_MEMORY = 0, 2
# CUdevice_attribute.
VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, FILE_DESCRIPTOR_SUPPORTED = 102, 103
# CUmemAllocationType, CUmemLocationType, CUmemAllocationHandleType, CUmemAccess_flags, granularity.
PINNED, ON_DEVICE, FILE_DESCRIPTOR, READ_WRITE, MINIMUM = 1, 1, 1, 3, 0
_LIBRARY = "libcuda.so.1"


class Location(ctypes.Structure):
    """CUmemLocation: with the type ON_DEVICE, the id is the ordinal of a device."""

    _fields_ = [("type", _Enum), ("id", ctypes.c_int)]


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", _Enum),
        ("requested_handle_types", _Enum),
        ("location", Location),
        ("win32_handle_meta_data", ctypes.c_void_p),
        # compression_type, gpu_direct_rdma_capable, usage and reserved, all 0.
        ("alloc_flags", ctypes.c_ubyte * 8),
    ]


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", _Enum)]


# CUuuid.
Uuid = ctypes.c_ubyte * 16
_OF = ctypes.POINTER

CALLS: dict[str, tuple[type, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (_OF(Device), ctypes.c_int),
    "cuDeviceGetAttribute": (_OF(ctypes.c_int), _Enum, Device),
    "cuDeviceGetUuid_v2": (_OF(Uuid), Device),
    "cuMemGetAllocationGranularity": (_OF(_Size), _OF(AllocationProp), _Enum),
    "cuMemAddressReserve": (_OF(Address), _Size, _Size, Address, _Flags),
    "cuMemAddressFree": (Address, _Size),
    "cuMemCreate": (_OF(Handle), _Size, _OF(AllocationProp), _Flags),
    "cuMemRelease": (Handle,),
    "cuMemMap": (Address, _Size, _Size, Handle, _Flags),
    "cuMemUnmap": (Address, _Size),
    "cuMemSetAccess": (Address, _Size, _OF(AccessDesc), _Size),
    "cuMemExportToShareableHandle": (ctypes.c_void_p, Handle, _Enum, _Flags),
    "cuMemImportFromShareableHandle": (_OF(Handle), ctypes.c_void_p, _Enum),
}
"""The arguments of every function, by its name in the library. All return a CUresult."""
HINTS = {
    "cuInit": "nvidia-smi shows whether the driver works",
    "cuDeviceGet": "CUDA_VISIBLE_DEVICES chooses the devices",
    "cuDeviceGetUuid_v2": "the driver must be of CUDA 11.4 or newer",
    "cuMemAddressReserve": "ulimit -v may limit the addresses of the process",
    "cuMemCreate": "nvidia-smi shows what else uses the GPU, and a pool of a dead worker is kept for 600 s",
    "cuMemExportToShareableHandle": "ulimit -n may allow too few open files",
    "cuMemImportFromShareableHandle": (
        "the memory is gone if the driver has reset the GPU or unloaded it (nvidia-smi -pm 1 keeps it loaded)"
    ),
}
"""What helps if a call fails; of the others the code says it all."""
ERROR_TEXTS = ("cuGetErrorName", "cuGetErrorString")
"""Functions that return the text of a CUresult: (code, address of the text)."""


class CudaError(RuntimeError):
    """A call of the driver failed. The message names the call, the code and what helps."""


class DeviceMemoryUsedUp(CudaError):
    """It failed with the code OUT_OF_MEMORY."""


class Driver:
    """The driver's calls for one device. `library` has the functions of `CALLS`, as libcuda has them."""

    def __init__(self, library: Any, ordinal: int) -> None:
        """ordinal: the number of the device, as in cuda:N. Raises CudaError."""
        self._library, self.ordinal = library, ordinal
        for name, arguments in CALLS.items():
            function = getattr(library, name, None)
            if function is None:
                raise CudaError(f"{_LIBRARY} has no {name}: the driver must be of CUDA 11.4 or newer")
            function.argtypes, function.restype = arguments, ctypes.c_int
        for name in ERROR_TEXTS:
            function = getattr(library, name)
            function.argtypes, function.restype = (ctypes.c_int, _OF(ctypes.c_char_p)), ctypes.c_int
        self._call("cuInit", 0)
        self._device = self._found("cuDeviceGet", Device(), ordinal)
        location = Location(type=ON_DEVICE, id=ordinal)
        self._prop = AllocationProp(type=PINNED, requested_handle_types=FILE_DESCRIPTOR, location=location)
        self._access = AccessDesc(location=location, flags=READ_WRITE)

    def is_exportable(self) -> bool:
        """Whether the device has virtual memory management, and memory that file descriptors can stand for."""
        needed = VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, FILE_DESCRIPTOR_SUPPORTED
        return all(self._found("cuDeviceGetAttribute", ctypes.c_int(), attribute, self._device) for attribute in needed)

    def uuid(self) -> str:
        """Names the device in every process of this machine: 32 hexadecimal digits."""
        uuid = Uuid()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), self._device)
        return bytes(uuid).hex()

    def granularity(self) -> int:
        """Sizes, and addresses of mappings, are multiples of this number of bytes."""
        asked = ctypes.byref(self._prop), MINIMUM
        return self._found("cuMemGetAllocationGranularity", ctypes.c_size_t(), *asked)

    def create(self, num_bytes: int) -> int:
        """Allocates physical memory with undefined content, and returns its handle."""
        return self._found("cuMemCreate", Handle(), num_bytes, ctypes.byref(self._prop), 0)

    def release(self, handle: int) -> None:
        """Gives the handle up. The memory is freed when it has no handle, no mapping and no descriptor anywhere."""
        self._call("cuMemRelease", handle)

    def export(self, handle: int) -> int:
        """Returns a file descriptor that stands for the memory. The caller closes it."""
        return self._found("cuMemExportToShareableHandle", ctypes.c_int(-1), handle, FILE_DESCRIPTOR, 0)

    def import_from(self, descriptor: int) -> int:
        """Returns a handle of the memory that the descriptor stands for. The descriptor stays the caller's."""
        # The argument is a pointer with the descriptor as its value.
        asked = ctypes.c_void_p(descriptor), FILE_DESCRIPTOR
        return self._found("cuMemImportFromShareableHandle", Handle(), *asked)

    def reserve(self, num_bytes: int, alignment: int) -> int:
        """Reserves addresses, which nothing is mapped at, and returns the first."""
        return self._found("cuMemAddressReserve", Address(), num_bytes, alignment, 0, 0)

    def free_addresses(self, address: int, num_bytes: int) -> None:
        """Ends a reservation without mappings."""
        self._call("cuMemAddressFree", address, num_bytes)

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """Maps memory at reserved addresses without a mapping, and lets the device read and write it."""
        self._call("cuMemMap", address, num_bytes, 0, handle, 0)
        try:
            self._call("cuMemSetAccess", address, num_bytes, ctypes.byref(self._access), 1)
        except CudaError:
            self.unmap(address, num_bytes)
            raise

    def unmap(self, address: int, num_bytes: int) -> None:
        """Ends one whole mapping; its addresses stay reserved. No work of the device may use them."""
        self._call("cuMemUnmap", address, num_bytes)

    def _found(self, name: str, result: Any, *arguments: Any) -> int:
        """Calls a function that writes to its first argument, and returns what it wrote."""
        self._call(name, ctypes.byref(result), *arguments)
        return int(result.value)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != SUCCESS:
            hint = f"; {HINTS[name]}" if name in HINTS else ""
            kind = DeviceMemoryUsedUp if code == OUT_OF_MEMORY else CudaError
            raise kind(f"{name} failed with {self._text(code)}{hint}")

    def _text(self, code: int) -> str:
        """`CUDA_ERROR_OUT_OF_MEMORY (2): out of memory`."""
        texts: list[str] = []
        for name in ERROR_TEXTS:
            text = ctypes.c_char_p()
            has_text = getattr(self._library, name)(code, ctypes.byref(text)) == SUCCESS
            texts.append(text.value.decode() if has_text and text.value else "")
        return f"{texts[0] or 'code'} ({code}){f': {texts[1]}' if texts[1] else ''}"


def cuda_driver(ordinal: int) -> Driver:
    """The driver of this machine. Raises CudaError or OSError."""
    return Driver(ctypes.CDLL(_LIBRARY), ordinal)
