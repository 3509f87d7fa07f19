// Parts of the Python face that have a file of their own.
#pragma once

#include <nanobind/nanobind.h>

namespace tenfold {

// Used by tenfold.speculate. Calls take microseconds and keep the GIL.
void bind_speculation(nanobind::module_& m);

}  // namespace tenfold
