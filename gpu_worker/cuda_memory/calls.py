"""The functions of libcuda that this folder calls: their arguments, constants and structures, as in cuda.h.

Owns the binary interface. Knows nothing of what the calls are for.
"""

import ctypes
from dataclasses import dataclass

# CUdeviceptr and CUmemGenericAllocationHandle; CUdevice and enumerations.
Address = Handle = ctypes.c_uint64
Device = ctypes.c_int
_Size, _Flags, _Enum = ctypes.c_size_t, ctypes.c_ulonglong, ctypes.c_int

SUCCESS, OUT_OF_MEMORY = 0, 2
# CUdevice_attribute.
VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, FILE_DESCRIPTOR_SUPPORTED = 102, 103
# CUmemAllocationType, CUmemLocationType, CUmemAllocationHandleType, CUmemAccess_flags, granularity.
PINNED, ON_DEVICE, FILE_DESCRIPTOR, READ_WRITE, MINIMUM = 1, 1, 1, 3, 0


class Location(ctypes.Structure):
    """CUmemLocation: with the type ON_DEVICE, the id is the ordinal of a device."""

    _fields_ = [("type", _Enum), ("id", ctypes.c_int)]


class _AllocFlags(ctypes.Structure):
    _fields_ = [
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", _Enum),
        ("requested_handle_types", _Enum),
        ("location", Location),
        ("win32_handle_meta_data", ctypes.c_void_p),
        ("alloc_flags", _AllocFlags),
    ]


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", _Enum)]


class Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = [("bytes", ctypes.c_ubyte * 16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A function of libcuda. It returns a CUresult."""

    arguments: tuple[type, ...]
    # What helps if it fails; empty if the code says it all.
    hint: str = ""


_TYPE_AND_FLAGS = (_Enum, _Flags)
_OF = ctypes.POINTER

CALLS: dict[str, Call] = {
    "cuInit": Call(arguments=(ctypes.c_uint,), hint="nvidia-smi shows whether the driver works"),
    "cuDeviceGet": Call(arguments=(_OF(Device), ctypes.c_int), hint="CUDA_VISIBLE_DEVICES chooses the devices"),
    "cuDeviceGetAttribute": Call(arguments=(_OF(ctypes.c_int), _Enum, Device)),
    "cuDeviceGetUuid_v2": Call(arguments=(_OF(Uuid), Device), hint="the driver must be of CUDA 11.4 or newer"),
    "cuMemGetAllocationGranularity": Call(arguments=(_OF(_Size), _OF(AllocationProp), _Enum)),
    "cuMemAddressReserve": Call(
        arguments=(_OF(Address), _Size, _Size, Address, _Flags), hint="ulimit -v may limit the addresses of the process"
    ),
    "cuMemAddressFree": Call(arguments=(Address, _Size)),
    "cuMemCreate": Call(
        arguments=(_OF(Handle), _Size, _OF(AllocationProp), _Flags),
        hint="nvidia-smi shows what else uses the GPU, and a pool of a dead worker is kept for 600 s",
    ),
    "cuMemRelease": Call(arguments=(Handle,)),
    "cuMemMap": Call(arguments=(Address, _Size, _Size, Handle, _Flags)),
    "cuMemUnmap": Call(arguments=(Address, _Size)),
    "cuMemSetAccess": Call(arguments=(Address, _Size, _OF(AccessDesc), _Size)),
    "cuMemExportToShareableHandle": Call(
        arguments=(ctypes.c_void_p, Handle, *_TYPE_AND_FLAGS), hint="ulimit -n may allow too few open files"
    ),
    "cuMemImportFromShareableHandle": Call(
        arguments=(_OF(Handle), ctypes.c_void_p, _Enum),
        hint="the memory is gone if the driver has reset the GPU or unloaded it (nvidia-smi -pm 1 keeps it loaded)",
    ),
}
"""Every function, by its name in the library."""
ERROR_TEXTS = ("cuGetErrorName", "cuGetErrorString")
"""Functions that return the text of a CUresult: (code, address of the text)."""
