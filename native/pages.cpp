#include "pages.h"

#include <cstring>
#include <stdexcept>

#include "kernels/layout.h"

namespace tenfold {

KvPages::KvPages(int pages, const std::vector<KvShape>& layers, bool f32) : count_(pages), f32_(f32), layers_(layers) {
  for (const KvShape& s : layers_) {
    offsets_.push_back(page_bytes_);
    page_bytes_ += static_cast<size_t>(s.heads) * static_cast<size_t>(s.head_dim) * kPageRows * 2 * element();
  }
  memory_ = Mapping(page_bytes_ * static_cast<size_t>(pages));
}

size_t KvPages::key_offset(int layer, int head) const {
  const size_t one = static_cast<size_t>(shape(layer).head_dim) * kPageRows * element();
  return offsets_[static_cast<size_t>(layer)] + one * static_cast<size_t>(head);
}

size_t KvPages::value_offset(int layer, int head) const {
  return key_offset(layer, shape(layer).heads) + (key_offset(layer, head) - key_offset(layer, 0));
}

void KvPages::copy_rows(int source, int target, int rows) {
  if (source < 0 || source >= count_ || target < 0 || target >= count_ || rows < 0 || rows > kPageRows)
    throw std::invalid_argument("copy_rows: page or row count out of range");
  if (source == target) return;
  const uint8_t* from = page(source);
  uint8_t* to = page(target);
  for (int l = 0; l < layers(); ++l) {
    const size_t dim = static_cast<size_t>(shape(l).head_dim);
    for (int h = 0; h < shape(l).heads; ++h) {
      const size_t key = key_offset(l, h), value = value_offset(l, h), line = static_cast<size_t>(rows) * element();
      for (size_t d = 0; d < dim; ++d) {
        const size_t at = key + d * kPageRows * element();
        std::memcpy(to + at, from + at, line);
      }
      std::memcpy(to + value, from + value, line * dim);
    }
  }
}

}  // namespace tenfold
