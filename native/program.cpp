#include "program.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace tenfold {
namespace {

constexpr size_t kAlign = 64;
// Of widths, rows and counts: far above any model's, and products of two of them with 16 stay far from overflow.
constexpr int kMost = 1 << 26;

size_t aligned(size_t n) { return (n + kAlign - 1) / kAlign * kAlign; }
size_t padded(int count) { return static_cast<size_t>((count + 15) / 16 * 16); }

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

const ProgramOptions& checked(const ProgramOptions& o, const std::vector<KvShape>& kv) {
  if (o.kernels == nullptr) refuse("program: no kernels");
  if (o.threads < 1 || o.threads > 1024) refuse("program: threads must be 1 to 1024");
  if (o.max_rows < 1 || o.max_rows > kMost || o.vocab < 1 || o.vocab > kMost || o.kv_pages < 1 || o.kv_pages > kMost)
    refuse("program: rows, vocab and pages must be positive, at most " + std::to_string(kMost));
  if (o.tokens < 0 || o.tokens > kMost) refuse("program: tokens must be 0 to " + std::to_string(kMost));
  if (o.max_logit_rows < 1 || o.max_logit_rows > o.max_rows) refuse("program: max_logit_rows must be 1 to max_rows");
  for (const KvShape& s : kv)
    if (s.heads < 1 || s.heads > 4096 || s.head_dim < 1 || s.head_dim > 4096)
      refuse("program: KV heads and head_dim must be 1 to 4096");
  return o;
}

}  // namespace

Turn::Turn(Team& team) : team_(team) {
  if (!team.here()) refuse("step: a program does not survive a fork; compile it in the process that uses it");
  // Batch, activations and threads belong to one call at a time; a second caller is refused before it can touch them.
  if (!team.take()) refuse("step: the program, or one that shares its threads, is in a step of another thread");
}

Turn::~Turn() { team_.give_back(); }

Program::Program(const ProgramOptions& options, const std::vector<KvShape>& kv, std::shared_ptr<Team> team)
    : options_(checked(options, kv)),
      pages_(options.kv_pages, kv, options.kv_format, options.kv_bias),
      lines_written_(static_cast<size_t>(options.kv_pages)),
      team_(team != nullptr ? std::move(team) : std::make_shared<Team>(options.threads)) {
  if (options_.tokens == 0) options_.tokens = options_.vocab;
  if (team_->capacity() != options_.threads) refuse("program: has not as many threads as the team that it shares");
}

Program::~Program() = default;

void Program::check_building() const {
  if (laid_out_) refuse("program: it is finished; nothing can be added");
}

int Program::add_matrix(int rows, int cols, Layout layout) {
  check_building();
  if (rows <= 0 || cols <= 0 || rows > kMost || cols > kMost)
    refuse("matrix: rows and cols must be positive, at most " + std::to_string(kMost));
  if (layout.quantized()) {
    const bool q4 = layout.format == Format::Q4;
    if (!(layout.group == 32 || (layout.group == 16 && !q4))) refuse("matrix: group must be 32, or 16 for q8");
    if (cols % kActGroup != 0)
      refuse("matrix: cols must be a multiple of 32 for q8 and q4, not " + std::to_string(cols));
  } else if (layout.group != 0 || layout.wide || layout.minimum) {
    refuse("matrix: f32 and bf16 have no groups, scales or minima");
  }
  Matrix m{layout, rows, cols, nullptr};
  m.data = weights_.take(m.bytes());
  matrices_.push_back(m);
  widest_ = std::max(widest_, static_cast<size_t>(cols));
  return static_cast<int>(matrices_.size()) - 1;
}

Matrix& Program::matrix(int index) {
  if (index < 0 || index >= static_cast<int>(matrices_.size())) refuse("matrix: no such matrix");
  return matrices_[static_cast<size_t>(index)];
}

