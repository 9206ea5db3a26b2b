// Rows that the CPU computes: handed over to its worker, awaited, and put where they belong.
#pragma once

#include "ragged.cuh"
#include "step.cuh"

namespace {

// Where the worker finds rows, and leaves what it makes of them: memory of the host.
struct Letters {
    Mailbox* box;
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
    Letters letters;

    __device__ __forceinline__ void run(i32 first) const {
        const i32 rows = step.counts->rows, blocks = i32(gridDim.x) - first;
        if (rows == 0) return;
        Exchange& exchange = *step.exchange;
        for (i32 row = i32(blockIdx.x) - first; row < rows; row += blocks) {
            const i32 from = step.handed[row];
            copy(letters.rows + row * row_bytes, x + from / slots * row_bytes);
            if (threadIdx.x != 0) continue;
            letters.ids[row] = i32(ids[from]);
            letters.weights[row] = weights ? widen(weights[from]) : 1.f;
        }
        __syncthreads();
        if (threadIdx.x != 0 || add_ticket(&exchange.ticket) + 1 < u32(blocks)) return;
        exchange.ticket = 0;
        letters.box->layer = i32(layer), letters.box->rows = rows;
        store_release_system(&letters.box->posted, exchange.epoch);
    }

  private:
    __device__ __forceinline__ void copy(u8* to, const u8* from) const {
        for (i64 i = 16 * threadIdx.x; i < row_bytes; i += 16 * blockDim.x)
            *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
    }
};

// Copies what the worker made of rows to their places in y. If it is gone, refuses them or does not
// answer in time, nothing is copied, and the fault is reported; it is not asked again.
struct Await {
    enum Why : i32 { GONE = 1, LATE = 2, REFUSED = 3 };
    i64 row_bytes, limit;  // bytes, nanoseconds
    const i32* slot_of;    // the row of each id in y
    u8* y;
    Step step;
    Letters letters;
    i64* error;

    __device__ void run() const {
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
        const i32 rows = step.counts->rows;
        if (rows == 0) return;
        __shared__ i32 answered;
        if (threadIdx.x == 0) answered = wait();
        __syncthreads();
        if (!answered) return;
        for (i32 row = blockIdx.x; row < rows; row += gridDim.x) {
            const u8* const from = letters.results + row * row_bytes;
            u8* const to = y + slot_of[step.handed[row]] * row_bytes;
            for (i64 i = 16 * threadIdx.x; i < row_bytes; i += 16 * blockDim.x)
                *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
        }
    }

  private:
    // Whether the worker answered.
    __device__ __forceinline__ bool wait() const {
        const u64 start = now(), epoch = step.exchange->epoch;
        for (u32 turn = 1; load_relaxed_system(&letters.box->answered) < epoch; ++turn) {
            if (turn % 16) continue;  // a load takes a microsecond
            if (load_relaxed_system(&letters.box->gone)) return fail(GONE, start);
            if (now() - start > u64(limit)) return fail(LATE, start);
        }
        load_acquire_system(&letters.box->answered);
        if (blockIdx.x == 0) step.counts->waited += now() - start;
        return letters.box->refused ? fail(REFUSED, start) : true;
    }

    __device__ __forceinline__ bool fail(Why why, u64 start) const {
        report(error, NO_ANSWER, why, i32((now() - start) / 1000000));
        store_flag(&step.exchange->broken, 1);
        return false;
    }
};

}  // namespace
