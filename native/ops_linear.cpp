// Linear with what belongs to it: the norm before, and bias, gate and residual after, while the sums are in cache.
#include <algorithm>

#include "program.h"

namespace tenfold {
namespace {

constexpr int kSumRows = 64;  // rows whose sums of one panel are kept before the epilogue: 4 KiB

class LinearOp final : public Op {
 public:
  LinearOp(int input, NormSpec norm, std::vector<LinearPart> parts, Activation gate, int residual, int output,
           int column)
      : input_(input),
        norm_(norm),
        parts_(std::move(parts)),
        gate_(gate),
        residual_(residual),
        output_(output),
        column_(column) {}

  bool run(Program& p, int thread) override {
    const Value& in = p.value(input_);
    const int rows = p.rows_of(in);
    if (rows == 0) return true;
    bool quantized = false;
    for (const LinearPart& part : parts_) quantized |= p.matrix(part.matrix).layout.quantized();

    const bool alone = rows <= Program::kPrivateRows;
    const QuantRows codes = alone ? p.private_codes(thread, rows) : p.shared_codes();
    float* normed = alone ? p.private_normed(thread) : p.shared_normed();
    const float* plain = norm_.weight >= 0 ? normed : in.data;
    const size_t plain_stride = norm_.weight >= 0 ? p.widest() : in.stride;
    const Range mine = alone ? Range{0, rows} : share(rows, thread, p.team().size());
    for (int r = mine.begin; r < mine.end; ++r) {
      const size_t i = static_cast<size_t>(r);
      if (norm_.weight >= 0)
        p.kernels().rms_norm(in.data + i * in.stride, p.vector(norm_.weight), norm_.offset, norm_.eps, in.width,
                             normed + i * p.widest());
      if (quantized) p.kernels().quantize(plain + i * plain_stride, in.width, codes.from(r));
    }
    if (!alone && (quantized || norm_.weight >= 0) && !p.team().barrier(thread)) return false;

    int panels = 0;
    for (size_t i = 0; i < (gate_ == Activation::None ? parts_.size() : 1); ++i)
      panels += p.matrix(parts_[i].matrix).panels();
    const Range share_of = share(panels, thread, p.team().size());
    for (int panel = share_of.begin; panel < share_of.end; ++panel)
      for (int row = 0; row < rows; row += kSumRows)
        block(p, panel, row, std::min(kSumRows, rows - row), codes, plain, plain_stride);
    return true;
  }

 private:
  // Sums of one panel for `rows` rows, bias included.
  void sums(Program& p, const LinearPart& part, int panel, int row, int rows, const QuantRows& codes,
            const float* plain, size_t stride, float* out) const {
    const Matrix& m = p.matrix(part.matrix);
    if (m.layout.quantized())
      p.kernels().linear_quant(m.layout, m.panel(panel), m.cols, codes.from(row), rows, out);
    else
      p.kernels().linear_float(m.layout, m.panel(panel), m.cols, plain + static_cast<size_t>(row) * stride, stride,
                               rows, out);
    if (part.bias < 0) return;
    const float* bias = p.vector(part.bias) + panel * kPanel;
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < kPanel; ++c) out[r * kPanel + c] += bias[c];
  }

  void block(Program& p, int panel, int row, int rows, const QuantRows& codes, const float* plain,
             size_t stride) const {
    alignas(64) float a[kSumRows * kPanel];
    const Value& out = p.value(output_);
    size_t index = 0;
    int column = column_;
    while (gate_ == Activation::None && panel >= p.matrix(parts_[index].matrix).panels()) {
      panel -= p.matrix(parts_[index].matrix).panels();
      column += p.matrix(parts_[index].matrix).rows;
      ++index;
    }
    sums(p, parts_[index], panel, row, rows, codes, plain, stride, a);
    if (gate_ != Activation::None) {
      alignas(64) float b[kSumRows * kPanel];
      sums(p, parts_[1], panel, row, rows, codes, plain, stride, b);
      p.kernels().gate(gate_, a, b, rows * kPanel, a);
    }
    const int begin = panel * kPanel;
    const int width = std::min(kPanel, p.matrix(parts_[index].matrix).rows - begin);
    float* to = out.data + static_cast<size_t>(row) * out.stride + column + begin;
    if (residual_ >= 0) {
      const Value& add = p.value(residual_);
      const float* from = add.data + static_cast<size_t>(row) * add.stride + column + begin;
      for (int r = 0; r < rows; ++r)
        for (int c = 0; c < width; ++c)
          to[static_cast<size_t>(r) * out.stride + static_cast<size_t>(c)] =
              from[static_cast<size_t>(r) * add.stride + static_cast<size_t>(c)] + a[r * kPanel + c];
    } else {
      for (int r = 0; r < rows; ++r)
        std::copy(a + r * kPanel, a + r * kPanel + width, to + static_cast<size_t>(r) * out.stride);
    }
  }

  const int input_;
  const NormSpec norm_;
  const std::vector<LinearPart> parts_;
  const Activation gate_;
  const int residual_, output_, column_;
};

}  // namespace

std::unique_ptr<Op> make_linear(int input, NormSpec norm, std::vector<LinearPart> parts, Activation gate, int residual,
                                int output, int column) {
  return std::make_unique<LinearOp>(input, norm, std::move(parts), gate, residual, output, column);
}

}  // namespace tenfold
