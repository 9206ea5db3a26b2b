// The fixed library of an ISA level and an encoding whose products contract the rows of matrices;
// fprop.cpp says what stands before this file.
#include "isa.h"
#include "transposed.h"
#include "grouped_mm.h"

using Isa = TransposedIsa<F32, Pairs, Weight>;

extern "C" void product(const Problem* problem, ThreadPool* pool) {
    with_type(problem->activation, [=](auto x) {
        GroupedMM<Isa, Isa::Reader<decltype(x)>, decltype(x)>(*problem).run(*pool);
    });
}
