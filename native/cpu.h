// Which ISA levels this machine can run.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace tenfold {

// Best first; always ends with "portable".
std::vector<std::string> isa_levels();
// Null if this machine (or build) has no such level.
const Kernels* kernels_of(const std::string& isa);

}  // namespace tenfold
