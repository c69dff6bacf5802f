// The Python face of the linear kernels. Tensors come as addresses; octavo/kernels/linear.py checks their types.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "linear_module.h"

namespace nb = nanobind;

namespace octavo {
namespace {

Dtype dtype_of(int number) {
  if (number < 0 || number > static_cast<int>(Dtype::i4) || number == static_cast<int>(Dtype::e4m3))
    throw std::invalid_argument("dtype: 0 is float32, 1 bfloat16, 2 float16, 3 int8, 5 int4");
  return static_cast<Dtype>(number);
}

LinearCall call_of(uintptr_t x, int x_dtype, int64_t x_stride, int64_t rows, uintptr_t out, int out_dtype,
                   int64_t out_stride) {
  if (quantised(dtype_of(x_dtype)) || quantised(dtype_of(out_dtype)))
    throw std::invalid_argument("rows are float32, bfloat16 or float16");
  return {reinterpret_cast<const char*>(x), dtype_of(x_dtype), x_stride, rows,
          reinterpret_cast<char*>(out), dtype_of(out_dtype), out_stride};
}

void put(Linear& self, int64_t first, int64_t rows, int from, uintptr_t weights, int64_t stride, uintptr_t scales,
         uintptr_t bias, int threads) {
  nb::gil_scoped_release unlocked;
  self.put(first, rows, dtype_of(from), reinterpret_cast<const char*>(weights), stride,
           reinterpret_cast<const float*>(scales), reinterpret_cast<const float*>(bias), threads);
}

void run(const Linear& self, uintptr_t x, int x_dtype, int64_t x_stride, int64_t rows, uintptr_t out, int out_dtype,
         int64_t out_stride, int threads) {
  LinearCall call = call_of(x, x_dtype, x_stride, rows, out, out_dtype, out_stride);
  nb::gil_scoped_release unlocked;
  self.run(call, threads);
}

void run_gated(const Linear& self, uintptr_t x, int dtype, int64_t x_stride, int64_t rows, uintptr_t out, int64_t out_stride,
               int act, int threads) {
  LinearCall call = call_of(x, dtype, x_stride, rows, out, dtype, out_stride);
  if (!self.gates(call.x_dtype) || act < 0 || act > static_cast<int>(Act::relu_squared))
    throw std::invalid_argument("this matrix does not gate such rows");
  call.gated = true;
  call.act = static_cast<Act>(act);
  nb::gil_scoped_release unlocked;
  self.run(call, threads);
}

void argmax(const Linear& self, uintptr_t x, int x_dtype, int64_t x_stride, int64_t rows, int out_dtype,
            uintptr_t values, uintptr_t indices, int threads) {
  LinearCall call = call_of(x, x_dtype, x_stride, rows, 0, out_dtype, 0);
  nb::gil_scoped_release unlocked;
  self.argmax(call, threads, reinterpret_cast<float*>(values), reinterpret_cast<int64_t*>(indices));
}

void read(const Linear& self, uintptr_t outputs, int64_t count, int dtype, uintptr_t to, int threads) {
  const Dtype to_type = dtype_of(dtype);
  if (quantised(to_type)) throw std::invalid_argument("weights are read as float32, bfloat16 or float16");
  nb::gil_scoped_release unlocked;
  self.read(reinterpret_cast<const int64_t*>(outputs), count, to_type, reinterpret_cast<char*>(to), threads);
}

}  // namespace

void bind_linear(nb::module_& m) {
  m.def("linear_instruction_sets",
        [] {
          std::vector<std::string> names;
          for (const LinearSet& one : linear_sets()) names.emplace_back(one.name);
          return names;
        },
        "Names of the linear kernels that run on this processor, the fastest first.");
  nb::class_<Linear>(m, "Linear")
      .def("__init__", [](Linear* self, const std::string& set, int dtype, int64_t outputs,
                          int64_t inputs) { new (self) Linear(set, dtype_of(dtype), outputs, inputs); })
      .def("put", &put)
      .def("reset", [](Linear& self, int dtype) { self.reset(dtype_of(dtype)); })
      .def("run", &run)
      .def("run_gated", &run_gated)
      .def("gates", [](const Linear& self, int dtype) { return self.gates(dtype_of(dtype)); })
      .def("argmax", &argmax)
      .def("read", &read)
      .def_prop_ro("instruction_set", &Linear::set)
      .def_prop_ro("rounds_inputs", &Linear::rounds_inputs)
      .def_prop_ro("bytes", &Linear::bytes);
}

}  // namespace octavo
