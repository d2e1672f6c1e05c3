"""The files that start clusters: those of Ray's launcher against Ray's own schema, KubeRay's against its fields."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray import autoscaler
from ray.autoscaler._private.util import prepare_config, validate_config

from jobs.pretrain import pretrain
from jobs.submit import GRACE

ROOT = Path(__file__).parent.parent
LAUNCHER = ["cluster.yaml", "examples/cluster-onprem.yaml"]

# Of KubeRay, ray-operator/apis/ray/v1/{rayjob,raycluster}_types.go: all fields of a spec.
RAYJOB = {
    *("activeDeadlineSeconds", "backoffLimit", "rayClusterSpec", "submitterPodTemplate", "metadata"),
    *("clusterSelector", "submitterConfig", "managedBy", "deletionStrategy", "entrypoint", "runtimeEnvYAML", "jobId"),
    *("submissionMode", "entrypointResources", "entrypointNumCpus", "entrypointNumGpus", "ttlSecondsAfterFinished"),
    *("shutdownAfterJobFinishes", "suspend"),
}
RAYCLUSTER = {
    *("headGroupSpec", "workerGroupSpecs", "rayVersion", "enableInTreeAutoscaling", "autoscalerOptions"),
    *("headServiceAnnotations", "suspend"),
}
HEAD = {"serviceType", "headService", "enableIngress", "rayStartParams", "template"}
WORKERS = {
    *("groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams", "template"),
    "scaleStrategy",
}


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


@pytest.mark.parametrize("name", LAUNCHER)
def test_ray_takes_the_file(name: str) -> None:
    """As it is written, and as `ray up` completes it."""
    schema = Path(autoscaler.__file__).parent / "ray-schema.json"
    jsonschema.validate(read(name), json.loads(schema.read_text()))
    complete = prepare_config(read(name))
    validate_config(complete)
    types = complete["available_node_types"]
    assert complete["max_workers"] == sum(kind["max_workers"] for kind in types.values()) > 0


def test_schema_errors_are_seen() -> None:
    with pytest.raises(jsonschema.ValidationError):
        validate_config(prepare_config(read("cluster.yaml") | {"max_worker": 4}))


@pytest.mark.parametrize("name", LAUNCHER)
def test_this_project_is_installed_from_this_folder(name: str) -> None:
    config = read(name)
    (target, source), *_ = config["file_mounts"].items()
    assert (Path(target).name, source) == ("zeropp", ".")
    install = config["setup_commands"][-1]
    extras = re.search(r"\[(.*)\]", install)
    assert extras is not None
    known = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", known, re.MULTILINE) for extra in extras[1].split(","))
    assert "constraints.txt" in install
    assert any("/shared" in command for command in config["setup_commands"])
    for command in config["head_start_ray_commands"] + config["worker_start_ray_commands"]:
        assert "venv/bin/activate" in command
    # Who reaches the dashboard can start jobs.
    assert "--dashboard-host=127.0.0.1" in config["head_start_ray_commands"][-1]


def test_gpu_nodes_come_and_go() -> None:
    config = read("cluster.yaml")
    gpu = config["available_node_types"]["gpu"]
    assert gpu["resources"]["GPU"] > 0
    assert gpu["min_workers"] == 0 < gpu["max_workers"] <= config["max_workers"]
    assert config["available_node_types"][config["head_node_type"]]["resources"] == {"CPU": 0}


def test_rayjob_has_fields_that_kuberay_knows() -> None:
    job = read("examples/rayjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert spec.keys() <= RAYJOB
    assert spec["submissionMode"] in ("K8sJobMode", "HTTPMode", "InteractiveMode")
    cluster = spec["rayClusterSpec"]
    assert cluster.keys() <= RAYCLUSTER
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert groups[0].keys() <= HEAD
    for group in groups[1:]:
        assert group.keys() <= WORKERS
        assert {"groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"} <= group.keys()
    for group in groups:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())  # what KubeRay insists on
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert "/shared" in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert int(
        cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    )


def test_rayjob_starts_what_there_is() -> None:
    spec = read("examples/rayjob.yaml")["spec"]
    python, dash_m, module, *arguments = shlex.split(spec["entrypoint"])
    assert (python, dash_m, module) == ("python", "-m", "jobs.pretrain")
    pretrain.make_context("pretrain", arguments)  # raises UsageError for an unknown option
    environment = yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]
    assert int(environment[GRACE]) > 3
    pinned = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert spec["rayClusterSpec"]["rayVersion"] == pinned[1]


@pytest.mark.parametrize("name", [*LAUNCHER, "examples/rayjob.yaml"])
def test_what_a_person_has_to_fill_in_is_marked(name: str) -> None:
    assert "EDIT" in (ROOT / name).read_text()
