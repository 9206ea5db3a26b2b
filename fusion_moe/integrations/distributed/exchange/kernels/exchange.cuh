// Ranks of one host that store into each other's memory: each has a region, which all see.
//
// Tokens, and sums for them, need no flags: a word that has not come is NOTHING, which nobody
// sends, and who takes a word makes it NOTHING again. Whatever is sent is taken, once, in the same
// call.
//
// A call of all ranks, there or back, is an epoch. A rank counts epochs in its own region, since a
// CUDA graph that is replayed repeats its arguments. A handshake tells its epoch; these are
// compared, and never reset. All ranks make the same calls in one order, and end none before all
// have begun it: when one begins an epoch, all others have begun the one before, and so ended what
// is before that. What ranks send has two places, for even and for odd epochs: so nothing is
// overwritten before it was taken.
//
// A call is a kernel. Its first blocks send, and wait for nobody before they have sent everything;
// the others take what these and other ranks send, and the first help them in the end. All run at
// once, and leave room for kernels of other streams. A rank that waits too long gives up for good:
// it reports the other rank, goes on without what did not come, and sends nothing any more, so that
// the others end as well.
//
// Token t of rank s is row s * most + t on all ranks: `most` is the same on all of them, and at
// least the tokens that any has. Ids of all tokens go to all ranks; a token's row only to those
// that have an expert of it. Other rows are neither written nor read.
#pragma once

#include "fragment_order.cuh"
#include "ragged.cuh"
#include "words.cuh"

namespace {

// The first of 256 bytes; only its own rank has them.
struct Header {
    u64 ended;   // blocks of all calls
    u64 limit;   // nanoseconds
    u64 broken;  // phase << 32 | 1 + the rank that failed
};

// What a rank says of its call: all but the tokens is equal on all ranks.
struct Handshake {
    u64 tokens;  // epoch << 32 | tokens
    u64 tag, form;
    u64 epoch;  // after all that is before
    u64 unused[12];
};

enum Phase : u32 { OF_IDS = 1, OF_ROWS = 2, OF_BACK = 3, OF_HANDSHAKE = 4, NO_ROOM = 5 };

constexpr u32 NOTHING = 0xFFFFFFFF;

// What is sent for a word: another NaN, of which all bytes and halves are NaN, too, for NOTHING.
__device__ __forceinline__ u32 sent(u32 word) { return word == NOTHING ? 0x7FFF7FFF : word; }
__device__ __forceinline__ uint2 sent(uint2 x) { return {sent(x.x), sent(x.y)}; }
__device__ __forceinline__ uint4 sent(uint4 x) {
    return {sent(x.x), sent(x.y), sent(x.z), sent(x.w)};
}
__device__ __forceinline__ bool came(uint2 x) { return x.x != NOTHING && x.y != NOTHING; }
__device__ __forceinline__ bool came(uint4 x) {
    return x.x != NOTHING && x.y != NOTHING && x.z != NOTHING && x.w != NOTHING;
}
__device__ __forceinline__ void forget(uint2* p) {
    store_relaxed_system(p, uint2{NOTHING, NOTHING});
}
__device__ __forceinline__ void forget(uint4* p) {
    store_relaxed_system(p, uint4{NOTHING, NOTHING, NOTHING, NOTHING});
}

// One call, as a rank sees it. EXPERTS: of all ranks.
template <int RANKS_, i32 SLOTS_, i64 ROW_BYTES, i32 EXPERTS, i32 BLOCKS, i32 SENDERS_>
struct Call {
    static constexpr i32 RANKS = RANKS_, SLOTS = SLOTS_;
    static constexpr i32 PIECES = i32(ROW_BYTES / 16);                   // of a row
    static constexpr i32 SENDERS = SENDERS_, TAKERS = BLOCKS - SENDERS;  // blocks
    static constexpr i32 MOST_OF_UNIT = 16, LATE = 3;  // of so many units, one is taken late
    static constexpr i64 MOST_SLOTS = 32, ALIGN = 256, MOST_TOKENS = 65536;
    static constexpr i32 EACH = (EXPERTS + RANKS - 1) / RANKS;  // experts of a rank
    static_assert(ROW_BYTES % 16 == 0 && RANKS <= 16 && SLOTS <= MOST_SLOTS);

