#!/usr/bin/env bash
# A real Slurm on this one machine, to try jobs on and for the tests: two nodes, accounting, a partition that is pre-empted. Debian or Ubuntu, as root.
#
#   ./launch/slurm.sh install      the packages (apt; about half a minute)
#   ./launch/slurm.sh up DIR       starts it; all of its state lies in DIR. Then: export SLURM_CONF=DIR/slurm.conf
#   ./launch/slurm.sh down DIR     ends every job and daemon of it
#
# `low` is the default partition; a job in `high` pre-empts those of `low`, which get SIGTERM, 30 s, and are queued again.
# A machine that has a Slurm of its own at work is left alone. The names of the nodes stand in /etc/hosts from `up` to `down`.
set -euo pipefail
NODES=2 CPUS=4 MEMORY_MB=8000
MARK='# distrag: nodes of launch/slurm.sh'

say() { printf 'slurm: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

is_installed() { command -v slurmctld slurmd slurmdbd sbatch munged mariadbd >/dev/null; }

install_packages() {
    if is_installed; then return; fi
    [[ $EUID -eq 0 ]] || die 'installing needs root'
    command -v apt-get >/dev/null || die 'no apt-get here; install slurmctld, slurmd, slurmdbd, slurm-client, munge and mariadb-server by hand'
    local log
    log=$(mktemp)
    say 'installing slurmctld, slurmd, slurmdbd, munge and mariadb-server'
    # A policy that forbids it keeps the packages from starting daemons of their own.
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d.distrag && chmod +x /usr/sbin/policy-rc.d.distrag
    [[ -e /usr/sbin/policy-rc.d ]] || { mv /usr/sbin/policy-rc.d.distrag /usr/sbin/policy-rc.d; trap 'rm -f /usr/sbin/policy-rc.d' EXIT; }
    rm -f /usr/sbin/policy-rc.d.distrag
    if ! { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
        slurmctld slurmd slurm-client slurmdbd munge mariadb-server; } >"$log" 2>&1 </dev/null; then
        tail -n 5 "$log" >&2
        die "apt could not install them (log: $log)"
    fi
    rm -f "$log"
}

wait_for() { # what, seconds, command ...
    local what=$1 end=$((SECONDS + $2))
    shift 2
    while ((SECONDS < end)); do
        if timeout 5 "$@" >/dev/null 2>&1; then return; fi
        sleep 0.1
    done
    die "$what is not there in time (logs: $dir/log)"
}

free_ports() { # so many ports that nobody listens on
    python3 - "$1" <<'PY'
import socket, sys

held = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*(each.getsockname()[1] for each in held))
PY
}

start_munge() { # with a key and a socket of its own
    local own="$dir/munge"
    (umask 077 && head -c 1024 /dev/urandom >"$own/key")
    # Forced, since it refuses a socket that not everybody can reach; here nobody else should.
    munged --force --key-file="$own/key" --socket="$own/socket" --pid-file="$own/pid" --log-file="$own/log" --seed-file="$own/seed" \
        --num-threads=2 2>/dev/null
    wait_for munge 10 munge -n --socket="$own/socket"
}

start_database() { # db port
    mariadb-install-db --no-defaults --user=root --datadir="$dir/db" --auth-root-authentication-method=socket --skip-test-db >"$dir/log/db-install.log" 2>&1
    setsid mariadbd --no-defaults --user=root --datadir="$dir/db" --socket="$dir/db/sock" --pid-file="$dir/db/pid" --bind-address=127.0.0.1 \
        --port="$1" --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 >"$dir/log/mariadbd.log" 2>&1 </dev/null &
    wait_for 'the database' 60 mariadb-admin --no-defaults -uroot -S "$dir/db/sock" ping
    local user
    for user in "slurm@'127.0.0.1'" slurm@localhost; do
        echo "create user $user identified by 'slurm'; grant all on slurm_acct_db.* to $user;"
    done | { echo 'create database slurm_acct_db;'; cat; } | mariadb --no-defaults -uroot -S "$dir/db/sock"
}

