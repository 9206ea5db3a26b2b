// The fixed library of a tier: the compiler's flags say which.
#if defined(__AVX512VBMI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512FP16__)
#include "amx.h"
using Tier = AmxTier;
#elif defined(__AVX512BF16__)
#include "avx512_bf16.h"
using Tier = Avx512Bf16Tier;
#else
#include "avx512.h"
using Tier = Avx512Tier;
#endif
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "avx2.h"
using Tier = Avx2Tier;
#else
#include "generic.h"
using Tier = GenericTier;
#endif
#include "grouped_mm.h"
#include "plain.h"

extern "C" void product(const Problem* problem, int threads) {
    switch (problem->activation) {
        case OF_BF16: return GroupedMM<Tier, bf16>(*problem).run(threads);
        case OF_F16: return GroupedMM<Tier, f16>(*problem).run(threads);
        default: return GroupedMM<Tier, float>(*problem).run(threads);
    }
}

// How rows of a group are multiplied, in words.
extern "C" const char* kernels(int activation) {
    static const std::string f32 = told(Tier::Fast<float>{}), bf16_ = told(Tier::Fast<bf16>{}), f16_ = told(Tier::Fast<f16>{});
    return (activation == OF_BF16 ? bf16_ : activation == OF_F16 ? f16_ : f32).c_str();
}

// sizes: G, N, K, runs, rows
extern "C" void plain(const void* const* p, const long long* sizes, int activation, int threads) {
    Problem problem{};
    problem.codes = static_cast<const u8*>(p[0]), problem.scales = static_cast<const u8*>(p[1]);
    problem.decode = static_cast<const float*>(p[2]), problem.ends = static_cast<const i32*>(p[3]);
    problem.G = sizes[0], problem.N = sizes[1], problem.K = sizes[2], problem.runs = sizes[3], problem.rows = sizes[4];
    problem.activation = activation;
    const i64 row_bytes = problem.K * (activation == OF_F32 ? 4 : 2);
    plain_product(product, problem, {static_cast<const u8*>(p[4]), static_cast<float*>(const_cast<void*>(p[5])), row_bytes, problem.N}, threads);
}
