// Attention: norm and rotation of q and k, k and v into the pages, then every row over its sequence's pages.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "program.h"

namespace tenfold {
namespace {

uint16_t to_bf16(float x) {  // nearest even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 64u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// The step between codes of a row of 127 levels a side; 1 for a row of zeros. A row with NaN or infinity gets NaN.
float scale_of(const float* x, int count) {
  float peak = 0.0f;
  for (int i = 0; i < count; ++i) {
    if (!std::isfinite(x[i])) return NAN;
    peak = std::max(peak, std::fabs(x[i]));
  }
  return peak > 1e-20f ? peak / 127.0f : 1.0f;
}

int8_t to_int8(float x, float scale) {
  return std::isfinite(scale) ? static_cast<int8_t>(std::nearbyintf(std::clamp(x / scale, -127.0f, 127.0f))) : 0;
}

}  // namespace

class AttentionOp final : public Op {
 public:
  AttentionOp(int input, AttentionSpec spec, int output) : input_(input), spec_(spec), output_(output) {}

  // Cuts the step into tiles of query vectors of one KV head. Costs are about rows visited; threads take runs of tiles
  // of about equal cost.
  void prepare(Program& p) override {
    shares_.clear();
    const Batch& b = p.batch();
    const int group = spec_.heads / spec_.kv_heads;
    const int tile_heads = std::min(group, kAttentionTile);
    const int tile_rows = std::max(1, kAttentionTile / tile_heads);
    // With one row a sequence, and a KV head's query heads in one tile, a tile reads no K or V of this step but its
    // own.
    independent_ = b.rows == b.sequences && group <= kAttentionTile;
    int64_t total = 0;
    for (int s = 0; s < b.sequences; ++s)
      for (int row = b.row_offsets[s]; row < b.row_offsets[s + 1]; row += tile_rows) {
        const int rows = std::min(tile_rows, b.row_offsets[s + 1] - row);
        for (int kv = 0; kv < spec_.kv_heads; ++kv)
          for (int h = 0; h < group; h += tile_heads) {
            const int heads = std::min(tile_heads, group - h);
            int context = p.cache_row(row + rows - 1) + 1;
            if (spec_.window > 0) context = std::min(context, spec_.window + rows);
            const int64_t cost = static_cast<int64_t>(context) * (rows * heads + 1) + 32;
            shares_.push_back({s, row, rows, kv, kv * group + h, heads, cost});
            total += cost;
          }
      }
    total_ = total;
  }

  bool run(Program& p, int thread) override {
    if (!independent_) {
      const int slots = spec_.heads + spec_.kv_heads;
      const Range units = share(p.batch().rows * slots, thread, p.team().size());
      for (int u = units.begin; u < units.end; ++u) {
        const int row = u / slots, slot = u % slots;
        slot < spec_.heads ? turn_query(p, row, slot) : store(p, row, slot - spec_.heads);
      }
      if (!p.team().barrier(thread)) return false;
    }
    int64_t before = 0;
    for (const AttentionShare& s : shares_) {
      // A tile belongs to the thread in whose part of the total cost its middle lies.
      const int owner = static_cast<int>((before + s.cost / 2) * p.team().size() / total_);
      before += s.cost;
      if (owner != thread) continue;
      if (independent_) {
        for (int h = s.head; h < s.head + s.heads; ++h) turn_query(p, s.row, h);
        store(p, s.row, s.kv_head);
      }
      attend(p, s, thread);
    }
    return true;
  }

 private:
  void turn_query(Program& p, int row, int head) const {
    const Value& in = p.value(input_);
    float* x = in.data + static_cast<size_t>(row) * in.stride + head * spec_.head_dim;
    turn(p, row, x, spec_.query_norm, spec_.scale);
  }

  // Norm, rotation and scale of one head, in place.
  void turn(Program& p, int row, float* x, const NormSpec& norm, float scale) const {
    if (norm.weight >= 0) p.kernels().rms_norm(x, p.vector(norm.weight), norm.offset, norm.eps, spec_.head_dim, x);
    if (spec_.rope >= 0) {
      const RopeTable& t = p.rope(spec_.rope);
      const size_t half = t.frequencies.size(), at = static_cast<size_t>(row) * half;
      p.kernels().rope(x, t.cosine.data() + at, t.sine.data() + at, static_cast<int>(half) * 2, spec_.head_dim, scale,
                       x);
    } else {
      for (int d = 0; d < spec_.head_dim; ++d) x[d] *= scale;
    }
  }

