// Ops that handle a row at a time: lookup, norm, scale, selection, soft-cap, handing in, joining, handing back, states.
#include <algorithm>
#include <utility>

#include "program.h"

namespace tenfold {
namespace {

class EmbedOp final : public Op {
 public:
  EmbedOp(int matrix, float scale, int output) : matrix_(matrix), scale_(scale), output_(output) {}
  bool run(Program& p, int thread) override {
    const Value& out = p.value(output_);
    const Range rows = share(p.batch().rows, thread, p.team().size());
    for (int r = rows.begin; r < rows.end; ++r) {
      float* to = out.data + static_cast<size_t>(r) * out.stride;
      static_cast<const Program&>(p).matrix(matrix_).read_row(p.batch().tokens[r], to);
      if (scale_ != 1.0f)
        for (int i = 0; i < out.width; ++i) to[i] *= scale_;
    }
    return true;
  }

 private:
  const int matrix_;
  const float scale_;
  const int output_;
};

class NormOp final : public Op {
 public:
  NormOp(int input, NormSpec norm, int residual, int output)
      : input_(input), norm_(norm), residual_(residual), output_(output) {}
  bool run(Program& p, int thread) override {
    const Value& in = p.value(input_);
    const Value& out = p.value(output_);
    const Range rows = share(p.rows_of(in), thread, p.team().size());
    for (int r = rows.begin; r < rows.end; ++r) {
      const size_t i = static_cast<size_t>(r);
      float* to = out.data + i * out.stride;
      // Through scratch: the output may be the residual itself.
      float* normed = p.private_normed(thread);
      p.kernels().rms_norm(in.data + i * in.stride, p.vector(norm_.weight), norm_.offset, norm_.eps, in.width, normed);
      if (residual_ >= 0) {
        const Value& add = p.value(residual_);
        const float* from = add.data + i * add.stride;
        for (int c = 0; c < in.width; ++c) to[c] = from[c] + normed[c];
      } else {
        std::copy(normed, normed + in.width, to);
      }
    }
    return true;
  }

 private:
  const int input_;
  const NormSpec norm_;
  const int residual_, output_;
};

// Two values of one shape into one, an element at a time; the two may be the output.
template <class F>
class PairOp final : public Op {
 public:
  PairOp(F combine, int first, int second, int output)
      : combine_(combine), first_(first), second_(second), output_(output) {}
  bool run(Program& p, int thread) override {
    const Value &a = p.value(first_), &b = p.value(second_), &out = p.value(output_);
    // Rows are padded to whole panels.
    const int panels = static_cast<int>(out.stride) / kPanel;
    const Range mine = share(p.rows_of(out) * panels, thread, p.team().size());
    for (int u = mine.begin; u < mine.end; ++u) {
      const size_t row = static_cast<size_t>(u / panels), at = static_cast<size_t>(u % panels) * kPanel;
      combine_(p.kernels(), a.data + row * a.stride + at, b.data + row * b.stride + at,
               out.data + row * out.stride + at);
    }
    return true;
  }

 private:
  const F combine_;
  const int first_, second_, output_;
};

template <class F>
std::unique_ptr<Op> make_pair_op(F combine, int first, int second, int output) {
  return std::make_unique<PairOp<F>>(combine, first, second, output);
}

class ScaleOp final : public Op {
 public:
  ScaleOp(int input, float factor, int output) : input_(input), factor_(factor), output_(output) {}
  bool run(Program& p, int thread) override {
    const Value& in = p.value(input_);
    const Value& out = p.value(output_);
    const Range rows = share(p.rows_of(in), thread, p.team().size());
    for (int r = rows.begin; r < rows.end; ++r)
      for (int c = 0; c < in.width; ++c)
        out.data[static_cast<size_t>(r) * out.stride + static_cast<size_t>(c)] =
            in.data[static_cast<size_t>(r) * in.stride + static_cast<size_t>(c)] * factor_;
    return true;
  }

 private:
  const int input_;
  const float factor_;
  const int output_;
};

class SelectOp final : public Op {
 public:
  SelectOp(int input, int output) : input_(input), output_(output) {}
  bool run(Program& p, int thread) override {
    const Value& in = p.value(input_);
    const Value& out = p.value(output_);
    const Range rows = share(p.batch().logit_rows, thread, p.team().size());
    for (int i = rows.begin; i < rows.end; ++i) {
      const float* from = in.data + static_cast<size_t>(p.batch().selected[i]) * in.stride;
      std::copy(from, from + in.width, out.data + static_cast<size_t>(i) * out.stride);
    }
    return true;
  }

 private:
  const int input_, output_;
};

class SoftcapOp final : public Op {
 public:
  SoftcapOp(int value, float cap) : value_(value), cap_(cap) {}
  bool run(Program& p, int thread) override {
    const Value& v = p.value(value_);
    const Range rows = share(p.rows_of(v), thread, p.team().size());
    // Rows are padded to whole vectors.
    for (int r = rows.begin; r < rows.end; ++r)
      p.kernels().softcap(v.data + static_cast<size_t>(r) * v.stride, static_cast<int>(v.stride), cap_);
    return true;
  }

