#!/bin/sh
# Prints the path of the first Python that really runs, trying the versions in the order given.
#
#   find_python.sh 3.13 3.12 3.11
#
# With PYTHON set, that interpreter alone is considered. A name on PATH may be a version manager's
# shim that only prints an error, so every candidate must pass a check before it counts.
set -eu

# The check prints the interpreter behind any virtual environment, because `make setup` may delete
# the environment that is active now. Wheels need a 64-bit CPython with the lock; the environment
# needs venv and ensurepip, its packages ssl, ctypes and the compression modules.
check='
import bz2, ctypes, ensurepip, lzma, sqlite3, ssl, sys, sysconfig, venv, zlib
fits = (
    sys.implementation.name == "cpython"
    and sys.maxsize > 2**32
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
    and sys.argv[1] in ("any", "%d.%d" % sys.version_info[:2])
)
print(getattr(sys, "_base_executable", sys.executable) if fits else "")
'

# Prints the interpreter's path if $1 runs, is version $2, and can make an environment.
runs() {
    found=$("$1" -I -c "$check" "$2" 2>/dev/null </dev/null) && [ -n "$found" ] || return 1
    printf '%s\n' "$found"
}

# Calls `runs` on every place where version $1 may live; the first success ends the search.
search() {
    old_ifs=$IFS
    IFS=:
    for folder in $PATH; do
        IFS=$old_ifs
        for name in "python$1" python3 python; do
            [ -x "$folder/$name" ] && runs "$folder/$name" "$1" && return
        done
    done
    IFS=$old_ifs
    home=${HOME:-/nonexistent}
    data=${XDG_DATA_HOME:-$home/.local/share}
    # Unmatched patterns stay as they are and fail the -x test.
    for candidate in \
        "${PYENV_ROOT:-$home/.pyenv}/versions/$1".*/bin/"python$1" \
        "${UV_PYTHON_INSTALL_DIR:-$data/uv/python}/cpython-$1".*/bin/"python$1" \
        "${ASDF_DATA_DIR:-$home/.asdf}/installs/python/$1".*/bin/"python$1" \
        "${MISE_DATA_DIR:-$data/mise}/installs/python/$1".*/bin/"python$1" \
        "$home"/.rye/py/cpython@"$1".*/bin/"python$1" \
        "${CONDA_PREFIX:-/nonexistent}/bin/python$1" \
        "$home"/.conda/envs/*/bin/"python$1" \
        "${MAMBA_ROOT_PREFIX:-$home/micromamba}"/envs/*/bin/"python$1" \
        "$home"/*conda3/bin/"python$1" "$home"/*conda3/envs/*/bin/"python$1" \
        "$home"/*forge*/bin/"python$1" "$home"/*forge*/envs/*/bin/"python$1" \
        /opt/*conda*/bin/"python$1" /opt/*conda*/envs/*/bin/"python$1" \
        /usr/local/bin/"python$1" /usr/bin/"python$1" \
        /opt/homebrew/bin/"python$1" /opt/homebrew/opt/python@"$1"/bin/"python$1" \
        /usr/local/opt/python@"$1"/bin/"python$1" \
        /home/linuxbrew/.linuxbrew/bin/"python$1" \
        /Library/Frameworks/Python.framework/Versions/"$1"/bin/"python$1" \
        /opt/local/bin/"python$1" \
        /opt/hostedtoolcache/Python/"$1".*/*/bin/"python$1" \
        /opt/python/*/bin/"python$1"; do
        [ -x "$candidate" ] && runs "$candidate" "$1" && return
    done
    return 1
}

if [ -n "${PYTHON:-}" ]; then
    for version in "$@"; do
        runs "$PYTHON" "$version" && exit
    done
    version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' \
        2>/dev/null </dev/null) || version=
    if [ -z "$version" ]; then
        echo "error: PYTHON=$PYTHON does not run; name an interpreter that does, or leave" \
            "PYTHON unset to search for one of: $*" >&2
    elif runs "$PYTHON" any >/dev/null || [ "${version%%.*}" != 3 ]; then
        echo "error: PYTHON=$PYTHON is Python $version, and the pinned packages are for: $*;" \
            "name one of these, or leave PYTHON unset to search" >&2
    else
        echo "error: PYTHON=$PYTHON lacks a module that an environment needs (venv, ensurepip," \
            "ssl, ctypes, lzma, bz2, sqlite3 or zlib) or is not a standard 64-bit CPython;" \
            "on Debian install python$version-venv, or name another interpreter" >&2
    fi
    exit 1
fi

for version in "$@"; do
    search "$version" && exit
done
echo "error: no working Python among the versions $* was found on PATH, in pyenv, uv, conda, asdf," \
    "mise or Homebrew; install one (for example 'uv python install $1', 'pyenv install $1' or" \
    "'apt install python$1-venv'), or point to it with PYTHON=/path/to/python$1" >&2
exit 1