  template <class E, class Convert>
  void write(uint8_t* page, size_t key_at, size_t value_at, int line, const float* k, const float* v,
             Convert convert) const {
    E* keys = reinterpret_cast<E*>(page + key_at) + line;
    E* values = reinterpret_cast<E*>(page + value_at) + line * spec_.head_dim;
    for (int d = 0; d < spec_.head_dim; ++d) {
      keys[d * kPageRows] = convert(k[d]);
      values[d] = convert(v[d]);
    }
  }

  // K and V of a head into the row's page.
  void store(Program& p, int row, int head) const {
    const Value& in = p.value(input_);
    float* keys = in.data + static_cast<size_t>(row) * in.stride + spec_.heads * spec_.head_dim;
    float* k = keys + head * spec_.head_dim;
    const float* v = keys + (spec_.kv_heads + head) * spec_.head_dim;
    turn(p, row, k, spec_.key_norm, 1.0f);
    KvPages& pages = p.pages();
    const int at = p.cache_row(row);
    uint8_t* page = pages.page(p.page_table(p.sequence_of(row))[at / kPageRows]);
    const size_t key_at = pages.key_offset(spec_.layer, head), value_at = pages.value_offset(spec_.layer, head);
    const int line = at % kPageRows;
    switch (pages.format()) {
      case KvFormat::F32:
        return write<float>(page, key_at, value_at, line, k, v, [](float x) { return x; });
      case KvFormat::BF16:
        return write<uint16_t>(page, key_at, value_at, line, k, v, to_bf16);
      case KvFormat::Q8:
        break;
    }
    const float key_scale = scale_of(k, spec_.head_dim), value_scale = scale_of(v, spec_.head_dim);
    reinterpret_cast<float*>(page + pages.key_scale_offset(spec_.layer, head))[line] = key_scale;
    reinterpret_cast<float*>(page + pages.value_scale_offset(spec_.layer, head))[line] = value_scale;
    int8_t* keys8 = reinterpret_cast<int8_t*>(page + key_at) + line;
    int8_t* values8 = reinterpret_cast<int8_t*>(page + value_at) + line * spec_.head_dim;
    for (int d = 0; d < spec_.head_dim; ++d) {
      keys8[d * kPageRows] = to_int8(k[d], key_scale);
      values8[d] = to_int8(v[d], value_scale);
    }
  }

  void attend(Program& p, const AttentionShare& s, int thread) const {
    const Value& in = p.value(input_);
    const Value& out = p.value(output_);
    const float* query[kAttentionTile];
    float* output[kAttentionTile];
    int limit[kAttentionTile], first[kAttentionTile];
    int count = 0;
    for (int r = s.row; r < s.row + s.rows; ++r)
      for (int h = s.head; h < s.head + s.heads; ++h, ++count) {
        query[count] = in.data + static_cast<size_t>(r) * in.stride + h * spec_.head_dim;
        output[count] = out.data + static_cast<size_t>(r) * out.stride + h * spec_.head_dim;
        limit[count] = p.cache_row(r) + 1;
        first[count] = spec_.window > 0 ? std::max(0, limit[count] - spec_.window) : 0;
      }
    const KvPages& pages = p.pages();
    AttentionItem item;
    item.query = query;
    item.output = output;
    item.limit = limit;
    item.first = first;
    item.count = count;
    item.head_dim = spec_.head_dim;
    item.pages = p.page_table(s.sequence);
    item.pool = pages.base();
    item.page_bytes = pages.page_bytes();
    item.key_offset = pages.key_offset(spec_.layer, s.kv_head);
    item.value_offset = pages.value_offset(spec_.layer, s.kv_head);
    if (pages.format() == KvFormat::Q8) {
      item.key_scale_offset = pages.key_scale_offset(spec_.layer, s.kv_head);
      item.value_scale_offset = pages.value_scale_offset(spec_.layer, s.kv_head);
    }
    item.softcap = spec_.softcap;
    item.scratch = p.private_normed(thread);
    p.kernels().attention(pages.format(), item);
  }

  const int input_;
  const AttentionSpec spec_;
  const int output_;
  std::vector<AttentionShare> shares_;
  int64_t total_ = 0;
  bool independent_ = false;
};

std::unique_ptr<Op> make_attention(int input, AttentionSpec spec, int output) {
  return std::make_unique<AttentionOp>(input, spec, output);
}

}  // namespace tenfold
