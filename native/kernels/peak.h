#pragma once
#include <cstdint>

namespace tenfold::TENFOLD_LEVEL {

int64_t dot_products(int rounds, int32_t* result);

}  // namespace tenfold::TENFOLD_LEVEL
