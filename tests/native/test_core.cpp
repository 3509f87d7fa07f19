// The core without Python, to be run under sanitizers (run_sanitizers.sh): every format, ISA level and team size
// through steps of all shapes, and batches that lie. What is computed is tested in tests/backends; here it must be
// equal however it is computed, and touch nothing that is not its own.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bandwidth.h"
#include "cpu.h"
#include "program.h"
#include "recurrent.h"
#include "speculation/controller.h"
#include "suffix_draft.h"

using namespace tenfold;

namespace {

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (false)

void refused(const std::function<void()>& act, int line) {
  try {
    act();
  } catch (const std::invalid_argument&) {
    return;
  }
  std::fprintf(stderr, "%s:%d: was not refused\n", __FILE__, line);
  std::exit(1);
}
#define REFUSED(statement) refused([&] { statement; }, __LINE__)

using Ints = std::vector<int32_t>;
constexpr int kVocab = 53, kWidth = 64, kInner = 96, kHeads = 4, kKvHeads = 2, kDim = 16, kPages = 12;
constexpr int kMaxRows = 48, kMaxWanted = 24;
constexpr int kLow = std::numeric_limits<int>::min(), kHigh = std::numeric_limits<int>::max();

// A batch that owns its arrays, each exactly as long as it says.
struct Step {
  Ints tokens, positions, row_offsets{0}, cached, page_offsets{0}, pages, selected;
  std::vector<SampleParams> sampling;
  int top = 0;
  Ints drawn, top_tokens;
  std::vector<float> logprobs, top_logprobs, logits, features, states;
  Ints stated;  // rows whose states are wanted; empty: the selected ones

  Step& part(const Ints& text, int done, int rows, const Ints& table, bool wanted = true) {
    for (int i = done; i < done + rows; ++i) {
      if (wanted) want(static_cast<int>(tokens.size()));
      tokens.push_back(text[static_cast<size_t>(i)]);
      positions.push_back(i);
    }
    row_offsets.push_back(static_cast<int>(tokens.size()));
    cached.push_back(done);
    pages.insert(pages.end(), table.begin(), table.end());
    page_offsets.push_back(static_cast<int>(pages.size()));
    return *this;
  }
  void want(int row) {
    selected.push_back(row);
    SampleParams p{};
    p.temperature = p.top_p = p.repetition = 1.0f;
    p.seed = 7;
    p.position = row;
    p.logprobs = -1;
    sampling.push_back(p);
  }
  void run(Program& program) {
    const size_t n = selected.size(), width = static_cast<size_t>(std::max(top, 0));
    drawn.assign(n, -1);
    logprobs.assign(n, 0.0f);
    top_tokens.assign(n * width, -1);
    top_logprobs.assign(n * width, 0.0f);
    logits.assign(n * kVocab, 0.0f);
    Batch b;
    b.rows = static_cast<int>(tokens.size());
    b.sequences = static_cast<int>(cached.size());
    b.logit_rows = static_cast<int>(n);
    b.tokens = tokens.data();
    b.positions = positions.data();
    b.row_offsets = row_offsets.data();
    b.cached_rows = cached.data();
    b.page_offsets = page_offsets.data();
    b.pages = pages.data();
    b.page_count = static_cast<int>(pages.size());
    b.selected = selected.data();
    b.sampling = sampling;
    b.top = top;
    b.drawn = drawn.data();
    b.logprobs = logprobs.data();
    b.top_tokens = top_tokens.data();
    b.top_logprobs = top_logprobs.data();
    b.logits = logits.data();
    features.assign(n * static_cast<size_t>(program.feature_width()), NAN);
    if (!features.empty()) b.features = features.data();
    const Ints& rows = stated.empty() ? selected : stated;
    states.assign(rows.size() * static_cast<size_t>(program.state_width()), NAN);
    if (!states.empty()) {
      b.state_rows = static_cast<int>(rows.size());
      b.stated = rows.data();
      b.states = states.data();
    }
    program.step(b);
    // Nothing is drawn only where there is nothing to draw.
    for (size_t i = 0; i < drawn.size(); ++i) {
      const float* row = logits.data() + i * kVocab;
      const bool any = std::any_of(row, row + kVocab, [](float x) { return x > -INFINITY; });
      const uint32_t* mask = sampling[i].mask;
      CHECK(drawn[i] < kVocab && (drawn[i] >= 0 || !any || sampling[i].biases > 0 || mask));
      if (mask && drawn[i] >= 0) CHECK(mask[drawn[i] / 32] >> (drawn[i] % 32) & 1u);
    }
  }
};

// Random weights for a program, all matrices in one layout.
class Weights {
 public:
  Weights(Program& program, Layout layout) : program_(program), layout_(layout) {}

  NormSpec norm(int width) { return {bias(width), 1e-5f, 1.0f}; }

  int bias(int count) {
    std::vector<float> v(static_cast<size_t>(count));
    for (float& x : v) x = normal_(random_) * 0.1f;
    return program_.add_vector(v.data(), count);
  }

