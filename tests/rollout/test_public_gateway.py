"""The gateway for agents elsewhere: TLS by files, one port for the gateways of a process."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
import sys
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import ValidationError

from earl_core.config import parse_config
from earl_core.config.environment import EnvironmentConfig
from earl_core.config.feasibility import engines_of_a_host
from earl_core.config.gateway import GatewayConfig, check_gateway, filled
from earl_core.deployment.shapes import Hardware
from earl_core.rollout.gateway.front import Front
from earl_core.rollout.public_address import PublicAddress
from earl_core.system.errors import ConfigError
from earl_core.system.listening import listen
from tests.rollout.asking import HELLO, Asking, answering, limits
from tests.rollout.test_gateway import played

SCRIPT = str(Path(__file__).with_name("program_agent.py"))


class Files(NamedTuple):
    certfile: str
    keyfile: str


def files(folder: Path, name: str = "one", days: int = 2, address: str = "127.0.0.1") -> Files:
    """A certificate that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    title = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    held = x509.SubjectAlternativeName(
        [x509.IPAddress(ipaddress.ip_address(address)), x509.DNSName("*.trainer.example")]
    )
    made = (
        x509.CertificateBuilder()
        .subject_name(title)
        .issuer_name(title)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(until - datetime.timedelta(days=9))
        .not_valid_after(until)
        .add_extension(held, critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = Files(str(folder / f"{name}.pem"), str(folder / f"{name}.key"))
    Path(paths.certfile).write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    Path(paths.keyfile).touch(0o600)
    Path(paths.keyfile).write_bytes(private)
    return paths


def config(given: Files, **options: Any) -> GatewayConfig:
    named = {"host": "0.0.0.0", "public_url": "https://127.0.0.1:{port}/", **given._asdict()}
    return GatewayConfig(**(named | options))


@pytest.fixture
def one(tmp_path: Path) -> Files:
    return files(tmp_path)


def test_a_program_elsewhere_asks_over_tls_and_others_are_refused(one: Files) -> None:
    """Two episodes side by side: one trusts the certificate, one trusts nobody."""
    public = PublicAddress.of(config(one))
    settings = limits(max_failed_share=1.0, public=public)
    command = [sys.executable, "-S", SCRIPT]

    def play(**variables: str) -> Any:
        options = {"command": command, "task": {"does": ["number"]}, "variables": variables}
        return asyncio.run(played(answering(), "program", 2, settings, options))[0]

    for episode in play(SSL_CERT_FILE=one.certfile):
        assert (episode.finish_reason, episode.total_reward) == ("done", 0.25), episode.info
        assert episode.samples[0].tokens
    for episode in play(SSL_CERT_FILE="/dev/null"):
        assert episode.finish_reason == "environment_error"
        assert "CERTIFICATE_VERIFY_FAILED" in str(episode.info["failure"])


def test_gateways_of_a_process_share_a_port_and_each_answers_for_its_sessions(one: Files) -> None:
    public = PublicAddress.of(config(one))
    trusting = ssl.create_default_context(cafile=one.certfile)

    async def run() -> None:
        settings = limits(public=public)
        async with Asking(answering(), settings) as first, Asking(answering(), settings) as second:
            addresses = [each.gateway.public_address(each.session) for each in (first, second)]
            urls = [each["base_url"] for each in addresses]
            assert len({url.split("/")[2] for url in urls}) == 1
            assert all("//" not in url.removeprefix("https://") for url in urls)
            local = first.gateway.address(first.session)["base_url"]
            assert local.startswith("http://127.0.0.1:")
            async with httpx.AsyncClient(verify=trusting) as http:
                for mine, other in ((0, 1), (1, 0)):
                    path = f"{urls[mine]}/chat/completions"
                    for key, status in ((mine, 200), (other, 401)):
                        headers = {"Authorization": f"Bearer {addresses[key]['api_key']}"}
                        reply = await http.post(path, json=HELLO, headers=headers)
                        assert reply.status_code == status, reply.text
                unknown = urls[0].replace(first.session.name, "nobody")
                assert (await http.get(f"{unknown}/models")).status_code == 401
                assert (await http.get(f"{urls[0]}/models")).status_code == 401
                # In clear, nobody is answered.
                with pytest.raises(httpx.TransportError):
                    await http.get(urls[0].replace("https", "http") + "/models")
            assert [each.session.end(1.0, {}).turns for each in (first, second)] == [1, 1]

    asyncio.run(run())
    assert not Front._open


def test_ports_of_a_range_are_taken_in_turn(one: Files) -> None:
    async def run() -> None:
        async with Asking(answering(), limits(public=PublicAddress.of(config(one)))) as asking:
            port = int(asking.gateway.public_address(asking.session)["base_url"].split("/")[2][10:])
        taken = config(one, ports=f"{port}-{port}", host="127.0.0.1")
        with pytest.raises(ConfigError, match=r"every port of rollout.gateway.ports"):
            await Asking(answering(), limits(public=PublicAddress.of(taken))).__aenter__()
        wide = PublicAddress.of(config(one, ports=f"{port}-{port + 3}", host="127.0.0.1"))
        async with Asking(answering(), limits(public=wide)) as asking:
            url = asking.gateway.public_address(asking.session)["base_url"]
            assert int(url.split("/")[2][10:]) in range(port + 1, port + 4)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "0.0.0.0", "public_url": "https://x:{port}"}, "is not the loopback, and there"),
        ({"host": "trainer.example", "public_url": "https://x:{port}"}, "is not the loopback"),
        ({"host": "::", "public_url": "https://x:{port}"}, "is not the loopback"),
        ({"public_url": "http://trainer.example:{port}"}, "has no TLS, so keys and episodes"),
        ({"certfile": "x"}, "belong together"),
        ({"ports": "8100"}, "public_url is missing"),
        ({"ports": "8100-8000", "public_url": "https://x:{port}"}, "the first and the last"),
        ({"ports": "0", "public_url": "https://x:{port}"}, "the first and the last"),
        ({"ports": "x", "public_url": "https://x:{port}"}, "should match pattern"),
        ({"public_url": "https://x:8100"}, "does not say which port"),
        ({"ports": "8100-8101", "public_url": "https://x:8100"}, "does not say which port"),
        ({"public_url": "x:{port}"}, "is no address: begin it with https:// and a host"),
        ({"public_url": "ftp://x:{port}"}, "is no address: begin it with https:// and a host"),
        (
            {"certfile": "x", "keyfile": "y", "public_url": "http://127.0.0.1:{port}"},
            "which the listener speaks",
        ),
    ],
)
def test_an_address_that_would_not_do_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        GatewayConfig(**options)


