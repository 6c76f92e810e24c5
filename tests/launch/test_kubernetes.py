"""The Volcano job that would be submitted: valid, with the resources, environment, volumes and policies that were asked for."""

from __future__ import annotations

import json
import subprocess
import warnings
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes.client
import pytest

from distrag.cluster.app import build_ranks, read_spec
from distrag.cluster.jobs import open_runner
from distrag.cluster.submit import dry_run

SCHEMA = json.loads(Path(__file__).with_name("volcano_job.json").read_text())


def job_of(size: str, *words: str, **asked: Any) -> dict[str, Any]:
    app = build_ranks("train", ["--config", "c.yaml", *words], read_spec(size, image="registry/distrag:1", **asked))
    with open_runner() as runner, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchX warns of an old Volcano wherever a job may be started again
        info = dry_run(runner, app, "kubernetes", {"queue": "default"})
    client = kubernetes.client.ApiClient()
    job: dict[str, Any] = client.sanitize_for_serialization(info.request.resource)
    return job


def check_model(value: Any, kind: str, where: str) -> None:
    """Refuses what a model of the Kubernetes client does not know: keys, and values of another type."""
    if kind.startswith("list["):
        assert isinstance(value, list), where
        for number, item in enumerate(value):
            check_model(item, kind[5:-1], f"{where}[{number}]")
    elif kind.startswith("dict["):
        assert isinstance(value, dict), where
        for key, item in value.items():
            check_model(item, kind[5:-1].split(", ")[1], f"{where}.{key}")
    elif kind.startswith("V1"):
        model = getattr(kubernetes.client, kind)
        names = {outer: inner for inner, outer in model.attribute_map.items()}
        for key, item in value.items():
            assert key in names, f"{where}: no {key!r} in {kind}"
            check_model(item, model.openapi_types[names[key]], f"{where}.{key}")
        model(**{names[key]: item for key, item in value.items()})  # asks for what is required
    else:
        assert isinstance(value, {"str": str, "int": int, "bool": bool, "object": object}[kind]), f"{where}: {value!r} is no {kind}"


def check_job(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Refuses a job that is not valid; returns its containers."""
    jsonschema.validate(job, SCHEMA)
    names = [task["name"] for task in job["spec"]["tasks"]]
    assert len(set(names)) == len(names)
    for task in job["spec"]["tasks"]:
        check_model(task["template"], "V1PodTemplateSpec", task["name"])
        mounted = {mount["name"] for mount in task["template"]["spec"]["containers"][0]["volumeMounts"]}
        assert mounted <= {volume["name"] for volume in task["template"]["spec"]["volumes"]}
    return [task["template"]["spec"]["containers"][0] for task in job["spec"]["tasks"]]


def test_a_job_of_two_machines_is_valid_and_asks_for_what_was_named() -> None:
    job = job_of("2x8", resource="gpu_h100_8", env={"A": "1"}, mounts=["type=volume,src=claim,dst=/data,readonly"])
    containers = check_job(job)
    assert len(containers) == 2
    for container in containers:
        assert container["resources"]["limits"] == {"cpu": "192000m", "memory": f"{1900 * 1024}M", "nvidia.com/gpu": "8"}
        assert container["resources"]["requests"]["nvidia.com/gpu"] == "8"
        assert container["image"] == "registry/distrag:1"
        environ = {each["name"]: each["value"] for each in container["env"]}
        assert (environ["A"], environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]) == ("1", "1")
        assert {"name": "mount-0", "mountPath": "/data", "readOnly": True} in container["volumeMounts"]
        assert any(mount["mountPath"] == "/dev/shm" for mount in container["volumeMounts"])
    hosts = ["TORCHX_RANK0_HOST", "VC_TRAIN_0_HOSTS"]
    for container, host in zip(containers, hosts, strict=True):
        assert f"${{{host}:=localhost}}:$port" in container["command"][2]
    pods = [task["template"]["spec"] for task in job["spec"]["tasks"]]
    assert {pod["restartPolicy"] for pod in pods} == {"Never"}


def test_without_a_memory_setting_none_is_asked_for() -> None:
    (container,) = check_job(job_of("1x2"))
    assert container["resources"] == {"limits": {"cpu": "2000m"}, "requests": {"cpu": "1900m"}}


def test_retries_start_a_failed_or_evicted_job_again_under_the_same_name() -> None:
    job = job_of("1x2", max_retries=3)
    (container,) = check_job(job)
    assert job["spec"]["maxRetry"] == 3
    assert {(each["event"], each["action"]) for each in job["spec"]["tasks"][0]["policies"]} == {
        ("PodEvicted", "RestartJob"),
        ("PodFailed", "RestartJob"),
    }
    name = {each["name"]: each["value"] for each in container["env"]}["TORCHX_JOB_ID"]
    assert name.endswith(job["metadata"]["name"])  # by which a run knows that it goes on


def test_an_elastic_job_needs_only_its_least_machines() -> None:
    job = job_of("1:2x4", gpu=4)
    check_job(job)
    assert [task["minAvailable"] for task in job["spec"]["tasks"]] == [1, 0]
    assert "--nnodes 1:2" in job["spec"]["tasks"][0]["template"]["spec"]["containers"][0]["command"][2]


def test_values_and_words_survive_the_shell_of_the_container() -> None:
    value = "=1,2=$HOME '\"x\\"
    (container,) = check_job(job_of("1x1", "--train.run_dir", "a b$HOME", env={"ODD": value, "PLAIN": "$A ${app_id}"}))
    environ = {each["name"]: each["value"] for each in container["env"]}
    command = container["command"][2].replace("exec python", "exec printf '%s\\n' \"$ODD\" python")
    printed = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.splitlines()
    assert (printed[0], printed[-1], environ["PLAIN"]) == (value, "a b$HOME", "$A ${app_id}")


def test_kubernetes_without_an_image_or_a_queue_is_refused() -> None:
    with open_runner() as runner:
        app = build_ranks("train", ["--config", "c.yaml"], read_spec("1x1"))
        with pytest.raises(ValueError, match="no image"):
            dry_run(runner, app, "kubernetes", {"queue": "default"})
        app = build_ranks("train", ["--config", "c.yaml"], read_spec("1x1", image="registry/distrag:1"))
        with pytest.raises(ValueError, match="kubernetes's queue"):
            dry_run(runner, app, "kubernetes", {})
