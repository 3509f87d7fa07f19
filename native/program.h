// A compiled graph: packed weights, activations, KV pages, and one call a step. Knows nothing of requests.
//
// Built once (add_*), then stepped (or unrolled, see recurrent.h). Every op is run by all threads of the team, each on
// its static share; the program puts a barrier after every op. Programs throw std::invalid_argument on misuse; a step
// validates its batch before it writes. One caller at a time; the arrays of a batch must not change during its step. A
// program belongs to the process that made it: a forked child has none of its threads, so that a step there is refused
// (destroying it there is harmless).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/kernels.h"
#include "matrix.h"
#include "memory.h"
#include "pages.h"
#include "team.h"

namespace tenfold {

// One step, as arrays owned by the caller (see backends/base.py for their meaning).
struct Batch {
  int rows = 0, sequences = 0, logit_rows = 0;
  const int32_t* tokens = nullptr;
  const int32_t* positions = nullptr;
  const int32_t* row_offsets = nullptr;
  const int32_t* cached_rows = nullptr;
  const int32_t* page_offsets = nullptr;
  const int32_t* pages = nullptr;
  int page_count = 0;
  const int32_t* selected = nullptr;
  std::vector<SampleParams> sampling;  // [logit_rows]
  int top = 0;                         // width of top_tokens and top_logprobs
  // Results.
  int32_t* drawn = nullptr;
  float* logprobs = nullptr;
  int32_t* top_tokens = nullptr;
  float* top_logprobs = nullptr;
  float* logits = nullptr;    // optional [logit_rows][vocab]
  float* features = nullptr;  // optional [logit_rows][feature_width]
  // Any rows of the step, ascending, and their final hidden states: [state_rows][state_width].
  int state_rows = 0;
  const int32_t* stated = nullptr;
  float* states = nullptr;
  // What an input op reads, in the steps of recurrent programs: row r is input[input_rows[r] * input_stride].
  const float* input = nullptr;
  size_t input_stride = 0;
  const int32_t* input_rows = nullptr;
};

// A stretch of attention work: rows of a sequence times query heads of one KV head.
struct AttentionShare {
  int sequence, row, rows, kv_head, head, heads;
  int first_page, pages;  // of the sequence's table: those from first_page to pages - 1 are seen
  int64_t cost;
};

class Op;

// A value between ops: one row of `width` floats per row of the step, or per wanted row once selected.
struct Value {
  int width = 0;
  bool selected = false;
  size_t stride = 0;
  float* data = nullptr;
};

struct RopeTable {
  std::vector<double> frequencies;  // [rotary / 2]
  double factor = 1.0;              // attention factor on cosine and sine
  std::vector<float> cosine, sine;  // [max_rows][rotary / 2], filled each step
};

struct ProgramOptions {
  const Kernels* kernels = nullptr;
  int threads = 1, max_rows = 1, max_logit_rows = 1;
  int vocab = 0;  // logits of a row
  int kv_pages = 0;
  KvFormat kv_format = KvFormat::BF16;
  bool kv_bias = false;  // pages have a number per row and KV head that is added to scores
  LinearTuning tuning;
  int tokens = 0;  // token ids that rows may have; 0: as many as logits
};

struct LinearPart {
  int matrix = -1;
  int bias = -1;
};

struct NormSpec {
  int weight = -1;  // -1: no norm
  float eps = 0, offset = 0;
};

struct AttentionSpec {
  int layer, heads, kv_heads, head_dim, window;
  float scale, softcap;
  NormSpec query_norm, key_norm;
  int rope;  // -1: none
};

// Has the team for one call. Refuses where another call has it, and in a forked child.
class Turn {
 public:
  explicit Turn(Team& team);
  ~Turn();
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Team& team_;
};

class Program {
 public:
  // `team`: of another program, to be shared with it; options.threads must be its capacity. Null: one of its own.
  Program(const ProgramOptions& options, const std::vector<KvShape>& kv, std::shared_ptr<Team> team = nullptr);
  ~Program();

  int add_matrix(int rows, int cols, Layout layout);
  Matrix& matrix(int index);
  int add_vector(const float* data, int count);
  int add_value(int width, bool selected);
  int add_rope(std::vector<double> frequencies, double factor);

