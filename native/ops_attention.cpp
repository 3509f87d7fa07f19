// Attention: norm and rotation of q and k, k and v into the pages, then every row over its sequence's pages.
#include <algorithm>

#include "program.h"

namespace tenfold {

class AttentionOp final : public Op {
 public:
  AttentionOp(int input, AttentionSpec spec, int output) : input_(input), spec_(spec), output_(output) {}

  // Cuts the step into tiles of query vectors of one KV head. Costs are about rows visited.
  void prepare(Program& p) override {
    shares_.clear();
    const Batch& b = p.batch();
    const int group = spec_.heads / spec_.kv_heads;
    const int tile_heads = std::min(group, kAttentionTile);
    const int tile_rows = std::max(1, kAttentionTile / tile_heads);
    // With one row a sequence, and a KV head's query heads in one tile, a tile reads no K or V of this step but its
    // own.
    independent_ = b.rows == b.sequences && group <= kAttentionTile;
    total_ = 0;
    products_ = 0;
    for (int s = 0; s < b.sequences; ++s)
      for (int row = b.row_offsets[s]; row < b.row_offsets[s + 1]; row += tile_rows) {
        const int rows = std::min(tile_rows, b.row_offsets[s + 1] - row);
        for (int kv = 0; kv < spec_.kv_heads; ++kv)
          for (int h = 0; h < group; h += tile_heads) {
            const int heads = std::min(tile_heads, group - h);
            const int last = p.cache_row(row + rows - 1) + 1;
            const int first = spec_.window > 0 ? std::max(0, p.cache_row(row) + 1 - spec_.window) : 0;
            const int first_page = first / kPageRows, pages = (last + kPageRows - 1) / kPageRows;
            const int64_t cost = static_cast<int64_t>(last - first) * (rows * heads + 1) + 32;
            shares_.push_back({s, row, rows, kv, kv * group + h, heads, first_page, pages, cost});
            total_ += cost;
            products_ = std::max(products_, static_cast<size_t>(pages) * kPageRows * static_cast<size_t>(rows * heads));
          }
      }
    const int tiles = static_cast<int>(shares_.size()), threads = p.options().threads;
    divisible_ = tiles <= kTilesToDivide * threads && total_ > kCostOfDividing;
    if (divisible_) p.reserve_attention(products_ * static_cast<size_t>(std::min(tiles, threads - 1)));
  }

  bool run(Program& p, int thread) override {
    if (!independent_) {
      const Range units = share(p.batch().rows * spec_.kv_heads, thread, p.team().size());
      for (int u = units.begin; u < units.end; ++u) {
        const int row = u / spec_.kv_heads, head = u % spec_.kv_heads;
        // Rows lie too far apart for the hardware to guess the next.
        fetch_line(p, std::min(row + kRowsAhead, p.batch().rows - 1), head);
        store(p, row, head);
      }
      if (!p.team().barrier(thread)) return false;
    }
    const Cut cut(*this, p.team().size());
    const int divided = visit_tiles(p, cut, thread);
    if (divided == 0) return true;
    if (!p.team().barrier(thread)) return false;
    finish_tiles(p, cut, divided, thread);
    return true;
  }

 private:
  // Beyond so many tiles a thread, whole tiles balance well enough.
  static constexpr int kTilesToDivide = 4;
  // What must be gained, in units of cost, to pay for a barrier and for weights that several threads compute: some
  // five microseconds.
  static constexpr int64_t kCostOfDividing = 4000;
  static constexpr int kRowsAhead = 4;

  // Who does what: threads have equal parts of the total cost. A tile belongs to the thread in whose part its middle
  // lies; if that leaves a thread with much more than its part, the tiles that a border goes through are divided.
  class Cut {
   public:
    Cut(const AttentionOp& op, int threads) : total_(op.total_), threads_(threads) {
      if (!op.divisible_ || threads == 1) return;
      int64_t before = 0, load = 0, most = 0;
      int current = 0;
      for (const AttentionShare& s : op.shares_) {
        const int thread = owner(before, s);
        load = thread == current ? load + s.cost : s.cost;
        current = thread;
        most = std::max(most, load);
        before += s.cost;
      }
      divided_ = most - total_ / threads > std::max(kCostOfDividing, most / 8);
    }

