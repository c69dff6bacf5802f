// A plan as Python holds it: with the arrays that its items point into.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>

#include "plan.h"

namespace octavo {

using Int64s = nanobind::ndarray<const int64_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using Tables = nanobind::ndarray<const int32_t, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;

struct HeldPlan {
  Int64s rows, offsets, starts, contexts;
  Tables tables;
  Plan plan;

  static Step step(const Int64s& rows, const Int64s& offsets, const Int64s& starts, const Int64s& contexts,
                   const Tables& tables, int block_tokens) {
    const size_t n = rows.shape(0);
    if (offsets.shape(0) != n + 1 || starts.shape(0) != n || contexts.shape(0) != n)
      throw std::invalid_argument("rows, offsets, starts and contexts differ in length");
    return {static_cast<int64_t>(n), rows.data(), offsets.data(), starts.data(), contexts.data(), tables.data(),
            static_cast<int64_t>(tables.shape(0)), static_cast<int64_t>(tables.shape(1)), block_tokens};
  }
  HeldPlan(Int64s rows_, Int64s offsets_, Int64s starts_, Int64s contexts_, Tables tables_, int block_tokens,
           int window, int chunk, int group, int kv_heads)
      : rows(rows_), offsets(offsets_), starts(starts_), contexts(contexts_), tables(tables_),
        plan(step(rows, offsets, starts, contexts, tables, block_tokens), Sight{window, chunk}, group, kv_heads) {}
};

}  // namespace octavo
