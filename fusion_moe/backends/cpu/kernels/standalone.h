// The product by itself: rows of a matrix in memory, float32 out. What there is where nothing can
// be compiled around it.
#pragma once

#include <vector>

#include "product.h"

namespace {

struct Standalone {
    const u8* activations;  // [rows, K]
    float* out;             // [rows, N]
    i64 row_bytes, N;
};

// The columns of a result that is the product.
inline std::vector<i32> all_columns(i64 N) {
    std::vector<i32> columns(static_cast<std::size_t>(N));
    for (i64 j = 0; j < N; ++j) columns[std::size_t(j)] = i32(j);
    return columns;
}

inline void standalone_product(Product product, Problem problem, const Standalone& standalone,
                               int threads) {
    const std::vector<i32> columns = all_columns(standalone.N);
    problem.W = standalone.N, problem.F = 1, problem.columns = columns.data(),
    problem.segment = &standalone;
    problem.row = [](const void* segment, i64 m, void*) -> const void* {
        const Standalone& s = *static_cast<const Standalone*>(segment);
        return s.activations + m * s.row_bytes;
    };
    problem.store = [](const void* segment, i64 m, i64 rows, i64, i64 j, i64 count, const float* p,
                       i64 stride) {
        const Standalone& to = *static_cast<const Standalone*>(segment);
        for (i64 r = 0; r < rows; ++r)
            std::memcpy(to.out + (m + r) * to.N + j, p + r * stride,
                        std::size_t(count) * sizeof(float));
    };
    ThreadPool::run(threads, [&](ThreadPool& pool) {
        product(&problem, &pool);
        return 0;
    });
}

}  // namespace
