#!/bin/sh
# Builds the core's own tests twice, under the address and undefined-behaviour sanitizers and under the thread sanitizer,
# and runs them. Needs cmake, ninja and GCC or clang; no Python. Arguments go to cmake.
set -eu
cd "$(dirname "$0")/../.."

check() {
  kind=$1 sanitize=$2
  shift 2
  cmake -S . -B "build/$kind" -G Ninja -DTENFOLD_NATIVE_TESTS=ON -DTENFOLD_SANITIZE="$sanitize" "$@" >/dev/null
  cmake --build "build/$kind" --target test_core
  echo "== $kind"
  "build/$kind/test_core"
}

export UBSAN_OPTIONS=print_stacktrace=1
export ASAN_OPTIONS=detect_stack_use_after_return=1
check asan ON "$@"
check tsan thread "$@"
