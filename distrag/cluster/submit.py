"""A config submitted: checked and planned on this machine first, then handed to a scheduler, and followed to its end where asked."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torchx.runner import Runner
from torchx.runner import config as torchx_config
from torchx.specs import AppDef, AppDryRunInfo, InvalidRunConfigException

from distrag.cluster.app import Spec
from distrag.cluster.jobs import SCHEDULERS
from distrag.cluster.resources import build_resource
from distrag.config import RunConfig, read_config
from distrag.problem import problem
from distrag.training.plan import plan_run

DEFAULTS = Path("launch/torchxconfig")
"""Settings of schedulers for whoever starts in the folder above; `.torchxconfig` there or at home, or TORCHXCONFIG, come first."""


def check(words: Sequence[str], spec: Spec) -> tuple[RunConfig, dict[str, Any]]:
    """Returns config and plan of a training job; what the job would be refused for is refused here.

    Args:
        words: of `distrag train`.
        spec: how it is to be run.

    Raises:
        ValueError: a config, store or plan that cannot be trained, or memory that cannot be enough.
    """
    config = read_config(words, writes=False)
    numbers = plan_run(config, spec.size.world_size, ranks_per_node=spec.size.ranks, planner_s=0)
    _check_device(config, spec)
    _check_memory(numbers, spec)
    return config, numbers


def _check_device(config: RunConfig, spec: Spec) -> None:
    if config.train.device == "cuda" and build_resource(spec.ask, spec.size).gpu == 0:
        todo = "give --gpu or a --resource with GPUs, or set --train.device=auto"
        raise problem(
            "The config wants GPUs and the job asks for none", got="gpu 0", wanted="a GPU a rank", where="train.device", todo=todo
        )


def _check_memory(numbers: dict[str, Any], spec: Spec) -> None:
    resource = build_resource(spec.ask, spec.size)
    expected = int(numbers["memory_per_rank"]["total_bytes"]) * spec.size.ranks
    if 0 < resource.memMB * 2**20 < expected and resource.gpu == 0:
        raise problem(
            "The job asks for less memory than its ranks will hold",
            got=f"{resource.memMB:,} MiB a machine",
            wanted=f"more than {expected / 2**20:,.0f} MiB, and interpreters and libraries beside (some 700 MiB a rank)",
            where="--memory",
            todo="ask for more memory, or for fewer ranks a machine, or lower batching.max_tokens",
        )


def describe_ask(spec: Spec, scheduler: str) -> str:
    """Returns in a line what is asked of the scheduler."""
    resource = build_resource(spec.ask, spec.size)
    has = [f"{resource.cpu:g} cores", f"{resource.gpu} GPUs" if resource.gpu else "no GPU (it trains on the CPU)"]
    has.append(f"{resource.memMB:,} MiB" if resource.memMB > 0 else "the scheduler's own default of memory")
    again = f"{spec.max_restarts} restarts of its ranks, {spec.max_retries} of the whole job"
    return f"{scheduler}: {spec.size.nodes} machine(s) with {', '.join(has)}; {spec.size.world_size} rank(s); {again}"


def read_options(runner: Runner, scheduler: str, words: Iterable[str]) -> dict[str, Any]:
    """Returns the scheduler's options: words, before files.

    Args:
        runner: from `open_runner`.
        scheduler: one of `SCHEDULERS`.
        words: such as `partition=low`; the first '=' ends the key.

    Raises:
        ValueError: an option that the scheduler does not have, or a file that is not there.
    """
    known = runner.scheduler_run_opts(scheduler)
    options: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if known.get(key) is None or not equals:
            names = [name for name, _ in known]
            near = difflib.get_close_matches(key, names, 1)
            wanted = f"KEY=VALUE, the key one of {', '.join(names)}" + (f"; did you mean {near[0]!r}?" if near else "")
            raise problem(f"Not an option of {scheduler}", got=word, wanted=wanted, where="--cfg", todo="choose one of these")
        options |= known.cfg_from_str(f"{key}={value}")
    try:
        torchx_config.apply(scheduler, options)
    except FileNotFoundError as error:
        todo = "mend or unset TORCHXCONFIG"
        raise problem("Settings of TorchX are not there", got=str(error), wanted="a file", where="TORCHXCONFIG", todo=todo) from None
    if DEFAULTS.is_file():
        with DEFAULTS.open() as file:
            torchx_config.load(scheduler, file, options)
    return options


def dry_run(runner: Runner, app: AppDef, scheduler: str, options: dict[str, Any]) -> AppDryRunInfo[Any]:
    """Returns what would be given to the scheduler.

    Args:
        runner: from `open_runner`.
        app: from `distrag.cluster.app`.
        scheduler: one of `SCHEDULERS`.
        options: from `read_options`.

    Raises:
        ValueError: an option is missing, Kubernetes without an image, or without its package.
    """
    if scheduler == "kubernetes":
        _check_kubernetes(app)
    try:
        return runner.dryrun(app, scheduler, cfg=options)
    except InvalidRunConfigException as error:
        todo = f"give --cfg {error.cfg_key}=..., or write it into {DEFAULTS}"
        raise problem(
            "An option of the scheduler is missing", got="nothing", wanted=f"{scheduler}'s {error.cfg_key}", where="--cfg", todo=todo
        ) from None


def _check_kubernetes(app: AppDef) -> None:
    if not all(role.image for role in app.roles):
        todo = "build an image that has distrag and its `python` on PATH, and give --image"
        raise problem("Kubernetes runs containers", got="no image", wanted="the name of one", where="--image", todo=todo)
    try:
        import kubernetes  # noqa: F401
    except ImportError:
        todo = "pip install 'distrag[kubernetes]'"
        raise problem(
            "The package of Kubernetes is missing", got="no `kubernetes`", wanted="its client", where="this Python", todo=todo
        ) from None


def schedule(runner: Runner, info: AppDryRunInfo[Any]) -> str:
    """Returns the handle of the job, now with its scheduler.

    Raises:
        ValueError: the scheduler is not there or does not take the job.
    """
    try:
        handle: str = runner.schedule(info)
        return handle
    except ValueError:
        raise
    except Exception as error:
        scheduler = info._scheduler or "the scheduler"
        todo = "`distrag doctor` tells which schedulers answer; `distrag submit --dryrun` shows what they are given"
        raise problem(
            f"{scheduler} does not take the job", got=f"{type(error).__name__}: {error}", wanted="a job", where=scheduler, todo=todo
        ) from error


def check_scheduler(name: str) -> None:
    """Refuses a scheduler that is not supported.

    Raises:
        ValueError: another name than those of `SCHEDULERS`.
    """
    if name not in SCHEDULERS:
        near = difflib.get_close_matches(name, SCHEDULERS, 1)
        wanted = f"one of {', '.join(SCHEDULERS)}" + (f"; did you mean {near[0]!r}?" if near else "")
        raise problem("An unknown scheduler", got=name, wanted=wanted, where="--scheduler", todo="choose one of these")
