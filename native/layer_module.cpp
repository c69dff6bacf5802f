// The Python face of the layer operations. Tensors come as addresses; octavo/kernels/layer.py checks their types.
#include "layer_module.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "held_plan.h"
#include "layer_program.h"
#include "threads.h"

namespace nb = nanobind;

namespace octavo {
namespace {

constexpr int64_t kBrief = 1 << 17;  // elements: below it, giving up the interpreter lock costs more than it gives

Dtype row_type(int number) {
  if (number < 0 || number > static_cast<int>(Dtype::f16))
    throw std::invalid_argument("dtype: 0 is float32, 1 bfloat16, 2 float16");
  return static_cast<Dtype>(number);
}

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

template <class Run>
void unlocked_if(bool longer, Run run) {
  if (!longer) return run();
  nb::gil_scoped_release unlocked;
  run();
}

Norm norm_of(uintptr_t weight, uintptr_t bias, int width, int64_t weight_head, float eps, bool centred, bool rounds) {
  if (width < 1) throw std::invalid_argument("a norm has at least one element");
  return {at<const float>(weight), at<const float>(bias), width, weight_head, eps, centred, rounds};
}

const LayerKernels& kernels_named(const std::string& name) {
  for (const LayerKernels* one : layer_kernels())
    if (name == one->name) return *one;
  throw std::invalid_argument("no layer kernels named " + name + " run on this processor");
}

// What serves where attention runs on the set of this name: it may have a set beside it that rounds faster.
const LayerKernels& kernels_beside(const std::string& name) {
  for (const LayerKernels* one : layer_kernels())
    if (name == one->name || name + "bf16" == one->name) return *one;
  return kernels_named(name);
}

std::vector<std::string> set_names() {
  std::vector<std::string> names;
  for (const LayerKernels* one : layer_kernels()) names.emplace_back(one->name);
  return names;
}

class LayerSet {
 public:
  explicit LayerSet(const std::string& name) {
    kernels_ = &kernels_named(name);
  }

  void residual(int dtype, int width, uintptr_t x, uintptr_t delta, uintptr_t second, const Norm* before, float by,
                uintptr_t sum, const Norm* after, uintptr_t out, int64_t rows, int threads) const {
    if (width < 1 || (before && before->width != width) || (after && after->width != width))
      throw std::invalid_argument("norms are as wide as the rows");
    Residual work{row_type(dtype), width, at<const char>(x), at<const char>(delta), at<const char>(second), before,
                  by, at<char>(sum), after, at<char>(out)};
    unlocked_if(rows * width > kBrief, [&] { run_residual(*kernels_, work, rows, threads); });
  }

  void turn(const Pages& pages, int dtype, uintptr_t qkv, int64_t row, int q_heads, const Norm* q_norm,
            const Norm* k_norm, int rope, int rotary, int table, uintptr_t cos, uintptr_t sin, int64_t table_row,
            bool rounds, uintptr_t blocks, uintptr_t offsets, int64_t rows, int threads) const {
    Turn work{&pages, row_type(dtype), at<char>(qkv), row, q_heads, q_norm, k_norm, static_cast<Rope>(rope), rotary,
              row_type(table), at<const char>(cos), at<const char>(sin), table_row, nullptr, rounds,
              at<const int64_t>(blocks), at<const int64_t>(offsets)};
    if (rope < 0 || rope > static_cast<int>(Rope::halves_packed) || rotary < 0 || rotary % 2 || rotary > pages.k_dim)
      throw std::invalid_argument("an even number of elements of a head is turned");
    const int64_t q_all = int64_t{q_heads} * pages.k_dim, k_all = int64_t{pages.kv_heads} * pages.k_dim;
    if (row < q_all + k_all + int64_t{pages.kv_heads} * pages.v_dim)
      throw std::invalid_argument("a row is shorter than its heads");
    if ((q_norm && q_all % q_norm->width) || (k_norm && k_all % k_norm->width))
      throw std::invalid_argument("norms divide the heads");
    for (int64_t t = 0; t < rows; t++)
      if (work.blocks[t] < 0 || work.blocks[t] >= pages.units || work.offsets[t] < 0 ||
          work.offsets[t] >= pages.block_tokens)
        throw std::invalid_argument("packed token " + std::to_string(t) + " is written outside the pages");
    unlocked_if(rows * row > kBrief, [&] { run_turn(*kernels_, work, rows, threads); });
  }

