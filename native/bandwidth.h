// What this machine can do at most: the limits that a step is held against.
#pragma once

#include <cstddef>

#include "kernels/kernels.h"

namespace tenfold {

// Bytes per second of summing `bytes` of memory that no cache holds, best of `repeats`.
double read_bandwidth(int threads, size_t bytes, int repeats);
// Multiplications of two bytes per second, out of registers, best of `repeats`: the limit that prefill is held against.
double dot_product_peak(const Kernels& kernels, int threads, int repeats);

}  // namespace tenfold
