// The threads of a program: one parallel region, in which the first thread runs the program and the
// others help with its loops.
//
//     ThreadPool::run(threads, [&](ThreadPool& pool) {       // one fork, one join
//         pool.share(count, [&](Items& items) {              // in each thread that finds work left
//             for (i64 i; (i = items.next()) >= 0;) compute(i);
//         });                                                // all items are done
//     });
//
// Between loops helpers spin, and give their CPU to others if that takes long. A loop ends when its
// items are done, not when all threads have come: a thread that the system does not run holds
// nobody up. Nothing is locked or allocated. Both libraries of a program have this header, and pass
// pools to each other.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <utility>

namespace {

// What loops are called with: numbers 0 .. count-1, each to one thread, in order.
class Items {
  public:
    // The next number; -1 after the last.
    long long next() {
        const long long i = taken_.fetch_add(1, std::memory_order_relaxed);
        return i < count_ ? i : -1;
    }

    void reset(long long count) {
        count_ = count;
        taken_.store(0, std::memory_order_relaxed);
    }

  private:
    alignas(64) std::atomic<long long> taken_{0};
    long long count_ = 0;
};

// Waiting for another thread.
class Spin {
  public:
    void operator()() {
        if (++turns_ > TURNS) return void(sched_yield());  // <thread> takes long to compile
#if defined(__x86_64__)
        __builtin_ia32_pause();  // _mm_pause, without <immintrin.h>, which takes longer to compile
                                 // than most segments
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

  private:
    static constexpr int TURNS = 1000;  // tens of microseconds
    int turns_ = 0;
};

class ThreadPool {
  public:
    // program(pool), in the calling thread, while up to `threads` - 1 others of OpenMP's help. What
    // it returns is returned.
    template <class Program>
    static int run(int threads, Program program) {
        ThreadPool pool(threads);
        if (threads <= 1) return program(pool);
        int result = 0;
#pragma omp parallel num_threads(threads)
        {
#pragma omp master
            {
                result = program(pool);
                pool.gate_.fetch_or(END, std::memory_order_release);
            }
            pool.help();
        }
        return result;
    }

    int threads() const { return threads_; }

    // work(items) in this thread, and in others that are free. All items are done when it returns.
    template <class Work>
    void share(long long count, const Work& work) {
        items_.reset(count);
        if (threads_ <= 1 || count <= 1) return work(items_);
        work_ = [](const void* context, Items& items) {
            (*static_cast<const Work*>(context))(items);
        };
        context_ = &work;
        gate_.fetch_add(LOOP + OPEN, std::memory_order_release);
        work(items_);
        gate_.fetch_sub(OPEN, std::memory_order_relaxed);
        for (Spin wait; (gate_.load(std::memory_order_acquire) & INSIDE) != 0;) wait();
    }

  private:
    // Of the gate: how many helpers are inside, whether they may enter, whether the program has
    // ended, and the number of the loop.
    static constexpr std::uint64_t INSIDE = (1 << 16) - 1, OPEN = 1 << 16, END = 1 << 17,
                                   LOOP = 1 << 18;

    explicit ThreadPool(int threads) : threads_(threads) {}

    void help() {
        std::uint64_t last = 0;  // that this thread helped with
        for (Spin wait;;) {
            const std::uint64_t seen = gate_.load(std::memory_order_relaxed);
            if ((seen & END) != 0) return;
            if ((seen & OPEN) == 0 || seen / LOOP == last) {
                wait();
                continue;
            }
            const std::uint64_t entered = gate_.fetch_add(
                1, std::memory_order_acquire);  // of this loop, or of one that came after it
            if ((entered & OPEN) != 0) {
                last = entered / LOOP;
                work_(context_, items_);
                wait = Spin();
            }
            gate_.fetch_sub(1, std::memory_order_release);
        }
    }

    const int threads_;
    void (*work_)(const void* context,
                  Items& items) = nullptr;  // read by those inside, written while nobody may enter
    const void* context_ = nullptr;
    alignas(64) std::atomic<std::uint64_t> gate_{0};
    Items items_;
};

}  // namespace