  void gate(int act, int dtype, bool gated, int width, uintptr_t rows_at, uintptr_t out, int64_t rows,
            int threads) const {
    if (act < 0 || act > static_cast<int>(Act::relu_squared) || width < 1)
      throw std::invalid_argument("no such activation");
    Gate work{static_cast<Act>(act), row_type(dtype), gated, width, at<const char>(rows_at), at<char>(out)};
    unlocked_if(rows * width > kBrief, [&] { run_gate(*kernels_, work, rows, threads); });
  }

 private:
  const LayerKernels* kernels_ = nullptr;
};

// ---- programs ----

using Kind = Operation::Kind;

Place place_of(int number) {
  if (number < 0 || number >= kPlaces) throw std::invalid_argument("no such place");
  return static_cast<Place>(number);
}

std::vector<Operation>& part(LayerProgram& program, bool after) { return after ? program.after : program.before; }

void add_linear(LayerProgram& self, bool after, const Linear& linear, int from, int to) {
  Operation one{};
  one.kind = Kind::linear;
  one.linear = &linear;
  one.from = place_of(from);
  one.to = place_of(to);
  part(self, after).push_back(one);
}

// Places below zero: nothing is added.
void add_sum(LayerProgram& self, bool is_after, int from, int second, const Norm* before, float by, const Norm* after,
             int to) {
  Operation one{};
  one.kind = Kind::sum;
  one.adds = from >= 0;
  one.doubles = second >= 0;
  one.from = one.adds ? place_of(from) : Place::delta;
  one.second = one.doubles ? place_of(second) : Place::second;
  one.before = before;
  one.by = by;
  one.after = after;
  one.to = place_of(to);
  part(self, is_after).push_back(one);
}

void add_gate(LayerProgram& self, bool after, int act, bool gated, int from, int to) {
  if (act < 0 || act > static_cast<int>(Act::relu_squared)) throw std::invalid_argument("no such activation");
  Operation one{};
  one.kind = Kind::gate;
  one.act = static_cast<Act>(act);
  one.gated = gated;
  one.from = place_of(from);
  one.to = place_of(to);
  part(self, after).push_back(one);
}

void set_attending(LayerProgram& self, const Pages& pages, int q_heads, const Norm* q_norm, const Norm* k_norm,
                   int rope, int rotary, bool rounds, float scale, float softcap, uintptr_t sinks,
                   const std::vector<int>& of_step) {
  if (of_step.size() != 3) throw std::invalid_argument("a plan, a write and a table are wanted");
  if (rope < 0 || rope > static_cast<int>(Rope::halves_packed) || rotary < 0 || rotary % 2 || rotary > pages.k_dim)
    throw std::invalid_argument("an even number of elements of a head is turned");
  const int64_t q_all = int64_t{q_heads} * pages.k_dim, k_all = int64_t{pages.kv_heads} * pages.k_dim;
  if ((q_norm && q_all % q_norm->width) || (k_norm && k_all % k_norm->width))
    throw std::invalid_argument("norms divide the heads");
  Attending& to = self.attending;
  to.turn.pages = &pages;
  to.turn.dtype = self.dtype();
  to.turn.q_heads = q_heads;
  to.turn.q_norm = q_norm;
  to.turn.k_norm = k_norm;
  to.turn.rope = static_cast<Rope>(rope);
  to.turn.rotary = rotary;
  to.turn.rounds = rounds;
  to.group = q_heads / pages.kv_heads;
  to.scale = scale;
  to.softcap = softcap;
  to.sinks = at<const float>(sinks);
  to.plan = of_step[0];
  to.write = of_step[1];
  to.table = of_step[2];
}

// Layers that run one after the other, and the memory they share. Not for two threads at once.
class LayerStack {
 public:
  explicit LayerStack(const std::string& set) : attention_(set) {}

  void add(const LayerProgram& program) {
    program.check();
    programs_.push_back(&program);
  }

  // Layers first .. last - 1 over rows at `x`, into `out`; with `keep`, the last of them over those rows alone.
  void run(int first, int last, const LayerStep& step, uintptr_t x, uintptr_t out, uintptr_t handed, uintptr_t keep,
           int64_t kept) {
    if (first < 0 || last > static_cast<int>(programs_.size()) || first >= last)
      throw std::invalid_argument("there are no such layers");
    nb::gil_scoped_release unlocked;
    auto all = [&] {
      const char* from = at<const char>(x);
      for (int i = first; i < last; i++) {
        const bool ends = i == last - 1;
        LayerCall call{from, at<char>(out), at<char>(handed), ends ? at<const int64_t>(keep) : nullptr, kept};
        programs_[i]->run(step, attention_, space_, call);
        from = call.out;
      }
    };
    with_team(step.threads, [](void* run) { (*static_cast<decltype(all)*>(run))(); }, &all);
  }

