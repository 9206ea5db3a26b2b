// Routers: a warp chooses the experts of a token, of which it has all logits in registers, and slot
// i's in lane i.
#pragma once

#include "routing.cuh"

namespace {

constexpr float EPSILON = 1e-20f;  // beside a sum of sigmoids, which may be 0

// Of numbers that order as floats do, NaN the largest, both zeros equal, all above 0; and back.
__device__ __forceinline__ u32 key_of(float x) {
    const u32 bits = __float_as_uint(x + 0.f);
    return x != x ? 0xFFFFFFFFu : bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float number_of(u32 key) {
    return __uint_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key);
}

__device__ __forceinline__ float max_of_warp(float x) {
    return number_of(__reduce_max_sync(WHOLE_WARP, key_of(x)));
}

__device__ __forceinline__ float sigmoid_of(float x) { return 1.f / (1.f + exp_(-x)); }

// E numbers of a token: lane l has those of experts 32 i + l. What lies past the last one is
// -infinity.
template <int E>
struct Numbers {
    static constexpr int EACH = (E + 31) / 32;
    float at[EACH];

    static __device__ __forceinline__ i32 expert(int i) { return 32 * i + i32(threadIdx.x % 32); }

    template <class T>
    __device__ __forceinline__ void load(const T* row) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) at[i] = expert(i) < E ? widen(row[expert(i)]) : -INFINITY;
    }

    // Each x becomes exp(x - the largest); their sum. NaN if one of them is, or all are -infinity.
    __device__ __forceinline__ float exponentials() {
        float most = -INFINITY, total = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) most = maximum_(most, at[i]);
        most = max_of_warp(most);
#pragma unroll
        for (int i = 0; i < EACH; ++i) total += expert(i) < E ? at[i] = exp_(at[i] - most) : 0.f;
        return sum_of_warp(total);
    }
};

// How `topk_ids` chooses. GROUPS > 1: among the experts of the TOPK_GROUP groups with the largest
// sums of their BEST best scores.
template <int E, int K, bool SIGMOID, bool SCORES, int GROUPS, int TOPK_GROUP, int BEST>
struct TopK {
    static constexpr int EACH = Numbers<E>::EACH, SIZE = E / GROUPS;

    // logits [E], bias [E] or null -> the expert of slot `lane`; 0 where there is none
    template <class T>
    static __device__ __forceinline__ i32 run(const T* logits, const float* bias) {
        Numbers<E> x;
        x.load(logits);
        if constexpr (SCORES) to_scores(x);
        u32 keys[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const i32 e = x.expert(i);
            keys[i] = e < E ? key_of(bias != nullptr ? x.at[i] + bias[e] : x.at[i]) : 0;
        }
        if constexpr (GROUPS > 1) keep_groups(keys);
        const i32 lane = threadIdx.x % 32;
        i32 found = 0;
#pragma unroll 1
        for (i32 slot = 0; slot < K; ++slot) {
            const i32 e = largest(keys, [](i32) { return true; }).expert;
            found = lane == slot ? e : found;
#pragma unroll
            for (int i = 0; i < EACH; ++i) keys[i] = x.expert(i) == e ? 0 : keys[i];
        }
        return found;
    }

  private:
    struct Largest {
        u32 key;
        i32 expert;
    };

    // The largest key of the experts that are asked for, of equal ones the first.
    template <class Asked>
    static __device__ __forceinline__ Largest largest(const u32 (&keys)[EACH], Asked asked) {
        u32 most = 0;
        i32 first = E - 1;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const i32 e = Numbers<E>::expert(i);
            if (keys[i] > most && asked(e)) most = keys[i], first = e;
        }
        const u32 all = __reduce_max_sync(WHOLE_WARP, most);
        return {all, __reduce_min_sync(WHOLE_WARP, most == all ? first : E - 1)};
    }

    static __device__ __forceinline__ void to_scores(Numbers<E>& x) {
        if constexpr (SIGMOID) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) x.at[i] = sigmoid_of(x.at[i]);
        } else {
            const float total = x.exponentials();
#pragma unroll
            for (int i = 0; i < EACH; ++i) x.at[i] /= total;
        }
    }

    // Experts outside of the chosen groups get key 0, which nothing else has. Lane g has group g.
    static __device__ __forceinline__ void keep_groups(u32 (&keys)[EACH]) {
        const i32 lane = threadIdx.x % 32;
        u32 mine = 0, chosen = 0;
#pragma unroll 1
        for (i32 g = 0; g < GROUPS; ++g) {
            const Largest best = largest(keys, [=](i32 e) { return e / SIZE == g; });
            float sum = number_of(best.key);
            if (BEST > 1)
                sum += number_of(
                    largest(keys, [=](i32 e) { return e / SIZE == g && e != best.expert; }).key);
            mine = lane == g ? key_of(sum) : mine;
        }
        for (i32 i = 0; i < TOPK_GROUP; ++i) {
            const i32 g =
                __ffs(__ballot_sync(WHOLE_WARP, mine == __reduce_max_sync(WHOLE_WARP, mine))) - 1;
            chosen |= 1u << g, mine = lane == g ? 0 : mine;
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const i32 e = Numbers<E>::expert(i);
            keys[i] = e < E && (chosen >> e / SIZE & 1) ? keys[i] : 0;
        }
    }
};

// How much the chosen experts count: lane i has slot i's, of K.
template <int E, int K, bool SIGMOID, bool RENORMALIZE>
struct Weights {
    // logits [E], the expert of slot `lane` -> its weight
    template <class T>
    static __device__ __forceinline__ float run(const T* logits, i32 expert, float factor) {
        Numbers<E> all;
        float total = 0;
        const float s = scores<RENORMALIZE>(logits, expert, all, total);
        return (SIGMOID && RENORMALIZE ? s / (sum_of_warp(s) + EPSILON) : s) * factor;
    }

