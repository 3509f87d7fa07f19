// How weights, activations and KV lie in memory. Shared by all ISA levels: one layout, every kernel.
//
// A matrix [rows, cols] is cut into panels of 16 rows (outputs). Lanes of a vector are the 16 outputs of a panel, so
// that a reduction over cols never crosses lanes and its order never depends on how many activation rows there are.
//
//   F32   panel: for each col        16 float                                   (64 B)
//   BF16  panel: for each col pair   16 x {bf16 even, bf16 odd}                  (64 B)
//   Q8    panel: for each group      scales[16] (minima[16])  group/4 x [16][4] u8 (code + 128)
//   Q4    panel: for each group 32   scales[16] (minima[16])  4 x [16][4] u8; low nibble: quads 0..3, high: 4..7
//
// Scales and minima are f16, or f32 when `wide`. A "quad" is 4 consecutive cols of each of the 16 outputs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tenfold {

constexpr int kPanel = 16;     // outputs of a panel
constexpr int kPageRows = 16;  // rows of a KV page
constexpr int kActGroup = 32;  // elements of an activation row that share a scale

// What a KV row's elements are. Q8: int8 with a float scale per row and head, one for K and one for V.
enum class KvFormat : uint8_t { BF16, F32, Q8 };

enum class Format : uint8_t { F32, BF16, Q8, Q4 };

struct Layout {
  Format format = Format::F32;
  int group = 0;
  bool wide = false;
  bool minimum = false;

  bool operator==(const Layout&) const = default;
  bool quantized() const { return format == Format::Q8 || format == Format::Q4; }
  size_t scale_bytes() const { return (wide ? 64u : 32u) * (minimum ? 2u : 1u); }
  size_t group_bytes() const {
    return scale_bytes() + static_cast<size_t>(group) * kPanel / (format == Format::Q4 ? 2 : 1);
  }
  size_t panel_bytes(int cols) const {
    switch (format) {
      case Format::F32:
        return static_cast<size_t>(cols) * 64;
      case Format::BF16:
        return static_cast<size_t>((cols + 1) / 2) * 64;
      default:
        return static_cast<size_t>(cols / group) * group_bytes();
    }
  }
};

// A stretch of 32 activations of a row as int8 codes. The sums fold a weight code's zero point and a weight group's
// minimum into the dot product: sum(w - z)(a) = sum(w a) - z sum(a).
//
// An outlier would set the scale and leave the others few levels. So its high part lies in a second plane, in steps of
// 128: x = scale * (codes + 128 * high). The scale is then that of the others; see quantize() in elementwise.cpp.
struct alignas(64) Stretch {
  int8_t codes[kActGroup];
  float scale;
  float sum;           // of the values that both planes stand for
  float sum_half[2];   // the same for each half
  int32_t minus8;      // -8   * the sum of codes + 128 * high
  int32_t minus128;    // -128 * that
  int32_t minus_half;  // -128 * that of the first half
  uint32_t outliers;   // bit q: the second plane has something in quad q; 0: it has nothing and is not written

  int32_t minus128_half(int h) const { return h == 0 ? minus_half : minus128 - minus_half; }
};

// The second plane.
struct alignas(32) HighStretch {
  int8_t codes[kActGroup];
};

// Quantized rows, in blocks of `pitch` rows: [block][stretch][row of block]. A kernel's tile lies within a block, so
// that it finds the next row at a fixed distance and the next stretch after one step of a pointer.
struct QuantRows {
  Stretch* stretch;
  HighStretch* high;
  size_t pitch;
  size_t stretches;

  QuantRows from(int row) const {
    const size_t i = static_cast<size_t>(row);
    const size_t at = i / pitch * pitch * stretches + i % pitch;
    return {stretch + at, high + at, pitch, stretches};
  }
};

}  // namespace tenfold
