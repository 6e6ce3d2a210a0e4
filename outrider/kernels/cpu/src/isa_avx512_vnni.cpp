#include "isa.hpp"
#define OUTRIDER_ISA 2
#define OUTRIDER_VNNI 1
#define OUTRIDER_NAME "avx512_vnni"

#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#endif
namespace outrider {
namespace avx512_vnni {
#include "kernels.inc"
}
}  // namespace outrider
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
namespace outrider {
const Kernels* avx512_vnni_kernels() { return &avx512_vnni::table; }
}  // namespace outrider
#else
namespace outrider {
const Kernels* avx512_vnni_kernels() { return nullptr; }
}  // namespace outrider
#endif
