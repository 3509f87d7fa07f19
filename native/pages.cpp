#include "pages.h"

#include <cstring>
#include <stdexcept>

#include "kernels/layout.h"

namespace tenfold {

KvPages::KvPages(int pages, const std::vector<KvShape>& layers, KvFormat format)
    : count_(pages), format_(format), layers_(layers) {
  for (const KvShape& s : layers_) {
    offsets_.push_back(page_bytes_);
    page_bytes_ += 2 * static_cast<size_t>(s.heads) * codes_of(s);
    if (format == KvFormat::Q8) page_bytes_ += 2 * static_cast<size_t>(s.heads) * kPageRows * sizeof(float);
  }
  memory_ = Mapping(page_bytes_ * static_cast<size_t>(pages));
}

// Bytes of K, or V, of one head.
size_t KvPages::codes_of(const KvShape& s) const { return static_cast<size_t>(s.head_dim) * kPageRows * element(); }

size_t KvPages::key_offset(int layer, int head) const {
  return offsets_[static_cast<size_t>(layer)] + codes_of(shape(layer)) * static_cast<size_t>(head);
}

size_t KvPages::value_offset(int layer, int head) const { return key_offset(layer, shape(layer).heads + head); }

size_t KvPages::key_scale_offset(int layer, int head) const {
  return key_offset(layer, 2 * shape(layer).heads) + static_cast<size_t>(head) * kPageRows * sizeof(float);
}

size_t KvPages::value_scale_offset(int layer, int head) const {
  return key_scale_offset(layer, shape(layer).heads + head);
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
      if (format_ != KvFormat::Q8) continue;
      for (const size_t at : {key_scale_offset(l, h), value_scale_offset(l, h)})
        std::memcpy(to + at, from + at, static_cast<size_t>(rows) * sizeof(float));
    }
  }
}

}  // namespace tenfold