int Program::add_vector(const float* data, int count) {
  check_building();
  if (count <= 0 || count > kMost) refuse("vector: its length must be positive, at most " + std::to_string(kMost));
  // Padded, so that kernels may read whole vectors.
  std::vector<float> v(padded(count), 0.0f);
  std::copy(data, data + count, v.begin());
  vectors_.push_back(std::move(v));
  return static_cast<int>(vectors_.size()) - 1;
}

int Program::add_value(int width, bool selected) {
  check_building();
  if (width <= 0 || width > kMost) refuse("value: width must be positive, at most " + std::to_string(kMost));
  Value v;
  v.width = width;
  v.selected = selected;
  v.stride = padded(width);
  values_.push_back(v);
  widest_ = std::max(widest_, v.stride);
  return static_cast<int>(values_.size()) - 1;
}

int Program::add_rope(std::vector<double> frequencies, double factor) {
  check_building();
  RopeTable t;
  const size_t cells = frequencies.size() * static_cast<size_t>(options_.max_rows);
  t.frequencies = std::move(frequencies);
  t.factor = factor;
  t.cosine.resize(cells);
  t.sine.resize(cells);
  ropes_.push_back(std::move(t));
  return static_cast<int>(ropes_.size()) - 1;
}

int Program::check_value(int index) const {
  check_building();
  if (index < 0 || index >= static_cast<int>(values_.size())) refuse("op: no such value");
  return index;
}

void Program::check_like(int index, const Value& other, const char* what) const {
  const Value& v = value(check_value(index));
  if (v.width != other.width) refuse(std::string(what) + ": widths differ");
  if (v.selected != other.selected) refuse(std::string(what) + ": mixes selected rows and all rows");
}

void Program::check_vector(int index, int count, const char* what) const {
  if (index < 0 || index >= static_cast<int>(vectors_.size())) refuse(std::string(what) + ": no such vector");
  if (vectors_[static_cast<size_t>(index)].size() != padded(count))
    refuse(std::string(what) + ": the vector has not the width " + std::to_string(count));
}

void Program::add_embed(int m, float scale, int output) {
  if (matrix(m).rows < options_.tokens) refuse("embed: the matrix has not a row for each token of the vocabulary");
  if (matrix(m).cols != value(check_value(output)).width) refuse("embed: width differs from the matrix");
  if (value(output).selected) refuse("embed: its output is of all rows");
  ops_.push_back(make_embed(m, scale, output));
}

void Program::add_linear(int input, NormSpec norm, std::vector<LinearPart> parts, Activation gate, int residual,
                         int output, int column) {
  const Value& in = value(check_value(input));
  const Value& out = value(check_value(output));
  int64_t width = 0;
  for (const LinearPart& p : parts) {
    if (matrix(p.matrix).cols != in.width) refuse("linear: input width differs from the matrix");
    if (p.bias >= 0) check_vector(p.bias, matrix(p.matrix).rows, "linear bias");
    width += matrix(p.matrix).rows;
  }
  if (gate != Activation::None) {
    if (parts.size() != 2 || matrix(parts[0].matrix).rows != matrix(parts[1].matrix).rows)
      refuse("linear: a gate needs two matrices of equal rows");
    width /= 2;
  }
  for (size_t i = 0; i + 1 < parts.size() && gate == Activation::None; ++i)
    if (matrix(parts[i].matrix).rows % kPanel != 0) refuse("linear: rows of joined matrices must be multiples of 16");
  const bool apart = column >= 0;
  if (apart ? column % kPanel != 0 || width > out.width - column || residual >= 0 || parts.size() != 1
            : column != -1 || width != out.width)
    refuse("linear: output width differs from the matrices");
  if (norm.weight >= 0) {
    if (in.width % 16 != 0) refuse("linear: a norm needs a width that is a multiple of 16");
    check_vector(norm.weight, in.width, "linear norm");
  }
  // Threads write their columns while others still read the input.
  if (output == input) refuse("linear: the output cannot be the input");
  if (residual >= 0) check_like(residual, out, "linear residual");
  if (in.selected != out.selected) refuse("linear: input and output must both be selected rows or neither");
  bool quantized = false, plain = false;
  for (const LinearPart& p : parts) (matrix(p.matrix).layout.quantized() ? quantized : plain) = true;
  ops_.push_back(
      make_linear(input, norm, std::move(parts), gate, residual, output, std::max(column, 0), quantized, plain));
}

