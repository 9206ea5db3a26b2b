// The protocol of kernels/exchange.h between ranks that are processes, or threads for a sanitizer:
//
//     exchange RANKS ROUNDS SEED [threads]    rounds with delays, unequal tokens, other capacities,
//                                             and not as often back as there
//     exchange RANKS lost PHASE               the last rank ends before a phase of its third call
//     exchange RANKS disagrees                the last rank is in another layer
//
// Prints what each rank found, one line each in the order of ranks.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

thread_local std::minstd_rand random_pause;

// Between any two copies another rank may be fast or slow.
void pause_a_little() {
    const auto n = random_pause() % 400;
    if (n == 0) usleep(random_pause() % 300);
    if (n < 20) sched_yield();
}

namespace std {
inline void* slow_memcpy(void* to, const void* from, std::size_t n) {
    pause_a_little();
    return memcpy(to, from, n);
}
}  // namespace std

#define memcpy slow_memcpy
#include "exchange.h"
#undef memcpy

namespace {

constexpr i64 ROOM = 300, WIDTH = 5, SLOTS = 3, EXPERTS = 11;

struct World {
    i64 ranks, nbytes;
    char* memory;

    explicit World(i64 ranks, u64 limit) : ranks(ranks) {
        nbytes = 1 << 20;
        memory =
            static_cast<char*>(mmap(nullptr, std::size_t(nbytes * ranks), PROT_READ | PROT_WRITE,
                                    MAP_SHARED | MAP_ANONYMOUS, -1, 0));
        for (i64 r = 0; r < ranks; ++r) region(r).header().limit = limit;
    }

    Region region(i64 r) const {
        return Region(i64(memory) + r * nbytes, ranks, ROOM, WIDTH * i64(sizeof(float)));
    }

    std::vector<i64> peers(i64 rank, i64 layer) const {
        std::vector<i64> made{rank, layer, ROOM, WIDTH * i64(sizeof(float))};
        for (i64 r = 0; r < ranks; ++r) made.push_back(i64(memory) + r * nbytes);
        return made;
    }
};

// What a rank has in a round: the same wherever it is asked.
struct Tokens {
    i64 count;
    std::vector<float> x, w;
    std::vector<i32> ids;

    Tokens(i64 rank, i64 round, i64 each) {
        std::minstd_rand random(u32(rank * 7919 + round * 104729 + 1));
        count = round % 5 == 0 ? 0 : i64(random() % u32(each + 1));
        for (i64 i = 0; i < count * WIDTH; ++i) x.push_back(float(random() % 1000));
        for (i64 i = 0; i < count * SLOTS; ++i) {
            ids.push_back(i32(random() % (EXPERTS + 2)) - 1);
            w.push_back(float(random() % 8));
        }
    }
};

// Each rank's experts double a token, and add 1000 times the rank.
float expert(float x, i64 rank) { return 2 * x + 1000 * float(rank); }

struct Rank {
    const World& world;
    i64 rank;
    std::vector<i64> peers;

    Rank(const World& world, i64 rank, i64 layer = 0)
        : world(world), rank(rank), peers(world.peers(rank, layer)) {}

    // "" or what is wrong. phase: before which this process ends.
    std::string round(i64 n, i64 each, int phase = 0) {
        const i64 ranks = world.ranks, rows = ranks * each;
        const Tokens mine(rank, n, each);
        std::vector<float> x(std::size_t(rows * WIDTH)), w(std::size_t(rows * SLOTS));
        std::vector<i32> ids(std::size_t(rows * SLOTS)), ends(static_cast<std::size_t>(ranks));
        if (phase == 1) _exit(0);
        if (!dispatch(mine.x.data(), mine.ids.data(), mine.w.data(), peers.data(), ranks, each,
                      EXPERTS, mine.count, SLOTS, WIDTH, x.data(), ids.data(), w.data(),
                      ends.data()))
            return "lost";
        std::vector<float> y(x.size());
        const Call of(peers.data(), ranks, each, EXPERTS, SLOTS, 4 * WIDTH);
        for (i64 s = 0; s < ranks; ++s) {
            const Tokens want(s, n, each);
            if (ends[s] != s * each + want.count) return "ends";
            for (i64 t = 0; t < each; ++t) {
                const i64 row = s * each + t;
                for (i64 k = 0; k < SLOTS; ++k) {
                    if (ids[row * SLOTS + k] != (t < want.count ? want.ids[t * SLOTS + k] : -1))
                        return "ids";
                    if (t < want.count && w[row * SLOTS + k] != want.w[t * SLOTS + k])
                        return "weights";
                }
                if (t >= want.count || !of.needs(rank, &want.ids[t * SLOTS])) continue;
                for (i64 h = 0; h < WIDTH; ++h) {
                    if (x[row * WIDTH + h] != want.x[t * WIDTH + h]) return "rows";
                    y[row * WIDTH + h] = expert(x[row * WIDTH + h], rank);
                }
            }
        }
        pause_a_little();
        if (phase == 3) _exit(0);
        std::string wrong;
        for (i64 turns = n % 4 == 1 ? 0 : n % 4 == 2 ? 2 : 1; turns > 0 && wrong.empty(); --turns)
            wrong = back(mine, y, ids, ends, each);
        return wrong;
    }

