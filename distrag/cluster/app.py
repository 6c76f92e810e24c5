"""A command of distrag as a TorchX app: what each machine of a job runs, with which environment and on what.

| hop | where | in | out |
|---|---|---|---|
| 1 | `sizes`, `resources`, `environment` | words of the user | a Size, a Resource, variables; all refusals |
| 2 | `app` | those, and the words of the command | an AppDef: one role, as many replicas as machines |
| 3 | TorchX, `slurm` | the AppDef | processes, an sbatch script, or a Volcano job |
| 4 | `agent`, which is torchrun, on each machine | the command | ranks, and an exit code that tells why they ended |
"""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from torchx.specs import AppDef, Role, macros, parse_mounts

from distrag.cluster.environment import keep_dollars, split_plain
from distrag.cluster.resources import Ask, build_resource
from distrag.cluster.sizes import Size, parse_size
from distrag.problem import problem

SETTINGS = {
    # torchrun of torch 2.13 hands restarted workers the addresses of dead ones unless every attempt gets a store of its own.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "PYTHONUNBUFFERED": "1",
}
"""What every job has in its environment, unless the user says otherwise."""

_SHUTDOWN_S = 120
_STAGE_S = 24 * 3600


@dataclass(frozen=True)
class Spec:
    """How a command is to be run as a job.

    Attributes:
        size: machines and ranks.
        ask: what each machine has.
        env: more environment variables.
        name: of the job; '' takes the command's.
        image: container for Kubernetes or docker; '' runs this Python, in this folder.
        max_restarts: how often torchrun restarts the ranks after one has failed.
        max_retries: how often the scheduler starts the whole job again after it has failed; being pre-empted is not counted on Slurm.
        mounts: words of TorchX's mounts: `type=volume`, `src=claim`, `dst=/data`.
        port: where the machines meet on the first of them; 0 takes one that depends on the job.
        log_dir: folder in which torchrun keeps what each rank prints; '' keeps none.
    """

    size: Size
    ask: Ask = field(default_factory=Ask)
    env: dict[str, str] = field(default_factory=dict)
    name: str = ""
    image: str = ""
    max_restarts: int = 3
    max_retries: int = 0
    mounts: Sequence[str] = ()
    port: int = 0
    log_dir: str = ""


def refuses(component: Callable[..., AppDef]) -> Callable[..., AppDef]:
    """Returns a TorchX component whose refusals are a message, not a traceback."""

    @functools.wraps(component)
    def told(*args: Any, **options: Any) -> AppDef:
        try:
            return component(*args, **options)
        except ValueError as error:
            raise SystemExit(f"distrag: {error}") from None

    return told


def build_ranks(command: str, words: Sequence[str], spec: Spec, *, first: str = "") -> AppDef:
    """Returns the app that runs a command of distrag on ranks, under torchrun on each machine.

    Args:
        command: `train` or `evaluate`.
        words: its words, which reach it unchanged.
        spec: how to run it.
        first: a shell command that the first machine runs before; the others wait for it.

    Raises:
        ValueError: what `spec` asks for cannot be.
    """
    for what, number in (("max_restarts", spec.max_restarts), ("max_retries", spec.max_retries)):
        if number < 0:
            raise problem("Not a number of times", got=number, wanted="0 or more", where=what, todo=f"set {what} to 0 or more")
    torchrun = [_python(spec), "-m", "distrag.cluster.agent", "--rdzv-backend", "c10d", "--rdzv-id", macros.app_id]
    torchrun += ["--nnodes", f"{spec.size.least}:{spec.size.nodes}" if spec.size.is_elastic else str(spec.size.nodes)]
    torchrun += ["--nproc-per-node", str(spec.size.ranks), "--max-restarts", str(spec.max_restarts)]
    torchrun += ["--shutdown-timeout", str(_SHUTDOWN_S), "--tee", "3", "--role", ""]
    if first and spec.size.nodes > 1:
        torchrun += ["--rdzv-conf", f"timeout={_STAGE_S}"]
    if spec.log_dir:
        torchrun += ["--log-dir", keep_dollars(spec.log_dir)]
    before, endpoint = _meeting(spec)
    if first:
        before = [f'if [ "{macros.replica_id}" = 0 ]; then {keep_dollars(first)} || exit; fi', *before]
    end = ["-m", "distrag", command, *map(keep_dollars, words)]
    return _build_app(command, [*before, f"exec {_join(torchrun)} --rdzv-endpoint {endpoint} {_join(end)}"], spec)