    const i64* peers;  // this rank; number of the layer; tokens of a rank and bytes of a row for
                       // which regions have room; the addresses of all regions
    i32 most;
    i64* error;

    __device__ __forceinline__ i64 peer(i32 i) const { return load_constant(peers + i); }
    __device__ __forceinline__ i32 rank() const { return i32(peer(0)); }
    __device__ __forceinline__ u64 tag() const { return u64(peer(1)) << 32 | u64(most); }
    __device__ static __forceinline__ u64 form() { return u64(SLOTS) << 32 | u64(ROW_BYTES); }
    // Whether the ranks share memory at all; if not, there is no header.
    __device__ __forceinline__ bool exists() const { return peer(2) > 0; }
    __device__ __forceinline__ bool fits() const {
        return most <= min(peer(2), MOST_TOKENS) && ROW_BYTES <= peer(3);
    }

    // The i-th rank to serve: others before this one, which begins with the next.
    __device__ __forceinline__ i32 served(i32 i) const { return (rank() + 1 + i) % RANKS; }

    // Of so many tokens of some ranks, those of one that a block works at together: few, so that
    // tokens are taken in about the order in which they come, and blocks have equally much to do;
    // and how many units they are, at least one.
    __device__ static __forceinline__ i32 unit(i32 tokens, i32 ranks, i32 blocks) {
        const i32 at_once = blocks * MOST_OF_UNIT, turns = (tokens * ranks + at_once - 1) / at_once,
                  units = max(turns * blocks / ranks, 1);
        return min(max((tokens + units - 1) / units, 1), MOST_OF_UNIT);
    }
    __device__ static __forceinline__ i32 count(i32 tokens, i32 unit) {
        return max((tokens + unit - 1) / unit, 1);
    }

    // In each block, after it has sent what it sends: takes its part of some units. Blocks that
    // sent take the last ones, if there are more than others take at once.
    template <class Take>
    __device__ __forceinline__ void take_all(i32 units, Take take) const {
        const i32 block = blockIdx.x, early = max(units - units / LATE, min(units, TAKERS));
        const bool sent = block < SENDERS;
        const i32 end = sent ? units : early, step = sent ? SENDERS : TAKERS;
        for (i32 i = sent ? early + block : block - SENDERS; i < end; i += step) take(i);
    }

    // Where things lie in the region of a rank.
    template <class T>
    __device__ __forceinline__ T* at(i32 of, i64 place) const {
        return reinterpret_cast<T*>(peer(4 + of) + place);
    }
    __device__ __forceinline__ Header& header() const { return *at<Header>(rank(), 0); }
    // Of an epoch.
    __device__ __forceinline__ Handshake& handshake(i32 at_rank, i32 of, u64 epoch) const {
        return at<Handshake>(at_rank, half(epoch))[of];
    }
    // Of token t of rank s, whose part of a section is in one place whatever `most` is: ranks may
    // be in the next call. A slot is an id and a weight.
    __device__ __forceinline__ uint2* slots(i32 at_rank, i32 s, i32 t, u64 epoch) const {
        return at<uint2>(at_rank, half(epoch) + IDS) + s * peer(2) * MOST_SLOTS + t * SLOTS;
    }
    __device__ __forceinline__ uint4* row(i32 at_rank, i32 s, i32 t, u64 epoch) const {
        return at<uint4>(at_rank, half(epoch) + IDS + 2 * numbers() + s * room()) + i64(t) * PIECES;
    }

    // From a row of a rank to that of the next one.
    __device__ __forceinline__ i32 apart() const { return i32(room() / sizeof(uint4)); }

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
    __device__ __forceinline__ bool is_mine(i32 id) const {
        return u32(id) < u32(EXPERTS) && id / EACH == rank();
    }
    // The slots of a token that name an expert of this rank, as bits.
    __device__ __forceinline__ u32 slots_here(const i32* ids) const {
        u32 found = 0;
#pragma unroll
        for (i32 k = 0; k < SLOTS; ++k) found |= u32(is_mine(ids[k])) << k;
        return found;
    }

