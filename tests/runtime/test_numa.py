"""Weights on all NUMA nodes by turns: which nodes, when not, and where pages are.

What is marked `needs_nodes` runs on a machine with several nodes, emulated ones too:
tools/two_nodes.
"""

from __future__ import annotations

import copy
import ctypes
import mmap
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from forgetting import forgetting

import fusion_moe
from fusion_moe import env, options
from fusion_moe.nn import NVFP4GroupedLinear
from fusion_moe.runtime import numa, pages

SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
BIND, MOVE = 2, 2
CACHES = (numa.topology, numa._why_refused, numa._places)


def refusal() -> str:
    try:
        numa.policy()
    except OSError as error:
        return str(error)
    return numa._why_refused((0,))


needs_calls = pytest.mark.skipif(
    bool(refusal()), reason=f"this system places no pages: {refusal()}"
)
needs_nodes = pytest.mark.skipif(
    len(numa.topology()) < 2 or bool(refusal()),
    reason="this machine has one NUMA node: tools/two_nodes",
)


@pytest.fixture(autouse=True)
def _anew():
    with forgetting(*CACHES):
        yield


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """-> makes this a machine with so many nodes, on paper."""

    def make(cpus, memory, allowed, affinity):
        (tmp_path / "has_memory").write_text(f"{memory}\n")
        for node, listed in cpus.items():
            (tmp_path / f"node{node}").mkdir()
            (tmp_path / f"node{node}" / "cpulist").write_text(f"{listed}\n")
        (tmp_path / "status").write_text(
            f"Name:\tpython\nMems_allowed:\t00000003\nMems_allowed_list:\t{allowed}\nvoluntary:\t1\n"
        )
        monkeypatch.setattr(numa, "_NODES", tmp_path)
        monkeypatch.setattr(numa, "_STATUS", tmp_path / "status")
        monkeypatch.setattr(numa, "_MAPS", tmp_path / "maps")
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: affinity)

    return make


@pytest.fixture
def one_node(monkeypatch):
    """Pages are interleaved, over the one node that every machine has."""
    monkeypatch.setattr(numa, "spread", lambda: numa.Spread((0,)))


@pytest.fixture
def no_calls(monkeypatch):
    """Numbers of system calls that there are not."""
    monkeypatch.setattr(
        numa,
        "_NUMBERS",
        {platform.machine(): dict.fromkeys(("mbind", "get_mempolicy", "move_pages"), 9999)},
    )


