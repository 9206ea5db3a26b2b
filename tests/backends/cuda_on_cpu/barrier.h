// A barrier of threads. Not std::barrier, of which libstdc++'s may sleep for ever.
#pragma once

#include <condition_variable>
#include <mutex>

class Barrier {
  public:
    explicit Barrier(int count) : count_(count), left_(count) {}
    void wait() {
        std::unique_lock lock(mutex_);
        const unsigned turn = turn_;
        if (--left_ == 0)
            left_ = count_, ++turn_, all_.notify_all();
        else
            all_.wait(lock, [&] { return turn_ != turn; });
    }

  private:
    int count_, left_;
    unsigned turn_ = 0;
    std::mutex mutex_;
    std::condition_variable all_;
};
