// The tile registers of a thread.
#pragma once

#include <immintrin.h>

#include "numbers.h"

namespace {

// Tiles of 16 rows of 64 bytes, all eight, for a thread.
class AmxThread {
  public:
    AmxThread() {
        struct alignas(64) {
            u8 palette = 1, start_row = 0, reserved[14] = {};
            u16 row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            u8 rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        _tile_loadconfig(&config);
    }
    AmxThread(const AmxThread&) = delete;
    AmxThread& operator=(const AmxThread&) = delete;
    ~AmxThread() { _tile_release(); }
};

}  // namespace
