#!/usr/bin/env bash
# A real model learns a real task with PPO, on this machine's CPU, with nothing installed before:
# SmolLM2-135M-Instruct learns to add and subtract. About 10 minutes on 2 cores with the
# installation; no GPU, no hub.
#
#   bash launch/quickstart.sh [key.sub=value ...]
#
# Environment, model and data are made once and used again; each call is a new run. Exit code: 2
# for a bad override, 1 when the run failed, 0 when it has finished or was stopped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Knobs, from the environment; VENV and PYTHON besides
CONFIG=${CONFIG:-ppo_smollm2_cpu.yaml}
MODEL=${MODEL:-models/smollm2-135m-instruct}
DATA=${DATA:-data/chain_sum}
RUN_DIR=${RUN_DIR:-runs/quickstart/$(date +%Y%m%d-%H%M%S)}
RANKS=${RANKS:-2}

# shellcheck source=launch/environment.sh
. launch/environment.sh
use_venv data

export HF_HUB_OFFLINE=1

"$VENV_PYTHON" -m ppo.models.smollm2 --out "$MODEL"
if [[ ! -f $DATA/train.parquet || ! -f $DATA/test.parquet ]]; then
    "$VENV_PYTHON" -m ppo.data.prepare reasoning_gym --out "$DATA" --task chain_sum \
        --option min_terms=2 max_terms=2 min_digits=1 max_digits=1 --method last_number \
        --train_size 2048 --test_size 128
fi

overrides=("trainer.default_local_dir=$RUN_DIR" "model.path=$MODEL"
    "data.train_files=$DATA/train.parquet" "data.val_files=$DATA/test.parquet" "$@")
for override in "$@"; do
    case ${override#--} in trainer.default_local_dir=*) RUN_DIR=${override#*=} ;; esac
done

"$VENV_PYTHON" train_ppo.py --config "$CONFIG" --check --nnodes 1 --nproc_per_node "$RANKS" \
    "${overrides[@]}"
command=("$VENV_BIN/torchrun" --standalone "--nproc_per_node=$RANKS"
    train_ppo.py --config "$CONFIG" "${overrides[@]}")
echo "+ ${command[*]}"
"${command[@]}" || echo "torchrun ended with code $?" >&2
if [[ ! -f $RUN_DIR/status.json || ! -f $RUN_DIR/metrics.jsonl ]]; then
    echo "the run failed before it began; its folder is $RUN_DIR" >&2
    exit 1
fi

"$VENV_PYTHON" - "$RUN_DIR" <<'PYTHON'
import json, pathlib, sys

run = pathlib.Path(sys.argv[1])
status = json.loads((run / "status.json").read_text())
rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
scores = [
    (row["step"], value)
    for row in rows
    for name, value in row.items()
    if name.startswith("val-core/") and value is not None
]
print(f"\nrun {run}: {status['state']} after step {status['step']} {status.get('reason') or ''}")
for step, score in scores:
    print(f"  validation after step {step:>3}: {score:.3f}")
if len(scores) > 1:
    print(f"  before {scores[0][1]:.3f}, after {scores[-1][1]:.3f}")
explained = [row["critic/vf_explained_var"] for row in rows if row.get("critic/vf_explained_var")]
if explained:
    print(f"  critic/vf_explained_var of the last step: {explained[-1]:.3f}")
print(f"  metrics, samples and logs: {run}")
sys.exit(status["state"] == "failed")
PYTHON
echo "  curves: $VENV_BIN/tensorboard --logdir $RUN_DIR/tensorboard"
