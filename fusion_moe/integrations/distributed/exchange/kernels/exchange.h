// Tokens between the ranks of a node, in memory that they share: `dispatch` and `combine_from`.
//
// Every rank has a region with the same sections. Others write their tokens there, or their sums
// for the rank's own tokens; then they set a flag to the number of the call, which the rank waits
// for. Flags only grow, so none is ever reset. All ranks make the same calls in one order, and each
// waits for all ranks: when one begins call n, all others have begun call n - 1, and so ended call
// n - 2. What calls write is there twice, for those with even and with odd numbers.
#pragma once

#include <time.h>

#include "rows.h"

namespace {

// Nanoseconds.
inline u64 now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return u64(t.tv_sec) * 1000000000 + u64(t.tv_nsec);
}

// The memory of one rank. tokens, row: for how many tokens of a rank, and bytes of each, it has
// room.
class Region {
  public:
    // Written by the rank itself. limit: nanoseconds; broken: why and for whom it waited in vain.
    struct Header {
        u64 epoch, limit, broken;
    };
    // From another rank, in front of its ids. tag, form: what must be the same on all ranks.
    struct Handshake {
        u64 tokens, tag, form, unused[13];
    };
    static constexpr i64 CHUNKS = 256, PIECES = 16, SLOTS = 32;  // at most 64 ranks

    Region(i64 address, i64 ranks, i64 tokens, i64 row)
        : at_(reinterpret_cast<char*>(address)), tokens_(tokens), row_(row) {
        const i64 sizes[] = {256,
                             8 * PIECES * ranks,
                             8 * CHUNKS * ranks,
                             8 * CHUNKS * ranks,
                             i64(sizeof(Handshake)) * ranks,
                             4 * SLOTS * tokens * ranks,
                             4 * SLOTS * tokens * ranks,
                             row * tokens * ranks};
        for (int i = 0; i < SECTIONS; ++i) {
            begins_[i] = end_;
            end_ += (i < TWICE ? 1 : 2) * rounded(sizes[i]);
            nbytes_[i] = rounded(sizes[i]);
        }
    }

    i64 end() const { return end_; }

    Header& header() const { return *section<Header>(0); }
    u64& ids_flag(i64 rank, i64 piece) const { return section<u64>(1)[rank * PIECES + piece]; }
    u64& rows_flag(i64 rank, i64 chunk) const { return section<u64>(2)[rank * CHUNKS + chunk]; }
    u64& sums_flag(i64 rank, i64 chunk) const { return section<u64>(3)[rank * CHUNKS + chunk]; }
    // Of a rank, in a call.
    Handshake& handshake(i64 rank, u64 call) const { return section<Handshake>(4, call)[rank]; }
    i32* ids(i64 rank, u64 call) const { return section<i32>(5, call) + rank * tokens_ * SLOTS; }
    float* weights(i64 rank, u64 call) const {
        return section<float>(6, call) + rank * tokens_ * SLOTS;
    }
    char* rows(i64 rank, u64 call) const { return section<char>(7, call) + rank * tokens_ * row_; }

  private:
    static constexpr int SECTIONS = 8, TWICE = 4;  // the first that is there twice

    static i64 rounded(i64 nbytes) { return (nbytes + 255) / 256 * 256; }
    template <class T>
    T* section(int i, u64 call = 0) const {
        return reinterpret_cast<T*>(at_ + begins_[i] + i64(call % 2) * nbytes_[i]);
    }

    char* at_;
    i64 tokens_, row_, end_ = 0;
    i64 begins_[SECTIONS], nbytes_[SECTIONS];
};

// A call by one rank. each: rows for each rank.
class Call {
  public:
    enum Why : u64 { IDS = 1, ROWS, SUMS, DISAGREES, NO_ROOM };

    Call(const i64* peers, i64 ranks, i64 each, i64 experts, i64 slots, i64 row)
        : ranks(ranks),
          each(each),
          slots(slots),
          row(row),
          here(peers[0]),
          peers_(peers),
          of_rank_((experts + ranks - 1) / ranks),
          experts_(experts),
          chunk_((each + Region::CHUNKS - 1) / Region::CHUNKS) {
        chunk_ = chunk_ > 0 ? chunk_ : 1;
    }

