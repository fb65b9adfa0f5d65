#!/bin/bash
# Every launcher, for real: sudo bash bench/launchers.sh FOLDER, or sudo PYTHON=python3.12 bash bench/launchers.sh FOLDER
# With NAME behind it only launchers in whose name that stands: … FOLDER "on two hosts"
# Runs the README's script and models/train.py under Slurm (two nodes on this machine), Open MPI, MPICH, torchrun,
# PRRTE, by hand, with the variables of launchers that are not here, and on two hosts that are network namespaces. Prints a table: the launcher and its version, MPI, Python and JAX, what
# fddp found (rank of size, backend), how the two scripts ended, and what fddp said.
# Debian's packages stay; all else is seen by this script alone and ends with it. FOLDER keeps five environments of
# $PYTHON for the next time, and what every run said, in FOLDER/logs.
set -u
# In mounts of its own /etc/hosts, munge's socket and the network namespaces are nobody else's.
[ -n "${OWN_MOUNTS:-}" ] || OWN_MOUNTS=yes exec unshare --mount --propagation private bash "$0" "$@"
FOLDER=$(realpath -m "${1:?say in which folder}"); ROOT=$(realpath "$(dirname "$0")/.."); LOGS=$FOLDER/logs; NAME=${2:-}
mkdir -p "$LOGS" "$FOLDER"/slurm/{state,spool.n1,spool.n2}

### What it needs

export DEBIAN_FRONTEND=noninteractive
for command in srun munged mpiexec.openmpi mpiexec.mpich ip; do
    command -v $command >/dev/null && continue
    { apt-get update -q && apt-get install -qy --no-install-recommends slurm-wlm munge openmpi-bin libopenmpi-dev \
        mpich libmpich-dev libpmix2 iproute2; } >"$LOGS/apt" 2>&1 || { tail -5 "$LOGS/apt"; exit 1; }
done

# As docs/launching.md says it, with plain pip. An nvcc without headers needs CUDA_PATH, and elsewhere it does nothing.
echo 'jaxlib<0.12' >"$FOLDER/jaxlib.txt"
export PIP_CONSTRAINT=${PIP_CONSTRAINT:-$FOLDER/jaxlib.txt}
export PIP_BUILD_CONSTRAINT=$PIP_CONSTRAINT CUDA_PATH=/usr/local/cuda; unset PYTHONPATH
environment() { # NAME, then a command that installs into it
    local name=$1; shift
    [ -e "$FOLDER/$name/ready" ] && return
    "${PYTHON:-python3}" -m venv "$FOLDER/$name" || exit 1
    (cd "$ROOT" && PATH="$FOLDER/$name/bin:$PATH" bash -ec "$*") >"$LOGS/install.$name" 2>&1 \
        && touch "$FOLDER/$name/ready" || { tail -5 "$LOGS/install.$name"; exit 1; }
}
environment wheel "pip install mpich && pip install --no-cache-dir '.[mpi,train]'"
environment openmpi "MPI4JAX_BUILD_MPICC=$(command -v mpicc.openmpi) pip install --no-cache-dir '.[train]' mpi4py mpi4jax"
# Debian's libmpi.so is Open MPI's where both are installed, and mpi4py's wheel would take that one.
environment mpich "CFLAGS=-O0 MPICC=mpicc.mpich MPI4JAX_BUILD_MPICC=$(command -v mpicc.mpich) \
    pip install --no-cache-dir --no-binary mpi4py '.[train]' mpi4py mpi4jax"
# Launchers alone: what they start runs in the first environment.
environment torch "pip install torch"
environment prrte "pip install openmpi" # Open MPI 5, whose mpirun is PRRTE's prterun
for name in wheel openmpi mpich; do # the code as it is now: a copy, not this checkout
    (cd "$ROOT" && "$FOLDER/$name/bin/python" -m pip install -q --no-deps --force-reinstall .) || exit 1
done

### Slurm: two nodes on this machine

STARTED=()
finish() { for process in "${STARTED[@]}"; do kill "$process" 2>/dev/null; done; }
trap finish EXIT
daemon() { # a daemon that stays in the foreground, so that its id is known
    "$@" >>"$LOGS/daemons" 2>&1 &
    STARTED+=($!)
}
{ cat /etc/hosts; echo "127.0.0.1 n1 n2"; } >"$FOLDER/hosts" && mount --bind "$FOLDER/hosts" /etc/hosts || exit 1
mkdir -p /run/munge /run/netns /etc/netns
for folder in /run/munge /run/netns /etc/netns; do mount -t tmpfs -o mode=755 own $folder || exit 1; done
chown munge: /run/munge
HOST=$(hostname)
export SLURM_CONF=$FOLDER/slurm/slurm.conf
cat >"$SLURM_CONF" <<CONF
ClusterName=bench
SlurmctldHost=$HOST(127.0.0.1)
SlurmUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation=$FOLDER/slurm/state
SlurmdSpoolDir=$FOLDER/slurm/spool.%n
SlurmctldPidFile=$FOLDER/slurm/ctld.pid
SlurmdPidFile=$FOLDER/slurm/%n.pid
ReturnToService=2
MpiDefault=none
NodeName=n1 NodeHostname=$HOST NodeAddr=127.0.0.1 Port=17001 CPUs=2
NodeName=n2 NodeHostname=$HOST NodeAddr=127.0.0.1 Port=17002 CPUs=2
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
CONF
printf 'CgroupAutomount=no\nConstrainCores=no\n' >"$FOLDER/slurm/cgroup.conf"
daemon setpriv --reuid=munge --regid=munge --clear-groups munged --foreground
sleep 1; daemon slurmctld -D; sleep 3; daemon slurmd -D -N n1; daemon slurmd -D -N n2; sleep 5
sinfo -h -o '%D nodes, %t' || { tail -5 "$LOGS/daemons"; exit 1; }