    // The epoch of a call, 0 if this rank may neither send nor wait; all its blocks begin it, and
    // then end it. One thread looks: a rank that fails meanwhile must not divide a block.
    __device__ __forceinline__ u64 begin() const {
        __shared__ u64 epoch;
        if (threadIdx.x == 0) {
            epoch = 0;
            if (exists()) {
                const u64 ended = load_relaxed_system(&header().ended);
                const u64 broken = load_relaxed_system(&header().broken);
                if (fits() && broken == 0) epoch = ended / BLOCKS + 1;
            }
            if (epoch == 0 && blockIdx.x == 0) fail(NO_ROOM, rank(), now());
        }
        __syncthreads();
        return epoch;
    }
    __device__ __forceinline__ void end() const {
        __syncthreads();
        if (exists() && threadIdx.x == 0) add_relaxed(&header().ended);
    }

    // In the last block of a call: tells others of it, how many tokens there are at once, and that
    // all which this rank did before is done; then awaits what others tell.
    __device__ __forceinline__ void greet(i32 tokens, u64 epoch, Phase phase) const {
        if (epoch == 0 || blockIdx.x < BLOCKS - 1) return;
        for (i32 i = threadIdx.x; i < RANKS - 1; i += blockDim.x) {
            Handshake& handshake = this->handshake(served(i), rank(), epoch);
            store_relaxed_system(&handshake.tokens, epoch << 32 | u64(tokens));
            handshake.tag = tag(), handshake.form = form();
            store_release_system(&handshake.epoch, epoch);
        }
        for (i32 i = threadIdx.x; i < RANKS - 1; i += blockDim.x) {
            const i32 from = served(i);
            const Handshake& handshake = this->handshake(rank(), from, epoch);
            const u64 start = now();
            const auto arrived = [&] { return load_relaxed_system(&handshake.epoch) == epoch; };
            if (!until(arrived, phase, [=] { return from; })) continue;
            load_acquire_system(&handshake.epoch);
            if (handshake.tag != tag() || handshake.form != form()) fail(OF_HANDSHAKE, from, start);
        }
    }
    // How many tokens a rank has in its call; -1 if that did not come.
    __device__ __forceinline__ i32 tokens_of(i32 from, u64 epoch, Phase phase) const {
        const Handshake& handshake = this->handshake(rank(), from, epoch);
        u64 tokens = 0;
        const auto arrived = [&] {
            tokens = load_relaxed_system(&handshake.tokens);
            return tokens >> 32 == (epoch & 0xFFFFFFFF);
        };
        const bool good = epoch && until(arrived, phase, [=] { return from; });
        return good ? i32(tokens & 0xFFFFFFFF) : -1;
    }

    // Takes x[n] at p[n * step], where it is wanted, which ranks store; zeros for what does not
    // come. It is of rank from + n * apart.
    template <i32 N, class T>
    __device__ __forceinline__ void take(T (&x)[N], T* p, i32 step, u32 wanted, Phase phase,
                                         i32 from, i32 apart = 0) const {
        u32 missing = wanted;
        const auto all = [&] {
#pragma unroll
            for (i32 n = 0; n < N; ++n)
                if (missing >> n & 1) x[n] = load_relaxed_system(p + n * step);
#pragma unroll
            for (i32 n = 0; n < N; ++n)
                if (missing >> n & 1 && came(x[n])) missing &= ~(1u << n);
            return missing == 0;
        };
        if (!until(all, phase, [&] { return from + apart * (__ffs(missing) - 1); }))
#pragma unroll
            for (i32 n = 0; n < N; ++n)
                if (missing >> n & 1) x[n] = {};
#pragma unroll
        for (i32 n = 0; n < N; ++n)
            if (wanted >> n & 1) forget(p + n * step);
    }

