// The Python face of the layer operations. Tensors come as addresses; octavo/kernels/layer.py checks their types.
#include "layer_module.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "layer.h"

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

class LayerSet {
 public:
  explicit LayerSet(const std::string& name) {
    for (const LayerKernels* one : layer_kernels())
      if (name == one->name) kernels_ = one;
    if (!kernels_) throw std::invalid_argument("no layer kernels named " + name + " run on this processor");
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
              row_type(table), at<const char>(cos), at<const char>(sin), table_row, rounds,
              at<const int64_t>(blocks), at<const int64_t>(offsets)};
    if (rope < 0 || rope > static_cast<int>(Rope::pairs_packed) || rotary < 0 || rotary % 2 || rotary > pages.k_dim)
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

}  // namespace

void bind_layer(nb::module_& m) {
  nb::class_<Norm>(m, "Norm").def("__init__", [](Norm* self, uintptr_t weight, uintptr_t bias, int width,
                                                 int64_t weight_head, float eps, bool centred, bool rounds) {
    new (self) Norm(norm_of(weight, bias, width, weight_head, eps, centred, rounds));
  });
  nb::class_<LayerSet>(m, "Layers")
      .def(nb::init<const std::string&>())
      .def("residual", &LayerSet::residual, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg().none(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg())
      .def("turn", &LayerSet::turn, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
           nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg())
      .def("gate", &LayerSet::gate);
}

}  // namespace octavo