  int matrix(int rows, int cols) {
    const int index = program_.add_matrix(rows, cols, layout_);
    const size_t size = static_cast<size_t>(rows) * static_cast<size_t>(cols);
    std::vector<float> floats(size), wide;
    std::vector<uint16_t> halves(size), narrow;
    std::vector<uint8_t> codes(size);
    for (size_t i = 0; i < size; ++i) {
      floats[i] = normal_(random_) * 0.12f;
      uint32_t bits;
      std::memcpy(&bits, &floats[i], 4);
      halves[i] = static_cast<uint16_t>(bits >> 16);
      codes[i] = static_cast<uint8_t>(random_());
      if (layout_.format == Format::Q4) codes[i] &= 15;
    }
    const void* data = layout_.format == Format::F32    ? static_cast<const void*>(floats.data())
                       : layout_.format == Format::BF16 ? static_cast<const void*>(halves.data())
                                                        : static_cast<const void*>(codes.data());
    // Scales of 2^-9 and 2^-10 for 8 bits, 2^-5 and 2^-6 for 4; minima of -8 scales.
    const size_t groups = layout_.quantized() ? size / static_cast<size_t>(layout_.group) : 0;
    const int exponent = layout_.format == Format::Q4 ? -5 : -9;
    std::vector<float> wide_minima;
    std::vector<uint16_t> narrow_minima;
    for (size_t i = 0; i < groups; ++i) {
      const int e = exponent - static_cast<int>(random_() % 2);
      wide.push_back(std::ldexp(1.0f, e));
      narrow.push_back(static_cast<uint16_t>((e + 15) << 10));
      wide_minima.push_back(-std::ldexp(1.0f, e + 3));
      narrow_minima.push_back(static_cast<uint16_t>(0x8000 | (e + 3 + 15) << 10));
    }
    const auto of = [&](const std::vector<float>& w, const std::vector<uint16_t>& n) {
      return layout_.wide ? static_cast<const void*>(w.data()) : static_cast<const void*>(n.data());
    };
    program_.matrix(index).write_rows(0, rows, data, of(wide, narrow), of(wide_minima, narrow_minima));
    std::vector<float> row(static_cast<size_t>(cols));
    program_.matrix(index).read_row(rows - 1, row.data());
    if (layout_.format == Format::F32) CHECK(std::equal(row.begin(), row.end(), floats.end() - cols));
    return index;
  }

 private:
  Program& program_;
  const Layout layout_;
  std::mt19937 random_{1};
  std::normal_distribution<float> normal_;
};

// Two layers, one with a window; a norm of q and k, biases, a gate, residuals, a soft-cap, and a vocabulary that leaves
// the last panel partly empty.
class Model {
 public:
  Model(Layout layout, const std::string& isa, int threads, KvFormat kv_format, bool broken = false,
        bool kv_bias = false)
      : program_(options(isa, threads, kv_format, kv_bias), {{kKvHeads, kDim}, {kKvHeads, kDim}}),
        weights_(program_, layout) {
    Program& p = program_;
    const auto norm = [&](int width) { return weights_.norm(width); };
    const auto bias = [&](int count) { return weights_.bias(count); };
    const auto matrix = [&](int rows, int cols) { return weights_.matrix(rows, cols); };
    const int x = p.add_value(kWidth, false), qkv = p.add_value((kHeads + 2 * kKvHeads) * kDim, false);
    const int seen = p.add_value(kHeads * kDim, false), inner = p.add_value(kInner, false);
    const int y = p.add_value(kWidth, false), kept = p.add_value(kWidth, true), logits = p.add_value(kVocab, true);
    const int rope = p.add_rope({1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003}, 1.0);
    const int embed = matrix(kVocab, kWidth);
    if (broken) {
      const std::vector<float> nothing(static_cast<size_t>(kWidth), NAN);
      CHECK(layout.format == Format::F32);
      p.matrix(embed).write_rows(0, 1, nothing.data(), nullptr, nullptr);
    }
    p.add_embed(embed, 2.0f, x);
    for (int layer = 0; layer < 2; ++layer) {
      p.add_linear(x, norm(kWidth),
                   {{matrix(kHeads * kDim, kWidth), bias(kHeads * kDim)},
                    {matrix(kKvHeads * kDim, kWidth), -1},
                    {matrix(kKvHeads * kDim, kWidth), bias(kKvHeads * kDim)}},
                   Activation::None, -1, qkv);
      const NormSpec heads = layer == 0 ? norm(kDim) : NormSpec{};
      p.add_attention(
          qkv,
          {layer, kHeads, kKvHeads, kDim, layer == 0 ? 0 : 5, 0.25f, layer == 0 ? 0.0f : 20.0f, heads, heads, rope},
          seen);
      p.add_linear(seen, {}, {{matrix(kWidth, kHeads * kDim), -1}}, Activation::None, x, x);
      p.add_linear(x, norm(kWidth), {{matrix(kInner, kWidth), -1}, {matrix(kInner, kWidth), bias(kInner)}},
                   layer == 0 ? Activation::Silu : Activation::Gelu, -1, inner);
      p.add_linear(inner, {}, {{matrix(kWidth, kInner), -1}}, Activation::None, -1, y);
      p.add_norm(y, norm(kWidth), x, x);
    }
    p.add_scale(x, 0.5f, y);
    p.add_tap(x, kWidth);
    p.add_states(y, norm(kWidth));
    p.add_select(y, kept);
    p.add_tap(kept, 0);
    p.add_linear(kept, norm(kWidth), {{matrix(kVocab, kWidth), bias(kVocab)}}, Activation::None, -1, logits);
    p.add_softcap(logits, 30.0f);
    p.finish(logits);
    p.fix_threads(threads);
  }

  Program& operator*() { return program_; }
  Program* operator->() { return &program_; }

  // NaN where nobody may read.
  void spoil() {
    for (int page = 0; page < kPages; ++page)
      std::fill_n(program_.pages().page(page), program_.pages().page_bytes(), uint8_t{0xFF});
  }

 private:
  static ProgramOptions options(const std::string& isa, int threads, KvFormat kv_format, bool kv_bias) {
    ProgramOptions options;
    options.kernels = kernels_of(isa);
    options.threads = threads;
    options.max_rows = kMaxRows;
    options.max_logit_rows = kMaxWanted;
    options.vocab = kVocab;
    options.kv_pages = kPages;
    options.kv_format = kv_format;
    options.kv_bias = kv_bias;
    return options;
  }

