#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a command under a Slurm of its own: munged, slurmctld and slurmd on this machine, all in a temporary folder, ended and
# removed with the command. Debian's slurm-wlm, as root; exit 77 with a reason where that cannot be had.
#   with_slurm.sh COMMAND…
set -uo pipefail
skip() { echo "no Slurm here: $1"; exit 77; }
[ "$(id -u)" -eq 0 ] || skip "its daemons start as root alone"
export PATH=$PATH:/usr/sbin:/sbin
for program in munged slurmctld slurmd sbatch; do
    command -v $program >/dev/null || skip "$program is not installed (Debian: slurm-wlm)"
done

folder=$(mktemp -d) pids=()
end() {
    local pid
    # slurmd first, so that the controller hears of it; none is given longer than some seconds.
    for pid in ${pids[@]+"${pids[@]}"}; do kill "$pid" 2>/dev/null; done
    for _ in $(seq 40); do
        local alive=no
        for pid in ${pids[@]+"${pids[@]}"}; do ! kill -0 "$pid" 2>/dev/null || alive=yes; done
        [ $alive = yes ] || break
        sleep 0.1
    done
    for pid in ${pids[@]+"${pids[@]}"}; do kill -9 "$pid" 2>/dev/null; done
    # A step's daemon that waits for the controller, and what a job has left: all that knows of this Slurm.
    local environment
    for environment in /proc/[0-9]*/environ; do
        pid=${environment#/proc/} pid=${pid%/environ}
        [ "$pid" -ne $$ ] && [ "$pid" -ne "$BASHPID" ] || continue
        ! grep -qzFx "SLURM_CONF=$folder/slurm.conf" "$environment" 2>/dev/null || kill -9 "$pid" 2>/dev/null
    done
    rm -rf "$folder"
}
trap end EXIT
trap 'exit 1' INT TERM HUP

# munged insists on folders that nobody else can write to.
mkdir -m 755 "$folder/munge"
mkdir "$folder/state" "$folder/spool"
chmod 755 "$folder"
head -c 128 /dev/urandom >"$folder/munge/key"
chmod 600 "$folder/munge/key"
munged --foreground --force --num-threads=1 --key-file="$folder/munge/key" --socket="$folder/munge/socket" \
    --pid-file="$folder/munge/pid" --log-file="$folder/munge/log" --seed-file="$folder/munge/seed" \
    >"$folder/munge/out" 2>&1 &
pids+=($!)

read -r controller_port node_port < <(python3 - <<'PORTS'
import socket
sockets = [socket.socket() for _ in range(2)]
for s in sockets:
    s.bind(("127.0.0.1", 0))
print(*(s.getsockname()[1] for s in sockets))
PORTS
)
host=$(hostname -s)
cat >"$folder/slurm.conf" <<CONF
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$controller_port
SlurmdPort=$node_port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_res
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,defer_batch
SlurmdParameters=config_overrides
ReturnToService=2
MailProg=/bin/true
KillWait=5
NodeName=$host NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
export SLURM_CONF=$folder/slurm.conf
for _ in $(seq 50); do [ ! -S "$folder/munge/socket" ] || break; sleep 0.1; done
slurmctld -D >"$folder/slurmctld.out" 2>&1 &
pids+=($!)
slurmd -D >"$folder/slurmd.out" 2>&1 &
pids=($! "${pids[@]}")
ready=no
for _ in $(seq 100); do
    if sinfo -h -o %T 2>/dev/null | grep -qx idle; then ready=yes; break; fi
    sleep 0.1
done
if [ $ready = no ]; then
    tail -n 5 "$folder"/*.out "$folder"/*.log "$folder/munge/log" 2>/dev/null
    skip "its daemons do not come up (see above)"
fi
"$@"
