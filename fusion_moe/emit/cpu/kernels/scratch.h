// Memory that a thread keeps from call to call.
#pragma once

#include <cstdlib>
#include <memory>
#include <new>

#include "product.h"

namespace {

class Buffer {
  public:
    // Room for `count`, 4 KiB aligned, kept from call to call; what it held may be lost.
    template <class T>
    T* get(i64 count) {
        const std::size_t bytes = (std::size_t(count) * sizeof(T) + 4095) / 4096 * 4096;
        if (bytes > size_) {
            data_.reset(static_cast<char*>(std::aligned_alloc(4096, bytes)));
            if (!data_) throw std::bad_alloc();
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
