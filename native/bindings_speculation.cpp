// The Python face of speculation/: a step makes few calls and few objects, for each costs as much as a decision.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "speculation/controller.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tenfold {
namespace {

using namespace speculation;

// A list or tuple as it is, of another sequence a list.
class Items {
 public:
  explicit Items(nb::handle sequence) : items_(nb::steal(PySequence_Fast(sequence.ptr(), "must be a sequence"))) {
    if (!items_.is_valid()) throw nb::python_error();
  }
  size_t size() const { return static_cast<size_t>(PySequence_Fast_GET_SIZE(items_.ptr())); }
  nb::handle operator[](size_t i) const {
    if (i >= size()) throw std::invalid_argument("a sequence changed while it was read");
    return PySequence_Fast_GET_ITEM(items_.ptr(), static_cast<Py_ssize_t>(i));
  }

 private:
  nb::object items_;
};

// The field of a named tuple.
nb::handle field(nb::handle tuple, size_t i, size_t fields) {
  if (!PyTuple_Check(tuple.ptr()) || static_cast<size_t>(PyTuple_GET_SIZE(tuple.ptr())) < fields)
    throw nb::type_error("must be a tuple of the seam's fields");
  return PyTuple_GET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i));
}

int64_t integer(nb::handle number) {
  int overflow = 0;
  int64_t value;
  if (PyLong_Check(number.ptr())) {
    value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  } else {
    const nb::object index = nb::steal(PyNumber_Index(number.ptr()));
    if (!index.is_valid()) throw nb::python_error();
    value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  }
  if (overflow != 0) return overflow > 0 ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int64_t>::min();
  return value;
}

// -1: a number that is no token.
int32_t token(nb::handle number) {
  const int64_t value = integer(number);
  return value < 0 || value > std::numeric_limits<int32_t>::max() ? -1 : static_cast<int32_t>(value);
}

double real(nb::handle number) {
  const double value = PyFloat_AsDouble(number.ptr());
  if (value == -1.0 && PyErr_Occurred()) throw nb::python_error();
  return value;
}

nb::object list_of(std::span<const int32_t> tokens) {
  nb::object list = nb::steal(PyList_New(static_cast<Py_ssize_t>(tokens.size())));
  if (!list.is_valid()) throw nb::python_error();
  for (size_t j = 0; j < tokens.size(); ++j) {
    PyObject* number = PyLong_FromLong(tokens[j]);
    if (number == nullptr) throw nb::python_error();
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(j), number);
  }
  return list;
}

// Of each draft what is of use: `lengths` tokens at most.
Drafts drafts_of(nb::handle drafts, const std::vector<int>& lengths) {
  Drafts found;
  const Items items(drafts);
  for (size_t k = 0; k < items.size(); ++k) {
    const Items tokens(field(items[k], 0, 3)), survival(field(items[k], 1, 3));
    size_t count = tokens.size();
    if (k < lengths.size()) count = std::min(count, static_cast<size_t>(lengths[k]));
    if (survival.size() < count)
      throw std::invalid_argument("a draft has " + std::to_string(tokens.size()) + " tokens and " +
                                  std::to_string(survival.size()) + " chances of survival");
    for (size_t j = 0; j < count; ++j) {
      found.tokens.push_back(token(tokens[j]));
      found.survival.push_back(real(survival[j]));
    }
    const int64_t quality = integer(field(items[k], 2, 3));
    found.add(static_cast<int>(std::clamp<int64_t>(quality, -1, std::numeric_limits<int>::max())));
  }
  return found;
}

nb::object question_of(const Controller& controller, bool asks) {
  if (!asks) return nb::none();
  const Question& question = controller.question();
  return nb::make_tuple(question.source, question.asked, question.lengths);
}

// `outcomes`: those of tenfold.speculate.base, of the sequences in `slots`; see Outcome.
void observe(Controller& controller, const std::vector<int>& slots, nb::handle outcomes, int rows, double step_ms) {
  const Items items(outcomes);
  if (items.size() != slots.size()) throw std::invalid_argument("observe: every outcome has a slot");
  std::vector<int32_t> drawn;
  std::vector<size_t> ends;
  std::vector<Outcome> found(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    found[i].slot = slots[i];
    found[i].drafted = integer(field(items[i], 1, 4));
    found[i].accepted = integer(field(items[i], 2, 4));
    const Items tokens(field(items[i], 3, 4));
    for (size_t j = 0; j < tokens.size(); ++j) drawn.push_back(token(tokens[j]));
    ends.push_back(drawn.size());
  }
  for (size_t i = 0; i < slots.size(); ++i)
    found[i].drawn = std::span(drawn).subspan(i ? ends[i - 1] : 0, ends[i] - (i ? ends[i - 1] : 0));
  controller.observe(found, rows, step_ms);
}