    // Sums y of all ranks' tokens on their way to these.
    std::string back(const Tokens& mine, const std::vector<float>& y, const std::vector<i32>& ids,
                     const std::vector<i32>& ends, i64 each) {
        const i64 ranks = world.ranks;
        const Call of(peers.data(), ranks, each, EXPERTS, SLOTS, 4 * WIDTH);
        std::vector<float> made(std::size_t(mine.count * WIDTH));
        if (!combine_from(y.data(), ids.data(), mine.ids.data(), ends.data(), peers.data(), ranks,
                          each, EXPERTS, mine.count, SLOTS, WIDTH, made.data()))
            return "lost";
        for (i64 t = 0; t < mine.count; ++t)
            for (i64 h = 0; h < WIDTH; ++h) {
                float want = 0;
                for (i64 r = 0; r < ranks; ++r)
                    if (of.needs(r, &mine.ids[t * SLOTS])) want += expert(mine.x[t * WIDTH + h], r);
                if (made[t * WIDTH + h] != want) return "sums";
            }
        return "";
    }

    std::string told() const {
        const u64 broken = world.region(rank).header().broken;
        return std::to_string(broken >> 32) + " rank " +
               std::to_string(i64(broken & 0xFFFFFFFF) - 1);
    }
};

// Other capacities in other calls: a rank may be a call ahead of another one.
i64 capacity(i64 n) { return n % 7 == 6 ? ROOM : 1 + n % 9; }

std::string rounds(const World& world, i64 rank, i64 count, u32 seed) {
    random_pause.seed(seed + u32(rank));
    Rank self(world, rank);
    for (i64 n = 0; n < count; ++n) {
        const std::string wrong = self.round(n, capacity(n));
        if (!wrong.empty()) return wrong + " in round " + std::to_string(n) + ": " + self.told();
    }
    return "good";
}

std::string without_one(const World& world, i64 rank, int phase) {
    Rank self(world, rank);
    const bool last = rank == world.ranks - 1;
    for (i64 n = 1; n < 4; ++n) {
        const std::string wrong = self.round(n, 8, last && n == 3 ? phase : 0);
        if (wrong.empty() != (n < 3)) return wrong + " in round " + std::to_string(n);
    }
    const u64 start = now();
    if (self.round(4, 8) != "lost") return "goes on";
    return now() - start > 50'000'000 ? "waits again" : self.told();
}

std::string in_another_layer(const World& world, i64 rank) {
    Rank self(world, rank, rank == world.ranks - 1);
    return self.round(1, 8) == "lost" ? self.told() : "agrees";
}

}  // namespace

int main(int, char** arguments) {
    const i64 ranks = std::atoi(arguments[1]);
    const std::string what = arguments[2];
    const bool threads = arguments[3] && arguments[4] && std::string(arguments[4]) == "threads";
    const bool plays = what != "lost" && what != "disagrees";
    const World world(ranks, plays ? 60'000'000'000 : 300'000'000);
    std::vector<std::string> found(static_cast<std::size_t>(ranks));
    const auto run = [&](i64 rank) {
        if (what == "lost") return without_one(world, rank, std::atoi(arguments[3]));
        if (what == "disagrees") return in_another_layer(world, rank);
        return rounds(world, rank, std::atoi(arguments[2]), u32(std::atoi(arguments[3])));
    };
    if (threads) {
        std::vector<std::thread> all;
        for (i64 r = 0; r < ranks; ++r) all.emplace_back([&, r] { found[r] = run(r); });
        for (std::thread& t : all) t.join();
        for (i64 r = 0; r < ranks; ++r) std::printf("%s\n", found[r].c_str());
        return 0;
    }
    std::vector<std::pair<pid_t, int>> children;
    for (i64 r = 0; r < ranks; ++r) {
        int ends[2];
        if (pipe(ends)) return 1;
        const pid_t child = fork();
        if (child == 0) {
            const std::string said = run(r);
            if (write(ends[1], said.c_str(), said.size()) < 0) return 1;
            _exit(0);
        }
        close(ends[1]);
        children.emplace_back(child, ends[0]);
    }
    for (const auto& [child, from] : children) {
        char said[200] = {};
        if (read(from, said, sizeof(said) - 1) < 0) return 1;
        std::printf("%s\n", said);
        waitpid(child, nullptr, 0);
    }
    return 0;
}