### What is run

awk '/^```diff/ {on = 1; next} /^```/ {if (on) exit} on && !/^-/ {print substr($0, 3)}' "$ROOT/README.md" >"$FOLDER/first.py"
echo 'print(f"found {group.rank} of {group.processes}, {group.backend}", flush=True)' >>"$FOLDER/first.py"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 NPROC=2
cd "$FOLDER" || exit 1

outcome() { # STATUS LOG: ok, or the status and the line that says why
    if [ "$1" = 0 ]; then echo ok; return; fi
    echo "$1: $(grep -aE '^(fddp|[A-Za-z]*Error|.*Abort)' "$2" | tail -1 | cut -c1-160)"
}
versions() { # ENVIRONMENT: its MPI, and its Python and JAX, as two columns
    "$FOLDER/$1/bin/python" - <<'PY'
import platform, jax, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
name, version = MPI.get_vendor()
print(f"{name} {'.'.join(map(str, version))} | {platform.python_version()}, {jax.__version__}")
PY
}
launcher_version() { # NAME: of the launcher of that name
    local said
    case $1 in
        srun* | sbatch* | salloc*) said=$(srun --version) ;;
        "Open MPI"*) said=$(mpirun.openmpi --version) ;;
        "Debian MPICH"*) said=$(mpiexec.mpich --version) ;;
        "the wheel"*) said=$("$WHEEL" --version) ;;
        "torchrun -"*) said=$("$FOLDER/torch/bin/python" -c 'import torch; print(torch.__version__)') ;;
        "prterun"*) said=$("$FOLDER/prrte/bin/python" -c 'import importlib.metadata as m; print(m.version("openmpi"))') ;;
    esac
    grep -oE '[0-9]+\.[0-9]+\.[0-9]+' <<<"${said:-}" | head -1
}
try() { # ENVIRONMENT NAME COMMAND…: runs both scripts with COMMAND in front
    local environment=$1 name=$2 log; shift 2
    [[ $name == *"$NAME"* ]] || return
    log=$LOGS/$(tr -c 'a-zA-Z0-9\n' _ <<<"$environment $name")
    timeout -k 10 300 "$@" "$FOLDER/$environment/bin/python" "$FOLDER/first.py" >"$log.first" 2>&1
    local first=$?
    timeout -k 10 300 "$@" "$FOLDER/$environment/bin/python" "$ROOT/models/train.py" --preset tiny --steps 4 \
        --out "$FOLDER/runs" >"$log.train" 2>&1
    local train=$? found said drawn=
    found=$(sed -n 's/.*found \(.*, [a-z]*\)$/\1/p' "$log.first" | sort | paste -sd ';')
    said=$(grep -ah '^fddp: ' "$log.first" | sort | uniq -c | sed 's/^ *\([0-9]*\) /\1 × /' | paste -sd ';' | cut -c1-200)
    grep -aqE 'loss nan|'$'\x1b' "$log.train" && drawn=', with nan or a redrawn bar'
    echo "| $name | $(launcher_version "$name") | $(versions "$environment") | $found | $(outcome $first "$log.first") |" \
        "$(outcome $train "$log.train")$drawn | $said |"
}
# A command line as a script of sbatch -N2 -n2, and what it said.
cat >"$FOLDER/batch" <<'SCRIPT'
#!/bin/bash
said=$(mktemp) && sbatch -W -N2 -n2 -o "$said" --wrap "$*" >/dev/null; status=$?
cat "$said"; rm "$said"; exit $status
SCRIPT
# A command line as two ranks that are told so by hand.
cat >"$FOLDER/by_hand" <<'SCRIPT'
#!/bin/bash
export FDDP_SIZE=2 FDDP_COORDINATOR=127.0.0.1:4711
FDDP_RANK=1 "$@" &
FDDP_RANK=0 "$@"; status=$?
wait $! && exit $status
SCRIPT
# Variables, in which %r is the rank, then -- and a command line: two ranks with a launcher's variables.
cat >"$FOLDER/with_variables" <<'SCRIPT'
#!/bin/bash
said=(); while [ "$1" != -- ]; do said+=("$1"); shift; done; shift
env "${said[@]//%r/1}" "$@" &
env "${said[@]//%r/0}" "$@"; status=$?
wait $! && exit $status
SCRIPT
# ENVIRONMENT [--gloo], then a command line: a rank on each of two namespaces, under the mpiexec beside its Python.
cat >"$FOLDER/on_two_hosts" <<SCRIPT
#!/bin/bash
python=$FOLDER/\$1/bin/python; shift
options=(); [ "\$1" = --gloo ] && { options=(--gloo); shift; }
exec "\$python" "$ROOT/bench/two_hosts.py" "\${options[@]}" -- "\$@"
SCRIPT
printf '#!/bin/sh\nexec mpiexec.mpich "$@"\n' >"$FOLDER/mpich/bin/mpiexec"
chmod +x "$FOLDER"/{batch,by_hand,with_variables,on_two_hosts} "$FOLDER/mpich/bin/mpiexec"; PATH=$PATH:$FOLDER
WHEEL=$FOLDER/wheel/bin/mpiexec

