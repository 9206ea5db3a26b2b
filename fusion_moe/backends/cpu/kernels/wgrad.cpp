// The fixed library of an ISA level whose products contract the rows of groups.
#include "isa.h"
#include "wgrad.h"

extern "C" void product(const Problem* problem, ThreadPool* pool) {
    with_type(problem->activation, [=](auto a) {
        with_type(problem->other_activation,
                  [=](auto b) { wgrad<decltype(a), decltype(b)>(*problem, *pool); });
    });
}
