"""What offloaded experts cost a machine: how fast a GPU reads pinned memory by kernels and by
copies, how fast CPUs read beside it, and what it takes to hand rows over and to wait for them.

    python benchmarks/offload_machine.py --out build/offload_machine.json

Experts have the sizes of DeepSeek-V3's in NVFP4: 24.8 MB each. Prints a line for each number.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fusion_moe.encodings import NVFP4
from fusion_moe.layouts.w16x64 import W16X64
from fusion_moe.offload import launches
from fusion_moe.offload.launches import Parts, Shape
from fusion_moe.offload.pinned import Pinned
from fusion_moe.offload.turnaround import Turnaround, starts
from fusion_moe.runtime.faults import synchronize
from fusion_moe.runtime.host_memory import bandwidth, pages

H, INNER = 7168, 2048
found: dict[str, Any] = {}


def tell(name: str, value: Any) -> None:
    found[name] = value
    print(f"{name}: {value}", flush=True)


def experts(count: int, device: str) -> tuple[list[torch.Tensor], list[Shape]]:
    """The parts of experts, on the host or for slots."""
    tensors, shapes = [], []
    for n, k in ((2 * INNER, H), (H, INNER)):
        for part in NVFP4.parts:
            if part.of_matrix:
                continue
            shape = NVFP4.part_shape(part, (count,), n, k)
            if device == "cpu":
                t = pages.empty(shape, torch.uint8)
                t.view(-1, 4096).copy_(torch.randint(0x20, 0x60, (1, 4096)).byte())
                t[3].random_(0x20, 0x60)
                t = t.view(part.dtype)
            else:
                t = torch.zeros(shape, dtype=torch.uint8, device=device).view(part.dtype)
            tensors.append(t)
            shapes.append(Shape.of(t, part, NVFP4.element.tile_order))
    return tensors, shapes


def seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """Median of GPU times."""
    times = []
    for _ in range(repeats):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        run()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b) / 1e3)
    return median(times)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--experts", type=int, default=32)
    arguments.add_argument("--seconds", type=float, default=50, help="no section begins after")
    given = arguments.parse_args()
    start = time.monotonic()
    cpus = bandwidth.cpus()
    tell("machine", f"{torch.cuda.get_device_name()}, {cpus} CPUs of {bandwidth.cpu()}")
    state: dict[str, Any] = {
        "count": given.experts,
        "threads": [n for n in (4, 8, cpus - 2) if n > 0],
    }
    for section in (pinning, latency, copies, reading, computing):
        if time.monotonic() - start > given.seconds:
            tell("left out", section.__name__)
            continue
        try:
            section(state)
        except Exception:
            traceback.print_exc()
    tell("seconds", round(time.monotonic() - start, 1))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1))


def pinning(state: dict[str, Any]) -> None:
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    start = time.perf_counter()
    storage, shapes = experts(state["count"], "cpu")
    nbytes = sum(t.nbytes for t in storage)
    tell("home_GB", round(nbytes / 1e9, 2))
    tell("written_GB_s", round(nbytes / 1e9 / (time.perf_counter() - start), 2))
    start = time.perf_counter()
    pinned = [Pinned(t) for t in storage]
    tell("pin_s_per_GB", round((time.perf_counter() - start) / nbytes * 1e9, 3))
    tell("large_pages", round(pages.obtained(*storage) / nbytes, 3))
    slots, _ = experts(state["count"], "cuda")
    state |= {
        "storage": storage,
        "shapes": shapes,
        "pinned": pinned,
        "slots": slots,
        "nbytes": nbytes,
    }


def by_kernel(kernel: launches.Kernel, numbers: list[int]) -> None:
    kernel(torch.cuda.current_stream().cuda_stream, numbers)


def copies(state: dict[str, Any]) -> None:
    storage, slots, nbytes = state["storage"], state["slots"], state["nbytes"]

    def by_engine() -> None:
        for t, slot in zip(storage, slots, strict=True):
            slot.view(torch.uint8).copy_(t.view(torch.uint8), non_blocking=True)

    tell("engine_GB_s", round(nbytes / seconds(by_engine) / 1e9, 1))
    addresses = [p.address for p in state["pinned"]]
    tiled = Parts(state["shapes"], addresses, slots)
    plain = Parts([Shape.of(t) for t in storage], addresses, slots)
    state["parts"] = tiled, plain  # which kernels read
    for blocks in (8, 16, 32):
        kernel = launches.Kernel(launches.load(), blocks)
        for name, parts in (("plain", plain), ("tiled", tiled)):
            load = partial(by_kernel, kernel, [0, 0, state["count"], parts.address, 0])
            tell(f"kernel_{name}_{blocks}_GB_s", round(nbytes / seconds(load, 3) / 1e9, 1))
        state[f"load_{blocks}"] = load
    right = []
    for i in (0, 2):
        want = W16X64.pack(storage[i][3].cuda(), storage[i + 1][3].cuda(), encoding=NVFP4)
        right += [
            torch.equal(a.view(torch.uint8), b[3].view(torch.uint8))
            for a, b in zip(want, slots[i : i + 2], strict=True)
        ]
    tell("tiles_are_right", right)


def latency(state: dict[str, Any]) -> None:
    device = torch.device("cuda", 0)
    for copies_ in (False, True):
        layer = Turnaround(device, H, 8, 8, copies_)
        for rows in (0, 1, 8, 64):
            where = "copied" if copies_ else "handed_over"
            tell(f"step_{rows}_rows_{where}_us", round(layer.nanoseconds(rows) / 1e3, 2))
        ids = torch.ones(8, 8, dtype=torch.int64, device=device)
        start = time.perf_counter()
        for _ in range(50):
            layer.moves.begin(layer.x, ids)
            layer.y.zero_()
            layer.moves.end(layer.y, layer.slot_of)
        tell(f"launches_us_{where}", round((time.perf_counter() - start) * 2e4, 1))
        synchronize()
    tell("starts_ns", starts(device))


def reading(state: dict[str, Any]) -> None:
    memory = pages.empty((2**31,), torch.uint8).fill_(1)
    side = torch.cuda.Stream()
    for threads in state["threads"]:
        loop = bandwidth.Bandwidth(0, threads, "", 1024)
        alone = memory.nbytes / loop.times(memory, 5)[2] / 1e9
        tell(f"read_{threads}_GB_s", round(alone, 1))
        for name in ("load_16", "engine"):
            if name not in state and name != "engine":
                continue
            done = torch.cuda.Event(enable_timing=True)
            began = torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(side):
                began.record()
                for _ in range(12):
                    if name == "engine":
                        for t, slot in zip(state["storage"], state["slots"], strict=True):
                            slot.view(torch.uint8).copy_(t.view(torch.uint8), non_blocking=True)
                    else:
                        state[name]()
                done.record()
            times = []
            while not done.query():
                start = time.perf_counter()
                loop.reader(memory)()
                if not done.query():
                    times.append(time.perf_counter() - start)
            torch.cuda.synchronize()
            if times:
                tell(
                    f"read_{threads}_beside_{name}_GB_s",
                    round(memory.nbytes / median(times) / 1e9, 1),
                )
            copied = 12 * state["nbytes"] / (began.elapsed_time(done) / 1e3) / 1e9
            tell(f"{name}_beside_{threads}_GB_s", round(copied, 1))


def computing(state: dict[str, Any]) -> None:
    """The CPU's product of experts, of which each row has one: bytes of experts per second."""
    count = min(16, state["count"])
    scales = [torch.ones(count, 2), torch.ones(count)]
    gate_up = [state["storage"][0][:count], state["storage"][1][:count], scales[0]]
    down = [state["storage"][2][:count], state["storage"][3][:count], scales[1]]
    each = sum(t[0].nbytes for t in (*gate_up, *down))
    torch.set_num_threads(max(1, bandwidth.cpus() - 2))
    side = torch.cuda.Stream()
    for rows in (1, 8, 16, 64):
        x, w = torch.randn(rows, H).bfloat16(), torch.ones(rows, 1)
        ids = (torch.arange(rows) % count)[:, None]
        run = partial(
            torch.ops.fusion_moe.fused_experts, x, ids, w, gate_up, down, weight_format="nvfp4"
        )
        run()
        read = min(rows, count) * each
        for beside in (False, True):
            times = []
            if beside:
                with torch.cuda.stream(side):
                    for _ in range(12):
                        state["load_16"]()
            for _ in range(15):
                start = time.perf_counter()
                run()
                if not beside or not side.query():
                    times.append(time.perf_counter() - start)
            torch.cuda.synchronize()
            if times:
                name = f"cpu_{rows}_rows{'_beside' * beside}"
                tell(f"{name}_us", round(1e6 * median(times), 1))
                tell(f"{name}_GB_s", round(read / median(times) / 1e9, 1))


if __name__ == "__main__":
    main()