def in_thread(work):
    """What work() returns in a thread of its own, whose policy goes with it."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def set_policy(mode: int, *nodes: int) -> None:
    number = ctypes.c_long(SET_MEMPOLICY[platform.machine()])
    assert (
        numa._libc().syscall(
            number, ctypes.c_int(mode), numa._mask(nodes), ctypes.c_ulong(numa._MOST + 1)
        )
        == 0
    )


def linear(experts: int = 4) -> NVFP4GroupedLinear:
    return NVFP4GroupedLinear.from_float(
        torch.randn(experts, 2048, 2048, generator=torch.Generator().manual_seed(1)).bfloat16()
    )


# Which nodes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", set()),
        ("\n", set()),
        ("0\n", {0}),
        ("0-2,5", {0, 1, 2, 5}),
        ("3,8-9,64", {3, 8, 9, 64}),
        ("\t0-1", {0, 1}),
    ],
)
def test_lists_of_linux(text, found):
    assert numa.numbers(text) == found


TWO = {0: "0-3,8-11", 1: "4-7,12-15"}


@pytest.mark.parametrize(
    ("cpus", "memory", "allowed", "affinity", "nodes"),
    [
        (TWO, "0-1", "0-1", set(range(16)), (0, 1)),
        (TWO, "0-1", "0-1", {3, 15}, (0, 1)),
        (TWO, "0-1", "0-1", {0, 8}, (0,)),  # taskset
        (TWO, "0-1", "1", set(range(16)), (1,)),  # cpuset.mems
        # memory without CPUs is slow, or for who asks for it
        (TWO | {2: ""}, "0-2", "0-2", set(range(16)), (0, 1)),
        (TWO | {2: "16-17"}, "0-1", "0-2", set(range(18)), (0, 1)),  # CPUs without memory
        ({0: "0-1", 3: "2-3", 70: "4"}, "0,3,70", "0-127", {0, 2, 4}, (0, 3, 70)),
    ],
)
def test_nodes_are_those_of_the_process(machine, cpus, memory, allowed, affinity, nodes):
    machine(cpus, memory, allowed, affinity)
    assert numa.usable() == nodes


OPENMP = (
    sorted(set(numa._OPENMP.findall(Path("/proc/self/maps").read_text())))
    if Path("/proc/self/maps").exists()
    else []
)


@pytest.mark.skipif(
    not OPENMP or not numa.cpus() >= {0, 1}, reason="needs an OpenMP, and the CPUs 0 and 1"
)
@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, {0, 1}),
        ({"OMP_PROC_BIND": "close"}, {0, 1}),
        ({"OMP_PLACES": "{1}"}, {1}),
        ({"OMP_PLACES": "threads"}, {0, 1}),
    ],
)
def test_cpus_are_those_of_all_threads_where_openmp_binds_them(variables, found):
    """It has bound the first thread to one of them then."""
    load = (
        f"import ctypes, os, runpy; os.sched_setaffinity(0, {{0, 1}}); openmp = "
        f"ctypes.CDLL({OPENMP[0]!r})"
    )
    program = f"{load}; print(sorted(runpy.run_path({numa.__file__!r}, run_name='numa')['cpus']()))"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=clean | variables,
        check=True,
    )
    assert done.stdout.strip() == str(sorted(found))


def test_what_is_not_told_is_not_forbidden(machine, tmp_path):
    machine(TWO, "0-1", "0", {0, 4})
    (tmp_path / "status").write_text("Name:\tpython\n")
    assert numa.usable() == (0, 1)
    (tmp_path / "has_memory").unlink()
    numa.topology.cache_clear()
    assert numa.spread() == numa.Spread((), "this system tells of no nodes")


# When not -----------------------------------------------------------------------------------------


def test_one_node_asks_for_nothing(machine, no_calls):
    machine({0: "0-1"}, "0", "0", {0, 1})
    assert numa.spread() == numa.Spread((), "all memory is on one node")


def test_a_process_on_one_of_the_nodes(machine, no_calls):
    machine(TWO, "0-1", "0-1", {5})
    assert numa.spread() == numa.Spread(
        (), "the CPUs and memory of this process are on node 1 alone"
    )


def test_a_process_with_cpus_here_and_memory_there(machine, no_calls):
    machine(TWO, "0-1", "1", {0})
    assert numa.spread() == numa.Spread((), "no node has CPUs and memory for this process")


def numa_line() -> tuple[bool, str, str]:
    return next((c.there, c.found, c.todo) for c in env.environment().checks if c.name == "NUMA")


def test_without_permission_it_goes_on_and_env_says_so(machine, no_calls):
    machine(TWO, "0-1", "0-1", {0, 4})
    why = "nodes 0, 1, but no permission to place pages: [Errno 38] mbind: Function not implemented"
    assert numa.spread() == numa.Spread((), why, permitted=False)
    assert numa_line() == (False, why, "in a container: --cap-add SYS_NICE")
    t = pages.empty((3 * pages.PAGE,), torch.uint8).fill_(1)
    assert pages.on_large_pages(t) is t
    assert pages.on_nodes(t) == {}


def test_a_call_that_fails_later_leaves_pages_as_they_come(one_node, no_calls):
    t = pages.empty((3 * pages.PAGE,), torch.uint8).fill_(1)
    assert t.data_ptr() % pages.PAGE == 0
    assert t.sum() == t.numel()


@needs_calls
def test_a_policy_of_the_process_is_respected(machine):
    machine(TWO, "0-1", "0-1", {0, 4})

    def bound():
        set_policy(BIND, 0)
        return numa.spread(), numa_line()

    spread, line = in_thread(bound)
    assert spread == numa.Spread((), "this process has the policy bind of node 0")
    assert line == (True, spread.why, "")
    assert numa.spread() == numa.Spread((0, 1))
    assert numa_line() == (True, "weights on nodes 0, 1 by turns", "")


@needs_calls
def test_the_option(machine):
    machine(TWO, "0-1", "0-1", {0, 4})
    assert pages.nodes() == (0, 1)
    with options.override(numa_interleave=False):
        assert pages.nodes() == ()
        assert numa_line()[1].endswith("the option numa_interleave is off")


# Where pages are ----------------------------------------------------------------------------------


@needs_calls
def test_memory_of_weights_has_the_policy(one_node):
    t = pages.empty((3 * pages.PAGE + 5,), torch.uint8)
    last = t.data_ptr() + t.numel() - 1
    assert numa.policy(t.data_ptr()) == numa.policy(last) == (numa.INTERLEAVE, (0,))
    assert numa.located([t.data_ptr()])[0] < 0
    t.fill_(1)
    assert numa.located([t.data_ptr(), last])[1] == 0
    plain = torch.empty(2**25, dtype=torch.uint8)
    assert numa.policy(plain.data_ptr())[0] == numa.DEFAULT


@needs_calls
def test_weights_are_made_there_and_prepare_puts_others_there(one_node):
    made = linear()
    assert numa.policy(made.weight.data_ptr())[0] == numa.INTERLEAVE
    with options.override(numa_interleave=False):
        early = linear()
    copied = copy.deepcopy(made)
    for module in early, copied:
        assert numa.policy(module.weight.data_ptr())[0] == numa.DEFAULT
        fusion_moe.prepare_(module, "cpu")
        assert numa.policy(module.weight.data_ptr())[0] == numa.INTERLEAVE
        assert torch.equal(module.weight, made.weight)
        place = module.weight.data_ptr()
        fusion_moe.prepare_(module, "cpu")
        assert module.weight.data_ptr() == place


@needs_calls
def test_prepare_leaves_shared_memory(one_node):
    module = copy.deepcopy(linear()).share_memory()
    place = module.weight.data_ptr()
    fusion_moe.prepare_(module, "cpu")
    assert module.weight.is_shared()
    assert module.weight.data_ptr() == place


@needs_nodes
@pytest.mark.parametrize("size", [numa.PAGE, pages.PAGE], ids=["small", "large"])
def test_pages_alternate(size):
    memory = mmap.mmap(-1, 17 * pages.PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if size == pages.PAGE else mmap.MADV_NOHUGEPAGE)
    t = torch.frombuffer(memory, dtype=torch.uint8)
    start = -(-t.data_ptr() // pages.PAGE) * pages.PAGE
    nodes = numa.spread().nodes
    numa.interleave(t.data_ptr(), t.numel(), nodes)
    t.fill_(1)
    found = numa.located(range(start, start + 16 * pages.PAGE, size))
    assert sorted(found[: len(nodes)]) == list(nodes)
    assert all(later == node for node, later in zip(found, found[len(nodes) :], strict=False))


@needs_nodes
def test_weights_are_on_all_nodes_and_compute_the_same_bits():
    x, ends = torch.randn(6, 2048).bfloat16(), torch.tensor([1, 2, 4, 6], dtype=torch.int32)
    with options.override(numa_interleave=False):
        plain = linear()
        want = plain(x, ends)
    # on the nodes of the threads that wrote it
    assert numa.policy(plain.weight.data_ptr())[0] == numa.DEFAULT
    module = linear()
    nodes = numa.spread().nodes
    for placed in module, copy.deepcopy(plain):
        fusion_moe.prepare_(placed, "cpu")
        found = pages.on_nodes(placed.weight)
        assert sorted(found) == list(nodes)
        assert max(found.values()) < 1.3 * placed.weight.nbytes / len(nodes)
        assert torch.equal(placed(x, ends), want)


@needs_nodes
def test_linux_moves_no_page_that_lies_on_one_of_the_nodes():
    """Why prepare_ copies in place of asking mbind to move."""
    memory = mmap.mmap(-1, 64 * numa.PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    t = torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
    address, mask, most = (
        ctypes.c_void_p(t.data_ptr()),
        numa._mask(numa.spread().nodes),
        ctypes.c_ulong(numa._MOST + 1),
    )
    where = numa.located(range(t.data_ptr(), t.data_ptr() + t.numel(), numa.PAGE))
    numa._call(
        "mbind",
        address,
        ctypes.c_ulong(t.numel()),
        ctypes.c_int(numa.INTERLEAVE),
        mask,
        most,
        ctypes.c_uint(MOVE),
    )
    assert numa.located(range(t.data_ptr(), t.data_ptr() + t.numel(), numa.PAGE)) == where
