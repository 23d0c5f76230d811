"""docker-compose.yml, the images and the proxy, read as files: no container engine needed."""

import fnmatch
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from shared.settings import GatewaySettings

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES = COMPOSE["services"]
OURS = ("gateway", "scheduler", "executor", "executor-gpu")
UNITS_S = {"s": 1, "m": 60}


def seconds(text):
    """compose's durations: 40s, 1m."""
    return float(text[:-1]) * UNITS_S[text[-1]]


def dockerfile(service):
    return (ROOT / SERVICES[service]["build"]["dockerfile"]).read_text()


def folders_inside(service):
    """{where it is mounted: what is mounted there}."""
    mounts = [mount.removesuffix(":ro").rsplit(":", 1) for mount in SERVICES[service]["volumes"]]
    return {inside: source for source, inside in mounts}


def test_it_brings_up_everything():
    assert set(SERVICES) == {"proxy", *OURS, "prometheus", "grafana"}
    assert SERVICES["gateway"]["deploy"]["replicas"] == 2
    assert {name for name, service in SERVICES.items() if "profiles" in service} == {"executor-gpu"}
    assert SERVICES["executor-gpu"]["profiles"] == ["gpu"]


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_has_no_more_power_than_it_needs(service):
    told = SERVICES[service]
    assert told["read_only"]
    (tmp,) = told["tmpfs"]
    assert re.fullmatch(r"/tmp:size=\d+m,mode=1777", tmp), "memory that has a limit"
    assert told["cap_drop"] == ["ALL"]
    assert told["security_opt"] == ["no-new-privileges:true"]
    assert not told["user"].startswith("0"), "not root"


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_says_whether_it_is_well(service):
    if service in OURS:
        assert "\nHEALTHCHECK " in dockerfile(service)
    else:
        assert SERVICES[service]["healthcheck"]["test"][0] == "CMD"


@pytest.mark.parametrize("service", OURS)
def test_our_services_share_their_sockets_and_the_user_they_belong_to(service):
    assert folders_inside(service)["/run/splitflap"] == "sockets"
    user = SERVICES[service]["user"]
    assert user == "10001:10001"
    assert f"USER {user}\n" in dockerfile(service)


@pytest.mark.parametrize("service", ["proxy", "gateway"])
def test_open_streams_get_their_time_to_finish(service):
    grace_s = seconds(SERVICES[service]["stop_grace_period"])
    assert grace_s > GatewaySettings(_cli_parse_args=[]).shutdown_timeout


def test_what_streams_need_stops_after_those_who_serve_them():
    assert SERVICES["proxy"]["depends_on"] == ["gateway"]
    assert set(SERVICES["gateway"]["depends_on"]) == {"scheduler", "executor"}


def test_nothing_is_open_to_the_network_unless_asked():
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert len(published) == 3
    assert all("127.0.0.1" in port for port in published)


def test_every_mounted_file_is_in_the_repository():
    for service in SERVICES.values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            if source.startswith("./") and source != "./models":  # that one is the user's
                assert (ROOT / source).is_dir(), mount
            elif not source.startswith("."):
                assert source in COMPOSE["volumes"], mount


def test_the_light_images_get_no_torch():
    for service in ("gateway", "scheduler"):
        told = dockerfile(service)
        assert "install --no-deps ." in told
        assert "torch" not in told.replace("No torch", "")


def test_images_are_made_of_what_the_build_context_lets_in():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = [line[1:] for line in ignored if line.startswith("!")]
    for service in OURS:
        for sources in re.findall(
            r"^COPY (?!--from)(?:--\S+ )?(.+) \S+$", dockerfile(service), re.M
        ):
            for source in sources.split():
                assert (ROOT / source).exists(), source
                assert any(source == each or source.startswith(each + "/") for each in let_in)


# ------------------------------------------------------------------------------- the proxy

NGINX = (ROOT / "ops/proxy/nginx.conf").read_text()


def directives(name):
    """The values of a directive, wherever it stands."""
    without_comments = re.sub(r"\s+#.*|^#.*", "", NGINX, flags=re.M)
    return re.findall(rf"^\s*{name}\s+(.+?);", without_comments, re.M)


def test_the_proxy_passes_on_each_token_as_it_comes():
    assert directives("proxy_buffering") == ["off"]
    assert directives("proxy_read_timeout") == ["1h"]


def test_a_request_never_goes_out_on_a_connection_that_may_have_ended():
    assert directives("proxy_http_version") == ["1.1"]
    assert "Connection close" in directives("proxy_set_header")
    assert directives("keepalive") == []


