// Ranks of one host that store into each other's memory: each has a region, which all see.
//
// A call of all ranks, there or back, is an epoch. A rank counts epochs in its own region, since a
// CUDA graph that is replayed repeats its arguments. A flag is the epoch in which what it stands
// for was written; flags are compared, and never reset. All ranks make the same calls in one order,
// and end none before all have sent in it: when one begins an epoch, all others have begun the one
// before, and so ended what is before that. What ranks send has two places, for even and for odd
// epochs: so nothing is overwritten too early.
//
// A kernel sends before it waits for anything, and what one waits for was sent by kernels that have
// ended, or comes from other ranks. A rank that waits too long gives up for good: it reports the
// other rank, goes on without what did not come, and sends nothing any more, so that the others end
// as well.
//
// Token t of rank s is row s * most + t on all ranks: `most` is the same on all of them, and at
// least the tokens that any has. Ids of all tokens go to all ranks; a token's row only to those
// that have an expert of it. Other rows are neither written nor read.
#pragma once

#include "ragged.cuh"
#include "system.cuh"

namespace {

// The first of 256 bytes; only its own rank has them.
struct Header {
    u64 epoch;
    u64 limit;   // nanoseconds
    u64 broken;  // phase << 32 | 1 + the rank that failed
    u64 unused[5];
    u32 ticket;  // blocks that have sent all they have
};

// What a rank says of its call: all but the tokens is equal on all ranks.
struct Letter {
    u64 tokens, tag, form, unused[13];
};

enum Phase : u32 { OF_IDS = 1, OF_ROWS = 2, OF_BACK = 3, OF_LETTER = 4, NO_ROOM = 5 };

// One call, as a rank sees it. EXPERTS: of all ranks.
template <int RANKS_, i32 SLOTS_, i64 ROW_BYTES, i32 EXPERTS>
struct Exchange {
    static constexpr i32 RANKS = RANKS_, SLOTS = SLOTS_;
    static constexpr i32 PIECES_OF_ROW = i32(ROW_BYTES / 16);
    static constexpr i32 CHUNKS = 256;  // of a rank's tokens; their rows have one flag
    static constexpr i32 PIECES = 16;   // of a rank's tokens; their ids have one flag
    static constexpr i32 MOST_OF_CHUNK = 256;
    static constexpr i64 MOST_SLOTS = 32, ALIGN = 256;
    static constexpr i32 EACH = (EXPERTS + RANKS - 1) / RANKS;  // experts of a rank
    static_assert(ROW_BYTES % 16 == 0 && RANKS <= 16 && SLOTS <= MOST_SLOTS);

    const i64* peers;  // this rank; number of the layer; tokens of a rank and bytes of a row for
                       // which regions have room; the addresses of all regions
    i32 most;
    i64* error;

    __device__ __forceinline__ i32 rank() const { return i32(peers[0]); }
    __device__ __forceinline__ u64 tag() const { return u64(peers[1]) << 32 | u64(most); }
    __device__ static __forceinline__ u64 form() { return u64(SLOTS) << 32 | u64(ROW_BYTES); }
    __device__ __forceinline__ bool fits() const {
        return most <= min(peers[2], i64(MOST_OF_CHUNK * CHUNKS)) && ROW_BYTES <= peers[3];
    }

    // The i-th rank to serve: others before this one, which begins with the next.
    __device__ __forceinline__ i32 served(i32 i) const { return (rank() + 1 + i) % RANKS; }

    // Tokens of a chunk, and of a piece, which is some chunks.
    __device__ __forceinline__ i32 chunk() const { return max((most + CHUNKS - 1) / CHUNKS, 1); }
    __device__ __forceinline__ i32 piece() const { return chunk() * (CHUNKS / PIECES); }
    // How many of these some tokens are, at least one.
    __device__ static __forceinline__ i32 count(i32 tokens, i32 each) {
        return max((tokens + each - 1) / each, 1);
    }