void Program::add_gate(Activation activation, int first, int second, int output) {
  check_like(first, value(check_value(output)), "gate");
  check_like(second, value(output), "gate");
  if (activation == Activation::None) refuse("gate: needs an activation");
  ops_.push_back(make_gate(activation, first, second, output));
}

void Program::add_sum(int first, int second, int output) {
  check_like(first, value(check_value(output)), "sum");
  check_like(second, value(output), "sum");
  ops_.push_back(make_sum(first, second, output));
}

void Program::add_attention(int input, AttentionSpec s, int output) {
  if (s.layer < 0 || s.layer >= pages_.layers()) refuse("attention: no such layer");
  const KvShape& kv = pages_.shape(s.layer);
  if (kv.heads != s.kv_heads || kv.head_dim != s.head_dim) refuse("attention: KV shape differs");
  if (s.head_dim % 16 != 0 || s.head_dim > 512)
    refuse("attention: head_dim must be a multiple of 16, at most 512, not " + std::to_string(s.head_dim));
  if (s.heads <= 0 || s.heads > 4096 || s.heads % s.kv_heads != 0)
    refuse("attention: heads must be a multiple of KV heads, at most 4096");
  if (s.window < 0 || s.softcap < 0.0f) refuse("attention: window and softcap must not be negative (0: none)");
  const Value& in = value(check_value(input));
  const Value& out = value(check_value(output));
  if (in.width != (s.heads + 2 * s.kv_heads) * s.head_dim) refuse("attention: input width");
  if (out.width != s.heads * s.head_dim) refuse("attention: output width");
  if (in.selected || out.selected) refuse("attention: must come before the rows are selected");
  if (s.query_norm.weight >= 0) check_vector(s.query_norm.weight, s.head_dim, "attention query norm");
  if (s.key_norm.weight >= 0) check_vector(s.key_norm.weight, s.head_dim, "attention key norm");
  if (s.rope >= static_cast<int>(ropes_.size())) refuse("attention: no such rope");
  if (s.rope >= 0 && rope(s.rope).frequencies.size() * 2 > static_cast<size_t>(s.head_dim))
    refuse("attention: rope is wider than head_dim");
  ops_.push_back(make_attention(input, s, output));
}

void Program::add_norm(int input, NormSpec norm, int residual, int output) {
  const Value& in = value(check_value(input));
  if (in.width % 16 != 0) refuse("norm: width must be a multiple of 16");
  check_vector(norm.weight, in.width, "norm");
  check_like(output, in, "norm");
  if (residual >= 0) check_like(residual, in, "norm residual");
  ops_.push_back(make_norm(input, norm, residual, output));
}

void Program::add_scale(int input, float factor, int output) {
  check_like(output, value(check_value(input)), "scale");
  ops_.push_back(make_scale(input, factor, output));
}

void Program::add_select(int input, int output) {
  if (value(check_value(input)).selected || !value(check_value(output)).selected) refuse("select: wrong row kinds");
  if (value(input).width != value(output).width) refuse("select: widths differ");
  ops_.push_back(make_select(input, output));
}

void Program::add_softcap(int v, float cap) {
  check_value(v);
  if (!(cap > 0.0f)) refuse("softcap: cap must be positive");
  ops_.push_back(make_softcap(v, cap));
}

void Program::add_input(int output) {
  if (value(check_value(output)).selected) refuse("input: its output is of all rows");
  inputs_.push_back({ops_.size(), output});
  ops_.push_back(make_input(output));
}

