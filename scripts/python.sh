#!/usr/bin/env bash
# Runs Python with the client libraries of the tests, from a virtual environment in the cache.
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"

packages="aetcd==1.0.0 grpcio==1.85.3 protobuf==7.36.2 typing_extensions==4.16.0"
environment="$SKEG_CACHE/python-$(sha256sum <<<"$packages $(python3 --version)" | cut -c1-16)"

build() {
  say "installing $packages into $environment"
  rm -rf "$environment.tmp"
  # ensurepip is a package of its own on Debian.
  python3 -m venv "$environment.tmp" >/dev/null 2>&1 || { install_packages python3-venv && python3 -m venv "$environment.tmp"; }
  # shellcheck disable=SC2086
  "$environment.tmp/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps $packages >&2
  mv -T "$environment.tmp" "$environment"
}

need python3 python3 python3-venv
(
  flock 9
  [ -x "$environment/bin/python" ] || build
) 9>"$environment.lock"
exec "$environment/bin/python" "$@"