    // Whether something happens in time; from(): who is to blame if not.
    template <class Happened, class From>
    __device__ __forceinline__ bool until(Happened happened, Phase phase, From from) const {
        u64 start;
        for (u32 turn = 0; !happened(); ++turn) {
            if (turn == 0) start = now();
            if (turn % 16) continue;
            if (load_relaxed_system(&header().broken) || now() - start > header().limit)
                return fail(phase, from(), start);
        }
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
    __device__ __forceinline__ i64 room() const { return peer(2) * peer(3); }
    __device__ __forceinline__ i64 half(u64 epoch) const {
        return HALVES + i64(epoch % 2) * (IDS + 2 * numbers() + aligned(RANKS * room()));
    }
    // bytes of all ids, or of all weights
    __device__ __forceinline__ i64 numbers() const {
        return aligned(RANKS * peer(2) * MOST_SLOTS * 4);
    }

    static constexpr i64 HALVES = ALIGN,
                         IDS = aligned(RANKS * sizeof(Handshake));  // after a half's begin
};

// Rows of 16-byte pieces: the FIRST of each are in one array, the REST in another.
template <class Piece, i32 FIRST, i32 REST>
struct Rows {
    Piece *first, *rest;

    __device__ __forceinline__ Rows from(i64 row) const {
        return {first + row * FIRST, rest + row * REST};
    }
    // The i-th piece of all.
    __device__ __forceinline__ Piece* at(i32 i) const {
        if constexpr (REST == 0) return first + i;
        const i32 row = i / (FIRST + REST), n = i % (FIRST + REST);
        return n < FIRST ? first + row * FIRST + n : rest + row * REST + (n - FIRST);
    }
};

// Sends a rank's tokens to the ranks that have their experts, and awaits those of all ranks: ids,
// -1 for a row that is of no token or did not come; weights; the rows of this rank's experts; the
// row after each rank's last token. EQUAL: all ranks have `most` tokens. SCALES: how many pieces of
// a row are its scales. FRAGMENT_ORDER: whether rows come in the order in which products read them.
template <class Call, class Id, class Weight, bool EQUAL, i32 SCALES = 0,
          bool FRAGMENT_ORDER = false>
struct Dispatch {
    Call e;
    i32 tokens;
    const Id* ids;                 // [tokens, SLOTS]
    const Weight* weights;         // the same
    const void* x;                 // [tokens] rows
    i32* all_ids;                  // [RANKS * most, SLOTS]
    Weight* all_weights;           // the same
    void* rows;                    // [RANKS * most] rows
    i32* ends;                     // [RANKS]
    const void* scales = nullptr;  // of x, and
    void* all_scales = nullptr;    // of rows

    __device__ void run() const {
        griddepcontrol_wait();
        const u64 epoch = e.begin();
        if (blockIdx.x < e.SENDERS) {
            const i32 unit = e.unit(e.most, 1, e.SENDERS);
            for (i32 i = blockIdx.x; i < e.count(e.most, unit); i += e.SENDERS)
                send(i * unit, min((i + 1) * unit, e.most), epoch);
        }
        e.greet(tokens, epoch, OF_IDS);
        __shared__ i32 counts[RANKS];  // of the tokens of those that are served
        for (i32 i = threadIdx.x; i < RANKS - 1; i += blockDim.x)
            counts[i] = count(e.served(i), epoch);
        __syncthreads();
        const i32 unit = e.unit(e.most, OTHERS, e.TAKERS);
        e.take_all((RANKS - 1) * e.count(e.most, unit), [&](i32 i) {
            const i32 from = e.served(i % OTHERS), first = i / OTHERS * unit;
            take(from, first, min(first + unit, e.most), counts[i % OTHERS], epoch);
        });
        e.end();
    }

  private:
    static constexpr i32 RANKS = Call::RANKS, SLOTS = Call::SLOTS, PIECES = Call::PIECES,
                         OTHERS = RANKS > 1 ? RANKS - 1 : 1, AT_ONCE = 4;

