# The scripts in this folder source this file. It makes a working .venv in the root of the repository, and `cd`s there.
#
# The stamp in .venv names the source of its installation. While the source is unchanged, nothing is installed, and a
# start costs milliseconds. After an interrupted installation, .venv has the mark `.installing` and is built again.
# A script sets `needs_extras` to the extras of pyproject.toml that it needs. `.extras` in .venv lists those that .venv has.
# If it lacks one, that one is added; an environment never loses an extra.
# Settings: DILOCO_PYTHON names the interpreter to use instead of searching for one; DILOCO_EXTRAS the extras that are needed
# instead of the script's (test,parity: PyTorch for tests of models); DILOCO_VENV names another folder below the root.
# shellcheck shell=bash

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$root"
venv="$root/${DILOCO_VENV:-.venv}"

say() { printf '[diloco] %s\n' "$*" >&2; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# Prints the first Python that can make the environment. 3.11 goes first because its versions are pinned.
find_python() {
  local name path without_venv="" names=(python3.11 python3 python3.12 python3.13 python3.14 python)
  [ -z "${DILOCO_PYTHON:-}" ] || names=("$DILOCO_PYTHON")
  for name in "${names[@]}"; do
    path="$(command -v "$name" 2>/dev/null)" || continue
    is_new_enough "$path" || continue
    if "$path" -c 'import ensurepip, venv' 2>/dev/null; then
      printf '%s\n' "$path"
      return 0
    fi
    without_venv="$path"
  done
  if [ -n "$without_venv" ]; then
    say "error: $without_venv cannot make virtual environments; install its venv module" \
      "(on Debian: apt-get install $(basename "$without_venv")-venv) and start again."
  elif [ -n "${DILOCO_PYTHON:-}" ]; then
    say "error: DILOCO_PYTHON=$DILOCO_PYTHON is not a Python 3.11 or newer; unset it or name another one."
  else
    say "error: no Python 3.11 or newer found (python3 is: $(python3 --version 2>/dev/null || echo missing));" \
      "install one, or name it: DILOCO_PYTHON=/path/to/python3.11."
  fi
  return 1
}

# Prints the extras that the environment has, and those that this start adds. A script that sets nothing needs all of dev.
# It names the included extras, too, so that a later script finds them in the list.
wanted_extras() {
  local each extras needed="${DILOCO_EXTRAS:-${needs_extras-test,docs,dev}}"
  extras="$(cat "$venv/.extras" 2>/dev/null || true)"
  for each in ${needed//,/ }; do
    case ",$extras," in
      *",$each,"*) ;;
      *) extras="${extras:+$extras,}$each" ;;
    esac
  done
  printf '%s' "$extras"
}

# Prints the source of the environment. The root is part of it, because console scripts have absolute paths.
wanted_stamp() {
  { cat pyproject.toml constraints-py311.txt && printf '%s\n' "$root" "$(wanted_extras)"; } | cksum
}

env_is_ready() {
  [ ! -e "$venv/.installing" ] && [ "$(cat "$venv/.stamp" 2>/dev/null)" = "$(wanted_stamp)" ] &&
    [ -x "$venv/bin/diloco" ] && "$venv/bin/python" -c '' 2>/dev/null
}

# Without --quiet, because the log is the only place that shows progress. pip would compile on one core, and tests too.
# Python compiles what is missing when it is imported, so a failure here costs only time.
pip_install() {
  local pins=() extras="$1"
  if "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
    pins=(--constraint constraints-py311.txt)
  fi
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile --editable ".${extras:+[$extras]}" \
    ${pins[@]+"${pins[@]}"} >"$venv/.install.log" 2>&1 </dev/null || return 1
  say "the packages are installed; compiling their modules, which takes a minute or less on an idle machine"
  "$venv/bin/python" -m compileall -q -j 0 -x 'site-packages/.*/tests?/' "$venv/lib" >>"$venv/.install.log" 2>&1 || true
}

# Its caller turns `set -e` off (left of ||), so the function checks every step that can fail.
make_env() {
  local python="$1" extras
  extras="$(wanted_extras)"
  if [ -e "$venv/.installing" ] || ! is_new_enough "$venv/bin/python" || ! "$venv/bin/python" -c 'import pip'; then
    rm -rf "$venv"
  fi 2>/dev/null
  say "installing ${extras:+the extras $extras }into $venv with $("$python" --version 2>&1); takes a few minutes, once" \
    "(to watch it: tail -f $venv/.install.log)"
  if ! { mkdir -p "$venv" && touch "$venv/.installing"; }; then
    say "error: cannot write to $venv; check its owner and the disk."
    return 1
  fi
  if [ ! -x "$venv/bin/python" ] && ! "$python" -m venv "$venv"; then
    say "error: $python could not make a virtual environment, see above; name another one with DILOCO_PYTHON."
    return 1
  fi
  if ! pip_install "$extras"; then
    # A failed pip changes nothing or rolls back, so an old environment stays usable; only a kill leaves the mark.
    rm -f "$venv/.installing"
    tail -n 20 "$venv/.install.log" >&2
    say "error: the installation failed, see above; check the network and the disk and start again" \
      "(if it fails every time: rm -rf $venv first)."
    return 1
  fi
  printf '%s' "$extras" >"$venv/.extras" && wanted_stamp >"$venv/.stamp" && rm -f "$venv/.installing"
}

ensure_env() {
  env_is_ready && return 0
  local python
  python="$(find_python)" || return 1
  # One start installs while others wait. The lock belongs to the open file and ends with its last holder (pip included),
  # so it is never stale. Python locks the file, because not every system has the flock command.
  mkdir -p "$(dirname "$venv")" || return 1
  exec 9>"$venv.lock" || return 1
  if ! "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null; then
    say "another start is installing into $venv; waiting for it"
    "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' || return 1
  fi
  local ok=0
  env_is_ready || make_env "$python" || ok=1
  exec 9>&-
  return "$ok"
}

ensure_env || exit 1
