// The Python face of the core. Exceptions of the core are std::invalid_argument (ValueError) and std::bad_alloc; none
// crosses a kernel. A step runs without the GIL.
#include "bindings.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>

#include "bandwidth.h"
#include "cpu.h"
#include "program.h"
#include "recurrent.h"
#include "suffix_draft.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tenfold {
namespace {

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Masks = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using AnyArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

template <class T>
nb::ndarray<nb::numpy, T> own(T* data, std::initializer_list<size_t> shape) {
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T>(data, shape, owner);
}

template <class T>
void need(const Array<T>& array, size_t count, const char* name, const char* call = "step") {
  if (array.shape(0) != count || count > static_cast<size_t>(std::numeric_limits<int>::max()))
    throw std::invalid_argument(std::string(call) + ": " + name + " has " + std::to_string(array.shape(0)) +
                                " entries, expected " + std::to_string(count));
}

Layout layout_of(const std::string& format, int group, bool wide, bool minimum) {
  Layout l;
  if (format == "f32")
    l.format = Format::F32;
  else if (format == "bf16")
    l.format = Format::BF16;
  else if (format == "q8")
    l.format = Format::Q8;
  else if (format == "q4")
    l.format = Format::Q4;
  else
    throw std::invalid_argument("format: " + format + " is none of f32, bf16, q8, q4");
  l.group = group;
  l.wide = wide;
  l.minimum = minimum;
  return l;
}

KvFormat kv_format_of(const std::string& name) {
  if (name == "bf16") return KvFormat::BF16;
  if (name == "f32") return KvFormat::F32;
  if (name == "q8") return KvFormat::Q8;
  throw std::invalid_argument("kv_format: " + name + " is none of bf16, f32, q8");
}

Activation activation_of(const std::string& name) {
  if (name == "silu") return Activation::Silu;
  if (name == "gelu") return Activation::Gelu;
  if (name == "none") return Activation::None;
  throw std::invalid_argument("activation: " + name + " is none of silu, gelu, none");
}

const Kernels& kernels_for(const std::string& isa) {
  const Kernels* kernels = kernels_of(isa);
  if (kernels == nullptr) throw std::invalid_argument("isa: this machine cannot run " + isa);
  return *kernels;
}

std::unique_ptr<Program> make_program(const std::string& isa, int threads, int max_rows, int max_logit_rows, int vocab,
                                      int kv_pages, const std::string& kv_format,
                                      const std::vector<std::tuple<int, int>>& kv, bool kv_bias) {
  std::vector<KvShape> shapes;
  for (const auto& [heads, dim] : kv) shapes.push_back({heads, dim});
  ProgramOptions options;
  options.kernels = &kernels_for(isa);
  options.threads = threads;
  options.max_rows = max_rows;
  options.max_logit_rows = max_logit_rows;
  options.vocab = vocab;
  options.kv_pages = kv_pages;
  options.kv_format = kv_format_of(kv_format);
  options.kv_bias = kv_bias;
  return std::make_unique<Program>(options, shapes);
}

nb::dlpack::dtype code_type(const Layout& l) {
  switch (l.format) {
    case Format::F32:
      return nb::dtype<float>();
    case Format::BF16:
      return nb::dtype<uint16_t>();
    case Format::Q8:
      return nb::dtype<int8_t>();
    default:
      return nb::dtype<uint8_t>();
  }
}

nb::dlpack::dtype scale_type(const Layout& l) {
  return {static_cast<uint8_t>(nb::dlpack::dtype_code::Float), static_cast<uint8_t>(l.wide ? 32 : 16), 1};
}

void write_rows(Program& program, int index, int first, const AnyArray& codes, std::optional<AnyArray> scale,
                std::optional<AnyArray> minimum) {
  Matrix& m = program.matrix(index);
  const size_t count = codes.ndim() == 2 ? codes.shape(0) : 0;
  if (count == 0 || codes.shape(1) != static_cast<size_t>(m.cols) || codes.dtype() != code_type(m.layout))
    throw std::invalid_argument("write_rows: codes have another shape or type than the matrix");
  if (first < 0 || first % kPanel != 0 || static_cast<size_t>(first) + count > static_cast<size_t>(m.rows))
    throw std::invalid_argument("write_rows: rows outside the matrix, or not from a multiple of 16");
  const auto check = [&](const std::optional<AnyArray>& a, bool wanted, const char* name) {
    if (a.has_value() != wanted)
      throw std::invalid_argument(std::string("write_rows: ") + name + " missing or unwanted");
    if (wanted && (a->ndim() != 2 || a->shape(0) != count ||
                   a->shape(1) != static_cast<size_t>(m.cols / m.layout.group) || a->dtype() != scale_type(m.layout)))
      throw std::invalid_argument(std::string("write_rows: ") + name + " has another shape or type than the matrix");
  };
  check(scale, m.layout.quantized(), "scale");
  check(minimum, m.layout.minimum, "minimum");
  const void* s = scale ? scale->data() : nullptr;
  const void* z = minimum ? minimum->data() : nullptr;
  nb::gil_scoped_release free;
  m.write_rows(first, static_cast<int>(count), codes.data(), s, z);
}

// Arrays of a StepBatch, in the order in which backends/native.py passes them.
nb::tuple step(Program& program, Array<int32_t> tokens, Array<int32_t> positions, Array<int32_t> row_offsets,
               Array<int32_t> cached_rows, Array<int32_t> page_offsets, Array<int32_t> pages, Array<int32_t> logit_rows,
               Array<float> temperature, Array<int32_t> top_k, Array<float> top_p, Array<float> min_p,
               Array<float> repetition, Array<float> presence, Array<float> frequency, Array<uint64_t> seed,
               Array<int64_t> position, Array<int32_t> history_offsets, Array<int32_t> history_tokens,
               Array<int32_t> history_counts, Array<int32_t> bias_offsets, Array<int32_t> bias_tokens,
               Array<float> bias_values, Array<int32_t> mask_rows, const Masks& masks, Array<int32_t> logprobs,
               bool want_logits, bool want_features, Array<int32_t> state_rows) {
  Batch b;
  const size_t rows = tokens.shape(0), sequences = cached_rows.shape(0), n = logit_rows.shape(0);
  need(positions, rows, "positions");
  need(pages, pages.shape(0), "pages");
  need(row_offsets, sequences + 1, "row_offsets");
  need(page_offsets, sequences + 1, "page_offsets");
  need(temperature, n, "temperature");
  need(top_k, n, "top_k");
  need(top_p, n, "top_p");
  need(min_p, n, "min_p");
  need(repetition, n, "repetition");
  need(presence, n, "presence");
  need(frequency, n, "frequency");
  need(seed, n, "seed");
  need(position, n, "position");
  need(history_offsets, n + 1, "history_offsets");
  need(history_counts, history_tokens.shape(0), "history_counts");
  need(bias_offsets, n + 1, "bias_offsets");
  need(bias_values, bias_tokens.shape(0), "bias_values");
  need(mask_rows, n, "mask_rows");
  need(logprobs, n, "logprobs");
  const size_t words = (static_cast<size_t>(program.options().vocab) + 31) / 32;
  if (masks.shape(0) > 0 && masks.shape(1) != words)
    throw std::invalid_argument("step: masks have " + std::to_string(masks.shape(1)) + " words, expected " +
                                std::to_string(words));
  b.rows = static_cast<int>(rows);
  b.sequences = static_cast<int>(sequences);
  b.logit_rows = static_cast<int>(n);
  b.tokens = tokens.data();
  b.positions = positions.data();
  b.row_offsets = row_offsets.data();
  b.cached_rows = cached_rows.data();
  b.page_offsets = page_offsets.data();
  b.pages = pages.data();
  b.page_count = static_cast<int>(pages.shape(0));
  b.selected = logit_rows.data();
  int top = 0;
  const auto part = [](const Array<int32_t>& offsets, size_t i, size_t whole, const char* name) {
    const int32_t begin = offsets.data()[i], end = offsets.data()[i + 1];
    if (begin < 0 || end < begin || static_cast<size_t>(end) > whole)
      throw std::invalid_argument(std::string("step: ") + name + " must ascend within their arrays");
    return std::pair<int, int>(begin, end - begin);
  };
  for (size_t i = 0; i < n; ++i) {
    SampleParams p;
    p.temperature = temperature.data()[i];
    p.top_k = top_k.data()[i];
    p.top_p = top_p.data()[i];
    p.min_p = min_p.data()[i];
    p.repetition = repetition.data()[i];
    p.presence = presence.data()[i];
    p.frequency = frequency.data()[i];
    p.seed = seed.data()[i];
    p.position = position.data()[i];
    const auto [h, hs] = part(history_offsets, i, history_tokens.shape(0), "history_offsets");
    p.history_tokens = history_tokens.data() + h;
    p.history_counts = history_counts.data() + h;
    p.history = hs;
    const auto [z, zs] = part(bias_offsets, i, bias_tokens.shape(0), "bias_offsets");
    p.bias_tokens = bias_tokens.data() + z;
    p.bias_values = bias_values.data() + z;
    p.biases = zs;
    const int32_t mask = mask_rows.data()[i];
    if (mask < -1 || mask >= static_cast<int64_t>(masks.shape(0)))
      throw std::invalid_argument("step: mask_rows has " + std::to_string(mask) + ", but there are " +
                                  std::to_string(masks.shape(0)) + " masks");
    p.mask = mask < 0 ? nullptr : masks.data() + static_cast<size_t>(mask) * words;
    p.logprobs = logprobs.data()[i];
    top = std::max(top, p.logprobs);
    b.sampling.push_back(p);
  }
  b.top = std::min(top, program.options().vocab);
  const size_t width = static_cast<size_t>(b.top), vocab = static_cast<size_t>(program.options().vocab);
  auto drawn = std::make_unique<int32_t[]>(n);
  auto chances = std::make_unique<float[]>(n);
  auto top_tokens = std::make_unique<int32_t[]>(n * width);
  auto top_chances = std::make_unique<float[]>(n * width);
  std::unique_ptr<float[]> logits, features, states;
  const size_t columns = static_cast<size_t>(program.feature_width());
  const size_t stated = state_rows.shape(0), state_width = static_cast<size_t>(program.state_width());
  std::fill_n(top_tokens.get(), n * width, -1);
  if (want_logits) logits.reset(new float[n * vocab]);
  if (want_features) features.reset(new float[n * columns]);
  // No more than there are rows: more are refused, and must not be allocated before.
  if (stated > 0) states.reset(new float[std::min(stated, rows) * state_width]);
  b.drawn = drawn.get();
  b.logprobs = chances.get();
  b.top_tokens = top_tokens.get();
  b.top_logprobs = top_chances.get();
  b.logits = logits.get();
  b.features = features.get();
  b.state_rows = static_cast<int>(std::min(stated, static_cast<size_t>(std::numeric_limits<int>::max())));
  b.stated = state_rows.data();
  b.states = states.get();
  {
    nb::gil_scoped_release free;
    program.step(b);
  }
  nb::object raw = nb::none(), tapped = nb::none(), hidden = nb::none();
  if (want_logits) raw = nb::cast(own(logits.release(), {n, vocab}));
  if (want_features) tapped = nb::cast(own(features.release(), {n, columns}));
  if (stated > 0) hidden = nb::cast(own(states.release(), {stated, state_width}));
  return nb::make_tuple(own(drawn.release(), {n}), own(chances.release(), {n}), own(top_tokens.release(), {n, width}),
                        own(top_chances.release(), {n, width}), raw, tapped, hidden);
}

std::unique_ptr<Recurrent> make_recurrent(const std::string& isa, int threads, int max_sequences, int vocab_size,
                                          const Array<int32_t>& token_ids, Program* team_of) {
  const std::vector<int32_t> ids(token_ids.data(), token_ids.data() + token_ids.shape(0));
  ProgramOptions options;
  options.kernels = &kernels_for(isa);
  options.threads = threads;
  options.max_rows = options.max_logit_rows = max_sequences;
  options.vocab = static_cast<int>(ids.size());
  options.tokens = vocab_size;
  options.kv_pages = 1;  // the least there can be; without layers it has no bytes
  return std::make_unique<Recurrent>(options, ids, team_of == nullptr ? nullptr : team_of->shared_team());
}

// Arrays of an UnrollBatch, in the order in which backends/native.py passes them.
nb::tuple unroll(Recurrent& recurrent, nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu> features,
                 Array<int32_t> tokens, Array<uint64_t> seed, Array<int64_t> position, Array<float> temperature,
                 Array<int32_t> lengths, Array<float> floor) {
  const size_t n = tokens.shape(0), width = static_cast<size_t>(recurrent.feature_width());
  const auto check = [n](const auto& array, const char* name) { need(array, n, name, "unroll"); };
  check(tokens, "tokens");
  check(seed, "seed");
  check(position, "position");
  check(temperature, "temperature");
  check(lengths, "lengths");
  check(floor, "floor");
  if (features.shape(0) != n || features.shape(1) != width)
    throw std::invalid_argument("unroll: features have another shape than [" + std::to_string(n) + ", " +
                                std::to_string(width) + "]");
  Unroll u;
  u.sequences = static_cast<int>(n);
  u.features = features.data();
  u.tokens = tokens.data();
  u.seed = seed.data();
  u.position = position.data();
  u.temperature = temperature.data();
  u.lengths = lengths.data();
  u.floor = floor.data();
  for (size_t i = 0; i < n; ++i) u.longest = std::max(u.longest, static_cast<int>(lengths.data()[i]));
  // A length beyond the limit is refused, and must not be allocated before.
  u.longest = std::min(u.longest, Recurrent::kLongest);
  const size_t longest = static_cast<size_t>(u.longest);
  std::unique_ptr<int32_t[]> drawn(new int32_t[n * longest]);
  std::unique_ptr<float[]> chances(new float[n * longest]());
  std::fill_n(drawn.get(), n * longest, -1);
  u.drawn = drawn.get();
  u.logprobs = chances.get();
  {
    nb::gil_scoped_release free;
    recurrent.unroll(u);
  }
  return nb::make_tuple(own(drawn.release(), {n, longest}), own(chances.release(), {n, longest}));
}

nb::bytes read_page(Program& program, int page) {
  program.pages().check_page(page, "read_page");
  return nb::bytes(program.pages().page(page), program.pages().page_bytes());
}

// The page's own bytes, [page_bytes], not a copy. The array keeps the program alive.
nb::object view_page(nb::handle self, int page) {
  Program& program = nb::cast<Program&>(self);
  program.pages().check_page(page, "view_page");
  return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>, nb::c_contig>(program.pages().page(page),
                                                                             {program.pages().page_bytes()}, self));
}