def test_an_address_that_does(one: Files) -> None:
    for each in (
        GatewayConfig(),
        GatewayConfig(public_url="https://proxy.example/{port}"),
        GatewayConfig(public_url="http://localhost:{port}"),
        GatewayConfig(ports="8100", public_url="https://proxy.example"),
        config(one),
        config(one, public_url="https://a.trainer.example:{port}"),
    ):
        check_gateway(each, [])


def test_containers_need_more_than_the_loopback() -> None:
    def played(**options: Any) -> EnvironmentConfig:
        return EnvironmentConfig(agent="task_directories", options={"runtime": "docker", **options})

    with pytest.raises(ConfigError, match="do not reach the gateway on the loopback: set rollout"):
        check_gateway(GatewayConfig(), [played()])
    check_gateway(GatewayConfig(), [played(network="host"), played(runtime="subprocess")])
    local = GatewayConfig(public_url="http://127.0.0.1:{port}")
    with pytest.raises(ConfigError, match=r"an address of this machine's, or environment.options"):
        check_gateway(local, [played()])
    check_gateway(local, [played(network="host")])
    check_gateway(GatewayConfig(public_url="https://x:{port}"), [played()])


def test_each_engine_of_each_host_has_an_address_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EARL_HOST", "one.example")
    assert filled("https://{host}:{port}", 8100) == "https://one.example:8100"
    plain = GatewayConfig(ports="8100-8101", public_url="https://x:{port}")
    with pytest.raises(ConfigError, match=r"which of 2 hosts: put {host} into it"):
        check_gateway(plain, [], hosts=2)
    named = GatewayConfig(ports="8100-8101", public_url="https://{host}:{port}")
    check_gateway(named, [], hosts=2, engines=2)
    with pytest.raises(ConfigError, match=r"'8100-8101' has fewer ports .*range of 3 or more"):
        check_gateway(named, [], engines=3)
    config = parse_config(
        {
            "name": "x",
            "iterations": 1,
            "model": {"path": "x"},
            "environment": {"name": "prompt"},
            "rollout": {"prompts_per_iteration": 8, "group_size": 2, "max_turns": 1},
            "stages": {
                "rollout": {"replicas": 2},
                "changes": [{"iteration": 1, "rollout": {"replicas": 6}}],
            },
        }
    )
    hardware = Hardware(cpu_cores=8, memory_bytes=2**35, hosts=2)
    assert engines_of_a_host(config, hardware) == 3
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        busy = GatewayConfig(ports=f"{port}", public_url="http://127.0.0.1:{port}")
        with pytest.raises(ConfigError, match=r"every port of rollout.gateway.ports"):
            check_gateway(busy, [])


def test_files_of_tls_are_checked_before_work(tmp_path: Path, one: Files) -> None:
    def refused(given: Files, **options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            check_gateway(config(given, **options), [])
        return str(caught.value)

    assert "cannot be read (No such file" in refused(one, certfile=str(tmp_path / "no"))
    assert "cannot be read (No such file" in refused(one, keyfile=str(tmp_path / "no"))
    assert "holds no certificate in PEM form" in refused(one, certfile=one.keyfile)
    other = files(tmp_path, "other")
    assert "is not the key of the certificate" in refused(one, keyfile=other.keyfile)
    assert "is not the key of the certificate" in refused(one, keyfile=one.certfile)
    assert "and not now: renew it" in refused(files(tmp_path, "old", days=-1))
    assert "and not now" in refused(files(tmp_path, "new", days=30))
    Path(other.keyfile).chmod(0o640)
    assert "can be read by others: chmod 600" in refused(other)
    told = refused(one, public_url="https://elsewhere.example:{port}")
    assert "is for *.trainer.example, 127.0.0.1, and clients connect to elsewhere.example" in told
    assert "clients connect to 127.0.0.2" in refused(one, public_url="https://127.0.0.2:{port}")
    assert "trainer.example" in refused(one, public_url="https://a.b.trainer.example:{port}")
