#!/usr/bin/env bash
# Everything that must hold, on a bare clone or a working tree: format, lint, types, who imports whom, tests, and a short quickstart.
# A step that fails does not stop the others; the list at the end names it. Arguments go to pytest: ./launch/test.sh -k plan
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
./launch/setup.sh
export PATH="$PWD/.venv/bin:$PATH"

failed=() summary=()
step() {
    local title=$1 start=$SECONDS outcome=ok
    shift
    printf '\n== %s\n' "$title"
    if ! "$@" </dev/null; then
        outcome=FAILED
        failed+=("$title")
    fi
    summary+=("$(printf '%-32s %6s %5d s' "$title" "$outcome" $((SECONDS - start)))")
}

step 'format (ruff)' ruff format --check .
step 'lint (ruff)' ruff check .
step 'types (mypy --strict)' mypy
step 'who imports whom (import-linter)' lint-imports
step 'quickstart, shortened' ./launch/quickstart.sh --train.max_steps 20 --train.eval_every 10
step 'tests (pytest)' python -m pytest "$@"

printf '\n== summary (%d s)\n' "$SECONDS"
printf '%s\n' "${summary[@]}"
if ((${#failed[@]})); then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
echo 'all steps passed'
