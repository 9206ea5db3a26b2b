// Ranks exchange tokens by the kernels of exchange.cuh: a rank is a thread, its blocks are more of
// them. Prints a word for each part; anything else is a fault.
#include "exchange.cuh"
// after it, since it has names of its own
#include <cstdio>
#include <cstring>
#include <cstdlib>
#include <functional>
#include <random>
#include <vector>

#define NEED(condition) \
    if (!(condition)) std::printf("line %d: %s\n", __LINE__, #condition), std::exit(1)

namespace {

constexpr i32 SLOTS = 3, WIDTH = 8, EXPERTS = 7, ROOM = 600, BLOCKS = 5;
constexpr i64 ROW_BYTES = WIDTH * sizeof(float);
using Random = std::minstd_rand;

void rest(Random& random) {
    if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
}

template <i32 RANKS>
struct Rank {
    using E = Call<RANKS, SLOTS, ROW_BYTES, EXPERTS, BLOCKS, 2 * BLOCKS / 3>;
    static constexpr i32 EACH = (EXPERTS + RANKS - 1) / RANKS;

    std::vector<u64> region = std::vector<u64>(
        (256 + 2 * RANKS * (128 + ROOM * (32 * 8 + ROW_BYTES)) + 8 * 256) / 8, ~u64(0));
    i64 peers[4 + RANKS]{}, error = 0;
    std::vector<float> x, w, rows, all_w, y, sums;
    std::vector<i64> ids;
    std::vector<i32> all_ids;
    i32 ends[RANKS]{}, tokens = 0, most = 0;
    bool equal = false;  // numbers of tokens
    bool coded = false;
    Random random;

    Rank() { header() = {}; }

    E call() { return {peers, most, &error}; }
    Header& header() { return *reinterpret_cast<Header*>(region.data()); }

    void draw(i32 tokens, i32 most) {
        this->tokens = tokens, this->most = most;
        x.assign(ROOM * WIDTH, 0), w.assign(ROOM * SLOTS, 0), ids.assign(ROOM * SLOTS, 0);
        for (float& n : x) n = float(i32(random() % 2000) - 1000) / 16;
        for (float& n : w) n = float(random() % 16) / 8;
        for (i64& id : ids) id = i64(random() % (EXPERTS + 3)) - 1;  // some name nobody
        // what no kernel writes must not be read
        const float nan = std::nanf("");
        rows.assign(RANKS * ROOM * WIDTH, nan), y.assign(RANKS * ROOM * WIDTH, nan);
        all_w.assign(RANKS * ROOM * SLOTS, nan), sums.assign(ROOM * WIDTH, nan);
        all_ids.assign(RANKS * ROOM * SLOTS, 12345);
    }

    void dispatch() {
        equal ? dispatch<true>() : dispatch<false>();
        rest(random);
    }

    template <bool EQUAL>
    void dispatch() {
        if (coded) return dispatch_in_parts<EQUAL>();
        const Dispatch<E, i64, float, EQUAL> sends{call(),       tokens,      ids.data(),
                                                   w.data(),     x.data(),    all_ids.data(),
                                                   all_w.data(), rows.data(), ends};
        launch(BLOCKS, [=] { sends.run(); });
    }

    // Half of each row is in an array of its own, as scales are.
    template <bool EQUAL>
    void dispatch_in_parts() {
        constexpr i32 HALF = WIDTH / 2;
        std::vector<float> parts[2], all[2];
        for (i32 i = 0; i < tokens * WIDTH; ++i) parts[i / HALF % 2].push_back(x[i]);
        for (auto& part : all) part.assign(rows.size() / 2, std::nanf(""));
        const Dispatch<E, i64, float, EQUAL, 1> sends{
            call(),         tokens,       ids.data(),    w.data(), parts[0].data(),
            all_ids.data(), all_w.data(), all[0].data(), ends,     parts[1].data(),
            all[1].data()};
        launch(BLOCKS, [=] { sends.run(); });
        for (i32 i = 0; i < i32(rows.size()); ++i)
            rows[i] = all[i / HALF % 2][i / WIDTH * HALF + i % HALF];
    }

    // What an expert makes of a number.
    static float made(float x, i64 id) { return x * float(1 + id) + float(id); }

    void compute() {
        const i64 mine = peers[0];
        for (i32 m = 0; m < RANKS * most; ++m)
            for (i32 k = 0; k < SLOTS; ++k) {
                const i32 id = all_ids[m * SLOTS + k];
                if (id < 0 || id >= EXPERTS || id / EACH != mine) continue;
                for (i32 c = 0; c < WIDTH; ++c) {
                    float& sum = y[m * WIDTH + c];
                    sum = (std::isnan(sum) ? 0 : sum) +
                          all_w[m * SLOTS + k] * made(rows[m * WIDTH + c], id);
                }
            }
        rest(random);
    }

    void combine() {
        const CombineFrom<E, i64, float> sends{call(), all_ids.data(), ends,
                                               tokens, ids.data(),     sums.data()};
        launch(BLOCKS, [=, this] { sends.copy(y.data()); });
        rest(random);
    }

    // Whether the sums are right, without those of the rank `lost`.
    bool right(i32 lost = -1) const {
        for (i32 t = 0; t < tokens; ++t)
            for (i32 c = 0; c < WIDTH; ++c) {
                float want = 0;
                for (i32 r = 0; r < RANKS; ++r) {
                    float of_rank = 0;
                    for (i32 k = 0; k < SLOTS; ++k) {
                        const i64 id = ids[t * SLOTS + k];
                        if (id >= 0 && id < EXPERTS && id / EACH == r && r != lost)
                            of_rank += w[t * SLOTS + k] * made(x[t * WIDTH + c], id);
                    }
                    want += of_rank;
                }
                if (sums[t * WIDTH + c] != want) return false;
            }
        return true;
    }
};

template <i32 RANKS>
struct Ranks {
    std::vector<Rank<RANKS>> all = std::vector<Rank<RANKS>>(RANKS);

    explicit Ranks(u64 limit) {
        for (i32 r = 0; r < RANKS; ++r) {
            Rank<RANKS>& rank = all[r];
            rank.random.seed(17 * RANKS + r);
            rank.peers[0] = r, rank.peers[1] = 5, rank.peers[2] = ROOM, rank.peers[3] = ROW_BYTES;
            for (i32 p = 0; p < RANKS; ++p) rank.peers[4 + p] = i64(all[p].region.data());
            rank.header().limit = limit;
        }
    }

    // Each rank in a thread.
    void each(std::function<void(Rank<RANKS>&, i32)> body) {
        std::vector<std::thread> threads;
        for (i32 r = 0; r < RANKS; ++r) threads.emplace_back([=, this] { body(all[r], r); });
        for (std::thread& thread : threads) thread.join();
    }
};

constexpr u64 LONG = 100'000'000'000, SHORT = 1'000'000'000;

// Many calls, one after the other, of ranks that run ahead of each other.
template <i32 RANKS>
void many(i32 calls) {
    Ranks<RANKS> ranks(LONG);
    ranks.each([=](Rank<RANKS>& rank, i32) {
        for (i32 i = 0; i < calls; ++i) {
            const i32 most = i % 10 == 0 ? ROOM : i % 3 == 0 ? 40 : 1 + i % 7;
            const i32 tokens = i % 2 ? most : i32(rank.random() % (most + 1)) * (i % 5 > 0);
            rank.draw(tokens, most);
            rank.equal = i % 2, rank.coded = i % 3 == 0;
            const u64 before = rank.header().ended;
            const i32 back = i % 4 == 1 ? 0 : i % 4 == 2 ? 2 : 1;  // as often as it is wanted
            rank.dispatch();
            rank.compute();
            for (i32 n = 0; n < back; ++n) rank.combine();
            NEED(rank.error == 0);
            NEED(rank.header().ended == before + BLOCKS * (1 + u64(back)));
            NEED(back == 0 || rank.right());
        }
    });
}

// A number whose bits are those of a word that has not come arrives, as some NaN, and comes back.
void not_a_number() {
    Ranks<2> ranks(LONG);
    ranks.each([](Rank<2>& rank, i32) {
        for (i32 i = 0; i < 4; ++i) {
            rank.draw(9, 9);
            rank.equal = i % 2, rank.coded = i > 1;
            for (const i32 at : {0, WIDTH / 2}) std::memset(&rank.x[at], 0xFF, sizeof(float));
            rank.ids[0] = 0, rank.ids[1] = EXPERTS - 1, rank.ids[2] = -1;  // one of each rank
            rank.dispatch();
            rank.compute();
            rank.combine();
            NEED(rank.error == 0);
            for (i32 n = 0; n < 9 * WIDTH; ++n)
                NEED(std::isnan(rank.sums[n]) == (n == 0 || n == WIDTH / 2));
        }
    });
}

// A rank without shared memory, and one with too little: zeros, and who it was.
void alone() {
    for (const i64 room : {i64(0), i64(8)}) {
        Rank<2> rank;
        rank.peers[0] = 1, rank.peers[2] = room, rank.peers[3] = ROW_BYTES;
        if (room) rank.peers[5] = i64(rank.region.data());
        rank.draw(9, 9);
        rank.dispatch();
        for (i32 i = 0; i < 2 * 9 * SLOTS; ++i) NEED(rank.all_ids[i] == -1);
        NEED(rank.ends[0] == 0 && rank.ends[1] == 9);
        rank.combine();
        for (i32 i = 0; i < 9 * WIDTH; ++i) NEED(rank.sums[i] == 0);
        NEED(u64(rank.error) == (u64(NO_RANK) << 56 | u64(1) << 32 | u64(NO_ROOM) << 24));
    }
}

// Ends past the rows of a rank, as nobody's dispatch finds them: nothing else is read, and they are
// reported.
void bad_ends() {
    Ranks<2> ranks(LONG);
    ranks.each([](Rank<2>& rank, i32) {
        rank.draw(9, 9);
        rank.dispatch();
        rank.compute();
        for (i32& end : rank.ends) end = 1 << 30;
        rank.combine();
        NEED(rank.right());
        NEED(u64(rank.error) >> 56 == BAD_END);
    });
}

u64 fault(i32 rank) { return u64(NO_RANK) << 24 | u64(rank); }

// The last rank fails: `how` of it in place of its second call. All others find that it was it, in
// time, then in each further call at once, and their sums lack only what did not come.
template <i32 RANKS>
void lost(Phase phase, bool equal, std::function<void(Rank<RANKS>&)> how) {
    constexpr i32 LAST = RANKS - 1;
    Ranks<RANKS> ranks(LONG);
    ranks.each([=](Rank<RANKS>& rank, i32 r) {
        for (i32 i = 0; i < 4; ++i) {
            rank.draw(9, 9);
            rank.equal = equal;
            if (i == 1) rank.header().limit = SHORT;
            if (r == LAST && i > 0) return how(rank);
            const u64 start = now();
            rank.dispatch();
            if (i == 1 && phase == OF_BACK) NEED(rank.error == 0);
            rank.compute();
            rank.combine();
            NEED(now() - start < LONG / 2);
            NEED(i > 0 || rank.right());
            NEED(u64(rank.error) >> 32 == (i ? fault(LAST) : 0));
            NEED(i == 0 || (rank.error >> 24 & 0xFF) == phase);
            NEED(i != 1 || phase != OF_BACK || rank.right(LAST) || rank.right());
            for (i32 n = 0; n < 9 * WIDTH; ++n) NEED(!std::isnan(rank.sums[n]));
        }
    });
}

}  // namespace

int main() {
    before_release = [] {
        thread_local Random random{u32(now())};
        rest(random);
    };
    before_store = [] {
        thread_local Random random{u32(now())};
        if (random() % 256 == 0) rest(random);
    };
    many<2>(60);
    std::puts("two");
    many<4>(30);
    std::puts("four");
    not_a_number();
    std::puts("nan");
    lost<2>(OF_IDS, true, [](auto&) {});
    lost<4>(OF_IDS, false, [](auto&) {});
    std::puts("silent");
    lost<4>(OF_BACK, true, [](auto& rank) { rank.dispatch(); });
    std::puts("dead");
    lost<3>(OF_HANDSHAKE, false, [](auto& rank) {
        rank.peers[1] = 6;  // another layer
        rank.dispatch();
    });
    lost<2>(OF_HANDSHAKE, true, [](auto& rank) {
        rank.most = 8;
        rank.tokens = 8;
        rank.dispatch();
    });
    std::puts("differs");
    alone();
    std::puts("alone");
    bad_ends();
    std::puts("ends");
    return 0;
}