    // Where things lie in the region of a rank.
    template <class T>
    __device__ __forceinline__ T* at(i32 of, i64 place) const {
        return reinterpret_cast<T*>(peers[4 + of] + place);
    }
    __device__ __forceinline__ Header& header() const { return *at<Header>(rank(), 0); }
    __device__ __forceinline__ u64* ids_flag(i32 at_rank, i32 of, i32 piece) const {
        return at<u64>(at_rank, IDS_FLAGS) + of * PIECES + piece;
    }
    __device__ __forceinline__ u64* rows_flag(i32 at_rank, i32 of, i32 chunk) const {
        return at<u64>(at_rank, ROWS_FLAGS) + of * CHUNKS + chunk;
    }
    __device__ __forceinline__ u64* back_flag(i32 at_rank, i32 of, i32 chunk) const {
        return at<u64>(at_rank, BACK_FLAGS) + of * CHUNKS + chunk;
    }
    // Of an epoch.
    __device__ __forceinline__ Letter& letter(i32 at_rank, i32 of, u64 epoch) const {
        return at<Letter>(at_rank, half(epoch))[of];
    }
    // Of token t of rank s, whose part of a section is in one place whatever `most` is: ranks may
    // be in the next call.
    __device__ __forceinline__ i32* ids(i32 at_rank, i32 s, i32 t, u64 epoch) const {
        return at<i32>(at_rank, half(epoch) + IDS) + s * peers[2] * MOST_SLOTS + t * SLOTS;
    }
    __device__ __forceinline__ float* weights(i32 at_rank, i32 s, i32 t, u64 epoch) const {
        return at<float>(at_rank, half(epoch) + IDS + numbers()) + s * peers[2] * MOST_SLOTS +
               t * SLOTS;
    }
    __device__ __forceinline__ uint4* row(i32 at_rank, i32 s, i32 t, u64 epoch) const {
        return at<uint4>(at_rank, half(epoch) + IDS + 2 * numbers() + s * room()) +
               i64(t) * PIECES_OF_ROW;
    }

    // The ranks that have an expert of a token, as bits.
    template <class Id>
    __device__ __forceinline__ u32 owners(const Id* ids) const {
        u32 found = 0;
#pragma unroll
        for (i32 k = 0; k < SLOTS; ++k) {
            const u64 id = u64(i64(ids[k]));
            if (id < u64(EXPERTS)) found |= 1u << u32(id) / u32(EACH);
        }
        return found;
    }
    template <class Id>
    __device__ __forceinline__ bool is_mine(const Id* ids) const {
        return owners(ids) >> rank() & 1;
    }
    // The slots of a token that name an expert of this rank, as bits.
    __device__ __forceinline__ u32 slots_here(const i32* ids) const {
        const i32 mine = rank();
        u32 found = 0;
#pragma unroll
        for (i32 k = 0; k < SLOTS; ++k)
            found |= u32(u32(ids[k]) < u32(EXPERTS) && ids[k] / EACH == mine) << k;
        return found;
    }

    // The epoch that a kernel sends in, 0 if it must not; `sent` by all its blocks, others wait.
    __device__ __forceinline__ u64 next() const {
        return exists() && fits() && header().broken == 0 ? header().epoch + 1 : 0;
    }
    __device__ __forceinline__ void sent() const {
        if (!exists()) return;
        __syncthreads();
        if (threadIdx.x != 0 || add_ticket(&header().ticket) + 1 < gridDim.x) return;
        header().ticket = 0;
        ++header().epoch;
        if (!fits()) fail(NO_ROOM, rank(), now());
    }

    // Whether the ranks share memory at all; if not, there is no header.
    __device__ __forceinline__ bool exists() const { return peers[2] > 0; }
    __device__ __forceinline__ u64 epoch() const { return exists() ? header().epoch : 0; }

