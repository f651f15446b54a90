# shellcheck shell=bash
# The virtual environment of this checkout, for scripts that are started with nothing installed.
# Sourced, at the root of the checkout; bash strict mode is the caller's.
#
#   use_venv EXTRAS     makes or reuses $VENV (default .venv) with this project and its extras in it,
#                       and sets $VENV_PYTHON and $VENV_BIN (both absolute)
#
# A torch that is installed already, in the environment or under the Python that makes it, is kept
# when pyproject.toml allows its version. Without a GPU the CPU build is taken where pip can find
# one (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS): gigabytes less. pip's own variables all count.
#
# pip does not compile what it installs: SGLang brings 37,000 files, minutes of work, of which a run
# imports a few thousand, and Python compiles and keeps those at their first import. Where it may not
# keep them (PYTHONDONTWRITEBYTECODE) pip compiles all.

VENV=${VENV:-.venv}
PYTHON=${PYTHON:-python3}
CPU_TORCH=(2.14.1+cpu 2.14.0+cpu 2.13.0+cpu)
PIP_INSTALL=(-m pip install --progress-bar off --disable-pip-version-check)
[[ -n ${PYTHONDONTWRITEBYTECODE:-} ]] || PIP_INSTALL+=(--no-compile)

use_venv() {
    local extras=$1 stamp wanted
    VENV_BIN=$(realpath -sm "$VENV")/bin
    VENV_PYTHON=$VENV_BIN/python
    make_venv
    stamp=$VENV/.installed-${extras//,/-}
    wanted=$(sha256sum pyproject.toml)
    if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
        return
    fi
    echo "installing .[$extras] into $VENV (the first time this takes minutes)"
    if ! has_torch "$VENV_PYTHON" && [[ $extras != *sglang* ]] && ! has_gpu; then
        install_cpu_torch
    fi
    pip_install -e ".[$extras]"
    echo "$wanted" >"$stamp"
}

# pip install, with a line for each file that it fetches or makes, and one whenever 10 seconds have
# brought none. What is wrong it says on stderr.
pip_install() {
    local began=$SECONDS line code
    "$VENV_PYTHON" "${PIP_INSTALL[@]}" "$@" |
        while true; do
            if IFS= read -r -t 10 line; then
                [[ $line =~ ^\ *(Downloading|Using\ cached|Building|Installing) ]] &&
                    echo "  ${line:0:96}"
            else
                code=$? # above 128: nothing in that time; else all is read
                ((code > 128)) || break
                echo "  still at it, $((SECONDS - began)) s"
            fi
        done
}

make_venv() {
    local options=()
    if [[ -x $VENV_PYTHON ]] && "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then
        return
    fi
    if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "$PYTHON is older than 3.11: name a newer one, PYTHON=python3.12 $0" >&2
        exit 1
    fi
    if has_torch "$PYTHON"; then
        options=(--system-site-packages)
    fi
    echo "making the environment $VENV"
    if ! "$PYTHON" -m venv "${options[@]}" "$VENV"; then
        echo "$PYTHON cannot make an environment with pip (Debian: the package python3-venv);" \
            "make one yourself and name it, VENV=folder $0" >&2
        exit 1
    fi
}

# Whether this Python has a torch that pyproject.toml allows.
has_torch() {
    "$1" - <<'PYTHON' 2>/dev/null
import sys
from importlib.metadata import version
major, minor = map(int, version("torch").split(".")[:2])
sys.exit(not (2, 11) <= (major, minor) < (2, 15))
PYTHON
}

has_gpu() {
    command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus >/dev/null 2>&1
}

install_cpu_torch() {
    local version
    for version in "${CPU_TORCH[@]}"; do
        if pip_install "torch==$version" 2>/dev/null; then
            echo "torch $version"
            return
        fi
    done
}
