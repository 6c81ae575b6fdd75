"""Which rank a process is, from what its launcher says; and the examples for each launcher."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]

from isthmus.errors import UserError
from isthmus.job import Address, CloudSpec, load_job
from isthmus.train.launch import find_rank, first_host
from isthmus.wan.handshake import RankSpec

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_JOB_NODELIST": "gpu[006-008]",
}


def cloud(ranks: int) -> CloudSpec:
    return CloudSpec(name="east", ranks=ranks)


def test_torchrun() -> None:
    assert find_rank(TORCHRUN, cloud(4)) == RankSpec(
        rank=3,
        num_ranks=4,
        local_rank=1,
        master=Address(host="10.0.0.1", port=29500),
        is_served=True,
    )


def test_slurm_meets_at_the_first_node_at_a_port_of_the_job() -> None:
    spec = find_rank(SLURM, cloud(16))
    assert (spec.rank, spec.num_ranks, spec.local_rank) == (9, 16, 1)
    assert spec.master == Address(host="gpu007", port=24567)
    assert not spec.is_served
    other = find_rank({**SLURM, "SLURM_JOB_ID": "1234568"}, cloud(16))
    assert other.master != spec.master


def test_what_the_user_sets_goes_before_slurms_own() -> None:
    spec = find_rank({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "1234"}, cloud(16))
    assert spec.master == Address(host="head", port=1234)


def test_an_indexed_job() -> None:
    environment = {"JOB_COMPLETION_INDEX": "2", "MASTER_ADDR": "west-0.west"}
    spec = find_rank(environment, cloud(3))
    assert (spec.rank, spec.num_ranks, spec.local_rank) == (2, 3, 0)
    assert spec.master == Address(host="west-0.west", port=29400)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[007-009,12],login1", "gpu007"),
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("a[3]", "a3"),
        ("rack[1-2]-ib,x", "rack1-ib"),
    ],
)
def test_the_first_of_slurms_nodes(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    "environment",
    [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, {"SLURM_PROCID": "0"}],
    ids=["none", "one task", "no number of tasks"],
)
def test_a_cloud_of_one_rank_needs_no_launcher(environment: dict[str, str]) -> None:
    assert find_rank(environment, cloud(1)) == RankSpec()


@pytest.mark.parametrize(
    ("environment", "ranks", "message"),
    [
        ({}, 2, "nothing says which of them"),
        (TORCHRUN, 8, "8 ranks in the job, but 4 were started"),
        ({**TORCHRUN, "RANK": "4"}, 4, "cannot be rank 4"),
        ({**TORCHRUN, "RANK": "x"}, 4, "RANK is 'x', which is no number from 0"),
        ({**TORCHRUN, "RANK": "-1"}, 4, "RANK is '-1', which is no number from 0"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, 4, "WORLD_SIZE is '0', which is no number from 1"),
        ({**TORCHRUN, "WORLD_SIZE": "9" * 5000}, 4, "WORLD_SIZE is '999"),
        ({**TORCHRUN, "LOCAL_RANK": "one"}, 4, "LOCAL_RANK is 'one'"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, 4, "MASTER_PORT is 'http', which is no number from 1 to 65535"),
        ({**TORCHRUN, "MASTER_PORT": "0"}, 4, "MASTER_PORT is '0', which is no number from 1 to 65535"),
        ({**TORCHRUN, "MASTER_PORT": "65536"}, 4, "MASTER_PORT is '65536', which is no number from 1 to"),
        ({**SLURM, "MASTER_PORT": "70000"}, 16, "MASTER_PORT is '70000'"),
        ({**SLURM, "SLURM_NTASKS": "many"}, 16, "SLURM_NTASKS is 'many'"),
        ({**SLURM, "SLURM_PROCID": "1.5"}, 16, "SLURM_PROCID is '1.5'"),
        ({**SLURM, "SLURM_LOCALID": ""}, 16, "SLURM_LOCALID is not set"),
        ({**SLURM, "SLURM_JOB_ID": "x"}, 16, "SLURM_JOB_ID is 'x'"),
        ({"SLURM_PROCID": "0"}, 2, "SLURM_JOB_NODELIST is not set"),
        ({"JOB_COMPLETION_INDEX": "x"}, 2, "JOB_COMPLETION_INDEX is 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, 2, "MASTER_ADDR is not set"),
        ({"JOB_COMPLETION_INDEX": "0"}, 2, "MASTER_ADDR is not set"),
        ({**SLURM, "SLURM_STEP_NODELIST": "[x"}, 16, "no list of Slurm's nodes"),
    ],
)
def test_what_cannot_be_is_one_sentence_with_its_cure(
    environment: dict[str, str], ranks: int, message: str
) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        find_rank(environment, cloud(ranks))
    assert caught.value.hint
    assert "\n" not in caught.value.message


def words(script: str) -> list[str]:
    """A shell script's words, with lines that go on joined."""
    text = script.replace("\\\n", " ")
    return [word for line in text.splitlines() for word in shlex.split(line, comments=True)]


