#pragma once
#include "kernels.h"

namespace tenfold::TENFOLD_LEVEL {

void linear_quant(Layout layout, const uint8_t* const* panels, int count, int cols, const QuantRows& x, int rows,
                  float* out, size_t out_pitch, const LinearTuning& tuning);
void linear_float(Layout layout, const uint8_t* panel, int cols, const float* x, size_t x_stride, int rows, float* out,
                  const LinearTuning& tuning);

}  // namespace tenfold::TENFOLD_LEVEL
