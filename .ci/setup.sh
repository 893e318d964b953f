#!/bin/sh
# Makes a virtual environment with pinned packages; does nothing when it is already up to date.
#
# Environment variables, all optional:
#   STACK    a (Python 3.11) or b (3.12, 3.13); empty takes the newest Python that runs
#   VENV     folder of the environment; .venv, or .venv-a with STACK=a
#   PYTHON   interpreter to use instead of searching for one
#   EXTRAS   groups of pyproject.toml to install; train,dev, or what the environment already has
set -eu
cd "$(dirname "$0")/.."

stack=${STACK:-}
case $stack in
    a) versions='3.11' venv=${VENV:-.venv-a} ;;
    b) versions='3.13 3.12' venv=${VENV:-.venv} ;;
    '') versions='3.13 3.12 3.11' venv=${VENV:-.venv} ;;
    *) echo "error: STACK=$stack is not a stack; use STACK=a (Python 3.11) or STACK=b (3.12, 3.13)" >&2
        exit 1 ;;
esac
stamp=$venv/k3jax-setup

# Variables meant for another environment must not reach this one.
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1

fail() {
    echo "error: $*" >&2
    exit 1
}

# A number for all that decides the content of an environment of stack $1 with the extras $2. The
# project's path is part of it: an editable install in a copied folder points at the original.
content() {
    { sed '/^\[tool\.ruff\]/,$d' pyproject.toml; cat ".ci/constraints-$1.txt"; echo "$2"; pwd; } | cksum
}

python=
if [ -n "${PYTHON:-}" ]; then
    # shellcheck disable=SC2086  # the versions are words
    python=$(sh .ci/find_python.sh $versions)
fi

# The stamp's lines: state, stack, interpreter, extras, content. Only a finished setup is "ready".
if [ -f "$stamp" ]; then
    { read -r state; read -r had_stack; read -r had_python; read -r had_extras; read -r had_content; } \
        <"$stamp" || true
    extras=${EXTRAS:-$had_extras}
    if [ "$state" = ready ] && [ "$had_stack" = "${stack:-$had_stack}" ] &&
        [ "$had_python" = "${python:-$had_python}" ] && [ "$had_extras" = "$extras" ] &&
        [ "$had_content" = "$(content "$had_stack" "$extras")" ] &&
        "$venv/bin/python" -I -c '' 2>/dev/null; then
        exit 0
    fi
    case $state in
        building\ *)
            if kill -0 "${state#building }" 2>/dev/null; then
                fail "process ${state#building } is filling $venv; wait for it, or end it, and run again"
            fi ;;
    esac
elif [ -e "$venv" ]; then
    fail "$venv exists but was not made by 'make setup'; move it away, or name another folder with VENV="
fi
extras=${extras:-${EXTRAS:-train,dev}}

if [ -z "$python" ]; then
    # shellcheck disable=SC2086
    python=$(sh .ci/find_python.sh $versions)
fi
version=$("$python" -I -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $version in
    3.11) stack=a ;;
    *) stack=b ;;
esac

echo "$venv: Python $version ($python), stack $stack, extras $extras: a few minutes; log in $venv/pip.log"
rm -rf "$venv"
mkdir "$venv"
record() {
    printf '%s\n' "$1" "$stack" "$python" "$extras" "$(content "$stack" "$extras")" >"$stamp"
}
record "building $$"

# pip's warnings go to a file: a machine's own pip settings can make it print one per package.
install() {
    "$venv/bin/python" -m pip install -qq --progress-bar off --log "$venv/pip.log" \
        --constraint ".ci/constraints-$stack.txt" "$@" </dev/null 2>"$venv/pip.err" || {
        tail -n 20 "$venv/pip.err" >&2
        fail "pip could not fill $venv (its last words are above, all of them in $venv/pip.log);" \
            "check the network and the disk, then run 'make setup' again"
    }
}
"$python" -I -m venv "$venv" || fail "$python cannot make an environment; choose another with PYTHON="
# The project is built with the pinned setuptools, not with whatever is newest that day.
install --upgrade pip setuptools
install --no-build-isolation --editable ".[$extras]"
"$venv/bin/python" -m pip check --quiet || fail "the pinned packages of stack $stack contradict each other"
record ready
echo "$venv: ready"
