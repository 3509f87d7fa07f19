// The KV page pool: pages of 16 rows, each all layers of its rows in one contiguous stretch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory.h"

namespace tenfold {

struct KvShape {
  int heads, head_dim;
};

class KvPages {
 public:
  KvPages(int pages, const std::vector<KvShape>& layers, bool f32);

  int count() const { return count_; }
  size_t page_bytes() const { return page_bytes_; }
  bool f32() const { return f32_; }
  int layers() const { return static_cast<int>(layers_.size()); }
  const KvShape& shape(int layer) const { return layers_[static_cast<size_t>(layer)]; }
  uint8_t* page(int index) const { return memory_.data() + page_bytes_ * static_cast<size_t>(index); }
  uint8_t* base() const { return memory_.data(); }

  // Within a page: K of a head is [dim][16], V is [16][dim].
  size_t key_offset(int layer, int head) const;
  size_t value_offset(int layer, int head) const;

  // Copies lines 0 .. rows - 1 of every layer and head.
  void copy_rows(int source, int target, int rows);

 private:
  size_t element() const { return f32_ ? 4 : 2; }

  int count_;
  bool f32_;
  std::vector<KvShape> layers_;
  std::vector<size_t> offsets_;
  size_t page_bytes_ = 0;
  Mapping memory_;
};

}  // namespace tenfold
