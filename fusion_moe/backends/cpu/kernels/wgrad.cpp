// The fixed library of a tier whose products contract the rows of groups.
#include "tiers.h"
#include "wgrad.h"

template <class A>
void with_first(const Problem& problem, Team& team) {
    switch (problem.other_activation) {
        case OF_BF16:
            return wgrad<A, bf16>(problem, team);
        case OF_F16:
            return wgrad<A, f16>(problem, team);
        default:
            return wgrad<A, float>(problem, team);
    }
}

extern "C" void product(const Problem* problem, Team* team) {
    switch (problem->activation) {
        case OF_BF16:
            return with_first<bf16>(*problem, *team);
        case OF_F16:
            return with_first<f16>(*problem, *team);
        default:
            return with_first<float>(*problem, *team);
    }
}
