#!/usr/bin/env bash
# Build llama.cpp from the source distribution of llama-cpp-python on PyPI, which carries it whole.
#
#   benchmarks/peers/build_llama_cpp.sh [FOLDER] [VERSION]
#
# FOLDER defaults to work/peers under the repository (git-ignored); VERSION to the newest release. Needs a C++ compiler,
# cmake and Python with pip; takes 10 to 30 minutes on two cores. CPU backend only, tuned to the machine it is built on.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=${1:-$root/work/peers}
version=${2:-}
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
jobs=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
command -v cmake >/dev/null || { echo "cmake is missing; install it (for example: python -m pip install cmake)" >&2; exit 1; }

mkdir -p "$folder"
cd "$folder"
if ! ls llama_cpp_python-*.tar.gz >/dev/null 2>&1; then
    "$python" -m pip download --no-binary llama-cpp-python --no-deps "llama-cpp-python${version:+==$version}"
fi
archive=$(ls -t llama_cpp_python-*.tar.gz | head -n 1)
source=${archive%.tar.gz}
[ -d "$source" ] || tar xzf "$archive"
ln -sfn "$source/vendor/llama.cpp" llama.cpp

cmake -S llama.cpp -B llama.cpp/build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
cmake --build llama.cpp/build -j "$jobs" --target llama-bench llama-server llama-quantize llama-speculative-simple

"$python" -m pip hash "$archive" | tail -n 1 >llama.cpp.source
echo "$source" >>llama.cpp.source
ls -l llama.cpp/build/bin | awk '{print $NF}' | grep -E 'llama-(bench|server|quantize|speculative-simple)$'
echo "llama.cpp is built in $folder/llama.cpp/build/bin"