void Program::add_concat(std::vector<int> inputs, int output) {
  const Value& out = value(check_value(output));
  int64_t width = 0;
  for (const int input : inputs) {
    width += value(check_value(input)).width;
    if (value(input).selected != out.selected) refuse("concat: mixes selected rows and all rows");
    if (input == output) refuse("concat: the output cannot be an input");
  }
  if (width != out.width) refuse("concat: the output has not the inputs' widths together");
  ops_.push_back(make_concat(std::move(inputs), output));
}

void Program::add_tap(int v, int column) {
  check_value(v);
  if (column < 0 || column > kMost) refuse("tap: column must be 0 to " + std::to_string(kMost));
  feature_width_ = std::max(feature_width_, column + value(v).width);
  ops_.push_back(make_tap(v, column));
}

void Program::add_states(int v, NormSpec norm) {
  const Value& in = value(check_value(v));
  if (state_width_ != 0) refuse("states: the program has some already");
  if (in.selected) refuse("states: must come of a value of all rows");
  if (in.width % 16 != 0) refuse("states: width must be a multiple of 16");
  check_vector(norm.weight, in.width, "states");
  state_width_ = in.width;
  ops_.push_back(make_states(v, norm));
}

size_t Program::quant_bytes(int rows) const {
  return aligned(static_cast<size_t>(rows) * (widest_ / kActGroup) * (sizeof(Stretch) + sizeof(HighStretch)));
}

QuantRows Program::quant_at(uint8_t* base, int rows, int pitch, int stretches) const {
  const size_t each = static_cast<size_t>(stretches);
  Stretch* first = reinterpret_cast<Stretch*>(base);
  HighStretch* second = reinterpret_cast<HighStretch*>(first + static_cast<size_t>(rows) * each);
  return {first, second, static_cast<size_t>(pitch), each};
}

float* Program::private_normed(int thread) {
  return reinterpret_cast<float*>(scratch(thread) + quant_bytes(kRowBlock));
}

void Program::finish(int logits) {
  if (!value(check_value(logits)).selected || value(logits).width != options_.vocab)
    refuse("finish: the last value is not logits");
  if (!inputs_.empty()) refuse("finish: a step hands nothing in; only recurrent programs have inputs");
  lay_out();
  logits_ = logits;  // last: a program that ran out of memory is not finished
}

void Program::lay_out() {
  check_building();
  widest_ = (widest_ + 63) / 64 * 64;
  size_t total = 0;
  for (Value& v : values_)
    total += aligned(v.stride * 4 * static_cast<size_t>(v.selected ? options_.max_logit_rows : options_.max_rows));
  activations_ = Mapping(total);
  uint8_t* p = activations_.data();
  for (Value& v : values_) {
    v.data = reinterpret_cast<float*>(p);
    p += aligned(v.stride * 4 * static_cast<size_t>(v.selected ? options_.max_logit_rows : options_.max_rows));
  }
  // max_logit_rows never exceeds max_rows, so shared buffers serve selected rows too.
  shared_ = Mapping(quant_bytes(shared_rows()));
  normed_memory_ = Mapping(static_cast<size_t>(shared_rows()) * widest_ * 4);
  normed_ = reinterpret_cast<float*>(normed_memory_.data());
  const size_t mine = quant_bytes(kRowBlock) + kRowBlock * widest_ * 4 + (size_t{256} << 10);
  for (int t = 0; t < options_.threads; ++t) {
    scratch_.emplace_back(mine);
    sample_scratch_.emplace_back(static_cast<size_t>(options_.vocab) * 12);
  }
  row_sequence_.resize(static_cast<size_t>(options_.max_rows));
  row_cache_.resize(static_cast<size_t>(options_.max_rows));
  laid_out_ = true;
}

