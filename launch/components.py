"""TorchX components: `torchx run -s slurm launch/components.py:train --config configs/quickstart.yaml -j 2x8 --resource gpu_h100_8`.

More words of the command follow after `--`: `... -- --train.run_dir runs/mine`. What a job is made of stands in `distrag/cluster/app.py`;
`distrag submit` makes the same jobs, and checks config, store and plan first.
"""

from typing import Any

from torchx.specs import AppDef

from distrag.cluster.app import build_alone, build_both, build_ranks, read_spec, refuses
from distrag.cluster.environment import parse_pairs, split_list


def _spec(j: str, env: str, mounts: str, **rest: Any) -> Any:
    return read_spec(j, env=parse_pairs(split_list(env)), mounts=[mounts] if mounts else [], **rest)


@refuses
def train(
    *words: str,
    config: str,
    j: str = "1x1",
    resource: str = "",
    cpu: int = 0,
    gpu: int = 0,
    memory: str = "",
    env: str = "",
    name: str = "train",
    image: str = "",
    mounts: str = "",
    max_restarts: int = 3,
    max_retries: int = 0,
    port: int = 0,
    log_dir: str = "",
) -> AppDef:
    """Trains a config on one or many machines.

    Args:
        words: more words of `distrag train`, after `--`
        config: YAML of a run
        j: job size: RANKS, MACHINESxRANKS or LEAST:MOSTxRANKS (elastic)
        resource: what a machine has, by name: cpu_small, cpu_large, gpu_a100_1, gpu_a100_8, gpu_h100_1, gpu_h100_8, or one of TorchX
        cpu: cores of a machine; otherwise those of the resource, or one a rank
        gpu: GPUs of a machine; otherwise those of the resource, or none
        memory: memory of a machine, such as 64GiB; otherwise that of the resource, or what the scheduler gives
        env: environment variables; values with commas in quotes: A=1,B='x,y=z'
        name: of the job
        image: container with distrag, for Kubernetes
        mounts: such as type=volume,src=CLAIM,dst=/data
        max_restarts: how often torchrun restarts the ranks
        max_retries: how often the scheduler starts the whole job again after a failure
        port: where machines meet; 0 takes one that depends on the job
        log_dir: folder in which torchrun keeps what each rank prints
    """
    options = {"resource": resource, "cpu": cpu, "gpu": gpu, "memory": memory, "name": name, "image": image}
    spec = _spec(j, env, mounts, **options, max_restarts=max_restarts, max_retries=max_retries, port=port, log_dir=log_dir)
    return build_ranks("train", ["--config", config, *words], spec)


@refuses
def evaluate(
    *words: str,
    run: str,
    j: str = "1x1",
    resource: str = "",
    cpu: int = 0,
    gpu: int = 0,
    memory: str = "",
    env: str = "",
    name: str = "evaluate",
    image: str = "",
    mounts: str = "",
) -> AppDef:
    """Computes the metrics of a run again.

    Args:
        words: more words of `distrag evaluate`, after `--`
        run: folder of the run
        j: job size: RANKS or MACHINESxRANKS
        resource: what a machine has, by name
        cpu: cores of a machine
        gpu: GPUs of a machine
        memory: memory of a machine, such as 64GiB
        env: environment variables; values with commas in quotes
        name: of the job
        image: container with distrag, for Kubernetes
        mounts: such as type=volume,src=CLAIM,dst=/data
    """
    spec = _spec(j, env, mounts, resource=resource, cpu=cpu, gpu=gpu, memory=memory, name=name, image=image)
    return build_ranks("evaluate", [run, *words], spec)


@refuses
def prepare(
    *words: str,
    source: str,
    out: str,
    resource: str = "",
    cpu: int = 0,
    memory: str = "",
    env: str = "",
    name: str = "prepare",
    image: str = "",
    mounts: str = "",
) -> AppDef:
    """Makes a store of files.

    Args:
        words: more words of `distrag prepare`, after `--`
        source: files, folders, globs, a schema YAML, ml-100k or synthetic; several with commas between
        out: folder of the store
        resource: what the machine has, by name
        cpu: its cores
        memory: its memory, such as 64GiB
        env: environment variables; values with commas in quotes
        name: of the job
        image: container with distrag, for Kubernetes
        mounts: such as type=volume,src=CLAIM,dst=/data
    """
    spec = _spec("1x1", env, mounts, resource=resource, cpu=cpu, memory=memory, name=name, image=image)
    return build_alone("prepare", [*split_list(source), "--out", out, *words], spec)


@refuses
def plan(
    *words: str,
    config: str,
    world_size: int,
    resource: str = "",
    cpu: int = 0,
    memory: str = "",
    env: str = "",
    name: str = "plan",
    image: str = "",
    mounts: str = "",
) -> AppDef:
    """Prints steps, balance, memory and placement of a config on so many ranks.

    Args:
        words: more words of `distrag plan`, after `--`
        config: YAML of a run
        world_size: ranks to plan for
        resource: what the machine has, by name
        cpu: its cores
        memory: its memory, such as 64GiB
        env: environment variables; values with commas in quotes
        name: of the job
        image: container with distrag, for Kubernetes
        mounts: such as type=volume,src=CLAIM,dst=/data
    """
    spec = _spec("1x1", env, mounts, resource=resource, cpu=cpu, memory=memory, name=name, image=image)
    return build_alone("plan", [config, "--world-size", str(world_size), *words], spec)


@refuses
def prepare_and_train(
    *words: str,
    source: str,
    out: str,
    config: str,
    schema: str = "",
    user: str = "",
    item: str = "",
    time: str = "",
    j: str = "1x1",
    resource: str = "",
    cpu: int = 0,
    gpu: int = 0,
    memory: str = "",
    env: str = "",
    name: str = "train",
    image: str = "",
    mounts: str = "",
    max_restarts: int = 3,
    max_retries: int = 0,
    port: int = 0,
    log_dir: str = "",
) -> AppDef:
    """Makes a store where there is none yet, on the first machine, and then trains on all; the folder must be the same on all machines.

    Args:
        words: more words of `distrag train`, after `--`
        source: files, folders, globs, a schema YAML, ml-100k or synthetic; several with commas between
        out: folder of the store
        config: YAML of a run; its data.path becomes `out`
        schema: YAML that names features
        user: column of the user in a CSV of events
        item: column of the item in a CSV of events
        time: column of the time in a CSV of events
        j: job size: RANKS, MACHINESxRANKS or LEAST:MOSTxRANKS (elastic)
        resource: what a machine has, by name
        cpu: cores of a machine
        gpu: GPUs of a machine
        memory: memory of a machine, such as 64GiB
        env: environment variables; values with commas in quotes
        name: of the job
        image: container with distrag, for Kubernetes
        mounts: such as type=volume,src=CLAIM,dst=/data
        max_restarts: how often torchrun restarts the ranks
        max_retries: how often the scheduler starts the whole job again after a failure
        port: where machines meet; 0 takes one that depends on the job
        log_dir: folder in which torchrun keeps what each rank prints
    """
    options = {"resource": resource, "cpu": cpu, "gpu": gpu, "memory": memory, "name": name, "image": image}
    spec = _spec(j, env, mounts, **options, max_restarts=max_restarts, max_retries=max_retries, port=port, log_dir=log_dir)
    given = {"--schema": schema, "--user": user, "--item": item, "--time": time}
    more = [word for name, value in given.items() if value for word in (name, value)]
    return build_both([*split_list(source), *more], out, ["--config", config, *words], spec)