    int owner(int64_t before, const AttentionShare& s) const {
      return static_cast<int>((before + s.cost / 2) * threads_ / total_);
    }
    // Whether a border between two threads goes through the tile.
    bool divides(int64_t before, const AttentionShare& s) const {
      return divided_ && before * threads_ / total_ != ((before + s.cost) * threads_ - 1) / total_;
    }
    // The pages of a divided tile that a thread has.
    Range pages(int64_t before, const AttentionShare& s, int thread) const {
      const auto border = [&](int t) {
        const int64_t at = std::clamp(total_ * t / threads_ - before, int64_t{0}, s.cost);
        return s.first_page + static_cast<int>((s.pages - s.first_page) * at / s.cost);
      };
      return {border(thread), border(thread + 1)};
    }

   private:
    const int64_t total_;
    const int threads_;
    bool divided_ = false;
  };

  // The thread's tiles, and the products of its part of those that are divided. Returns how many are.
  int visit_tiles(Program& p, const Cut& cut, int thread) const {
    const KvFormat format = p.pages().format();
    int64_t before = 0;
    int divided = 0;
    for (const AttentionShare& s : shares_) {
      if (cut.divides(before, s)) {
        const Range pages = cut.pages(before, s, thread);
        // The row of this step lies in the last page.
        if (independent_ && pages.begin < pages.end && pages.end == s.pages) store(p, s.row, s.kv_head);
        if (pages.begin < pages.end)
          attend(p, s, thread, divided, [&](const AttentionItem& item) {
            p.kernels().attention_products(format, item, pages.begin, pages.end);
          });
        ++divided;
      } else if (cut.owner(before, s) == thread) {
        if (independent_) store(p, s.row, s.kv_head);
        attend(p, s, thread, 0, [&](const AttentionItem& item) { p.kernels().attention(format, item); });
      }
      before += s.cost;
    }
    return divided;
  }

  // Results of the divided tiles, in stretches of 16 elements. The team may have become smaller since they were cut.
  void finish_tiles(Program& p, const Cut& cut, int divided, int thread) const {
    const int stretches = spec_.head_dim / 16;
    const Range mine = share(divided * stretches, thread, p.team().size());
    int64_t before = 0;
    int index = 0;
    for (const AttentionShare& s : shares_) {
      const bool here = cut.divides(before, s);
      before += s.cost;
      if (!here) continue;
      const int begin = std::max(0, mine.begin - index * stretches) * 16;
      const int end = std::min(stretches, mine.end - index * stretches) * 16;
      if (begin < end)
        attend(p, s, thread, index,
               [&](const AttentionItem& item) { p.kernels().attention_values(p.pages().format(), item, begin, end); });
      ++index;
    }
  }

  void fetch_line(Program& p, int row, int head) const {
    const Value& in = p.value(input_);
    const float* keys = in.data + static_cast<size_t>(row) * in.stride + (spec_.heads + head) * spec_.head_dim;
    const float* values = keys + spec_.kv_heads * spec_.head_dim;
    for (int d = 0; d < spec_.head_dim; d += 16) {
      __builtin_prefetch(keys + d, 1);
      __builtin_prefetch(values + d, 0);
    }
  }

  // Norm, rotation and scale of one head; may be in place.
  void turn(Program& p, int row, const float* x, const NormSpec& norm, float scale, float* out) const {
    if (norm.weight >= 0) {
      p.kernels().rms_norm(x, p.vector(norm.weight), norm.offset, norm.eps, spec_.head_dim, out);
      x = out;
    }
    if (spec_.rope >= 0) {
      const RopeTable& t = p.rope(spec_.rope);
      const size_t half = t.frequencies.size(), at = static_cast<size_t>(row) * half;
      p.kernels().rope(x, t.cosine.data() + at, t.sine.data() + at, static_cast<int>(half) * 2, spec_.head_dim, scale,
                       out);
    } else {
      for (int d = 0; d < spec_.head_dim; ++d) out[d] = x[d] * scale;
    }
  }

