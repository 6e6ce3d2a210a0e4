#!/usr/bin/env bash
# Build ik_llama.cpp, at one commit, tuned to the machine it is built on. Or for AVX2 alone.
#
#   benchmarks/peers/build_ik_llama_cpp.sh [native|avx2] [CHECKOUT]
#
# CHECKOUT is a clone that is there already; without it, the source is cloned to work/peers (git-ignored). Needs a C++ compiler
# and cmake; takes 10 to 30 minutes on two cores. The flash attention of its own kernels (iqk) is in, for f16 and q8_0 caches.
# Where the native build is there, avx2 builds the library of the kernels alone, and the native server runs with it.
set -euo pipefail

url=https://github.com/ikawrakow/ik_llama.cpp
commit=8337e4cd3861406fc04e0854b1409cd1b027fbc9
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
isa=${1:-native}
tree=${2:-$root/work/peers/ik_llama.cpp}
jobs=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
command -v cmake >/dev/null || { echo "cmake is missing; install it (for example: python -m pip install cmake)" >&2; exit 1; }
case $isa in
    native) flags=(-DGGML_NATIVE=ON) ;;
    avx2) flags=(-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_AVX512=OFF) ;;
    *) echo "the first argument is native or avx2, not $isa" >&2; exit 1 ;;
esac

[ -d "$tree" ] || git clone --filter=blob:none --no-checkout "$url" "$tree"
[ -n "${2:-}" ] || git -C "$tree" checkout -q "$commit"
[ "$(git -C "$tree" rev-parse HEAD)" = "$commit" ] || { echo "$tree is not at $commit; check it out there" >&2; exit 1; }

cmake -S "$tree" -B "$tree/build-$isa" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON "${flags[@]}" \
    -DGGML_IQK_FLASH_ATTENTION=ON -DGGML_IQK_FA_ALL_QUANTS=OFF -DLLAMA_BUILD_TESTS=OFF
server=$tree/build-native/bin/llama-server
if [ "$isa" = avx2 ] && [ -x "$server" ]; then
    cmake --build "$tree/build-avx2" -j "$jobs" --target ggml
    mkdir -p "$tree/build-avx2/bin"
    printf '#!/bin/sh\nLD_LIBRARY_PATH=%q exec %q "$@"\n' "$tree/build-avx2/ggml/src" "$server" >"$tree/build-avx2/bin/llama-server"
    chmod +x "$tree/build-avx2/bin/llama-server"
else
    cmake --build "$tree/build-$isa" -j "$jobs" --target llama-server
fi
echo "ik_llama.cpp is built: $tree/build-$isa/bin/llama-server"