    // The derivative, all of dlogits [E]: ir/kinds/router.py has it in formulas. dw: that of slot
    // `lane`.
    template <class T>
    static __device__ __forceinline__ void backward(const T* logits, i32 expert, float dw,
                                                    float factor, T* dlogits) {
        Numbers<E> all;
        float of_all = 0;
        const float s = scores<RENORMALIZE>(logits, expert, all, of_all),
                    g = threadIdx.x % 32 < K ? dw * factor : 0.f;
        const float along = sum_of_warp(g * s), total = sum_of_warp(s) + EPSILON;
        const float of_sigmoid = (RENORMALIZE ? (g - along / total) / total : g) * s * (1.f - s);
        const float mine = SIGMOID ? of_sigmoid : (RENORMALIZE ? g - along : g) * s;
#pragma unroll
        for (int i = 0; i < Numbers<E>::EACH; ++i) {
            const i32 e = all.expert(i);
            float d = SIGMOID || RENORMALIZE ? 0.f : -along * (all.at[i] / of_all);
            for (i32 slot = 0; slot < K; ++slot) {
                const i32 chosen = __shfl_sync(WHOLE_WARP, expert, slot);
                const float added = __shfl_sync(WHOLE_WARP, mine, slot);
                if (chosen == e) d += added;
            }
            if (e < E) dlogits[e] = stored<T>(d);
        }
    }

  private:
    // The score of slot `lane`. Softmax over all experts leaves its exponentials in `all`, their
    // sum in `total`.
    template <bool OF_CHOSEN, class T>
    static __device__ __forceinline__ float scores(const T* logits, i32 expert, Numbers<E>& all,
                                                   float& total) {
        const bool used = threadIdx.x % 32 < K;
        const float x = used ? widen(logits[expert]) : -INFINITY;
        if constexpr (SIGMOID) return used ? sigmoid_of(x) : 0.f;
        if constexpr (OF_CHOSEN) {
            const float most = max_of_warp(x), power = used ? exp_(x - most) : 0.f;
            return power / sum_of_warp(power);
        }
        all.load(logits);
        total = all.exponentials();
        float found = 0;
        for (i32 slot = 0; slot < K; ++slot) {
            const i32 e = __shfl_sync(WHOLE_WARP, expert, slot);
            float power = 0;
#pragma unroll
            for (int i = 0; i < Numbers<E>::EACH; ++i) power = i == e / 32 ? all.at[i] : power;
            power = __shfl_sync(WHOLE_WARP, power, e % 32);
            found = threadIdx.x % 32 == slot ? power / total : found;
        }
        return found;
    }
};

// The sorted rows of up to MOST slots, which one block of WARPS warps has in shared memory: a
// stable counting sort, of which each warp does a run of slots.
template <int WARPS, int GROUPS, int MOST>
struct SortSlots {
    u16 group[MOST];                // of each slot; GROUPS for those of no group
    u16 before[WARPS][GROUPS + 1];  // slots of a group in the runs of the warps before
    i32 start[GROUPS + 1];

    // -> ends [GROUPS], row_of [count], slot_of [count / slots, slots]
    __device__ __forceinline__ void run(i32 count, i32 slots, i32* ends, i32* row_of,
                                        i32* slot_of) {
        const i32 each = (count + 32 * WARPS - 1) / (32 * WARPS) * 32;
        for (i32 i = threadIdx.x; i < WARPS * (GROUPS + 1); i += 32 * WARPS)
            before[i / (GROUPS + 1)][i % (GROUPS + 1)] = 0;
        __syncthreads();
        for_run(count, each, [](i32, i32, u32) {});
        __syncthreads();
        for (i32 g = threadIdx.x; g <= GROUPS; g += 32 * WARPS) {
            i32 total = 0;
            for (i32 w = 0; w < WARPS; ++w) {
                const i32 here = before[w][g];
                before[w][g] = u16(total), total += here;
            }
            start[g] = total;
        }
        __syncthreads();
        if (threadIdx.x < 32) make_starts(ends);
        __syncthreads();
        for_run(count, each, [&](i32 slot, i32 g, u32 peers) {
            const i32 row = start[g] + before[threadIdx.x / 32][g] +
                            __popc(peers & ((1u << threadIdx.x % 32) - 1));
            row_of[row] = slot / slots, slot_of[slot] = row;
        });
    }

  private:
    // Calls body(slot, its group, the lanes with the same group) for each slot of the warp's run,
    // and counts it.
    template <class Body>
    __device__ __forceinline__ void for_run(i32 count, i32 each, Body body) {
        const i32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        for (i32 i = 0; i < each; i += 32) {
            const i32 slot = warp * each + i + lane, g = slot < count ? group[slot] : GROUPS + 1;
            const u32 peers = __match_any_sync(WHOLE_WARP, g);
            if (slot < count) body(slot, g, peers);
            __syncwarp();
            if (slot < count && lane == __ffs(peers) - 1) before[warp][g] += u16(__popc(peers));
            __syncwarp();
        }
    }

    // How many slots groups have become where they start; ends.
    __device__ __forceinline__ void make_starts(i32* ends) {
        const i32 lane = threadIdx.x % 32;
        i32 past = 0;
        for (i32 first = 0; first <= GROUPS; first += 32) {
            const i32 g = first + lane, here = g <= GROUPS ? start[g] : 0;
            const i32 sum = scan(here, Plus());
            if (g <= GROUPS) start[g] = past + sum - here;
            if (g < GROUPS) ends[g] = past + sum;
            past += __shfl_sync(WHOLE_WARP, sum, 31);
        }
    }
};

}  // namespace