  // K and V of a head into the row's page.
  void store(Program& p, int row, int head) const {
    const Value& in = p.value(input_);
    float* keys = in.data + static_cast<size_t>(row) * in.stride + spec_.heads * spec_.head_dim;
    float* k = keys + head * spec_.head_dim;
    const float* v = keys + (spec_.kv_heads + head) * spec_.head_dim;
    turn(p, row, k, spec_.key_norm, 1.0f, k);
    KvPages& pages = p.pages();
    const int at = p.cache_row(row);
    uint8_t* page = pages.page(p.page_table(p.sequence_of(row))[at / kPageRows]);
    KvLine to{page + pages.key_offset(spec_.layer, head), page + pages.value_offset(spec_.layer, head), at % kPageRows,
              nullptr, nullptr};
    if (pages.format() == KvFormat::Q8) {
      to.key_scale = reinterpret_cast<float*>(page + pages.key_scale_offset(spec_.layer, head)) + to.line;
      to.value_scale = reinterpret_cast<float*>(page + pages.value_scale_offset(spec_.layer, head)) + to.line;
    }
    // Whoever had the line before may have left something there.
    if (pages.biased()) reinterpret_cast<float*>(page + pages.bias_offset(spec_.layer, head))[to.line] = 0.0f;
    p.kernels().store_kv(pages.format(), to, k, v, spec_.head_dim);
  }

  // Turns the tile's queries and calls work(item). `divided`: which of the divided tiles it is, if it is one. One that
  // has its products needs no queries, but they are few.
  template <class F>
  void attend(Program& p, const AttentionShare& s, int thread, int divided, F work) const {
    const Value& in = p.value(input_);
    const Value& out = p.value(output_);
    float* output[kAttentionTile];
    int limit[kAttentionTile], first[kAttentionTile];
    float* query = p.private_normed(thread);
    int count = 0;
    for (int r = s.row; r < s.row + s.rows; ++r)
      for (int h = s.head; h < s.head + s.heads; ++h, ++count) {
        const float* x = in.data + static_cast<size_t>(r) * in.stride + h * spec_.head_dim;
        turn(p, r, x, spec_.query_norm, spec_.scale, query + count * kAttentionStride);
        output[count] = out.data + static_cast<size_t>(r) * out.stride + h * spec_.head_dim;
        limit[count] = p.cache_row(r) + 1;
        first[count] = spec_.window > 0 ? std::max(0, limit[count] - spec_.window) : 0;
      }
    const KvPages& pages = p.pages();
    AttentionItem item{};
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
    item.scaled = pages.format() == KvFormat::Q8;
    if (item.scaled) {
      item.key_scale_offset = pages.key_scale_offset(spec_.layer, s.kv_head);
      item.value_scale_offset = pages.value_scale_offset(spec_.layer, s.kv_head);
    }
    item.biased = pages.biased();
    if (item.biased) item.bias_offset = pages.bias_offset(spec_.layer, s.kv_head);
    item.softcap = spec_.softcap;
    item.scratch = query + kAttentionTile * kAttentionStride;
    item.products = divisible_ ? p.attention_products() + products_ * static_cast<size_t>(divided) : nullptr;
    item.product_pages = s.pages;
    work(item);
  }

  const int input_;
  const AttentionSpec spec_;
  const int output_;
  std::vector<AttentionShare> shares_;
  int64_t total_ = 0;
  size_t products_ = 0;  // floats, of the tile that has most
  bool independent_ = false, divisible_ = false;
};

std::unique_ptr<Op> make_attention(int input, AttentionSpec spec, int output) {
  return std::make_unique<AttentionOp>(input, spec, output);
}

}  // namespace tenfold