    // Whether a flag that another rank sets reaches an epoch in time.
    __device__ __forceinline__ bool wait(const u64* flag, u64 epoch, Phase phase, i32 from) const {
        const u64 start = now();
        if (!exists() || !fits()) return fail(NO_ROOM, rank(), start);
        for (u32 turn = 0; load_relaxed_system(flag) < epoch; ++turn) {
            if (turn % 16) continue;
            if (load_relaxed_system(&header().broken) || now() - start > header().limit)
                return fail(phase, from, start);
        }
        load_acquire_system(flag);
        return true;
    }

    // Gives up. Reports the rank that failed first.
    __device__ __forceinline__ bool fail(Phase phase, i32 from, u64 start) const {
        u64 broken = exists() ? load_relaxed_system(&header().broken) : 0;
        if (broken == 0) {
            broken = u64(phase) << 32 | u64(from + 1);
            if (exists()) store_release_system(&header().broken, broken);
        }
        const u64 waited = min((now() - start) / 1000000, u64(0xFFFFFF));
        report(error, NO_RANK, i32(broken & 0xFFFFFFFF) - 1, i32(broken >> 32 << 24 | waited));
        return false;
    }

  private:
    __device__ static constexpr i64 aligned(i64 nbytes) {
        return (nbytes + ALIGN - 1) / ALIGN * ALIGN;
    }
    // bytes of all rows of a rank
    __device__ __forceinline__ i64 room() const { return peers[2] * peers[3]; }
    __device__ __forceinline__ i64 half(u64 epoch) const {
        return HALVES + i64(epoch % 2) * (IDS + 2 * numbers() + aligned(RANKS * room()));
    }
    // bytes of all ids, and of all weights
    __device__ __forceinline__ i64 numbers() const {
        return aligned(RANKS * peers[2] * MOST_SLOTS * 4);
    }

    static constexpr i64 IDS_FLAGS = ALIGN,
                         ROWS_FLAGS = IDS_FLAGS + aligned(RANKS * PIECES * sizeof(u64)),
                         BACK_FLAGS = ROWS_FLAGS + aligned(RANKS * CHUNKS * sizeof(u64)),
                         HALVES = BACK_FLAGS + aligned(RANKS * CHUNKS * sizeof(u64)),
                         IDS = aligned(RANKS * sizeof(Letter));  // after a half's begin
};

// Sends a rank's tokens to the ranks that have their experts. It waits for nobody.
template <class Exchange, class Id, class Weight>
struct SendTokens {
    Exchange e;
    i32 tokens;
    const Id* ids;          // [tokens, SLOTS]
    const Weight* weights;  // the same
    const void* x;          // [tokens] rows

    __device__ void run() const {
        griddepcontrol_wait();
        const u64 epoch = e.next();
        const i32 pieces = e.count(tokens, e.piece()), chunks = e.count(tokens, e.chunk());
        for (i32 i = blockIdx.x; epoch && i < Exchange::RANKS * pieces; i += gridDim.x)
            post(e.served(i / pieces), i % pieces, epoch);
        for (i32 chunk = blockIdx.x; epoch && chunk < chunks; chunk += gridDim.x)
            send(chunk, epoch);
        e.sent();
    }

  private:
    // Tells a rank the ids and weights of a piece.
    __device__ __forceinline__ void post(i32 to, i32 piece, u64 epoch) const {
        constexpr i32 SLOTS = Exchange::SLOTS;
        const i32 mine = e.rank();
        const i32 first = piece * e.piece(), end = min(first + e.piece(), tokens);
        i32* const their_ids = e.ids(to, mine, 0, epoch);
        float* const their_weights = e.weights(to, mine, 0, epoch);
        for (i32 i = first * SLOTS + threadIdx.x; i < end * SLOTS; i += blockDim.x) {
            their_ids[i] = u64(i64(ids[i])) > 0x7FFFFFFF ? -1 : i32(ids[i]);
            their_weights[i] = widen(weights[i]);
        }
        if (piece == 0 && threadIdx.x == 0) {
            Letter& letter = e.letter(to, mine, epoch);
            letter.tokens = u64(tokens), letter.tag = e.tag(), letter.form = e.form();
        }
        __syncthreads();
        if (threadIdx.x == 0) store_release_system(e.ids_flag(to, mine, piece), epoch);
    }