void write_page(Program& program, int page, const nb::bytes& data) {
  program.pages().check_page(page, "write_page");
  if (data.size() != program.pages().page_bytes()) throw std::invalid_argument("write_page: wrong number of bytes");
  std::memcpy(program.pages().page(page), data.c_str(), data.size());
}

// Used by tenfold.speculate.suffix. Calls take microseconds and keep the GIL.
void bind_suffix(nb::module_& m) {
  m.attr("SUFFIX_BUCKETS") =
      nb::make_tuple(SuffixRecord::kSources, SuffixRecord::kOthers, SuffixRecord::kLengths, SuffixRecord::kShares);
  nb::class_<SuffixRecord>(m, "SuffixRecord")
      .def(nb::init<>())
      .def("add", &SuffixRecord::add, "other"_a)
      .def("counts", [](const SuffixRecord& record) {
        std::vector<std::pair<float, float>> out;
        for (const auto& c : record.counts) out.emplace_back(c.right, c.seen);
        return out;
      });
  nb::class_<SuffixTraffic>(m, "SuffixTraffic")
      .def(nb::init<size_t, std::vector<float>>(), "tokens"_a, "prior"_a)
      .def("learn", &SuffixTraffic::learn, "tokens"_a, "scope"_a)
      .def(
          "find",
          [](const SuffixTraffic& traffic, const std::vector<int32_t>& context, uint32_t scope, int room) {
            std::vector<SuffixWindow::Match> matches(static_cast<size_t>(std::max(room, 0)));
            const int found = traffic.window().find(context.data() + context.size(), static_cast<int>(context.size()),
                                                    scope, matches.data(), static_cast<int>(matches.size()));
            std::vector<std::pair<int, int>> out;
            for (int i = 0; i < found; ++i) {
              const auto& match = matches[static_cast<size_t>(i)];
              out.emplace_back(match.length, traffic.window().token(match.place));
            }
            return out;
          },
          "context"_a, "scope"_a, "room"_a, "Matches as (length, token that followed).")
      .def("bytes", &SuffixTraffic::bytes);
  nb::class_<SuffixText>(m, "SuffixText")
      .def(nb::init<size_t, size_t>(), "expected"_a, "most"_a)
      .def("extend", &SuffixText::extend, "tokens"_a)
      .def(
          "propose",
          [](SuffixText& text, const SuffixTraffic& traffic, uint32_t scope, const SuffixRecord* shared, int count,
             float floor) {
            std::vector<int32_t> tokens;
            std::vector<float> survival;
            for (const auto& guess : text.propose(traffic, scope, shared, count, floor)) {
              tokens.push_back(guess.token);
              survival.push_back(guess.survival);
            }
            return nb::make_tuple(tokens, survival);
          },
          "traffic"_a, "scope"_a, "shared"_a.none(), "count"_a, "floor"_a)
      .def("record", &SuffixText::record, nb::rv_policy::reference_internal)
      .def("bytes", &SuffixText::bytes);
}

}  // namespace
}  // namespace tenfold