    // rows of 16-bit numbers
    __device__ __forceinline__ static uint4 in_fragment_order(const uint4* x, i32 piece) {
        const auto found = fragment_piece(reinterpret_cast<const bf16*>(x), piece);
        return reinterpret_cast<const uint4&>(found);
    }

    template <class Piece, class Bytes>
    __device__ __forceinline__ static auto rows_at(Bytes* x, Bytes* scales, i64 row) {
        return Rows<Piece, PIECES - SCALES, SCALES>{static_cast<Piece*>(x),
                                                    static_cast<Piece*>(scales)}
            .from(row);
    }

    __device__ __forceinline__ void send(i32 first, i32 end, u64 epoch) const {
        __shared__ u32 owners[Call::MOST_OF_UNIT];
        __shared__ uint4* there[RANKS];
        const i32 mine = e.rank(), before = mine * e.most, last = min(end, tokens);
        const auto here = rows_at<const uint4>(x, scales, first);
        const i32 pieces = (last - first) * PIECES;
        uint4 part[AT_ONCE];
        const auto read = [&](i32 i) {
#pragma unroll
            for (i32 n = 0; n < AT_ONCE; ++n)
                if (const i32 at = i + n * blockDim.x; at < pieces)
                    part[n] = FRAGMENT_ORDER ? in_fragment_order(here.first, at) : *here.at(at);
        };
        read(threadIdx.x);
        for (i32 i = first * SLOTS + threadIdx.x; i < end * SLOTS; i += blockDim.x) {
            const bool is = i < tokens * SLOTS;
            i32 id = is && u64(i64(ids[i])) <= 0x7FFFFFFE ? i32(ids[i]) : -1;
            const Weight weight = is ? weights[i] : narrow<Weight>(0.f);
            if (epoch == 0) id = -1;
            all_ids[before * SLOTS + i] = id, all_weights[before * SLOTS + i] = weight;
            const uint2 slot = sent(uint2{u32(id + 1), __float_as_uint(widen(weight))});
            for (i32 n = 0; is && epoch && n < RANKS - 1; ++n)
                store_relaxed_system(e.slots(e.served(n), mine, 0, epoch) + i, slot);
        }
        for (i32 t = first + threadIdx.x; t < last; t += blockDim.x)
            owners[t - first] = epoch ? e.owners(ids + t * SLOTS) : 0;
        const auto own = rows_at<uint4>(rows, all_scales, before + first);
        for (i32 to = threadIdx.x; to < RANKS; to += blockDim.x)
            there[to] = to == mine ? own.first : e.row(to, mine, first, epoch);
        if (first == 0 && threadIdx.x == 0) ends[mine] = before + (epoch ? tokens : 0);
        __syncthreads();
        for (i32 i = threadIdx.x; i < pieces; i += AT_ONCE * blockDim.x) {
#pragma unroll
            for (i32 n = 0; n < AT_ONCE; ++n) {
                const i32 at = i + n * blockDim.x;
                const u32 needed = at < pieces ? owners[at / PIECES] : 0;
#pragma unroll
                for (i32 to = 0; to < RANKS; ++to)
                    if (needed >> to & 1)
                        store_relaxed_system(SCALES && to == mine ? own.at(at) : there[to] + at,
                                             sent(part[n]));
            }
            read(i + AT_ONCE * blockDim.x);
        }
        __syncthreads();
    }

    // How many tokens another rank has.
    __device__ __forceinline__ i32 count(i32 from, u64 epoch) const {
        const i32 tokens = EQUAL && epoch ? e.most : e.tokens_of(from, epoch, OF_IDS);
        return min(max(tokens, 0), e.most);
    }