def option(found: list[str], name: str) -> str:
    return found[found.index(name) + 1]


def test_the_example_of_torchrun_starts_the_ranks_of_its_job() -> None:
    job = load_job(EXAMPLES / "torchrun" / "job.toml")
    found = words((EXAMPLES / "torchrun" / "start.sh").read_text())
    number = int(option(found, "--nnodes")) * int(option(found, "--nproc-per-node"))
    assert {one.ranks for one in job.cloud} == {number}
    assert int(option(found, "--max-restarts")) > 0
    assert found[found.index("-m") + 1 : found.index("-m") + 4] == ["isthmus", "run", "job.toml"]


def test_the_example_of_slurm_gives_every_task_a_rank() -> None:
    east = load_job(EXAMPLES / "torchrun" / "job.toml").cloud_named("east")
    script = (EXAMPLES / "slurm" / "east.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", script, re.MULTILINE))
    num_nodes, per_node = int(asked["nodes"]), int(asked["ntasks-per-node"])
    assert int(asked["gpus-per-node"]) == per_node
    specs = [
        find_rank(
            {
                "SLURM_PROCID": str(task),
                "SLURM_NTASKS": str(num_nodes * per_node),
                "SLURM_LOCALID": str(task % per_node),
                "SLURM_JOB_ID": "77",
                "SLURM_STEP_NODELIST": f"gpu[1-{num_nodes}]",
            },
            east,
        )
        for task in range(num_nodes * per_node)
    ]
    assert [spec.rank for spec in specs] == list(range(east.ranks))
    assert {spec.master for spec in specs} == {Address(host="gpu1", port=20077)}
    assert option(words(script), "--cloud") == "east"


@pytest.mark.parametrize(("code", "is_requeued"), [(0, False), (1, True), (2, False), (137, True)])
def test_the_example_of_slurm_starts_again_what_a_new_start_can_mend(
    tmp_path: Path, code: int, is_requeued: bool
) -> None:
    stand_ins = {"isthmus": "exit 0", "srun": f"exit {code}", "scontrol": 'echo "$*" > requeued'}
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "77",
    }
    done = subprocess.run(["bash", EXAMPLES / "slurm" / "east.sbatch"], env=environment, check=False)
    assert done.returncode == code
    requeued = tmp_path / "requeued"
    assert (requeued.read_text() if requeued.exists() else None) == ("requeue 77\n" if is_requeued else None)


def check_schemas(text: str) -> None:
    """Hold all documents to the newest schemas there are, in which unknown fields are errors."""
    for document in yaml.safe_load_all(text):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_the_example_of_kubernetes_keeps_to_its_schemas() -> None:
    check_schemas((EXAMPLES / "kubernetes" / "west.yaml").read_text())


@pytest.mark.parametrize(
    ("field", "misspelled"),
    [("publishNotReadyAddresses", "publishNotReadyAdresses"), ("volumeMounts", "volumeMount")],
)
def test_a_misspelled_field_of_kubernetes_is_refused(field: str, misspelled: str) -> None:
    text = (EXAMPLES / "kubernetes" / "west.yaml").read_text()
    assert f"{field}:" in text
    with pytest.raises(kubernetes_validate.ValidationError, match=misspelled):
        check_schemas(text.replace(f"{field}:", f"{misspelled}:"))


def test_the_example_of_kubernetes_is_a_service_and_an_indexed_job() -> None:
    west = load_job(EXAMPLES / "torchrun" / "job.toml").cloud_named("west")
    text = (EXAMPLES / "kubernetes" / "west.yaml").read_text()
    service, job = yaml.safe_load_all(text)
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    # Rank 0 must be found before it is ready, and the others while it waits for them.
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == west.ranks
    template = spec["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    (container,) = template["spec"]["containers"]
    _check_container(container, template["spec"], west)
    environment = {one["name"]: one["value"] for one in container["env"]}
    first_pod = f"{job['metadata']['name']}-0.{template['spec']['subdomain']}"
    for index in range(west.ranks):
        spec = find_rank({**environment, "JOB_COMPLETION_INDEX": str(index)}, west)
        assert spec.rank == index
        assert spec.master == Address(host=first_pod, port=service["spec"]["ports"][0]["port"])


def _check_container(container: dict[str, Any], pod: dict[str, Any], west: CloudSpec) -> None:
    assert container["command"][:3] == ["isthmus", "run", "job.toml"]
    assert option(container["command"], "--cloud") == west.name
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
    assert all(isinstance(one["value"], str) for one in container["env"])
