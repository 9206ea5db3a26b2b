"""Facts about GPUs: known GPUs as tables, all others as their driver reports them. Nothing here
queries a device.

Figures of known GPUs are NVIDIA's, per device: multiprocessors, L2, bandwidth and tensor rate from
data sheets and white papers (each entry names its own); shared memory, registers, warps and blocks
from the table of compute capabilities in the CUDA C++ Programming Guide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from .errors import OptionError, did_you_mean

AUTO = "auto"  # the option cuda_arch: the GPU that is there
_KIB, _MIB = 2**10, 2**20
_MOST_THREADS = 1024  # of a block
RESERVED = 1024  # bytes of shared memory that the driver takes for each block
_REGISTERS_AT_ONCE = 8  # a thread's registers are given in such numbers
# What kernels may need, and the lowest compute capability that has it.
FEATURES: Mapping[str, tuple[int, int]] = {
    "mma": (8, 0),  # of bf16 and f16, 16 x 8 x 16
    "cp.async": (8, 0),
    "mma.e4m3": (8, 9),
    "griddepcontrol": (9, 0),
    "clusters": (9, 0),
    "TMA": (9, 0),
    "wgmma": (9, 0),
    "setmaxnreg": (9, 0),
}
_HOPPER_ALONE = ("wgmma", "setmaxnreg")  # as code for sm_90a: no other GPU, and no PTX
# FLOP of a multiprocessor per clock: dense, of bf16 with sums in float32
_TENSOR_RATES = {
    (8, 0): 2048,
    (8, 7): 2048,
    (9, 0): 4096,
    (10, 0): 8192,
    (10, 3): 8192,
    (11, 0): 8192,
}
_OTHER_TENSOR_RATE = 1024


@dataclass(frozen=True)
class Arch:
    """A GPU architecture: its compute capability, limits and features.

    capability: CUDA's compute capability. shared_per_multiprocessor, shared_per_block: bytes of
    shared memory, the latter as far as a kernel may opt in. l2_bytes: size of the L2 cache.
    memory_bandwidth: bytes a second, as specified. tensor_rate: FLOP a second, dense, of bf16 with
    sums in float32. registers, warps, blocks: how many 32-bit registers, and resident warps and
    blocks, a multiprocessor has. code: what its kernels are compiled to, if not to machine code of
    its own: PTX, and the machine code that the driver makes of it ("compute_80,sm_90").
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_per_multiprocessor: int
    shared_per_block: int
    l2_bytes: int
    memory_bandwidth: float
    tensor_rate: float
    registers: int = 65536
    warps: int = 64
    blocks: int = 32
    code: str = ""

    @property
    def nvrtc(self) -> str:
        """NVRTC's target: "sm_90a", with the features that only this compute capability has (wgmma,
        setmaxnreg); or `code`.
        """
        major, minor = self.capability
        alone = self.capability == FEATURES["wgmma"]
        return self.code or f"sm_{major}{minor}" + ("a" if alone else "")

    def why_not(self, needs: Iterable[str]) -> str:
        """Why it does not run kernels that need these FEATURES; "" if it does."""
        for name in needs:
            alone = name in _HOPPER_ALONE
            if self.capability < FEATURES[name] or (
                alone and (self.capability != FEATURES[name] or self.code)
            ):
                return (
                    f"{name} requires compute capability {shown(FEATURES[name])}"
                    f"{'' if alone else ' or higher'}, {self.name} has {shown(self.capability)}"
                )
        return ""

    def why_no_room(self, threads: int, shared: int, blocks: int = 1, registers: int = 0) -> str:
        """Which limit a kernel exceeds, if a multiprocessor is to have this many blocks of it; ""
        if none.

        threads, shared: of a block, in bytes; registers: of a thread.
        """
        per_thread = -(-registers // _REGISTERS_AT_ONCE) * _REGISTERS_AT_ONCE
        limits = (
            ("threads of a block", threads, _MOST_THREADS),
            ("bytes of shared memory of a block", shared, self.shared_per_block),
            ("blocks of a multiprocessor", blocks, self.blocks),
            ("threads of a multiprocessor", blocks * threads, self.threads),
            (
                "bytes of shared memory of a multiprocessor",
                blocks * (shared + RESERVED),
                self.shared_per_multiprocessor,
            ),
            ("registers of a multiprocessor", blocks * threads * per_thread, self.registers),
        )
        over = (
            f"{result} {what}, {self.name} has {most}"
            for what, result, most in limits
            if result > most
        )
        return next(over, "")

    @property
    def threads(self) -> int:
        """Resident threads of a multiprocessor."""
        return 32 * self.warps

    @property
    def programmatic_launch(self) -> bool:
        """Whether a kernel may start before the previous one has ended, and waits for it itself
        (`griddepcontrol`).
        """
        return not self.why_not(("griddepcontrol",))

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
        """For a kernel that reads weights from memory to registers, how many of its warps must be
        resident on the whole GPU to saturate the memory bandwidth.

        Latency times bandwidth must be in flight, and latencies differ little between GPUs.
        """
        scaled = round(_WARPS_OF_H200 * self._relative_bandwidth)
        return max(1, min(scaled, self.multiprocessors * self.warps))

    @property
    def groups_read_per_two_tiles(self) -> int:
        """How many groups' weights a small-M kernel reads in the time in which a block of a large-M
        kernel multiplies two M tiles: measured on an H200, times the ratio of memory bandwidths.
        """
        return max(1, round(_GROUPS_OF_H200 * self._relative_bandwidth))

    @property
    def _relative_bandwidth(self) -> float:
        return self.memory_bandwidth / H200.memory_bandwidth


_WARPS_OF_H200, _GROUPS_OF_H200 = 3200, 300  # measured: no data sheet gives them

# NVIDIA H200 Tensor Core GPU datasheet (bandwidth); its GH100 is that of the H100 SXM5, with the
# whole L2, as its driver reports.
H200 = Arch("H200", (9, 0), 132, 228 * _KIB, 227 * _KIB, 60 * _MIB, 4.8e12, 989.4e12)
# NVIDIA H100 Tensor Core GPU Architecture, white paper, H100 SXM5; its datasheet (bandwidth).
H100 = Arch("H100", (9, 0), 132, 228 * _KIB, 227 * _KIB, 50 * _MIB, 3.35e12, 989.4e12)
# NVIDIA A100 Tensor Core GPU Architecture, white paper; A100 80GB datasheet, SXM (bandwidth).
A100 = Arch("A100", (8, 0), 108, 164 * _KIB, 163 * _KIB, 40 * _MIB, 2.039e12, 312e12)
A100_40GB = replace(A100, name="A100 40GB", memory_bandwidth=1.555e12)


def _small(
    name: str,
    capability: tuple[int, int],
    multiprocessors: int,
    l2: int,
    bandwidth: float,
    rate: float,
    blocks: int = 24,
) -> Arch:
    """One of 8.6, 8.9 or 12.x."""
    return Arch(
        name,
        capability,
        multiprocessors,
        100 * _KIB,
        99 * _KIB,
        l2 * _MIB,
        bandwidth,
        rate,
        warps=48,
        blocks=blocks,
    )


# NVIDIA A10 and A40 datasheets; NVIDIA Ampere GA102 GPU Architecture, white paper (RTX 3090, L2).
A10 = _small("A10", (8, 6), 72, 6, 600e9, 125e12, 16)
A40 = _small("A40", (8, 6), 84, 6, 696e9, 149.7e12, 16)
RTX_3090 = _small("RTX 3090", (8, 6), 82, 6, 936e9, 71e12, 16)
# NVIDIA L40S and L4 datasheets, with the whole L2 of AD102 and of AD104; NVIDIA Ada GPU
# Architecture, white paper (RTX 4090).
L40S = _small("L40S", (8, 9), 142, 96, 864e9, 362e12)
L4 = _small("L4", (8, 9), 58, 48, 300e9, 121e12)
RTX_4090 = _small("RTX 4090", (8, 9), 128, 72, 1.008e12, 165.2e12)
# NVIDIA HGX B200 datasheet (bandwidth, rate); multiprocessors and L2 as Chips and Cheese read them
# from one ("Nvidia's B200", 2025).
B200 = Arch("B200", (10, 0), 148, 228 * _KIB, 227 * _KIB, 126 * _MIB, 8e12, 2.25e15)
# NVIDIA Jetson Thor datasheet (T5000); its rate is a quarter of that of dense FP4.
THOR = Arch(
    "Jetson Thor",
    (11, 0),
    20,
    228 * _KIB,
    227 * _KIB,
    32 * _MIB,
    273e9,
    259e12,
    warps=48,
    blocks=24,
)
# NVIDIA RTX Blackwell GPU Architecture, white paper (RTX 5090), and that of RTX PRO Blackwell;
# NVIDIA DGX Spark datasheet, whose rate is a quarter of that of dense FP4.
RTX_PRO_6000 = _small("RTX PRO 6000", (12, 0), 188, 128, 1.792e12, 503.8e12)
RTX_5090 = _small("RTX 5090", (12, 0), 170, 96, 1.792e12, 209.5e12)
GB10 = _small("GB10", (12, 1), 48, 24, 273e9, 125e12)

# By the names that their drivers report. Other GPUs with these names have less memory or are parts
# of a GPU: their facts are read. The first one of a compute capability stands for it.
KNOWN: Mapping[str, Arch] = {
    "NVIDIA H200": H200,
    "NVIDIA H100 80GB HBM3": H100,
    "NVIDIA A100-SXM4-80GB": A100,
    "NVIDIA A100-SXM4-40GB": A100_40GB,
    "NVIDIA A10": A10,
    "NVIDIA A40": A40,
    "NVIDIA GeForce RTX 3090": RTX_3090,
    "NVIDIA L40S": L40S,
    "NVIDIA L4": L4,
    "NVIDIA GeForce RTX 4090": RTX_4090,
    "NVIDIA B200": B200,
    "NVIDIA Thor": THOR,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": RTX_PRO_6000,
    "NVIDIA GeForce RTX 5090": RTX_5090,
    "NVIDIA GB10": GB10,
}


def shown(capability: tuple[int, ...]) -> str:
    """A compute capability as people write it: (8, 0) -> "8.0"."""
    return ".".join(map(str, capability))


def with_article(arch: Arch) -> str:
    """ "an A100", "a B200"."""
    return f"{'an' if arch.name[0] in 'AHLR' else 'a'} {arch.name}"


def _key(name: str) -> str:
    """What is left of a name without its maker, its brand, case, blanks and hyphens."""
    return re.sub("^(nvidia)?(geforce)?(rtx)?", "", re.sub("[ _-]", "", name.casefold()))


_BY_NAME = {_key(n): arch for driver, arch in KNOWN.items() for n in (arch.name, driver)}
_BY_CAPABILITY = {
    _key(name): arch
    for arch in reversed([*KNOWN.values()])  # so that the first one stays
    for name in (shown(arch.capability), "sm_{}{}".format(*arch.capability), arch.nvrtc)
}


def is_capability(asked: str) -> bool:
    """Whether a text names a known compute capability ("8.0", "sm_80") rather than a GPU."""
    return _key(asked) in _BY_CAPABILITY


def lookup(name: str) -> Arch | None:
    """The known GPU with this name, ours ("RTX 4090") or its driver's ("NVIDIA GeForce RTX 4090"),
    or the first one of a compute capability ("8.0", "sm_80"). Case, blanks, hyphens and a leading
    "NVIDIA GeForce RTX" do not matter.
    """
    return (_BY_NAME | _BY_CAPABILITY).get(_key(name))


def tensor_rate(
    name: str, capability: tuple[int, int], multiprocessors: int, clock: float
) -> float:
    """FLOP a second of a GPU with a name of its driver's and a clock in Hz. GeForce GPUs add up in
    float32 at half the rate.
    """
    each = _TENSOR_RATES.get(capability, _OTHER_TENSOR_RATE)
    return each * multiprocessors * clock / (2 if "GeForce" in name else 1)


def named(name: str | tuple[int, int], what: str = "gpu", also: Iterable[str] = ()) -> Arch:
    """The GPU that `lookup` finds; a compute capability may be a pair of ints, too. OptionError for
    an unknown one.

    what, also: what asks for it, and what else that accepts, for the message.
    """
    text = shown(name) if isinstance(name, tuple) else name
    if isinstance(text, str) and (result := lookup(text)):
        return result
    names = [*also, *(arch.name for arch in KNOWN.values())]
    capabilities = dict.fromkeys(shown(arch.capability) for arch in KNOWN.values())
    raise OptionError(
        f"{what} = {name!r}",
        expected=f"one of {', '.join(names)}, or a compute capability as text: "
        f"{', '.join(capabilities)}",
        todo=did_you_mean(str(text), [*names, *KNOWN, *capabilities]),
    )


def nearest(capability: tuple[int, int]) -> Arch:
    """The first known GPU of a compute capability, or of the highest known one below it."""
    older = (arch for arch in KNOWN.values() if arch.capability <= capability)
    return max(older, key=lambda arch: arch.capability, default=A100)


def like(name: str, capability: tuple[int, int], multiprocessors: int) -> Arch:
    """The known GPU that a device is, by its driver's name; otherwise the nearest one, under this
    name and with this compute capability.
    """
    return _known(name, capability, multiprocessors) or replace(
        nearest(capability), name=name, capability=capability
    )


def standing_in(device: Arch, asked: str) -> Arch:
    """A device as one with all the facts of a known GPU, or, for a compute capability ("8.0"), with
    its limits. It runs PTX of that compute capability. OptionError for an unknown or newer one.
    """
    wanted = named(asked, "option cuda_arch", [AUTO])
    own, major_minor = shown(device.capability), "{}{}".format
    if wanted.capability > device.capability:
        raise OptionError(
            f"option cuda_arch = {asked!r}, of compute capability {shown(wanted.capability)}, on "
            f"{device.name}, which has {own}",
            expected=f"a GPU of compute capability {own} or lower",
            todo="8.9 has the limits of 12.0 and 12.1",
        )
    if wanted.capability != device.capability:
        code = f"compute_{major_minor(*wanted.capability)},sm_{major_minor(*device.capability)}"
        wanted = replace(wanted, code=code)
    if not is_capability(asked):
        return wanted
    return replace(
        wanted,
        multiprocessors=device.multiprocessors,
        l2_bytes=device.l2_bytes,
        memory_bandwidth=device.memory_bandwidth,
        tensor_rate=device.tensor_rate,
    )


def _known(name: str, capability: tuple[int, int], multiprocessors: int) -> Arch | None:
    known = KNOWN.get(name)
    if known and (known.capability, known.multiprocessors) == (capability, multiprocessors):
        return known
    return None


def find(read: Arch) -> Arch:
    """The known GPU that a device is, by its name and the facts that cannot differ; otherwise
    `read` itself.

    read: what the device's driver reports. memory_bandwidth 0: unknown; then each multiprocessor is
    assumed to have as much as an H200's.
    """
    if known := _known(read.name, read.capability, read.multiprocessors):
        return known
    if read.memory_bandwidth > 0:
        return read
    return replace(
        read, memory_bandwidth=H200.memory_bandwidth * read.multiprocessors / H200.multiprocessors
    )
