// Memory that a thread keeps from call to call.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include "product.h"

namespace {

constexpr std::size_t PAGE = 1 << 12, LARGE_PAGE = 1 << 21;

class Buffer {
  public:
    // Room for `count`, aligned to a page, a large one if it fills a 32nd of that, kept from call
    // to call; what it held may be lost.
    template <class T>
    T* get(i64 count) {
        const std::size_t wanted = std::size_t(count) * sizeof(T);
        if (wanted > size_) {
            const std::size_t page = wanted > LARGE_PAGE / 32 ? LARGE_PAGE : PAGE,
                              bytes = (wanted + page - 1) / page * page;
            data_.reset(static_cast<char*>(std::aligned_alloc(page, bytes)));
            if (!data_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
            // small pages lie anywhere, and in some runs too many of them meet in the same places
            // of the second-level cache
            if (page == LARGE_PAGE) madvise(data_.get(), bytes, MADV_HUGEPAGE);
#endif
            size_ = bytes;
        }
        return reinterpret_cast<T*>(data_.get());
    }

  private:
    struct Free {
        void operator()(char* p) const { std::free(p); }
    };
    std::unique_ptr<char, Free> data_;
    std::size_t size_ = 0;
};

struct Scratch {
    Buffer rows, wide, packed, panel, sums, tile;
};

}  // namespace