    const i64 ranks, each, slots, row, here;

    // Of a rank; by itself, that of this one.
    Region region(i64 rank) const { return Region(peers_[4 + rank], ranks, peers_[2], peers_[3]); }
    Region region() const { return region(here); }

    // Whether this rank may send and wait: not without memory, nor after it waited in vain.
    bool begin() {
        if (peers_[2] == 0) return false;
        Region::Header& header = region().header();
        if (header.broken) return false;
        epoch_ = ++header.epoch;
        return each <= peers_[2] && row <= peers_[3] && slots <= Region::SLOTS
                   ? true
                   : fail(NO_ROOM, here);
    }

    u64 number() const { return epoch_; }
    i64 chunks(i64 tokens) const { return tokens > chunk_ ? (tokens + chunk_ - 1) / chunk_ : 1; }
    i64 pieces(i64 tokens) const { return (chunks(tokens) + Region::PIECES - 1) / Region::PIECES; }

    // f(token) for those of a chunk.
    template <class F>
    void for_tokens(i64 chunk, i64 tokens, F f) const {
        for (i64 t = chunk * chunk_; t < std::min(tokens, (chunk + 1) * chunk_); ++t) f(t);
    }

    // A bit for each rank that holds one of a token's experts.
    template <class Id>
    u64 holders(const Id* of_token) const {
        u64 found = 0;
        for (i64 i = 0; i < slots; ++i)
            if (of_token[i] >= 0 && of_token[i] < experts_)
                found |= u64(1) << i64(of_token[i]) / of_rank_;
        return found;
    }

    template <class Id>
    bool needs(i64 rank, const Id* of_token) const {
        return holders(of_token) >> rank & 1;
    }

    Region::Handshake handshake(i64 tokens) const {
        return {u64(tokens), u64(peers_[1]) << 32 | u64(each), u64(slots) << 32 | u64(row), {}};
    }

    bool agrees(i64 rank) {
        const Region::Handshake mine = handshake(0), other = region().handshake(rank, epoch_);
        const bool fits = i64(other.tokens) <= each;
        return other.tag == mine.tag && other.form == mine.form && fits ? true
                                                                        : fail(DISAGREES, rank);
    }

    void set(u64& flag) const { __atomic_store_n(&flag, epoch_, __ATOMIC_RELEASE); }

    bool wait(const u64& flag, Why why, i64 rank) {
        const u64 start = now();
        for (Spin spin; __atomic_load_n(&flag, __ATOMIC_ACQUIRE) < epoch_; spin()) {
            if (now() - start > region().header().limit) return fail(why, rank);
        }
        return true;
    }

    // Ranks after this one, and this one last: f(rank), while it is true.
    template <class F>
    bool all_ranks(F f) const {
        for (i64 i = 1; i <= ranks; ++i)
            if (!f((here + i) % ranks)) return false;
        return true;
    }

  private:
    bool fail(Why why, i64 rank) {
        region().header().broken = why << 32 | u64(rank + 1);
        return false;
    }

    const i64* peers_;
    i64 of_rank_, experts_, chunk_;
    u64 epoch_ = 0;
};