    // Those from `first` on, of which a rank has `count`.
    __device__ __forceinline__ void take(i32 from, i32 first, i32 end, i32 count, u64 epoch) const {
        __shared__ bool wanted[Call::MOST_OF_UNIT];
        const i32 mine = e.rank(), before = from * e.most;
        if (first < count) {
            for (i32 t = threadIdx.x; t < end - first; t += blockDim.x) wanted[t] = false;
            __syncthreads();
        }
        for (i32 i = first * SLOTS + threadIdx.x; i < end * SLOTS; i += blockDim.x) {
            uint2 slot[] = {{}};
            if (i < count * SLOTS)
                e.take(slot, e.slots(mine, from, 0, epoch) + i, 0, 1, OF_IDS, from);
            const i32 id = i32(slot[0].x) - 1;
            all_ids[before * SLOTS + i] = id;
            all_weights[before * SLOTS + i] = narrow<Weight>(__uint_as_float(slot[0].y));
            if (e.is_mine(id)) wanted[i / SLOTS - first] = true;
        }
        if (first == 0 && threadIdx.x == 0) ends[from] = before + count;
        if (first >= count) return;
        uint4* const came = e.row(mine, from, first, epoch);
        const auto own = rows_at<uint4>(rows, all_scales, before + first);
        __syncthreads();
        const i32 pieces = (end - first) * PIECES;
        for (i32 i = threadIdx.x; i < pieces; i += AT_ONCE * blockDim.x) {
            uint4 part[AT_ONCE];
            u32 here = 0;
#pragma unroll
            for (i32 n = 0; n < AT_ONCE; ++n) {
                const i32 at = i + n * blockDim.x;
                here |= u32(at < pieces && wanted[at / PIECES]) << n;
            }
            e.take(part, came + i, blockDim.x, here, OF_ROWS, from);
#pragma unroll
            for (i32 n = 0; n < AT_ONCE; ++n)
                if (here >> n & 1) *own.at(i + n * blockDim.x) = part[n];
        }
        __syncthreads();
    }
};

// The sums over some slots of weight(s) * y[row(s)][j .. j + V - 1], in their order, for j and the
// N - 1 that are `apart`; AT_ONCE of them are read before any is added.
template <int N, int V, i32 AT_ONCE, class T, class Row, class Weight>
__device__ __forceinline__ void sum_slots(float (&total)[N][V], const T* y, i64 width, i64 j,
                                          i64 apart, u32 slots, Row row, Weight weight) {
    while (slots) {
        Vector<T, V> found[AT_ONCE][N];
        float factor[AT_ONCE];
        u32 left = slots;
#pragma unroll
        for (i32 s = 0; s < AT_ONCE; ++s, left &= left - 1) {
            if (left == 0) continue;
            const i32 slot = __ffs(left) - 1;
            const T* const at = y + row(slot) * width + j;
            factor[s] = weight(slot);
#pragma unroll
            for (int n = 0; n < N; ++n) found[s][n] = load_vector<V>(at + n * apart);
        }
#pragma unroll
        for (i32 s = 0; s < AT_ONCE; ++s, slots &= slots - 1)
            if (slots)
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int v = 0; v < V; ++v) total[n][v] += widen(found[s][n].at[v]) * factor[s];
    }
}

// Sends what this rank's experts made of all ranks' tokens back, and adds what all ranks made of
// this rank's, in the order of ranks; nothing of those that did not answer. It also awaits ranks
// that made nothing: they have taken what they got.
template <class Call, class Id, class Number>
struct CombineFrom {
    Call e;
    const i32* all_ids;  // [RANKS * most, SLOTS] and
    const i32* ends;     // [RANKS], as Dispatch found them
    i32 tokens;
    const Id* ids;  // [tokens, SLOTS]
    Number* y;      // [tokens] rows

    // Rows [RANKS * most] as they are.
    __device__ void copy(const void* made) const {
        constexpr i32 N = PIECES % 4 == 0 ? 4 : 1;
        run<N>([=](i32 row, u32, i32 part, uint4(&x)[N]) {
#pragma unroll
            for (i32 n = 0; n < N; ++n)
                x[n] = static_cast<const uint4*>(made)[i64(row) * PIECES + part + n * PIECES / N];
        });
    }

