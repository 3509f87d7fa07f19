#pragma once
#include "kernels.h"

namespace tenfold::TENFOLD_LEVEL {

void store_kv(KvFormat format, const KvLine& to, const float* k, const float* v, int dim);

}  // namespace tenfold::TENFOLD_LEVEL
