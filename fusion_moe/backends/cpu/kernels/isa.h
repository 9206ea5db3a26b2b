// Which kernels there are for the compiler's flags:
//
//     IsaOfCodes  of weights of e2m1 codes
//     F32          products of float32
//     Pairs        products of pairs of bfloat16; void where there are none
#pragma once

#if defined(__AVX512VBMI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    defined(__AVX512DQ__)
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && \
    defined(__AVX512FP16__)
#include "amx.h"
#include "avx512_pairs.h"
template <class Weight>
using IsaOfCodes = AmxIsa<Weight>;
using Pairs = Avx512Pairs;
#elif defined(__AVX512BF16__)
#include "avx512_bf16.h"
template <class Weight>
using IsaOfCodes = Avx512Bf16Isa<Weight>;
using Pairs = Avx512Pairs;
#else
#include "avx512.h"
template <class Weight>
using IsaOfCodes = Avx512Isa<Weight>;
using Pairs = void;
#endif
using F32 = Avx512F32;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "avx2.h"
template <class Weight>
using IsaOfCodes = Avx2Isa<Weight>;
using F32 = Avx2F32;
using Pairs = void;
#else
#include "generic.h"
template <class Weight>
using IsaOfCodes = DequantizedIsa<GenericF32, void, OnlyDequantized<Weight> >;
using F32 = GenericF32;
using Pairs = void;
#endif
