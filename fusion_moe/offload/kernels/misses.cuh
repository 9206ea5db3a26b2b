// Which experts of a step are missing on the GPU, and what is done about each.
#pragma once

#include "ragged.cuh"
#include "step.cuh"

namespace {

// What parts of a step take, in nanoseconds: `Constants` of offload/split.py.
struct Costs {
    i64 cpu_start, cpu_expert, cpu_expert_beside, cpu_row, copy_start, copy_expert,
        copy_expert_beside, gpu_expert;

    // As split.py has it, to the last bit: of `missed` experts in order, with rows[order[i]] rows,
    // the first `copied` are copied at once; `there` others are on the GPU.
    __device__ __forceinline__ i64 of(i32 copied, i32 missed, i32 there, const i32* order,
                                      const i32* rows) const {
        i64 more = 0;
#pragma unroll 1
        for (i32 i = copied; i < missed; ++i) more += rows[order[i]] - 1;
        more *= cpu_row;
        const i64 computed = missed - copied, alone = computed * cpu_expert + more,
                  beside = computed * cpu_expert_beside + more;
        if (copied == 0) return cpu_start + alone;
        const i64 copies = copy_start + copied * copy_expert,
                  products = (there + copied) * gpu_expert;
        if (copied == missed) return copies + products;
        const i64 slow = copies + copied * (copy_expert_beside - copy_expert),
                  cpu = cpu_start + beside;
        return cpu <= slow ? cpu + part(slow - cpu, copy_expert, copy_expert_beside) + products
                           : slow + max(part(cpu - slow, alone, beside), products);
    }

  private:
    // Of products that may have more than 64 bits: many instructions, apart from the others.
    __device__ __noinline__ static i64 part(i64 of, i64 some, i64 all) {
        return i64(__int128(of) * some / max(all, i64(1)));
    }
};

// How many of the missed experts are copied, by their times for 0 .. most copies.
__device__ __forceinline__ i32 choose_copies(const i64* times, i32 missed, i32 most) {
    i32 best = 0, mixed = 0;
    if (most == missed && times[missed] < times[0]) best = missed;
#pragma unroll 1
    for (i32 k = 1; k <= most && k < missed; ++k)
        if (mixed == 0 || times[k] < times[mixed]) mixed = k;
    const i64 pure = times[best];
    return mixed && times[mixed] + pure / 20 <= pure ? mixed : best;
}

// Of ids it makes slots: those that experts have, and those that missed ones are copied into. The
// rows of other missed ones are handed over. All blocks find the same, by the same version of the
// table, and the first one tells the kernels after this one.
template <class Id>
struct FindMisses {
    static constexpr i32 MOST_SPARES = 256;  // that a step uses
    i64 count, experts, cached, spares;
    const Id* ids;       // [count]
    const i32* tables;   // [2, experts]: the slot of each expert, or NOWHERE
    const i32* version;  // which of both holds for a step that begins now
    Step step;
    Costs costs;
    i64* error;

    // What a block found, in its own memory. order: missed experts, of which the first `copied` are
    // copied; ids: those whose rows are handed over, in order.
    struct Found {
        i32 copied, rows;
        const i32 *order, *ids;
    };

    // memory: i32[3 * experts + 2 * count]. Few instructions are run, most of all where nothing is
    // missing: they come from memory, since weights that were read after the last step have taken
    // their place in caches.
    __device__ __forceinline__ Found run(i32* memory) const {
        __shared__ i32 table, missed, there, copied, hits, handed;
        i32 *const rows = memory, *const fate = rows + experts, *const order = fate + experts,
                   *const on_cpu = order + experts, *const listed = on_cpu + count;
        const i32 first = threadIdx.x, by = blockDim.x, E = i32(experts), n = i32(count);
#pragma unroll 1
        for (i32 e = first; e < E; e += by) rows[e] = 0;
        if (first == 0) missed = there = copied = hits = handed = 0;
        prefetch_all();
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
        __syncthreads();
        // by a thread with little else to do: meanwhile the others read what it is likely to find
        const i32 expected = load_flag(version);
        if (first == by - 1) table = agree(expected);
#pragma unroll 1
        for (i32 i = first; i < n; i += by) {
            const i64 id = i64(ids[i]);
            if (id >= 0 && id < experts) atomicAdd(rows + id, 1);
            if (blockIdx.x == 0 && (id < -1 || id >= experts)) report(error, BAD_ID, i, i32(id));
        }
#pragma unroll 1
        for (i32 e = first; e < E; e += by) fate[e] = load_flag(tables + expected * experts + e);
        __syncthreads();
        if (first == by - 1) leave();
#pragma unroll 1
        for (i32 e = first; e < E; e += by) {
            const i32 slot = table == expected ? fate[e] : load_flag(tables + table * experts + e);
            fate[e] = slot >= 0 && slot < cached ? slot : NOWHERE;
            if (rows[e] == 0) continue;
            if (blockIdx.x == 0) atomicAdd(step.uses + e, rows[e]);
            fate[e] == NOWHERE ? atomicAdd(&missed, 1) : atomicAdd(&hits, rows[e]);
        }
        __syncthreads();
        if (missed == 0) {
            if (blockIdx.x == 0) place(fate), tell(hits, 0);
            return {0, 0, order, listed};
        }
        split(rows, fate, order, missed, there, copied);
        if (blockIdx.x == 0) place(fate);
        if (copied < missed) list(fate, on_cpu, listed, handed);
        const bool broken = handed > 0 && load_flag(&step.exchange->broken);
        if (blockIdx.x == 0 && first == 0) {
            i32 of_copied = 0;
#pragma unroll 1
            for (i32 i = 0; i < copied; ++i) of_copied += rows[order[i]];
            add(step.counts->copied_rows, of_copied), add(step.counts->computed_rows, handed);
            add(step.counts->copied, copied), add(step.counts->computed, missed - copied);
            if (broken) report(error, NO_ANSWER, 0, 0);
        }
        if (blockIdx.x == 0) tell(hits, broken ? 0 : handed);
        return {copied, broken ? 0 : handed, order, listed};
    }

