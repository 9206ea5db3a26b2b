// A launch plan as launch_plan.py writes it, one number after the other: the parts that
// runtime/native.cpp and offload/worker.cpp both read.
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
        std::vector<Integer> numbers(static_cast<std::size_t>(next()));
        for (Integer& n : numbers) n = next();
        return numbers;
    }

  private:
    const Integer* at_;
    const Integer* end_;
};

// The arrays of a plan: inputs, results, those of the workspace.
template <class Integer>
struct ArraysOf {
    Integer inputs;
    std::vector<Integer> made;  // which result each array after the inputs is
    Integer workspace;          // bytes
    std::vector<Integer> offsets;

    explicit ArraysOf(NumbersOf<Integer>& reader)
        : inputs(reader.next()),
          made(reader.list()),
          workspace(reader.next()),
          offsets(reader.list()) {}
};

// A function of a library of the CPU, by threads: their number, or a thread pool.
template <class Integer, class Threads>
class FunctionOf {
  public:
    explicit FunctionOf(NumbersOf<Integer>& reader)
        : function_(reader.template address<Function>()),
          products_(reader.list()),
          order_(reader.list()),
          sizes_(reader.list()) {}

    // The plan's arrays as the function takes them.
    template <class Arrays>
    void choose(const Arrays& all, Arrays& ordered) const {
        for (const Integer i : order_) ordered.push_back(all[static_cast<std::size_t>(i)]);
    }

    // Not 0 if it found bad input.
    int operator()(char* const* arrays, Threads threads) const {
        return function_(arrays, sizes_.data(), products_.data(), threads);
    }

  private:
    using Function = int(char* const* arrays, const Integer* sizes, const Integer* products,
                         Threads threads);

    Function* function_;
    std::vector<Integer> products_, order_, sizes_;
};
