// The worker: a thread that computes rows which GPUs hand over, inside one thread pool.
//
// It looks at the request rings of all models. While one is in use it does so all the time, in a
// parallel region whose helpers wait for loops; after a while without work it leaves the region and
// naps, longer and longer. A submitter on the CPU wakes it; a GPU cannot, nor need it.
//
// Python registers request rings, layers and programs, and the worker never calls Python.
#include <linux/futex.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "launch_plan.h"
#include "request_ring.cuh"
#include "thread_pool.h"

namespace offload {
namespace {

using i32 = std::int32_t;
using i64 = long long;
using u64 = unsigned long long;
using Clock = std::chrono::steady_clock;
using Numbers = NumbersOf<i64>;

// Flags, which the other side reads and writes by its own instructions.
u64 acquire(const u64& flag) { return __atomic_load_n(&flag, __ATOMIC_ACQUIRE); }
void release(u64& flag, u64 x) { __atomic_store_n(&flag, x, __ATOMIC_RELEASE); }

// A program for up to `rows` rows: a launch plan (runtime/launch_plan.py). Its first inputs
// are rows, ids and weights, the others a layer's, its only result the rows that it makes.
class Program {
  public:
    explicit Program(Numbers& reader) : rows(reader.next()), arrays_(reader), function_(reader) {}

    const i64 rows;

    std::size_t workspace() const { return static_cast<std::size_t>(arrays_.workspace); }

    // Whether it ran; if not, it found bad input.
    bool run(char* const (&inputs)[3], const std::vector<char*>& layer, char* result, char* memory,
             ThreadPool& pool) const {
        std::vector<char*> all(inputs, inputs + 3), ordered;
        all.insert(all.end(), layer.begin(), layer.end());
        all.push_back(result);
        for (const i64 offset : arrays_.offsets) all.push_back(memory + offset);
        function_.choose(all, ordered);
        return function_(ordered.data(), &pool) == 0;
    }

  private:
    ArraysOf<i64> arrays_;
    FunctionOf<i64, void*> function_;
};

// A tensor with an entry for each expert, in a file.
struct Stored {
    std::uintptr_t first;
    i64 bytes;  // of an entry

    // Has the system read an entry that is not in memory, without waiting for it.
    void read_ahead(i32 expert) const {
        static const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
        const std::uintptr_t begin = first + static_cast<std::uintptr_t>(expert * bytes),
                             from = begin / page * page;
        madvise(reinterpret_cast<void*>(from), begin + static_cast<std::uintptr_t>(bytes) - from,
                MADV_WILLNEED);
    }
};

// What the programs of a layer read beside rows, ids and weights.
struct Layer {
    std::vector<char*> inputs;
    std::vector<Stored> stored;
    i64 program;   // the first one
    i64 busy = 0;  // nanoseconds
};

// A request ring, the memory beside it, and what answers it. Programs are for more and more rows.
struct Model {
    RequestRing* ring;
    char *rows, *ids, *weights, *results;
    std::vector<std::unique_ptr<Program>> programs;
    std::vector<Layer> layers;
    u64 seen = 0;

    explicit Model(Numbers& reader)
        : ring(reader.address<RequestRing>()),
          rows(reader.address<char>()),
          ids(reader.address<char>()),
          weights(reader.address<char>()),
          results(reader.address<char>()) {}

    bool waits() const { return acquire(ring->posted) != seen; }

    void answer(ThreadPool& pool, std::vector<char>& memory) {
        seen = acquire(ring->posted);
        ring->refused = !compute(pool, memory);
        release(ring->answered, seen);
    }