echo '| launcher | version | MPI | Python, JAX | fddp found | first script | models/train.py | fddp said |'
echo '|---|---|---|---|---|---|---|---|'
for words in "-N2 -n2" "--mpi=pmi2 -N1 -n2" "--mpi=pmi2 -N2 -n2" "--mpi=pmix -N1 -n2"; do
    # shellcheck disable=SC2086
    try wheel "srun $words" srun $words
done
try openmpi "srun -N2 -n2" srun -N2 -n2 # in each of these three MPI_Init alone ends the process, or may
try openmpi "srun --mpi=pmi2 -N2 -n2" srun --mpi=pmi2 -N2 -n2
try mpich "srun --mpi=pmi2 -N2 -n2" srun --mpi=pmi2 -N2 -n2
try openmpi "srun --mpi=pmix -N1 -n2" srun --mpi=pmix -N1 -n2
try wheel "sbatch -N2 -n2, no srun" batch
try wheel "sbatch -N2 -n2, srun" batch srun
try wheel "salloc -N2 -n2, no srun" salloc -N2 -n2
try openmpi "Open MPI's mpirun -n 2" mpirun.openmpi -n 2
try mpich "Debian MPICH's mpiexec -n 2" mpiexec.mpich -n 2
try wheel "the wheel's mpiexec -n 2" "$WHEEL" -n 2
try openmpi "Open MPI's mpirun -n 2 in sbatch" batch mpirun.openmpi -n 2
try mpich "Debian MPICH's mpiexec -n 2 in sbatch" batch mpiexec.mpich -n 2
try wheel "the wheel's mpiexec -n 2 in sbatch" batch "$WHEEL" -n 2
try wheel "python -m fddp run -n 2" "$FOLDER/wheel/bin/python" -m fddp run -n 2 --
try wheel "FDDP_\* by hand" by_hand
try wheel "torchrun --nproc-per-node 2" "$FOLDER/torch/bin/torchrun" --nproc-per-node 2 --no-python
PRTERUN=("$FOLDER/prrte/bin/prterun" --allow-run-as-root --map-by :OVERSUBSCRIBE -n 2) MEET=FDDP_COORDINATOR=127.0.0.1:47
try wheel "prterun -n 2" "${PRTERUN[@]}" # each rank trains alone, and says so
try wheel "prterun -n 2, with FDDP_SIZE" env FDDP_SIZE=2 "${MEET}12" "${PRTERUN[@]}"
try wheel "torchrun's variables" with_variables RANK=%r WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=4713 --
try wheel "JAX's variables" with_variables JAX_PROCESS_ID=%r JAX_NUM_PROCESSES=2 JAX_COORDINATOR_ADDRESS=127.0.0.1:4714 --
FLUX=(FLUX_TASK_RANK=%r FLUX_JOB_SIZE=2 FLUX_TASK_LOCAL_ID=%r PMI_RANK=%r PMI_SIZE=2)
try wheel "Flux's variables" with_variables "${FLUX[@]}" -- # an error that says what is missing
try wheel "Flux's variables, with a place to meet" with_variables "${FLUX[@]}" "${MEET}15" --
PALS=(PALS_RANKID=%r PALS_LOCAL_RANKID=%r PMI_RANK=%r PMI_SIZE=2)
try wheel "PALS's variables, with a place to meet" with_variables "${PALS[@]}" "${MEET}16" --
MVAPICH=(MV2_COMM_WORLD_RANK=%r MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_LOCAL_RANK=%r)
try wheel "MVAPICH's variables, with a place to meet" with_variables "${MVAPICH[@]}" "${MEET}17" --
try wheel "an Indexed Job's variable" with_variables JOB_COMPLETION_INDEX=%r -- # as under prterun
try wheel "an Indexed Job's variable, with FDDP_SIZE" with_variables JOB_COMPLETION_INDEX=%r FDDP_SIZE=2 "${MEET}18" --
try wheel "FDDP_\* by hand, on two hosts" on_two_hosts wheel --gloo
try wheel "the wheel's mpiexec -hosts, on two hosts" on_two_hosts wheel
try mpich "Debian MPICH's mpiexec -hosts, on two hosts" on_two_hosts mpich
try wheel "Open MPI's mpirun -n 2: another MPI" mpirun.openmpi -n 2 # MPI_Init ends the process