    // Sends the rows of a chunk, and tells all ranks that they are there, also if there are none.
    __device__ __forceinline__ void send(i32 chunk, u64 epoch) const {
        __shared__ u32 owners[Exchange::MOST_OF_CHUNK];
        constexpr i32 PIECES = Exchange::PIECES_OF_ROW, RANKS = Exchange::RANKS;
        const i32 mine = e.rank(), first = chunk * e.chunk(), end = min(first + e.chunk(), tokens);
        for (i32 t = first + threadIdx.x; t < end; t += blockDim.x)
            owners[t - first] = e.owners(ids + t * Exchange::SLOTS);
        const uint4* const here = static_cast<const uint4*>(x) + i64(first) * PIECES;
        uint4* there[RANKS];
        u32 bit[RANKS];
#pragma unroll
        for (i32 n = 0; n < RANKS; ++n) {
            const i32 to = e.served(n);
            there[n] = e.row(to, mine, first, epoch), bit[n] = 1u << to;
        }
        __syncthreads();
#pragma unroll 2
        for (i32 i = threadIdx.x; i < (end - first) * PIECES; i += blockDim.x) {
            const uint4 part = here[i];
            const u32 needed = owners[i / PIECES];
#pragma unroll
            for (i32 n = 0; n < RANKS; ++n)
                if (needed & bit[n]) there[n][i] = part;
        }
        __syncthreads();
        for (i32 to = threadIdx.x; to < Exchange::RANKS; to += blockDim.x)
            store_release_system(e.rows_flag(to, mine, chunk), epoch);
    }
};

// Awaits the tokens of all ranks: ids, -1 for a row that is of no token or did not come; weights;
// the rows of this rank's experts; the row after each rank's last token.
template <class Exchange, class Weight>
struct ReceiveTokens {
    Exchange e;
    i32* ids;         // [RANKS * most, SLOTS]
    Weight* weights;  // the same
    void* x;          // [RANKS * most] rows
    i32* ends;        // [RANKS]

    __device__ void run() const {
        griddepcontrol_wait();
        const u64 epoch = e.epoch();
        const i32 units = e.count(e.most, unit());
        for (i32 i = blockIdx.x; i < Exchange::RANKS * units; i += gridDim.x)
            receive(e.served(Exchange::RANKS - 1 - i / units), i % units * unit(), epoch);
    }

  private:
    static constexpr i32 UNITS = 16, CHUNKS = Exchange::CHUNKS / UNITS,
                         MOST_OF_UNIT = CHUNKS * Exchange::MOST_OF_CHUNK;

    // Tokens for which a block waits: whole chunks.
    __device__ __forceinline__ i32 unit() const {
        return (e.count(e.most, e.chunk()) + UNITS - 1) / UNITS * e.chunk();
    }

