"""Facts about GPUs: known GPUs as tables, all others as their driver reports them. Nothing here
queries a device.

Figures of known GPUs are NVIDIA's, per device: multiprocessors, L2 and bandwidth from data sheets
and white papers (each entry names its own); shared memory, registers and warps from the table of
compute capabilities in the CUDA C++ Programming Guide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .errors import OptionError

_KIB, _MIB = 2**10, 2**20


@dataclass(frozen=True)
class Measured:
    """Figures that no data sheet gives.

    warps_to_saturate_memory: for a kernel that reads weights from memory to registers, how many of
    its warps must be resident on the whole GPU to saturate the memory bandwidth.
    groups_read_per_two_tiles: how many groups' weights such a kernel reads in the time in which a
    block of a large-M kernel multiplies two M tiles with all columns.
    """

    warps_to_saturate_memory: int
    groups_read_per_two_tiles: int


@dataclass(frozen=True)
class Arch:
    """A GPU.

    capability: CUDA's compute capability. shared_per_multiprocessor, shared_per_block: bytes of
    shared memory, the latter as far as a kernel may opt in. l2_bytes: size of the L2 cache.
    memory_bandwidth: bytes a second, as specified. registers, warps: how many 32-bit registers and
    warps a multiprocessor has. measured: None if nothing was measured; then these figures are
    scaled from an H200's.
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
        """NVRTC's target: "sm_90a", with the features that only this compute capability has (wgmma,
        setmaxnreg).
        """
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if self.wgmma else "")

    @property
    def wgmma(self) -> bool:
        """Whether warpgroups can multiply operands in shared memory, and `setmaxnreg` can move
        registers: on Hopper only.
        """
        return self.capability[0] == 9

    @property
    def programmatic_launch(self) -> bool:
        """Whether a kernel may start before the previous one has ended, and waits for it itself
        (`griddepcontrol`).
        """
        return self.capability >= (9, 0)

    def clustered(self, blocks: int) -> int:
        """How many blocks run at once in clusters of this many blocks, one block on each
        multiprocessor. A cluster stays within one part of the GPU (a GPC), whose number of
        multiprocessors need not be a multiple of it: an H200 and an H100 run 28 clusters of four,
        not 32.
        """
        most = self.multiprocessors if blocks <= 2 else self.multiprocessors * 7 // 8
        return most // blocks * blocks

    @property
    def warps_to_saturate_memory(self) -> int:
        """See Measured. Latency times bandwidth must be in flight, and latencies differ little
        between GPUs.
        """
        if self.measured:
            return self.measured.warps_to_saturate_memory
        return max(
            1,
            min(
                round(_OF_H200.warps_to_saturate_memory * self._relative_bandwidth),
                self.multiprocessors * self.warps,
            ),
        )

    @property
    def groups_read_per_two_tiles(self) -> int:
        """See Measured. A tile occupies one multiprocessor; reading uses the bandwidth of the whole
        GPU.
        """
        if self.measured:
            return self.measured.groups_read_per_two_tiles
        return max(1, round(_OF_H200.groups_read_per_two_tiles * self._relative_bandwidth))

    @property
    def _relative_bandwidth(self) -> float:
        return self.memory_bandwidth / H200.memory_bandwidth


_OF_H200 = Measured(warps_to_saturate_memory=3200, groups_read_per_two_tiles=300)

# NVIDIA H200 Tensor Core GPU datasheet (bandwidth); its GH100 is that of the H100 SXM5, with the
# whole L2, as its driver reports.
H200 = Arch("H200", (9, 0), 132, 228 * _KIB, 227 * _KIB, 60 * _MIB, 4.8e12, measured=_OF_H200)
# NVIDIA H100 Tensor Core GPU Architecture, white paper, H100 SXM5; its datasheet (bandwidth).
H100 = Arch("H100", (9, 0), 132, 228 * _KIB, 227 * _KIB, 50 * _MIB, 3.35e12)
# NVIDIA A100 Tensor Core GPU Architecture, white paper; A100 80GB datasheet, SXM (bandwidth).
A100 = Arch("A100", (8, 0), 108, 164 * _KIB, 163 * _KIB, 40 * _MIB, 2.039e12)
# NVIDIA Ada GPU Architecture, white paper (RTX 4090); NVIDIA L40S datasheet, AD102's L2 whole.
L40S = Arch("L40S", (8, 9), 142, 100 * _KIB, 99 * _KIB, 96 * _MIB, 864e9, warps=48)
RTX_4090 = Arch("RTX 4090", (8, 9), 128, 100 * _KIB, 99 * _KIB, 72 * _MIB, 1.008e12, warps=48)
# NVIDIA HGX B200 datasheet (bandwidth); multiprocessors and L2 as Chips and Cheese read them from
# one ("Nvidia's B200", 2025).
B200 = Arch("B200", (10, 0), 148, 228 * _KIB, 227 * _KIB, 126 * _MIB, 8e12)

# By the names that their drivers report. Other GPUs with these names have less memory or are parts
# of a GPU: their facts are read.
KNOWN: Mapping[str, Arch] = {
    "NVIDIA H200": H200,
    "NVIDIA H100 80GB HBM3": H100,
    "NVIDIA A100-SXM4-80GB": A100,
    "NVIDIA L40S": L40S,
    "NVIDIA GeForce RTX 4090": RTX_4090,
    "NVIDIA B200": B200,
}


def named(name: str) -> Arch:
    """The known GPU with this name, in upper or lower case. OptionError for an unknown name."""
    found = {arch.name.casefold(): arch for arch in KNOWN.values()}
    if name.casefold() not in found:
        raise OptionError(
            f"gpu = {name!r}", expected=f"one of {', '.join(arch.name for arch in KNOWN.values())}"
        )
    return found[name.casefold()]


def find(read: Arch) -> Arch:
    """The known GPU that a device is, by its name and the facts that cannot differ; otherwise
    `read` itself.

    read: what the device's driver reports. memory_bandwidth 0: unknown; then each multiprocessor is
    assumed to have as much as an H200's.
    """
    known = KNOWN.get(read.name)
    if known and (known.capability, known.multiprocessors) == (
        read.capability,
        read.multiprocessors,
    ):
        return known
    if read.memory_bandwidth > 0:
        return read
    return replace(
        read, memory_bandwidth=H200.memory_bandwidth * read.multiprocessors / H200.multiprocessors
    )
