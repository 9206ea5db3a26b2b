// Rows go through the request ring between two threads: the worker, and one that runs the kernels
// of a GPU. Prints a word for each part; anything else is a fault.
#include "worker.cpp"
// after it, since it has names of its own
#include <cstdio>
#include <cstdlib>

#include "handover.cuh"
#include "misses.cuh"

#define NEED(condition) \
    if (!(condition)) return std::printf("line %d: %s\n", __LINE__, #condition), 1

namespace {

constexpr i32 E = 16, T = 6, K = 4, WIDTH = 8, ROWS = T * K;  // rows of `WIDTH` floats

// The worker's program: each number plus its expert's, times the weight.
int plus(char* const* arrays, const long long* sizes, const long long*, void*) {
    const auto x = reinterpret_cast<const float*>(arrays[0]);
    const auto ids = reinterpret_cast<const i32*>(arrays[1]);
    const auto w = reinterpret_cast<const float*>(arrays[2]);
    const auto of = reinterpret_cast<const float*>(arrays[3]);
    const auto y = reinterpret_cast<float*>(arrays[4]);
    for (i64 i = 0; i < sizes[0] * WIDTH; ++i) {
        const i32 id = ids[i / WIDTH];
        y[i] = id < 0 ? 0 : (x[i] + of[id]) * w[i / WIDTH];
    }
    return 0;
}

struct Gpu {
    RequestRing box{};
    alignas(64) float rows[ROWS][WIDTH]{}, results[ROWS][WIDTH]{}, x[T][WIDTH]{}, y[ROWS][WIDTH]{},
        sums[T][WIDTH]{};
    i32 request_ids[ROWS]{};
    float request_weights[ROWS]{}, w[T][K]{}, of[E]{};
    i64 ids[T][K]{}, error = 0;
    Exchange exchange{};
    Counts counts{};
    i32 placed[ROWS]{}, handed[ROWS]{}, uses[E]{}, slot_of[ROWS]{}, tables[2][E]{}, version = 0;
    i64 limit = 20'000'000'000;

    Step step() { return {&exchange, &counts, placed, handed, uses}; }
    RequestBuffers request_buffers() {
        return {&box, reinterpret_cast<u8*>(rows), request_ids, request_weights,
                reinterpret_cast<u8*>(results)};
    }

    // A step, of which experts without a place are the worker's.
    void run() {
        const FindMisses<i64> find{ROWS,          E,        E,      0,  &ids[0][0],
                                   &tables[0][0], &version, step(), {}, &error};
        const HandOver<i64, float> hand_over{
            K,          sizeof(x[0]), 0,      reinterpret_cast<const u8*>(x),
            &ids[0][0], &w[0][0],     step(), request_buffers()};
        launch(4, [=] {
            i32 memory[3 * E + 2 * ROWS];
            const auto found = find.run(memory);
            if (blockIdx.x >= 1) hand_over.run(1, found.rows, found.ids);
        });
        const EndStep<float, float, K, WIDTH> end{
            T, limit, slot_of, nullptr, &y[0][0], &sums[0][0], step(), request_buffers(), &error};
        launch(3, [=] { end.run(); });
    }
};

int run() {
    static Gpu gpu;
    Worker* const worker = offload_start(1, 200);
    const long long addresses[] = {(long long)&gpu.box, (long long)gpu.rows,
                                   (long long)gpu.request_ids, (long long)gpu.request_weights,
                                   (long long)gpu.results};
    Model* const model = offload_model(worker, addresses, 5);
    std::vector<long long> said{2};
    for (long long rows : {ROWS / 2, ROWS})
        // inputs, results, workspace, offsets, entry, products, order, sizes
        said.insert(said.end(),
                    {rows, 4, 1, 0, 0, 0, (long long)plus, 0, 5, 0, 1, 2, 3, 4, 1, rows});
    const long long weights[] = {1, (long long)gpu.of, 0};
    const i64 programs = offload_programs(worker, model, said.data(), i64(said.size()));
    offload_layer(worker, model, programs, weights, 3);
    for (i32 i = 0; i < ROWS; ++i) gpu.slot_of[i] = ROWS - 1 - i;
    for (i32 e = 0; e < E; ++e) gpu.of[e] = float(100 * e);

    u64 asked = 0;
    for (i32 turn = 0; turn < 300; ++turn) {
        gpu.version = turn % 2;
        for (i32 e = 0; e < E; ++e) gpu.tables[gpu.version][e] = std::rand() % 3 ? e : -1;
        if (turn % 10 == 0)
            for (i32 e = 0; e < E; ++e) gpu.tables[gpu.version][e] = e;
        for (i32 i = 0; i < ROWS; ++i) {
            gpu.ids[i / K][i % K] = std::rand() % (E + 1) - 1;
            gpu.w[i / K][i % K] = float(1 + std::rand() % 4);
        }
        for (auto& row : gpu.x)
            for (float& n : row) n = float(std::rand() % 100);
        for (auto& row : gpu.y)
            for (float& n : row) n = -1;
        gpu.run();
        bool any = false;
        for (i32 i = 0; i < ROWS; ++i) {
            const i64 id = gpu.ids[i / K][i % K];
            const bool mine = id >= 0 && gpu.tables[gpu.version][id] < 0;
            any = any || mine;
            for (i32 c = 0; c < WIDTH; ++c) {
                const float want = mine ? (gpu.x[i / K][c] + gpu.of[id]) * gpu.w[i / K][i % K] : -1;
                NEED(gpu.y[ROWS - 1 - i][c] == want);
            }
        }
        for (i32 i = 0; i < T * WIDTH; ++i) {
            float want = 0;
            for (i32 s = 0; s < K; ++s) want += gpu.y[ROWS - 1 - i / WIDTH * K - s][i % WIDTH];
            NEED(gpu.sums[i / WIDTH][i % WIDTH] == want);
        }
        NEED(gpu.exchange.agreed == 0 && gpu.exchange.agreeing == 0 && gpu.exchange.ticket == 0);
        asked += any;
        NEED(gpu.box.posted == asked);
        NEED(gpu.error == 0);
        if (turn % 50 == 49) std::this_thread::sleep_for(std::chrono::milliseconds(20));  // a nap
    }
    std::puts("answered");

    // Tables are published while blocks look: all of them have the same one.
    std::atomic<bool> done = false;
    for (i32 e = 0; e < E; ++e) gpu.tables[0][e] = e, gpu.tables[1][e] = -1;
    for (auto& id : gpu.ids)
        for (i64& n : id) n = &n - &gpu.ids[0][0] & (E - 1);
    std::thread publishes([&] {
        for (i32 turn = 0; !done; ++turn) store_flag(&gpu.version, turn % 2);
    });
    for (i32 turn = 0; turn < 300; ++turn) {
        gpu.run();
        NEED(gpu.counts.rows == 0 || gpu.counts.rows == ROWS);
        asked += gpu.counts.rows > 0;
        NEED(gpu.box.posted == asked && (gpu.counts.rows == 0 || gpu.box.rows == ROWS));
    }
    done = true;
    publishes.join();
    std::puts("agreed");

    const auto fault = [&] { return u64(gpu.error) >> 32; };
    const auto told = [](i32 why) { return u64(NO_ANSWER) << 24 | u64(why); };
    for (auto& place : gpu.tables[gpu.version]) place = -1;
    gpu.limit = 50'000'000;
    offload_pause(worker, 1);
    gpu.run();
    NEED(fault() == told(EndStep<float, float, K, WIDTH>::LATE));
    offload_pause(worker, 0);
    gpu.error = 0;
    gpu.run();  // at once, and nobody is asked
    NEED(fault() == told(0));
    while (__atomic_load_n(&gpu.box.answered, __ATOMIC_ACQUIRE) != gpu.box.posted)
        std::this_thread::yield();  // too late
    std::puts("late");

    gpu.exchange.broken = 0, gpu.error = 0, gpu.limit = 20'000'000'000;
    std::thread ends([=] { offload_stop(worker); });
    for (i32 turn = 0; turn < 1000 && gpu.error == 0; ++turn) gpu.run();
    ends.join();
    if (gpu.error == 0) gpu.run();
    NEED(fault() == told(EndStep<float, float, K, WIDTH>::GONE));
    std::puts("gone");
    return 0;
}

}  // namespace

int main() { return run(); }
