#!/usr/bin/env bash
# Run a command with AUTOFUSE_TEST_POSTGRES naming a throwaway PostgreSQL server: on loopback, in a temporary folder,
# stopped afterwards. Where there is no PostgreSQL and it cannot be installed, the command runs without, and it is said.
set -euo pipefail

skip() {
  echo "with_postgres: $1: the PostgreSQL tests are skipped" >&2
  exec "${command[@]}"
}

server_folder() { # where initdb and pg_ctl lie
  local initdb
  if initdb=$(command -v initdb); then dirname "$(readlink -f "$initdb")"; return 0; fi
  initdb=$(ls -d /usr/lib/postgresql/*/bin/initdb 2>/dev/null | sort -V | tail -1)
  [ -n "$initdb" ] && dirname "$initdb"
}

install_server() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
  echo "with_postgres: installing PostgreSQL" >&2
  apt-get update -qq >&2 && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends postgresql >&2
}

command=("$@")
if [ -n "${AUTOFUSE_TEST_POSTGRES:-}" ]; then exec "${command[@]}"; fi
bin=$(server_folder) || { install_server && bin=$(server_folder); } || skip "PostgreSQL is not installed"

as=() # the server refuses to run as root
if [ "$(id -u)" = 0 ]; then
  id postgres >/dev/null 2>&1 || skip "there is no user postgres to run the server as"
  command -v runuser >/dev/null || skip "there is no runuser"
  as=(runuser -u postgres --)
fi

folder=$(mktemp -d "${TMPDIR:-/tmp}/autofuse-postgres.XXXXXX")
finish() {
  (cd / && "${as[@]}" "$bin/pg_ctl" -D "$folder/data" -m immediate -w stop >/dev/null 2>&1) || true
  rm -rf "$folder"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
if [ ${#as[@]} -gt 0 ]; then chown postgres "$folder"; fi

port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
options="-c listen_addresses=127.0.0.1 -c port=$port -c unix_socket_directories='' -c fsync=off"
start() {
  cd / # a folder that the other user may enter
  "${as[@]}" "$bin/initdb" -D "$folder/data" -U postgres --auth=trust -E UTF8 --no-locale >"$folder/log" 2>&1 &&
    "${as[@]}" "$bin/pg_ctl" -D "$folder/data" -w -l "$folder/data/log" -o "$options" start >>"$folder/log" 2>&1
}
if (start); then
  export AUTOFUSE_TEST_POSTGRES="postgresql://postgres@127.0.0.1:$port/postgres"
  "${command[@]}"
else
  cat "$folder/log" >&2
  echo "with_postgres: the PostgreSQL server did not start" >&2
  exit 1
fi
