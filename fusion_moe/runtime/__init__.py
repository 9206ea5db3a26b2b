"""Running compiled code: kernels, and the programs that they make up.

program.py       launches the kernels of a program in order; kernel.py: what a backend makes
memory.py        one allocation for what a call makes; turns.py: calls that share memory
native.py, launch_plan.py
                 calls that C++ launches without Python; remembered.py: what calls remember
build.py, nvrtc.py, isa.py
                 compilers, instruction sets; precompile.py, background.py: compiling ahead
store.py, trust.py
                 compiled files by content hash, and which are safe to load
shipped_cubins.py
                 CUDA kernels of common layers, which came with the package
driver.py, cuda.py, faults.py
                 the CUDA driver, cubins, what kernels find wrong
handles.py       inputs that stand for memory, in whose place kernels get addresses
recording.py, timeline.py
                 who is told of launches, kernels that mark tiles
check.py, dump.py
                 the options `check` and `dump`
host_memory/     weights on large pages, how fast memory is read
"""
