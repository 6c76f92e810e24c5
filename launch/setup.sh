#!/usr/bin/env bash
# Makes .venv at the top of the tree, or finds it made. test.sh and quickstart.sh call this first; it may run any number of times, side by side.
#
#   PYTHON=/path/to/python   build with this Python (default: the newest of 3.13, 3.12, 3.11 that runs)
#   ACCELERATOR=cpu|cuda     do not look for a GPU (default: cuda where `nvidia-smi -L` lists one)
#
# The last line of work is the stamp: what was installed, for which accelerator and Python, at which path. No stamp or another one: built again.
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
root=$PWD
venv=$root/.venv
stamp=$venv/distrag-stamp

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

usable() { # does it run, is it in range, can it make an environment?  (a name on PATH may be a shim that only prints an error)
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1
}

find_python() {
    local name
    if [[ -n ${PYTHON:-} ]]; then
        usable "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.11, 3.12 or 3.13 with venv and ensurepip"
        printf '%s\n' "$PYTHON"
        return
    fi
    for name in python3.13 python3.12 python3.11 python3 python; do
        if usable "$name"; then command -v "$name"; return; fi
    done
    die "found no Python 3.11, 3.12 or 3.13 with venv and ensurepip (Debian and Ubuntu keep these in python3-venv); install one or set PYTHON"
}

find_accelerator() {
    case ${ACCELERATOR:-} in
        cpu | cuda) printf '%s\n' "$ACCELERATOR" ;;
        '') if nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then echo cuda; else echo cpu; fi ;;
        *) die "ACCELERATOR is '$ACCELERATOR'; it can be cpu or cuda" ;;
    esac
}

wanted_stamp() { # of the pyproject only what an installation depends on: a changed lint rule costs nobody a new .venv
    "$1" - "$root" "$2" <<'PY'
import hashlib, json, pathlib, sys, tomllib

root, accelerator = pathlib.Path(sys.argv[1]), sys.argv[2]
project = tomllib.loads((root / "pyproject.toml").read_text())
shims = [path.read_text() for path in sorted(root.glob("launch/*/pyproject.toml"))]
version = "%d.%d" % sys.version_info[:2]
parts = [project["build-system"], project["project"], shims, accelerator, version, str(root)]
print(accelerator, version, hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest())
PY
}

lock() { # one builder at a time; the lock is the kernel's, so a killed builder leaves none behind (its pip keeps it until it ends)
    exec 9>"$venv.lock"
    local take='import fcntl, sys; fcntl.flock(9, fcntl.LOCK_EX | int(sys.argv[1]))'
    if ! "$1" -c "$take" 4 2>/dev/null; then
        say "another setup is at work on $venv; waiting for it"
        "$1" -c "$take" 0
    fi
}

is_ready() { [[ -f $stamp && $(<"$stamp") == "$1" ]] && "$venv/bin/python" -c '' 2>/dev/null; }

build() {
    local python=$1 accelerator=$2
    if [[ -f $stamp ]]; then
        say ".venv was made for something else ($(cut -d' ' -f1,2 "$stamp"), or other requirements); making it again"
    elif [[ -e $venv ]]; then
        say ".venv has no stamp: an installation that did not end; making it again"
    fi
    say "making .venv for $accelerator with $("$python" --version 2>&1); one to a few minutes, most of it pip (log: .venv/install.log)"
    rm -f "$stamp"
    "$python" -m venv --clear "$venv"
    if ! "$venv/bin/python" -m pip install --disable-pip-version-check --only-binary :all: -e "$root[$accelerator,test]" >"$venv/install.log" 2>&1; then
        tail -n 25 "$venv/install.log" >&2
        die "pip could not install distrag[$accelerator,test]; its last lines are above, the whole log is .venv/install.log"
    fi
    "$venv/bin/python" -m pip check --disable-pip-version-check >&2
}

main() {
    local accelerator python wanted start=$SECONDS
    accelerator=$(find_accelerator)
    # The environment's own Python first: no other is needed, or asked for its version, once the environment stands.
    if [[ -z ${PYTHON:-} ]] && usable "$venv/bin/python"; then python=$venv/bin/python; else python=$(find_python); fi
    wanted=$(wanted_stamp "$python" "$accelerator")
    if is_ready "$wanted"; then return; fi

    python=$(find_python)
    wanted=$(wanted_stamp "$python" "$accelerator")
    lock "$python"
    if is_ready "$wanted"; then return; fi
    build "$python" "$accelerator"
    printf '%s\n' "$wanted" >"$stamp.new"
    mv "$stamp.new" "$stamp"
    say "ready after $((SECONDS - start)) s"
}

main