  Program program_;
  Weights weights_;
};

Ints text_of(int length, uint32_t seed) {
  std::mt19937 random(seed);
  Ints text(static_cast<size_t>(length));
  for (int32_t& token : text) token = static_cast<int32_t>(random() % kVocab);
  return text;
}

const Ints kLong = text_of(70, 1), kShort = text_of(20, 2);
const Ints kLongTable{9, 0, 4, 11, 2}, kShortTable{7, 3};

// Logits, features and states after the last 20 tokens of the long text: alone, 20 rows a step; or in uneven chunks
// with neighbours.
std::vector<float> found_by(Model& model, bool alone) {
  model.spoil();
  std::vector<float> found, features, states;
  const auto keep = [&](const Step& step) {
    found.insert(found.end(), step.logits.begin(), step.logits.end());
    features.insert(features.end(), step.features.begin(), step.features.end());
    states.insert(states.end(), step.states.begin(), step.states.end());
  };
  if (alone) {
    for (int done : {0, 20, 40}) Step().part(kLong, done, done == 40 ? 10 : 20, kLongTable, false).run(*model);
    Step last;
    last.part(kLong, 50, 20, kLongTable).run(*model);
    keep(last);
  } else {
    Step first, second, third;
    first.part(kLong, 0, 41, kLongTable, false).part(kShort, 0, 7, kShortTable, false).run(*model);
    second.part(kShort, 7, 1, kShortTable).part(kLong, 41, 9, kLongTable, false).run(*model);
    model->pages().copy_rows(7, 5, 8);
    third.part(kShort, 8, 12, {5, 3}, false).part(kLong, 50, 17, kLongTable).run(*model);
    keep(third);
    for (int done : {67, 68, 69}) {
      Step one;
      one.part(kLong, done, 1, kLongTable).run(*model);
      keep(one);
    }
  }
  found.insert(found.end(), features.begin(), features.end());
  found.insert(found.end(), states.begin(), states.end());
  return found;
}

void test_formats() {
  std::vector<Layout> layouts{{Format::F32, 0, false, false}, {Format::BF16, 0, false, false}};
  for (const bool wide : {false, true})
    for (const bool minimum : {false, true}) {
      layouts.push_back({Format::Q8, 32, wide, minimum});
      layouts.push_back({Format::Q8, 16, wide, minimum});
      layouts.push_back({Format::Q4, 32, wide, minimum});
    }
  for (const Layout& layout : layouts) {
    // Wide scales stand for the second kind of KV rows, so that all are met.
    const KvFormat kv = layout.format == Format::F32 ? KvFormat::F32 : layout.wide ? KvFormat::Q8 : KvFormat::BF16;
    std::vector<float> wanted;
    for (const std::string& isa : isa_levels())
      for (int threads = 1; threads <= 4; ++threads) {
        Model model(layout, isa, threads, kv, false, layout.minimum);
        if (wanted.empty()) wanted = found_by(model, true);
        for (const float x : wanted) CHECK(std::isfinite(x));
        CHECK(*std::max_element(wanted.begin(), wanted.end()) > *std::min_element(wanted.begin(), wanted.end()));
        CHECK(found_by(model, threads % 2 == 0) == wanted);
        if (threads == 3) {
          for (const int fewer : {1, 2, 3, 0}) {
            model->fix_threads(fewer);
            CHECK(found_by(model, false) == wanted);
          }
        }
      }
  }
}

// Far into a context threads divide tiles. The table comes back to the same pages again and again.
void test_deep() {
  Ints table;
  for (int i = 0; i < 300; ++i) table.push_back(kLongTable[static_cast<size_t>(i % 4)]);
  table.push_back(2);
  for (const KvFormat kv : {KvFormat::BF16, KvFormat::F32, KvFormat::Q8}) {
    std::vector<float> wanted;
    for (const std::string& isa : isa_levels())
      for (int threads = 1; threads <= 4; ++threads) {
        Model model({Format::Q8, 32, false, false}, isa, threads, kv, false, true);
        model.spoil();
        Step().part(kLong, 0, 40, kLongTable, false).run(*model);
        Step().part(kLong, 40, 24, kLongTable, false).run(*model);
        std::vector<float> bias(16, -1.0f);
        bias[3] = -INFINITY;
        model->pages().set_bias(kLongTable[1], 0, 1, bias.data());
        Step step;
        step.tokens = step.positions = {1, 2, 3};
        step.row_offsets.push_back(3);
        step.cached.push_back(300 * 16);
        step.pages = table;
        step.page_offsets.push_back(301);
        for (int row = 0; row < 3; ++row) step.want(row);
        step.run(*model);
        if (wanted.empty()) wanted = step.logits;
        for (const float x : wanted) CHECK(std::isfinite(x));
        CHECK(step.logits == wanted);
      }
  }
}

void test_broken_activations() {
  for (const std::string& isa : isa_levels()) {
    Model model({Format::F32, 0, false, false}, isa, 2, KvFormat::BF16, true);
    Step step;
    step.part({0, 0, 1}, 0, 3, {0}).run(*model);
    for (size_t i = 0; i < 2 * kVocab; ++i) CHECK(std::isnan(step.logits[i]));
    CHECK(step.drawn[0] == -1 && step.drawn[1] == -1);
  }
}

void test_sampling() {
  const Ints history{3, 52, 0}, counts{1, 0, -7}, biased{52, 52, 1};
  const std::vector<float> bias{-INFINITY, 1.0f, 100.0f};
  std::vector<uint32_t> mask((kVocab + 31) / 32);
  for (const std::string& isa : isa_levels()) {
    Model model({Format::Q8, 32, false, false}, isa, 2, KvFormat::BF16);
    std::mt19937 random(3);
    const auto any = [&](std::initializer_list<float> values) { return *(values.begin() + random() % values.size()); };
    for (int round = 0; round < 60; ++round) {
      Step step;
      step.part(kShort, 0, 20, kShortTable);
      step.top = 9;
      for (uint32_t& word : mask) word = static_cast<uint32_t>(random() % 3 == 0 ? 0u : random());
      for (SampleParams& p : step.sampling) {
        if (random() % 2 == 0) p.mask = mask.data();
        p.temperature = any({0.0f, 1e-6f, 0.5f, 1.0f, 100.0f, -1.0f, NAN, INFINITY});
        p.top_p = any({1.0f, 0.9f, 0.2f, 1e-9f, 0.0f, -1.0f, NAN});
        p.min_p = any({0.0f, 0.1f, 1.0f, 2.0f, NAN});
        p.top_k = static_cast<int>(any({0, 0, 1, 5, 52, 53, 54, 1e9f, -3}));
        p.repetition = any({1.0f, 1.3f, 0.0f, -1.0f, NAN});
        p.presence = any({0.0f, 0.5f, INFINITY});
        p.logprobs = static_cast<int>(any({-1, 0, 1, 9}));
        if (random() % 2 == 0) {
          p.history_tokens = history.data();
          p.history_counts = counts.data();
          p.history = static_cast<int>(history.size());
        }
        if (random() % 2 == 0) {
          p.bias_tokens = biased.data();
          p.bias_values = bias.data();
          p.biases = static_cast<int>(biased.size());
        }
      }
      step.run(*model);
    }
    std::vector<float> noise(200);
    kernels_of(isa)->gumbel(1, -1, kHigh - 200, 200, noise.data());
    for (const float x : noise) CHECK(x > -3.0f && x < 23.0f);
  }
}

void test_batches_that_lie() {
  Model model({Format::Q4, 32, false, true}, isa_levels().front(), 2, KvFormat::BF16);
  const auto good = [] {
    Step s;
    s.part(kLong, 0, 3, {1}).part(kShort, 15, 2, {5, 6});
    return s;
  };
  const std::vector<std::function<void(Step&)>> lies{
      [](Step& s) { s.tokens[4] = kVocab; },
      [](Step& s) { s.tokens[0] = -1; },
      [](Step& s) { s.row_offsets = {0, -1, 5}; },
      [](Step& s) { s.row_offsets = {0, kLow, 5}; },
      [](Step& s) { s.row_offsets = {0, kHigh, 5}; },
      [](Step& s) { s.row_offsets = {0, 5, 5}; },
      [](Step& s) { s.row_offsets = {0, 3, 6}; },
      [](Step& s) { s.row_offsets = {2, 3, 5}; },
      [](Step& s) { s.page_offsets = {0, -1, 3}; },
      [](Step& s) { s.page_offsets = {0, kLow, 3}; },
      [](Step& s) { s.page_offsets = {0, kHigh, 3}; },
      [](Step& s) { s.page_offsets = {0, 3, 3}; },
      [](Step& s) { s.page_offsets = {0, 1, 2}; },
      [](Step& s) { s.cached[0] = -1; },
      [](Step& s) { s.cached[0] = 14; },
      [](Step& s) { s.cached[1] = kHigh; },
      [](Step& s) { s.pages[2] = kPages; },
      [](Step& s) { s.pages[1] = kLow; },
      [](Step& s) { s.pages[0] = 5, s.cached[0] = 14; },
      [](Step& s) { s.selected[0] = -1; },
      [](Step& s) { s.selected[4] = 5; },
      [](Step& s) { std::swap(s.selected[0], s.selected[1]); },
      [](Step& s) { s.sampling.pop_back(); },
      [](Step& s) { s.stated = {0, 5}; },
      [](Step& s) { s.stated = {-1}; },
      [](Step& s) { s.stated = {1, 1}; },
      [](Step& s) { s.sampling[2].logprobs = 1; },
      // Wrapped around int32, these page_offsets would pass one by one and lead far out of `pages`.
      [](Step& s) {
        s = Step();
        for (int i = 0; i < 4; ++i) s.part(kLong, 0, 1, {i});
        s.page_offsets = {0, 1, kLow, -5, 4};
      },
      [](Step& s) { s = Step(); },
      [](Step& s) {
        s = Step();
        s.part(kLong, 0, 49, {0, 1, 2, 3}, false);
      },
      [](Step& s) {
        s = Step();
        s.part(kLong, 0, 25, {0, 1});
      },
  };
  Step honest = good();
  honest.run(*model);
  const std::vector<float> wanted = honest.logits;
  for (size_t i = 0; i < lies.size(); ++i) {
    Step s = good();
    lies[i](s);
    refused([&] { s.run(*model); }, static_cast<int>(i));
    Step after = good();
    after.run(*model);
    CHECK(std::equal(wanted.begin(), wanted.begin() + 3 * kVocab, after.logits.begin()));
  }

  std::mt19937 random(4);
  const auto wild = [&]() -> int32_t {
    const int32_t ends[] = {kLow, kLow + 1, -(1 << 30), 1 << 30, kHigh - 1, kHigh};
    return random() % 4 == 0 ? ends[random() % 6] : static_cast<int32_t>(random() % 20) - 3;
  };
  int passed = 0;
  for (int round = 0; round < 6000; ++round) {
    Step s = good();
    for (Ints* array : {&s.tokens, &s.positions, &s.row_offsets, &s.cached, &s.page_offsets, &s.pages, &s.selected})
      if (random() % 4 == 0) {
        const size_t at = random() % array->size();
        (*array)[at] = wild();
      }
    try {
      s.run(*model);
      ++passed;
    } catch (const std::invalid_argument&) {
    }
  }
  CHECK(passed > 300 && passed < 5700);
  REFUSED(model->pages().copy_rows(0, kPages, 1));
  REFUSED(model->pages().copy_rows(-1, 0, 1));
  REFUSED(model->pages().copy_rows(0, 1, 17));
  model->pages().copy_rows(1, 1, 16);
  const std::vector<float> zeros(16), endless(16, INFINITY);
  REFUSED(model->pages().set_bias(0, 0, 0, zeros.data()));
  Model biased({Format::F32, 0, false, false}, isa_levels().front(), 1, KvFormat::BF16, false, true);
  biased->pages().set_bias(kPages - 1, 1, kKvHeads - 1, zeros.data());
  REFUSED(biased->pages().set_bias(kPages, 0, 0, zeros.data()));
  REFUSED(biased->pages().set_bias(0, 2, 0, zeros.data()));
  REFUSED(biased->pages().set_bias(0, 0, kKvHeads, zeros.data()));
  REFUSED(biased->pages().set_bias(0, 0, 0, endless.data()));
  REFUSED(model->fix_threads(3));
  REFUSED(model->add_value(16, false));
}

// A head over rows 50, 49 ... of the vocabulary; more of them than threads have pieces of.
constexpr int kDrafted = 51, kSequences = 6;

class Head {
 public:
  Head(Layout layout, const std::string& isa, int threads, std::shared_ptr<Team> team = nullptr)
      : head_(options(isa, threads), ids(), std::move(team)), weights_(head_.program(), layout) {
    Program& p = head_.program();
    const int embed = weights_.matrix(kVocab, kWidth), wide = weights_.matrix(kWidth, 96);
    const int join = weights_.matrix(kWidth, 2 * kWidth), out = weights_.matrix(kDrafted, kWidth);
    const LinearPart gate{weights_.matrix(kInner, kWidth), -1}, up{weights_.matrix(kInner, kWidth), -1};
    const LinearPart down{weights_.matrix(kWidth, kInner), -1};
    const NormSpec norm = weights_.norm(kWidth);
    int state = -1;
    for (const bool first : {true, false}) {
      const auto value = [&](int width, bool selected = false) { return p.add_value(width, selected); };
      const int token = value(kWidth), in = value(first ? 96 : kWidth), x = value(kWidth), joined = value(2 * kWidth);
      const int inner = value(kInner), kept = value(kWidth, true), logits = value(kDrafted, true);
      if (first) state = value(kWidth);
      p.add_input(in);
      p.add_embed(embed, 1.0f, token);
      if (first) p.add_linear(in, {}, {{wide, -1}}, Activation::None, -1, x);
      p.add_concat({token, first ? x : in}, joined);
      p.add_linear(joined, {}, {{join, -1}}, Activation::None, -1, x);
      p.add_linear(x, norm, {gate, up}, Activation::Silu, -1, inner);
      p.add_linear(inner, {}, {down}, Activation::None, x, state);
      p.add_select(state, kept);
      p.add_linear(kept, norm, {{out, -1}}, Activation::None, -1, logits);
      if (first)
        head_.end_first(logits, state);
      else
        head_.finish(logits, state);
    }
    p.fix_threads(threads);
  }

