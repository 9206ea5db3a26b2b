// The fixed library of an ISA level and an encoding of e2m1 codes whose products are of int8
// operands; fprop.cpp says what stands before this file.
#include "numbers.h"

#if defined(__AVX512VBMI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    defined(__AVX512DQ__) && defined(__AVX512VNNI__)
#include "avx512_int8.h"
using Isa = Avx512Int8Isa<Weight>;
#else
#include "int8.h"
using Isa = Int8Isa<Weight>;
#endif
#include "grouped_mm.h"

extern "C" void product(const Problem* problem, ThreadPool* pool) {
    with_type(problem->activation, [=](auto x) {
        GroupedMM<Isa, OfAnyScales<Weight>, decltype(x)>(*problem).run(*pool);
    });
}
