// The request ring: pinned memory of the host in which a GPU hands rows over to a worker, and gets
// its answer. It holds one request, since the layers of a model run one after the other.
#pragma once

// Each flag lies in a cache line of its own. What is beside `posted` is written before it and read
// after it, and so for `answered`.
struct RequestRing {
    alignas(64) unsigned long long posted;    // how often rows were handed over; by the GPU
    int layer, rows;                          // whose they are, and how many
    alignas(64) unsigned long long answered;  // which of them was answered last; by the worker
    int refused;                              // whether the program found bad input
    alignas(64) unsigned long long gone;      // whether no worker is left
};