  void add_embed(int matrix, float scale, int output);
  // output = parts(norm(input)); with a gate two parts of equal rows: activation(first) * second. Adds `residual` (-1:
  // none), which may be the output itself.
  // `column`: where in the output the part begins, what lies beside it being another op's; -1: the parts are all.
  void add_linear(int input, NormSpec norm, std::vector<LinearPart> parts, Activation gate, int residual, int output,
                  int column = -1);
  void add_attention(int input, AttentionSpec spec, int output);
  void add_norm(int input, NormSpec norm, int residual, int output);
  void add_gate(Activation activation, int first, int second, int output);
  void add_sum(int first, int second, int output);
  void add_scale(int input, float factor, int output);
  void add_select(int input, int output);
  void add_softcap(int value, float cap);
  // Rows that the caller hands in. The first op of its list, since what it reads may be another value's memory.
  void add_input(int output);
  // The inputs side by side, in their order.
  void add_concat(std::vector<int> inputs, int output);
  // Wanted rows of the value as it stands here go to `column` of the features of steps that want features.
  void add_tap(int value, int column);
  // norm(value), of any rows that a step names: its states. Once a program.
  void add_states(int value, NormSpec norm);
  void finish(int logits);
  // Runs every op as a call of its own rather than the step as one: what fusing the step is measured against.
  void run_modular(bool modular) { modular_ = modular; }

  void step(Batch& batch);

  KvPages& pages() { return pages_; }
  const ProgramOptions& options() const { return options_; }
  size_t weight_bytes() const { return weights_.used(); }
  // 0: the program has no taps.
  int feature_width() const { return feature_width_; }
  // 0: the program has no states.
  int state_width() const { return state_width_; }
  // Every step from now on runs on exactly this many threads; 0: on as many as pay. For measurements.
  void fix_threads(int threads);
  // Threads that the last step ran on: fewer than it has where they were in one another's way (see team.h).
  int threads_used() const { return team_->size(); }
  const std::shared_ptr<Team>& shared_team() const { return team_; }

  // For ops, within a step.
  const Kernels& kernels() const { return *options_.kernels; }
  Team& team() { return *team_; }
  const Batch& batch() const { return *batch_; }
  int rows_of(const Value& v) const { return v.selected ? batch_->logit_rows : batch_->rows; }
  const Value& value(int index) const { return values_[static_cast<size_t>(index)]; }
  const float* vector(int index) const { return vectors_[static_cast<size_t>(index)].data(); }
  const Matrix& matrix(int index) const { return matrices_[static_cast<size_t>(index)]; }
  const RopeTable& rope(int index) const { return ropes_[static_cast<size_t>(index)]; }
  int sequence_of(int row) const { return row_sequence_[static_cast<size_t>(row)]; }
  // Cache row that a row of the step is written to.
  int cache_row(int row) const { return row_cache_[static_cast<size_t>(row)]; }
  const int32_t* page_table(int sequence) const { return batch_->pages + batch_->page_offsets[sequence]; }
  uint8_t* scratch(int thread) { return scratch_[static_cast<size_t>(thread)].data(); }
  const LinearTuning& tuning() const { return options_.tuning; }
  // Codes of all rows, at most kRowsEach a thread, of `stretches` each.
  QuantRows shared_codes(int stretches) { return quant_at(shared_.data(), shared_rows(), kBlockRows, stretches); }
  // A thread's own, of at most kRowBlock rows. `pitch`: rows of a block of it.
  QuantRows private_codes(int thread, int pitch, int stretches) {
    return quant_at(scratch(thread), kRowBlock, pitch, stretches);
  }
  float* shared_normed() const { return normed_; }
  // A thread's own [kRowBlock][widest()].
  float* private_normed(int thread);
  size_t widest() const { return widest_; }
  // Products of queries and keys that threads leave for one another within an attention op. Reserved before a step's
  // threads start.
  void reserve_attention(size_t floats) {
    if (attention_products_.size() < floats) attention_products_.resize(floats);
  }
  float* attention_products() { return attention_products_.data(); }

