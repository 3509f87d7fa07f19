#include "recurrent.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace tenfold {
namespace {

// Rows of the output matrix whose noise is one piece of work: threads share a single sequence's draw.
constexpr int kChunk = 512;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

}  // namespace

Recurrent::Recurrent(const ProgramOptions& options, const std::vector<int32_t>& token_ids, std::shared_ptr<Team> team)
    : program_(options, {}, std::move(team)), token_ids_(token_ids) {
  if (token_ids.size() != static_cast<size_t>(options.vocab)) refuse("recurrent: needs a token id for each row");
  for (const int32_t id : token_ids)
    if (id < 0 || id >= program_.options_.tokens)
      refuse("recurrent: token id " + std::to_string(id) + " is not in the vocabulary");
  token_ids_.resize((token_ids.size() + 15) / 16 * 16, 0);
}

int Recurrent::feature_width() const { return stages_.empty() ? 0 : program_.value(stages_[0].input).width; }

int Recurrent::chunks() const { return (program_.options_.vocab + kChunk - 1) / kChunk; }

void Recurrent::end_stage(int logits, int state) {
  Program& p = program_;
  const size_t begin = stages_.empty() ? 0 : stages_.back().end;
  if (p.inputs_.size() != stages_.size() + 1 || p.inputs_.back().op != begin)
    refuse("recurrent: a step begins with its one input");
  if (!p.value(p.check_value(logits)).selected || p.value(logits).width != p.options_.vocab)
    refuse("recurrent: the last value is not logits");
  if (p.value(p.check_value(state)).selected) refuse("recurrent: the state is of all rows");
  stages_.push_back({begin, p.ops_.size(), p.inputs_.back().value, logits, state});
}

void Recurrent::end_first(int logits, int state) {
  if (!stages_.empty()) refuse("recurrent: the first step has ended");
  end_stage(logits, state);
}

void Recurrent::finish(int logits, int state) {
  if (stages_.size() != 1) refuse("recurrent: end_first comes before finish");
  end_stage(logits, state);
  const auto broken = [&](int value) {
    return program_.value(value).width != program_.value(stages_[1].input).width || value == stages_[1].input;
  };
  if (broken(stages_[0].state) || broken(state)) {
    stages_.pop_back();
    refuse("recurrent: the state is not a value of its own, as wide as the input that it is to be");
  }
  const size_t rows = static_cast<size_t>(program_.options_.max_rows);
  every_row_.resize(rows);
  std::iota(every_row_.begin(), every_row_.end(), 0);
  tokens_.resize(rows);
  source_.resize(rows);
  sequence_.resize(rows);
  log_product_.resize(rows);
  best_.resize(rows * static_cast<size_t>(chunks()));
  normalizers_.resize(rows);
  program_.lay_out();
}

void Recurrent::validate(const Unroll& u) const {
  if (!program_.laid_out_) refuse("unroll: the program is not finished");
  if (u.sequences < 1 || u.sequences > program_.options_.max_rows)
    refuse("unroll: " + std::to_string(u.sequences) + " sequences, the program takes 1 to " +
           std::to_string(program_.options_.max_rows));
  for (int s = 0; s < u.sequences; ++s) {
    if (u.tokens[s] < 0 || u.tokens[s] >= program_.options_.tokens)
      refuse("unroll: token " + std::to_string(u.tokens[s]) + " is not in the vocabulary");
    if (u.lengths[s] < 1 || u.lengths[s] > kLongest || u.lengths[s] > u.longest)
      refuse("unroll: lengths must be 1 to " + std::to_string(kLongest));
    if (!std::isfinite(u.temperature[s]) || u.temperature[s] < 0.0f)
      refuse("unroll: temperature must be a number, 0 or more");
    if (std::isnan(u.floor[s])) refuse("unroll: floor must be a number");
  }
}

