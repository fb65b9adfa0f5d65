#!/bin/bash
# Every launcher, for real: sudo bash bench/launchers.sh FOLDER
# Runs the README's first script and models/train.py under Slurm (two nodes on this machine), Open MPI and MPICH, and
# prints a table: what started the ranks, what fddp found (rank of size, backend), and how the two scripts ended.
# Debian's packages and /etc/slurm stay; the daemons that it starts end with it, and /etc/hosts is as before.
# FOLDER keeps three environments for the next time, and what every run said, in FOLDER/logs.
set -u
FOLDER=$(realpath -m "${1:?say in which folder}"); ROOT=$(realpath "$(dirname "$0")/.."); LOGS=$FOLDER/logs
mkdir -p "$LOGS" "$FOLDER"/slurm/{state,spool.n1,spool.n2}

### What it needs

export DEBIAN_FRONTEND=noninteractive
command -v srun mpiexec.openmpi mpiexec.mpich >/dev/null || { apt-get update -q && apt-get install -qy \
    --no-install-recommends slurm-wlm munge openmpi-bin libopenmpi-dev mpich libmpich-dev libpmix2; } >"$LOGS/apt" 2>&1

# As the README says it, with plain pip. An nvcc without headers needs CUDA_PATH, and elsewhere it does nothing.
export CUDA_PATH=/usr/local/cuda
environment() { # NAME, then a command that installs into it
    local name=$1; shift
    [ -e "$FOLDER/$name/ready" ] && return
    python3 -m venv "$FOLDER/$name"
    (cd "$ROOT" && PATH="$FOLDER/$name/bin:$PATH" bash -ec "$*") >"$LOGS/install.$name" 2>&1 \
        && touch "$FOLDER/$name/ready" || { tail -5 "$LOGS/install.$name"; exit 1; }
}
environment wheel "pip install mpich && pip install --no-cache-dir '.[mpi,train]'"
environment openmpi "MPI4JAX_BUILD_MPICC=mpicc.openmpi pip install --no-cache-dir '.[train]' mpi4py mpi4jax"
# Debian's libmpi.so is Open MPI's where both are installed, and mpi4py's wheel would take that one.
environment mpich "MPICC=mpicc.mpich MPI4JAX_BUILD_MPICC=mpicc.mpich pip install --no-cache-dir --no-binary mpi4py '.[train]' mpi4py mpi4jax"
for name in wheel openmpi mpich; do # the code as it is now: a copy, not this checkout
    (cd "$ROOT" && "$FOLDER/$name/bin/python" -m pip install -q --no-deps --force-reinstall .) || exit 1
done

### Slurm: two nodes on this machine

STARTED=()
finish() {
    for process in "${STARTED[@]}"; do kill "$process" 2>/dev/null; done
    sed -i '/ # bench\/launchers.sh$/d' /etc/hosts
}
trap finish EXIT
daemon() { # a daemon that stays in the foreground, so that its id is known
    "$@" >>"$LOGS/daemons" 2>&1 &
    STARTED+=($!)
}
echo "127.0.0.1 n1 n2 # bench/launchers.sh" >>/etc/hosts
mkdir -p /etc/slurm /run/munge && chown munge: /run/munge
HOST=$(hostname)
cat >/etc/slurm/slurm.conf <<CONF
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
printf 'CgroupAutomount=no\nConstrainCores=no\n' >/etc/slurm/cgroup.conf
pgrep -x munged >/dev/null || daemon setpriv --reuid=munge --regid=munge --clear-groups munged --foreground
sleep 1; daemon slurmctld -D; sleep 3; daemon slurmd -D -N n1; daemon slurmd -D -N n2; sleep 5
sinfo -h -o '%D nodes, %t' || { tail -5 "$LOGS/daemons"; exit 1; }

### What is run

awk '/^```python/ {on = 1; next} /^```/ {if (on) exit} on' "$ROOT/README.md" >"$FOLDER/first.py"
echo 'print(f"found {group.rank} of {group.processes}, {group.backend}", flush=True)' >>"$FOLDER/first.py"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 NPROC=2
cd "$FOLDER" || exit 1

outcome() { # STATUS LOG: ok, or the status and the line that says why
    if [ "$1" = 0 ]; then echo ok; return; fi
    echo "$1: $(grep -aE '^(fddp|[A-Za-z]*Error|.*Abort)' "$2" | tail -1 | cut -c1-160)"
}
try() { # ENVIRONMENT NAME COMMAND…: runs both scripts with COMMAND in front
    local environment=$1 name=$2 log; shift 2
    log=$LOGS/$(tr -c 'a-zA-Z0-9\n' _ <<<"$environment $name")
    timeout -k 10 300 "$@" "$FOLDER/$environment/bin/python" "$FOLDER/first.py" >"$log.first" 2>&1
    local first=$?
    timeout -k 10 300 "$@" "$FOLDER/$environment/bin/python" "$ROOT/models/train.py" --preset tiny --steps 4 \
        --out "$FOLDER/runs" >"$log.train" 2>&1
    local train=$? found said drawn=
    found=$(sed -n 's/.*found \(.*, [a-z]*\)$/\1/p' "$log.first" | sort | paste -sd ';')
    said=$(grep -ah '^fddp: ' "$log.first" | sort | uniq -c | sed 's/^ *\([0-9]*\) /\1 × /' | paste -sd ';' | cut -c1-200)
    grep -aqE 'loss nan|'$'\x1b' "$log.train" && drawn=', with nan or a redrawn bar'
    echo "| $name | $environment | $found | $(outcome $first "$log.first") | $(outcome $train "$log.train")$drawn | $said |"
}
cat >"$FOLDER/batch" <<'SCRIPT'
#!/bin/bash
# The command line as a script of sbatch -N2 -n2, and what it said.
said=$(mktemp) && sbatch -W -N2 -n2 -o "$said" --wrap "$*" >/dev/null; status=$?
cat "$said"; rm "$said"; exit $status
SCRIPT
chmod +x "$FOLDER/batch"; PATH=$PATH:$FOLDER
WHEEL=$FOLDER/wheel/bin/mpiexec

echo '| launcher | environment | fddp found | first script | models/train.py | fddp said |'
echo '|---|---|---|---|---|---|'
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
try wheel "Open MPI's mpirun -n 2: another MPI" mpirun.openmpi -n 2 # an error in fddp's words
