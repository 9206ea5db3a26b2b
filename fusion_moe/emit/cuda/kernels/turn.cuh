// How a team of warps stores its sums of an item (many_rows.cuh). A thread of it has sums of two columns of the product for many rows, and
// stores several columns of one: they are turned in shared memory, a chunk of rows at a time.
//
// TurnedElements makes the elements of a result where the sums are, and turns those. So does TurnedPairs, of two columns, once warps have
// given each other sums. TurnedSums turns the sums themselves, and makes any results of any of their columns. Each thread has one: it puts
// its part of a chunk into a place, takes from there what it stores of the chunk, when all of the team have put theirs, and stores it.
// `sum`: of all rows of the item, for each band that it stores.
#pragma once

#include "order.cuh"
#include "pipeline.cuh"
#include "schedule.cuh"

namespace {

// What a team makes of an item with some of its bands, and where a thread stands in it: in each band, each of four warps has 16 columns of
// the product.
template <class Segment, int BANDS>
struct Part {
    static constexpr int THREADS = 128, WARPS = 4, MOST_TEAMS = 5;  // of a team; of a block
    const Segment& s;
    const Item item;
    const i32 column;        // of the result: the team's first
    float factor[BANDS][2];  // of the sums of a thread's two columns of the product, eight apart

    static __device__ __forceinline__ i32 thread() { return threadIdx.x % THREADS; }
    static __device__ __forceinline__ i32 warp() { return threadIdx.x / 32 % WARPS; }
    static __device__ __forceinline__ i32 lane() { return threadIdx.x % 32; }

    // Of all its warps, and of two of them: they have barriers of their own.
    static __device__ __forceinline__ void sync() { barrier_sync(1 + threadIdx.x / THREADS, THREADS); }
    static __device__ __forceinline__ void sync_pair() { barrier_sync_from_anywhere(1 + MOST_TEAMS + threadIdx.x / 64, 64); }

    // Element j of row m, from the row's columns of the product: what lies past the last is made as the last, and not stored.
    __device__ __forceinline__ u16 element(i32 m, i32 j, const float (&p)[Segment::F]) const {
        return s.template result<0>(min(m, item.span.end - 1), item.span.group, min(j, Segment::W - 1), p).bits;
    }
};

// What a thread stores of a result of 16 bits: V of its team's COLUMNS columns of each AT_ONCE-th row.
template <class Segment, class Part, int COLUMNS, int V>
class Stored {
    using At = typename Segment::At;
    using Element = typename Segment::Element;
    static constexpr int PIECES = COLUMNS / V;  // of a row

public:
    static constexpr int AT_ONCE = Part::THREADS / PIECES;

    __device__ __forceinline__ explicit Stored(const Part& part) {
        const At at{part.column + piece() * (At::ORDERED ? 2 : V)};
        to_ = part.s.template array<0>() + i64(part.item.span.first + row()) * Segment::W + at.place();
        left_ = at.j < Segment::W ? part.item.span.end - part.item.span.first - row() : 0;
        asm volatile("" : "+l"(to_), "+r"(left_));  // kept, not computed again
    }

    static __device__ __forceinline__ i32 piece() { return Part::thread() % PIECES; }
    static __device__ __forceinline__ i32 row() { return Part::thread() / PIECES; }

    template <int Count>
    __device__ __forceinline__ void store(const Vector<Element, V> (&taken)[Count], i32 chunk) const {
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            const i32 t = chunk + i * AT_ONCE;
            if (t < left_) store_vector<V>(to_ + i64(t) * Segment::W, taken[i]);
        }
    }

private:
    Element* to_;  // where the thread's columns of its first row lie
    i32 left_;     // of its rows, counted by all
};

// Four matrices of 8 x 8 numbers of 16 bits, of which a lane has a pair each: turned, with the row of one that begins at the lane's `to`.
__device__ __forceinline__ void store_turned(u32 to, const u32 (&pair)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(pair[0]), "r"(pair[1]), "r"(pair[2]),
                 "r"(pair[3])
                 : "memory");
}