  Recurrent* operator->() { return &head_; }

 private:
  static ProgramOptions options(const std::string& isa, int threads) {
    ProgramOptions o;
    o.kernels = kernels_of(isa);
    o.threads = threads;
    o.max_rows = o.max_logit_rows = kSequences;
    o.vocab = kDrafted;
    o.tokens = kVocab;
    o.kv_pages = 1;
    return o;
  }
  static Ints ids() {
    Ints found;
    for (int i = 0; i < kDrafted; ++i) found.push_back(kDrafted - i);
    return found;
  }

  Recurrent head_;
  Weights weights_;
};

// An unroll that owns its arrays, each exactly as long as it says.
struct Drafts {
  std::vector<float> features, temperature, floor, logprobs;
  Ints tokens, lengths, drawn;
  std::vector<uint64_t> seed;
  std::vector<int64_t> position;
  int longest = 0;

  Drafts& add(int number, int length) {
    std::mt19937 random(static_cast<uint32_t>(number));
    std::normal_distribution<float> normal;
    for (int i = 0; i < 96; ++i) features.push_back(normal(random));
    tokens.push_back(number % kVocab);
    lengths.push_back(length);
    temperature.push_back(number % 3 == 0 ? 0.0f : 1.0f);
    floor.push_back(number % 2 == 0 ? 0.0f : 1e-5f);
    seed.push_back(static_cast<uint64_t>(number) << 40);
    position.push_back(number);
    longest = std::max(longest, length);
    return *this;
  }
  Drafts& run(Head& head) {
    const size_t cells = tokens.size() * static_cast<size_t>(std::max(longest, 0));
    drawn.assign(cells, -1);
    logprobs.assign(cells, 0.0f);
    Unroll u;
    u.sequences = static_cast<int>(tokens.size());
    u.features = features.data();
    u.tokens = tokens.data();
    u.seed = seed.data();
    u.position = position.data();
    u.temperature = temperature.data();
    u.lengths = lengths.data();
    u.floor = floor.data();
    u.longest = longest;
    u.drawn = drawn.data();
    u.logprobs = logprobs.data();
    head->unroll(u);
    for (const int32_t token : drawn) CHECK(token >= -1 && token <= kDrafted && token != 0);
    return *this;
  }
};

void test_drafts() {
  for (const Layout& layout : {Layout{Format::F32, 0, false, false}, Layout{Format::Q8, 32, false, false},
                               Layout{Format::Q4, 32, false, true}}) {
    std::vector<Drafts> wanted;
    for (const std::string& isa : isa_levels())
      for (int threads = 1; threads <= 4; ++threads) {
        Head head(layout, isa, threads);
        for (int i = 0; wanted.size() < kSequences; ++i) wanted.push_back(Drafts().add(i, 1 + i * 3 % 7).run(head));
        for (const int first : {0, 3}) {
          Drafts all;
          for (int i = first; i < kSequences; ++i) all.add(i, 1 + i * 3 % 7);
          all.run(head);
          for (int i = first; i < kSequences; ++i) {
            const Drafts& own = wanted[static_cast<size_t>(i)];
            const auto at = static_cast<size_t>((i - first) * all.longest);
            CHECK(std::equal(own.drawn.begin(), own.drawn.end(), all.drawn.begin() + at));
            CHECK(std::equal(own.logprobs.begin(), own.logprobs.end(), all.logprobs.begin() + at));
            CHECK(own.drawn[0] > 0);
          }
        }
      }
  }
}

ProgramOptions head_options(int threads) {
  ProgramOptions options;
  options.kernels = kernels_of("portable");
  options.threads = threads;
  options.max_rows = options.max_logit_rows = 2;
  options.vocab = options.tokens = 16;
  options.kv_pages = 1;
  return options;
}

void test_drafts_that_lie() {
  Model model({Format::Q8, 32, false, false}, isa_levels().front(), 2, KvFormat::BF16);
  Head head({Format::Q8, 32, false, false}, isa_levels().front(), 2, model->shared_team());
  const auto good = [] { return Drafts().add(1, 5).add(2, 3); };
  const std::vector<std::function<void(Drafts&)>> lies{
      [](Drafts& d) { d.tokens[1] = kVocab; },
      [](Drafts& d) { d.tokens[0] = -1; },
      [](Drafts& d) { d.lengths[0] = 0; },
      [](Drafts& d) { d.lengths[0] = 6; },
      [](Drafts& d) { d.lengths[1] = kHigh; },
      [](Drafts& d) { d.lengths[1] = kLow; },
      [](Drafts& d) { d.temperature[0] = -1.0f; },
      [](Drafts& d) { d.temperature[0] = INFINITY; },
      [](Drafts& d) { d.temperature[1] = NAN; },
      [](Drafts& d) { d.floor[1] = NAN; },
      [](Drafts& d) { d = Drafts(); },
      [](Drafts& d) {
        for (int i = 0; i < kSequences; ++i) d.add(i, 1);
      },
  };
  const Drafts wanted = good().run(head);
  for (size_t i = 0; i < lies.size(); ++i) {
    Drafts d = good();
    lies[i](d);
    refused([&] { d.run(head); }, static_cast<int>(i));
    CHECK(good().run(head).drawn == wanted.drawn);
  }
  // What may be any number.
  Drafts wild = good();
  wild.position = {std::numeric_limits<int64_t>::max(), -1};
  wild.floor = {-INFINITY, INFINITY};
  wild.temperature = {1e-38f, 3e38f};
  wild.features[3] = INFINITY;
  wild.features[100] = NAN;
  wild.run(head);
  CHECK(good().run(head).drawn == wanted.drawn);

  // Whoever shares a team waits for nobody: it is refused.
  CHECK(model->shared_team()->take());
  REFUSED(good().run(head));
  REFUSED(Step().part(kShort, 0, 2, {0}).run(*model));
  model->shared_team()->give_back();
  Step().part(kShort, 0, 2, {0}).run(*model);
  CHECK(good().run(head).drawn == wanted.drawn);
  Unroll none;
  Recurrent unfinished(head_options(1), Ints(16), nullptr);
  REFUSED(unfinished.unroll(none));
  REFUSED(unfinished.end_first(0, 0));
  REFUSED(Recurrent(head_options(1), Ints(16, 16), nullptr));
  REFUSED(Recurrent(head_options(1), Ints(15), nullptr));
  REFUSED(Recurrent(head_options(3), Ints(16), model->shared_team()));
}

void test_teams() {
  for (int round = 0; round < 200; ++round) {
    Team team(1 + round % 5);
    if (round % 3 == 0) continue;
    struct Work {
      Team* team;
      std::vector<int> seen;
      int sum = 0;
    } work{&team, std::vector<int>(5), 0};
    for (int run = 0; run < 5; ++run) {
      team.fix(run % (1 + round % 5));
      team.run(
          [](void* self, int index) {
            Work& w = *static_cast<Work*>(self);
            for (int phase = 1; phase <= 4; ++phase) {
              w.seen[static_cast<size_t>(index)] = phase;
              if (!w.team->barrier(index)) return false;
              // Nobody may be a phase ahead or behind.
              for (int i = 0; i < w.team->size(); ++i) CHECK(w.seen[static_cast<size_t>(i)] == phase);
              if (!w.team->barrier(index)) return false;
            }
            return true;
          },
          &work);
      for (int i = 0; i < team.size(); ++i) work.sum += work.seen[static_cast<size_t>(i)];
      CHECK(work.sum > 0);
    }
  }
  CHECK(read_bandwidth(3, size_t{1} << 20, 3) > 0);
  for (const char* level : {"portable", "avx2", "avx512"})
    if (const Kernels* kernels = kernels_of(level)) CHECK(dot_product_peak(*kernels, 2, 1) > 0);
}

// A team that is kept waiting goes on with half its threads from that barrier on, tries all of them again after a
// while, and keeps to a number that was fixed.
void test_shrinking() {
  using std::chrono::milliseconds;
  struct Work {
    Team* team;
    std::vector<int> done;
    bool late = true;
  };
  Team team(2);
  Work work{&team, std::vector<int>(2), true};
  const auto run = [&] {
    work.done.assign(2, 0);
    team.run(
        [](void* self, int index) {
          Work& w = *static_cast<Work*>(self);
          if (!w.team->barrier(index)) return false;
          if (w.late && index == 1) std::this_thread::sleep_for(milliseconds(100));
          if (!w.team->barrier(index)) return false;
          w.done[static_cast<size_t>(index)] = w.team->size();
          return w.team->barrier(index);
        },
        &work);
  };
  team.fix(2);
  run();
  CHECK((work.done == std::vector<int>{2, 2}) && team.shrinks() == 0);
  team.fix(0);
  run();
  CHECK((work.done == std::vector<int>{1, 0}) && team.size() == 1 && team.shrinks() == 1);
  work.late = false;
  run();
  CHECK(work.done[0] == 1);
  // All are tried again after a while. Others may keep this machine busy, and the team be sent back: that shows too.
  bool tried = false;
  for (int i = 0; i < 100 && !tried; ++i) {
    std::this_thread::sleep_for(milliseconds(60));
    run();
    tried = team.size() == 2 || team.shrinks() > 1;
  }
  CHECK(tried);
  team.fix(2);
  run();
  CHECK((work.done == std::vector<int>{2, 2}));
}

}  // namespace

