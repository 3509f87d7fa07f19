#pragma once
#include "layout.h"

namespace tenfold::TENFOLD_LEVEL {

void linear_quant(Layout layout, const uint8_t* panel, int cols, const QuantRows& x, int rows, float* out);
void linear_float(Layout layout, const uint8_t* panel, int cols, const float* x, size_t x_stride, int rows, float* out);
int linear_tile_rows();

}  // namespace tenfold::TENFOLD_LEVEL