void bind_controller(nb::module_& m) {
  nb::class_<Controller>(m, "SpeculationController")
      .def(nb::init<const std::vector<int>&, const std::vector<int>&, const std::vector<double>&, int, double, int>(),
           "qualities"_a, "rows"_a, "ms"_a, "max_draft"_a, "token_ms"_a, "depth"_a)
      .def("begin", &Controller::begin, "namespace"_a)
      .def("end", &Controller::end, "slot"_a)
      .def(
          "propose",
          [](Controller& controller, const std::vector<int>& slots, const std::vector<int64_t>& lengths, int rows,
             const std::vector<int>& limits) {
            return question_of(controller, controller.propose(slots, lengths, rows, limits));
          },
          "slots"_a, "lengths"_a, "rows"_a, "limits"_a)
      .def(
          "answer",
          [](Controller& controller, nb::handle drafts, double took_ms) {
            return question_of(controller,
                               controller.answer(drafts_of(drafts, controller.question().lengths), took_ms));
          },
          "drafts"_a, "took_ms"_a)
      .def("drafts",
           [](const Controller& controller) {
             nb::list drafts;
             for (size_t i = 0; i < controller.sequences(); ++i) drafts.append(list_of(controller.draft(i)));
             return drafts;
           })
      .def("observe", &observe, "slots"_a, "outcomes"_a, "rows"_a, "step_ms"_a)
      .def("counts", [](const Controller& controller) {
        nb::list sources;
        for (const Source& s : controller.sources())
          sources.append(nb::make_tuple(s.drafts, s.drafted, s.accepted, s.asks, s.asking_ms));
        nb::dict idle;
        for (size_t why = 0; why < controller.idle().size(); ++why)
          if (controller.idle()[why] > 0) idle[Controller::kIdleNames[why]] = controller.idle()[why];
        return nb::make_tuple(controller.steps(), controller.committed(), sources, idle);
      });
}

// Its parts, for tests.
void bind_parts(nb::module_& m) {
  m.attr("SPECULATION_CONTEXTS") = kContexts;
  m.def("speculation_context", &context_of, "value"_a);
  m.def("shifted", &shifted, "chance"_a, "odds"_a);
  nb::class_<LiveCurve>(m, "LiveCurve")
      .def(nb::init<const std::vector<int>&, const std::vector<double>&>(), "rows"_a, "ms"_a)
      .def("at", &LiveCurve::at, "rows"_a)
      .def(
          "beyond",
          [](const LiveCurve& curve, int rows, int most) {
            std::vector<double> added;
            curve.beyond(rows, most, added);
            return added;
          },
          "rows"_a, "most"_a)
      .def("to_look_at", &LiveCurve::to_look_at, "rows"_a, "most"_a)
      .def("doubtful", &LiveCurve::doubtful, "rows"_a)
      .def("observe", &LiveCurve::observe, "rows"_a, "step_ms"_a);
  const auto checked = [](const Calibration& calibration, int cell) {
    if (cell < 0 || cell >= calibration.cells()) throw nb::index_error("there is no such cell");
    return cell;
  };
  nb::class_<Calibration>(m, "Calibration")
      .def(nb::init<int>(), "qualities"_a)
      .def(
          "cell",
          [](const Calibration& calibration, int quality, int position, double claim) {
            if (quality < 0 || quality >= calibration.qualities() || position < 0)
              throw nb::index_error("there is no such quality or position");
            return calibration.cell(quality, position, claim);
          },
          "quality"_a, "position"_a, "claim"_a)
      .def(
          "add", [checked](Calibration& c, int cell, bool stood) { c.add(checked(c, cell), stood); }, "cell"_a,
          "stood"_a)
      .def(
          "mean", [checked](const Calibration& c, int cell) { return c.mean(checked(c, cell)); }, "cell"_a)
      .def("low", [checked](const Calibration& c, int cell) { return c.low(checked(c, cell)); }, "cell"_a);
  nb::class_<Odds>(m, "Odds")
      .def(nb::init<double, double>(), "memory"_a, "prior"_a)
      .def("add", &Odds::add, "chance"_a, "stood"_a)
      .def("fade", &Odds::fade, "kept"_a)
      .def_prop_ro("factor", &Odds::factor);
  nb::class_<Blend>(m, "Blend")
      .def(nb::init<double, double, double>(), "memory"_a, "share"_a, "weight"_a)
      .def("add", &Blend::add, "common"_a, "own"_a, "stood"_a)
      .def_prop_ro("share", &Blend::share);
}

}  // namespace

void bind_speculation(nb::module_& m) {
  bind_controller(m);
  bind_parts(m);
}

}  // namespace tenfold