// x [T, H], ids [T, k], w [T, k] -> those of all ranks, and where each rank's end. False if a rank
// sent nothing in time, or disagrees.
template <class X, class Id, class W>
bool dispatch(const X* x, const Id* ids, const W* w, const i64* peers, i64 ranks, i64 each,
              i64 experts, i64 tokens, i64 slots, i64 width, X* rows, i32* all_ids, W* all_w,
              i32* ends) {
    Call call(peers, ranks, each, experts, slots, width * i64(sizeof(X)));
    if (!call.begin()) return false;
    const u64 n = call.number();
    call.all_ranks([&](i64 rank) {
        const Region to = call.region(rank);
        to.handshake(call.here, n) = call.handshake(tokens);
        const i64 count = tokens * slots;
        std::transform(ids, ids + count, to.ids(call.here, n), [](Id id) { return i32(id); });
        std::transform(w, w + count, to.weights(call.here, n), [](W v) { return widen(v); });
        for (i64 p = 0; p < call.pieces(tokens); ++p) call.set(to.ids_flag(call.here, p));
        return true;
    });
    for (i64 c = 0; c < call.chunks(tokens); ++c)
        call.all_ranks([&](i64 rank) {
            const Region to = call.region(rank);
            call.for_tokens(c, tokens, [&](i64 t) {
                if (call.needs(rank, ids + t * slots))
                    std::memcpy(to.rows(call.here, n) + t * call.row, x + t * width,
                                std::size_t(call.row));
            });
            call.set(to.rows_flag(call.here, c));
            return true;
        });

    const Region own = call.region();
    std::fill(all_ids, all_ids + ranks * each * slots, -1);
    return call.all_ranks([&](i64 rank) {
        if (!call.wait(own.ids_flag(rank, 0), Call::IDS, rank) || !call.agrees(rank)) return false;
        const i64 there = i64(own.handshake(rank, n).tokens), first = rank * each;
        for (i64 p = 1; p < call.pieces(there); ++p)
            if (!call.wait(own.ids_flag(rank, p), Call::IDS, rank)) return false;
        ends[rank] = i32(first + there);
        std::copy_n(own.ids(rank, n), there * slots, all_ids + first * slots);
        std::transform(own.weights(rank, n), own.weights(rank, n) + there * slots,
                       all_w + first * slots, [](float v) { return stored<W>(v); });
        for (i64 c = 0; c < call.chunks(there); ++c) {
            if (!call.wait(own.rows_flag(rank, c), Call::ROWS, rank)) return false;
            call.for_tokens(c, there, [&](i64 t) {
                if (call.needs(call.here, all_ids + (first + t) * slots))
                    std::memcpy(rows + (first + t) * width, own.rows(rank, n) + t * call.row,
                                std::size_t(call.row));
            });
        }
        return true;
    });
}

// y [R * each, H] and all_ids [R * each, k], sums and ids of the tokens of all ranks, of which ids
// [T, k] are this rank's; ends of each rank's tokens -> [T, H], added in the order of ranks. False
// if a rank sent nothing in time.
template <class Y, class Id>
bool combine_from(const Y* y, const i32* all_ids, const Id* ids, const i32* ends, const i64* peers,
                  i64 ranks, i64 each, i64 experts, i64 tokens, i64 slots, i64 width, Y* made) {
    Call call(peers, ranks, each, experts, slots, width * i64(sizeof(Y)));
    if (!call.begin()) return false;
    const u64 n = call.number();
    const Region own = call.region();
    call.all_ranks([&](i64 rank) {
        const Region to = call.region(rank);
        const i64 first = rank * each, there = ends[rank] - first;
        for (i64 c = 0; c < call.chunks(there); ++c) {
            call.for_tokens(c, there, [&](i64 t) {
                if (call.needs(call.here, all_ids + (first + t) * slots))
                    std::memcpy(to.rows(call.here, n) + t * call.row, y + (first + t) * width,
                                std::size_t(call.row));
            });
            call.set(to.sums_flag(call.here, c));
        }
        return true;
    });
    const bool all = call.all_ranks([&](i64 rank) {
        for (i64 c = 0; c < call.chunks(tokens); ++c)
            if (!call.wait(own.sums_flag(rank, c), Call::SUMS, rank)) return false;
        return true;
    });
    for (i64 t = 0; all && t < tokens; ++t) {
        const u64 holders = call.holders(ids + t * slots);
        for (i64 h = 0; h < width; ++h) {
            float sum = 0;
            for (u64 left = holders; left; left &= left - 1)
                sum += widen(
                    reinterpret_cast<const Y*>(own.rows(__builtin_ctzll(left), n))[t * width + h]);
            made[t * width + h] = stored<Y>(sum);
        }
    }
    return all;
}

}  // namespace
