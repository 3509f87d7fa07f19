#pragma once
#include "kernels.h"

namespace tenfold::TENFOLD_LEVEL {

BestRow best_row(const float* logits, const int32_t* ids, int count, float temperature, uint64_t seed,
                 int64_t position);
Normalizer normalizer(const float* logits, int count, float temperature);

}  // namespace tenfold::TENFOLD_LEVEL