// Elements of 16 bits, each made of columns of the product that one thread has: of one, or of one in each band, as gate and up are. Row t
// of a chunk has 128 bytes; piece i of 16 lies where i ^ (t % 8) would.
template <class Segment>
class TurnedElements {
    using At = typename Segment::At;
    using Element = typename Segment::Element;
    static constexpr int ROW = 128, V = 8;  // bytes of a row; columns that a thread stores at a time

public:
    static constexpr int BANDS = Segment::F, COLUMNS = ROW / sizeof(Element), CHUNK = 32, PLACE = CHUNK * ROW;  // rows; bytes
    static constexpr bool CAN = Segment::RESULTS == 1 && Segment::TILES == BANDS && Segment::W % 8 == 0 && sizeof(Element) == 2;

private:
    using Stored = ::Stored<Segment, Part<Segment, BANDS>, COLUMNS, V>;
    static constexpr int AT_ONCE = Stored::AT_ONCE;  // rows that the team puts or takes at once

public:
    struct Taken {
        Vector<Element, V> of[CHUNK / AT_ONCE];
    };

    __device__ __forceinline__ explicit TurnedElements(const Part<Segment, BANDS>& part) : part_(part), stored_(part) {}

    template <int Sums>
    __device__ __forceinline__ void put(u8* place, const float (*sum)[Sums], int chunk) const {
        const i32 lane = part_.lane(), piece = 2 * part_.warp() + lane / 8 % 2;
        const u32 to = shared_address(place) + (lane / 16 * 8 + lane % 8) * ROW + (piece ^ lane % 8) * 16;
#pragma unroll
        for (int t = 0; t < CHUNK; t += AT_ONCE) {
            if (chunk + t >= 2 * Sums) break;
            u32 pair[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = (chunk + t) / 2 + 2 * i;
                const i32 m = part_.item.span.first + chunk + t + i / 2 * 8 + lane % 4 * 2;
                pair[i] = u32(element(m, i % 2, sum, at)) | u32(element(m + 1, i % 2, sum, at + 1)) << 16;
            }
            store_turned(to + t * ROW, pair);
        }
    }

    __device__ __forceinline__ Taken take(const u8* place) const {
        const i32 q = stored_.piece(), row = stored_.row();
        const u8* from = place + row * ROW;
        Taken taken;
#pragma unroll
        for (int i = 0; i < CHUNK / AT_ONCE; ++i, from += AT_ONCE * ROW) {
            if constexpr (At::ORDERED) {
                Vector<u32, 4> pairs;  // the q-th of each 16 columns
#pragma unroll
                for (int b = 0; b < 4; ++b)
                    pairs.at[b] = *reinterpret_cast<const u32*>(from + ((2 * b + q / 4) ^ row % 8) * 16 + q % 4 * 4);
                taken.of[i] = reinterpret_cast<const Vector<Element, V>&>(pairs);
            } else {
                taken.of[i] = load_vector<V>(reinterpret_cast<const Element*>(from + (q ^ row % 8) * 16));
            }
        }
        return taken;
    }

    __device__ __forceinline__ void store(const Taken& taken, i32 chunk) const { stored_.store(taken.of, chunk); }

private:
    const Part<Segment, BANDS>& part_;
    const Stored stored_;

    // Of row m and the thread's lower or upper column, from its at-th sums.
    template <int Sums>
    __device__ __forceinline__ u16 element(i32 m, int upper, const float (*sum)[Sums], int at) const {
        float p[BANDS];
#pragma unroll
        for (int h = 0; h < BANDS; ++h) p[h] = sum[h][at] * part_.factor[h][upper];
        return part_.element(m, part_.column + 16 * part_.warp() + part_.lane() / 4 + 8 * upper, p);
    }
};

// Sums as they are, in float32.
template <class Segment>
class TurnedSums {
    using At = typename Segment::At;
    using Part = ::Part<Segment, 1>;
    static constexpr int V = Segment::F == 1 || Segment::B == 8 ? 8 : 4;  // columns that a thread stores at a time
    static constexpr int STRIDE = 64 + 4;                                 // of rows: no two of a warp's stores meet in a bank

public:
    static constexpr int BANDS = 1, COLUMNS = Segment::B * Part::WARPS / Segment::TILES, CHUNK = 16, PLACE = CHUNK * STRIDE * sizeof(float);

private:
    static constexpr int EACH = At::ORDERED ? COLUMNS / 8 : V, PIECES = COLUMNS / EACH;  // of a row

public:
    struct Taken {
        float p[Segment::F][EACH];
    };

