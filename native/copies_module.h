#pragma once

#include <nanobind/nanobind.h>

namespace octavo {

void bind_copies(nanobind::module_& m);

}  // namespace octavo
