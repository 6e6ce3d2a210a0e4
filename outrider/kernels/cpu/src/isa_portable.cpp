#include "isa.hpp"
#define OUTRIDER_ISA 0
#define OUTRIDER_VNNI 0
#define OUTRIDER_NAME "portable"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace outrider {
namespace portable {
#include "kernels.inc"
}
const Kernels* portable_kernels() { return &portable::table; }
}  // namespace outrider