void Recurrent::unroll(Unroll& u) {
  const Turn turn(program_.team());
  validate(u);
  unroll_ = &u;
  step_ = 0;
  std::iota(sequence_.begin(), sequence_.end(), 0);
  std::fill(log_product_.begin(), log_product_.end(), 0.0);
  std::copy(u.tokens, u.tokens + u.sequences, tokens_.begin());
  batch_.rows = batch_.logit_rows = u.sequences;
  batch_.tokens = tokens_.data();
  batch_.selected = every_row_.data();
  batch_.input = u.features;
  batch_.input_stride = static_cast<size_t>(feature_width());
  batch_.input_rows = every_row_.data();
  program_.batch_ = &batch_;
  program_.team().run(thread_main, this);
  program_.batch_ = nullptr;
  unroll_ = nullptr;
}

bool Recurrent::thread_main(void* self, int index) { return static_cast<Recurrent*>(self)->run(index); }

bool Recurrent::run(int thread) {
  Team& team = program_.team();
  do {
    if (!program_.run_ops(thread, stage().begin, stage().end)) return false;
    draw(thread);
    if (!team.barrier(thread)) return false;
    if (thread == 0) advance();
    if (!team.barrier(thread)) return false;
  } while (batch_.rows > 0);
  return true;
}

// A row's pieces of work: its chunks, and its normalizer.
void Recurrent::draw(int thread) {
  const Value& logits = program_.value(stage().logits);
  const int pieces = chunks() + 1, vocab = program_.options_.vocab;
  const Range mine = share(batch_.rows * pieces, thread, program_.team().size());
  for (int i = mine.begin; i < mine.end; ++i) {
    const size_t row = static_cast<size_t>(i / pieces), s = static_cast<size_t>(sequence_[row]);
    const int piece = i % pieces, first = piece * kChunk;
    const float* x = logits.data + row * logits.stride;
    const float temperature = unroll_->temperature[s];
    if (piece == chunks()) {
      normalizers_[row] = program_.kernels().normalizer(x, vocab, temperature > 0.0f ? temperature : 1.0f);
      continue;
    }
    BestRow& best = best_[row * static_cast<size_t>(chunks()) + static_cast<size_t>(piece)];
    // Unsigned: a position that lies may be any number.
    const uint64_t position = static_cast<uint64_t>(unroll_->position[s]) + static_cast<uint64_t>(step_);
    best = program_.kernels().best_row(x + first, token_ids_.data() + first, std::min(kChunk, vocab - first),
                                       temperature, unroll_->seed[s], static_cast<int64_t>(position));
    if (best.row >= 0) best.row += first;
  }
}

// Writes what each row drew, and moves the rows that go on together.
void Recurrent::advance() {
  const Unroll& u = *unroll_;
  const Value& logits = program_.value(stage().logits);
  const Value& state = program_.value(stage().state);
  size_t kept = 0;
  for (size_t row = 0; row < static_cast<size_t>(batch_.rows); ++row) {
    const size_t s = static_cast<size_t>(sequence_[row]), at = s * static_cast<size_t>(u.longest);
    BestRow best{-INFINITY, -1};
    for (size_t c = 0; c < static_cast<size_t>(chunks()); ++c) {
      const BestRow& other = best_[row * static_cast<size_t>(chunks()) + c];
      if (other.score > best.score) best = other;
    }
    if (best.row < 0) continue;  // no logit is a number
    const float temperature = u.temperature[s] > 0.0f ? u.temperature[s] : 1.0f;
    const float logit = logits.data[row * logits.stride + static_cast<size_t>(best.row)];
    const float logprob = (logit - normalizers_[row].peak) / temperature - normalizers_[row].log_sum;
    const int32_t token = token_ids_[static_cast<size_t>(best.row)];
    u.drawn[at + static_cast<size_t>(step_)] = token;
    u.logprobs[at + static_cast<size_t>(step_)] = logprob;
    log_product_[s] += static_cast<double>(logprob);
    const bool likely = std::exp(log_product_[s]) >= static_cast<double>(u.floor[s]);
    if (!likely || step_ + 1 >= u.lengths[s]) continue;
    sequence_[kept] = static_cast<int>(s);
    source_[kept] = static_cast<int32_t>(row);
    tokens_[kept] = token;
    ++kept;
  }
  batch_.rows = batch_.logit_rows = static_cast<int>(kept);
  batch_.input = state.data;
  batch_.input_stride = state.stride;
  batch_.input_rows = source_.data();
  ++step_;
}

}  // namespace tenfold
