#!/usr/bin/env bash
# Real data to a trained, evaluated, reported model: ml-100k, two CPU processes or every GPU of this machine.
# Arguments override the config: ./launch/quickstart.sh --encoder.name gru --train.max_steps 500
#   NPROC=4   processes to start (default: one for each GPU, two without)
set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
./launch/setup.sh
export PATH="$PWD/.venv/bin:$PATH"
# torchrun of torch 2.13 hands restarted workers the addresses of dead ones unless every attempt gets a store of its own.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

say() { printf '\n== %s\n' "$*"; }

accelerator=$(cut -d' ' -f1 .venv/distrag-stamp)
if [[ $accelerator == cuda ]]; then
    procs=${NPROC:-$(nvidia-smi -L | grep -c '^GPU ')}
else
    procs=${NPROC:-2}
    export CUDA_VISIBLE_DEVICES=''
fi

store=data/ml-100k
run=runs/quickstart-$(date +%Y%m%d-%H%M%S)-$$

if [[ ! -f $store/schema.yaml ]]; then
    say "prepare: ml-100k -> $store"
    mkdir -p data
    part=$(mktemp -d "$store.XXXXXX")
    trap 'rm -rf -- "$part"' EXIT
    distrag prepare ml-100k --out "$part/store"
    # A rename is all or nothing, and refuses a store that another quickstart has put there meanwhile: that one is as good.
    mv -T "$part/store" "$store" 2>/dev/null || [[ -f $store/schema.yaml ]]
fi

say "train: $procs process(es) on $accelerator -> $run"
torchrun --standalone --nproc-per-node "$procs" -m distrag train --config configs/quickstart.yaml \
    --data.path "$store" --train.run_dir "$run" "$@"

say 'evaluate: the best checkpoint on the test split, beside ranking by popularity (the floor)'
distrag evaluate "$run" --json >"$run/test.json"
distrag evaluate --popularity train --data "$store" --json >"$run/popularity.json"
python - "$run" <<'PY'
import json, pathlib, sys

model, floor = (json.loads(pathlib.Path(sys.argv[1], name).read_text()) for name in ("test.json", "popularity.json"))
print(f"{'test':10} {'model':>10} {'popularity':>10} {'ratio':>7}")
for key in (key for key in model if "@" in key and key in floor):
    print(f"{key:10} {model[key]:10.4f} {floor[key]:10.4f} {model[key] / floor[key]:7.2f}")
PY

say "report: $run"
distrag report "$run"
