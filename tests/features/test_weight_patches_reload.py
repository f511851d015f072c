"""What serves a followed folder is told of new weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.http_server import QuietHandler, serving
from tests.runs import ROOT
from tests.vllm_server import VllmServer
from xcloud.base.errors import ConfigError, DataError
from xcloud.features.weight_patches.reload import Command, Vllm, server_of


def test_a_whole_model_is_read_while_requests_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cr3t")
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    with VllmServer(tmp_path).started() as server:
        server_of(f"vllm={server.url}/").reload(tmp_path)
    assert server.requests == ["/pause", "/collective_rpc", "/resume"]
    assert set(server.keys) == {"Bearer s3cr3t"}
    assert [weights["w"].tolist() for weights in server.loaded] == [[1, 1]]


def test_no_secret_and_no_success_follows_a_redirect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cr3t")
    came: list[str | None] = []

    class Elsewhere(QuietHandler):
        def do_GET(self) -> None:
            came.append(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()

    with serving(Elsewhere) as elsewhere:

        class Redirects(QuietHandler):
            def do_POST(self) -> None:
                self.send_response(302)
                self.send_header("Location", f"{elsewhere}/x")
                self.end_headers()

        with serving(Redirects) as url, pytest.raises(DataError, match="redirected to http"):
            Vllm(url).reload(tmp_path)
    assert came and set(came) == {None}
    for file in (ROOT / "xcloud").rglob("*.py"):  # wherever else one is sent
        for line in file.read_text().splitlines():
            assert '"Authorization"' not in line or "add_unredirected_header" in line, file


def test_adapters_are_loaded_under_the_name_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"lora_A": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    with VllmServer().started() as server:
        Vllm(server.url).reload(tmp_path)
    assert server.requests == ["/v1/load_lora_adapter"] and len(server.loaded) == 1


def test_a_server_that_cannot_read_them_is_never_left_paused(tmp_path: Path) -> None:
    with VllmServer(tmp_path, fails=1).started() as server:
        with pytest.raises(DataError, match=r"/collective_rpc answers 500: \{\}"):
            Vllm(server.url).reload(tmp_path)
        assert server.requests[-1] == "/resume" and not server.is_paused
    with pytest.raises(DataError, match=r"/pause.* cannot be reached: "):
        Vllm(server.url).reload(tmp_path)


def test_a_command_gets_the_folder(tmp_path: Path) -> None:
    writes = "import sys, pathlib; pathlib.Path(sys.argv[1], 'told').touch()"
    server_of(f'command="{sys.executable}" -c "{writes}"').reload(tmp_path)
    assert (tmp_path / "told").exists()
    with pytest.raises(DataError, match="ended with exit code 3"):
        Command((sys.executable, "-c", "import sys; sys.exit(3)")).reload(tmp_path)
    with pytest.raises(DataError, match="nothing-such"):
        Command(("nothing-such",)).reload(tmp_path)


@pytest.mark.parametrize(
    "given", ["", "vllm", "vllm=localhost:8000", "command=", "sglang=http://x"]
)
def test_another_form_is_refused_with_those_there_are(given: str) -> None:
    with pytest.raises(ConfigError, match=r"--reload must be vllm=URL .* or command=WORDS"):
        server_of(given)
