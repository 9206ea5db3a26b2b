// The fixed library of a tier: the compiler's flags say which.
#if defined(__AVX512VBMI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "avx2.h"
#else
#include "generic.h"
#endif
#include "grouped_mm.h"

extern "C" void product(const Problem* problem, int threads) {
    switch (problem->activation) {
        case OF_BF16: return GroupedMM<Tier, bf16>(*problem).run(threads);
        case OF_F16: return GroupedMM<Tier, f16>(*problem).run(threads);
        default: return GroupedMM<Tier, float>(*problem).run(threads);
    }
}