  private:
    bool compute(ThreadPool& pool, std::vector<char>& memory) {
        if (ring->layer < 0 || ring->layer >= static_cast<i64>(layers.size()) || ring->rows < 0)
            return false;
        Layer& layer = layers[static_cast<std::size_t>(ring->layer)];
        auto program = static_cast<std::size_t>(layer.program);
        while (program < programs.size() && programs[program] &&
               programs[program]->rows < ring->rows)
            ++program;
        if (program >= programs.size() || !programs[program]) return false;
        const Program& fitting = *programs[program];
        for (i64 row = ring->rows; row < fitting.rows; ++row)
            reinterpret_cast<i32*>(ids)[row] = -1, reinterpret_cast<float*>(weights)[row] = 0;
        if (!layer.stored.empty()) read_ahead(layer);
        char* const inputs[] = {rows, ids, weights};
        const Clock::time_point start = Clock::now();
        const bool good = fitting.run(inputs, layer.inputs, results, memory.data(), pool);
        layer.busy += (Clock::now() - start).count();
        return good;
    }

    void read_ahead(const Layer& layer) const {
        const auto* const first = reinterpret_cast<const i32*>(ids);
        std::vector<i32> named(first, first + ring->rows);
        std::sort(named.begin(), named.end());
        named.erase(std::unique(named.begin(), named.end()), named.end());
        for (const i32 expert : named)
            for (const Stored& t : layer.stored)
                if (expert >= 0) t.read_ahead(expert);
    }
};

class Worker {
  public:
    // idle: microseconds without work, after which the pool is left.
    Worker(int threads, i64 idle) : threads_(threads), idle_(idle), thread_([this] { live(); }) {}

    // In a child of the process that started it there is no thread, and everything stays as it is.
    void stop() {
        if (!in_this_process() || stopping_.exchange(true)) return;
        wake();
        thread_.join();
    }

    bool in_this_process() const { return pid_ == getpid(); }

    Model* add(Numbers& reader) {
        auto model = std::make_unique<Model>(reader);
        release(model->ring->gone, 0);
        model->seen = acquire(model->ring->posted);
        const std::lock_guard lock(mutex_);
        models_.push_back(std::move(model));
        return models_.back().get();
    }

    // Programs for more and more rows, after which a null ends them.
    i64 add_programs(Model& model, Numbers& reader) {
        const std::lock_guard lock(mutex_);
        const auto first = static_cast<i64>(model.programs.size());
        for (i64 n = reader.next(); n > 0; --n) {
            model.programs.push_back(std::make_unique<Program>(reader));
            memory_.resize(std::max(memory_.size(), model.programs.back()->workspace()));
        }
        model.programs.push_back(nullptr);
        return first;
    }

    i64 add_layer(Model& model, i64 programs, Numbers& reader) {
        Layer layer{.program = programs};
        for (const i64 address : reader.list())
            layer.inputs.push_back(reinterpret_cast<char*>(address));
        for (i64 n = reader.next(); n > 0; --n) {
            const auto first = static_cast<std::uintptr_t>(reader.next());
            layer.stored.push_back({first, reader.next()});
        }
        const std::lock_guard lock(mutex_);
        model.layers.push_back(std::move(layer));
        return static_cast<i64>(model.layers.size()) - 1;
    }

    void remove(Model* model) {
        const std::lock_guard lock(mutex_);
        release(model->ring->gone, 1);
        models_.erase(std::find_if(models_.begin(), models_.end(),
                                   [=](const auto& m) { return m.get() == model; }));
    }

