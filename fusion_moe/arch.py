"""What a GPU is, as facts: those of known ones as data, those of others as their driver says them. Nothing here asks a device.

Figures of known GPUs are NVIDIA's, per device: multiprocessors, L2 and bandwidth from data sheets and white papers (each entry names its
own); shared memory, registers and warps from the table of compute capabilities in the CUDA C++ Programming Guide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .errors import OptionError

_KIB, _MIB = 2**10, 2**20


@dataclass(frozen=True)
class Measured:
    """What no data sheet says.

    warps_to_saturate_memory: of a kernel that reads weights from memory to registers, that must be resident on the whole GPU for memory to
    be as fast as it gets. groups_read_per_two_tiles: groups whose weights such a kernel reads while a block of a large-M kernel multiplies
    two M tiles with all columns.
    """

    warps_to_saturate_memory: int
    groups_read_per_two_tiles: int


@dataclass(frozen=True)
class Arch:
    """A GPU.

    capability: CUDA's. shared_per_multiprocessor, shared_per_block: bytes of shared memory, the latter as far as a kernel may opt in;
    l2_bytes: of the L2 cache; memory_bandwidth: bytes a second, as specified; registers: of 32 bits, and warps, per multiprocessor.
    measured: None where nothing was; then these facts are scaled from an H200's.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_per_multiprocessor: int
    shared_per_block: int
    l2_bytes: int
    memory_bandwidth: float
    registers: int = 65536
    warps: int = 64
    measured: Measured | None = None

    @property
    def nvrtc(self) -> str:
        """What NVRTC compiles for: "sm_90a", with what only this compute capability has (wgmma, setmaxnreg)."""
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if self.wgmma else "")

    @property
    def wgmma(self) -> bool:
        """Whether a warpgroup multiplies what lies in shared memory, and `setmaxnreg` moves registers: Hopper alone."""
        return self.capability[0] == 9

    @property
    def programmatic_launch(self) -> bool:
        """Whether a kernel may start before the one before it has ended, and waits by itself (`griddepcontrol`)."""
        return self.capability >= (9, 0)

    def clustered(self, blocks: int) -> int:
        """How many blocks run at once in clusters of so many, one block on each multiprocessor. A cluster stays in a part of the GPU (GPC),
        whose multiprocessors it need not divide: an H200 and an H100 run 28 clusters of four, and not 32.
        """
        most = self.multiprocessors if blocks <= 2 else self.multiprocessors * 7 // 8
        return most // blocks * blocks

    @property
    def warps_to_saturate_memory(self) -> int:
        """See Measured. Latency times bandwidth is what must be in flight, and latencies differ little."""
        if self.measured:
            return self.measured.warps_to_saturate_memory
        return max(1, min(round(_OF_H200.warps_to_saturate_memory * self._relative_bandwidth), self.multiprocessors * self.warps))

    @property
    def groups_read_per_two_tiles(self) -> int:
        """See Measured. A tile takes one multiprocessor, reading takes the memory of all."""
        if self.measured:
            return self.measured.groups_read_per_two_tiles
        return max(1, round(_OF_H200.groups_read_per_two_tiles * self._relative_bandwidth))

    @property
    def _relative_bandwidth(self) -> float:
        return self.memory_bandwidth / H200.memory_bandwidth


_OF_H200 = Measured(warps_to_saturate_memory=3200, groups_read_per_two_tiles=300)

# NVIDIA H200 Tensor Core GPU datasheet (bandwidth); its GH100 is that of the H100 SXM5, with the whole L2, as its driver says.
H200 = Arch("H200", (9, 0), 132, 228 * _KIB, 227 * _KIB, 60 * _MIB, 4.8e12, measured=_OF_H200)
# NVIDIA H100 Tensor Core GPU Architecture, white paper, H100 SXM5; its datasheet (bandwidth).
H100 = Arch("H100", (9, 0), 132, 228 * _KIB, 227 * _KIB, 50 * _MIB, 3.35e12)
# NVIDIA A100 Tensor Core GPU Architecture, white paper; A100 80GB datasheet, SXM (bandwidth).
A100 = Arch("A100", (8, 0), 108, 164 * _KIB, 163 * _KIB, 40 * _MIB, 2.039e12)
# NVIDIA Ada GPU Architecture, white paper (RTX 4090); NVIDIA L40S datasheet, AD102's L2 whole.
L40S = Arch("L40S", (8, 9), 142, 100 * _KIB, 99 * _KIB, 96 * _MIB, 864e9, warps=48)
RTX_4090 = Arch("RTX 4090", (8, 9), 128, 100 * _KIB, 99 * _KIB, 72 * _MIB, 1.008e12, warps=48)
# NVIDIA HGX B200 datasheet (bandwidth); multiprocessors and L2 as Chips and Cheese read them from one ("Nvidia's B200", 2025).
B200 = Arch("B200", (10, 0), 148, 228 * _KIB, 227 * _KIB, 126 * _MIB, 8e12)

# By what their drivers call them. Others of these names have less memory, or are parts of a GPU: they are read.
KNOWN: Mapping[str, Arch] = {
    "NVIDIA H200": H200,
    "NVIDIA H100 80GB HBM3": H100,
    "NVIDIA A100-SXM4-80GB": A100,
    "NVIDIA L40S": L40S,
    "NVIDIA GeForce RTX 4090": RTX_4090,
    "NVIDIA B200": B200,
}


def named(name: str) -> Arch:
    """The known GPU of a name, in upper or lower case. OptionError for another."""
    found = {arch.name.casefold(): arch for arch in KNOWN.values()}
    if name.casefold() not in found:
        raise OptionError(f"gpu = {name!r}", expected=f"one of {', '.join(arch.name for arch in KNOWN.values())}")
    return found[name.casefold()]


def find(read: Arch) -> Arch:
    """The known GPU that a device is, by its name and what cannot differ; else what was read of the device.

    read: what its driver says. memory_bandwidth 0, where it does not: then a multiprocessor is taken to have as much as an H200's.
    """
    known = KNOWN.get(read.name)
    if known and (known.capability, known.multiprocessors) == (read.capability, read.multiprocessors):
        return known
    if read.memory_bandwidth > 0:
        return read
    return replace(read, memory_bandwidth=H200.memory_bandwidth * read.multiprocessors / H200.multiprocessors)
