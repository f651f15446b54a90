#!/usr/bin/env bash
# Train on this machine: check the configuration, then start one rank per device with torchrun.
#
#   launch/local.sh ppo.yaml [key.sub=value ...]
#
# From anywhere: the config is looked for where it is called, then in configs/; all other paths are as
# seen from the root of the repository.
#
# Exit code: 2 for a bad configuration, with every problem; 0 when the run has finished or was
# asked to stop; 1 when it failed or was interrupted. <run>/status.json says which. Ctrl-C and
# `touch <run>/STOP` end it after the present update, saved; a second Ctrl-C at once.
set -euo pipefail

# Knobs, from the environment
gpus=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | grep -c '^GPU' || true)
if [[ ${CUDA_VISIBLE_DEVICES+set} == set ]]; then
    visible=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -cE '^(GPU-|MIG-|[0-9])' || true)
    gpus=$((visible < gpus ? visible : gpus))
fi
NPROC_PER_NODE=${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 1))} # ranks
MAX_RESTARTS=${MAX_RESTARTS:-0}                            # restarts after a crash of a rank
SHUTDOWN_TIMEOUT=${SHUTDOWN_TIMEOUT:-300}                  # seconds to save after SIGTERM
PYTHON=${PYTHON:-python}

config=${1:?usage: launch/local.sh CONFIG [key.sub=value ...]}
shift
[[ ! -f $config ]] || config=$(realpath -s "$config")
cd "$(dirname "${BASH_SOURCE[0]}")/.."

"$PYTHON" train_ppo.py --config "$config" --check --nnodes 1 --nproc_per_node "$NPROC_PER_NODE" \
    --device_memory_gib auto "$@"
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$NPROC_PER_NODE" \
    --max-restarts "$MAX_RESTARTS" --shutdown-timeout "$SHUTDOWN_TIMEOUT" \
    train_ppo.py --config "$config" "$@"
