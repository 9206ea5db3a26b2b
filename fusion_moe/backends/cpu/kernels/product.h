// A grouped product as two libraries see it: a fixed one, which has the kernels, and the generated
// one of a segment, which has what is fused around the product. Plain data and functions of C. The
// fixed ones of a isa_level:
//
// - fprop.cpp: rows [rows, K] x weight [G, N, K] -> [rows, N], for each encoding of weights
// - int8.cpp: the same of int8 operands, for each encoding of e2m1 codes
// - dgrad.cpp: rows [rows, N] x weight [G, N, K] -> [rows, K], for each encoding of weights
// - wgrad.cpp: rows [rows, N] x rows [rows, K] -> [G, N, K], contracts the rows of each group
//
// All loops are written here, those of floats too. PyTorch exports at::native::cpublas::brgemm,
// from an internal header; but it raises where the CPU lacks AVX-512 or its instructions for
// bfloat16, which the ISA levels here serve, so no loop could go. And it would tie these libraries
// to one build of PyTorch, which wheels with compiled kernels are not.
#pragma once

#include "numbers.h"
#include "thread_pool.h"

namespace {

constexpr int LANES = 16;  // columns of a result that are made together
constexpr int PARTS = 6;   // of a weight, at most

enum Activation : int { OF_F32 = 0, OF_BF16 = 1, OF_F16 = 2 };

// Rows ends[g-1] .. ends[g]-1 of `rows` rows times matrix g. A result has W columns, each made of F
// columns of the product. In wgrad m below is a row of matrix g, and each column of the result is
// that of the product.
struct Problem {
    const void* parts[PARTS];  // of the weight [G, N, K], in the order of its encoding: its reader
                               // knows what they are
    const i32* ends;           // [G], checked
    i64 G, N, K, runs, rows, W,
        F;  // runs: of rows of a matrix that have a scale of their own, where the encoding has such
    const i32* columns;  // [F, W]: column j of the result is made of columns[f][j] of the product
    int activation;
    const void* segment;  // what the functions take

    // Activations of row m: where they lie, or made in `scratch`
    const void* (*row)(const void* segment, i64 m, void* scratch);
    const void* (*other_row)(const void* segment, i64 m,
                             void* scratch);  // of wgrad's second operand
    int other_activation;
    // Makes columns j .. j + count - 1 of rows m .. m + rows - 1, of group g, and stores them. p
    // [rows][stride] holds F times LANES numbers for each row and each LANES columns. For rows past
    // the last end g is G and all numbers are zero.
    void (*store)(const void* segment, i64 m, i64 rows, i64 g, i64 j, i64 count, const float* p,
                  i64 stride);
    bool row_order;  // whether no row may change the bits of another one's results
};

// Calls body(x) with a number of the type that an Activation means.
template <class Body>
void with_type(int activation, const Body& body) {
    if (activation == OF_BF16) return body(bf16());
    if (activation == OF_F16) return body(f16());
    body(float());
}

using Product = void (*)(const Problem* problem, ThreadPool* pool);

}  // namespace