def test_the_proxy_finds_gateways_by_name_and_takes_the_least_busy():
    assert "    least_conn;" in NGINX
    (server,) = directives("server")
    assert server.startswith("gateway:8000 resolve")


def test_the_proxy_leaves_limits_of_bodies_to_the_gateway():
    (limit,) = directives("client_max_body_size")
    assert int(limit.removesuffix("m")) * 2**20 > GatewaySettings(_cli_parse_args=[]).max_body_bytes


def test_the_proxy_asks_another_gateway_for_what_it_could_not_send_to_the_first():
    assert directives("proxy_next_upstream") == ["error timeout http_503"]
    assert int(directives("proxy_next_upstream_tries")[0]) > 1
    assert directives("proxy_next_upstream_timeout") == ["10s"]


def test_what_was_sent_and_not_answered_is_its_clients_to_ask_again():
    """nginx's `$upstream_bytes_sent`, one number a gateway that was tried, the last one decides."""
    assert set(directives("error_page")) >= {
        "502 504 = $after_one_try",
        "502 504 = $after_two_tries",
    }
    for name, unsent in (("after_one_try", "@again"), ("after_two_tries", "@unreachable")):
        rules = re.search(rf"map \$upstream_bytes_sent \${name} {{(.*?)\n    }}", NGINX, re.DOTALL)
        found = dict(re.findall(r"^\s*(\".*?\"|\S+)\s+(@\w+);", rules[1], re.M))
        assert found.pop("default") == "@lost"
        assert found.pop('""') == unsent, "DNS changed before any was tried"
        ((pattern, place),) = found.items()
        assert place == unsent
        for sent, is_unsent in (
            ("0", True), ("0, 0", True), ("512, 0", True), ("0, 0 : -", True),
            ("512", False), ("10", False), ("0, 512", False), ("0 : 0, 512", False),
        ):  # fmt: skip
            assert bool(re.search(pattern.strip('"~'), sent)) == is_unsent, sent


def test_what_the_proxy_refuses_by_itself_has_the_form_of_the_gateways_errors():
    """Said again in each location: nginx hands no `error_page` down to one that has its own."""
    assert directives("error_page").count("400 404 405 413 414 494 500 501 /refused") == 3
    told = re.findall(r"return \d+ '(.*\"error\".*)\\n';", NGINX)
    assert len(told) == 3
    for text in told:
        assert set(json.loads(text)["error"]) == {"message", "type", "param", "code"}


def test_the_proxy_does_not_wait_for_ever_for_what_a_client_sends():
    """No longer than a gateway would."""
    longest_s = GatewaySettings(_cli_parse_args=[]).request_read_timeout_s
    for name in ("client_header_timeout", "client_body_timeout"):
        assert seconds(directives(name)[0]) <= longest_s


def test_who_reads_nothing_is_cut_off_by_the_gateway_which_keeps_the_stream():
    (patience,) = directives("send_timeout")
    assert seconds(patience) > 2 * GatewaySettings(_cli_parse_args=[]).slow_reader_timeout_s


def test_the_proxy_has_tls_once_a_file_is_copied():
    """Only a copy without `.example` is included, inside `server`."""
    (mask,) = [each for each in directives("include") if "tls" in each]
    example = ROOT / "ops/proxy/tls.conf.example"
    assert not fnmatch.fnmatch(f"/etc/splitflap/{example.name}", mask)
    assert fnmatch.fnmatch("/etc/splitflap/tls.conf", mask)
    assert NGINX.index("listen 8080;") < NGINX.index(mask) < NGINX.index("location /")
    assert "listen 8443 ssl;" in example.read_text()
    assert "ssl_protocols TLSv1.2 TLSv1.3;" in example.read_text()
    assert "ops/proxy/tls.conf" in (ROOT / ".gitignore").read_text().split()


def test_nginx_itself_takes_the_configuration_where_it_is_new_enough(tmp_path):
    nginx = shutil.which("nginx")
    if nginx is None or version_of(nginx) < (1, 27, 3):
        assert NGINX.count("{") == NGINX.count("}")  # all that can be said without it
        return
    resolver = tmp_path / "resolver.conf"
    resolver.write_text("resolver 127.0.0.1;")
    conf = tmp_path / "nginx.conf"
    conf.write_text(NGINX.replace("/tmp/", f"{tmp_path}/"))
    done = subprocess.run(
        [nginx, "-t", "-e", "stderr", "-c", conf], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def version_of(nginx):
    told = subprocess.run([nginx, "-v"], capture_output=True, text=True, check=True).stderr
    return tuple(map(int, re.search(r"nginx/(\d+)\.(\d+)\.(\d+)", told).groups()))
