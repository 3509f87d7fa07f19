#include "cpu.h"

namespace tenfold {

std::vector<std::string> isa_levels() {
  std::vector<std::string> levels;
#if defined(TENFOLD_X86)
  __builtin_cpu_init();
  // All that CMakeLists.txt lets the compiler use for a level.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                    __builtin_cpu_supports("bmi2");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
    levels.push_back("avx512");
  if (avx2) levels.push_back("avx2");
#endif
  levels.push_back("portable");
  return levels;
}

const Kernels* kernels_of(const std::string& isa) {
  for (const std::string& level : isa_levels()) {
    if (level != isa) continue;
#if defined(TENFOLD_X86)
    if (isa == "avx512") return &avx512::kernels();
    if (isa == "avx2") return &avx2::kernels();
#endif
    return &portable::kernels();
  }
  return nullptr;
}

}  // namespace tenfold
