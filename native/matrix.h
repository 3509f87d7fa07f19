// A weight matrix in panels (kernels/layout.h): packing rows in, reading rows back.
#pragma once

#include <cstdint>

#include "kernels/layout.h"

namespace tenfold {

struct Matrix {
  Layout layout;
  int rows = 0, cols = 0;
  uint8_t* data = nullptr;

  int panels() const { return (rows + kPanel - 1) / kPanel; }
  size_t panel_bytes() const { return layout.panel_bytes(cols); }
  size_t bytes() const { return panel_bytes() * static_cast<size_t>(panels()); }
  const uint8_t* panel(int index) const { return data + panel_bytes() * static_cast<size_t>(index); }

  // Packs `count` rows from `first` (a multiple of 16). Codes are row-major: float, uint16 (bf16), int8 or uint8 (one
  // 4-bit code a byte); scales and minima [count][cols / group], float or f16 by the layout.
  void write_rows(int first, int count, const void* codes, const void* scales, const void* minima);
  void read_row(int row, float* out) const;
};

}  // namespace tenfold
