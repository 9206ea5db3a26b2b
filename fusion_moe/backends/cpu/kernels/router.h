// Routers: the experts of tokens by their logits, and how much each of them counts. A thread has
// whole tokens.
#pragma once

#include <cmath>
#include <vector>

#include "rows.h"

namespace {

// Of numbers that order as floats do, NaN the largest, both zeros equal, all above 0.
inline u32 key_of(float x) {
    const u32 bits = as_bits(x + 0.f);
    return x != x ? 0xFFFFFFFFu : bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The place of the largest of `count` keys, of equal ones the first.
inline i64 largest(const u32* keys, i64 count) {
    u32 most = 0;
#pragma omp simd reduction(max : most)
    for (i64 e = 0; e < count; ++e) most = std::max(most, keys[e]);
    return std::find(keys, keys + count, most) - keys;
}

// x [count] -> exp(x - the largest) and their sum; NaN if one of them is, or all are -infinity.
inline float exponentials(float* x, i64 count) {
    float most = -INFINITY, total = 0.f;
    for (i64 e = 0; e < count; ++e) most = maximum_(most, x[e]);
    for (i64 e = 0; e < count; ++e) x[e] = exp_(x[e] - most);
    for (i64 e = 0; e < count; ++e) total += x[e];
    return total;
}

template <bool SIGMOID>
void to_scores(float* x, i64 count) {
    if constexpr (SIGMOID) {
        for (i64 e = 0; e < count; ++e) x[e] = sigmoid_(x[e]);
    } else {
        const float total = exponentials(x, count);
        for (i64 e = 0; e < count; ++e) x[e] /= total;
    }
}

// How `topk_ids` chooses. GROUPS > 1: among the experts of the TOPK_GROUP groups with the largest
// sums of their BEST best scores.
template <i64 E, i64 K, bool SIGMOID, bool SCORES, i64 GROUPS, i64 TOPK_GROUP, i64 BEST>
struct TopK {
    static constexpr i64 SIZE = E / GROUPS;

    // logits [T, E], bias [E] or null -> ids [T, K]
    template <class T, class Id>
    static void run(const T* logits, const float* bias, i64 tokens, Id* ids, ThreadPool& pool) {
        for_rows(tokens, rows_per_step(E), pool, [&](i64 t) {
            std::vector<float> numbers(E);
            std::vector<u32> keys(E);
            for (i64 e = 0; e < E; ++e) numbers[e] = widen(logits[t * E + e]);
            if constexpr (SCORES) to_scores<SIGMOID>(numbers.data(), E);
            if (bias != nullptr) {
                for (i64 e = 0; e < E; ++e) numbers[e] += bias[e];
            }
            for (i64 e = 0; e < E; ++e) keys[e] = key_of(numbers[e]);
            if constexpr (GROUPS > 1) choose(keys.data(), numbers.data());
            for (i64 i = 0; i < K; ++i) {
                const i64 e = largest(keys.data(), E);
                ids[t * K + i] = Id(e), keys[e] = 0;
            }
        });
    }

  private:
    // Experts outside of the chosen groups get key 0, which nothing else has.
    static void choose(u32* keys, float* numbers) {
        u32 of_group[GROUPS];
        for (i64 g = 0; g < GROUPS; ++g) {
            u32* const own = keys + g * SIZE;
            const i64 first = largest(own, SIZE);
            float sum = numbers[g * SIZE + first];
            if (BEST > 1) {
                const u32 key = own[first];
                own[first] = 0;
                sum += numbers[g * SIZE + largest(own, SIZE)];
                own[first] = key;
            }
            of_group[g] = key_of(sum);
        }
        bool chosen[GROUPS] = {};
        for (i64 i = 0; i < TOPK_GROUP; ++i) {
            const i64 g = largest(of_group, GROUPS);
            chosen[g] = true, of_group[g] = 0;
        }
        for (i64 e = 0; e < E; ++e) keys[e] = chosen[e / SIZE] ? keys[e] : 0;
    }
};

// logits [E], ids [k] -> s [k]: the scores of the chosen, divided by their sum if RENORMALIZE; of
// softmax these are made of no others.
template <bool SIGMOID, bool RENORMALIZE, class T, class Id>
void scores_of(const T* logits, const Id* ids, i64 experts, i64 k, float* s, float* all) {
    for (i64 i = 0; i < k; ++i) s[i] = widen(logits[ids[i]]);
    if constexpr (SIGMOID || RENORMALIZE) {
        to_scores<SIGMOID>(s, k);
    } else {
        for (i64 e = 0; e < experts; ++e) all[e] = widen(logits[e]);
        to_scores<false>(all, experts);
        for (i64 i = 0; i < k; ++i) s[i] = all[ids[i]];
    }
}

constexpr float EPSILON = 1e-20f;  // beside a sum of sigmoids, which may be 0

// logits [T, E], ids [T, k] -> w [T, k]
template <bool SIGMOID, bool RENORMALIZE, class T, class Id, class W>
void topk_weights(const T* logits, const Id* ids, i64 tokens, i64 experts, i64 k, float factor,
                  W* w, ThreadPool& pool) {
    for_rows(tokens, rows_per_step(experts), pool, [&](i64 t) {
        std::vector<float> all(experts), s(k);
        scores_of<SIGMOID, RENORMALIZE>(logits + t * experts, ids + t * k, experts, k, s.data(),
                                        all.data());
        float total = EPSILON;
        for (i64 i = 0; i < k; ++i) total += s[i];
        for (i64 i = 0; i < k; ++i)
            w[t * k + i] = stored<W>((SIGMOID && RENORMALIZE ? s[i] / total : s[i]) * factor);
    });
}

// The derivative: ir/kinds/router.py has it in formulas.
template <bool SIGMOID, bool RENORMALIZE, class T, class Id>
void topk_weights_backward(const T* logits, const Id* ids, const float* dw, i64 tokens, i64 experts,
                           i64 k, float factor, T* dlogits, ThreadPool& pool) {
    for_rows(tokens, rows_per_step(experts), pool, [&](i64 t) {
        std::vector<float> all(experts), s(k), g(k);
        const Id* const chosen = ids + t * k;
        scores_of<SIGMOID, RENORMALIZE && !SIGMOID>(logits + t * experts, chosen, experts, k,
                                                    s.data(), all.data());
        float along = 0.f, total = EPSILON;
        for (i64 i = 0; i < k; ++i)
            g[i] = dw[t * k + i] * factor, along += g[i] * s[i], total += s[i];
        for (i64 e = 0; e < experts; ++e) all[e] = SIGMOID || RENORMALIZE ? 0.f : -along * all[e];
        for (i64 i = 0; i < k; ++i) {
            if (SIGMOID) {
                all[chosen[i]] +=
                    (RENORMALIZE ? (g[i] - along / total) / total : g[i]) * s[i] * (1.f - s[i]);
            } else {
                all[chosen[i]] += (RENORMALIZE ? g[i] - along : g[i]) * s[i];
            }
        }
        for (i64 e = 0; e < experts; ++e) dlogits[t * experts + e] = stored<T>(all[e]);
    });
}

}  // namespace