    __device__ __forceinline__ explicit TurnedSums(const Part& part) : part_(part) {}

    template <int Sums>
    __device__ __forceinline__ void put(u8* place, const float (*sum)[Sums], int chunk) const {
        float* to = reinterpret_cast<float*>(place) + part_.lane() % 4 * 2 * STRIDE + 16 * part_.warp() + part_.lane() / 4;
#pragma unroll
        for (int i = 0; i < CHUNK / 2; ++i)
            to[(i / 4 * 8 + i % 2) * STRIDE + i % 4 / 2 * 8] = sum[0][chunk / 2 + i] * part_.factor[0][i % 4 / 2];
    }

    __device__ __forceinline__ Taken take(const u8* place) const {
        Taken taken;
        if (row() < CHUNK) read(taken.p, reinterpret_cast<const float*>(place) + row() * STRIDE, first());
        return taken;
    }

    __device__ __forceinline__ void store(const Taken& taken, i32 chunk) const {
        const i32 m = part_.item.span.first + chunk + row();
        if (row() < CHUNK && m < part_.item.span.end)
            store_columns<EACH>(part_.s, m, part_.item.span.group, At{part_.column + first()}, taken.p);
    }

private:
    const Part& part_;

    __device__ __forceinline__ i32 row() const { return part_.thread() / PIECES; }
    __device__ __forceinline__ i32 first() const { return part_.thread() % PIECES * (At::ORDERED ? 2 : EACH); }

    // Columns that follow each other; or, ordered for the next product, a pair of each 16 of the team's columns.
    template <int Count>
    __device__ static __forceinline__ void read(float (&p)[Segment::F][Count], const float* row, i32 first) {
        const float* block = row + first / Segment::B * (16 * Segment::TILES);
        if constexpr (At::ORDERED) {
            const At at{first};
#pragma unroll
            for (int v = 0; v < Count; ++v)
#pragma unroll
                for (int f = 0; f < Segment::F; ++f)
                    p[f][v] = row[at.column(v) / Segment::B * (16 * Segment::TILES) + Segment::local(f, at.column(v) % Segment::B)];
        } else if constexpr (Segment::B == V) {
            float tile[16 * Segment::TILES];
            read(tile, block);
#pragma unroll
            for (int f = 0; f < Segment::F; ++f)
#pragma unroll
                for (int v = 0; v < V; ++v) p[f][v] = tile[Segment::local(f, v)];
        } else {
#pragma unroll
            for (int f = 0; f < Segment::F; ++f) read(p[f], block + Segment::local(f, first % Segment::B));
        }
    }

    template <int Count>
    __device__ static __forceinline__ void read(float (&to)[Count], const float* from) {
#pragma unroll
        for (int i = 0; i < Count; i += 4) {
            const float4 x = *reinterpret_cast<const float4*>(from + i);
            to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
        }
    }
};

// Elements of 16 bits, each made of two columns of the product that are in tiles of their own, as gate and up are. Of 32 rows the warp of
// the one gives the other half of its sums to the warp of the other, and gets what it lacks of its own half. Then it makes the elements of
// 16 rows and 16 columns, and puts them where it got sums: eight columns of all rows, then the other eight.
template <class Segment>
class TurnedPairs {
    using At = typename Segment::At;
    using Element = typename Segment::Element;
    static constexpr int HALF = 16, GOT = 1024, PIECE = HALF * 16;  // rows; bytes that a warp gets, and of eight columns
    using Part = ::Part<Segment, 1>;

public:
    static constexpr int BANDS = 1, COLUMNS = 8 * Part::WARPS, CHUNK = 2 * HALF, PLACE = Part::WARPS * GOT;
    static constexpr bool CAN =
        Segment::RESULTS == 1 && Segment::F == 2 && Segment::B == 16 && Segment::W % 8 == 0 && sizeof(Element) == 2;

private:
    static constexpr int V = At::ORDERED ? 4 : 8;  // columns that a thread stores at a time
    using Stored = ::Stored<Segment, Part, COLUMNS, V>;
    static constexpr int AT_ONCE = Stored::AT_ONCE;

public:
    struct Taken {
        Vector<Element, V> of[CHUNK / AT_ONCE];
    };