    // made(row, slots, part, x): N pieces of a row, PIECES / N apart from `part` on, to which only
    // these slots of its token have something to add.
    template <i32 N, class Made>
    __device__ __forceinline__ void run(Made made) const {
        griddepcontrol_wait();
        for (i32 r = threadIdx.x; blockIdx.x == 0 && r < RANKS; r += blockDim.x)
            if (ends[r] < r * e.most || ends[r] - r * e.most > e.most)
                report(e.error, BAD_END, r, ends[r]);
        const u64 epoch = e.begin();
        if (blockIdx.x < e.SENDERS) {
            const i32 unit = e.unit(e.most, RANKS, e.SENDERS), units = e.count(e.most, unit);
            for (i32 i = blockIdx.x; epoch && i < RANKS * units; i += e.SENDERS)
                send<N>(e.served(i % RANKS), i / RANKS * unit, unit, epoch, made);
        }
        e.greet(tokens, epoch, OF_BACK);
        const i32 unit = e.unit(tokens, 1, e.TAKERS);
        e.take_all(e.count(tokens, unit),
                   [&](i32 i) { add(i * unit, min((i + 1) * unit, tokens), epoch); });
        e.end();
    }

  private:
    static constexpr int V = 16 / sizeof(Number);
    static constexpr i32 RANKS = Call::RANKS, SLOTS = Call::SLOTS, PIECES = Call::PIECES,
                         AT_ONCE = RANKS < 4 ? RANKS : 4;
    static constexpr u32 MASK = (1 << AT_ONCE) - 1;

    template <i32 N, class Made>
    __device__ __forceinline__ void send(i32 to, i32 first, i32 unit, u64 epoch, Made made) const {
        static_assert(PIECES % N == 0);
        constexpr i32 APART = PIECES / N;
        __shared__ u32 slots[Call::MOST_OF_UNIT];
        const i32 mine = e.rank(), before = to * e.most;
        const i32 end = min(first + unit, min(ends[to] - before, e.most));
        if (first >= end) return;
        for (i32 t = first + threadIdx.x; t < end; t += blockDim.x)
            slots[t - first] = e.slots_here(all_ids + (before + t) * SLOTS);
        uint4* const there = e.row(to, mine, first, epoch);
        __syncthreads();
        for (i32 i = threadIdx.x; i < (end - first) * APART; i += blockDim.x) {
            const i32 t = i / APART, part = i % APART;
            if (slots[t] == 0) continue;
            uint4 x[N];
            made(before + first + t, slots[t], part, x);
#pragma unroll
            for (i32 n = 0; n < N; ++n)
                store_relaxed_system(there + t * PIECES + part + n * APART, sent(x[n]));
        }
        __syncthreads();
    }

    __device__ __forceinline__ void add(i32 first, i32 end, u64 epoch) const {
        __shared__ u32 owners[Call::MOST_OF_UNIT];
        __shared__ bool answers[RANKS];
        const i32 mine = e.rank();
        for (i32 r = threadIdx.x; r < RANKS; r += blockDim.x)
            answers[r] = epoch && (r == mine || e.tokens_of(r, epoch, OF_BACK) >= 0);
        for (i32 t = first + threadIdx.x; t < end; t += blockDim.x)
            owners[t - first] = e.owners(ids + t * SLOTS);
        __syncthreads();
        u32 answer = 0;
        for (i32 r = 0; r < RANKS; ++r) answer |= u32(answers[r]) << r;
        for (i32 i = threadIdx.x; i < (end - first) * PIECES; i += blockDim.x) {
            const i32 t = first + i / PIECES, part = i % PIECES;
            const u32 from = owners[t - first] & answer;
            float total[V] = {};
#pragma unroll 1
            for (i32 before = 0; before < RANKS; before += AT_ONCE) {
                uint4 found[AT_ONCE];
                e.take(found, e.row(mine, before, t, epoch) + part, e.apart(),
                       from >> before & MASK, OF_BACK, before, 1);
#pragma unroll
                for (i32 n = 0; n < AT_ONCE; ++n) {
                    if (!(from >> (before + n) & 1)) continue;
                    const auto& numbers = reinterpret_cast<const Vector<Number, V>&>(found[n]);
#pragma unroll
                    for (int v = 0; v < V; ++v) total[v] += widen(numbers.at[v]);
                }
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