void Program::fix_threads(int threads) {
  if (threads < 0 || threads > options_.threads) refuse("fix_threads: the program has fewer threads");
  team_->fix(threads);
}

void Program::validate(const Batch& b) const {
  if (logits_ < 0) refuse("step: the program is not finished");
  if (b.rows <= 0 || b.rows > options_.max_rows)
    refuse("step: " + std::to_string(b.rows) + " rows, the program takes 1 to " + std::to_string(options_.max_rows));
  if (b.logit_rows < 0 || b.logit_rows > options_.max_logit_rows || b.logit_rows > b.rows)
    refuse("step: more wanted rows than the program takes (" + std::to_string(options_.max_logit_rows) + ")");
  if (b.row_offsets[0] != 0 || b.row_offsets[b.sequences] != b.rows) refuse("step: row_offsets do not cover the rows");
  if (b.page_offsets[0] != 0 || b.page_offsets[b.sequences] != b.page_count)
    refuse("step: page_offsets do not cover the pages");
  for (int s = 0; s < b.sequences; ++s) {
    // Compared, not subtracted: offsets that lie may be any number.
    if (b.row_offsets[s + 1] <= b.row_offsets[s]) refuse("step: a sequence has no rows, or row_offsets descend");
    if (b.page_offsets[s + 1] < b.page_offsets[s]) refuse("step: page_offsets descend");
    const int64_t rows = b.row_offsets[s + 1] - b.row_offsets[s];
    const int64_t pages = b.page_offsets[s + 1] - b.page_offsets[s];
    if (b.cached_rows[s] < 0) refuse("step: cached_rows is negative");
    if (b.cached_rows[s] + rows > pages * kPageRows) refuse("step: a page table is too short for its rows");
    if (b.cached_rows[s] + rows > kMost * int64_t{kPageRows}) refuse("step: a sequence is too long");
  }
  for (int i = 0; i < b.page_count; ++i)
    if (b.pages[i] < 0 || b.pages[i] >= options_.kv_pages) refuse("step: page out of range");
  for (int r = 0; r < b.rows; ++r)
    if (b.tokens[r] < 0 || b.tokens[r] >= options_.tokens)
      refuse("step: token " + std::to_string(b.tokens[r]) + " is not in the vocabulary");
  for (int i = 0; i < b.logit_rows; ++i)
    if (b.selected[i] < 0 || b.selected[i] >= b.rows || (i > 0 && b.selected[i] <= b.selected[i - 1]))
      refuse("step: logit_rows must ascend within the rows");
  if (b.sampling.size() != static_cast<size_t>(b.logit_rows)) refuse("step: sampling must have an entry a wanted row");
  if (b.features != nullptr && feature_width_ == 0)
    refuse("step: features are wanted, but the program was compiled without taps");
  if (b.state_rows < 0 || (b.state_rows > 0 && state_width_ == 0))
    refuse("step: states are wanted, but the program has none");
  for (int i = 0; i < b.state_rows; ++i)
    if (b.stated[i] < 0 || b.stated[i] >= b.rows || (i > 0 && b.stated[i] <= b.stated[i - 1]))
      refuse("step: state_rows must ascend within the rows");
  for (const SampleParams& p : b.sampling) {
    for (int i = 0; i < p.history; ++i)
      if (p.history_tokens[i] < 0 || p.history_tokens[i] >= options_.vocab) refuse("step: history token out of range");
    for (int i = 0; i < p.biases; ++i)
      if (p.bias_tokens[i] < 0 || p.bias_tokens[i] >= options_.vocab) refuse("step: bias token out of range");
    if (p.logprobs > b.top) refuse("step: logprobs exceed the result's width");
  }
}