    void wake() {
        calls_.fetch_add(1);
        syscall(SYS_futex, &calls_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }

    // Whether it stands still, as one that a debugger has stopped.
    void pause(bool still) { paused_.store(still); }

    i64 busy(const Model& model, i64 layer) {
        const std::lock_guard lock(mutex_);
        return model.layers.at(static_cast<std::size_t>(layer)).busy;
    }

  private:
    static constexpr i64 FIRST_NAP = 20'000, LAST_NAP = 2'000'000;  // nanoseconds

    void live() {
        prctl(PR_SET_NAME, "fusion_moe");
        prctl(PR_SET_TIMERSLACK, 1000UL);
        i64 nap = FIRST_NAP;
        while (!stopping_.load()) {
            const std::uint32_t calls = calls_.load();
            if (waits()) {
                ThreadPool::run(threads_, [this](ThreadPool& pool) { return serve(pool); });
                nap = FIRST_NAP;
                continue;
            }
            const timespec time{0, nap};
            syscall(SYS_futex, &calls_, FUTEX_WAIT_PRIVATE, calls, &time, nullptr, 0);
            nap = std::min(nap + nap / 16, LAST_NAP);
        }
        const std::lock_guard lock(mutex_);
        for (const auto& model : models_) release(model->ring->gone, 1);
    }

    bool waits() {
        if (paused_.load()) return false;
        const std::lock_guard lock(mutex_);
        return std::any_of(models_.begin(), models_.end(),
                           [](const auto& m) { return m->waits(); });
    }

    // Answers until there was no work for a while.
    int serve(ThreadPool& pool) {
        Clock::time_point last = Clock::now();
        for (Spin spin; !stopping_.load(std::memory_order_relaxed);) {
            if (!paused_.load() && answer_all(pool)) {
                last = Clock::now();
                spin = Spin();
            } else if (Clock::now() - last > std::chrono::microseconds(idle_)) {
                break;
            } else {
                spin();
            }
        }
        return 0;
    }

    bool answer_all(ThreadPool& pool) {
        const std::lock_guard lock(mutex_);
        bool any = false;
        for (const auto& model : models_) {
            if (!model->waits()) continue;
            model->answer(pool, memory_);
            any = true;
        }
        return any;
    }

    const int threads_;
    const i64 idle_;
    const pid_t pid_ = getpid();
    std::mutex mutex_;  // of what is registered
    std::vector<std::unique_ptr<Model>> models_;
    std::vector<char> memory_;
    std::atomic<bool> stopping_{false}, paused_{false};
    std::atomic<std::uint32_t> calls_{0};
    std::thread thread_;  // last, since it uses the others
};

}  // namespace
}  // namespace offload

// What ctypes calls
// -------------------------------------------------------------------------------------------------

using namespace offload;

extern "C" {

Worker* offload_start(int threads, long long idle) { return new Worker(threads, idle); }

// Ends the thread. What refers to the worker stays valid, and finds it gone.
void offload_stop(Worker* worker) { worker->stop(); }

Model* offload_model(Worker* worker, const long long* numbers, long long count) {
    Numbers reader(numbers, count);
    return worker->add(reader);
}

long long offload_programs(Worker* worker, Model* model, const long long* numbers,
                           long long count) {
    Numbers reader(numbers, count);
    return worker->add_programs(*model, reader);
}

long long offload_layer(Worker* worker, Model* model, long long programs, const long long* numbers,
                        long long count) {
    Numbers reader(numbers, count);
    return worker->add_layer(*model, programs, reader);
}

void offload_remove(Worker* worker, Model* model) {
    if (worker->in_this_process()) worker->remove(model);
}

void offload_pause(Worker* worker, int still) { worker->pause(still != 0); }

// What a GPU does, by a thread: hands over rows that lie in the model's memory. How often that was
// done.
unsigned long long offload_submit(Worker* worker, Model* model, int layer, int rows) {
    const unsigned long long number = model->ring->posted + 1;
    model->ring->layer = layer, model->ring->rows = rows;
    release(model->ring->posted, number);
    worker->wake();
    return number;
}

// Waits for the answer, `limit` nanoseconds at most: 0, or why there is none, as `Await` of
// kernels/handover.cuh has it.
int offload_await(Model* model, unsigned long long number, long long limit) {
    const std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
    for (Spin spin; acquire(model->ring->answered) < number; spin()) {
        if (acquire(model->ring->gone)) return 1;
        if (std::chrono::steady_clock::now() - start > std::chrono::nanoseconds(limit)) return 2;
    }
    return model->ring->refused ? 3 : 0;
}

// A program that makes nothing: what handing over takes by itself.
int offload_nothing(char* const*, const long long*, const long long*, void*) { return 0; }

// Nanoseconds in which it computed a layer.
long long offload_busy(Worker* worker, Model* model, long long layer) {
    return worker->busy(*model, layer);
}

}  // extern "C"
