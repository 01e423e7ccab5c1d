"""A real vLLM server for tests: its start, greedy tokens by HTTP, its end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from vllm_updates import NEW_TOKENS, PROMPTS


class Server:
    """vLLM's server on a free port.

    Args:
        folder: the model's checkpoint.
        log: gets what the server prints.
        options: further arguments of the server.
    """

    def __init__(self, folder: Path, log: Path, *options: str) -> None:
        with socket.socket() as any_socket:
            any_socket.bind(("127.0.0.1", 0))
            port = any_socket.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self.log = log
        arguments = ["--model", str(folder), "--enforce-eager", "--max-model-len", "512", "--dtype", "bfloat16"]
        arguments += ["--gpu-memory-utilization", "0.2"]  # tests may have another engine
        arguments += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"]
        arguments += ["--weight-transfer-config", json.dumps({"backend": "sparse_opt"}), *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments],
            env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"},
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self, seconds: float = 600) -> None:  # 30 seconds on an idle machine
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.address}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        pytest.fail(f"the server has not started: {self.log.read_text()[-3000:]}")

    def tokens(self, prompts: list[list[int]] = PROMPTS, new_tokens: int = NEW_TOKENS) -> list[list[int]]:
        content = {
            "model": "tiny",
            "prompt": prompts,
            "max_tokens": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.address}/v1/completions",
            data=json.dumps(content).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            choices = json.load(response)["choices"]
        return [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
