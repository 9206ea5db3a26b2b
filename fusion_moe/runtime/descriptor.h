// What Python says of objects of C++, one number after the other.
#pragma once
#include <cstddef>
#include <stdexcept>
#include <vector>

template <class Integer>
class NumbersOf {
  public:
    NumbersOf(const Integer* begin, Integer count) : at_(begin), end_(begin + count) {}

    Integer next() {
        if (at_ >= end_) throw std::out_of_range("fusion_moe: Python's numbers end early");
        return *at_++;
    }

    template <class T>
    T* address() {
        return reinterpret_cast<T*>(next());
    }

    // As many as the first one says.
    std::vector<Integer> list() {
        std::vector<Integer> found(static_cast<std::size_t>(next()));
        for (Integer& n : found) n = next();
        return found;
    }

  private:
    const Integer* at_;
    const Integer* end_;
};
