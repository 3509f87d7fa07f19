#pragma once
#include "kernels.h"

namespace tenfold::TENFOLD_LEVEL {

void quantize(const float* x, int cols, int8_t* codes, float* scale, int32_t* minus8, int32_t* minus128, float* sum,
              int32_t* minus128_half, float* sum_half);
void rms_norm(const float* x, const float* weight, float offset, float eps, int width, float* out);
void gate(Activation activation, const float* a, const float* b, int count, float* out);
void rope(const float* x, const float* cosine, const float* sine, int rotary, int width, float scale, float* out);
void softcap(float* x, int count, float cap);

}  // namespace tenfold::TENFOLD_LEVEL