NB_MODULE(_native, m) {
  using namespace tenfold;
  m.doc() = "The native core: programs, kernels and KV pages. See native/program.h.";
  m.def("isa_levels", &isa_levels, "ISA levels this machine can run, best first.");
  m.def(
      "read_bandwidth",
      [](int threads, size_t bytes, int repeats) {
        if (threads < 1 || threads > 1024 || repeats < 1)
          throw std::invalid_argument("read_bandwidth: threads must be 1 to 1024, repeats positive");
        nb::gil_scoped_release free;
        return read_bandwidth(threads, bytes, repeats);
      },
      "threads"_a, "bytes"_a = size_t{256} << 20, "repeats"_a = 5, "Bytes per second read from memory.");
  m.def(
      "dot_product_peak",
      [](const std::string& isa, int threads, int repeats) {
        if (threads < 1 || threads > 1024 || repeats < 1)
          throw std::invalid_argument("dot_product_peak: threads must be 1 to 1024, repeats positive");
        const Kernels& kernels = kernels_for(isa);
        nb::gil_scoped_release free;
        return dot_product_peak(kernels, threads, repeats);
      },
      "isa"_a, "threads"_a, "repeats"_a = 5, "Multiplications of two bytes per second, out of registers.");
  m.def(
      "gumbel",
      [](const std::string& isa, uint64_t seed, int64_t position, int first, int count) {
        const Kernels* kernels = kernels_of(isa);
        if (kernels == nullptr || first < 0 || count < 0 || first > std::numeric_limits<int>::max() - count)
          throw std::invalid_argument("gumbel: bad arguments");
        auto out = std::make_unique<float[]>(static_cast<size_t>(count));
        kernels->gumbel(seed, position, first, count, out.get());
        return own(out.release(), {static_cast<size_t>(count)});
      },
      "isa"_a, "seed"_a, "position"_a, "first"_a, "count"_a, "The noise of tokens first .. first + count - 1.");

  nb::class_<Program>(m, "Program")
      .def_static("create", &make_program, "isa"_a, "threads"_a, "max_rows"_a, "max_logit_rows"_a, "vocab"_a,
                  "kv_pages"_a, "kv_format"_a, "kv"_a, "kv_bias"_a = false)
      .def(
          "add_matrix",
          [](Program& p, int rows, int cols, const std::string& format, int group, bool wide, bool minimum) {
            return p.add_matrix(rows, cols, layout_of(format, group, wide, minimum));
          },
          "rows"_a, "cols"_a, "format"_a, "group"_a, "wide"_a, "minimum"_a)
      .def("write_rows", &write_rows, "matrix"_a, "first"_a, "codes"_a, "scale"_a.none(), "minimum"_a.none())
      .def(
          "matrix_bytes", [](Program& p, int index) { return p.matrix(index).bytes(); }, "matrix"_a)
      .def(
          "read_row",
          [](Program& p, int index, int row) {
            const Matrix& matrix = p.matrix(index);
            if (row < 0 || row >= matrix.rows) throw std::invalid_argument("read_row: row out of range");
            auto out = std::make_unique<float[]>(static_cast<size_t>(matrix.cols));
            matrix.read_row(row, out.get());
            return own(out.release(), {static_cast<size_t>(matrix.cols)});
          },
          "matrix"_a, "row"_a)
      .def(
          "add_vector",
          [](Program& p, Array<float> data) { return p.add_vector(data.data(), static_cast<int>(data.shape(0))); },
          "data"_a)
      .def("add_value", &Program::add_value, "width"_a, "selected"_a)
      .def("add_rope", &Program::add_rope, "frequencies"_a, "factor"_a)
      .def("add_embed", &Program::add_embed, "matrix"_a, "scale"_a, "output"_a)
      .def(
          "add_linear",
          [](Program& p, int input, std::tuple<int, float, float> norm, const std::vector<std::tuple<int, int>>& parts,
             const std::string& gate, int residual, int output, int column) {
            std::vector<LinearPart> list;
            for (const auto& [matrix, bias] : parts) list.push_back({matrix, bias});
            const auto& [weight, eps, offset] = norm;
            p.add_linear(input, {weight, eps, offset}, list, activation_of(gate), residual, output, column);
          },
          "input"_a, "norm"_a, "parts"_a, "gate"_a, "residual"_a, "output"_a, "column"_a = -1)
      .def(
          "add_gate",
          [](Program& p, const std::string& activation, int first, int second, int output) {
            p.add_gate(activation_of(activation), first, second, output);
          },
          "activation"_a, "first"_a, "second"_a, "output"_a)
      .def("add_sum", &Program::add_sum, "first"_a, "second"_a, "output"_a)
      .def("run_modular", &Program::run_modular, "modular"_a)
      .def(
          "add_attention",
          [](Program& p, int input, int layer, int heads, int kv_heads, int head_dim, int window, float scale,
             float softcap, std::tuple<int, float, float> query_norm, std::tuple<int, float, float> key_norm, int rope,
             int output) {
            const auto& [qw, qe, qo] = query_norm;
            const auto& [kw, ke, ko] = key_norm;
            p.add_attention(
                input, {layer, heads, kv_heads, head_dim, window, scale, softcap, {qw, qe, qo}, {kw, ke, ko}, rope},
                output);
          },
          "input"_a, "layer"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "window"_a, "scale"_a, "softcap"_a,
          "query_norm"_a, "key_norm"_a, "rope"_a, "output"_a)
      .def(
          "add_norm",
          [](Program& p, int input, std::tuple<int, float, float> norm, int residual, int output) {
            const auto& [weight, eps, offset] = norm;
            p.add_norm(input, {weight, eps, offset}, residual, output);
          },
          "input"_a, "norm"_a, "residual"_a, "output"_a)
      .def("add_scale", &Program::add_scale, "input"_a, "factor"_a, "output"_a)
      .def("add_select", &Program::add_select, "input"_a, "output"_a)
      .def("add_softcap", &Program::add_softcap, "value"_a, "cap"_a)
      .def("add_input", &Program::add_input, "output"_a)
      .def("add_concat", &Program::add_concat, "inputs"_a, "output"_a)
      .def("add_tap", &Program::add_tap, "value"_a, "column"_a)
      .def(
          "add_states",
          [](Program& p, int value, std::tuple<int, float, float> norm) {
            const auto& [weight, eps, offset] = norm;
            p.add_states(value, {weight, eps, offset});
          },
          "value"_a, "norm"_a)
      .def("finish", &Program::finish, "logits"_a)
      .def("step", &step)
      .def("weight_bytes", &Program::weight_bytes)
      .def("fix_threads", &Program::fix_threads, "threads"_a)
      .def("threads_used", &Program::threads_used)
      .def("page_bytes", [](Program& p) { return p.pages().page_bytes(); })
      .def(
          "copy_rows", [](Program& p, int source, int target, int rows) { p.pages().copy_rows(source, target, rows); },
          "source"_a, "target"_a, "rows"_a)
      .def(
          "set_bias",
          [](Program& p, int page, int layer, int head, Array<float> values) {
            if (values.shape(0) != kPageRows)
              throw std::invalid_argument("set_bias: needs a value for each of 16 lines");
            p.pages().set_bias(page, layer, head, values.data());
          },
          "page"_a, "layer"_a, "head"_a, "values"_a)
      .def("read_page", &read_page, "page"_a)
      .def("view_page", &view_page, "page"_a)
      .def("write_page", &write_page, "page"_a, "data"_a);

  bind_suffix(m);
  bind_speculation(m);
  nb::class_<Recurrent>(m, "Recurrent")
      .def_static("create", &make_recurrent, "isa"_a, "threads"_a, "max_sequences"_a, "vocab_size"_a, "token_ids"_a,
                  "team_of"_a.none())
      .def_prop_ro("program", &Recurrent::program, nb::rv_policy::reference_internal)
      .def("end_first", &Recurrent::end_first, "logits"_a, "state"_a)
      .def("finish", &Recurrent::finish, "logits"_a, "state"_a)
      .def("unroll", &unroll);
}
