"""docker-compose.yml without a Docker engine: the schema, what Compose checks beside it, and every service for real.

A service runs here as a local process: the command and environment of the file, the entrypoint of the Dockerfile, and
`redis:6379` replaced by a free port of this machine.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import redis
import yaml

from bench.ports import free_port
from producer.cli import exits
from tests.servers import DebianRedisServer, ValkeyServer

ROOT = Path(__file__).parents[1]
COMPOSE_TEXT = (ROOT / "docker-compose.yml").read_text()
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
BIN = Path(sys.executable).parent
SETTINGS = {"MILLSTREAM_MODEL": "dry-run:words", "MILLSTREAM_QUEUE": "composed"}

Service = dict[str, Any]


def interpolate(value: Any, settings: dict[str, str]) -> Any:
    """Replace `${NAME:-default}` in every string, as Compose does after it has read the YAML."""
    if isinstance(value, dict):
        return {key: interpolate(item, settings) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolate(item, settings) for item in value]
    if not isinstance(value, str):
        return value
    done = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: settings.get(match[1]) or match[2], value)
    assert "$" not in done, f"give every variable a default, as in ${{NAME:-default}}: {value}"
    return done


def compose(settings: dict[str, str]) -> dict[str, Any]:
    document: dict[str, Any] = interpolate(yaml.safe_load(COMPOSE_TEXT), settings)
    return document


SERVICES: dict[str, Service] = compose(SETTINGS)["services"]
BUILT = {name: service for name, service in SERVICES.items() if "build" in service}


def schema() -> jsonschema.Draft7Validator:
    return jsonschema.Draft7Validator(json.loads((ROOT / "tests/fixtures/compose_spec.json").read_text()))


def test_it_follows_the_schema_of_compose() -> None:
    faults = [
        f"{'.'.join(map(str, fault.path))}: {fault.message}" for fault in schema().iter_errors(compose({}))
    ]
    assert faults == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file["services"]["worker"].update(stop_grace=60),
        lambda file: file["services"]["redis"].update(ports="6379"),
        lambda file: file["services"]["redis"]["healthcheck"].update(retries=[30]),
        lambda file: file["services"]["worker"]["depends_on"].update(redis={"condition": "healthy"}),
        lambda file: file.update(service={}),
    ],
)
def test_the_schema_finds_a_fault(spoil: Callable[[dict[str, Any]], None]) -> None:
    file = copy.deepcopy(compose({}))
    spoil(file)
    assert not schema().is_valid(file)


def test_services_lean_only_on_what_is_there() -> None:
    volumes = compose({})["volumes"]
    for name, service in SERVICES.items():
        for needed, how in service.get("depends_on", {}).items():
            assert how["condition"] == "service_healthy", name
            assert "healthcheck" in SERVICES[needed], f"{name} waits for the health of {needed}"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in volumes or source.startswith("."), f"{name} mounts {source}"


def test_who_starts_when() -> None:
    """Plain `up`: Redis, the CPU's worker, that of batches. The GPU's by its profile; it alone reserves one card."""
    profiles = {name: service.get("profiles", []) for name, service in SERVICES.items()}
    assert [name for name, wanted in profiles.items() if not wanted] == ["redis", "worker", "batch-worker"]
    assert profiles["worker-gpu"] == ["gpu"]
    reserving = [name for name, service in SERVICES.items() if "deploy" in service]
    assert reserving == ["worker-gpu"]
    (card,) = SERVICES["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert card["count"] == 1, "a worker uses one, so others must not be kept from theirs"


def test_the_gpus_worker_is_the_cpus_with_another_image_and_a_card() -> None:
    """So what one of them does when it runs the other one does as well."""
    cpu, gpu = SERVICES["worker"], SERVICES["worker-gpu"]
    differing = {key for key in cpu | gpu if cpu.get(key) != gpu.get(key)}
    assert differing == {"image", "build", "profiles", "deploy"}
    assert {key for key in cpu["build"] | gpu["build"] if cpu["build"].get(key) != gpu["build"].get(key)} == {
        "args"
    }


def test_nothing_is_published_beyond_this_machine() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports, "the queue is reachable from the host"
    assert all(port.startswith("127.0.0.1:") for port in ports)


Stage = list[tuple[str, str]]
"""The instructions of one stage of a Dockerfile, those of the stage it builds on included."""


def stages() -> dict[str, Stage]:
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", DOCKERFILE.read_text()))
    found: dict[str, Stage] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            parent, _, name = rest.split()
            found[name] = [*found.get(parent, [])]
        else:
            found[name].append((instruction, rest.strip()))
    return found


def copied(stage: Stage) -> set[str]:
    """The paths of the repository that a stage copies into the image."""
    return {source for name, rest in stage if name == "COPY" for source in rest.split()[:-1]}


@pytest.mark.parametrize("name", list(BUILT))
def test_the_dockerfile_builds_what_a_service_asks_for(name: str) -> None:
    build = BUILT[name]["build"]
    assert (ROOT / build["context"] / build["dockerfile"]).samefile(DOCKERFILE)
    stage = stages()[build["target"]]
    declared = {rest.split("=")[0] for instruction, rest in stage if instruction == "ARG"}
    assert set(build.get("args", {})) <= declared
    assert ("USER", "millstream") in stage, "no root in a container"


@pytest.mark.parametrize("name", list(stages()))
def test_the_dockerfile_copies_what_there_is(name: str) -> None:
    let_through = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().split()
    for source in copied(stages()[name]):
        assert (ROOT / source).exists(), source
        assert f"!{source}" in let_through, f"{source} is kept out of the build context"


@pytest.mark.parametrize("name", ["producer", "worker"])
def test_the_image_holds_every_room_and_the_pins(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rooms = project["tool"]["importlinter"]["root_packages"]
    assert {*rooms, "pyproject.toml", "constraints.txt", project["project"]["readme"]} <= copied(
        stages()[name]
    )
    installs = [
        rest for instruction, rest in stages()[name] if instruction == "RUN" and "pip install" in rest
    ]
    assert installs
    assert all(
        call.strip().startswith("-c constraints.txt")
        for run in installs
        for call in run.split("pip install")[1:]
    )


def words(value: str | list[str]) -> list[str]:
    return shlex.split(value) if isinstance(value, str) else value


def command(name: str, replacing: list[str] | None = None) -> list[str]:
    """What the container would run; `replacing` stands for the words after `docker compose run SERVICE`."""
    service = SERVICES[name]
    entrypoint = service.get("entrypoint")
    if entrypoint is None and name in BUILT:
        stage = stages()[service["build"]["target"]]
        entrypoint = json.loads([rest for instruction, rest in stage if instruction == "ENTRYPOINT"][-1])
    program, *rest = [*words(entrypoint or []), *(replacing or words(service["command"]))]
    return [SERVER if program == "valkey-server" else str(BIN / program), *rest]


SERVER = ValkeyServer.binary() or DebianRedisServer.binary() or "valkey-server"


class Project:
    """The services as processes of this machine, each with a log, on one free port for Redis."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()

    def environment(self, name: str) -> dict[str, str]:
        given = SERVICES[name].get("environment", {})
        here = {"PATH": f"{BIN}:/usr/bin:/bin", "HOME": str(self.folder)}
        return here | {
            key: value.replace("redis:6379", f"127.0.0.1:{self.port}").replace(
                "/batches", str(self.folder / "batches")
            )
            for key, value in given.items()
        }

    @contextmanager
    def running(self, name: str, *more: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a service with more words at the end of its command. On leaving it ends in its grace."""
        log = self.folder / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*command(name), *more], env=self.environment(name), cwd=self.folder, stdout=out, stderr=out
            )
        try:
            yield process
            assert process.poll() is None, f"{name} ended by itself:\n{log.read_text()}"
            process.terminate()
            status = process.wait(timeout=seconds(SERVICES[name].get("stop_grace_period", "10s")))
            assert status == 0, f"{name} ended with {status} on SIGTERM:\n{log.read_text()}"
        finally:
            process.kill()
            process.wait()

    def run(self, name: str, replacing: list[str] | None = None) -> subprocess.CompletedProcess[str]:
        """`docker compose run --rm SERVICE [WORD...]`"""
        return subprocess.run(
            command(name, replacing),
            env=self.environment(name),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )


def seconds(duration: str) -> float:
    match = re.fullmatch(r"(\d+)s", duration)
    assert match, f"write {duration} in seconds"
    return float(match[1])


def healthy(port: int) -> bool:
    """The healthcheck of the file; by Debian's redis-cli where it is installed, else its words over a connection."""
    form, program, *arguments = SERVICES["redis"]["healthcheck"]["test"]
    assert (form, program, arguments) == ("CMD", "valkey-cli", ["-e", "ping"])
    if cli := shutil.which("redis-cli"):
        call = [cli, "-p", str(port), *arguments]
        return subprocess.run(call, capture_output=True, timeout=10).returncode == 0
    with redis.Redis(port=port) as client:
        try:
            return bool(client.execute_command(arguments[-1]) in (True, b"PONG"))
        except redis.RedisError:
            return False


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """Redis runs and is healthy; as `depends_on` has it, the others start after that."""
    project = Project(tmp_path_factory.mktemp("compose"))
    check = SERVICES["redis"]["healthcheck"]
    assert not healthy(project.port), "the check passes without a server"
    with project.running("redis", "--port", str(project.port), "--bind", "127.0.0.1") as server:
        deadline = time.monotonic() + seconds(check["interval"]) * check["retries"]
        while not healthy(project.port):
            assert server.poll() is None, (project.folder / "redis.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield project


def test_redis_keeps_what_it_accepted(project: Project) -> None:
    with redis.Redis(port=project.port, decode_responses=True) as client:
        settings = client.config_get("appendonly", "maxmemory", "maxmemory-policy")
    assert settings["appendonly"] == "yes"
    assert settings["maxmemory-policy"] == "noeviction"
    assert int(settings["maxmemory"]) > 0


def test_a_job_goes_from_producer_through_worker_and_back(project: Project) -> None:
    with project.running("worker"):
        asked = project.run("producer")
    assert asked.returncode == 0, asked.stderr
    assert "What is the capital of France?" in asked.stdout


def test_a_bulk_run_goes_through_the_producer(project: Project) -> None:
    rows = [{"custom_id": f"row-{number}", "prompt": f"say {number}"} for number in range(20)]
    (project.folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with project.running("worker"):
        done = project.run("producer", ["generate", "in.jsonl", "-o", "out.jsonl"])
    assert done.returncode == 0, done.stderr
    written = [json.loads(line) for line in (project.folder / "out.jsonl").read_text().splitlines()]
    assert [row["custom_id"] for row in written] == [row["custom_id"] for row in rows]


def test_a_batch_goes_through_who_works_on_batches(project: Project) -> None:
    (project.folder / "batch.jsonl").write_text('{"prompt": "say 1"}\n')
    with project.running("worker"), project.running("batch-worker"):
        submitted = project.run("producer", ["batch", "submit", "batch.jsonl"])
        assert submitted.returncode == 0, submitted.stderr
        fetch = ["batch", "fetch", submitted.stdout.strip(), "-o", "fetched.jsonl"]
        deadline = time.monotonic() + 60
        while (fetched := project.run("producer", fetch)).returncode == exits.NOT_YET:
            assert time.monotonic() < deadline, (project.folder / "batch-worker.log").read_text()
    assert fetched.returncode == 0, fetched.stderr
    row = json.loads((project.folder / "fetched.jsonl").read_text())
    assert row["completion"] == "say 1"


def test_who_has_to_do_with_batches_sees_one_folder() -> None:
    """The volume's folder is made in the image: what Docker makes by itself belongs to root."""
    made = {
        path
        for name, rest in stages()["producer"]
        if name == "RUN" and "install -d -o millstream" in rest
        for path in rest.split()
        if path.startswith("/")
    }
    for name in ("batch-worker", "producer"):
        folder = SERVICES[name]["environment"]["MILLSTREAM_BATCH_DIR"]
        assert f"batches:{folder}" in SERVICES[name]["volumes"]
        assert folder in made