// Rings that wrap many times and texts that grow, over few symbols and many.
void test_suffixes() {
  std::mt19937 random(5);
  const auto text = [&](size_t most, int symbols) {
    Ints tokens(random() % most);
    for (int32_t& t : tokens) t = static_cast<int32_t>(random() % static_cast<unsigned>(symbols));
    return tokens;
  };
  for (const size_t room : {1, 100, 3000}) {
    SuffixTraffic traffic(room, std::vector<float>(SuffixRecord::kBuckets, 0.5f));
    SuffixRecord shared;
    for (int i = 0; i < 200; ++i) {
      const int symbols = i % 3 == 0 ? 1 : i % 3 == 1 ? 3 : 10'000;
      SuffixText running(1 + random() % 200, 256);
      for (int step = 0; step < 20; ++step) {
        running.extend(text(step == 0 ? 500 : 10, symbols));
        const auto guesses = running.propose(traffic, 1 + static_cast<uint32_t>(i) % 2, step % 2 ? &shared : nullptr,
                                             static_cast<int>(random() % 50), 0);
        CHECK(guesses.size() <= SuffixText::kMostDrafted);
        for (const auto& guess : guesses) CHECK(guess.token >= 0 && guess.token < 10'000);
      }
      traffic.learn(text(700, symbols), 1 + static_cast<uint32_t>(i) % 2);
      shared.add(running.record());
    }
  }
  REFUSED(SuffixTraffic(0, {}));
  REFUSED(SuffixText(4, 64).extend({-1}));
}

// A speculation controller and what drives it: sequences that come and go at any time, drafts that are right or not,
// steps that fail, that verify less or compute prompts too, outcomes that come late.
class Speculating {
 public:
  explicit Speculating(unsigned seed)
      : random_(seed),
        controller_(std::vector<int>(seed % 3, 3), {1, 2, 4, 8, 16}, {4.5, 4.8, 5.5, 8, 17}, 5, seed % 2 ? 0.001 : 0.0,
                    256) {}

  void step() {
    for (int born = below(4); born-- > 0;) running_.push_back({controller_.begin(std::string(1, "xy"[below(2)])), 7});
    std::vector<int> slots, limits;
    std::vector<int64_t> lengths;
    for (const Text& text : running_) {
      slots.push_back(text.slot);
      lengths.push_back(text.length);
      limits.push_back(std::array{0, 1, 3, 500}[static_cast<size_t>(below(4))]);
    }
    const int rows = std::array{0, 1, 2, 7, 400}[static_cast<size_t>(below(5))];
    bool asks = controller_.propose(slots, lengths, rows, limits);
    if (asks && below(20) == 0) return;  // a drafter failed
    while (asks) asks = answer();
    observe(rows, limits);
  }

  void lies() {
    REFUSED(controller_.end(-1));
    REFUSED(controller_.end(1 << 20));
    REFUSED(controller_.propose({1 << 20}, {1}, 1, {1}));
    REFUSED(controller_.observe({}, 1, NAN));
    REFUSED(controller_.observe({}, -1, 1));
    REFUSED(controller_.observe({}, kHigh, 1));
    REFUSED(controller_.observe({{1 << 20, 0, 0, {}}}, 1, 1));
    REFUSED(controller_.answer({}, 1));  // nothing is asked
    const int slot = controller_.begin("x");
    REFUSED(controller_.propose({slot}, {}, 1, {1}));
    REFUSED(controller_.propose({slot}, {7}, 1, {}));
    controller_.end(slot);
    REFUSED(controller_.end(slot));
  }

 private:
  struct Text {
    int slot;
    int64_t length;
  };

  int below(int end) { return static_cast<int>(random_() % static_cast<unsigned>(end)); }

  bool answer() {
    namespace sp = speculation;
    const sp::Question question = controller_.question();
    CHECK(!question.asked.empty() && question.asked.size() == question.lengths.size());
    sp::Drafts drafts;
    for (const int length : question.lengths) {
      CHECK(length >= 1 && length <= 5);
      double survival = 1;
      for (int j = below(length + 3); j-- > 0;) {
        drafts.tokens.push_back(below(3) - 1);
        drafts.survival.push_back(survival *= below(4) / 3.0);
      }
      drafts.add(below(3));
    }
    sp::Drafts few = drafts, bad = drafts, cut = drafts;
    few.ends.pop_back();
    few.qualities.pop_back();
    bad.qualities.back() = below(2) ? 3 : -1;
    cut.survival.push_back(1);
    for (const sp::Drafts& lie : {few, bad, cut}) REFUSED(controller_.answer(lie, 0));
    REFUSED(controller_.answer(drafts, NAN));
    return controller_.answer(drafts, std::array{0.0, 0.01, 1.0, 1000.0}[static_cast<size_t>(below(4))]);
  }

  void observe(int rows, const std::vector<int>& limits) {
    std::vector<Ints> drawn(running_.size());
    std::vector<speculation::Outcome> outcomes;
    int64_t drafted = 0;
    for (size_t i = 0; i < running_.size(); ++i) {
      const auto draft = controller_.draft(i);
      CHECK(draft.size() <= static_cast<size_t>(std::min(limits[i], 5)));
      const auto verified = static_cast<int64_t>(draft.size()) - (below(4) == 0 && !draft.empty());
      drafted += static_cast<int64_t>(draft.size());
      while (drawn[i].size() < static_cast<size_t>(verified) && draft[drawn[i].size()] == 1) drawn[i].push_back(1);
      const auto accepted = static_cast<int64_t>(drawn[i].size());
      if (below(10) > 0) drawn[i].push_back(1);
      outcomes.push_back({below(30) ? running_[i].slot : speculation::Outcome::kUnknown, verified, accepted, drawn[i]});
      running_[i].length += static_cast<int64_t>(drawn[i].size());
    }
    CHECK(drafted <= rows);
    const bool early = below(2);
    std::vector<Text> gone;
    for (size_t i = running_.size(); i-- > 0;)
      if (below(5) == 0) {
        gone.push_back(running_[i]);
        running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(i));
      }
    if (early)
      for (const Text& text : gone) controller_.end(text.slot);
    std::shuffle(outcomes.begin(), outcomes.end(), random_);
    if (below(10) > 0)  // else the step failed
      controller_.observe(outcomes, static_cast<int>(outcomes.size()) + below(2) * 300,
                          std::array{0.0, 0.01, 4.5, 1000.0}[static_cast<size_t>(below(4))]);
    if (!early)
      for (const Text& text : gone) controller_.end(text.slot);
  }

  std::mt19937 random_;
  speculation::Controller controller_;
  std::vector<Text> running_;
};

