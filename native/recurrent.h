// A small model that runs on from another's hidden states: drafts up to K tokens for each sequence in one call.
//
// Two lists of ops over the same weights. The first reads what the caller hands in (features) and each sequence's
// newest token; the second, once for each token after the first, reads the state that the step before left and the
// token just drafted. A row is a sequence; one that has ended gives up its row, so that the rest lie side by side. All
// steps run in one task of the team; between two of them thread 0 alone decides who goes on.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "program.h"

namespace tenfold {

// One call, as arrays owned by the caller (see UnrollBatch in backends/base.py for their meaning).
struct Unroll {
  int sequences = 0;
  const float* features = nullptr;  // [sequences][feature_width]
  const int32_t* tokens = nullptr;
  const uint64_t* seed = nullptr;
  const int64_t* position = nullptr;
  const float* temperature = nullptr;
  const int32_t* lengths = nullptr;
  const float* floor = nullptr;
  // Results [sequences][longest]; only what is drafted is written.
  int longest = 0;
  int32_t* drawn = nullptr;
  float* logprobs = nullptr;
};

class Recurrent {
 public:
  // options.vocab: rows of the output matrix; options.tokens: ids of the target's vocabulary; options.max_rows:
  // sequences. `token_ids`: the target's id of each row. `team`: as for Program.
  Recurrent(const ProgramOptions& options, const std::vector<int32_t>& token_ids, std::shared_ptr<Team> team);

  // To add ops, weights and values to; it is never stepped.
  Program& program() { return program_; }
  // What was added since the last call is a step: its input op comes first; nobody but one op writes `state`.
  void end_first(int logits, int state);
  void finish(int logits, int state);
  void unroll(Unroll& unroll);

  int feature_width() const;
  // More are refused: nobody verifies that many (MOST_DRAFTS in backends/base.py).
  static constexpr int kLongest = 1024;

 private:
  struct Stage {
    size_t begin, end;
    int input, logits, state;
  };
  static bool thread_main(void* self, int index);
  bool run(int thread);
  void end_stage(int logits, int state);
  void validate(const Unroll& u) const;
  void draw(int thread);
  void advance();
  int chunks() const;
  const Stage& stage() const { return stages_[step_ == 0 ? 0 : 1]; }

  Program program_;
  std::vector<int32_t> token_ids_;  // padded to whole vectors
  std::vector<Stage> stages_;

  // Of the call that runs.
  Unroll* unroll_ = nullptr;
  Batch batch_;
  int step_ = 0;
  std::vector<int32_t> every_row_;        // 0, 1, 2 ...
  std::vector<int32_t> tokens_, source_;  // of each row: its newest token, and its row in the step before
  std::vector<int> sequence_;             // of each row
  std::vector<double> log_product_;       // of each sequence
  std::vector<BestRow> best_;             // [row][chunk]
  std::vector<Normalizer> normalizers_;   // of each row
};

}  // namespace tenfold