write_config() { # db, slurmdbd and slurmctld port, then one for each node
    local db=$1 dbd=$2 ctld=$3 host i
    shift 3
    host=$(hostname -s)
    cat >"$dir/slurmdbd.conf" <<CONF
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=$dbd
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$db
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
LogFile=$dir/log/slurmdbd.log
PidFile=$dir/slurmdbd.pid
CONF
    chmod 600 "$dir/slurmdbd.conf"
    cat >"$dir/slurm.conf" <<CONF
ClusterName=distrag
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$ctld
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$dbd
AccountingStoragePass=$dir/munge/socket
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
ReturnToService=2
MpiDefault=none
CONF
    for ((i = 1; i <= NODES; i++)); do
        mkdir -p "$dir/spool-n$i"
        echo "NodeName=n$i NodeHostname=$host NodeAddr=127.0.0.1 Port=${*:i:1} CPUs=$CPUS RealMemory=$MEMORY_MB State=UNKNOWN"
    done >>"$dir/slurm.conf"
    cat >>"$dir/slurm.conf" <<CONF
PartitionName=low Nodes=n[1-$NODES] Default=YES DefMemPerNode=2000 MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=30 PreemptMode=REQUEUE
PartitionName=high Nodes=n[1-$NODES] DefMemPerNode=2000 MaxTime=INFINITE State=UP PriorityTier=10
CONF
}

name_nodes() { # torchrun's machines meet at the name that Slurm has for the first of them
    local names
    names=$(seq -f 'n%g' -s ' ' "$NODES")
    printf '127.0.0.1 %s %s\n' "$names" "$MARK" >>/etc/hosts
}

up() {
    [[ $EUID -eq 0 ]] || die 'starting daemons needs root'
    is_installed || die "Slurm is not installed: $0 install"
    if pgrep -x slurmctld >/dev/null || pgrep -x slurmd >/dev/null; then die 'a Slurm runs here already; it is left alone'; fi
    if [[ -e $dir/slurm.conf ]]; then die "$dir has been used; choose a new folder"; fi
    mkdir -p "$dir"/{state,log,db,munge}
    chmod 755 "$dir/munge"
    export SLURM_CONF=$dir/slurm.conf
    trap 'down' ERR EXIT
    local ports i
    read -ra ports < <(free_ports $((3 + NODES)))
    start_munge
    start_database "${ports[0]}"
    write_config "${ports[@]}"
    name_nodes
    /usr/sbin/slurmdbd
    wait_for slurmdbd 20 sacctmgr -n show cluster
    sacctmgr -i add cluster distrag >/dev/null
    /usr/sbin/slurmctld
    for ((i = 1; i <= NODES; i++)); do /usr/sbin/slurmd -N "n$i"; done
    wait_for 'a node' 60 bash -c "[[ \$(sinfo -h -N -o %t -p low | grep -c '^idle') -eq $NODES ]]"
    trap - ERR EXIT
    say "up, $NODES nodes: export SLURM_CONF=$SLURM_CONF"
}

stop() { # pid files: asks each process to end, waits for all, and ends after 15 s what has not
    local file pids=() _
    for file in "$@"; do
        if [[ -s $file ]] && kill "$(<"$file")" 2>/dev/null; then pids+=("$(<"$file")"); fi
    done
    for _ in $(seq 150); do
        kill -0 "${pids[@]:-}" 2>/dev/null || break
        sleep 0.1
    done
    kill -9 "${pids[@]:-}" 2>/dev/null
}

down() {
    trap - ERR EXIT
    set +e
    export SLURM_CONF=$dir/slurm.conf
    if [[ -s $dir/slurmctld.pid ]]; then
        timeout 10 scancel -u "$(id -un)" 2>/dev/null
    fi
    stop "$dir"/slurmd-*.pid "$dir/slurmctld.pid"
    stop "$dir/slurmdbd.pid" "$dir/munge/pid"
    stop "$dir/db/pid"
    pkill -x slurmstepd 2>/dev/null
    cp /etc/hosts "$dir/hosts" && grep -vF "$MARK" "$dir/hosts" >/etc/hosts # in place: it may be a mount
    set -e
}

case ${1:-} in
    install) install_packages ;;
    up | down)
        [[ -n ${2:-} ]] || die "which folder?  $0 $1 DIR"
        dir=$(realpath -m -- "$2")
        "$1"
        ;;
    *) die "usage: $0 install | up DIR | down DIR" ;;
esac
