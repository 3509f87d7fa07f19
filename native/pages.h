// The KV page pool: pages of 16 rows, each all layers of its rows in one contiguous stretch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/layout.h"
#include "memory.h"

namespace tenfold {

struct KvShape {
  int heads, head_dim;
};

class KvPages {
 public:
  KvPages(int pages, const std::vector<KvShape>& layers, KvFormat format, bool biased);

  int count() const { return count_; }
  size_t page_bytes() const { return page_bytes_; }
  KvFormat format() const { return format_; }
  bool biased() const { return biased_; }
  int layers() const { return static_cast<int>(layers_.size()); }
  const KvShape& shape(int layer) const { return layers_[static_cast<size_t>(layer)]; }
  uint8_t* page(int index) const { return memory_.data() + page_bytes_ * static_cast<size_t>(index); }
  // Throws std::invalid_argument, naming `what`, for a page that is not there.
  void check_page(int index, const char* what) const;
  uint8_t* base() const { return memory_.data(); }

  // Within a page: K of a head is [dim][16], V is [16][dim]; in Q8 their scales are [16] each, behind all V of the
  // layer. What is added to the scores of a head is [16] too, the last of the layer, if pages are biased.
  size_t key_offset(int layer, int head) const;
  size_t value_offset(int layer, int head) const;
  size_t key_scale_offset(int layer, int head) const;
  size_t value_scale_offset(int layer, int head) const;
  size_t bias_offset(int layer, int head) const;

  // Of all lines of a page, [16]: what is added to a head's scores before the softmax, numbers below infinity.
  void set_bias(int page, int layer, int head, const float* values);

  // Copies lines 0 .. rows - 1 of every layer and head.
  void copy_rows(int source, int target, int rows);

 private:
  size_t element() const { return format_ == KvFormat::F32 ? 4 : format_ == KvFormat::BF16 ? 2 : 1; }
  size_t codes_of(const KvShape& s) const;

  int count_;
  KvFormat format_;
  bool biased_;
  std::vector<KvShape> layers_;
  std::vector<size_t> offsets_;
  size_t page_bytes_ = 0;
  Mapping memory_;
};

}  // namespace tenfold
