#pragma once
#include "kernels.h"

namespace tenfold::TENFOLD_LEVEL {

void put_panel(const float* sums, int rows, const float* residual, size_t residual_stride, float* out,
               size_t out_stride);
void quantize(const float* x, int cols, const QuantRows& to);
void rms_norm(const float* x, const float* weight, float offset, float eps, int width, float* out);
void gate(Activation activation, const float* a, const float* b, int count, float* out);
void rope(const float* x, const float* cosine, const float* sine, int rotary, int width, float scale, float* out);
void softcap(float* x, int count, float cap);

}  // namespace tenfold::TENFOLD_LEVEL