def build_alone(command: str, words: Sequence[str], spec: Spec) -> AppDef:
    """Returns the app that runs a command of distrag in one process.

    Args:
        command: `prepare` or `plan`.
        words: its words, which reach it unchanged.
        spec: how to run it; of the size one machine with one rank.

    Raises:
        ValueError: what `spec` asks for cannot be.
    """
    return _build_app(command, [f"exec {_join([_python(spec), '-m', 'distrag', command, *map(keep_dollars, words)])}"], spec)


def build_both(source: Sequence[str], out: str, words: Sequence[str], spec: Spec) -> AppDef:
    """Returns the app whose first machine prepares a store, where there is none yet, and that then trains on it.

    Args:
        source: words of `distrag prepare`, but for `--out`.
        out: folder of the store, the same on all machines.
        words: of `distrag train`.
        spec: how to run it.

    Raises:
        ValueError: what `spec` asks for cannot be.
    """
    prepare = shlex.join([_python(spec), "-m", "distrag", "prepare", *source, "--out", out])
    there = shlex.join(["test", "-f", str(PurePath(out) / "schema.yaml")])
    return build_ranks("train", [*words, "--data.path", out], spec, first=f"{there} || {prepare}")


def read_spec(
    size: str,
    *,
    resource: str = "",
    cpu: int = 0,
    gpu: int = 0,
    memory: str = "",
    env: Mapping[str, str] | None = None,
    mounts: Sequence[str] = (),
    **rest: Any,
) -> Spec:
    """Returns the spec that words of a command line mean.

    Args:
        size: such as `1x2`.
        resource: name of what a machine has; '' for none.
        cpu: as in `Ask`.
        gpu: as in `Ask`.
        memory: as in `Ask`.
        env: environment variables.
        mounts: such as `type=volume,src=claim,dst=/data`.
        rest: other attributes of `Spec`.

    Raises:
        ValueError: a size that cannot be.
    """
    words = [word for mount in mounts for word in mount.split(",")]
    return Spec(parse_size(size), Ask(resource, cpu, gpu, memory), dict(env or {}), mounts=words, **rest)


def _python(spec: Spec) -> str:
    return "python" if spec.image else sys.executable


def _join(words: Iterable[str]) -> str:
    """Returns words as a shell reads them back, but for TorchX's macros, whose values have no spaces."""
    return " ".join(word if word == macros.app_id else shlex.quote(word) for word in words)


def _meeting(spec: Spec) -> tuple[list[str], str]:
    """Returns shell commands that find out where the machines meet, and the word that says it."""
    if spec.size.nodes == 1:
        return [], "localhost:0"
    host = f"$${{{macros.rank0_env}:=localhost}}"
    if spec.port:
        return [], f'"{host}:{spec.port}"'
    # Below the ports that kernels give away by themselves, and another one for each job, since jobs share machines.
    number = f"port=$$((20000 + $$(printf %s {macros.app_id} | cksum | cut -d' ' -f1) % 10000))"
    return [number], f'"{host}:$$port"'


def _build_app(command: str, lines: Sequence[str], spec: Spec) -> AppDef:
    plain, odd = split_plain(SETTINGS | spec.env)
    exports = [f"export {name}={shlex.quote(keep_dollars(value))}" for name, value in odd.items()]
    role = Role(
        name=command,
        image=spec.image,
        entrypoint="bash",
        args=["-c", "; ".join([*exports, *lines])],
        env={name: keep_dollars(value) for name, value in plain.items()},
        num_replicas=spec.size.nodes,
        min_replicas=spec.size.least if spec.size.is_elastic else None,
        max_retries=spec.max_retries,
        resource=build_resource(spec.ask, spec.size),
        port_map={"c10d": spec.port} if spec.port else {},
        mounts=_mounts(spec),
    )
    return AppDef(name=spec.name or command, roles=[role])


def _mounts(spec: Spec) -> list[Any]:
    try:
        return list(parse_mounts(list(spec.mounts)))
    except (KeyError, ValueError) as error:
        wanted = "type=bind,src=/host,dst=/there[,readonly] or type=volume,src=CLAIM,dst=/there[,readonly]"
        todo = "write each mount like that, the type first"
        raise problem("A mount cannot be read", got=",".join(spec.mounts), wanted=wanted, where="--mount", todo=todo) from error
