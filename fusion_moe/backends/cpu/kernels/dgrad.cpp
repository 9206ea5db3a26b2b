// The fixed library of a tier and an encoding whose products contract the rows of matrices;
// fprop.cpp says what stands before this file.
#include "tiers.h"
#include "transposed.h"
#include "grouped_mm.h"

using Tier = TransposedTier<F32, Pairs, Weight>;

extern "C" void product(const Problem* problem, Team* team) {
    with_type(problem->activation, [=](auto x) {
        GroupedMM<Tier, Tier::Reader<decltype(x)>, decltype(x)>(*problem).run(*team);
    });
}
