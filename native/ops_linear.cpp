// Linear with what belongs to it: the norm before, and bias, gate and residual after, while the sums are in cache.
//
// Few rows: the panels are divided among the threads, and each thread prepares the input for itself (or, above
// kPrivateRows, all prepare it together and meet). Many rows: the rows are divided, so that nobody waits; a thread
// takes a block of its rows that fits its cache, prepares it, and puts it through every panel.
#include <algorithm>
#include <cstring>

#include "program.h"

namespace tenfold {
namespace {

class LinearOp final : public Op {
 public:
  LinearOp(int input, NormSpec norm, std::vector<LinearPart> parts, Activation gate, int residual, int output,
           int column, bool quantized, bool plain)
      : input_(input),
        norm_(norm),
        parts_(std::move(parts)),
        gate_(gate),
        residual_(residual),
        output_(output),
        column_(column),
        quantized_(quantized),
        plain_(plain) {}

  bool run(Program& p, int thread) override {
    const Value& in = p.value(input_);
    const int rows = p.rows_of(in), threads = p.team().size();
    if (rows == 0) return true;
    const int stretches = in.width / kActGroup;
    const int panels = all_panels(p);

    if (rows <= Program::kPrivateRows) {
      const Rows x = view(p, 0, p.private_codes(thread, rows, stretches), p.private_normed(thread));
      prepare_rows(p, x, 0, rows, thread);
      const Range mine = share(panels, thread, threads);
      run_panels(p, x, 0, rows, mine);
      return true;
    }
    if (rows >= Program::kRowsEach * threads) {
      const Range mine = share(rows, thread, threads);
      const int block = block_rows(p, stretches);
      for (int row = mine.begin; row < mine.end; row += block) {
        const int count = std::min(block, mine.end - row);
        const Rows x = view(p, row, p.private_codes(thread, Program::kBlockRows, stretches), p.private_normed(thread));
        prepare_rows(p, x, row, count, thread);
        run_panels(p, x, row, count, {0, panels});
      }
      return true;
    }
    const Rows x = view(p, 0, p.shared_codes(stretches), p.shared_normed());
    const Range prepared = share(rows, thread, threads);
    prepare_rows(p, x, prepared.begin, prepared.end - prepared.begin, thread);
    if ((quantized_ || norm_.weight >= 0) && !p.team().barrier(thread)) return false;
    const Range mine = share(panels, thread, p.team().size());  // may have shrunk at the barrier
    for (int row = 0; row < rows; row += Program::kRowBlock)
      run_panels(p, x, row, std::min(Program::kRowBlock, rows - row), mine);
    return true;
  }

 private:
  // The prepared input, from row `first` on.
  struct Rows {
    int first;
    QuantRows codes;
    float* normed;  // where there is a norm
    const float* plain;
    size_t stride;  // of plain, in floats
  };

  Rows view(Program& p, int first, QuantRows codes, float* normed) const {
    if (norm_.weight >= 0) return {first, codes, normed, normed, p.widest()};
    const Value& in = p.value(input_);
    return {first, codes, normed, in.data + static_cast<size_t>(first) * in.stride, in.stride};
  }

  // Rows of a block whose codes stay in a core's own cache beside the weights that pass by.
  static int block_rows(Program& p, int stretches) {
    const size_t row_bytes = std::max<size_t>(static_cast<size_t>(stretches), 1) * sizeof(Stretch);
    const size_t fit = p.tuning().block_bytes / row_bytes / Program::kBlockRows * Program::kBlockRows;
    return static_cast<int>(std::clamp<size_t>(fit, Program::kBlockRows, Program::kRowBlock));
  }

  void prepare_rows(Program& p, const Rows& x, int row, int count, int thread) const {
    const Value& in = p.value(input_);
    for (int r = row; r < row + count; ++r) {
      const float* from = in.data + static_cast<size_t>(r) * in.stride;
      if (norm_.weight >= 0) {
        // Where only the codes are read afterwards, one place serves all rows.
        float* to = plain_ ? x.normed + static_cast<size_t>(r - x.first) * x.stride : p.private_normed(thread);
        p.kernels().rms_norm(from, p.vector(norm_.weight), norm_.offset, norm_.eps, in.width, to);
        from = to;
      }
      if (quantized_) p.kernels().quantize(from, in.width, x.codes.from(r - x.first));
    }
  }

  // Panels of the output; with a gate one for each pair.
  int all_panels(const Program& p) const {
    int panels = 0;
    for (size_t i = 0; i < (gate_ == Activation::None ? parts_.size() : 1); ++i)
      panels += p.matrix(parts_[i].matrix).panels();
    return panels;
  }