 private:
  const int value_;
  const float cap_;
};

class InputOp final : public Op {
 public:
  explicit InputOp(int output) : output_(output) {}
  bool run(Program& p, int thread) override {
    const Batch& b = p.batch();
    const Value& out = p.value(output_);
    const Range rows = share(b.rows, thread, p.team().size());
    for (int r = rows.begin; r < rows.end; ++r) {
      const float* from = b.input + static_cast<size_t>(b.input_rows[r]) * b.input_stride;
      std::copy(from, from + out.width, out.data + static_cast<size_t>(r) * out.stride);
    }
    return true;
  }

 private:
  const int output_;
};

class ConcatOp final : public Op {
 public:
  ConcatOp(std::vector<int> inputs, int output) : inputs_(std::move(inputs)), output_(output) {}
  bool run(Program& p, int thread) override {
    const Value& out = p.value(output_);
    const Range rows = share(p.rows_of(out), thread, p.team().size());
    for (int r = rows.begin; r < rows.end; ++r) {
      const size_t row = static_cast<size_t>(r);
      float* to = out.data + row * out.stride;
      for (const int input : inputs_) {
        const Value& in = p.value(input);
        const float* from = in.data + row * in.stride;
        to = std::copy(from, from + in.width, to);
      }
    }
    return true;
  }

 private:
  const std::vector<int> inputs_;
  const int output_;
};

class TapOp final : public Op {
 public:
  TapOp(int value, int column) : value_(value), column_(column) {}
  bool idle(const Batch& batch) const override { return batch.features == nullptr; }
  bool run(Program& p, int thread) override {
    const Batch& b = p.batch();
    const Value& v = p.value(value_);
    const Range rows = share(b.logit_rows, thread, p.team().size());
    for (int i = rows.begin; i < rows.end; ++i) {
      const size_t n = static_cast<size_t>(i), row = v.selected ? n : static_cast<size_t>(b.selected[i]);
      const float* from = v.data + row * v.stride;
      std::copy(from, from + v.width, b.features + n * static_cast<size_t>(p.feature_width()) + column_);
    }
    return true;
  }

 private:
  const int value_, column_;
};

class StatesOp final : public Op {
 public:
  StatesOp(int value, NormSpec norm) : value_(value), norm_(norm) {}
  bool idle(const Batch& batch) const override { return batch.state_rows == 0; }
  bool run(Program& p, int thread) override {
    const Batch& b = p.batch();
    const Value& v = p.value(value_);
    const size_t width = static_cast<size_t>(v.width);
    const Range mine = share(b.state_rows, thread, p.team().size());
    for (int i = mine.begin; i < mine.end; ++i) {
      const float* from = v.data + static_cast<size_t>(b.stated[i]) * v.stride;
      p.kernels().rms_norm(from, p.vector(norm_.weight), norm_.offset, norm_.eps, v.width,
                           b.states + static_cast<size_t>(i) * width);
    }
    return true;
  }

 private:
  const int value_;
  const NormSpec norm_;
};

}  // namespace

std::unique_ptr<Op> make_embed(int matrix, float scale, int output) {
  return std::make_unique<EmbedOp>(matrix, scale, output);
}
std::unique_ptr<Op> make_norm(int input, NormSpec norm, int residual, int output) {
  return std::make_unique<NormOp>(input, norm, residual, output);
}
std::unique_ptr<Op> make_gate(Activation activation, int first, int second, int output) {
  return make_pair_op([activation](const Kernels& k, const float* a, const float* b,
                                   float* out) { k.gate(activation, a, b, kPanel, out); },
                      first, second, output);
}
std::unique_ptr<Op> make_sum(int first, int second, int output) {
  return make_pair_op(
      [](const Kernels&, const float* a, const float* b, float* out) {
        for (int i = 0; i < kPanel; ++i) out[i] = a[i] + b[i];
      },
      first, second, output);
}
std::unique_ptr<Op> make_scale(int input, float factor, int output) {
  return std::make_unique<ScaleOp>(input, factor, output);
}
std::unique_ptr<Op> make_select(int input, int output) { return std::make_unique<SelectOp>(input, output); }
std::unique_ptr<Op> make_softcap(int value, float cap) { return std::make_unique<SoftcapOp>(value, cap); }
std::unique_ptr<Op> make_input(int output) { return std::make_unique<InputOp>(output); }
std::unique_ptr<Op> make_concat(std::vector<int> inputs, int output) {
  return std::make_unique<ConcatOp>(std::move(inputs), output);
}
std::unique_ptr<Op> make_tap(int value, int column) { return std::make_unique<TapOp>(value, column); }
std::unique_ptr<Op> make_states(int value, NormSpec norm) { return std::make_unique<StatesOp>(value, norm); }

}  // namespace tenfold
