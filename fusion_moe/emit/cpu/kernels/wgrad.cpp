// The fixed library of a tier whose products contract the rows of groups.
#include "tiers.h"
#include "wgrad.h"

template <class A>
void with_first(const Problem& problem, int threads) {
    switch (problem.other_activation) {
        case OF_BF16: return wgrad<A, bf16>(problem, threads);
        case OF_F16: return wgrad<A, f16>(problem, threads);
        default: return wgrad<A, float>(problem, threads);
    }
}

extern "C" void product(const Problem* problem, int threads) {
    switch (problem->activation) {
        case OF_BF16: return with_first<bf16>(*problem, threads);
        case OF_F16: return with_first<f16>(*problem, threads);
        default: return with_first<float>(*problem, threads);
    }
}
