// The fixed library of a tier and an encoding whose products contract the rows of matrices;
// fprop.cpp says what stands before this file.
#include "tiers.h"
#include "transposed.h"
#include "grouped_mm.h"

using Tier = TransposedTier<F32, Pairs, Weight>;

extern "C" void product(const Problem* problem, Team* team) {
    switch (problem->activation) {
        case OF_BF16:
            return GroupedMM<Tier, Tier::Reader<bf16>, bf16>(*problem).run(*team);
        case OF_F16:
            return GroupedMM<Tier, Tier::Reader<f16>, f16>(*problem).run(*team);
        default:
            return GroupedMM<Tier, Tier::Reader<float>, float>(*problem).run(*team);
    }
}
