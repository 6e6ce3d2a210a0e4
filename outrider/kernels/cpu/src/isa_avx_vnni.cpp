#include "isa.hpp"
#define OUTRIDER_ISA 1
#define OUTRIDER_VNNI 1
#define OUTRIDER_NAME "avx_vnni"

#if defined(__clang__)
#define OUTRIDER_NEW_COMPILER (__clang_major__ >= 12)
#else
#define OUTRIDER_NEW_COMPILER (__GNUC__ >= 11)  // knows AVX-VNNI
#endif

#if defined(__x86_64__) && OUTRIDER_NEW_COMPILER
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avxvnni"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avxvnni")
#endif
namespace outrider {
namespace avx_vnni {
#include "kernels.inc"
}
}  // namespace outrider
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
namespace outrider {
const Kernels* avx_vnni_kernels() { return &avx_vnni::table; }
}  // namespace outrider
#else
namespace outrider {
const Kernels* avx_vnni_kernels() { return nullptr; }
}  // namespace outrider
#endif