  // Up to this many rows every thread prepares its own copy of a linear's input: cheaper than a barrier.
  static constexpr int kPrivateRows = 4;
  // With at least so many rows a thread, a linear's rows are divided among the threads and not its panels.
  static constexpr int kRowsEach = 32;
  // Most rows that a thread puts through a linear at a time.
  static constexpr int kRowBlock = 64;
  // Quantized rows lie in blocks of this many (or of all, if fewer); no kernel's tile is larger or crosses a block.
  static constexpr int kBlockRows = 16;

 private:
  friend class AttentionOp;
  friend class Recurrent;
  static bool thread_main(void* self, int index);
  static bool single_main(void* self, int index);
  static bool start_main(void* self, int index);
  static bool draw_main(void* self, int index);
  void turn_tables(int thread);
  bool run(int thread);
  // The ops from `begin` up to `end`, each with a barrier after it. False: the thread was let go.
  bool run_ops(int thread, size_t begin, size_t end);
  // Memory for values and scratch. Nothing can be added from then on.
  void lay_out();
  void validate(const Batch& batch) const;
  // Finds each row's sequence and cache row. Refuses two rows for one line: they would race.
  void place(const Batch& batch);
  void draw(int thread);
  QuantRows quant_at(uint8_t* base, int rows, int pitch, int stretches) const;
  // More rows than that are divided among the threads, however many take part.
  int shared_rows() const {
    return (std::min(options_.max_rows, kRowsEach * options_.threads) + kBlockRows - 1) / kBlockRows * kBlockRows;
  }
  size_t quant_bytes(int rows) const;
  void check_building() const;
  int check_value(int index) const;
  void check_like(int index, const Value& other, const char* what) const;
  void check_vector(int index, int count, const char* what) const;

  ProgramOptions options_;
  KvPages pages_;
  Arena weights_;
  std::vector<Matrix> matrices_;
  std::vector<std::vector<float>> vectors_;
  std::vector<Value> values_;
  std::vector<RopeTable> ropes_;
  std::vector<std::unique_ptr<Op>> ops_;
  struct Input {
    size_t op;
    int value;
  };
  std::vector<Input> inputs_;
  int logits_ = -1, feature_width_ = 0, state_width_ = 0;
  bool laid_out_ = false, modular_ = false;
  Op* single_ = nullptr;  // the op of a modular call
  size_t widest_ = 0;

  Mapping activations_, shared_, normed_memory_;
  float* normed_ = nullptr;
  std::vector<Mapping> scratch_;
  std::vector<Mapping> sample_scratch_;
  std::vector<float> attention_products_;

  Batch* batch_ = nullptr;
  std::vector<int> row_sequence_, row_cache_;
  std::vector<uint16_t> lines_written_;  // of each page, a bit a line; all 0 between steps
  std::shared_ptr<Team> team_;
};

class Op {
 public:
  virtual ~Op() = default;
  // Called on every thread that takes part; may use the team's barrier if all threads do alike. False: the thread was
  // let go by a barrier.
  virtual bool run(Program& program, int thread) = 0;
  // Called once a step before the threads start.
  virtual void prepare(Program&) {}
  // Whether the step has nothing for it to do: it is passed over then, and so is its barrier.
  virtual bool idle(const Batch&) const { return false; }
};

std::unique_ptr<Op> make_embed(int matrix, float scale, int output);
// `quantized`, `plain`: whether some of its matrices read codes, and floats.
std::unique_ptr<Op> make_linear(int input, NormSpec norm, std::vector<LinearPart> parts, Activation gate, int residual,
                                int output, int column, bool quantized, bool plain);
std::unique_ptr<Op> make_gate(Activation activation, int first, int second, int output);
std::unique_ptr<Op> make_sum(int first, int second, int output);
std::unique_ptr<Op> make_attention(int input, AttentionSpec spec, int output);
std::unique_ptr<Op> make_norm(int input, NormSpec norm, int residual, int output);
std::unique_ptr<Op> make_scale(int input, float factor, int output);
std::unique_ptr<Op> make_select(int input, int output);
std::unique_ptr<Op> make_softcap(int value, float cap);
std::unique_ptr<Op> make_input(int output);
std::unique_ptr<Op> make_concat(std::vector<int> inputs, int output);
std::unique_ptr<Op> make_tap(int value, int column);
std::unique_ptr<Op> make_states(int value, NormSpec norm);

}  // namespace tenfold