    __device__ __forceinline__ void receive(i32 from, i32 first, u64 epoch) const {
        __shared__ i32 tokens;
        __shared__ bool there[CHUNKS], wanted[MOST_OF_UNIT];
        constexpr i32 SLOTS = Exchange::SLOTS, PIECES = Exchange::PIECES_OF_ROW;
        const i32 mine = e.rank();
        const i32 end = min(first + unit(), e.most), before = from * e.most;
        if (threadIdx.x == 0) tokens = tokens_of(from, first, end, epoch);
        __syncthreads();
        for (i32 c = threadIdx.x; c < CHUNKS; c += blockDim.x)
            there[c] = first + c * e.chunk() < min(end, tokens) &&
                       e.wait(e.rows_flag(mine, from, first / e.chunk() + c), epoch, OF_ROWS, from);
        __syncthreads();
        const auto came = [&](i32 t) { return t < tokens && there[(t - first) / e.chunk()]; };
        const i32* const their_ids = e.ids(mine, from, 0, epoch);
        const float* const their_weights = e.weights(mine, from, 0, epoch);
        for (i32 i = first * SLOTS + threadIdx.x; i < end * SLOTS; i += blockDim.x) {
            const bool good = came(i / SLOTS);
            ids[before * SLOTS + i] = good ? their_ids[i] : -1;
            weights[before * SLOTS + i] = narrow<Weight>(good ? their_weights[i] : 0.f);
        }
        if (first == 0 && threadIdx.x == 0) ends[from] = before + tokens;
        for (i32 t = first + threadIdx.x; t < end; t += blockDim.x)
            wanted[t - first] = came(t) && e.is_mine(their_ids + t * SLOTS);
        const uint4* const sent = e.row(mine, from, first, epoch);
        uint4* const rows = static_cast<uint4*>(x) + i64(before + first) * PIECES;
        __syncthreads();
#pragma unroll 4
        for (i32 i = threadIdx.x; i < (end - first) * PIECES; i += blockDim.x)
            if (wanted[i / PIECES]) rows[i] = sent[i];
        __syncthreads();
    }

    // How many tokens a rank has, once its letter and the ids of tokens first .. end - 1 have come;
    // 0 if they did not.
    __device__ __forceinline__ i32 tokens_of(i32 from, i32 first, i32 end, u64 epoch) const {
        const i32 mine = e.rank();
        const u64 start = now();
        if (!e.wait(e.ids_flag(mine, from, 0), epoch, OF_IDS, from)) return 0;
        const Letter& letter = e.letter(mine, from, epoch);
        if (letter.tag != e.tag() || letter.form != e.form() || letter.tokens > u64(e.most))
            return e.fail(OF_LETTER, from, start);
        const i32 tokens = i32(letter.tokens);
        bool came = true;
        for (i32 t = first; t < min(end, tokens); t = (t / e.piece() + 1) * e.piece())
            came = came && e.wait(e.ids_flag(mine, from, t / e.piece()), epoch, OF_IDS, from);
        return came ? tokens : 0;
    }
};

// Sends what this rank's experts made of all ranks' tokens back. It waits for nobody.
template <class Exchange>
struct SendBack {
    Exchange e;
    const i32* ids;   // [RANKS * most, SLOTS] and
    const i32* ends;  // [RANKS], as ReceiveTokens found them

    // Rows [RANKS * most] as they are.
    __device__ void copy(const void* y) const {
        run([=](i32 row, u32, i32 part) {
            return static_cast<const uint4*>(y)[i64(row) * Exchange::PIECES_OF_ROW + part];
        });
    }

    // made(row, slots, part): 16 bytes of a row, to which only these slots of its token have
    // something to add.
    template <class Made>
    __device__ __forceinline__ void run(Made made) const {
        griddepcontrol_wait();
        const u64 epoch = e.next();
        const i32 chunks = e.count(e.most, e.chunk());
        for (i32 i = blockIdx.x; epoch && i < Exchange::RANKS * chunks; i += gridDim.x)
            send(e.served(i / chunks), i % chunks, epoch, made);
        e.sent();
    }

