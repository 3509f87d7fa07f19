// How fast this machine reads memory with a number of threads: the limit that decoding is held against.
#pragma once

#include <cstddef>

namespace tenfold {

// Bytes per second of summing `bytes` of memory that no cache holds, best of `repeats`.
double read_bandwidth(int threads, size_t bytes, int repeats);

}  // namespace tenfold