void Program::place(const Batch& b) {
  bool twice = false;
  const auto lines_of = [&](int s, int row) -> uint16_t& {
    const int table = row_cache_[static_cast<size_t>(row)] / kPageRows;
    return lines_written_[static_cast<size_t>(b.pages[b.page_offsets[s] + table])];
  };
  for (int s = 0; s < b.sequences; ++s)
    for (int r = b.row_offsets[s]; r < b.row_offsets[s + 1]; ++r) {
      const size_t i = static_cast<size_t>(r);
      row_sequence_[i] = s;
      row_cache_[i] = b.cached_rows[s] + r - b.row_offsets[s];
      uint16_t& lines = lines_of(s, r);
      const unsigned line = 1u << (row_cache_[i] % kPageRows);
      twice |= (lines & line) != 0;
      lines = static_cast<uint16_t>(lines | line);
    }
  for (int r = 0; r < b.rows; ++r) lines_of(row_sequence_[static_cast<size_t>(r)], r) = 0;
  if (twice) refuse("step: two rows would be written to the same cache line");
}

void Program::step(Batch& b) {
  const Turn turn(*team_);
  validate(b);
  place(b);
  batch_ = &b;
  for (const auto& op : ops_) op->prepare(*this);
  if (modular_) {
    team_->run(start_main, this);
    for (const auto& op : ops_) {
      if (op->idle(b)) continue;
      single_ = op.get();
      team_->run(single_main, this);
    }
    team_->run(draw_main, this);
  } else {
    team_->run(thread_main, this);
  }
  batch_ = nullptr;
}

bool Program::single_main(void* self, int index) {
  Program& p = *static_cast<Program*>(self);
  return p.single_->run(p, index);
}

bool Program::start_main(void* self, int index) {
  static_cast<Program*>(self)->turn_tables(index);
  return true;
}

bool Program::draw_main(void* self, int index) {
  static_cast<Program*>(self)->draw(index);
  return true;
}

bool Program::thread_main(void* self, int index) { return static_cast<Program*>(self)->run(index); }

// Cosines and sines of the step's positions.
void Program::turn_tables(int thread) {
  const Range rows = share(batch_->rows, thread, team_->size());
  for (RopeTable& t : ropes_) {
    const size_t half = t.frequencies.size();
    for (int r = rows.begin; r < rows.end; ++r)
      for (size_t i = 0; i < half; ++i) {
        const double angle = static_cast<double>(batch_->positions[r]) * t.frequencies[i];
        t.cosine[static_cast<size_t>(r) * half + i] = static_cast<float>(std::cos(angle) * t.factor);
        t.sine[static_cast<size_t>(r) * half + i] = static_cast<float>(std::sin(angle) * t.factor);
      }
  }
}

bool Program::run(int thread) {
  turn_tables(thread);
  if (!run_ops(thread, 0, ops_.size())) return false;
  draw(thread);
  return true;
}

bool Program::run_ops(int thread, size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) {
    Op& op = *ops_[i];
    if (op.idle(*batch_)) continue;
    if (!op.run(*this, thread) || !team_->barrier(thread)) return false;
  }
  return true;
}

void Program::draw(int thread) {
  const Batch& b = *batch_;
  const Value& logits = value(logits_);
  const size_t vocab = static_cast<size_t>(options_.vocab);
  uint8_t* memory = sample_scratch_[static_cast<size_t>(thread)].data();
  const SampleScratch scratch{reinterpret_cast<float*>(memory), reinterpret_cast<int32_t*>(memory + vocab * 8)};
  const Range mine = share(b.logit_rows, thread, team_->size());
  for (int i = mine.begin; i < mine.end; ++i) {
    const size_t n = static_cast<size_t>(i);
    float* row = logits.data + n * logits.stride;
    if (b.logits != nullptr) std::copy(row, row + vocab, b.logits + n * vocab);
    const size_t top = n * static_cast<size_t>(b.top);
    const SampleResult r =
        kernels().sample(row, options_.vocab, b.sampling[n], scratch, b.top_tokens + top, b.top_logprobs + top);
    b.drawn[i] = r.token;
    b.logprobs[i] = r.logprob;
  }
}

}  // namespace tenfold
