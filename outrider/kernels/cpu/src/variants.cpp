// The variants of the kernels: each is the same code with another file of simd/. A new one is a block and a row here.
//
// Headers that they need stand here, before the target pragmas: nothing in them may be compiled for a target that a processor lacks.
#include <cstddef>
#include <cstdint>

#include "abi.hpp"
#include "program.hpp"
#include "quant.hpp"

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

#define VARIANT_NAME portable
#define VARIANT_SIMD "simd/portable.inc"
#include "variant.inc"

#if defined(__aarch64__) && (defined(__clang__) ? __clang_major__ >= 16 : __GNUC__ >= 8)  // older ones do not know it
#define VARIANT_NAME neon
#if defined(__clang__)
#define VARIANT_TARGET "dotprod"
#else
#define VARIANT_TARGET "arch=armv8.2-a+dotprod"
#endif
#define VARIANT_SIMD "simd/neon.inc"
#include "variant.inc"
#define MADE_NEON
#endif

#if defined(__x86_64__)
#define VARIANT_NAME avx2
#define VARIANT_TARGET "avx2,fma,f16c"
#define VARIANT_SIMD "simd/avx2.inc"
#include "variant.inc"

#define VARIANT_NAME avx512
#define VARIANT_TARGET "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq"
#define VARIANT_SIMD "simd/avx512.inc"
#include "variant.inc"

#define VARIANT_NAME avx512_vnni
#define VARIANT_TARGET "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"
#define VARIANT_SIMD "simd/avx512.inc"
#define VARIANT_VNNI 1
#include "variant.inc"

#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11  // older ones do not know it
#define VARIANT_NAME avx_vnni
#define VARIANT_TARGET "avx2,fma,f16c,avxvnni"
#define VARIANT_SIMD "simd/avx2.inc"
#define VARIANT_VNNI 1
#include "variant.inc"
#define MADE_AVX_VNNI
#endif
#endif

namespace outrider {

const Variant VARIANTS[] = {
#if defined(__x86_64__)
    {"avx512_vnni", HAS_AVX512 | HAS_AVX512_VNNI, &avx512_vnni::table},
    {"avx512", HAS_AVX512, &avx512::table},
#ifdef MADE_AVX_VNNI
    {"avx_vnni", HAS_AVX2 | HAS_AVX_VNNI, &avx_vnni::table},
#endif
    {"avx2", HAS_AVX2, &avx2::table},
#endif
#ifdef MADE_NEON
    {"neon", HAS_DOTPROD, &neon::table},
#endif
    {"portable", 0, &portable::table},
};
const int64_t VARIANT_COUNT = sizeof(VARIANTS) / sizeof(VARIANTS[0]);

}  // namespace outrider
