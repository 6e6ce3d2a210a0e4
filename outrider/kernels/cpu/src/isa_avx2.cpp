#include "isa.hpp"
#define OUTRIDER_ISA 1
#define OUTRIDER_VNNI 0
#define OUTRIDER_NAME "avx2"

#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace outrider {
namespace avx2 {
#include "kernels.inc"
}
}  // namespace outrider
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
namespace outrider {
const Kernels* avx2_kernels() { return &avx2::table; }
}  // namespace outrider
#else
namespace outrider {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace outrider
#endif
