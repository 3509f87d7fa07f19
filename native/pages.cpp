#include "pages.h"

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/layout.h"

namespace tenfold {

KvPages::KvPages(int pages, const std::vector<KvShape>& layers, KvFormat format, bool biased)
    : count_(pages), format_(format), biased_(biased), layers_(layers) {
  for (const KvShape& s : layers_) {
    offsets_.push_back(page_bytes_);
    page_bytes_ += 2 * static_cast<size_t>(s.heads) * codes_of(s);
    const size_t line = static_cast<size_t>(s.heads) * kPageRows * sizeof(float);
    if (format == KvFormat::Q8) page_bytes_ += 2 * line;
    if (biased) page_bytes_ += line;
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

size_t KvPages::bias_offset(int layer, int head) const {
  const int heads = shape(layer).heads;
  return format_ == KvFormat::Q8 ? value_scale_offset(layer, heads + head)
                                 : key_offset(layer, 2 * heads) + static_cast<size_t>(head) * kPageRows * sizeof(float);
}

void KvPages::check_page(int index, const char* what) const {
  if (index < 0 || index >= count_) throw std::invalid_argument(std::string(what) + ": page out of range");
}

void KvPages::set_bias(int index, int layer, int head, const float* values) {
  if (!biased_) throw std::invalid_argument("set_bias: the program was compiled without kv_bias");
  check_page(index, "set_bias");
  if (layer < 0 || layer >= layers() || head < 0 || head >= shape(layer).heads)
    throw std::invalid_argument("set_bias: layer or head out of range");
  for (int i = 0; i < kPageRows; ++i)
    if (!(values[i] < INFINITY)) throw std::invalid_argument("set_bias: values must be numbers below infinity");
  std::memcpy(page(index) + bias_offset(layer, head), values, kPageRows * sizeof(float));
}

void KvPages::copy_rows(int source, int target, int rows) {
  check_page(source, "copy_rows");
  check_page(target, "copy_rows");
  if (rows < 0 || rows > kPageRows) throw std::invalid_argument("copy_rows: a page has rows 0 to 16");
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
      const auto copy_floats = [&](size_t at) {
        std::memcpy(to + at, from + at, static_cast<size_t>(rows) * sizeof(float));
      };
      if (format_ == KvFormat::Q8) {
        copy_floats(key_scale_offset(l, h));
        copy_floats(value_scale_offset(l, h));
      }
      if (biased_) copy_floats(bias_offset(l, h));
    }
  }
}

}  // namespace tenfold
