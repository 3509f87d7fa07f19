#include "matrix.h"

#include <cstring>

#include "kernels/half.h"

namespace tenfold {

void Matrix::write_rows(int first, int count, const void* codes, const void* scales, const void* minima) {
  const size_t width = static_cast<size_t>(cols);
  for (int i = 0; i < count; ++i) {
    const int row = first + i;
    uint8_t* panel = data + panel_bytes() * static_cast<size_t>(row / kPanel);
    const size_t lane = static_cast<size_t>(row % kPanel);
    const size_t line = static_cast<size_t>(i) * width;
    if (layout.format == Format::F32) {
      const float* in = static_cast<const float*>(codes) + line;
      float* out = reinterpret_cast<float*>(panel) + lane;
      for (size_t k = 0; k < width; ++k) out[k * 16] = in[k];
      continue;
    }
    if (layout.format == Format::BF16) {
      const uint16_t* in = static_cast<const uint16_t*>(codes) + line;
      uint16_t* out = reinterpret_cast<uint16_t*>(panel) + lane * 2;
      for (size_t k = 0; k < width; ++k) out[k / 2 * 32 + k % 2] = in[k];
      continue;
    }
    const size_t groups = width / static_cast<size_t>(layout.group);
    const size_t scale_size = layout.wide ? 4 : 2;
    for (size_t g = 0; g < groups; ++g) {
      uint8_t* out = panel + g * layout.group_bytes();
      const size_t at = (static_cast<size_t>(i) * groups + g) * scale_size;
      std::memcpy(out + lane * scale_size, static_cast<const uint8_t*>(scales) + at, scale_size);
      if (layout.minimum)
        std::memcpy(out + (16 + lane) * scale_size, static_cast<const uint8_t*>(minima) + at, scale_size);
      out += layout.scale_bytes();
      const uint8_t* in = static_cast<const uint8_t*>(codes) + line + g * static_cast<size_t>(layout.group);
      if (layout.format == Format::Q8) {
        for (int q = 0; q < layout.group / 4; ++q)
          for (int k = 0; k < 4; ++k)
            out[static_cast<size_t>(q) * 64 + lane * 4 + static_cast<size_t>(k)] =
                static_cast<uint8_t>(in[q * 4 + k] ^ 0x80u);
      } else {
        for (int q = 0; q < 4; ++q)
          for (int k = 0; k < 4; ++k)
            out[static_cast<size_t>(q) * 64 + lane * 4 + static_cast<size_t>(k)] =
                static_cast<uint8_t>((in[q * 4 + k] & 15u) | (in[q * 4 + 16 + k] << 4));
      }
    }
  }
}

void Matrix::read_row(int row, float* out) const {
  const uint8_t* p = panel(row / kPanel);
  const size_t lane = static_cast<size_t>(row % kPanel);
  const size_t width = static_cast<size_t>(cols);
  if (layout.format == Format::F32) {
    for (size_t k = 0; k < width; ++k) out[k] = reinterpret_cast<const float*>(p)[k * 16 + lane];
    return;
  }
  if (layout.format == Format::BF16) {
    for (size_t k = 0; k < width; ++k) {
      const uint32_t bits = static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(p)[k / 2 * 32 + lane * 2 + k % 2])
                            << 16;
      std::memcpy(out + k, &bits, 4);
    }
    return;
  }
  const auto scale_at = [&](const uint8_t* s) {
    return layout.wide ? reinterpret_cast<const float*>(s)[lane]
                       : half_to_float(reinterpret_cast<const uint16_t*>(s)[lane]);
  };
  const int groups = cols / layout.group;
  for (int g = 0; g < groups; ++g, p += layout.group_bytes(), out += layout.group) {
    const float scale = scale_at(p);
    const float minimum = layout.minimum ? scale_at(p + (layout.wide ? 64 : 32)) : 0.0f;
    const uint8_t* codes = p + layout.scale_bytes();
    for (int k = 0; k < layout.group; ++k) {
      const size_t quad = static_cast<size_t>(k / 4);
      int code;
      if (layout.format == Format::Q8) {
        code = codes[quad * 64 + lane * 4 + static_cast<size_t>(k % 4)] - 128;
      } else {
        const uint8_t both = codes[(quad % 4) * 64 + lane * 4 + static_cast<size_t>(k % 4)];
        code = (quad < 4 ? both & 15 : both >> 4) - (layout.minimum ? 0 : 8);
      }
      out[k] = scale * static_cast<float>(code) + minimum;
    }
  }
}

}  // namespace tenfold