void test_speculation() {
  for (unsigned seed = 0; seed < 60; ++seed) {
    Speculating played(seed);
    for (int step = 0; step < 100; ++step) played.step();
    played.lies();
  }
  using speculation::Controller, speculation::LiveCurve;
  REFUSED(LiveCurve({1}, {1}));
  REFUSED(LiveCurve({1, 2}, {1}));
  REFUSED(LiveCurve({2, 3}, {1, 2}));
  REFUSED(LiveCurve({1, 1}, {1, 2}));
  REFUSED(LiveCurve({1, 2}, {0, 2}));
  REFUSED(LiveCurve({1, 2}, {1, NAN}));
  REFUSED(LiveCurve({1, kHigh}, {1, 2}));
  REFUSED(Controller({0}, {1, 2}, {1, 2}, 8, 0.0, 0));
  REFUSED(Controller({1}, {1, 2}, {1, 2}, 0, 0.0, 0));
  REFUSED(Controller({1}, {1, 2}, {1, 2}, 8, -1.0, 0));
  REFUSED(Controller({1}, {1, 2}, {1, 2}, 8, NAN, 0));
  REFUSED(Controller({1}, {1, 2}, {1, 2}, 8, 0.0, -1));
  LiveCurve curve({1, 2}, {1, 2});
  for (const int rows : {kLow, -1, 0, 1, 2, 3, kHigh}) {
    curve.observe(rows, 1);
    curve.doubtful(rows);
    CHECK(curve.at(rows) > 0);
  }
  // Of more namespaces than are remembered, the oldest is forgotten, but not by a sequence of it.
  Controller many({1}, {1, 2}, {1, 2}, 8, 0.0, 0);
  const int first = many.begin("0");
  for (int i = 1; i < 1000; ++i) many.end(many.begin(std::to_string(i)));
  CHECK(many.propose({first}, {7}, 1, {1}));
  speculation::Drafts draft{{1}, {1.0}, {}, {}};
  draft.add(0);
  CHECK(!many.answer(draft, 0));
  const Ints drawn{1, 1};
  many.observe({{first, 1, 1, drawn}}, 2, 1);
  CHECK(many.steps() == 1 && many.committed() == 2);
}

int main() {
  const std::pair<const char*, void (*)()> tests[] = {
      {"shrinking", test_shrinking},
      {"teams", test_teams},
      {"formats", test_formats},
      {"deep", test_deep},
      {"broken activations", test_broken_activations},
      {"sampling", test_sampling},
      {"batches that lie", test_batches_that_lie},
      {"suffixes", test_suffixes},
      {"speculation", test_speculation},
      {"drafts", test_drafts},
      {"drafts that lie", test_drafts_that_lie},
  };
  for (const auto& [name, test] : tests) {
    const auto start = std::chrono::steady_clock::now();
    test();
    std::printf("%-20s %6.2f s\n", name,
                std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
}