  // `count` rows from `row` on, at most kRowBlock, times some panels.
  void run_panels(Program& p, const Rows& x, int row, int count, Range panels) const {
    if (gate_ != Activation::None) return run_gated(p, x, row, count, panels);
    int first = 0, column = column_;  // of the part
    for (const LinearPart& part : parts_) {
      const Matrix& m = p.matrix(part.matrix);
      const int end = std::min(panels.end - first, m.panels());
      for (int panel = std::max(panels.begin - first, 0); panel < end;) {
        const int together = count >= p.tuning().pair_rows && panel + 1 < end ? 2 : 1;
        alignas(64) float sums[2][Program::kRowBlock * kPanel];
        const uint8_t* const data[2] = {m.panel(panel), together == 2 ? m.panel(panel + 1) : nullptr};
        multiply(p, m, data, together, x, row, count, sums[0]);
        for (int i = 0; i < together; ++i) {
          add_bias(p, part, panel + i, count, sums[i]);
          finish(p, m, panel + i, column, row, count, sums[i]);
        }
        panel += together;
      }
      first += m.panels();
      column += m.rows;
    }
  }

  void run_gated(Program& p, const Rows& x, int row, int count, Range panels) const {
    const Matrix& a = p.matrix(parts_[0].matrix);
    const Matrix& b = p.matrix(parts_[1].matrix);
    const bool pairs = count >= p.tuning().pair_rows && a.layout == b.layout;
    for (int panel = panels.begin; panel < panels.end; ++panel) {
      alignas(64) float sums[2][Program::kRowBlock * kPanel];
      const uint8_t* const data[2] = {a.panel(panel), b.panel(panel)};
      if (pairs) {
        multiply(p, a, data, 2, x, row, count, sums[0]);
      } else {
        multiply(p, a, data, 1, x, row, count, sums[0]);
        multiply(p, b, data + 1, 1, x, row, count, sums[1]);
      }
      for (size_t i = 0; i < 2; ++i) add_bias(p, parts_[i], panel, count, sums[i]);
      p.kernels().gate(gate_, sums[0], sums[1], count * kPanel, sums[0]);
      finish(p, a, panel, column_, row, count, sums[0]);
    }
  }

  // sums[kRowBlock * kPanel] of each of `panels` panels of a matrix (or of two of one layout).
  void multiply(Program& p, const Matrix& m, const uint8_t* const* data, int panels, const Rows& x, int row, int count,
                float* sums) const {
    constexpr size_t kPitch = static_cast<size_t>(Program::kRowBlock) * kPanel;
    if (m.layout.quantized())
      return p.kernels().linear_quant(m.layout, data, panels, m.cols, x.codes.from(row - x.first), count, sums, kPitch,
                                      p.tuning());
    for (int i = 0; i < panels; ++i)
      p.kernels().linear_float(m.layout, data[i], m.cols, x.plain + static_cast<size_t>(row - x.first) * x.stride,
                               x.stride, count, sums + static_cast<size_t>(i) * kPitch, p.tuning());
  }

  static void add_bias(const Program& p, const LinearPart& part, int panel, int count, float* sums) {
    if (part.bias < 0) return;
    const float* bias = p.vector(part.bias) + panel * kPanel;
    for (int r = 0; r < count; ++r)
      for (int c = 0; c < kPanel; ++c) sums[r * kPanel + c] += bias[c];
  }

  // A panel's sums into the output, with the residual. `column`: where its matrix begins in the output.
  void finish(const Program& p, const Matrix& m, int panel, int column, int row, int count, const float* sums) const {
    const int columns = std::min(kPanel, m.rows - panel * kPanel);
    const Value& out = p.value(output_);
    const Value& add = p.value(residual_ < 0 ? output_ : residual_);
    const auto at = [&](const Value& v, int r) {
      return v.data + static_cast<size_t>(row + r) * v.stride + column + panel * kPanel;
    };
    const float* residual = residual_ < 0 ? nullptr : at(add, 0);
    if (columns == kPanel) return p.kernels().put_panel(sums, count, residual, add.stride, at(out, 0), out.stride);
    for (int r = 0; r < count; ++r)
      for (int c = 0; c < columns; ++c)
        at(out, r)[c] = residual_ < 0 ? sums[r * kPanel + c] : at(add, r)[c] + sums[r * kPanel + c];
  }

  const int input_;
  const NormSpec norm_;
  const std::vector<LinearPart> parts_;
  const Activation gate_;
  const int residual_, output_, column_;
  const bool quantized_, plain_;  // what some of the matrices read: codes, floats
};

}  // namespace

std::unique_ptr<Op> make_linear(int input, NormSpec norm, std::vector<LinearPart> parts, Activation gate, int residual,
                                int output, int column, bool quantized, bool plain) {
  return std::make_unique<LinearOp>(input, norm, std::move(parts), gate, residual, output, column, quantized, plain);
}

}  // namespace tenfold