  // From now on, from nothing, by a clock of Times.
  void time(int clock) {
    if (clock < 0 || clock > static_cast<int>(Times::Clock::own)) throw std::invalid_argument("no such clock");
    space_.times = Times{};
    space_.times.clock = static_cast<Times::Clock>(clock);
  }

  // (kind, seconds, calls) of each kind of operation.
  std::vector<std::tuple<std::string, double, int64_t>> times() const {
    std::vector<std::tuple<std::string, double, int64_t>> found;
    for (int kind = 0; kind < Times::kinds; kind++)
      found.emplace_back(Times::kNames[kind], 1e-9 * space_.times.spent[kind], space_.times.calls[kind]);
    return found;
  }

 private:
  KernelSet attention_;
  Workspace space_;
  std::vector<const LayerProgram*> programs_;
};

}  // namespace

void bind_layer(nb::module_& m) {
  nb::class_<Norm>(m, "Norm").def("__init__", [](Norm* self, uintptr_t weight, uintptr_t bias, int width,
                                                 int64_t weight_head, float eps, bool centred, bool rounds) {
    new (self) Norm(norm_of(weight, bias, width, weight_head, eps, centred, rounds));
  });
  m.def("layer_instruction_sets", &set_names);
  nb::class_<LayerSet>(m, "Layers")
      .def(nb::init<const std::string&>())
      .def("residual", &LayerSet::residual, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg().none(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg())
      .def("turn", &LayerSet::turn, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
           nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg())
      .def("gate", &LayerSet::gate);
  nb::class_<LayerProgram>(m, "LayerProgram")
      .def("__init__", [](LayerProgram* self, const std::string& set, int dtype,
                          const std::vector<int>& widths) {
        new (self) LayerProgram(kernels_beside(set), row_type(dtype), widths);
      })
      .def("linear", &add_linear, nb::keep_alive<1, 3>())
      .def("sum", &add_sum, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg().none(), nb::arg(),
           nb::keep_alive<1, 5>(), nb::keep_alive<1, 7>())
      .def("gate", &add_gate)
      .def("attend", &set_attending, nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>(),
           nb::keep_alive<1, 5>());
  nb::class_<LayerStep>(m, "LayerStep")
      .def("__init__", [](LayerStep* self, int64_t rows, int threads) {
        new (self) LayerStep();
        self->rows = rows;
        self->threads = threads;
      })
      .def("plan", [](LayerStep& self, const HeldPlan& plan) { self.plans.push_back(&plan.plan); },
           nb::keep_alive<1, 2>())
      // Returns how many rows attend in the last layer: all of them where hardly any would be spared.
      .def("last", [](LayerStep& self, const HeldPlan& held, uintptr_t keep, int64_t kept) {
        const Plan& whole = held.plan;
        const Step step = HeldPlan::step(held.rows, held.offsets, held.starts, held.contexts, held.tables,
                                         whole.block_tokens);
        auto made = std::make_unique<const Plan>(step, whole.sight, whole.group, whole.kv_heads, at<const int64_t>(keep),
                                                 kept);
        if (4 * static_cast<int64_t>(made->wanted.size()) <= 3 * self.rows) self.last = std::move(made);
        return self.last ? static_cast<int64_t>(self.last->wanted.size()) : self.rows;
      }, nb::keep_alive<1, 2>())
      .def("write", [](LayerStep& self, uintptr_t blocks, uintptr_t offsets) {
        self.writes.push_back({at<const int64_t>(blocks), at<const int64_t>(offsets)});
      })
      .def("table", [](LayerStep& self, int index, uintptr_t cos, uintptr_t sin, int64_t row, uintptr_t positions,
                       int64_t rows, int dtype) {
        if (index < 0 || index > 4096) throw std::invalid_argument("no such table");
        if (self.tables.size() <= static_cast<size_t>(index)) self.tables.resize(index + 1);
        self.tables[index] = {at<const char>(cos), at<const char>(sin), row, at<const int64_t>(positions), rows,
                              row_type(dtype)};
      });
  nb::class_<LayerStack>(m, "LayerStack")
      .def(nb::init<const std::string&>())
      .def("add", &LayerStack::add, nb::keep_alive<1, 2>())
      .def("run", &LayerStack::run)
      .def("time", &LayerStack::time)
      .def("times", &LayerStack::times);
}

}  // namespace octavo
