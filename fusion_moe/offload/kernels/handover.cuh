// Rows that the CPU computes: handed over to its worker, awaited, and summed with the others.
#pragma once

#include "combine.cuh"
#include "ragged.cuh"
#include "step.cuh"

namespace {

// Where the worker finds rows, and leaves what it makes of them: memory of the host.
struct RequestBuffers {
    RequestRing* ring;
    u8* rows;  // [rows, width]
    i32* ids;  // [rows]
    float* weights;
    u8* results;  // [rows, width]
};

// Hands over rows of x, with the ids of their experts and the router's weights; by the blocks from
// `first` on.
template <class Id, class Weight>
struct HandOver {
    i64 slots, row_bytes, layer;
    const u8* x;            // [tokens, row_bytes]
    const Id* ids;          // [tokens, slots]
    const Weight* weights;  // the same; null: ones
    Step step;
    RequestBuffers buffers;

    // listed: the ids whose rows they are
    __device__ __forceinline__ void run(i32 first, i32 rows, const i32* listed) const {
        if (rows == 0) return;
        const i32 blocks = i32(gridDim.x) - first;
        Exchange& exchange = *step.exchange;
#pragma unroll 1
        for (i32 row = i32(blockIdx.x) - first; row < rows; row += blocks) {
            const i32 from = listed[row];
            copy(buffers.rows + row * row_bytes, x + from / i32(slots) * row_bytes);
            if (threadIdx.x != 0) continue;
            buffers.ids[row] = i32(ids[from]);
            buffers.weights[row] = weights ? widen(weights[from]) : 1.f;
        }
        __syncthreads();
        if (threadIdx.x != 0 || add_ticket(&exchange.ticket) + 1 < u32(blocks)) return;
        exchange.ticket = 0, ++exchange.epoch;
        buffers.ring->layer = i32(layer), buffers.ring->rows = rows;
        store_release_system(&buffers.ring->posted, exchange.epoch);
    }

  private:
    __device__ __forceinline__ void copy(u8* to, const u8* from) const {
#pragma unroll 1
        for (i64 i = 16 * threadIdx.x; i < row_bytes; i += 16 * blockDim.x)
            *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
    }
};

// How a step ends: the sums of tokens, for which it waits for the worker. If that is gone, refuses
// rows or does not answer in time, its rows are left as they are, and the fault is reported; it is
// not asked again. A kernel that waits lies between the one that hands rows over and this one: so
// whether any were handed over, and `slot_of`, can be read before griddepcontrol_wait.
template <class T, class Weight, i32 SLOTS, i32 WIDTH>
struct EndStep {
    enum Why : i32 { GONE = 1, LATE = 2, REFUSED = 3 };
    i64 tokens, limit;      // nanoseconds
    const i32* slot_of;     // [tokens, SLOTS]: the row of each id in y
    const Weight* weights;  // the same; null: ones
    T *y, *sums;            // [tokens * SLOTS, WIDTH], [tokens, WIDTH]
    Step step;
    RequestBuffers buffers;
    i64* error;

    __device__ __forceinline__ void run() const {
        if (__builtin_expect(step.counts->rows > 0, 0)) {
            griddepcontrol_wait();
            if (has_answer()) take_rows();
        }
        combine_slots<V, AT_ONCE, true>(
            y, nullptr, tokens, WIDTH, SLOTS, [&](i64 t, i64 s) { return slot_of[t * SLOTS + s]; },
            [&](i64 t, i64 s) { return weights ? widen(weights[t * SLOTS + s]) : 1.f; },
            [&](i64 t, i64 j, const float (&total)[V]) {
                Vector<T, V> sum;
#pragma unroll
                for (int v = 0; v < V; ++v) sum.at[v] = narrow<T>(total[v]);
                store_vector<V>(sums + t * WIDTH + j, sum);
            });
    }

  private:
    static constexpr int V = 16 / sizeof(T), AT_ONCE = SLOTS < 8 ? SLOTS : 8;

    // Puts what the worker made where it belongs: each thread the columns that it adds up itself,
    // so that none waits for another.
    __device__ __forceinline__ void take_rows() const {
        constexpr i32 pieces = WIDTH / V;
        for (i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x; i < tokens * pieces;
             i += i64(gridDim.x) * blockDim.x) {
            const i64 id = i / pieces * SLOTS, j = i % pieces * V;
            for (i32 first = 0; first < SLOTS; first += AT_ONCE) {
                Vector<T, V> made[AT_ONCE];
                i32 from[AT_ONCE];
#pragma unroll
                for (int s = 0; s < AT_ONCE; ++s) {
                    from[s] = first + s < SLOTS ? step.handed[id + first + s] : NOWHERE;
                    if (from[s] >= 0)
                        made[s] = load_vector<V>(reinterpret_cast<const T*>(buffers.results) +
                                                 from[s] * WIDTH + j);
                }
#pragma unroll
                for (int s = 0; s < AT_ONCE; ++s)
                    if (from[s] >= 0)
                        store_vector<V>(y + slot_of[id + first + s] * WIDTH + j, made[s]);
            }
        }
    }

    // Whether the worker answered. The first block asks, and tells the others.
    __device__ __forceinline__ bool has_answer() const {
        __shared__ i32 answered;
        const u64 epoch = step.exchange->epoch;
        u64* const seen = &step.exchange->seen;
        if (threadIdx.x == 0 && blockIdx.x == 0) {
            answered = wait(epoch);
            store_release_system(seen, 2 * epoch + answered);
        } else if (threadIdx.x == 0) {
            while (load_acquire_system(seen) < 2 * epoch) {
            }
            answered = load_acquire_system(seen) & 1;
        }
        __syncthreads();
        return answered;
    }

    __device__ __forceinline__ bool wait(u64 epoch) const {
        const u64 start = now();
        for (u32 turn = 1; load_relaxed_system(&buffers.ring->answered) < epoch; ++turn) {
            if (turn % 16) continue;  // a load takes a microsecond
            if (load_relaxed_system(&buffers.ring->gone)) return fail(GONE, start);
            if (now() - start > u64(limit)) return fail(LATE, start);
        }
        load_acquire_system(&buffers.ring->answered);
        step.counts->waited += now() - start;
        return buffers.ring->refused ? fail(REFUSED, start) : true;
    }

    __device__ __forceinline__ bool fail(Why why, u64 start) const {
        report(error, NO_ANSWER, why, i32((now() - start) / 1000000));
        store_flag(&step.exchange->broken, 1);
        return false;
    }
};

}  // namespace
