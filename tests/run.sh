#!/usr/bin/env bash
# The tests, on a machine with nothing installed: makes or reuses .venv, installs, runs pytest.
#
#   bash tests/run.sh [--full] [--no-sglang] [--slurm] [--apt] [--install] [pytest's arguments ...]
#
#   --full       the tests marked `full` too (hours)
#   --no-sglang  neither install SGLang (11 GB) nor run its tests
#   --slurm      start a real two-node Slurm for its tests (as root); refused where one is configured
#   --apt        install the Debian packages that the Slurm tests need, where they are missing
#   --install    install, and run nothing
#
# CI=true stands for --slurm --apt. Tests marked `gpu` run where there is a GPU. Pytest's closing
# line is the last one; its exit code is this script's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

full=false sglang=true slurm=false apt=false tests=true
if [[ ${CI:-} == true ]]; then
    slurm=true apt=true
fi
arguments=()
for argument in "$@"; do
    case $argument in
        --full) full=true ;;
        --no-sglang) sglang=false ;;
        --slurm) slurm=true ;;
        --apt) apt=true ;;
        --install) tests=false ;;
        *) arguments+=("$argument") ;;
    esac
done

packages= # are installed while pip does its work
if $slurm && $apt && ! { command -v slurmctld && command -v munged; } >/dev/null; then
    (
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq slurm-wlm munge >/dev/null
    ) &
    packages=$!
fi

unset PYTHONDONTWRITEBYTECODE # a hundred processes would compile all that they import
# shellcheck source=launch/environment.sh
. launch/environment.sh
if $sglang; then
    use_venv sglang,data,dev
else
    use_venv data,dev
fi
[[ -z $packages ]] || wait "$packages"
$tests || exit 0

marks=()
$full || marks+=("not full")
$sglang || marks+=("not sglang")
$slurm || marks+=("not slurm")
has_gpu || marks+=("not gpu")
expression=
for mark in "${marks[@]}"; do
    expression+=${expression:+ and }$mark
done

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PATH=$VENV_BIN:$PATH
log=$(mktemp)
trap 'rm -f "$log"' EXIT
code=0
# two processes; tests/conftest.py says what goes together, `-n 0` is one (for --pdb)
"$VENV_PYTHON" -m pytest -n 2 --no-loadscope-reorder -m "$expression" \
    "${arguments[@]}" 2>&1 |
    tee "$log" || code=$?
# what Python says while it shuts down comes after pytest's closing line: say that again
grep -E '(passed|failed|skipped|deselected|error|no tests ran).* in [0-9.]+s' "$log" | tail -n 1 ||
    true
exit "$code"
