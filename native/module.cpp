// The Python face of the kernels: checks sizes and addresses' bounds, gives up the interpreter lock, hands out work.
// Tensors come as addresses and strides; octavo/kernels/cpu.py reads them off torch tensors and checks their types.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "copies_module.h"
#include "held_plan.h"
#include "kernel_set.h"
#include "layer_module.h"
#include "linear_module.h"
#include "threads.h"
#include "types.h"

namespace nb = nanobind;

namespace octavo {
namespace {

std::vector<std::string> names() {
  std::vector<std::string> all;
  for (const Kernels* one : attention_kernels()) all.emplace_back(one->name);
  return all;
}

Dtype dtype_of(int number, Dtype most = Dtype::f16) {
  if (number < 0 || number > static_cast<int>(most))
    throw std::invalid_argument("dtype: 0 is float32, 1 bfloat16, 2 float16; of pages also 3 int8, 4 float8 e4m3");
  return static_cast<Dtype>(number);
}

// Addresses of keys, values and their scales; strides of a head and a token in bytes, for each of k, v and scales;
// sizes: heads, tokens of a block, dims of k and v.
Pages pages_of(int dtype, const std::vector<uintptr_t>& at, int64_t units, int64_t unit_bytes,
               const std::vector<int64_t>& strides, const std::vector<int>& sizes) {
  if (at.size() != 4 || strides.size() != 6 || sizes.size() != 4)
    throw std::invalid_argument("four addresses, six strides and four sizes are wanted");
  auto address = [&](int i) { return reinterpret_cast<const char*>(at[i]); };
  Pages p{dtype_of(dtype, Dtype::e4m3), address(0), address(1), units, unit_bytes, strides[0], strides[1], strides[2],
          strides[3], sizes[0], sizes[1], sizes[2], sizes[3], address(2), address(3), strides[4], strides[5]};
  if (!p.k || !p.v || quantised(p.dtype) != (p.k_scales && p.v_scales))
    throw std::invalid_argument("quantised pages have scales, and no others");
  if (p.kv_heads < 1 || p.block_tokens < 1 || p.k_dim < 1 || p.v_dim < 1 || p.k_dim > kMostDim || p.v_dim > kMostDim)
    throw std::invalid_argument("head dimensions go from 1 to " + std::to_string(kMostDim));
  return p;
}

void attend_over(KernelSet& self, const HeldPlan& held, const Pages& pages, int dtype, uintptr_t q, int64_t q_token,
                 int64_t q_head, uintptr_t out, float scale, float softcap, uintptr_t sinks, int threads) {
  Queries queries{dtype_of(dtype), reinterpret_cast<const char*>(q), q_token, q_head, reinterpret_cast<char*>(out)};
  nb::gil_scoped_release unlocked;
  self.attend(held.plan, pages, queries, scale, softcap, reinterpret_cast<const float*>(sinks), threads);
}

void write_into(const KernelSet& self, const Pages& pages, int dtype, uintptr_t k, int64_t k_token, int64_t k_head,
                uintptr_t v, int64_t v_token, int64_t v_head, uintptr_t blocks, uintptr_t offsets, int64_t tokens,
                int threads) {
  Write w{&pages, dtype_of(dtype), reinterpret_cast<const char*>(k), k_token, k_head,
          reinterpret_cast<const char*>(v), v_token, v_head, reinterpret_cast<const int64_t*>(blocks),
          reinterpret_cast<const int64_t*>(offsets)};
  nb::gil_scoped_release unlocked;
  self.write(w, tokens, threads);
}

}  // namespace
}  // namespace octavo

NB_MODULE(_native, m) {
  using namespace octavo;
  m.doc() = "octavo's CPU kernels; use them through octavo.kernels.cpu";
  // An engine that another thread, or a registry of another package, still holds when the process ends is no leak.
  nb::set_leak_warnings(false);
  m.def("instruction_sets", &names, "Names of the kernels that run on this processor, the fastest first.");
  m.def("thread_runtime", [] { return std::string(thread_runtime()); },
        "File of the OpenMP runtime whose threads are used; empty where there is none.");
  m.def("thread_bytes", &thread_bytes, "Bytes of scratch memory that the process's threads keep.");
  m.def("pin_threads", [](const std::vector<int>& cores) {
    nb::gil_scoped_release unlocked;
    return pin_threads(cores);
  }, "Bind each thread of the calling thread's pool to one of `cores`; False where that cannot be.");
  nb::class_<Pages>(m, "Pages")
      .def("__init__",
           [](Pages* self, int dtype, const std::vector<uintptr_t>& addresses, int64_t units, int64_t unit_bytes,
              const std::vector<int64_t>& strides, const std::vector<int>& sizes) {
             new (self) Pages(pages_of(dtype, addresses, units, unit_bytes, strides, sizes));
           });
  nb::class_<HeldPlan>(m, "Plan")
      .def(nb::init<Int64s, Int64s, Int64s, Int64s, Tables, int, int, int, int, int>())
      .def_prop_ro("items", [](const HeldPlan& p) { return p.plan.items.size(); })
      .def_prop_ro("tasks", [](const HeldPlan& p) { return p.plan.tasks.size(); });
  nb::class_<KernelSet>(m, "Kernels")
      .def(nb::init<const std::string&>())
      .def_prop_ro("name", &KernelSet::name)
      .def_prop_ro("bytes", &KernelSet::bytes)
      .def("attend", &attend_over)
      .def("write", &write_into);
  bind_copies(m);
  bind_linear(m);
  bind_layer(m);
}