    __device__ __forceinline__ explicit TurnedPairs(const Part& part) : part_(part), stored_(part) {}

    template <int Sums>
    __device__ __forceinline__ void put(u8* place, const float (*sum)[Sums], int chunk) const {
        if (__any_sync(WHOLE_WARP, part_.warp() % 2 == 0)) put_of<0>(place, sum[0], chunk);  // a vote: all of the warp agree
        else put_of<1>(place, sum[0], chunk);
    }

    __device__ __forceinline__ Taken take(const u8* place) const {
        const i32 q = stored_.piece();
        Taken taken;
#pragma unroll
        for (int i = 0; i < CHUNK / AT_ONCE; ++i) {
            const i32 t = stored_.row() + i * AT_ONCE;
            const u8* from = place + t / HALF * GOT + t % HALF * 16;
            if constexpr (At::ORDERED) {
                Vector<u32, 2> pairs;  // the q-th of each 16 columns
#pragma unroll
                for (int b = 0; b < 2; ++b) pairs.at[b] = *reinterpret_cast<const u32*>(from + b * 2 * GOT + q / 4 * PIECE + q % 4 * 4);
                taken.of[i] = reinterpret_cast<const Vector<Element, V>&>(pairs);
            } else {
                taken.of[i] = load_vector<V>(reinterpret_cast<const Element*>(from + q / 2 * 2 * GOT + q % 2 * PIECE));
            }
        }
        return taken;
    }

    __device__ __forceinline__ void store(const Taken& taken, i32 chunk) const { stored_.store(taken.of, chunk); }

private:
    const Part& part_;
    const Stored stored_;

    // By the warp that has the f-th columns: it gives the other half away.
    template <int F, int Sums>
    __device__ __forceinline__ void put_of(u8* place, const float (&sum)[Sums], int chunk) const {
        const i32 lane = part_.lane();
        u8 *theirs = place + (part_.warp() ^ 1) * GOT, *ours = place + part_.warp() * GOT;
        const auto scaled = [&](int half, int i) {
            const int at = chunk / 2 + half * (HALF / 2) + i;
            return at < Sums ? sum[at] * part_.factor[0][i % 4 / 2] : 0.f;
        };
        float4* give = reinterpret_cast<float4*>(theirs) + lane;
#pragma unroll
        for (int i = 0; i < HALF / 2; i += 4)
            give[i / 4 * 32] = {scaled(1 - F, i), scaled(1 - F, i + 1), scaled(1 - F, i + 2), scaled(1 - F, i + 3)};
        part_.sync_pair();
        const i32 m = part_.item.span.first + chunk + F * HALF + lane % 4 * 2, j = part_.column + part_.warp() / 2 * 16 + lane / 4;
        u32 pair[4];
#pragma unroll
        for (int i = 0; i < HALF / 2; i += 4) {
            const float4 x = reinterpret_cast<const float4*>(ours)[i / 4 * 32 + lane];
            const float got[4] = {x.x, x.y, x.z, x.w};
            u16 made[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float own = scaled(F, i + k), p[2] = {F == 0 ? own : got[k], F == 0 ? got[k] : own};
                made[k] = part_.element(m + i / 4 * 8 + k % 2, j + k / 2 * 8, p);
            }
            pair[i / 2] = u32(made[0]) | u32(made[1]) << 16, pair[i / 2 + 1] = u32(made[2]) | u32(made[3]) << 16;
        }
        store_turned(shared_address(ours) + lane / 8 % 2 * PIECE + (lane / 16 * 8 + lane % 8) * 16, pair);
    }
};

// Which of them, for teams of some bands.
template <class Segment, int BANDS, bool ELEMENTS = TurnedElements<Segment>::CAN && BANDS % TurnedElements<Segment>::BANDS == 0,
          bool PAIRS = TurnedPairs<Segment>::CAN>
struct Turn {
    using Way = TurnedElements<Segment>;
};

template <class Segment, int BANDS>
struct Turn<Segment, BANDS, false, true> {
    using Way = TurnedPairs<Segment>;
};

template <class Segment, int BANDS>
struct Turn<Segment, BANDS, false, false> {
    using Way = TurnedSums<Segment>;
};

}  // namespace