  private:
    // What is read one after the other.
    __device__ __forceinline__ void prefetch_all() const {
        if (threadIdx.x == 0) prefetch(version), prefetch(step.exchange), prefetch(step.counts);
        for (i64 i = 32 * threadIdx.x; i < 2 * experts; i += 32 * blockDim.x) prefetch(tables + i);
    }

    // An addition that nothing waits for.
    __device__ __forceinline__ static void add(u64& to, i32 n) { atomicAdd(&to, u64(n)); }

    __device__ __forceinline__ void tell(i32 hits, i32 handed) const {
        if (threadIdx.x != 0) return;
        step.counts->rows = handed;
        add(step.counts->steps, 1), add(step.counts->hits, hits);
    }

    __device__ __forceinline__ i32 fate_of(i32 i, const i32* fate) const {
        const i64 id = i64(ids[i]);
        return id >= 0 && id < experts ? fate[id] : NOWHERE;
    }

    __device__ __forceinline__ void place(const i32* fate) const {
#pragma unroll 1
        for (i32 i = threadIdx.x; i < i32(count); i += blockDim.x)
            step.placed[i] = max(fate_of(i, fate), NOWHERE);
    }

    // The version of the table that the first block to ask finds: another one may be published
    // meanwhile.
    __device__ __forceinline__ i32 agree(i32 now) const {
        const i32 before = atomicCAS(&step.exchange->agreed, 0, now + 1);
        return before ? before - 1 : now;
    }

    // The last block lets the next step find another one: all have had their answer.
    __device__ __forceinline__ void leave() const {
        Exchange& exchange = *step.exchange;
        if (atomicAdd(&exchange.agreeing, 1) + 1 < i32(gridDim.x)) return;
        store_flag(&exchange.agreed, 0), store_flag(&exchange.agreeing, 0);
    }

    // Decides about each missed expert.
    __device__ __forceinline__ void split(const i32* rows, i32* fate, i32* order, i32 missed,
                                          i32& there, i32& copied) const {
        __shared__ i64 times[MOST_SPARES + 1];
        const i32 first = threadIdx.x, by = blockDim.x, E = i32(experts);
#pragma unroll 1
        for (i32 e = first; e < E; e += by) {
            if (rows[e] == 0) continue;
            if (fate[e] != NOWHERE) {
                atomicAdd(&there, 1);
                continue;
            }
            i32 rank = 0;
#pragma unroll 4
            for (i32 other = 0; other < E; ++other)
                rank += rows[other] > 0 && fate[other] == NOWHERE &&
                        (rows[other] > rows[e] || (rows[other] == rows[e] && other < e));
            order[rank] = e;
        }
        __syncthreads();
        const i32 most = min(missed, min(i32(spares), MOST_SPARES));
#pragma unroll 1
        for (i32 k = first; k <= most; k += by) times[k] = costs.of(k, missed, there, order, rows);
        __syncthreads();
        if (first == 0) copied = choose_copies(times, missed, most);
        __syncthreads();
#pragma unroll 1
        for (i32 i = first; i < missed; i += by)
            fate[order[i]] = i < copied ? i32(cached) + i : ON_CPU;
        __syncthreads();
    }

    // Lists the ids whose experts the CPU computes, and how many they are.
    __device__ __forceinline__ void list(const i32* fate, i32* on_cpu, i32* listed,
                                         i32& handed) const {
        const i32 first = threadIdx.x, by = blockDim.x, n = i32(count);
#pragma unroll 1
        for (i32 i = first; i < n; i += by) on_cpu[i] = fate_of(i, fate) == ON_CPU;
        __syncthreads();
#pragma unroll 1
        for (i32 i = first; i < n; i += by) {
            i32 before = 0;
#pragma unroll 4
            for (i32 other = 0; other < i; ++other) before += on_cpu[other];
            if (on_cpu[i]) listed[before] = i;
            if (blockIdx.x == 0) step.handed[i] = on_cpu[i] ? before : NOWHERE;
            if (i == n - 1) handed = before + on_cpu[i];
        }
        __syncthreads();
    }
};

}  // namespace
