#pragma once

#include <nanobind/nanobind.h>

#include "linear.h"

namespace octavo {

void bind_linear(nanobind::module_& m);

}  // namespace octavo