  private:
    template <class Made>
    __device__ __forceinline__ void send(i32 to, i32 chunk, u64 epoch, Made made) const {
        __shared__ u32 slots[Exchange::MOST_OF_CHUNK];
        constexpr i32 PIECES = Exchange::PIECES_OF_ROW;
        const i32 mine = e.rank();
        const i32 tokens = ends[to] - to * e.most, first = chunk * e.chunk(),
                  end = min(first + e.chunk(), tokens);
        if (chunk > 0 && first >= tokens) return;
        for (i32 t = first + threadIdx.x; t < end; t += blockDim.x)
            slots[t - first] = e.slots_here(ids + (to * e.most + t) * Exchange::SLOTS);
        uint4* const there = e.row(to, mine, first, epoch);
        __syncthreads();
        for (i32 i = threadIdx.x; i < (end - first) * PIECES; i += blockDim.x) {
            const i32 t = i / PIECES;
            if (slots[t]) there[i] = made(to * e.most + first + t, slots[t], i % PIECES);
        }
        __syncthreads();
        if (threadIdx.x == 0) store_release_system(e.back_flag(to, mine, chunk), epoch);
    }
};

// The sum over some slots of weight(s) * y[row(s)][j .. j + V - 1], in their order; AT_ONCE of them
// are read before any is added.
template <int V, i32 SLOTS, i32 AT_ONCE, class T, class Row, class Weight>
__device__ __forceinline__ void sum_slots(float (&total)[V], const T* y, i64 width, i64 j,
                                          u32 slots, Row row, Weight weight) {
#pragma unroll
    for (i32 first = 0; first < SLOTS; first += AT_ONCE) {
        Vector<T, V> found[AT_ONCE];
        float factor[AT_ONCE];
#pragma unroll
        for (i32 s = 0; s < AT_ONCE; ++s)
            if (slots >> (first + s) & 1)
                found[s] = load_vector<V>(y + row(first + s) * width + j),
                factor[s] = weight(first + s);
#pragma unroll
        for (i32 s = 0; s < AT_ONCE; ++s)
            if (slots >> (first + s) & 1)
#pragma unroll
                for (int v = 0; v < V; ++v) total[v] += widen(found[s].at[v]) * factor[s];
    }
}

// Adds what all ranks made of this rank's tokens, in the order of ranks; nothing of those that did
// not answer. It also awaits ranks that made nothing: they have read what they got.
template <class Exchange, class Id, class Number>
struct SumOfRanks {
    Exchange e;
    i32 tokens;
    const Id* ids;  // [tokens, SLOTS]
    Number* y;      // [tokens] rows

    __device__ void run() const {
        griddepcontrol_wait();
        const u64 epoch = e.epoch();
        const i32 chunks = e.count(tokens, e.chunk());
        for (i32 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) add(chunk, epoch);
    }

  private:
    static constexpr int V = 16 / sizeof(Number);
    static constexpr i32 PIECES = Exchange::PIECES_OF_ROW;

    __device__ __forceinline__ void add(i32 chunk, u64 epoch) const {
        __shared__ u32 owners[Exchange::MOST_OF_CHUNK];
        __shared__ bool answered[Exchange::RANKS];
        const i32 mine = e.rank();
        const i32 first = chunk * e.chunk(), end = min(first + e.chunk(), tokens);
        for (i32 r = threadIdx.x; r < Exchange::RANKS; r += blockDim.x)
            answered[r] = e.wait(e.back_flag(mine, r, chunk), epoch, OF_BACK, r);
        __syncthreads();
        u32 came = 0;
        for (i32 r = 0; r < Exchange::RANKS; ++r) came |= u32(answered[r]) << r;
        for (i32 t = first + threadIdx.x; t < end; t += blockDim.x)
            owners[t - first] = e.owners(ids + t * Exchange::SLOTS) & came;
        __syncthreads();
        for (i32 i = threadIdx.x; i < (end - first) * PIECES; i += blockDim.x) {
            const i32 t = first + i / PIECES, part = i % PIECES;
            float total[V] = {};
#pragma unroll
            for (i32 r = 0; r < Exchange::RANKS; ++r) {
                if (!(owners[t - first] >> r & 1)) continue;
                const Vector<Number, V> found = load_vector<V>(
                    reinterpret_cast<const Number*>(e.row(mine, r, t, epoch) + part));
#pragma unroll
                for (int v = 0; v < V; ++v) total[v] += widen(found.at[v]);
            }
            Vector<Number, V> sum;
#pragma unroll
            for (int v = 0; v < V; ++v) sum.at[v] = narrow<Number>(total[v]);
            store_vector<V>(y + (i64(t) * PIECES + part) * V, sum);
        }
        __syncthreads();
    }
};

}  // namespace
