// The fixed library of an ISA level and an encoding. The compiler's flags say which ISA level; what
// stands before this file, the reader of an encoding, says which `Weight`.
#include "isa.h"
#include "bytes.h"
#include "grouped_mm.h"
#include "standalone.h"

using Isa = std::conditional_t<
    HAS_E2M1_CODES<Weight>, IsaOfCodes<Weight>,
    std::conditional_t<ARE_BYTES<Weight>, BytesIsa<Weight>, DequantizedIsa<F32, Pairs, Weight>>>;

extern "C" void product(const Problem* problem, ThreadPool* pool) {
    with_type(problem->activation,
              [=](auto x) { GroupedMM<Isa, Weight, decltype(x)>(*problem).run(*pool); });
}

// p: the parts of the weight, PARTS of them or null, ends, activations [rows, K], out [rows, N];
// sizes: G, N, K, runs, rows
extern "C" void standalone(const void* const* p, const long long* sizes, int activation,
                           int threads) {
    Problem problem{};
    std::copy(p, p + PARTS, problem.parts);
    problem.ends = static_cast<const i32*>(p[PARTS]);
    problem.G = sizes[0], problem.N = sizes[1], problem.K = sizes[2], problem.runs = sizes[3],
    problem.rows = sizes[4];
    problem.activation = activation;
    const i64 row_bytes = problem.K * (activation == OF_F32 ? 4 : 2);
    const Standalone rows{static_cast<const u8*>(p[PARTS + 1]),
                          static_cast<float*>(const_cast<void*>(p[PARTS + 2])), row_bytes,
                          problem.N};
    standalone_product(product, problem, rows, threads);
}
