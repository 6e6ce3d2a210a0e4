#include "isa.hpp"
#define OUTRIDER_ISA 0

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace outrider {
namespace portable {
#include "kernels.inc"
}
const Kernels* portable_kernels() { return &portable::table; }
}  // namespace outrider
